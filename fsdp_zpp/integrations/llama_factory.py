"""LLaMA-Factory's command ``train``, with one more key in configuration files.

    fsdp_zpp: mixzpp         # what Strategy.from_dict reads: the name of a preset, or a mapping

    torchrun --nproc-per-node 8 -m fsdp_zpp.integrations.llama_factory train llama3_lora_sft.yaml

integrations/transformers.py makes LLaMA-Factory's trainers shard the model. LLaMA-Factory has no plug-in point for
trainers, so :func:`run_exp` replaces their classes while it trains. LLaMA-Factory's other trainer, V1, is refused.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from fsdp_zpp.strategy.strategy import Strategy

from ._common import KEY, NO_DEEPSPEED, NO_PACKED_BASE, NO_WHOLE_MATRICES, refuse, refuse_set, require, strategy_of

# No extra installs LLaMA-Factory: its requirements exclude the versions of transformers that a strategy needs.
require("llamafactory", "0.9.5", install="see docs/guides/llama-factory-ms-swift.md")

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["main", "run_exp"]

Arguments = dict[str, Any]

TRAINERS = {"pt": "CustomTrainer", "sft": "CustomSeq2SeqTrainer", "dpo": "CustomDPOTrainer"}
"""Name of the trainer in ``llamafactory.train.<stage>.trainer``, by stage."""

DEFAULTS = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "use_reentrant_gc": False}
"""Defaults for arguments that are left out; with ``fsdp``, the model stays in CPU memory until it is sharded."""

_BACKEND = "it replaces the trainer that shards the model: leave it out"
_ALTERNATIVES = {
    "deepspeed": NO_DEEPSPEED,
    "quantization_bit": NO_PACKED_BASE,
    "use_unsloth": "unsloth trains in one process: leave it out",
    "use_kt": _BACKEND,
    "use_mca": _BACKEND,
    "use_hyper_parallel": _BACKEND,
    "use_megatron_bridge": _BACKEND,
    "use_ray": "the strategy would not reach the processes that Ray starts: leave it out, and start them with torchrun",
    "use_galore": NO_WHOLE_MATRICES,
    "use_apollo": NO_WHOLE_MATRICES,
    "use_badam": NO_WHOLE_MATRICES,
    "use_adam_mini": NO_WHOLE_MATRICES,
    "use_muon": NO_WHOLE_MATRICES,
    "fp8": "a strategy gathers the weights: leave it out, and write fsdp_zpp: {weights: int8:256}",
    "pissa_convert": "it saves adapters before they are sharded: leave it out, and convert them after the training",
}
"""Keys of LLaMA-Factory that a strategy can't honour, and what to do instead."""

_V1 = "no release of LLaMA-Factory has a V1 that takes a strategy: leave USE_V1 out, and run train"

_VARIABLES = {**dict.fromkeys(("USE_MCA", "USE_MEGATRON_BRIDGE", "USE_RAY", "USE_KT"), _BACKEND), "USE_V1": _V1}
"""Environment variables that choose another trainer, and what to do instead."""


def run_exp(args: Arguments | None = None, callbacks: list[TrainerCallback] | None = None) -> None:
    """Train as LLaMA-Factory's ``run_exp`` does, by the strategy under the key ``fsdp_zpp``.

    Args:
        args: The arguments. Default: those of the configuration file that the command line names.
        callbacks: Callbacks of the Trainer.

    Raises:
        ImportError: If transformers or accelerate is too old.
        ValueError: If there is no strategy, or the strategy can't honour an argument; the error names the key.
    """
    from llamafactory.train import tuner

    arguments, strategy = split(args)
    check_arguments(arguments)
    fsdp_config = {**DEFAULTS["fsdp_config"], **(arguments.get("fsdp_config") or {})}  # type: ignore[dict-item]
    with _trainer_by(strategy, arguments.get("stage", "sft")):
        tuner.run_exp({**DEFAULTS, **arguments, "fsdp_config": fsdp_config}, callbacks)


def main() -> None:
    """Run ``train`` of ``llamafactory-cli`` in a process that torchrun started.

    Raises:
        ValueError: If another command is given, or :func:`run_exp` raises it.
    """
    _check_environment()
    command = sys.argv.pop(1) if len(sys.argv) > 1 else "none"
    if command != "train":
        raise ValueError(f"the command must be train, as of llamafactory-cli, got {command}")
    run_exp()


def split(args: Arguments | None) -> tuple[Arguments, Strategy]:
    """Split ``args``, by default the command line's, into LLaMA-Factory's own arguments and the strategy."""
    from llamafactory.hparams import read_args

    read = read_args(args)
    if not isinstance(read, Mapping):
        raise ValueError(f"give a configuration file, .yaml or .json, with the key {KEY}, got {' '.join(read)!r}")
    arguments = dict(read)
    if (value := arguments.pop(KEY, None)) is None:
        raise ValueError("fsdp_zpp: give a strategy, such as fsdp_zpp: mixzpp; without one, run llamafactory-cli")
    return arguments, strategy_of(value)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments and environment variables that a strategy can't honour."""
    refuse_set(arguments, _ALTERNATIVES)
    _check_environment()
    stage = arguments.get("stage", "sft")
    if stage not in TRAINERS:
        refuse("stage", stage, f"it has not been tried with a strategy, only {', '.join(TRAINERS)} have")


def _check_environment() -> None:
    for variable, instead in _VARIABLES.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "y"):
            refuse(variable, os.environ[variable], instead)


@contextmanager
def _trainer_by(strategy: Strategy, stage: str) -> Iterator[None]:
    from .transformers import prepare_references_by_strategy, use_strategy

    prepare_references_by_strategy()
    name = TRAINERS[stage]
    modules = [importlib.import_module(f"llamafactory.train.{stage}.{each}") for each in ("trainer", "workflow")]
    original = vars(modules[0])[name]
    holders = [module for module in modules if vars(module).get(name) is original]  # some workflows import it late
    with ExitStack() as stack:
        for module in holders:
            stack.enter_context(patch.multiple(module, **{name: use_strategy(original, strategy)}))
        yield


if __name__ == "__main__":
    main()
