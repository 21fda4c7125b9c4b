"""A save over an earlier one that is cut off anywhere: what loads is one of both, or all ranks are told what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from harness import llama, models
from harness.adapter import Case
from harness.covering import over_each
from harness.cut_off import copies_of
from harness.fsdp2 import Fsdp2
from harness.hugging_face import new_job
from harness.messages import collected
from harness.pool import Pool, device_type
from harness.training import train
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

from fsdp_zpp import Int4, Int4Delta, LocalSteps, LoCo, Strategy
from fsdp_zpp.integrations import accelerate, transformers
from fsdp_zpp.integrations._codec_files import load_codec_state, save_codec_state
from fsdp_zpp.integrations._cut_off_saves import check_complete, saving

STRATEGIES = {
    "stateful": Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=1),
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=1),
}
TOLD = ("remove", "resume from another checkpoint")
Outcome = list[float] | str
"""The losses after a checkpoint was loaded, or the error."""


class InFolder:
    """Checkpoints that are a folder, as of most frameworks."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        """Train a model, and save it in ``folder``."""
        model, optimizer = self._made(strategy)
        train(Fsdp2(), model, Case(steps=steps), optimizer=optimizer)
        with saving(folder / "checkpoint"):
            self._write(model, optimizer, folder / "checkpoint")
            save_codec_state(model, [optimizer], folder / "checkpoint")

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        """The losses of a model that goes on from there."""
        model, optimizer = self._made(strategy)
        check_complete(folder / "checkpoint")
        self._read(model, optimizer, folder / "checkpoint")
        load_codec_state(model, [optimizer], folder / "checkpoint")
        return train(Fsdp2(), model, Case(steps=2), optimizer=optimizer, first_step=4)

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
    """Those of accelerate."""

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
    """Those of Trainer, of which two trainings save after as many steps."""

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
    """Those of Lightning."""

    def __init__(self, framework: str, fsdp: str, full: bool) -> None:
        self._way, self._full = Way(framework, fsdp), full

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        perform(Run(self._way, strategy, steps=2, clip=0.1 * steps, full=self._full, save_to=folder))

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        return perform(Run(self._way, strategy, full=self._full, resume=folder / "step=2.ckpt")).losses


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


def outcome(go_on: Callable[[], list[float]]) -> tuple[Outcome, bool]:
    """What comes of loading a checkpoint and training on, and whether this rank warns that codec state starts over."""
    with collected() as records:
        try:
            found: Outcome = go_on()
        except (ValueError, OSError, RuntimeError) as error:
            found = str(error)
    return found, any(level == "WARNING" and "start over" in text for level, text in records)


def cut_off(
    way: InFolder, strategy: Strategy, folder: Path, marked: bool
) -> tuple[list[Outcome], list[tuple[Outcome, bool]]]:
    """In a worker: what comes of both saves, and of each state that the second leaves if it is cut off."""
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    way.save(strategy, saved, 2)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(saved, folder / "older")
    dist.barrier()
    with copies_of(saved, folder / "copies", dist.get_rank()):
        way.save(strategy, saved, 4)
    dist.barrier()
    copies = sorted((folder / "copies").iterdir())
    if not marked and dist.get_rank() == 0:
        for mark in folder.glob("copies/**/*save_was_cut_off"):
            mark.unlink()
    dist.barrier()
    whole = [outcome(partial(way.go_on, strategy, each))[0] for each in (folder / "older", saved)]
    return whole, [outcome(partial(way.go_on, strategy, copy)) for copy in copies]


def check(by_rank: list[tuple[list[Outcome], list[tuple[Outcome, bool]]]]) -> None:
    """Fail if a cut-off save trains on from anything else than one of both, without a word."""
    older, newer = by_rank[0][0]
    assert isinstance(older, list)
    assert isinstance(newer, list)
    assert older != newer
    for copies in zip(*(copies for _, copies in by_rank), strict=True):
        found = [copy[0] for copy in copies]
        if all(isinstance(each, list) for each in found):
            assert found[0] in (older, newer) or any(warned for _, warned in copies), found
        else:
            assert all(isinstance(each, str) and all(word in each for word in TOLD) for each in found), found


@over_each(way=WAYS, strategy=STRATEGIES)
def test_a_mixture_of_two_saves_is_refused(
    pool: Callable[[int], Pool], tmp_path: Path, way: InFolder, strategy: Strategy
) -> None:
    by_rank = pool(2).run(cut_off, way, strategy, tmp_path, True)
    check(by_rank)
    assert len(by_rank[0][1]) > 6


@pytest.mark.slow
@over_each(way=FRAMEWORKS, strategy=STRATEGIES)
def test_a_mixture_of_two_saves_by_a_framework_is_refused(
    pool: Callable[[int], Pool], tmp_path: Path, way: InFolder, strategy: Strategy
) -> None:
    check(pool(2).run(cut_off, way, strategy, tmp_path, True))


def cut_off_new(way: InFolder, strategy: Strategy, folder: Path) -> tuple[list[Outcome], list[tuple[Outcome, bool]]]:
    """In a worker: what comes of a save, and of each state that it leaves if it is cut off."""
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    dist.barrier()
    with copies_of(saved, folder / "copies", dist.get_rank()):
        way.save(strategy, saved, 2)
    dist.barrier()
    copies = [copy for copy in sorted((folder / "copies").iterdir()) if list(copy.glob("*/*"))]
    whole = outcome(partial(way.go_on, strategy, saved))[0]
    return [[], whole], [outcome(partial(way.go_on, strategy, copy)) for copy in copies]


@pytest.mark.slow
@over_each(way={name: FRAMEWORKS[name] for name in ("accelerate", "Trainer")})
def test_a_new_checkpoint_that_lacks_something_is_refused(
    pool: Callable[[int], Pool], tmp_path: Path, way: InFolder
) -> None:
    check(pool(2).run(cut_off_new, way, STRATEGIES["stateful"], tmp_path))


@over_each(way=IN_FILES)
def test_codec_state_of_a_mixture_that_is_loaded_all_the_same_is_dropped(
    pool: Callable[[int], Pool], tmp_path: Path, way: InFolder
) -> None:
    """A user has removed the mark, as the error says."""
    check(pool(2).run(cut_off, way, STRATEGIES["stateful"], tmp_path, False))
