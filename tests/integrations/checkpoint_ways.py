"""Saves and loads of a small model in training, by each framework: what tests of cut-off saves run over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from harness import llama, models
from harness.adapter import Case
from harness.disk import FILE_SIZE, quantized, stored_in
from harness.fsdp2 import Fsdp2
from harness.pool import device_type
from harness.training import train
from hugging_face import new_job
from lightning_runs import Run, perform
from lightning_ways import Way
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from transformers import Trainer, TrainingArguments

from fsdp_zpp import Int4, Int4Delta, LocalSteps, LoCo, Strategy, save_frozen_params
from fsdp_zpp.integrations import accelerate, transformers
from fsdp_zpp.integrations._codec_files import load_codec_state, save_codec_state
from fsdp_zpp.integrations._cut_off_saves import MarkedSave, check_complete

STRATEGIES = {
    "stateful": Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=1),
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=1),
}


class InFolder:
    """Checkpoints that are a folder, as of most frameworks."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        """Train a model, and save it in ``folder``."""
        model, optimizer = self._made(strategy)
        train(Fsdp2(), model, Case(steps=steps), optimizer=optimizer)
        with MarkedSave(folder / "checkpoint"):
            self._write(model, optimizer, folder / "checkpoint")
            save_codec_state(model, [optimizer], folder / "checkpoint")

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        """Return the losses of a model that goes on from there."""
        model, optimizer = self._made(strategy)
        check_complete(folder / "checkpoint")
        self._read(model, optimizer, folder / "checkpoint")
        load_codec_state(model, [optimizer], folder / "checkpoint")
        return train(Fsdp2(), model, Case(steps=2), optimizer=optimizer, first_step=4)

    def checkpoint(self, folder: Path) -> Path:
        """Return the folder with all that a save writes."""
        return folder

    def _made(self, strategy: Strategy) -> tuple[Any, Any]:
        model = Fsdp2().make(Case(), strategy)
        return model, models.make_optimizer("adamw", model.parameters())

    def _write(self, model: Any, optimizer: Any, checkpoint: Path) -> None:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights}, checkpoint_id=checkpoint / "model")
        dcp.save({"optimizer": states}, checkpoint_id=checkpoint / "optimizer")

    def _read(self, model: Any, optimizer: Any, checkpoint: Path) -> None:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights}, checkpoint_id=checkpoint / "model")
        dcp.load({"optimizer": states}, checkpoint_id=checkpoint / "optimizer")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


class InFile(InFolder):
    """Checkpoints that are one file, beside which codec state lies."""

    def _write(self, model: Any, optimizer: Any, checkpoint: Path) -> None:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            torch.save(weights, checkpoint)

    def _read(self, model: Any, optimizer: Any, checkpoint: Path) -> None:
        set_model_state_dict(model, torch.load(checkpoint), options=StateDictOptions(full_state_dict=True))


class ByAccelerate(InFolder):
    """Checkpoints of accelerate."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        with new_job():
            accelerator, model, optimizer = self._prepared(strategy)
            self._train(accelerator, model, optimizer, range(steps))
            accelerator.save_state(str(folder / "checkpoint"))

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        with new_job():
            accelerator, model, optimizer = self._prepared(strategy)
            accelerator.load_state(str(folder / "checkpoint"))
            return self._train(accelerator, model, optimizer, range(4, 6))

    def _prepared(self, strategy: Strategy) -> tuple[Any, Any, Any]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        plugin.set_state_dict_type("SHARDED_STATE_DICT")
        accelerator = accelerate.use_strategy(Accelerator(cpu=device_type() == "cpu"), strategy, plugin=plugin)
        model = llama.make_base()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))

    def _train(self, accelerator: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens = torch.randint(0, 40, (2, 16), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=tokens.to(accelerator.device), labels=tokens.to(accelerator.device)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


class ByTrainer(InFolder):
    """Checkpoints of Trainer, of which two trainings save after as many steps."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        self._train(strategy, folder, 2, learning_rate=1e-3 * steps, save_strategy="steps", save_steps=2)

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        return self._train(strategy, folder, 4, str(folder / "checkpoint-2"), save_strategy="no")[-2:]

    def _train(
        self, strategy: Strategy, folder: Path, steps: int, resume: str | None = None, **options: Any
    ) -> list[float]:
        with new_job():
            options |= {"report_to": [], "disable_tqdm": True, "use_cpu": device_type() == "cpu", "logging_steps": 1}
            arguments = TrainingArguments(str(folder), max_steps=steps, per_device_train_batch_size=2, **options)
            tokens = torch.randint(0, 40, (16, 16), generator=torch.Generator().manual_seed(3))
            data: Any = [{"input_ids": row, "labels": row} for row in tokens]
            trainer = Trainer(llama.make_base(), arguments, train_dataset=data)
            transformers.use_strategy(trainer, strategy).train(resume_from_checkpoint=resume)
            return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class ByLightning(InFolder):
    """Checkpoints of Lightning."""

    def __init__(self, framework: str, fsdp: str, full: bool) -> None:
        self._way, self._full = Way(framework, fsdp), full

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        perform(Run(self._way, strategy, steps=2, clip=0.1 * steps, full=self._full, save_to=folder))

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        return perform(Run(self._way, strategy, full=self._full, resume=folder / "step=2.ckpt")).losses


class SavedBase(InFolder):
    """Quantized bases, on all ranks."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        save_frozen_params(quantized(steps, dist.group.WORLD), folder / "base", max_file_size=FILE_SIZE)

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        return stored_in(folder / "base", dist.group.WORLD).flatten().tolist()


IN_FILES = {"file": InFile()}
WAYS = {"folder": InFolder(), **IN_FILES}
FRAMEWORKS = {
    "accelerate": ByAccelerate(),
    "Trainer": ByTrainer(),
    "Lightning's Fabric, sharded": ByLightning("fabric", "fsdp2", full=False),
    "Lightning's Fabric, full": ByLightning("fabric", "fsdp1", full=True),
    "Lightning's Trainer, sharded": ByLightning("trainer", "fsdp1", full=False),
    "Lightning's Trainer, full": ByLightning("trainer", "fsdp2", full=True),
}
