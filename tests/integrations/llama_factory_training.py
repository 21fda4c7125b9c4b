"""Trainings by LLaMA-Factory's own functions, for test_llama_factory.py."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from harness.pool import device_type
from hugging_face import choose_own_fsdp, new_job
from tiny_chats import TOKENS
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from fsdp_zpp import traffic

COLUMNS = {"prompt": "instruction", "query": "input"}
DATASETS: dict[str, dict[str, Any]] = {
    "chats": {"file_name": "alpaca.json"},
    "pairs": {
        "file_name": "ranked.json",
        "ranking": True,
        "columns": COLUMNS | {"chosen": "chosen", "rejected": "rejected"},
    },
}


def write_datasets(folder: Path) -> None:
    """Write what LLaMA-Factory reads to find the chats of ``tiny_chats``."""
    (folder / "dataset_info.json").write_text(json.dumps(DATASETS))
    chats = {"path": str(folder / "alpaca.json"), "source": "local", "converter": "alpaca"}
    (folder / "v1.yaml").write_text(json.dumps({"chats": chats}))  # which is YAML, too


def import_llama_factory() -> None:
    """Import LLaMA-Factory, in a worker."""
    import llamafactory.train.tuner  # noqa: F401

    import fsdp_zpp.integrations.llama_factory  # noqa: F401


def arguments_for(folder: Path, output: Path, **others: Any) -> dict[str, Any]:
    """Return the arguments for the small model: four steps of two micro-batches."""
    return {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_target": "all",
        "dataset": "chats",
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": 128,
        "output_dir": str(output),
        "overwrite_cache": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "preprocessing_num_workers": 1,
        "dataloader_num_workers": 0,  # a pool's workers may have no processes of their own
        "use_cpu": device_type() == "cpu",
    } | others


@dataclass
class Result:
    """Results that a training leaves behind."""

    losses: list[float]
    logits: Tensor
    """Logits of the model as it is then, sharded."""
    sent: dict[str, Any] | None
    """Traffic of the strategy."""


def result_of(model: nn.Module, losses: list[float], *, has_strategy: bool) -> Result:
    """Return what a training has left behind."""
    assert isinstance(model, FSDPModule)  # by itself accelerate would choose DDP on a CPU
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=TOKENS.to(device_type())).logits.float().cpu()
    model.train(was_training)
    return Result(losses, logits, traffic(model) if has_strategy else None)


class Keeps(TrainerCallback):
    """Keeps what a training leaves behind."""

    def __init__(self, *, has_strategy: bool) -> None:
        self.has_strategy = has_strategy
        self.result: Result | None = None

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self.result = result_of(others["model"], losses, has_strategy=self.has_strategy)


@contextmanager
def llama_factory_job() -> Iterator[None]:
    """Return a context in which LLaMA-Factory runs as its command would run it, and after which it keeps nothing."""
    environment = {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", "WANDB_DISABLED": "true"}
    with (
        new_job(),
        patch.dict(os.environ, environment),
        patch("torch.distributed.destroy_process_group"),  # the workers' process group outlives a job
    ):
        yield


def trained(arguments: dict[str, Any]) -> Result:
    """In a worker: a training by LLaMA-Factory's own functions, by its own FSDP2 if there is no strategy."""
    with llama_factory_job():
        from llamafactory.train import tuner

        from fsdp_zpp.integrations.llama_factory import run_exp

        keeps = Keeps(has_strategy="fsdp_zpp" in arguments)
        if keeps.has_strategy:
            run_exp(arguments, [keeps])
        else:
            with _own_fsdp(arguments["stage"]):
                tuner.run_exp(arguments, [keeps])
        assert keeps.result is not None
        return keeps.result


@contextmanager
def _own_fsdp(stage: str) -> Iterator[None]:
    """Return a context in which a stage's trainer shards by accelerate's FSDP2, which it does not choose on a CPU."""
    from fsdp_zpp.integrations.llama_factory import TRAINERS

    name = TRAINERS[stage]
    modules = [importlib.import_module(f"llamafactory.train.{stage}.{each}") for each in ("trainer", "workflow")]
    cls = vars(modules[0])[name]

    class OwnSharding(cls):  # type: ignore[misc,valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
            choose_own_fsdp(self.accelerator, plugin)
            self.is_fsdp_enabled = True

    with ExitStack() as replaced:
        for module in modules:
            if vars(module).get(name) is cls:
                replaced.enter_context(patch.object(module, name, OwnSharding))
        yield


def v1_arguments_for(folder: Path, output: Path, **others: Any) -> dict[str, Any]:
    """Return V1's arguments for the small model: four steps of two micro-batches."""
    return {
        "model": str(folder / "model"),
        "model_class": "llm",
        "peft_config": {"name": "lora", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all"},
        "dist_config": {"name": "fsdp2"},
        "train_dataset": str(folder / "v1.yaml"),
        "output_dir": str(output),
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "cutoff_len": 128,
        "learning_rate": 5e-3,
        "max_steps": 4,
        "save_steps": 2,
        "bf16": False,
        "batching_workers": 0,
    } | others


def v1_trained(arguments: dict[str, Any]) -> Result:
    """In a worker: a training by V1's own functions, by its own FSDP2 if there is no strategy."""
    with llama_factory_job():
        from llamafactory.v1.accelerator.interface import DistributedInterface
        from llamafactory.v1.trainers import sft_trainer
        from llamafactory.v1.utils.callbacks import LoggingCallback

        from fsdp_zpp.integrations.llama_factory import run_sft

        has_strategy = "fsdp_zpp" in arguments
        results: list[Result] = []
        losses: list[float] = []
        save = sft_trainer.SFTTrainer.save_model
        on_log = LoggingCallback.on_log

        def save_and_keep(trainer: Any) -> None:
            save(trainer)
            results.append(result_of(trainer.model, losses, has_strategy=has_strategy))

        def log_and_keep(callback: Any, args: Any, state: Any, logs: dict[str, Any], **others: Any) -> None:
            losses.append(logs["loss"])
            on_log(callback, args, state, logs, **others)

        on_cpu = patch("torch.accelerator.synchronize") if device_type() == "cpu" else patch.dict({})
        DistributedInterface._instance, DistributedInterface._initialized = None, False
        with (
            on_cpu,  # which has nothing to synchronize, and torch raises
            patch("llamafactory.v1.accelerator.interface.init_process_group"),  # the pool has one
            patch("llamafactory.v1.accelerator.interface.destroy_process_group"),
            patch.object(sft_trainer.SFTTrainer, "save_model", save_and_keep),
            patch.object(LoggingCallback, "on_log", log_and_keep),
        ):
            (run_sft if has_strategy else sft_trainer.run_sft)(arguments)
        return results[0]
