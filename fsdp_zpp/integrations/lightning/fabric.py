"""The strategies for the Fabric of ``lightning.fabric``.

    from fsdp_zpp import Strategy
    from fsdp_zpp.integrations.lightning.fabric import FSDPStrategy

    fabric = Fabric(strategy=FSDPStrategy(sharding_strategy=Strategy.zeropp(), auto_wrap_policy={Layer}), ...)

What they add to Lightning's: checkpoints that hold an optimizer hold codec state, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
from fsdp_zpp.frozen.files.whole_state_dicts import with_quantized_weights, without_quantized_weights
from fsdp_zpp.integrations._base_files import save_base_identity
from fsdp_zpp.integrations._codec_files import load_codec_state, remove_codec_state, save_codec_state
from fsdp_zpp.integrations._cut_off_saves import MarkedSave, check_complete

from .checkpoint_files import CheckpointFiles, FilesOfFSDP, FilesOfModelParallel
from .checks import (
    announce_node_size,
    check_base,
    check_data_parallel,
    check_no_codec_state,
    local_path,
    split_sharding_strategy,
)
from .wrapping import wrapped_on_cpu

_SHARDED = (FullyShardedDataParallel, FSDPModule)

State = dict[str, nn.Module | Optimizer | Any]
"""What Fabric saves and loads, by name."""


class WholeCheckpoints(CheckpointFiles, ParallelStrategy):
    """A strategy whose checkpoints are whole.

    Those that are files have the quantized weights, dequantized; sharded ones tell which base they were trained on.
    Both hold codec state if they hold an optimizer, to resume bit for bit.
    """

    def __repr__(self) -> str:
        """For the error of a Fabric of another package, or of a Trainer, which says what it wants instead."""
        return f"<{type(self).__name__} for the Fabric of lightning.fabric>"

    def setup_environment(self) -> None:
        """As Lightning's."""
        assert self.parallel_devices is not None
        announce_node_size(len(self.parallel_devices))
        super().setup_environment()

    def save_checkpoint(
        self,
        path: _PATH,
        state: State,
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """As Lightning's, with the quantized weights in a file, and codec state beside it.

        Raises:
            TypeError: If ``state`` holds codec state itself.
            ValueError: If ``path`` is remote.
        """
        check_no_codec_state(state.values())
        path = local_path(self.broadcast(path))
        with MarkedSave(path):
            model, optimizers = _model_in(state), _optimizers_in(state)
            with self._with_quantized_weights(model):
                super().save_checkpoint(path, state, storage_options, filter)
            if model is not None:
                save_base_identity(model, path)
            if model is not None and optimizers:
                save_codec_state(model, optimizers, path)
            elif self.is_global_zero:
                remove_codec_state(path)

    def load_checkpoint(
        self,
        path: _PATH,
        state: nn.Module | Optimizer | State | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """As Lightning's, and codec state beside it.

        Raises:
            TypeError: If ``state`` holds codec state itself.
            ValueError: If the save was cut off, if codec state was saved for another model, or under another
                configuration, or if the model has another quantized base than it had then.
        """
        objects: State = state if isinstance(state, dict) else {"": state}
        check_no_codec_state(objects.values())
        path = local_path(self.broadcast(path))
        check_complete(path)
        if (model := _model_in(objects)) is None:
            return super().load_checkpoint(path, state, strict, weights_only)
        keys = [key for key, value in objects.items() if value is model and key]
        has_base = check_base(model, path, keys, partial(self._read, weights_only=weights_only))
        with without_quantized_weights(model) if has_base else nullcontext():
            rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
        if optimizers := _optimizers_in(objects):
            load_codec_state(model, optimizers, path)
        return rest

    def _with_quantized_weights(self, model: nn.Module | None) -> AbstractContextManager[None]:
        if model is None or not self._saves_files:
            return nullcontext()
        return with_quantized_weights(model, kept=self.is_global_zero)


class FSDPStrategy(FilesOfFSDP, WholeCheckpoints, LightningFSDPStrategy):
    """Lightning's FSDPStrategy, whose ``sharding_strategy`` may be a ``fsdp_zpp.Strategy``.

    Args:
        sharding_strategy: A ``fsdp_zpp.Strategy``, or what Lightning takes.
        **arguments: As Lightning's. With a ``fsdp_zpp.Strategy``, ``device_mesh`` must be one-dimensional.

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
        """As Lightning's."""
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
        """As Lightning's.

        Raises:
            ValueError: If the model is sharded over other ranks than those to which Lightning gives data of their own.
        """
        module = super().setup_module(module)
        check_data_parallel(module, self.device_mesh)
        return module


def _optimizers_in(state: State) -> list[Optimizer]:
    return [value for value in state.values() if isinstance(value, Optimizer)]


def _model_in(state: State) -> nn.Module | None:
    """The model that FSDP has sharded, if any; Lightning sees to it that there is one. Metrics may be beside it."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    return next((module for module in modules if any(isinstance(each, _SHARDED) for each in module.modules())), None)
