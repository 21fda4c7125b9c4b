"""torchtitan's trainer with a strategy: gradients accumulate by its scopes, and checkpoints have codec state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torchtitan.components.checkpoint import MODEL, CheckpointManager
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.filesystem import is_remote
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.collectives.agreement import agree, run_on_first_rank
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.integrations._turns import Turn
from fsdp_zpp.runtime.api import traffic
from fsdp_zpp.runtime.checkpoint import CodecState
from fsdp_zpp.runtime.monitor import Monitor, monitor

from .parallelism import StrategyParallelism, check_combination
from .sharding import parallelize

CODECS = "codecs"
"""Key of the codec state in checkpoints, for ``--checkpoint.exclude_from_loading``."""


class StrategyTrainer(Trainer):
    """torchtitan's trainer, which has a strategy shard what the model's ``parallelize_fn`` shards by ``fully_shard``.

    Args:
        config: As torchtitan's, with a ``StrategyParallelism``.

    Raises:
        ValueError: If something else can't be combined with the strategy; says what to do instead.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration with a strategy in its parallelism section."""

        parallelism: StrategyParallelism = field(default_factory=StrategyParallelism)

    config: Config

    def __init__(self, config: Config) -> None:
        strategy = config.parallelism.strategy
        if strategy is not None:
            check_combination(strategy, config.parallelism, config.training)
            _check_loss(config.loss)
            _check_communication(config.comm.mode)
            config = copy.copy(config)
            own = config.model_spec.parallelize_fn
            config.model_spec = replace(config.model_spec, parallelize_fn=partial(parallelize, strategy, own))
        # torch's FULL_SHARD on one node would keep whole gradients where torchtitan reduces each micro-batch's, and
        # the scopes of GGG ask for just that.
        self._accumulates = strategy is not None and not strategy.is_plain
        self._micro_batches_left = 0
        super().__init__(config)
        is_sharded = isinstance(self.model_parts[0], FSDPModule)  # not if it is only to save a seed checkpoint
        if strategy is not None and self.checkpointer.enable:
            _check_export(self.checkpointer, self.model_parts)
            _take_turns(self.checkpointer)
            if is_sharded and _has_codec_state(strategy):
                self.checkpointer.states[CODECS] = _codec_state(self.model_parts, self.optimizers)
        self._monitor: Monitor | None = None
        self._figures: dict[str, float] = {}
        if config.parallelism.monitor and is_sharded:
            self._monitor = monitor(nn.ModuleList(self.model_parts))
            self.metrics_processor.log = partial(self._log, self.metrics_processor.log)

    def train(self) -> None:
        """Train as torchtitan does, and log at the end what this rank has sent."""
        super().train()
        if self.config.parallelism.strategy is not None:
            logger.info("Bytes that this rank has sent: %s", total_traffic(self.model_parts))

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Train one step as torchtitan does, and count its micro-batches."""
        self._micro_batches_left = self.gradient_accumulation_steps
        super().train_step(data_iterator)
        if self._monitor is not None:
            self._figures = {f"fsdp_zpp/{name}": figure for name, figure in self._monitor.step().items()}

    def _log(
        self, log: Callable[..., None], *arguments: object, extra_metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Log as torchtitan does, with the figures of the latest step before this one."""
        log(*arguments, extra_metrics={**(extra_metrics or {}), **self._figures})

    def forward_backward_step(self, **batch: Any) -> Tensor:
        """Run one micro-batch; gradients before the last one are accumulated as the strategy's scopes say.

        The schedule of a pipeline decides itself which of its micro-batches reduce gradients.
        """
        self._micro_batches_left -= 1
        if self._accumulates and not self.parallel_dims.pp_enabled:
            for part in self.model_parts:
                if isinstance(part, FSDPModule):
                    part.set_requires_gradient_sync(self._micro_batches_left == 0)
        loss: Tensor = super().forward_backward_step(**batch)
        return loss


def total_traffic(parts: Sequence[nn.Module]) -> dict[str, dict[str, int]]:
    """Return the bytes that this rank has sent for all parts of a model: stages of a pipeline, or the model itself."""
    each = [traffic(part) for part in parts]
    return {
        kind: {level: sum(sent[kind][level] for sent in each) for level in levels} for kind, levels in each[0].items()
    }


class _StagesCodecState:
    """Codec state of this rank's stages of a pipeline, which have units and optimizers of their own."""

    def __init__(self, stages: Sequence[CodecState]) -> None:
        self._stages = {str(at): stage for at, stage in enumerate(stages)}

    def state_dict(self) -> dict[str, dict[str, str | bytes]]:
        return {at: stage.state_dict() for at, stage in self._stages.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for at, stage in self._stages.items():
            stage.load_state_dict(state[at])


def _codec_state(parts: Sequence[nn.Module], optimizers: Iterable[Optimizer]) -> CodecState | _StagesCodecState:
    by_parameter = {id(each.param_groups[0]["params"][0]): each for each in optimizers}
    states = [
        CodecState(part, [by_parameter[id(each)] for each in part.parameters() if id(each) in by_parameter])
        for part in parts
    ]
    return states[0] if len(states) == 1 else _StagesCodecState(states)


def _take_turns(checkpointer: CheckpointManager) -> None:
    """Let one job at a time save a checkpoint, and remove ``.metadata`` first, which torchtitan writes last."""
    save = checkpointer.dcp_save

    def dcp_save(state_dict: dict[str, object], checkpoint_id: str, *arguments: object, **options: object) -> object:
        if is_remote(checkpoint_id):
            return save(state_dict, checkpoint_id, *arguments, **options)
        turn = Turn(Path(checkpoint_id, "being_saved"))
        try:
            # torchtitan writes file by file over what is there, and passes over a checkpoint without this file.
            run_on_first_rank(lambda: Path(checkpoint_id, ".metadata").unlink(missing_ok=True))
            saved = save(state_dict, checkpoint_id, *arguments, **options)
        except BaseException:
            turn.abandon()
            raise
        # Pinned memory is written by another process, which holds no lock, and may go on when this job is killed.
        written = getattr(saved, "upload_completion", saved)
        if isinstance(written, Future):
            written.add_done_callback(partial(_end, turn))
        else:
            turn.release()  # torch's save ends when all ranks have written
        return saved

    checkpointer.dcp_save = dcp_save


def _end(turn: Turn, written: Future[object]) -> None:
    if written.cancelled() or written.exception():
        turn.abandon()
    else:
        turn.release()


def _check_export(checkpointer: CheckpointManager, parts: Sequence[nn.Module]) -> None:
    """Raise if Hugging Face's format has no names for parts of the model: torchtitan would leave them out, or fail."""
    if checkpointer.last_save_in_hf:
        agree(dist.group.WORLD, partial(_check_names, checkpointer, parts))  # stages of a pipeline have other names


def _check_names(checkpointer: CheckpointManager, parts: Sequence[nn.Module]) -> None:
    # A tied head is in the format as the embedding.
    tied = ["lm_head.weight"] if any(getattr(part, "enable_weight_tying", False) for part in parts) else []
    lost = [
        name
        for name, tensor in checkpointer.states[MODEL].state_dict().items()
        if name not in tied and not _is_exported(checkpointer.sd_adapter, name, tensor.shape)
    ]
    if lost:
        raise ValueError(
            f"checkpoint.last_save_in_hf would leave out {len(lost)} tensors of the model ({lost[0]}, ...), for which "
            "torchtitan knows no names in Hugging Face's format; leave it out"
        )


def _is_exported(adapter: BaseStateDictAdapter, name: str, shape: torch.Size) -> bool:
    try:
        return bool(adapter.to_hf({name: torch.empty(shape, device="meta")}))
    except KeyError:
        return False


def _check_loss(loss: BaseLoss.Config) -> None:
    if isinstance(loss, ChunkedLossWrapper.Config):
        raise ValueError(
            "loss=ChunkedLossWrapper runs a backward for each chunk, in which a strategy would gather and reduce; set "
            "the configuration's loss to the one it wraps, config.loss = config.loss.loss_fn, or pass "
            "--parallelism.strategy None for torchtitan's own FSDP"
        )


def _check_communication(mode: str) -> None:
    if mode != "default":
        raise ValueError(
            f"comm.mode={mode} can't be combined with a strategy, whose ranks exchange real data at set-up, over "
            "torch.distributed's process groups; set --comm.mode default"
        )


def _has_codec_state(strategy: Strategy) -> bool:
    """Return whether any part has codec state; without, checkpoints are those of torchtitan's own FSDP."""
    return any(
        each.error_feedback is not None or each.local_steps is not None or isinstance(each.weights, Int4Delta)
        for each in strategy.all_strategies
    )
