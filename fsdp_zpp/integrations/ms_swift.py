"""Gives ms-swift's trainers a strategy; call ``use_strategy`` in a file that ``--external_plugins`` names.

    # strategy.py
    from fsdp_zpp import Strategy
    from fsdp_zpp.integrations.ms_swift import use_strategy

    use_strategy(Strategy.mixzpp())

    NPROC_PER_NODE=8 swift sft --external_plugins strategy.py --tuner_type lora ...

ms-swift gets the class of its trainer from a factory. ``use_strategy`` wraps the factory's function, and
integrations/transformers.py gives each class from it the strategy.
"""

from __future__ import annotations

from typing import Any

from fsdp_zpp.fsdp2.fully_shard import check_strategy
from fsdp_zpp.strategy.strategy import Strategy

from ._common import NO_DEEPSPEED, NO_WHOLE_MATRICES, PACKED_BASE, refuse, refuse_set, require

require("ms-swift", "4.6")

from swift.trainers import TrainerFactory

from . import transformers as hugging_face
from .transformers import prepare_references_by_strategy

TASKS = ("causal_lm", "dpo")
"""The values of ``task_type`` and ``rlhf_type`` that have been tried with a strategy."""

_IS_REPLACED = "_fsdp_zpp_strategy"

_ALTERNATIVES = {
    "deepspeed": NO_DEEPSPEED,
    "quant_method": f"{PACKED_BASE}use Strategy.mixzpp(frozen=NF4())",
    "use_swift_lora": "the strategy knows PEFT's adapters alone: leave it out",
    "use_ray": "the strategy would not reach the processes that Ray starts: leave it out, and set NPROC_PER_NODE",
}
"""Arguments of ms-swift that a strategy can't honour, and what to do instead."""


def use_strategy(strategy: Strategy) -> None:
    """Make the trainers of this process shard their models by ``strategy``.

    Args:
        strategy: Where each model state lives and how each hop is encoded.

    Raises:
        TypeError: If ``strategy`` is not a ``Strategy``.
        ValueError: If the trainers have a strategy already.
    """
    check_strategy(strategy)
    original = TrainerFactory.get_trainer_cls
    if (present := getattr(original, _IS_REPLACED, None)) is not None:
        raise ValueError(f"ms-swift's trainers have a strategy already, {present}")

    def get_trainer_cls(args: Any) -> type:
        check_arguments(args)
        prepare_references_by_strategy()
        trainer: type = hugging_face.use_strategy(original(args), strategy)
        return trainer

    setattr(get_trainer_cls, _IS_REPLACED, strategy)
    TrainerFactory.get_trainer_cls = staticmethod(get_trainer_cls)


def check_arguments(args: Any) -> None:
    """Refuse arguments of ms-swift that a strategy can't honour."""
    refuse_set(vars(args), _ALTERNATIVES)
    if args.tuner_backend != "peft":
        refuse("tuner_backend", args.tuner_backend, "unsloth trains in one process: leave it out")
    if args.sequence_parallel_size > 1:
        refuse(
            "sequence_parallel_size",
            args.sequence_parallel_size,
            "ms-swift's sequence parallelism has not been tried with it: leave it out",
        )
    if args.optimizer in ("galore", "muon", "muonclip"):
        refuse("optimizer", args.optimizer, NO_WHOLE_MATRICES)
    task = getattr(args, "rlhf_type", None) or args.task_type
    if task not in TASKS:
        refuse("rlhf_type", task, f"it has not been tried with a strategy, only {', '.join(TASKS)} have")
