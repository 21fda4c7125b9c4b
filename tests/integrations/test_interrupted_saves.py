"""Saves over an earlier checkpoint that are cut off or killed, also while another job saves there, by each framework.

What then loads is a whole version, of which training goes on with the very losses, or all ranks are told what to do.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, count, repeat
from multiprocessing.connection import wait
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
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.disk import FILE_SIZE, quantized, stored_in
from harness.fsdp2 import Fsdp2
from harness.messages import collected
from harness.pool import Pool, WorkerError, device_type, free_port, init_process_group, start_method
from harness.training import train
from hugging_face import fsdp2_plugin, logged, make_trainer, new_job
from lightning_ways import Way
from test_lightning import Run, perform
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fsdp_zpp import Int4, Int4Delta, LocalSteps, LoCo, Strategy, save_frozen_params
from fsdp_zpp.integrations import _turns, accelerate, transformers
from fsdp_zpp.integrations._codec_files import load_codec_state, save_codec_state
from fsdp_zpp.integrations._cut_off_saves import MarkedSave, check_complete

Pools = Callable[[int], Pool]
STRATEGIES = {
    "stateful": Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=1),
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=1),
}
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


class ByLightning(InFolder):
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


WAYS = {"folder": InFolder(), "file": InFile()}
FRAMEWORKS = {
    "accelerate": ByAccelerate(),
    "Trainer": ByTrainer(),
    "Lightning's Fabric, sharded": ByLightning("fabric", "fsdp2", full=False),
    "Lightning's Fabric, full": ByLightning("fabric", "fsdp1", full=True),
    "Lightning's Trainer, sharded": ByLightning("trainer", "fsdp1", full=False),
    "Lightning's Trainer, full": ByLightning("trainer", "fsdp2", full=True),
}


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
    # What removes a folder names what is in it relative to a descriptor.
    within = arguments[1] if event in ("os.remove", "os.rmdir") else -1
    return os.path.join(os.readlink(f"/proc/self/fd/{within}"), path) if within >= 0 else str(path)


@contextmanager
def copies_of(folder: Path, copies: Path, rank: int) -> Iterator[None]:
    """Return a context in which ``folder`` is copied into ``copies`` before this process changes a file of it.

    What comes after the last write of a file is among them if a file is changed later, or the context ends.
    """
    copies.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()

    def copy(changes: bool) -> None:
        if not changes:
            return
        with lock:
            number = len(list(copies.glob(f"rank{rank}-*")))
            with suppress(shutil.Error, FileNotFoundError):  # files that another rank removes meanwhile
                shutil.copytree(folder, copies / f"rank{rank}-{number}", symlinks=True)

    with before_operations(folder, copy):
        yield


Outcome = list[float] | str
"""Losses after a checkpoint was loaded, or the error."""
CutOff = tuple[list[Outcome], list[tuple[Outcome, bool]]]
"""Outcomes of whole saves; and of each state that a cut-off one leaves, with whether codec state is lost, as warned."""


def outcome(way: InFolder, strategy: Strategy, folder: Path) -> tuple[Outcome, bool]:
    with collected() as records:
        try:
            result: Outcome = way.go_on(strategy, folder)
        except (ValueError, OSError, RuntimeError) as error:
            result = str(error)
    return result, any(level == "WARNING" and "start over" in text for level, text in records)


def cut_off(way: InFolder, strategy: Strategy, folder: Path, marked: bool) -> CutOff:
    """In a worker: what comes of two saves, and of each state that the second leaves if it is cut off."""
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
    whole = [outcome(way, strategy, each)[0] for each in (folder / "older", saved)]
    return whole, [outcome(way, strategy, copy) for copy in copies]


def check(by_rank: list[CutOff]) -> None:
    """Fail if a cut-off save trains on from anything else than one of both, without a word."""
    older, newer = by_rank[0][0]
    assert isinstance(older, list)
    assert isinstance(newer, list)
    assert older != newer
    for copies in zip(*(copies for _, copies in by_rank), strict=True):
        outcomes = [copy[0] for copy in copies]
        if all(isinstance(each, list) for each in outcomes):
            assert outcomes[0] in (older, newer) or any(warned for _, warned in copies), outcomes
        else:
            assert all(isinstance(each, str) and all(word in each for word in TOLD) for each in outcomes), outcomes


@over_each(way=WAYS, strategy=STRATEGIES)
def test_a_mixture_of_two_saves_is_refused(pool: Pools, tmp_path: Path, way: InFolder, strategy: Strategy) -> None:
    by_rank = pool(2).run(cut_off, way, strategy, tmp_path, True)
    check(by_rank)
    assert len(by_rank[0][1]) > 6


@pytest.mark.slow
@over_each(way=FRAMEWORKS, strategy=STRATEGIES)
def test_a_mixture_of_two_saves_by_a_framework_is_refused(
    pool: Pools, tmp_path: Path, way: InFolder, strategy: Strategy
) -> None:
    check(pool(2).run(cut_off, way, strategy, tmp_path, True))


def test_codec_state_of_a_mixture_that_is_loaded_all_the_same_is_dropped(pool: Pools, tmp_path: Path) -> None:
    # A user has removed the mark, as the error says.
    check(pool(2).run(cut_off, InFile(), STRATEGIES["stateful"], tmp_path, False))


def cut_off_new(way: InFolder, strategy: Strategy, folder: Path) -> CutOff:
    """In a worker: what comes of a save, and of each state that it leaves if it is cut off."""
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    dist.barrier()
    with copies_of(saved, folder / "copies", dist.get_rank()):
        way.save(strategy, saved, 2)
    dist.barrier()
    copies = [copy for copy in sorted((folder / "copies").iterdir()) if list(copy.glob("*/*"))]
    return [[], outcome(way, strategy, saved)[0]], [outcome(way, strategy, copy) for copy in copies]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate", "Trainer"])
def test_a_new_checkpoint_that_lacks_something_is_refused(pool: Pools, tmp_path: Path, name: str) -> None:
    check(pool(2).run(cut_off_new, FRAMEWORKS[name], STRATEGIES["stateful"], tmp_path))


WORLD = 2
PATIENCE = 100.0
"""Seconds after which jobs hang."""
MOMENT = 0.5
"""Seconds that a process goes on, at most, without the other one of its job."""
_fork: Any = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Moment:
    """Before an operation of a rank on a file of the folder, counted from 0; the end of the save counts as the last."""

    rank: int
    operation: int


@dataclass(frozen=True)
class Job:
    """A job of two processes that save into a folder; it starts in a process without threads, which can be forked.

    Args:
        save: What all ranks call, with the folder.
        killed_at: When a process is killed, if any.
        takes_down: Whether the other process is killed at once then, as torchrun does; else it goes on for a moment.
        pauses_at: When a rank lets the other job go on, if any, until that has come to its own such moment, or its end.
    """

    save: Callable[[Path], Any]
    killed_at: Moment | None = None
    takes_down: bool = True
    pauses_at: Moment | None = None


@dataclass(frozen=True)
class End:
    """How a job ended, by rank: exit codes, file operations (-1 for one that was killed), and errors."""

    codes: list[int]
    operations: list[int]
    errors: list[str]


class _Gate:
    """Closed until it is opened. Unlike an ``Event``, it takes no harm if a process is killed that waits at it."""

    def __init__(self) -> None:
        self._tokens = _fork.Semaphore(0)

    def wait(self) -> None:
        if self._tokens.acquire(timeout=PATIENCE):
            self._tokens.release()

    def open(self) -> None:
        self._tokens.release()


@dataclass(frozen=True)
class _Turn:
    """A turn of a job: when it may begin, when it may go on after its pause, and what the other job waits for."""

    begins: _Gate
    goes_on: _Gate
    yields: tuple[_Gate, ...]

    def end(self) -> None:
        for gate in self.yields:
            gate.open()


def run_jobs(jobs: Sequence[Job], folder: Path, checkpoint: Path, notes: Path) -> list[End]:
    """Run one job, or two that take turns in a checkpoint: the second begins when the first pauses or has ended.

    A job that waits for its turn lets the other go on. Moments count operations on files, so that what two jobs do
    within each other's saves is the same each time.

    Args:
        jobs: The jobs.
        folder: What jobs are given.
        checkpoint: The folder in it on whose files operations are counted.
        notes: Another, for what processes leave to be read here.
    """
    notes.mkdir(parents=True, exist_ok=True)
    at_once, second_begins, first_goes_on, second_goes_on = (_Gate() for _ in range(4))
    at_once.open()
    turns = [
        _Turn(at_once, first_goes_on, (second_begins, second_goes_on)),
        _Turn(second_begins, second_goes_on, (first_goes_on,)),
    ]
    running = []
    for index, (job, turn) in enumerate(zip(jobs, turns, strict=False)):
        port = free_port()
        for rank in range(WORLD):
            files = folder, checkpoint, notes / f"{index}-{rank}"
            process = _fork.Process(target=_main, args=(rank, port, job, turn, *files))
            process.start()
            running.append((index, process))
    _wait(running, jobs, turns)
    return [
        End(
            [process.exitcode for at, process in running if at == index],
            [int(_read(notes / f"{index}-{rank}.operations") or -1) for rank in range(WORLD)],
            [_read(notes / f"{index}-{rank}.error") for rank in range(WORLD)],
        )
        for index in range(len(jobs))
    ]


def _wait(processes: Sequence[tuple[int, Any]], jobs: Sequence[Job], turns: Sequence[_Turn]) -> None:
    """Wait for all, and let each job's end be seen by its other process, and by the other job."""
    running, deadline = list(processes), time.monotonic() + PATIENCE
    ends = dict.fromkeys(range(len(jobs)), deadline)  # of each job
    while running:
        now = time.monotonic()
        for index, process in running:
            if now >= ends[index]:
                process.kill()
        assert now < deadline, "jobs hang"
        # What is killed ends as any other does.
        ended = wait([process.sentinel for _, process in running], max(0.01, min(ends.values()) - now))
        for index, process in running:
            if process.sentinel in ended:
                process.join()
                if process.exitcode:
                    ends[index] = min(ends[index], time.monotonic() + MOMENT * (not jobs[index].takes_down))
        running = [each for each in running if each[1].sentinel not in ended]
        for index, turn in enumerate(turns):
            if index not in [at for at, _ in running]:
                ends.pop(index, None)
                turn.end()


def _main(rank: int, port: int, job: Job, turn: _Turn, folder: Path, checkpoint: Path, notes: Path) -> None:
    printed = os.open(f"{notes}.printed", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    operations = count()

    def before(changes: bool) -> None:
        now = Moment(rank, next(operations))
        if now.operation == 0:
            turn.begins.wait()
        if now == job.pauses_at:
            turn.end()
            turn.goes_on.wait()
        if now == job.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def pause(seconds: float) -> None:
        turn.end()
        time.sleep(0.01)

    _turns.sleep = pause
    os.fsync = lambda descriptor: None  # type: ignore[assignment] # a process that is killed loses nothing of the page cache
    init_process_group(rank, WORLD, port)
    code = 0
    try:
        with before_operations(checkpoint, before):
            job.save(folder)
            before(False)
        dist.barrier()
    except BaseException:
        Path(f"{notes}.error").write_text(traceback.format_exc())
        code = 1
    Path(f"{notes}.operations").write_text(str(next(operations)))
    os._exit(code)  # what frameworks do at an exit waits for processes that are killed


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


SEEDS = {"stateful": range(30), "local steps": range(30, 60)}
"""Seeds by strategy, of which each has codec state of another kind."""
VERSIONS = {"older": 1, "first": 2, "second": 3}
"""Steps that tell saves from each other: what is there before, and what two jobs save."""
EARLIER = "earlier"
"""Name of what torchtitan loads if there is no whole version of a checkpoint: the one before."""


def save(way: InFolder, strategy: Strategy, version: str, folder: Path) -> None:
    """Save, in a process of a job."""
    way.save(strategy, folder, VERSIONS[version])


def go_on(way: InFolder, strategy: Strategy, folder: Path) -> list[float] | str:
    """In a worker: the losses after what is in a folder was loaded, or the error."""
    try:
        return way.go_on(strategy, folder)
    except BaseException as error:  # CheckpointException is no Exception
        return f"{type(error).__name__}: {error}"


class Saves:
    """Saves by one framework that end in all kinds of ways.

    Args:
        way: By what.
        strategy: The strategy.
        folder: For everything.
        pool: Ranks that load.
        forker: A process that jobs are forked from.
    """

    def __init__(self, way: InFolder, strategy: Strategy, folder: Path, pool: Pool, forker: ProcessPoolExecutor):
        self._way, self._strategy, self._folder, self._pool, self._forker = way, strategy, folder, pool, forker
        self._operations: list[int] = []
        self._losses: dict[str, Any] = {}
        for version in VERSIONS:
            saved = folder / version
            if version != "older":
                shutil.copytree(folder / "older", saved)
            (end,) = self._run([self._job(version)], saved)
            assert not any(end.codes), end.errors
            self._operations = end.operations
            self._losses[version] = self._load(saved)
        assert len({str(losses) for losses in self._losses.values()}) == len(VERSIONS), self._losses

    def know_earlier(self, forget: Callable[[Path], None]) -> None:
        """Record what loads from a folder in which a framework has left out what was cut off."""
        saved = self._folder / EARLIER
        shutil.copytree(self._folder / "older", saved)
        forget(saved)
        self._losses[EARLIER] = self._load(saved)
        assert all(isinstance(losses, list) for losses in self._losses[EARLIER]), self._losses

    def alone(self, seed: int) -> str:
        """Return what loads after a job was killed: the name of a version, "told", or what is wrong."""
        dice = random.Random(seed)
        return self._outcome([self._job("first", killed_at=self._moment(dice), takes_down=dice.random() < 0.5)], seed)

    def with_another(self, seed: int) -> str:
        """Return what loads after two jobs have saved at once, of which either was killed, or both."""
        dice = random.Random(seed)
        killed = dice.choice([(True, False), (False, True), (True, True)])
        both = [
            self._job(
                version,
                killed_at=self._moment(dice) if dies else None,
                takes_down=dice.random() < 0.5,
                pauses_at=self._moment(dice),
            )
            for version, dies in zip(("first", "second"), killed, strict=True)
        ]
        return self._outcome(both, seed)

    def _job(self, version: str, **ends: Any) -> Job:
        return Job(partial(save, self._way, self._strategy, version), **ends)

    def _moment(self, dice: random.Random) -> Moment:
        rank = dice.choice([rank for rank, operations in enumerate(self._operations) if operations])
        return Moment(rank, dice.randrange(self._operations[rank]))

    def _run(self, several: list[Job], saved: Path) -> list[End]:
        saved.mkdir(exist_ok=True)
        notes = saved.with_name(f"notes of {saved.name}")
        return self._forker.submit(run_jobs, several, saved, self._way.checkpoint(saved), notes).result()

    def _outcome(self, several: list[Job], seed: int) -> str:
        saved = self._folder / f"{seed} of {len(several)}"
        shutil.copytree(self._folder / "older", saved)
        ends = self._run(several, saved)
        outcome = self._load(saved)
        for version, losses in self._losses.items():
            if outcome == losses:
                return version
        if all(isinstance(each, str) and all(word in each for word in TOLD) for each in outcome):
            return "told"
        return f"seed {seed}: {outcome} of {saved} after {ends} of {several}"

    def _load(self, saved: Path) -> list[Any]:
        try:
            return self._pool.run(go_on, self._way, self._strategy, saved)
        except WorkerError as error:
            return [str(error)]


Kind = Callable[[Saves, int], str]
needs_forks = pytest.mark.skipif(device_type() == "cuda", reason="a process that has used a GPU can't be forked")
over_kinds = pytest.mark.parametrize("kind", [Saves.alone, Saves.with_another], ids=["alone", "with another"])


@pytest.fixture(scope="module")
def forker() -> Iterator[ProcessPoolExecutor]:
    """Return a process that jobs are forked from."""
    with ProcessPoolExecutor(1, start_method(), gc.freeze) as executor:
        yield executor


def check_kills(kind: Kind, saves: Saves, seeds: Sequence[int]) -> None:
    """Fail if anything else loads than a whole version, without a word of what to do."""
    counts = Counter(kind(saves, seed) for seed in seeds)
    print(dict(counts))
    assert counts.keys() <= {*VERSIONS, EARLIER, "told"}, "\n".join(counts)


KILLED: dict[str, InFolder] = FRAMEWORKS | {"save_frozen_params": SavedBase()}
IN_SHORT = ["accelerate", "Trainer", "Lightning's Fabric, sharded", "save_frozen_params"]


@needs_forks
@pytest.mark.slow
@over_kinds
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", KILLED)
def test_what_loads_after_a_kill_is_whole(
    pool: Pools, forker: ProcessPoolExecutor, tmp_path: Path, name: str, strategy: str, kind: Kind
) -> None:
    check_kills(kind, Saves(KILLED[name], STRATEGIES[strategy], tmp_path, pool(2), forker), SEEDS[strategy])


@needs_forks
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["one", "some"])
@pytest.mark.parametrize("name", IN_SHORT)
def test_what_loads_after_some_kills_is_whole(
    pool: Pools, forker: ProcessPoolExecutor, tmp_path: Path, name: str, is_long: bool
) -> None:
    saves = Saves(KILLED[name], STRATEGIES["stateful"], tmp_path, pool(2), forker)
    check_kills(Saves.with_another, saves, (11,) if is_long else (21,))
    if is_long:
        check_kills(Saves.alone, saves, (11, 21))


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


_held: Any = None


def begin(checkpoint: Path) -> None:
    """In a worker: begin to save."""
    global _held
    _held = MarkedSave(checkpoint, place="inside")


def end(fails: bool) -> None:
    """In a worker: complete that, or end it because of an error."""
    _held.abandon() if fails else _held.complete()


def test_what_is_being_saved_is_not_said_to_be_cut_off(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(begin, tmp_path)
    assert refusal(tmp_path) == (
        f"{tmp_path} is being saved by another job: wait until it is done, or resume from another checkpoint"
    )
    pool(2).run(end, False)
    assert refusal(tmp_path) == ""
    pool(2).run(begin, tmp_path)
    pool(2).run(end, True)
    assert refusal(tmp_path).startswith(f"the last save of {tmp_path} was cut off")


def waited(checkpoint: Path, tries: int) -> tuple[list[float], list[str]]:
    """In a worker: the pauses of a save while another job holds its turn for so many tries, and what is said."""
    pauses: list[float] = []
    refusals = [OSError(errno.EAGAIN, "held by others")] * (tries if dist.get_rank() == 0 else 0)
    locks = mock.patch.object(fcntl, "lockf", side_effect=chain(refusals, repeat(None)))
    with locks, mock.patch.object(_turns, "sleep", pauses.append), collected() as records:
        MarkedSave(checkpoint, place="inside").complete()
    return pauses, [text for _, text in records]


def test_a_job_waits_in_short_collectives_and_says_so_now_and_then(pool: Pools, tmp_path: Path) -> None:
    (pauses, warnings), *others = pool(2).run(waited, tmp_path, 700)
    assert pauses == [_turns.PAUSE] * 700
    assert len(warnings) == 2
    assert all(f"remove {tmp_path / 'save_was_cut_off'}" in text for text in warnings)
    assert others == [(pauses, [])]


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


def save_named(project: Path) -> None:
    """In a process of a job: save a checkpoint that accelerate names."""
    with new_job():
        naming_accelerator(project).save_state()


@needs_forks
@pytest.mark.slow
def test_of_jobs_whose_checkpoints_accelerate_names_one_is_refused(forker: ProcessPoolExecutor, tmp_path: Path) -> None:
    for operation in range(6):
        folder = tmp_path / str(operation)
        folder.mkdir()
        both = [Job(save_named, pauses_at=Moment(0, operation)), Job(save_named)]
        ends = forker.submit(run_jobs, both, folder, folder, tmp_path / f"notes {operation}").result()
        whole, refused = sorted(ends, key=lambda end: end.codes)
        assert whole.codes == [0, 0], whole.errors
        assert all("already exists" in error for error in refused.errors), (operation, refused.errors)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint_0"]


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


def with_codec_state(adapter: Adapter, checkpoint: Path) -> tuple[Any, list[Any]]:
    """Return a model that has codec state and its optimizers; that state is saved."""
    case = Case(steps=1)
    model = adapter.make(case, Strategy.loco(gpus_per_node=1))
    optimizer = models.make_optimizer("adamw", model.parameters())
    train(adapter, model, case, optimizer=optimizer)
    save_codec_state(model, [optimizer], checkpoint)
    return model, [optimizer]


def replaced(adapter: Adapter, checkpoint: Path) -> tuple[bool, str]:
    """In a worker: whether a rank wrote anew while rank 0, which gives it time to, was removing what was there; and
    what a rank hears if rank 0 may not remove it.
    """
    trained = with_codec_state(adapter, checkpoint)
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


@over_adapters
def test_codec_state_is_written_once_what_was_there_is_gone(pool: Pools, adapter: Adapter, tmp_path: Path) -> None:
    folder = tmp_path / "step-4"
    folder.mkdir()
    assert pool(2).run(replaced, adapter, folder) == [(False, "not yours")] * 2
    assert (folder / "codecs" / ".metadata").is_file()


def heard_of_incomplete(adapter: Adapter, checkpoint: Path, harm: str) -> str:
    """In a worker: what a rank hears if the codec state lacks something."""
    trained = with_codec_state(adapter, checkpoint)
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


@over_each(adapter=ADAPTERS, harm=[".metadata", "__0_0.distcp", "__1_0.distcp", "cut short"])
def test_all_ranks_hear_what_to_do_with_incomplete_codec_state(
    pool: Pools, adapter: Adapter, harm: str, tmp_path: Path
) -> None:
    for error in pool(2).run(heard_of_incomplete, adapter, tmp_path, harm):
        assert f"the codec state in {tmp_path / 'codecs'} can't be read" in error
        assert "resume from another checkpoint, or remove this folder" in error
