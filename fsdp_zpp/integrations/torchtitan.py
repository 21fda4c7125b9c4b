"""Strategies in torchtitan: its trainer and checkpointer, with one more key in its configurations.

    def llama3_8b_zeropp():  # in a module of yours, say mine
        return with_strategy(llama3_8b(), Strategy.zeropp())

    torchrun --nproc-per-node 8 -m torchtitan.train --module mine --config llama3_8b_zeropp

``--parallelism.strategy`` is the name of a preset, or the mapping of ``Strategy.from_dict`` as JSON, such as
``'{"preset": "zeropp", "weights": "int4delta"}'``; ``None`` is torchtitan's own FSDP or HSDP.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard as torch_fully_shard

from fsdp_zpp.codecs import Delta
from fsdp_zpp.fsdp2.fully_shard import fully_shard
from fsdp_zpp.runtime.checkpoint import CodecState
from fsdp_zpp.runtime.unit import unit_of
from fsdp_zpp.strategy.configuration import PRESETS
from fsdp_zpp.strategy.strategy import Strategy

from ._common import MarkedSave, check_complete, require

require("torchtitan", "0.3")

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.protocols.model_spec import ParallelizeFunction
from torchtitan.tools.filesystem import is_remote
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer
from tyro.constructors import PrimitiveConstructorSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# ---- parallelism
#
# torchtitan's parallelism section with a strategy in it, and what can't be combined with one.


def strategy_from_text(text: str) -> Strategy | None:
    """Return the strategy for a preset's name or a JSON mapping of its arguments; None for "None"."""
    if text == "None":
        return None
    try:
        return Strategy.from_dict(json.loads(text) if text.lstrip().startswith("{") else text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    except TypeError as error:
        raise ValueError(str(error)) from None  # tyro blames the flag only for a ValueError


_FLAG = PrimitiveConstructorSpec(
    nargs=1,
    metavar=f"{{{','.join(PRESETS)},None}}|JSON",
    instance_from_str=lambda arguments: strategy_from_text(arguments[0]),
    is_instance=lambda value: value is None or isinstance(value, Strategy),
    str_from_instance=lambda strategy: ["None" if strategy is None else json.dumps(strategy.to_dict())],
)


@dataclass(kw_only=True, slots=True)
class StrategyParallelism(ParallelismConfig):
    """torchtitan's parallelism section with a strategy.

    Raises:
        TypeError: If ``strategy`` is neither a ``Strategy`` nor None.
    """

    strategy: Annotated[Strategy | None, _FLAG] = None
    """
    Sharding strategy: the name of a preset, or a JSON mapping of its arguments, such as
    '{"preset": "zeropp", "gpus_per_node": 8}'. None is torchtitan's own FSDP or HSDP.
    """

    def __post_init__(self) -> None:
        ParallelismConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        if self.strategy is not None:
            _check_type(self.strategy)

    def to_dict(self) -> dict[str, object]:
        """Return the section in JSON types, for torchtitan's log."""
        return _values(self) | {"strategy": None if self.strategy is None else self.strategy.to_dict()}


def check_combination(strategy: Strategy, parallelism: ParallelismConfig, training: TrainingConfig) -> None:
    """Raise if these settings can't be combined with a strategy."""
    _check_type(strategy)
    if parallelism.enable_fsdp_symm_mem:
        raise ValueError(
            "parallelism.enable_fsdp_symm_mem is for torch's own collectives, which a strategy replaces; leave it out, "
            "or pass --parallelism.strategy None for torchtitan's own FSDP"
        )
    if not training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs=False would replay the communication of the first micro-batch in all others, "
            "and a strategy's differs between them; set --training.disable_cuda_graphs"
        )
    for part in strategy.all_strategies:
        if parallelism.fsdp_reshard_after_forward == "always" and part.parameters == "N":
            raise ValueError(
                f"parallelism.fsdp_reshard_after_forward=always contradicts {part.levels!r}, whose parameter scope N "
                "keeps the parameters unsharded until they change; leave it out, or choose parameter scope I or G"
            )
        if part.frozen is not None:
            raise ValueError(
                f"parallelism.strategy: frozen={part.frozen} quantizes weights when the model is sharded, and "
                "torchtitan loads them afterwards; leave frozen out"
            )


def _check_type(strategy: object) -> None:
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"parallelism.strategy must be a Strategy or None, got {strategy!r}; for a preset's name or a mapping, "
            "pass Strategy.from_dict(...)"
        )


# ---- sharding
#
# torchtitan has a ``parallelize_fn`` for each model, which runs here with fsdp_zpp's ``fully_shard``.
#
# These functions import torch's ``fully_shard`` by name. While one runs, every module that has imported the name has
# fsdp_zpp's in its place. So no ``parallelize_fn`` needs a copy here.


def parallelize(
    strategy: Strategy,
    parallelize_fn: ParallelizeFunction,
    model: nn.Module,
    *,
    parallelism: ParallelismConfig,
    **options: Any,
) -> nn.Module:
    """Parallelize a model, or a stage of a pipeline, by its own ``parallelize_fn``, and shard it by a strategy."""

    def by_strategy(module: Any, *, reshard_after_forward: Any = None, **arguments: Any) -> Any:
        # True comes from torchtitan's default policy, too; the strategy decides unless the policy is "always".
        if reshard_after_forward is True and parallelism.fsdp_reshard_after_forward != "always":
            reshard_after_forward = None
        return fully_shard(module, strategy=strategy, reshard_after_forward=reshard_after_forward, **arguments)

    with _in_place_of_torchs(by_strategy):
        sharded: nn.Module = parallelize_fn(model, parallelism=parallelism, **options)
    if all(unit_of(module) is None for module in sharded.modules()):
        raise ValueError(
            f"the parallelize_fn of this {type(model).__name__} did not call fully_shard of torch.distributed.fsdp, "
            "in whose place a strategy's shards; call it, or pass --parallelism.strategy None"
        )
    logger.info("Sharded the model by %s", strategy)
    return sharded


@contextmanager
def _in_place_of_torchs(replacement: Any) -> Iterator[None]:
    """Return a context in which modules that have imported torch's ``fully_shard``, or do so in it, get another one."""
    replacement = wraps(torch_fully_shard)(replacement)  # torch reads ``fully_shard.state``
    _exchange(torch_fully_shard, replacement)
    try:
        yield
    finally:
        _exchange(replacement, torch_fully_shard)  # also in modules that were imported meanwhile


def _exchange(present: Any, replacement: Any) -> None:
    """Put ``replacement`` into all modules of other packages in which ``fully_shard`` is ``present``."""
    for name, module in list(sys.modules.items()):
        # Some packages put objects that are no modules into ``sys.modules``.
        if getattr(module, "__dict__", {}).get("fully_shard") is present and not name.startswith("fsdp_zpp."):
            vars(module)["fully_shard"] = replacement


# ---- trainer
#
# torchtitan's trainer with a strategy, whose scopes decide how gradients accumulate. Checkpoints have codec state.

CODECS = "codecs"
"""Key of the codec state in checkpoints, for ``--checkpoint.exclude_from_loading``."""


class StrategyTrainer(Trainer):
    """torchtitan's trainer; a strategy shards each module that ``parallelize_fn`` passes to ``fully_shard``.

    Args:
        config: torchtitan's configuration, with a ``StrategyParallelism``.

    Raises:
        ValueError: If a setting can't be combined with the strategy; the error says what to do instead.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        parallelism: StrategyParallelism = field(default_factory=StrategyParallelism)

    config: Config

    def __init__(self, config: Config) -> None:
        strategy = config.parallelism.strategy
        if strategy is not None:
            check_combination(strategy, config.parallelism, config.training)
            _check_training(config.loss, config.comm.mode)
            config = copy.copy(config)
            own = config.model_spec.parallelize_fn
            config.model_spec = replace(config.model_spec, parallelize_fn=partial(parallelize, strategy, own))
        # A plain strategy is torch's FULL_SHARD, and syncs in each micro-batch, as torchtitan's own FSDP does:
        # without sync, torch would keep unsharded gradients between micro-batches.
        self._accumulates = strategy is not None and not strategy.is_plain
        self._micro_batches_left = 0
        super().__init__(config)
        is_sharded = isinstance(self.model_parts[0], FSDPModule)  # False if it only saves a seed checkpoint
        if strategy is not None and self.checkpointer.enable:
            _mark_saves(self.checkpointer)
            if is_sharded and _has_codec_state(strategy):
                # With a pipeline, a rank may have several stages.
                model, *further = self.model_parts
                model = nn.ModuleList(self.model_parts) if further else model
                self.checkpointer.states[CODECS] = CodecState(model, list(self.optimizers))

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        self._micro_batches_left = self.gradient_accumulation_steps
        super().train_step(data_iterator)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        self._micro_batches_left -= 1
        if self._accumulates and not self.parallel_dims.pp_enabled:
            for part in self.model_parts:
                if isinstance(part, FSDPModule):
                    part.set_requires_gradient_sync(self._micro_batches_left == 0)
        loss: Tensor = super().forward_backward_step(**batch)
        return loss


def _mark_saves(checkpointer: CheckpointManager) -> None:
    """Mark checkpoints while they are saved, and refuse those that two jobs have saved."""
    save, load = checkpointer.dcp_save, checkpointer.dcp_load

    def dcp_save(state_dict: dict[str, object], checkpoint_id: str, *arguments: object, **options: object) -> object:
        if is_remote(checkpoint_id):
            return save(state_dict, checkpoint_id, *arguments, **options)
        # torchtitan overwrites a checkpoint file by file, and ignores a checkpoint without ``.metadata``.
        marked = MarkedSave(Path(checkpoint_id), place="inside", written_last=".metadata")
        saved = save(state_dict, checkpoint_id, *arguments, **options)
        written = getattr(saved, "upload_completion", saved)
        if dist.get_rank() != 0:
            return saved
        if isinstance(written, Future):
            written.add_done_callback(partial(_end, marked))
        else:
            marked.end()  # torch's save returns when all ranks have written
        return saved

    def dcp_load(state_dict: dict[str, object], checkpoint_id: str, *arguments: object, **options: object) -> None:
        if not is_remote(checkpoint_id):
            check_complete(Path(checkpoint_id))
        load(state_dict, checkpoint_id, *arguments, **options)

    checkpointer.dcp_save, checkpointer.dcp_load = dcp_save, dcp_load


def _end(marked: MarkedSave, written: Future[object]) -> None:
    if not (written.cancelled() or written.exception()):
        marked.end()


def _check_training(loss: BaseLoss.Config, communication: str) -> None:
    if isinstance(loss, ChunkedLossWrapper.Config):
        raise ValueError(
            "loss=ChunkedLossWrapper runs a backward for each chunk, in which a strategy would gather and reduce; set "
            "the configuration's loss to the one it wraps, config.loss = config.loss.loss_fn, or pass "
            "--parallelism.strategy None for torchtitan's own FSDP"
        )
    if communication != "default":
        raise ValueError(
            f"comm.mode={communication} can't be combined with a strategy, whose ranks exchange real data at set-up, "
            "over torch.distributed's process groups; set --comm.mode default"
        )


def _has_codec_state(strategy: Strategy) -> bool:
    """Return whether any part has codec state; without it, checkpoints are those of torchtitan's own FSDP."""
    return any(
        each.error_feedback is not None or each.local_steps is not None or isinstance(each.weights, Delta)
        for each in strategy.all_strategies
    )


# ---- configurations


def with_strategy(config: Trainer.Config, strategy: Strategy | None) -> StrategyTrainer.Config:
    """Return ``config``, the configuration of any of torchtitan's models, with a strategy.

    The result also sets ``training.disable_cuda_graphs``, and replaces a ChunkedLossWrapper by the loss that it wraps.

    Args:
        config: The configuration. It does not change, but the result shares sections with it.
        strategy: The default of ``--parallelism.strategy``.

    Raises:
        TypeError: If ``config`` is for another trainer than torchtitan's ``Trainer``.
    """
    if type(config) is not Trainer.Config:
        raise TypeError(
            f"with_strategy takes a configuration of torchtitan's Trainer, got a {type(config).__qualname__}; for "
            "another trainer, write a class Own(StrategyTrainer, ThatTrainer), whose Config is that trainer's with "
            "parallelism: StrategyParallelism"
        )
    loss = config.loss
    if isinstance(loss, ChunkedLossWrapper.Config):
        logger.info("With a strategy, the loss is computed at once and not in %d chunks", loss.num_chunks)
        loss = loss.loss_fn
    changed = {
        "parallelism": StrategyParallelism(**_values(config.parallelism) | {"strategy": strategy}),
        "loss": loss,
        "training": dataclasses.replace(config.training, disable_cuda_graphs=True),
    }
    return StrategyTrainer.Config(**_values(config) | changed)


def _values(section: DataclassInstance) -> dict[str, Any]:
    return {each.name: getattr(section, each.name) for each in dataclasses.fields(section)}
