"""Lightning's FSDPStrategy and ModelParallelStrategy for ``lightning.pytorch``, with a ``fsdp_zpp.Strategy``.

    from fsdp_zpp import Strategy
    from fsdp_zpp.integrations.lightning import FSDPStrategy

    trainer = Trainer(strategy=FSDPStrategy(sharding_strategy=Strategy.zeropp(), auto_wrap_policy={Layer}), ...)

These classes add to Lightning's: with ``accumulate_grad_batches``, gradients sync once a step, not in each micro-batch;
``gradient_clip_val`` clips the norm under FSDP1, too; checkpoints hold codec state, and the quantized weights or their
identity. The older package ``pytorch_lightning`` refuses these classes.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

from fsdp_zpp.comm.agreement import from_first_rank
from fsdp_zpp.frozen.hugging_face import quantized_names, with_quantized_weights, without_quantized_weights
from fsdp_zpp.names import model_name
from fsdp_zpp.runtime.api import check_instance
from fsdp_zpp.runtime.unit import StrategyUnit, named_units
from fsdp_zpp.strategy.strategy import Strategy

from ._common import (
    MarkedSave,
    check_base_identity,
    check_complete,
    load_codec_state,
    remove_codec_state,
    remove_companions,
    require,
    save_base_identity,
    save_beside,
)

require("lightning", "2.6")

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision as LightningFSDPPrecision
from lightning.pytorch.strategies import (
    FSDPStrategy as LightningFSDPStrategy,
    ModelParallelStrategy as LightningModelParallelStrategy,
    ParallelStrategy,
)
from lightning.pytorch.trainer.states import TrainerFn

# ---- checkpoints


class WholeCheckpoints(ParallelStrategy):
    """A Lightning strategy that saves whole checkpoints.

    A checkpoint file holds the quantized weights, dequantized; a sharded checkpoint has the identity of the quantized
    base. A checkpoint with an optimizer also has codec state, to resume bit for bit.
    """

    @property
    @abstractmethod
    def _saves_files(self) -> bool:
        """Return whether a checkpoint is one file of gathered tensors."""

    def setup_environment(self) -> None:
        assert self.parallel_devices is not None
        # torchrun sets this variable, and Lightning's own launchers do not.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(self.parallel_devices)))
        super().setup_environment()

    def lightning_module_state_dict(self) -> dict[str, object]:
        with with_quantized_weights(self.model) if self.model is not None and self._saves_files else nullcontext():
            return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: object = None) -> None:
        path = _local_path(self.broadcast(filepath))
        assert self.model is not None
        saves_optimizers = bool(self.optimizers) and "optimizer_states" in checkpoint  # super() removes the states
        with MarkedSave(path) as save:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            if saves_optimizers:
                save_beside(self.model, self.optimizers, path, save.token)
                return
            save_base_identity(self.model, path, save.token)
            if self.is_global_zero:
                remove_codec_state(path)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, object]:
        path = _local_path(self.broadcast(checkpoint_path))
        assert self.model is not None
        assert self.lightning_module is not None
        check_complete(path)
        is_of_base = check_base_identity(self.model, path)
        if not is_of_base:
            _check_names(self.model, path, weights_only)
        with without_quantized_weights(self.model) if is_of_base else nullcontext():
            checkpoint: dict[str, object] = super().load_checkpoint(checkpoint_path, weights_only)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            load_codec_state(self.model, self.optimizers, path)
        return checkpoint

    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove_companions(Path(filepath))


def _local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a checkpoint; raise if it is remote, since Lightning's FSDP strategies save only locally."""
    if "://" in str(path):
        raise ValueError(f"{path} is remote, and sharded checkpoints are written to a disk: save there, and upload it")
    return Path(path)


def _check_names(model: nn.Module, checkpoint: Path, weights_only: bool | None) -> None:
    """Raise if a checkpoint has values for quantized weights: loading would ignore these values. Collective."""
    if not (quantized := quantized_names(model)):
        return
    names = _names_in(checkpoint, weights_only) if dist.get_rank() == 0 else set()
    if overlap := from_first_rank(sorted(quantized & names)):
        raise ValueError(
            f"{checkpoint} has values for {len(overlap)} weights that are quantized in this {model_name(model)} "
            f"({overlap[0]}, ...), and nothing beside it says that they are the same: load them into the model before "
            "the strategy shards it, or remove them from the checkpoint if the model has them already"
        )


def _names_in(checkpoint: Path, weights_only: bool | None) -> set[str]:
    """Return the names of weights in a checkpoint; none if it can't be read, since Lightning reports that later."""
    try:
        if checkpoint.is_dir():
            saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
            return {name.removeprefix(key) for name in saved for key in ("state_dict.", "model.")}
        return set(torch.load(checkpoint, mmap=True, map_location="cpu", weights_only=weights_only)["state_dict"])
    except Exception:
        return set()


# ---- FSDP1


class FSDPStrategy(WholeCheckpoints, LightningFSDPStrategy):
    """Lightning's FSDPStrategy, whose ``sharding_strategy`` may be a ``fsdp_zpp.Strategy``.

    Args:
        sharding_strategy: A ``fsdp_zpp.Strategy``, or what Lightning takes.
        **arguments: Lightning's. With a ``fsdp_zpp.Strategy``, ``device_mesh`` must be a mesh, not a pair of sizes.

    Raises:
        TypeError: If ``sharding_strategy`` is the class Strategy itself.
        ValueError: If an argument contradicts ``sharding_strategy``.

    Examples:
        >>> trainer = Trainer(strategy=FSDPStrategy(sharding_strategy=Strategy.zeropp(), auto_wrap_policy={Layer}))
    """

    _root: nn.Module | None = None
    _in_root: nn.Module | None = None

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
        # Lightning reads ``sharding_strategy.name``, so it gets torch's strategy in place of ours.
        super().__init__(
            sharding_strategy="FULL_SHARD" if own else sharding_strategy,  # type: ignore[arg-type]
            **arguments,
        )
        if own:
            self.sharding_strategy: Any = sharding_strategy

    @property
    def _saves_files(self) -> bool:
        return self._state_dict_type == "full"

    def _setup_model(self, model: nn.Module) -> nn.Module:
        # An evaluation after a fit passes the original model again: by then its layers are wrapped, but it is not.
        # ``_root.module`` may not be the model: if some parameters are frozen, two FSDP instances wrap the model.
        if isinstance(self._root, FullyShardedDataParallel) and self._in_root is model:
            return self._root
        with _wrapped_on_cpu(model, self) as wrapped:
            self._root, self._in_root = super()._setup_model(wrapped), model
        return self._root

    def setup_precision_plugin(self) -> None:
        """Replace Lightning's precision plugin by one that clips the norm over all shards."""
        if type(self.precision_plugin) is LightningFSDPPrecision:
            self.precision_plugin = FSDPPrecision(self.precision_plugin, self)
        super().setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self.model is not None
        with ExitStack() as stack:
            for instance in _outermost_fsdp(self.model):
                stack.enter_context(instance.no_sync())
            yield


@contextmanager
def _wrapped_on_cpu(model: nn.Module, strategy: FSDPStrategy) -> Iterator[nn.Module]:
    """Return a context with FSDP around ``model`` on a CPU; elsewhere with ``model`` itself, which Lightning wraps."""
    if strategy.root_device.type != "cpu":
        yield model
        return
    if strategy._state_dict_type == "full":
        # Lightning has FSDP offload gathered tensors to the CPU. On a CPU torch makes no copy: it frees the memory of
        # gathered weights, and reuses the memory of a gathered optimizer state for the next.
        raise ValueError(
            'state_dict_type="full" of a model on a CPU makes torch save memory that it has freed or reused; '
            'pass state_dict_type="sharded"'
        )
    if _outermost_fsdp(model):
        yield model
        return
    # Lightning passes FSDP only a device index. A CPU has no index, and without a device FSDP wants a GPU.
    wrapped = FullyShardedDataParallel(
        model,
        cpu_offload=strategy.cpu_offload,
        mixed_precision=strategy.mixed_precision_config,
        sharding_strategy=strategy.sharding_strategy,
        device_id=strategy.root_device,
        **strategy.kwargs,
    )
    with patch.dict(strategy.kwargs):
        strategy.kwargs.pop("auto_wrap_policy", None)  # else Lightning would warn that modules are wrapped already
        yield wrapped


def _outermost_fsdp(model: nn.Module) -> list[FullyShardedDataParallel]:
    """Return the FSDP instances that no other one contains: ``model`` itself, unless users wrap parts of it."""
    if isinstance(model, FullyShardedDataParallel):
        return [model]
    return [instance for child in model.children() for instance in _outermost_fsdp(child)]


class FSDPPrecision(LightningFSDPPrecision):
    """Lightning's precision plugin, which here can also clip gradients by their norm over all shards.

    The class has the same name as Lightning's, since checkpoints store the gradient scaler under the plugin's name.

    Args:
        plugin: Lightning's plugin, whose attributes this one takes over.
        strategy: The strategy that the plugin belongs to; it has the model.
    """

    def __init__(self, plugin: LightningFSDPPrecision, strategy: LightningFSDPStrategy) -> None:
        vars(self).update(vars(plugin))
        self._strategy = strategy

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip the norm over all gradients of the model, by FSDP's ``clip_grad_norm_``.

        Raises:
            NotImplementedError: If there are several optimizers, or if no FSDP instance wraps the whole model.
        """
        root, optimizers = self._strategy.model, self._strategy.optimizers
        if not isinstance(root, FullyShardedDataParallel):
            raise NotImplementedError(
                "gradients are clipped by their norm over one FullyShardedDataParallel around the whole model, but "
                "configure_model has wrapped parts of it; use auto_wrap_policy instead, or override "
                "configure_gradient_clipping"
            )
        if len(optimizers) > 1:
            raise NotImplementedError(
                f"the norm is over all gradients of the model, but it has {len(optimizers)} optimizers; override "
                "configure_gradient_clipping"
            )
        root.clip_grad_norm_(clip_val)


# ---- FSDP2


class ModelParallelStrategy(WholeCheckpoints, LightningModelParallelStrategy):
    """Lightning's ModelParallelStrategy, for models that ``configure_model`` shards by ``fsdp_zpp.fully_shard``.

    Arguments and defaults are Lightning's. Without tensor parallelism, pass ``data_parallel_size``, the number of all
    ranks, and ``tensor_parallel_size=1``. With tensor parallelism, pass ``mesh=self.device_mesh["data_parallel"]`` to
    ``fsdp_zpp.fully_shard``.

    Examples:
        >>> trainer = Trainer(strategy=ModelParallelStrategy(data_parallel_size=16, tensor_parallel_size=1), ...)
    """

    @property
    def _saves_files(self) -> bool:
        return not self._save_distributed_checkpoint

    def setup(self, trainer: Trainer) -> None:
        assert self.model is not None
        _check_data_parallel(self.model, self.device_mesh)
        super().setup(trainer)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self.model is not None
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)


def _check_data_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise if the ranks that shard ``model`` are not the ranks to which Lightning gives different data."""
    expected = dist.get_process_group_ranks(mesh["data_parallel"].get_group())
    for unit, name in named_units(model).items():
        if not isinstance(unit, StrategyUnit) or unit.ranks.group is None or unit.stock:
            continue  # torch and Lightning handle such units by themselves
        ranks = dist.get_process_group_ranks(unit.ranks.group)
        if ranks != expected:
            sizes = dict(zip(("data_parallel_size", "tensor_parallel_size"), mesh.shape, strict=True))
            raise ValueError(
                f"{name or 'the model'} is sharded over the ranks {ranks}, but with {sizes} Lightning gives data of "
                f"their own to the ranks {expected}; without tensor parallelism, pass data_parallel_size="
                f"{dist.get_world_size()}, tensor_parallel_size=1 to ModelParallelStrategy; with it, pass "
                'mesh=device_mesh["data_parallel"] to fully_shard'
            )
