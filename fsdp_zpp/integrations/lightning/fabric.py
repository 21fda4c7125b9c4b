"""Strategies for the Fabric of ``lightning.fabric``.

    from fsdp_zpp import Strategy
    from fsdp_zpp.integrations.lightning.fabric import FSDPStrategy

    fabric = Fabric(strategy=FSDPStrategy(sharding_strategy=Strategy.zeropp(), auto_wrap_policy={Layer}), ...)

They add to Lightning's: checkpoints that hold an optimizer hold codec state, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies import (
    FSDPStrategy as LightningFSDPStrategy,
    ModelParallelStrategy as LightningModelParallelStrategy,
    ParallelStrategy,
)
from lightning.fabric.utilities.types import _PATH
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.integrations._codec_files import load_codec_state

from .checkpoint_files import CheckpointFiles, FilesOfFSDP, FilesOfModelParallel
from .checks import (
    announce_node_size,
    check_data_parallel,
    check_no_codec_state,
    local_path,
    split_sharding_strategy,
)
from .wrapping import wrapped_on_cpu

_SHARDED = (FullyShardedDataParallel, FSDPModule)

State = dict[str, nn.Module | Optimizer | Any]
"""Objects that Fabric saves and loads, by name."""


class WholeCheckpoints(CheckpointFiles, ParallelStrategy):
    """A strategy for Fabric whose checkpoints are whole.

    Those that are files have the quantized weights, dequantized; sharded ones tell which base they were trained on.
    Both hold codec state if they hold an optimizer, to resume bit for bit.
    """

    def __repr__(self) -> str:
        """Name the Fabric that takes it, for the error of a Trainer or of another package's Fabric."""
        return f"<{type(self).__name__} for the Fabric of lightning.fabric>"

    def setup_environment(self) -> None:
        """Set up the process group as Lightning does, and tell strategies the size of a node."""
        assert self.parallel_devices is not None
        announce_node_size(len(self.parallel_devices))
        super().setup_environment()

    def save_checkpoint(
        self,
        path: _PATH,
        state: State,
        storage_options: object = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save as Lightning does, with the quantized weights in a file, and codec state beside it.

        Raises:
            TypeError: If ``state`` holds codec state itself.
            ValueError: If ``path`` is remote.
        """
        check_no_codec_state(state.values())
        path = local_path(self.broadcast(path))
        model = _model_in(state)
        with self._saving(path, model, _optimizers_in(state)), self._with_quantized_weights(model):
            super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(
        self,
        path: _PATH,
        state: nn.Module | Optimizer | State | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, object]:
        """Load as Lightning does, and codec state from beside it.

        Raises:
            TypeError: If ``state`` holds codec state itself.
            ValueError: If the save was cut off, if codec state was saved for another model, or under another
                configuration, or if the model has another quantized base than it had then.
        """
        objects: State = state if isinstance(state, dict) else {"": state}
        check_no_codec_state(objects.values())
        path = local_path(self.broadcast(path))
        model = _model_in(objects)
        keys = [key for key, value in objects.items() if value is model and key]
        with self._loading(path, model, keys, weights_only):
            rest: dict[str, object] = super().load_checkpoint(path, state, strict, weights_only)
        if model is not None and (optimizers := _optimizers_in(objects)):
            load_codec_state(model, optimizers, path)
        return rest


class FSDPStrategy(FilesOfFSDP, WholeCheckpoints, LightningFSDPStrategy):
    """Lightning's FSDPStrategy, whose ``sharding_strategy`` may be a ``fsdp_zpp.Strategy``.

    Args:
        sharding_strategy: A ``fsdp_zpp.Strategy``, or what Lightning takes.
        **arguments: As Lightning's. With a ``fsdp_zpp.Strategy``, ``device_mesh`` must be a mesh, not a pair of sizes.

    Raises:
        TypeError: If ``sharding_strategy`` is the class Strategy itself.
        ValueError: If an argument contradicts it.

    Examples:
        >>> fabric = Fabric(strategy=FSDPStrategy(sharding_strategy=Strategy.zeropp(), auto_wrap_policy={Layer}))
    """

    def __init__(
        self, *, sharding_strategy: Strategy | ShardingStrategy | str = "FULL_SHARD", **arguments: Any
    ) -> None:
        super().__init__(sharding_strategy=split_sharding_strategy(sharding_strategy, arguments), **arguments)
        if isinstance(sharding_strategy, Strategy):
            self.sharding_strategy: Any = sharding_strategy

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap the module with FSDP as Lightning does, on a CPU, too."""
        with wrapped_on_cpu(module, self, self._fsdp_kwargs) as wrapped:
            return super().setup_module(wrapped)


class ModelParallelStrategy(FilesOfModelParallel, WholeCheckpoints, LightningModelParallelStrategy):
    """Lightning's ModelParallelStrategy, for models that ``parallelize_fn`` shards by ``fsdp_zpp.fully_shard``.

    Arguments are Lightning's, with its defaults: without tensor parallelism pass ``data_parallel_size``, the number of
    all ranks, and ``tensor_parallel_size=1``. With it, pass ``mesh=device_mesh["data_parallel"]`` to
    ``fsdp_zpp.fully_shard``.

    Examples:
        >>> fabric = Fabric(strategy=ModelParallelStrategy(shard, data_parallel_size=16, tensor_parallel_size=1), ...)
    """

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module as Lightning does, by ``parallelize_fn``, and check over which ranks it was sharded.

        Raises:
            ValueError: If the model is sharded over other ranks than those to which Lightning gives data of their own.
        """
        module = super().setup_module(module)
        check_data_parallel(module, self.device_mesh)
        return module


def _optimizers_in(state: State) -> list[Optimizer]:
    return [value for value in state.values() if isinstance(value, Optimizer)]


def _model_in(state: State) -> nn.Module | None:
    """Return the model that FSDP has sharded, if any; metrics may be beside it."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    return next((module for module in modules if any(isinstance(each, _SHARDED) for each in module.modules())), None)
