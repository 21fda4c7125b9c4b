"""Trainings by ms-swift's own functions, for test_ms_swift.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from harness.pool import device_type
from hugging_face import choose_own_fsdp, new_job
from tiny_chats import TOKENS
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Strategy, traffic

OWN = None
"""In place of a strategy: ms-swift's own FSDP2, which accelerate does not choose on a CPU."""


def import_ms_swift() -> None:
    """Import ms-swift, in a worker."""
    import swift.pipelines.train.rlhf
    import swift.pipelines.train.sft
    import swift.rlhf_trainers
    import swift.trainers  # noqa: F401

    import fsdp_zpp.integrations.ms_swift  # noqa: F401


def arguments_for(folder: Path, output: Path, **others: Any) -> list[str]:
    """Return the command line for the small model: four steps of two micro-batches."""
    arguments = {
        "model": folder / "model",
        "model_type": "llama",
        "template": "chatml",
        "dataset": folder / "messages.jsonl",
        "output_dir": output,
        "add_version": "false",
        "torch_dtype": "float32",  # for which ms-swift computes in fp16, unless told not to
        "fp16": "false",
        "bf16": "false",
        "tuner_type": "lora",
        "target_modules": "all-linear",
        "lora_dropout": 0,
        "max_length": 128,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "no",
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,  # a pool's workers may have no processes of their own
        "report_to": "none",
        "check_model": "false",
        "use_cpu": str(device_type() == "cpu").lower(),
    }
    return [text for name, value in (arguments | others).items() for text in (f"--{name}", str(value))]


@dataclass
class Result:
    """Results that a training leaves behind."""

    losses: list[float]
    logits: Tensor
    """Logits of the model as it is then, sharded."""
    sent: dict[str, Any] | None
    """Traffic of the strategy."""


@contextmanager
def ms_swift_job(strategy: Strategy | None) -> Iterator[None]:
    """Return a context in which ms-swift runs as its command would run it, and after which it keeps nothing."""
    from swift.trainers import TrainerFactory

    from fsdp_zpp.integrations.ms_swift import use_strategy

    original = vars(TrainerFactory)["get_trainer_cls"]
    with new_job(), patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}):
        try:
            if strategy is None:
                TrainerFactory.get_trainer_cls = staticmethod(_with_own_fsdp(TrainerFactory.get_trainer_cls))
            else:
                use_strategy(strategy)
            yield
        finally:
            TrainerFactory.get_trainer_cls = original


def _with_own_fsdp(get_trainer_cls: Any) -> Any:
    def get(args: Any) -> type:
        cls = get_trainer_cls(args)

        class OwnSharding(cls):
            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
                choose_own_fsdp(self.accelerator, plugin)
                self.is_fsdp_enabled = True

        return OwnSharding

    return get


def trained(arguments: list[str], strategy: Strategy | None) -> Result:
    """In a worker: a training by ms-swift's own functions."""
    with ms_swift_job(strategy):
        from swift.pipelines import rlhf_main, sft_main
        from swift.pipelines.train.sft import SwiftSft

        trainers: list[Any] = []
        train = SwiftSft.train

        def train_and_keep(self: Any, trainer: Any) -> Any:
            trainers.append(trainer)
            return train(self, trainer)

        with patch.object(SwiftSft, "train", train_and_keep):
            (rlhf_main if "--rlhf_type" in arguments else sft_main)(arguments)
        (trainer,) = trainers
        model = trainer.model
        assert isinstance(model, FSDPModule)  # by itself accelerate would choose DDP on a CPU
        with torch.no_grad():
            logits = model(input_ids=TOKENS.to(trainer.args.device)).logits.float().cpu()
        reference = getattr(trainer, "ref_model", None)
        sent = None if strategy is None else traffic(model)
        if reference is not None and strategy is not None:
            assert traffic(reference)["gather"]["inter"] > 0
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return Result(losses, logits, sent)
