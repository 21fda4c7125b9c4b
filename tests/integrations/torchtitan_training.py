"""Small trainings with torchtitan's trainer, for ``torchtitan_on_cpu.call``."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cut_off import copies_of
from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import debug
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager
from torchtitan.distributed import fsdp
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3 import parallelize as llama3_parallelize
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel
from torchtitan.trainer import Trainer
from torchtitan_on_cpu import Run

import fsdp_zpp
from fsdp_zpp.integrations.torchtitan import config_registry, with_strategy
from fsdp_zpp.integrations.torchtitan.trainer import total_traffic


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


def small_config(debugmodel: Callable[[], Trainer.Config] = llama3_debugmodel, layers: int = 1) -> Trainer.Config:
    """Return one of torchtitan's debug models, small enough for a CPU, with attention that runs there."""
    config = debugmodel()
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    del model.layers[layers:]
    config.override.imports = ["torchtitan_attention.without_masks"]
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="sums")
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 32, 2, 4
    # With bf16, rounding after sums in another order would show in the third digit.
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # torchtitan's default needs torch 2.14
    config.metrics.disable_color_printing = True
    config.debug.seed = 0
    return config


def strategy() -> Trainer.Config:
    """Return the small Llama 3 with a strategy, which a flag says."""
    return with_strategy(small_config(), None)


def two_layers() -> Trainer.Config:
    """Return the small Llama 3 with layers for two stages of a pipeline."""
    return with_strategy(small_config(layers=2), None)


def qwen3() -> Trainer.Config:
    """Return a small Qwen 3, whose head is tied, with a strategy."""
    return with_strategy(small_config(qwen3_debugmodel, layers=2), None)


def deepseek_v3() -> Trainer.Config:
    """Return a small DeepSeek V3, which has experts in its second layer, with a strategy."""
    return with_strategy(small_config(deepseek_v3_debugmodel, layers=2), None)


def build(config: str, *options: str) -> Trainer:
    """Return the trainer of a configuration of this module with command-line options.

    That of ``own_NAME`` is torchtitan's own of the configuration NAME.
    """
    name = config.removeprefix("own_")
    parsed = ConfigManager().parse_args(["--module", __name__, "--config", name, *options])
    if name == config:
        return parsed.build()
    assert parsed.parallelism.strategy is None
    values = {field.name: getattr(parsed, field.name) for field in fields(parsed)}
    spec = parsed.model_spec
    values["model_spec"] = replace(spec, parallelize_fn=partial(_parallelize_by_sums, spec.parallelize_fn))
    return Trainer.Config(**values).build()


def _parallelize_by_sums(parallelize_fn: Any, model: Any, **arguments: Any) -> nn.Module:
    """Shard by torchtitan's own FSDP, with the one kind of sum that gloo has: it sets a divisor of 1, for NCCL's."""
    model = parallelize_fn(model, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


class StopTrainingError(Exception):
    """A training was interrupted."""


def train(config: str, folder: Path, *options: str, stop_at: int | None = None) -> Run:
    """Train with torchtitan's own loop, which raises in the step ``stop_at``, if any."""
    debug._clear_sharding_prop_cache()
    trainer = build(config, "--dump_folder", str(folder), *options)
    run = Run([], {}, [], [])

    def log(metrics: dict[str, float], step: int) -> None:
        if step == stop_at:
            raise StopTrainingError
        if "validation_metrics/loss" in metrics:
            run.validated.append(metrics["validation_metrics/loss"])
            return
        run.losses.append(metrics["loss_metrics/global_avg_loss"])
        run.metrics.update(metrics)
        if getattr(trainer.config.parallelism, "strategy", None) is not None:
            run.traffic.append(total_traffic(trainer.model_parts))

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


def train_offloaded(stop_at: int | None, config: str, folder: Path, *options: str) -> Run:
    """Train with parameters on the CPU, in pinned memory if there is a GPU; check that they and the optimizer are."""
    pinned = torch.cuda.is_available()
    policy = partial(CPUOffloadPolicy, pin_memory=pinned)  # torchtitan pins, which torch can't without a GPU
    devices: set[str] = set()

    def note(optimizer: torch.optim.Optimizer, *unused: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                devices.update(each.device.type for each in (parameter, parameter.grad) if each is not None)

    handle = register_optimizer_step_pre_hook(note)
    try:
        with mock.patch.object(fsdp, "CPUOffloadPolicy", policy):
            run = train(config, folder, "--training.enable_cpu_offload", *options, stop_at=stop_at)
    finally:
        handle.remove()
    assert devices == {"cpu"}
    return run


def train_in_chunks(config: str, folder: Path, *options: str) -> Run:
    """Train with context parallelism whose ranks attend to their own part alone: ring attention has no CPU kernels."""
    with mock.patch.object(llama3_parallelize, "apply_cp_to_forward"):
        return train(config, folder, *options)


def train_until(stop_at: int, config: str, folder: Path, *options: str) -> Run:
    """Train, and be interrupted in that step."""
    return train(config, folder, *options, stop_at=stop_at)


def train_watched(checkpoint: Path, copies: Path, config: str, folder: Path, *options: str) -> Run:
    """Train, and copy a checkpoint whenever this process is about to change a file of it."""
    with copies_of(checkpoint, copies, dist.get_rank()):
        return train(config, folder, *options)


def parallelism(module: str, config: str, *options: str) -> str:
    """Return the parallelism section of a configuration with command-line options, as torchtitan logs it.

    Ranks but the first return nothing, for torchtitan is slow to read a command line.
    """
    if dist.get_rank() != 0:
        return ""
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


def unsharded() -> Trainer.Config:
    """Return the small configuration with a function that shards nothing."""
    config = strategy()
    assert config.model_spec is not None
    config.model_spec = replace(config.model_spec, parallelize_fn=lambda model, **arguments: model)
    return config


def refused_configuration(name: str) -> str:
    """Return what the configuration of another trainer raises."""
    try:
        getattr(config_registry, name)()
    except TypeError as error:
        return str(error)
    raise AssertionError(f"{name} was accepted")


def whose_fully_shard() -> str:
    """Return the module of the ``fully_shard`` that torchtitan shards by."""
    return str(fsdp.fully_shard.__module__)


def misspelt() -> Trainer.Config:
    """Return the small configuration with a strategy that is none."""
    config = strategy()
    config.parallelism.strategy = "zeropp"
    return config


def seed_checkpoint(folder: Path, *options: str) -> list[str]:
    """Return the keys of what torchtitan saves in a seed checkpoint."""
    trainer = build("strategy", "--dump_folder", str(folder), "--checkpoint.create_seed_checkpoint", *options)
    keys = list(trainer.checkpointer.states)
    trainer.close()
    return keys
