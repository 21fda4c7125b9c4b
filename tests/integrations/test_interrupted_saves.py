"""Saves over an earlier checkpoint that are cut off or killed, also while another job saves there.

A whole version loads then, of which training goes on with the very losses, or all ranks are told what to do.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from harness import llama, models
from harness.adapter import Case, Fsdp2
from harness.messages import collected
from harness.pool import Pool, Pools, device_type
from harness.training import train
from hugging_face import fsdp2_plugin, logged, make_trainer, new_job
from lightning.pytorch import LightningModule, Trainer
from lightning_ways import ACCELERATOR, environment, ranks, shard
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from fsdp_zpp import Int4, Int4Delta, LocalSteps, LoCo, Strategy
from fsdp_zpp.integrations import _common, accelerate, transformers
from fsdp_zpp.integrations._common import MarkedSave, check_complete, load_codec_state, save_codec_state
from fsdp_zpp.integrations.lightning import ModelParallelStrategy

FULL = StateDictOptions(full_state_dict=True)
STRATEGIES = {
    "stateful": Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=1),
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=1),
}
"""Strategies that have codec state, each of another kind."""
TOLD = ("remove", "resume from another checkpoint")


class InFile:
    """Checkpoints that are one file, beside which codec state lies."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        """Train a model, and save it in ``folder``; ``steps`` tell one save from another."""
        model, optimizer = self._made(strategy)
        train(Fsdp2(), model, Case(steps=steps), optimizer=optimizer)
        with MarkedSave(folder / "checkpoint"):
            weights = get_model_state_dict(model, options=FULL)
            if dist.get_rank() == 0:
                torch.save(weights, folder / "checkpoint")
            save_codec_state(model, [optimizer], folder / "checkpoint")

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        """Return the losses of a model that goes on from there."""
        model, optimizer = self._made(strategy)
        check_complete(folder / "checkpoint")
        set_model_state_dict(model, torch.load(folder / "checkpoint"), options=FULL)
        load_codec_state(model, [optimizer], folder / "checkpoint")
        return train(Fsdp2(), model, Case(steps=1), optimizer=optimizer, first_step=4)

    def _made(self, strategy: Strategy) -> tuple[Any, Any]:
        model = Fsdp2().make(Case(), strategy)
        return model, models.make_optimizer("adamw", model.parameters())


def train_llama(backward: Callable[[Tensor], None], model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = llama.loss_of(model, llama.tokens(step, rank=0))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class ByAccelerate:
    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        with self._prepared(strategy) as (accelerator, *training):
            train_llama(accelerator.backward, *training, range(steps))
            accelerator.save_state(str(folder / "checkpoint"))

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        with self._prepared(strategy) as (accelerator, *training):
            accelerator.load_state(str(folder / "checkpoint"))
            return train_llama(accelerator.backward, *training, range(4, 6))

    @contextmanager
    def _prepared(self, strategy: Strategy) -> Iterator[tuple[Any, Any, Any]]:
        with new_job():
            accelerator = Accelerator(cpu=device_type() == "cpu")
            accelerate.use_strategy(accelerator, strategy, plugin=fsdp2_plugin())
            model = llama.make_base()
            yield accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))


class ByTrainer:
    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        self._train(strategy, folder, 2, learning_rate=1e-3 * steps, save_strategy="steps", save_steps=2)

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        return self._train(strategy, folder, 4, str(folder / "checkpoint-2"))[-2:]

    def _train(
        self, strategy: Strategy, folder: Path, steps: int, resume: str | None = None, **options: Any
    ) -> list[float]:
        options |= {"max_steps": steps, "gradient_accumulation_steps": 1, "eval_strategy": "no"}
        with new_job():
            trainer = make_trainer(str(folder), llama.make_base(), **options)
            transformers.use_strategy(trainer, strategy).train(resume_from_checkpoint=resume)
            return logged(trainer, "loss")


class Llama(LightningModule):
    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.model, self.strategy = llama.make_base(), strategy
        self.losses: list[float] = []

    def configure_model(self) -> None:
        shard(self.model, llama.layers_of(self.model), self.strategy, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = llama.loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss


class ByLightning:
    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        self._fit(strategy, range(steps)).save_checkpoint(folder / "checkpoint")

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        trainer = self._fit(strategy, range(4, 6), folder / "checkpoint")
        return trainer.lightning_module.losses

    def _fit(self, strategy: Strategy, steps: range, checkpoint: Path | None = None) -> Any:
        with environment():
            trainer = Trainer(
                accelerator=ACCELERATOR,
                **ranks(),
                strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
                max_epochs=1 if checkpoint is None else 2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            # By row: the Trainer would take a list for several loaders.
            batches = torch.stack([llama.tokens(step, rank=0) for step in steps])
            trainer.fit(Llama(strategy), batches, ckpt_path=checkpoint)
            return trainer


Way = InFile | ByAccelerate | ByTrainer | ByLightning
FRAMEWORKS = {"accelerate": ByAccelerate(), "Trainer": ByTrainer(), "Lightning": ByLightning()}


_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
_here = threading.local()
_watched: tuple[str, Callable[[], None]] | None = None


@cache
def _install_hook() -> None:
    sys.addaudithook(_before_event)  # for good: there is no way to remove it


def _before_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None or getattr(_here, "acts", False):
        return
    _here.acts = True
    try:
        folder, copy = _watched
        writes = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if (writes or event in _CHANGES) and _path_in(event, arguments).startswith(folder):
            copy()
    finally:
        _here.acts = False


def _path_in(event: str, arguments: tuple[Any, ...]) -> str:
    """Return the path that an event is about, or nothing."""
    path = arguments[0]
    if not isinstance(path, str | os.PathLike):
        return ""
    # A function that removes a folder names what is in it relative to a descriptor.
    within = arguments[1] if event in ("os.remove", "os.rmdir") else -1
    return os.path.join(os.readlink(f"/proc/self/fd/{within}"), path) if within >= 0 else str(path)


@contextmanager
def copies_of(folder: Path, copies: Path, rank: int) -> Iterator[None]:
    """Return a context in which ``folder`` is copied before this process changes a file of it, as audit events tell."""
    global _watched
    copies.mkdir(parents=True, exist_ok=True)
    lock, numbers = threading.Lock(), count()

    def copy() -> None:
        with lock, suppress(shutil.Error, FileNotFoundError):  # files that another rank removes meanwhile
            shutil.copytree(folder, copies / f"rank{rank}-{next(numbers):03}", symlinks=True)

    _install_hook()
    _watched = str(folder), copy
    try:
        yield
    finally:
        _watched = None


Outcome = list[float] | str
"""Losses after a checkpoint was loaded, or the error."""


def outcome(way: Way, strategy: Strategy, folder: Path) -> tuple[Outcome, bool]:
    """Return what comes of a checkpoint, and whether a warning says that codec state is lost."""
    with collected() as records:
        try:
            result: Outcome = way.go_on(strategy, folder)
        except BaseException as error:  # CheckpointException is no Exception
            result = str(error)
    return result, any(level == "WARNING" and "start over" in text for level, text in records)


def cut_off(way: Way, strategy: Strategy, folder: Path, few: bool, marked: bool = True) -> list[tuple[Outcome, bool]]:
    """In a worker: outcomes of two whole saves, and of each state that the second leaves, or of ``few`` of them.

    Few are the states before rank 0 begins, in the middle, and before its last change of a file.
    """
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
    if few:
        own = [copy for copy in copies if copy.name.startswith("rank0")]
        copies = [own[0], own[len(own) // 2], own[-1]]
    if not marked and dist.get_rank() == 0:
        for mark in folder.glob("copies/**/*save_was_cut_off"):
            mark.unlink()
    dist.barrier()
    return [outcome(way, strategy, each) for each in (folder / "older", saved, *copies)]


def is_told(outcomes: Sequence[Outcome]) -> bool:
    return all(isinstance(each, str) and all(word in each for word in TOLD) for each in outcomes)


def check(by_rank: list[list[tuple[Outcome, bool]]]) -> tuple[Outcome, list[list[Outcome]]]:
    """Fail if a cut-off save silently trains on from neither of both; return the older outcome, and those by state."""
    (older, _), (newer, _) = by_rank[0][:2]
    assert isinstance(older, list)
    assert isinstance(newer, list)
    assert older != newer
    by_copy = []
    for copies in zip(*(each[2:] for each in by_rank), strict=True):
        outcomes = [result for result, _ in copies]
        is_whole = outcomes[0] in (older, newer) or any(warned for _, warned in copies)
        assert is_told(outcomes) or (is_whole and all(isinstance(each, list) for each in outcomes)), outcomes
        by_copy.append(outcomes)
    return older, by_copy


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_mixture_of_two_saves_is_refused(pool: Pools, tmp_path: Path, name: str) -> None:
    _, outcomes = check(pool(2).run(cut_off, InFile(), STRATEGIES[name], tmp_path, False))
    assert sum(map(is_told, outcomes)) > 6


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_save_by_a_framework_is_refused_from_its_first_write_to_its_last(
    pool: Pools, tmp_path: Path, name: str
) -> None:
    older, (before, inside, last) = check(
        pool(2).run(cut_off, FRAMEWORKS[name], STRATEGIES["stateful"], tmp_path, True)
    )
    assert before[0] == older
    assert is_told(inside)
    assert is_told(last)


def test_codec_state_of_a_mixture_that_is_loaded_all_the_same_is_dropped(pool: Pools, tmp_path: Path) -> None:
    # A user has removed the mark, as the error says.
    check(pool(2).run(cut_off, InFile(), STRATEGIES["stateful"], tmp_path, False, False))


@pytest.fixture(scope="module")
def job() -> Iterator[Pool]:
    """Return two ranks that may be killed, of which a process on a GPU could take down others."""
    if device_type() == "cuda":
        pytest.skip("a process that is killed may take down others on a GPU")
    pool = Pool(2)
    yield pool
    pool.stop(kill=True)


def save_by(way: Way, strategy: Strategy, folder: Path, steps: int) -> None:
    way.save(strategy, folder, steps)


_held: Any = None


def begin(checkpoint: Path) -> None:
    """In a worker: begin to save over a checkpoint."""
    global _held
    _held = MarkedSave(checkpoint)


def end() -> None:
    """In a worker: complete that."""
    _held.complete()


def test_a_job_saves_all_after_another_was_killed_while_it_saved(pool: Pools, job: Pool, tmp_path: Path) -> None:
    older, both = tmp_path / "older", tmp_path / "both"
    older.mkdir()
    pool(2).run(save_by, InFile(), STRATEGIES["stateful"], older, 4)
    whole = pool(2).run(outcome, InFile(), STRATEGIES["stateful"], older)
    shutil.copytree(older, both)
    job.run(begin, both / "checkpoint")
    (both / "checkpoint").write_text("of the one that is killed")
    assert refusal(both / "checkpoint").startswith(f"the last save of {both / 'checkpoint'} was cut off")
    job.stop(kill=True)
    pool(2).run(save_by, InFile(), STRATEGIES["stateful"], both, 4)
    assert pool(2).run(outcome, InFile(), STRATEGIES["stateful"], both) == whole


def refusal(checkpoint: Path) -> str:
    """Return what is said of a checkpoint when it is to be loaded; nothing if it is whole."""
    try:
        check_complete(checkpoint)
    except ValueError as error:
        return str(error)
    return ""


def within_another(checkpoint: Path, inside: bool, first_ends_first: bool) -> tuple[list[tuple[str, str]], str]:
    """In a worker: what is said if a save begins within another, and of what both leave."""
    with collected() as records:
        saves = [MarkedSave(checkpoint, inside=inside) for _ in range(2)]
        if dist.get_rank() == 0 and not inside:
            checkpoint.write_text("of both")
        for save in saves if first_ends_first else reversed(saves):
            save.complete()
    return records, refusal(checkpoint)


def saved(checkpoint: Path, inside: bool) -> str:
    MarkedSave(checkpoint, inside=inside).complete()
    return refusal(checkpoint)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "beside"])
@pytest.mark.parametrize("first_ends_first", [True, False], ids=["first ends first", "first ends last"])
def test_a_mixture_of_two_jobs_is_told(pool: Pools, tmp_path: Path, inside: bool, first_ends_first: bool) -> None:
    checkpoint = tmp_path / "checkpoint"
    replies = pool(2).run(within_another, checkpoint, inside, first_ends_first)
    assert "another job has saved" in replies[0][0][0][1]
    for _, text in replies:
        assert "or another job has saved there at the same time" in text
        assert "resume from another checkpoint" in text
    assert pool(2).run(saved, checkpoint, inside) == ["", ""]
    assert {path.name for path in tmp_path.rglob("*")} == {"checkpoint"}


def test_what_is_being_saved_is_refused(pool: Pools, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    pool(2).run(begin, checkpoint)
    assert refusal(checkpoint).startswith(f"the last save of {checkpoint} was cut off, or goes on in another job")
    pool(2).run(end)
    assert refusal(checkpoint) == ""


def refused_to_begin(checkpoint: Path) -> str:
    """In a worker: what a rank hears if rank 0 can't write the mark."""
    fails = mock.patch.object(_common, "write_whole", side_effect=PermissionError("broken"))
    with fails, pytest.raises(PermissionError) as raised:
        MarkedSave(checkpoint, inside=True)
    return str(raised.value)


def test_a_save_that_cannot_begin_raises_on_all_ranks(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(refused_to_begin, tmp_path) == ["broken"] * 2
    assert list(tmp_path.iterdir()) == []


def with_codec_state(checkpoint: Path) -> tuple[Any, list[Any]]:
    """Return a model that has codec state and its optimizers; that state is saved."""
    model = Fsdp2().make(Case(steps=1), Strategy.loco(gpus_per_node=1))
    optimizer = models.make_optimizer("adamw", model.parameters())
    train(Fsdp2(), model, Case(steps=1), optimizer=optimizer)
    save_codec_state(model, [optimizer], checkpoint)
    return model, [optimizer]


def refused_to_replace(checkpoint: Path) -> str:
    """In a worker: what a rank hears if rank 0 may not remove the codec state of an earlier save."""
    trained = with_codec_state(checkpoint)
    refuses = mock.patch("shutil.rmtree", side_effect=PermissionError("not yours"))
    with refuses, pytest.raises(PermissionError) as error:
        save_codec_state(*trained, checkpoint)
    return str(error.value)


def test_all_ranks_hear_that_earlier_codec_state_cannot_be_replaced(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(refused_to_replace, tmp_path) == ["not yours"] * 2


def heard_of_incomplete(checkpoint: Path, harm: str) -> str:
    """In a worker: what a rank hears if the codec state lacks something."""
    trained = with_codec_state(checkpoint)
    if dist.get_rank() == 0:
        files = sorted((checkpoint / "codecs").iterdir())
        if harm == "cut short":
            files[-1].write_bytes(files[-1].read_bytes()[:100])
        else:
            {path.name: path for path in files}[harm].unlink()
    dist.barrier()
    with pytest.raises(ValueError, match="can't be read") as error:
        load_codec_state(*trained, checkpoint)
    return str(error.value)


@pytest.mark.parametrize("harm", [".metadata", "__1_0.distcp", "cut short"])
def test_all_ranks_hear_what_to_do_with_incomplete_codec_state(pool: Pools, harm: str, tmp_path: Path) -> None:
    for error in pool(2).run(heard_of_incomplete, tmp_path, harm):
        assert f"the codec state in {tmp_path / 'codecs'} can't be read" in error
        assert "resume from another checkpoint, or remove this folder" in error
