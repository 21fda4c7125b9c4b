"""Small trainings with torchtitan's trainer, for ``torchtitan_on_cpu.call``."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from cut_off import copies_of
from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer
from torchtitan_on_cpu import Run

import fsdp_zpp
from fsdp_zpp.integrations.torchtitan import parallelize_llama as shard_llama, with_strategy


class ByteTokenizer(BaseTokenizer):
    """A token for each byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Return the bytes."""
        return [*text.encode(), *([0] if add_eos else [])]

    def decode(self, tokens: list[int]) -> str:
        """Return the text."""
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        """Return the number of bytes."""
        return 256


def _sums(path: str) -> Dataset:
    return Dataset.from_dict({"text": ["".join(f"{a}+{b}={a + b}\n" for b in range(60)) for a in range(60)]})


DATASETS["sums"] = DatasetConfig(path="", loader=_sums, sample_processor=lambda sample: sample["text"])


def small_config() -> Trainer.Config:
    """Return torchtitan's debug model, small enough for a CPU, with attention that runs there."""
    config = llama3_debugmodel()
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    del model.layers[1:]
    config.override.imports = ["torchtitan_attention.without_masks"]
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="sums")
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 32, 2, 4
    # With bf16, rounding after sums in another order would show in the third digit.
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.metrics.disable_color_printing = True
    config.debug.seed = 0
    return config


def strategy() -> Trainer.Config:
    """Return the small configuration with a strategy, which a flag says."""
    return with_strategy(small_config(), None)


def own() -> Trainer.Config:
    """Return torchtitan's own configuration, with the loss of :func:`strategy`."""
    config = small_config()
    assert config.model_spec is not None
    config.loss = config.loss.loss_fn
    config.parallelism.spmd_backend = "partial_dtensor"
    config.model_spec.parallelize_fn = _parallelize_by_sums
    return config


def _parallelize_by_sums(model: Any, **arguments: Any) -> nn.Module:
    """Shard by torchtitan's own FSDP, with the one kind of sum that gloo has: it sets a divisor of 1, for NCCL's."""
    model = parallelize_llama(model, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def build(config: str, *options: str) -> Trainer:
    """Return the trainer of a configuration of this module with command-line options."""
    return ConfigManager().parse_args(["--module", __name__, "--config", config, *options]).build()


class StopTrainingError(Exception):
    """A training was interrupted."""


def train(config: str, folder: Path, *options: str, stop_at: int | None = None) -> Run:
    """Train with torchtitan's own loop, which raises in the step ``stop_at``, if any."""
    trainer = build(config, "--dump_folder", str(folder), *options)
    model, run = trainer.model_parts[0], Run([], {}, [], [])

    def log(metrics: dict[str, float], step: int) -> None:
        if step == stop_at:
            raise StopTrainingError
        if "validation_metrics/loss" in metrics:
            run.validated.append(metrics["validation_metrics/loss"])
            return
        run.losses.append(metrics["loss_metrics/global_avg_loss"])
        run.metrics.update(metrics)
        if getattr(trainer.config.parallelism, "strategy", None) is not None:
            run.traffic.append(fsdp_zpp.traffic(model))

    # torchtitan's loop waits for two seconds at its end.
    sleepless = mock.patch("time.sleep")
    with (
        mock.patch.object(trainer.metrics_processor.logger, "log", log),
        sleepless,
        contextlib.suppress(StopTrainingError),
    ):
        trainer.train()
    trainer.close()
    return run


def train_until(stop_at: int, config: str, folder: Path, *options: str) -> Run:
    """Train, and be interrupted in that step."""
    return train(config, folder, *options, stop_at=stop_at)


def train_watched(checkpoint: Path, copies: Path, config: str, folder: Path, *options: str) -> Run:
    """Train, and copy a checkpoint whenever this process is about to change a file of it."""
    with copies_of(checkpoint, copies, dist.get_rank()):
        return train(config, folder, *options)


def parallelism(module: str, config: str, *options: str) -> str:
    """Return the parallelism section of a configuration with command-line options, as torchtitan logs it."""
    parsed = ConfigManager().parse_args(["--module", module, "--config", config, *options])
    return json.dumps(parsed.to_dict()["parallelism"])


def refusal(config: str, *options: str) -> str:
    """Return what a trainer that is to be refused raises, or prints when it reads its flags."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            build(config, *options)
    except SystemExit:
        return printed.getvalue()
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    raise AssertionError(f"{options} were accepted")


def own_model_under_strategys_trainer() -> str:
    """Return what ``traffic`` says of a model that torchtitan's HSDP shards, without a strategy."""
    options = "--parallelism.strategy None --parallelism.data_parallel_replicate_degree 2".split()
    model = build("strategy", *options).model_parts[0]
    assert isinstance(model, FSDPModule)
    try:
        return str(fsdp_zpp.traffic(model))
    except ValueError as error:
        return str(error)


def chunked() -> Trainer.Config:
    """Return the small configuration with torchtitan's chunked loss."""
    config = strategy()
    config.loss = llama3_debugmodel().loss
    return config


def experts() -> Trainer.Config:
    """Return a configuration in name only: the model is another one."""
    return with_strategy(deepseek_v3_debugmodel(), None)


def misspelt() -> Trainer.Config:
    """Return the small configuration with a strategy that is none."""
    config = strategy()
    config.parallelism.strategy = "zeropp"
    return config


def model_refusal(experts: bool, encodes_itself: bool) -> str:
    """Return what ``parallelize_llama`` raises for a model of one block."""
    block = nn.Linear(4, 4)
    if experts:
        block.moe_enabled = True  # type: ignore[assignment]
    if encodes_itself:
        block.weight.fsdp_pre_all_gather = None  # type: ignore[attr-defined]
    model: Any = nn.ModuleDict({"layers": nn.ModuleDict({"0": block})})
    model.layers = model["layers"]
    config = with_strategy(small_config(), fsdp_zpp.Strategy.zeropp())
    try:
        shard_llama(
            model,
            parallel_dims=ParallelDims.from_config(config.parallelism, 4),
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=None,
            dump_folder="",
        )
    except (ValueError, NotImplementedError) as error:
        return str(error)
    raise AssertionError("the model was accepted")


def seed_checkpoint(folder: Path, *options: str) -> list[str]:
    """Return the keys of what torchtitan saves in a seed checkpoint."""
    trainer = build("strategy", "--dump_folder", str(folder), "--checkpoint.create_seed_checkpoint", *options)
    keys = list(trainer.checkpointer.states)
    trainer.close()
    return keys
