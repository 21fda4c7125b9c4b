"""Strategies for the Fabric of ``lightning.fabric``.

    from fsdp_zpp import Strategy
    from fsdp_zpp.integrations.lightning.fabric import FSDPStrategy

    fabric = Fabric(strategy=FSDPStrategy(sharding_strategy=Strategy.zeropp(), auto_wrap_policy={Layer}), ...)

They add to Lightning's: checkpoints that hold an optimizer hold codec state, too.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.strategies import (
    FSDPStrategy as LightningFSDPStrategy,
    ModelParallelStrategy as LightningModelParallelStrategy,
    ParallelStrategy,
)
from lightning.fabric.utilities.load import _lazy_load
from lightning.fabric.utilities.types import _PATH
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

from fsdp_zpp.comm.agreement import from_first_rank
from fsdp_zpp.frozen.hugging_face import quantized_names, with_quantized_weights, without_quantized_weights
from fsdp_zpp.integrations._common import (
    MarkedSave,
    check_base_identity,
    check_complete,
    load_codec_state,
    remove_codec_state,
    save_base_identity,
    save_beside,
)
from fsdp_zpp.names import model_name
from fsdp_zpp.runtime.api import check_instance
from fsdp_zpp.runtime.checkpoint import CodecState
from fsdp_zpp.runtime.unit import StrategyUnit, named_units
from fsdp_zpp.strategy.strategy import Strategy

if TYPE_CHECKING:
    from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
    from lightning.pytorch.strategies import FSDPStrategy as TrainerFSDPStrategy


# ---- checks
#
# Checks that Lightning's strategies make before they shard or load anything.


def check_data_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise if ``model`` is sharded over other ranks than those to which Lightning gives data of their own."""
    expected = dist.get_process_group_ranks(mesh["data_parallel"].get_group())
    for unit, name in named_units(model).items():
        if not isinstance(unit, StrategyUnit) or unit.ranks.group is None or unit.stock:
            continue  # torch does it all, and what it accepts is Lightning's to say
        ranks = dist.get_process_group_ranks(unit.ranks.group)
        if ranks != expected:
            sizes = dict(zip(("data_parallel_size", "tensor_parallel_size"), mesh.shape, strict=True))
            raise ValueError(
                f"{name or 'the model'} is sharded over the ranks {ranks}, but with {sizes} Lightning gives data of "
                f"their own to the ranks {expected}; without tensor parallelism, pass data_parallel_size="
                f"{dist.get_world_size()}, tensor_parallel_size=1 to ModelParallelStrategy; with it, pass "
                'mesh=device_mesh["data_parallel"] to fully_shard'
            )


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a checkpoint; raise if it is remote, where Lightning's strategies for FSDP can't write."""
    if "://" in str(path):
        raise ValueError(f"{path} is remote, and sharded checkpoints are written to a disk: save there, and upload it")
    return Path(path)


# ---- wrapping
#
# FSDP instances around a model of Lightning's, including those that Lightning can't make.

_POLICY = "auto_wrap_policy"


@contextmanager
def wrapped_on_cpu(
    model: nn.Module, strategy: FabricFSDPStrategy | TrainerFSDPStrategy, arguments: dict[str, Any]
) -> Iterator[nn.Module]:
    """Return a context with FSDP around ``model`` on a CPU; elsewhere with ``model`` itself, for Lightning to wrap.

    In the context no policy is among ``arguments``, which Lightning passes on to FSDP: it would warn that it skips
    modules that are wrapped already.
    """
    if strategy.root_device.type != "cpu":
        yield model
        return
    if strategy._state_dict_type == "full":
        # Lightning has FSDP move what it gathers to the CPU. What is there already, torch does not copy, and then it
        # frees the weights, and gathers the next moments into the memory of the last.
        raise ValueError(
            'state_dict_type="full" of a model on a CPU makes torch save memory that it has freed or reused; '
            'pass state_dict_type="sharded"'
        )
    if outermost_fsdp(model):
        yield model
        return
    # Lightning passes FSDP the index of the device alone. A CPU has none, and without a device FSDP wants a GPU.
    wrapped = FullyShardedDataParallel(
        model,
        cpu_offload=strategy.cpu_offload,
        mixed_precision=strategy.mixed_precision_config,
        sharding_strategy=strategy.sharding_strategy,
        device_id=strategy.root_device,
        **arguments,
    )
    policy = {_POLICY: arguments.pop(_POLICY)} if _POLICY in arguments else {}
    try:
        yield wrapped
    finally:
        arguments.update(policy)


def outermost_fsdp(model: nn.Module) -> list[FullyShardedDataParallel]:
    """Return the FSDP instances of ``model`` that are in no other: itself, unless users wrap parts of it."""
    if isinstance(model, FullyShardedDataParallel):
        return [model]
    return [instance for child in model.children() for instance in outermost_fsdp(child)]


# ---- shared
#
# Parts of Lightning's two strategies for FSDP that Trainer and Fabric share.

Content = Mapping[str, Any]
"""Content of a checkpoint that is a file."""


class CheckpointFiles(ABC):
    """Completes a strategy's checkpoints: with quantized weights or the identity of a base, and with codec state."""

    is_global_zero: bool
    parallel_devices: list[torch.device] | None
    _taken_by: str

    @property
    @abstractmethod
    def _saves_files(self) -> bool:
        """Whether checkpoints are files, with everything gathered."""

    @abstractmethod
    def _read(self, file: Path, weights_only: bool | None) -> Content:
        """Read a file as Lightning will, without the tensors' values."""

    def __repr__(self) -> str:
        """Name who takes it, for the error of another one, or of another package."""
        return f"<{type(self).__name__} for the {self._taken_by}>"

    def setup_environment(self) -> None:
        assert self.parallel_devices is not None
        # torchrun sets it, and Lightning's own launchers do not.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(self.parallel_devices)))
        super().setup_environment()  # type: ignore[misc]  # Lightning's

    @contextmanager
    def _saving(self, path: Path, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Return a context in which Lightning saves; its end adds a base's identity and codec state. Collective."""
        with MarkedSave(path) as save:
            yield
            if model is not None and optimizers:
                save_beside(model, optimizers, path, save.token)
                return
            if model is not None:
                save_base_identity(model, path, save.token)
            if self.is_global_zero:
                remove_codec_state(path)

    @contextmanager
    def _loading(
        self, path: Path, model: nn.Module | None, keys: Collection[str], weights_only: bool | None
    ) -> Iterator[None]:
        """Return a context for Lightning to load, if the checkpoint is complete and of the model's base. Collective.

        Args:
            path: Lightning's file or folder, the same on all ranks.
            model: The model, if one is loaded.
            keys: Where in it the model's weights may be; empty if it is a bare state dict.
            weights_only: As in Lightning.
        """
        check_complete(path)
        if model is None:
            yield
        elif check_base_identity(model, path):
            with without_quantized_weights(model):
                yield
        else:
            if quantized := quantized_names(model):
                names = self._names_in(path, keys, weights_only) if dist.get_rank() == 0 else set()
                if overlap := from_first_rank(sorted(quantized & names)):
                    raise ValueError(
                        f"{path} has values for {len(overlap)} weights that are quantized in this {model_name(model)} "
                        f"({overlap[0]}, ...), and nothing beside it says that they are the same: load them into the "
                        "model before the strategy shards it, or remove them from the checkpoint if the model has "
                        "them already"
                    )
            yield

    def _names_in(self, checkpoint: Path, keys: Collection[str], weights_only: bool | None) -> set[str]:
        """Return the names of weights in a checkpoint; none if it can't be read, which Lightning will report."""
        try:
            if checkpoint.is_dir():
                saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
                return {name.removeprefix(f"{key}.") for name in saved for key in keys}
            content = self._read(checkpoint, weights_only)
            return set(content).union(*(content.get(key, ()) for key in keys))
        except Exception:
            return set()

    def _with_quantized_weights(self, model: nn.Module | None) -> AbstractContextManager[None]:
        if model is None or not self._saves_files:
            return nullcontext()
        return with_quantized_weights(model)


class ByFSDP(CheckpointFiles):
    """Base of both FSDPStrategies."""

    _state_dict_type: Literal["full", "sharded"]

    def __init__(
        self, *, sharding_strategy: Strategy | ShardingStrategy | str = "FULL_SHARD", **arguments: Any
    ) -> None:
        check_instance("sharding_strategy", sharding_strategy)
        own = isinstance(sharding_strategy, Strategy)
        mesh = arguments.get("device_mesh")
        if own and mesh is not None and not isinstance(mesh, DeviceMesh):
            raise ValueError(
                f"device_mesh={mesh!r} splits the ranks as HYBRID_SHARD does; a Strategy takes gpus_per_node instead: "
                'Strategy("III", gpus_per_node=...) shards inside each node and replicates across nodes'
            )
        # Lightning reads the name of it, and checks all other ones.
        super().__init__(  # type: ignore[call-arg]  # Lightning's
            sharding_strategy="FULL_SHARD" if own else sharding_strategy, **arguments
        )
        if own:
            self.sharding_strategy: Any = sharding_strategy

    @property
    def _saves_files(self) -> bool:
        return self._state_dict_type == "full"

    def _read(self, file: Path, weights_only: bool | None) -> Content:
        content: Content = _lazy_load(file)
        return content


class ByModelParallel(CheckpointFiles):
    """Base of both ModelParallelStrategies."""

    _save_distributed_checkpoint: bool

    @property
    def _saves_files(self) -> bool:
        return not self._save_distributed_checkpoint

    def _read(self, file: Path, weights_only: bool | None) -> Content:
        content: Content = torch.load(file, mmap=True, map_location="cpu", weights_only=weights_only)
        return content


# ---- fabric

_SHARDED = (FullyShardedDataParallel, FSDPModule)

State = dict[str, nn.Module | Optimizer | Any]
"""Objects that Fabric saves and loads, by name."""


class WholeCheckpoints(CheckpointFiles, ParallelStrategy):
    """A strategy for Fabric whose checkpoints are whole.

    Those that are files have the quantized weights, dequantized; sharded ones tell which base they were trained on.
    Both hold codec state if they hold an optimizer, to resume bit for bit.
    """

    _taken_by = "Fabric of lightning.fabric"

    def save_checkpoint(
        self,
        path: _PATH,
        state: State,
        storage_options: object = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        _check_no_codec_state(state)
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
        objects: State = state if isinstance(state, dict) else {"": state}
        _check_no_codec_state(objects)
        path = local_path(self.broadcast(path))
        model = _model_in(objects)
        keys = [key for key, value in objects.items() if value is model and key]
        with self._loading(path, model, keys, weights_only):
            rest: dict[str, object] = super().load_checkpoint(path, state, strict, weights_only)
        if model is not None and (optimizers := _optimizers_in(objects)):
            load_codec_state(model, optimizers, path)
        return rest


class FSDPStrategy(ByFSDP, WholeCheckpoints, LightningFSDPStrategy):
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

    def setup_module(self, module: nn.Module) -> nn.Module:
        with wrapped_on_cpu(module, self, self._fsdp_kwargs) as wrapped:
            return super().setup_module(wrapped)


class ModelParallelStrategy(ByModelParallel, WholeCheckpoints, LightningModelParallelStrategy):
    """Lightning's ModelParallelStrategy, for models that ``parallelize_fn`` shards by ``fsdp_zpp.fully_shard``.

    Arguments are Lightning's, with its defaults: without tensor parallelism pass ``data_parallel_size``, the number of
    all ranks, and ``tensor_parallel_size=1``. With it, pass ``mesh=device_mesh["data_parallel"]`` to
    ``fsdp_zpp.fully_shard``.

    Examples:
        >>> fabric = Fabric(strategy=ModelParallelStrategy(shard, data_parallel_size=16, tensor_parallel_size=1), ...)
    """

    def setup_module(self, module: nn.Module) -> nn.Module:
        module = super().setup_module(module)
        check_data_parallel(module, self.device_mesh)
        return module


def _check_no_codec_state(state: State) -> None:
    if any(isinstance(value, CodecState) for value in state.values()):
        raise TypeError(
            "the state holds a CodecState, and Fabric would save only rank 0's; leave it out: the strategy saves and "
            "loads codec state together with the optimizer"
        )


def _optimizers_in(state: State) -> list[Optimizer]:
    return [value for value in state.values() if isinstance(value, Optimizer)]


def _model_in(state: State) -> nn.Module | None:
    """Return the model that FSDP has sharded, if any; metrics may be beside it."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    return next((module for module in modules if any(isinstance(each, _SHARDED) for each in module.modules())), None)
