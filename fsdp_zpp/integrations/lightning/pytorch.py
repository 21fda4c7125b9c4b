"""Strategies for the Trainer of ``lightning.pytorch``.

    from fsdp_zpp import Strategy
    from fsdp_zpp.integrations.lightning.pytorch import FSDPStrategy

    trainer = Trainer(strategy=FSDPStrategy(sharding_strategy=Strategy.zeropp(), auto_wrap_policy={Layer}), ...)

They add to Lightning's: with ``accumulate_grad_batches``, gradients are synchronized once a step, not in each
micro-batch; ``gradient_clip_val`` clips the norm under FSDP1, too; checkpoints have the quantized weights, or tell
which they are, and hold codec state.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision as LightningFSDPPrecision
from lightning.pytorch.strategies import (
    FSDPStrategy as LightningFSDPStrategy,
    ModelParallelStrategy as LightningModelParallelStrategy,
    ParallelStrategy,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer

from fsdp_zpp.integrations._common import load_codec_state, remove_companions

from .fabric import (
    ByFSDP,
    ByModelParallel,
    CheckpointFiles,
    check_data_parallel,
    local_path,
    outermost_fsdp,
    wrapped_on_cpu,
)


class WholeCheckpoints(CheckpointFiles, ParallelStrategy):
    """A strategy for the Trainer whose checkpoints are whole.

    Those that are files have the quantized weights, dequantized; sharded ones tell which base they were trained on.
    Both hold codec state if they hold an optimizer, to resume bit for bit.
    """

    _taken_by = "Trainer of lightning.pytorch"

    def lightning_module_state_dict(self) -> dict[str, object]:
        with self._with_quantized_weights(self.model):
            state: dict[str, object] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: object = None) -> None:
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        with self._saving(local_path(self.broadcast(filepath)), self.model, optimizers):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, object]:
        path = local_path(self.broadcast(checkpoint_path))
        assert self.model is not None
        assert self.lightning_module is not None
        with self._loading(path, self.model, ("state_dict", "model"), weights_only):
            checkpoint: dict[str, object] = super().load_checkpoint(checkpoint_path, weights_only)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            load_codec_state(self.model, self.optimizers, path)
        return checkpoint

    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove_companions(Path(filepath))


class FSDPStrategy(ByFSDP, WholeCheckpoints, LightningFSDPStrategy):
    """Lightning's FSDPStrategy, whose ``sharding_strategy`` may be a ``fsdp_zpp.Strategy``.

    Arguments and errors are those of :class:`fsdp_zpp.integrations.lightning.fabric.FSDPStrategy`.

    Examples:
        >>> trainer = Trainer(strategy=FSDPStrategy(sharding_strategy=Strategy.zeropp(), auto_wrap_policy={Layer}))
    """

    _root: nn.Module | None = None
    _in_root: nn.Module | None = None

    def _setup_model(self, model: nn.Module) -> nn.Module:
        # An evaluation after a fit gets the model as it was before; its layers are wrapped by then, and it is not.
        # The module of the root need not be that model: around frozen and trained parameters there are two instances.
        if isinstance(self._root, FullyShardedDataParallel) and self._in_root is model:
            return self._root
        with wrapped_on_cpu(model, self, self.kwargs) as wrapped:
            self._root, self._in_root = super()._setup_model(wrapped), model
        return self._root

    def setup_precision_plugin(self) -> None:
        """Replace Lightning's precision plugin by one that clips by norm across shards."""
        if type(self.precision_plugin) is LightningFSDPPrecision:
            self.precision_plugin = FSDPPrecision(self.precision_plugin, self)
        super().setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self.model is not None
        with ExitStack() as stack:
            for instance in outermost_fsdp(self.model):
                stack.enter_context(instance.no_sync())
            yield


class ModelParallelStrategy(ByModelParallel, WholeCheckpoints, LightningModelParallelStrategy):
    """Lightning's ModelParallelStrategy, for models that ``configure_model`` shards by ``fsdp_zpp.fully_shard``.

    Arguments are Lightning's, with its defaults: without tensor parallelism pass ``data_parallel_size``, the number of
    all ranks, and ``tensor_parallel_size=1``. With it, pass ``mesh=self.device_mesh["data_parallel"]`` to
    ``fsdp_zpp.fully_shard``.

    Examples:
        >>> trainer = Trainer(strategy=ModelParallelStrategy(data_parallel_size=16, tensor_parallel_size=1), ...)
    """

    def setup(self, trainer: Trainer) -> None:
        assert self.model is not None
        check_data_parallel(self.model, self.device_mesh)
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


class FSDPPrecision(LightningFSDPPrecision):
    """Lightning's plugin, with a reference to the model, without which it refuses to clip the norm.

    It has Lightning's name, under which checkpoints hold the state of its gradient scaler.

    Args:
        plugin: Lightning's plugin.
        strategy: The strategy that it belongs to.
    """

    def __init__(self, plugin: LightningFSDPPrecision, strategy: LightningFSDPStrategy) -> None:
        vars(self).update(vars(plugin))
        self._strategy = strategy

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip the norm over all gradients of the model, by FSDP's ``clip_grad_norm_``.

        Raises:
            NotImplementedError: If the norm is not that of one optimizer's gradients, or not of one FSDP instance.
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
