"""Saves over an earlier checkpoint that are cut off or killed, also while another job saves there.

A whole version loads then, of which training goes on with the very losses, or all ranks are told what to do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from harness import llama, models
from harness.adapter import Case, Fsdp2
from harness.covering import over_each
from harness.messages import collected
from harness.pool import Pool, WorkerError, device_type
from harness.training import train
from hugging_face import fsdp2_plugin, logged, make_trainer, new_job
from lightning.fabric import Fabric
from lightning_ways import ACCELERATOR, environment, ranks, shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fsdp_zpp import Int4, Int4Delta, LocalSteps, LoCo, Strategy
from fsdp_zpp.integrations import _turns, accelerate, transformers
from fsdp_zpp.integrations._codec_files import load_codec_state, save_codec_state
from fsdp_zpp.integrations._cut_off_saves import MarkedSave, check_complete
from fsdp_zpp.integrations.lightning.fabric import ModelParallelStrategy

Pools = Callable[[int], Pool]
STRATEGIES = {
    "stateful": Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=1),
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=1),
}
"""Strategies that have codec state, each of another kind."""
TOLD = ("remove", "resume from another checkpoint")


class InFolder:
    """Checkpoints that are a folder, as of most frameworks."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        """Train a model, and save it in ``folder``; ``steps`` tell one save from another."""
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
        return train(Fsdp2(), model, Case(steps=1), optimizer=optimizer, first_step=4)

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
        accelerator = Accelerator(cpu=device_type() == "cpu")
        accelerate.use_strategy(accelerator, strategy, plugin=fsdp2_plugin())
        model = llama.make_base()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))

    def _train(self, accelerator: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = llama.loss_of(model, llama.tokens(step, rank=0))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


class ByTrainer(InFolder):
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


class ByFabric(InFolder):
    """Checkpoints of Lightning's Fabric."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        with environment():
            fabric, model, optimizer = self._set_up(strategy)
            self._train(fabric, model, optimizer, range(steps))
            fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer})

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        with environment():
            fabric, model, optimizer = self._set_up(strategy)
            fabric.load(folder / "checkpoint", {"model": model, "optimizer": optimizer})
            return self._train(fabric, model, optimizer, range(4, 6))

    def _set_up(self, strategy: Strategy) -> tuple[Any, Any, Any]:
        own = ModelParallelStrategy(
            lambda net, mesh: shard(net, net.blocks, strategy, mesh["data_parallel"]),
            data_parallel_size=2,
            tensor_parallel_size=1,
        )
        fabric = Fabric(accelerator=ACCELERATOR, **ranks(), strategy=own)
        fabric.launch()
        model = fabric.setup_module(models.make_net())
        return fabric, model, fabric.setup_optimizers(models.make_optimizer("adamw", model.parameters()))

    def _train(self, fabric: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = models.loss_of(model, models.batch(step, 0, rank=0))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


WAYS = {"folder": InFolder(), "file": InFile()}
FRAMEWORKS = {"accelerate": ByAccelerate(), "Trainer": ByTrainer(), "Fabric": ByFabric()}


_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
_here = threading.local()
_watched: tuple[str, Callable[[bool], None]] | None = None
_is_installed = False


@contextmanager
def before_operations(folder: Path, before: Callable[[bool], None]) -> Iterator[None]:
    """Return a context in which ``before`` runs before each operation of this process on files of a folder.

    It is told whether the operation is to change a file. Python's audit events tell of operations.
    """
    global _watched, _is_installed
    if not _is_installed:  # for good: there is no way to remove it
        sys.addaudithook(_before_event)
        _is_installed = True
    _watched = str(folder), before
    try:
        yield
    finally:
        _watched = None


def _before_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None or getattr(_here, "acts", False):
        return
    _here.acts = True
    try:
        folder, before = _watched
        if arguments and _path_in(event, arguments).startswith(folder):
            writes = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            before(event in _CHANGES or writes)
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
    """Return a context in which ``folder`` is copied into ``copies`` before this process changes a file of it."""
    copies.mkdir(parents=True, exist_ok=True)
    lock, numbers = threading.Lock(), count()

    def copy(changes: bool) -> None:
        if not changes:
            return
        with lock, suppress(shutil.Error, FileNotFoundError):  # files that another rank removes meanwhile
            shutil.copytree(folder, copies / f"rank{rank}-{next(numbers):03}", symlinks=True)

    with before_operations(folder, copy):
        yield


Outcome = list[float] | str
"""Losses after a checkpoint was loaded, or the error."""


def outcome(way: InFolder, strategy: Strategy, folder: Path) -> tuple[Outcome, bool]:
    """Return what comes of a checkpoint, and whether a warning says that codec state is lost."""
    with collected() as records:
        try:
            result: Outcome = way.go_on(strategy, folder)
        except BaseException as error:  # CheckpointException is no Exception
            result = str(error)
    return result, any(level == "WARNING" and "start over" in text for level, text in records)


@dataclass(frozen=True)
class CutOff:
    """Outcomes of two whole saves, and of states that the second leaves if it is cut off."""

    older: Outcome
    newer: Outcome
    copies: list[tuple[Outcome, bool]]


def cut_off(way: InFolder, strategy: Strategy, folder: Path, few: bool, marked: bool = True) -> CutOff:
    """In a worker: what comes of two saves, and of each state that the second leaves, or of ``few`` of them.

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
    older, newer = (outcome(way, strategy, each)[0] for each in (folder / "older", saved))
    return CutOff(older, newer, [outcome(way, strategy, copy) for copy in copies])


def is_told(outcomes: Sequence[Outcome]) -> bool:
    """Return whether all ranks hear what to do."""
    return all(isinstance(each, str) and all(word in each for word in TOLD) for each in outcomes)


def check(by_rank: list[CutOff]) -> list[list[Outcome]]:
    """Fail if a cut-off save trains on from anything else than one of both, without a word; return its outcomes."""
    older, newer = by_rank[0].older, by_rank[0].newer
    assert isinstance(older, list)
    assert isinstance(newer, list)
    assert older != newer
    by_copy = []
    for copies in zip(*(each.copies for each in by_rank), strict=True):
        outcomes = [result for result, _ in copies]
        is_whole = outcomes[0] in (older, newer) or any(warned for _, warned in copies)
        assert is_told(outcomes) or (is_whole and all(isinstance(each, list) for each in outcomes)), outcomes
        by_copy.append(outcomes)
    return by_copy


@over_each(rest=False, way=WAYS, strategy=STRATEGIES)
def test_a_mixture_of_two_saves_is_refused(pool: Pools, tmp_path: Path, way: InFolder, strategy: Strategy) -> None:
    outcomes = check(pool(2).run(cut_off, way, strategy, tmp_path, False))
    assert sum(map(is_told, outcomes)) > 6


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_save_by_a_framework_is_refused_from_its_first_write_to_its_last(
    pool: Pools, tmp_path: Path, name: str
) -> None:
    by_rank = pool(2).run(cut_off, FRAMEWORKS[name], STRATEGIES["stateful"], tmp_path, True)
    before, inside, last = check(by_rank)
    assert before[0] == by_rank[0].older
    assert is_told(inside)
    assert is_told(last)


@pytest.mark.wide
@over_each(rest=False, way=FRAMEWORKS, strategy=STRATEGIES)
def test_a_mixture_of_two_saves_by_a_framework_is_refused(
    pool: Pools, tmp_path: Path, way: InFolder, strategy: Strategy
) -> None:
    check(pool(2).run(cut_off, way, strategy, tmp_path, False))


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
    pool.stop()


def save_until_killed(way: InFolder, strategy: Strategy, folder: Path, rank: int, at: int, takes_down: bool) -> int:
    """In a worker: save, until a rank is killed before an operation on a file, and perhaps takes the other one down.

    Returns:
        The number of operations.
    """
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    killed = [each for each in processes if takes_down and each != os.getpid()] + [os.getpid()]
    operations = count()

    def before(changes: bool) -> None:
        if next(operations) == at and dist.get_rank() == rank:
            for process in killed:
                os.kill(process, signal.SIGKILL)

    with mock.patch("os.fsync"), before_operations(folder, before):  # a killed process loses nothing of the page cache
        way.save(strategy, folder, 4)
    return next(operations)


def loaded(way: InFolder, strategy: Strategy, folder: Path) -> Outcome:
    """In a worker: the losses after what is in a folder was loaded, or the error."""
    return outcome(way, strategy, folder)[0]


@pytest.mark.slow
@over_each(rest=False, way=FRAMEWORKS, strategy=STRATEGIES)
def test_what_loads_after_kills_at_random_is_whole(
    pool: Pools, job: Pool, tmp_path: Path, way: InFolder, strategy: Strategy
) -> None:
    older, newer = tmp_path / "older", tmp_path / "newer"
    older.mkdir()
    pool(2).run(save_by, way, strategy, older, 2)
    shutil.copytree(older, newer)
    operations = pool(2).run(save_until_killed, way, strategy, newer, 0, -1, False)
    versions = [pool(2).run(loaded, way, strategy, version) for version in (older, newer)]
    dice = random.Random(0)
    for number in range(60):
        shutil.copytree(older, saved := tmp_path / str(number))
        rank = dice.choice([rank for rank, total in enumerate(operations) if total])
        at = dice.randrange(operations[rank])
        with suppress(WorkerError):
            job.run(save_until_killed, way, strategy, saved, rank, at, dice.random() < 0.5)
        outcomes = pool(2).run(loaded, way, strategy, saved)
        assert outcomes in versions or is_told(outcomes), (rank, at, outcomes)


def save_by(way: InFolder, strategy: Strategy, folder: Path, steps: int) -> None:
    """In a worker: save."""
    way.save(strategy, folder, steps)


_held: Any = None


def begin(checkpoint: Path) -> None:
    """In a worker: begin to save over a checkpoint."""
    global _held
    _held = MarkedSave(checkpoint)


def end(fails: bool) -> None:
    """In a worker: complete that, or end it because of an error."""
    _held.abandon() if fails else _held.complete()


def save_after_another(folder: Path, waits: Path) -> list[str]:
    """In a worker: what is said of a save that waits for its turn, of which ``waits`` tells while it does."""

    def pause(seconds: float) -> None:
        waits.touch()
        time.sleep(0.01)

    with mock.patch.object(_turns, "sleep", pause), collected() as records:
        InFolder().save(STRATEGIES["stateful"], folder, 4)
    return [text for level, text in records if level == "WARNING"]


def test_a_job_waits_for_another_that_saves_and_saves_all_when_that_is_killed(
    pool: Pools, job: Pool, tmp_path: Path
) -> None:
    older, both, waits = tmp_path / "older", tmp_path / "both", tmp_path / "waits"
    older.mkdir()
    pool(2).run(save_by, InFolder(), STRATEGIES["stateful"], older, 4)
    whole = pool(2).run(loaded, InFolder(), STRATEGIES["stateful"], older)
    shutil.copytree(older, both)
    job.run(begin, both / "checkpoint")
    (both / "checkpoint" / "model" / ".metadata").write_text("of the one that is killed")
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(pool(2).run, save_after_another, both, waits)
        while not (waits.exists() or saving.done()):
            wait([saving], 0.01)
        job.stop(kill=True)
        said, others = saving.result()
    assert waits.exists()
    assert "another job is saving to" in said[0]
    assert f"remove {both / 'checkpoint.save_was_cut_off'}" in said[0]
    assert others == []
    assert pool(2).run(loaded, InFolder(), STRATEGIES["stateful"], both) == whole


NO_LOCKS = mock.patch.object(fcntl, "lockf", side_effect=OSError(errno.ENOLCK, "No locks available"))
"""Patch that makes a file system without locks."""


def refusal(checkpoint: Path) -> str:
    """Return what is said of a checkpoint when it is to be loaded; nothing if it is whole."""
    try:
        check_complete(checkpoint)
    except ValueError as error:
        return str(error)
    return ""


def within_another(checkpoint: Path, place: Any, first_ends_first: bool) -> tuple[list[tuple[str, str]], str]:
    """In a worker: what is said if a save begins within another, and of what both leave."""
    with NO_LOCKS, collected() as records:
        saves = [MarkedSave(checkpoint, place=place) for _ in range(2)]
        if dist.get_rank() == 0 and place != "inside":
            checkpoint.parent.mkdir(exist_ok=True)
            checkpoint.write_text("of both")
        for save in saves if first_ends_first else reversed(saves):
            save.complete()
    return records, refusal(checkpoint)


def saved(checkpoint: Path, place: Any, has_locks: bool) -> str:
    """In a worker: what is said of a checkpoint after a save."""
    with nullcontext() if has_locks else NO_LOCKS:
        MarkedSave(checkpoint, place=place).complete()
        return refusal(checkpoint)


@pytest.mark.parametrize("place", ["inside", "beside", "above"])
@pytest.mark.parametrize("first_ends_first", [True, False], ids=["first ends first", "first ends last"])
def test_without_locks_saves_go_and_a_mixture_is_told(
    pool: Pools, tmp_path: Path, place: Any, first_ends_first: bool
) -> None:
    checkpoint = tmp_path / "checkpoints" / "checkpoint"
    replies = pool(2).run(within_another, checkpoint, place, first_ends_first)
    assert "another job has saved" in replies[0][0][0][1]
    for _, text in replies:
        assert text.startswith(f"two jobs have saved {checkpoint} at the same time")
        assert "resume from another checkpoint" in text
    for has_locks in (False, True):
        assert pool(2).run(saved, checkpoint, place, has_locks) == ["", ""]
        assert {path.name for path in tmp_path.rglob("*")} == {"checkpoints", "checkpoint"}


def test_what_is_being_saved_is_not_said_to_be_cut_off(pool: Pools, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    pool(2).run(begin, checkpoint)
    assert refusal(checkpoint) == (
        f"{checkpoint} is being saved by another job: wait until it is done, or resume from another checkpoint"
    )
    pool(2).run(end, False)
    assert refusal(checkpoint) == ""
    pool(2).run(begin, checkpoint)
    pool(2).run(end, True)
    assert refusal(checkpoint).startswith(f"the last save of {checkpoint} was cut off")


def failed_on(checkpoint: Path, rank: int) -> str:
    """In a worker: what is said if a rank can't lock its byte, and that nothing is held afterwards."""
    error = OSError(errno.EIO if dist.get_rank() == rank else errno.ENOLCK, "broken")
    with mock.patch.object(fcntl, "lockf", side_effect=error), pytest.raises((OSError, RuntimeError)) as raised:
        MarkedSave(checkpoint, place="inside")
    MarkedSave(checkpoint, place="inside").complete()
    return str(raised.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_turn_that_cannot_begin_on_one_rank_raises_on_all(pool: Pools, tmp_path: Path, rank: int) -> None:
    assert all("broken" in error for error in pool(2).run(failed_on, tmp_path, rank))
    assert list(tmp_path.iterdir()) == []


def naming_accelerator(project: Path) -> Accelerator:
    """Return an accelerator with a strategy and a model, whose checkpoints it names."""
    configuration = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=device_type() == "cpu", project_config=configuration)
    accelerate.use_strategy(accelerator, Strategy("GGG", gpus_per_node=1))
    accelerator.prepare(llama.make_base())
    return accelerator


def save_and_load_named(project: Path, fails: bool) -> str:
    """In a worker: save a checkpoint that accelerate names, and load the last one; returns the error, if any."""
    with new_job():
        accelerator = naming_accelerator(project)
        if fails:
            accelerator.register_save_state_pre_hook(mock.Mock(side_effect=RuntimeError("cut off")))
        with pytest.raises(RuntimeError, match="cut off") if fails else nullcontext():
            accelerator.save_state()
        dist.barrier()  # until no rank holds the turn of the save that failed
        try:
            accelerator.load_state()
        except ValueError as error:
            return str(error)
        return ""


def test_a_checkpoint_that_accelerate_names_is_refused_if_it_was_cut_off(pool: Pools, tmp_path: Path) -> None:
    whole, cut_off = tmp_path / "whole", tmp_path / "cut off"
    assert pool(2).run(save_and_load_named, whole, False) == ["", ""]
    for error in pool(2).run(save_and_load_named, cut_off, True):
        assert error.startswith(f"the last save of {cut_off / 'checkpoints' / 'checkpoint_0'} was cut off")
    assert [path.name for path in (cut_off / "checkpoints").iterdir()] == ["checkpoint_0"]


def with_codec_state(checkpoint: Path) -> tuple[Any, list[Any]]:
    """Return a model that has codec state and its optimizers; that state is saved."""
    model = Fsdp2().make(Case(steps=1), Strategy.loco(gpus_per_node=1))
    optimizer = models.make_optimizer("adamw", model.parameters())
    train(Fsdp2(), model, Case(steps=1), optimizer=optimizer)
    save_codec_state(model, [optimizer], checkpoint)
    return model, [optimizer]


def replaced(checkpoint: Path) -> tuple[bool, str]:
    """In a worker: whether a rank wrote anew while rank 0, which gives it time to, was removing what was there; and
    what a rank hears if rank 0 may not remove it.
    """
    trained = with_codec_state(checkpoint)
    store = dist.distributed_c10d._get_default_store()
    key = f"{checkpoint} is written"
    overtaken = False
    remove, write = shutil.rmtree, dcp.save

    def remove_slowly(folder: Path) -> None:
        nonlocal overtaken
        with suppress(dist.DistStoreError):
            store.wait([key], timedelta(seconds=1))
            overtaken = True
        remove(folder)

    def write_and_tell(*args: Any, **kwargs: Any) -> None:
        store.set(key, "yes")
        write(*args, **kwargs)

    with mock.patch("shutil.rmtree", remove_slowly), mock.patch.object(dcp, "save", write_and_tell):
        save_codec_state(*trained, checkpoint)
    refuses = mock.patch("shutil.rmtree", side_effect=PermissionError("not yours"))
    with refuses, pytest.raises(PermissionError) as error:
        save_codec_state(*trained, checkpoint)
    return overtaken, str(error.value)


def test_codec_state_is_written_once_what_was_there_is_gone(pool: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "step-4"
    folder.mkdir()
    assert pool(2).run(replaced, folder) == [(False, "not yours")] * 2
    assert (folder / "codecs" / ".metadata").is_file()


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
