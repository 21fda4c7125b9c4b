"""Jobs that are killed while they save over an earlier checkpoint, alone or while another job saves there, too.

What then loads is a whole version, of which training goes on with the very losses, or all ranks are told what to do.
"""

from __future__ import annotations

import gc
import importlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import killed_jobs
import pytest
import torchtitan_on_cpu
from checkpoint_ways import FRAMEWORKS, STRATEGIES, InFolder, SavedBase
from harness.pool import Pool, WorkerError, device_type, start_method
from killed_jobs import End, Job, Moment
from torchtitan_checkpoints import ByTorchtitan
from torchtitan_or_skip import torchtitan_or_skip

from fsdp_zpp import Strategy

SEEDS = {"stateful": range(30), "local steps": range(30, 60)}
"""Seeds by strategy, of which each has codec state of another kind."""
WAYS: dict[str, InFolder] = FRAMEWORKS | {"save_frozen_params": SavedBase()}
VERSIONS = {"older": 1, "first": 2, "second": 3}
"""Steps that tell saves from each other: what is there before, and what two jobs save."""
EARLIER = "earlier"
"""Name of what torchtitan loads if there is no whole version of a checkpoint: the one before."""
IN_SHORT = ("accelerate", "Trainer", "Lightning's Fabric, sharded", "Lightning's Trainer, full", "save_frozen_params")
SHORT_SEEDS = (11, 21)
"""Number of draws where slow tests do not run."""
TOLD = ("remove", "resume from another checkpoint")

pytestmark = pytest.mark.skipif(device_type() == "cuda", reason="a process that has used a GPU can't be forked")


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
        return self._forker.submit(killed_jobs.run, several, saved, self._way.checkpoint(saved), notes).result()

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


@pytest.fixture(scope="module")
def forker() -> Iterator[ProcessPoolExecutor]:
    """Return a process that jobs are forked from."""
    with ProcessPoolExecutor(1, start_method(), gc.freeze) as executor:
        yield executor


def check(kind: Callable[[Saves, int], str], saves: Saves, seeds: Iterable[int]) -> None:
    """Fail if anything else loads than a whole version, without a word of what to do."""
    counts = Counter(kind(saves, seed) for seed in seeds)
    print(dict(counts))
    assert counts.keys() <= {*VERSIONS, EARLIER, "told"}, "\n".join(counts)


over_kinds = pytest.mark.parametrize("kind", [Saves.alone, Saves.with_another], ids=["alone", "with another"])


@pytest.mark.slow
@over_kinds
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_loads_after_a_kill_is_whole(
    pool: Callable[[int], Pool],
    forker: ProcessPoolExecutor,
    tmp_path: Path,
    way: InFolder,
    strategy: str,
    kind: Callable[[Saves, int], str],
) -> None:
    check(kind, Saves(way, STRATEGIES[strategy], tmp_path, pool(2), forker), SEEDS[strategy])


@pytest.mark.parametrize("way", [WAYS[name] for name in IN_SHORT], ids=list(IN_SHORT))
def test_what_loads_after_some_kills_is_whole(
    pool: Callable[[int], Pool], forker: ProcessPoolExecutor, tmp_path: Path, way: InFolder
) -> None:
    saves = Saves(way, STRATEGIES["stateful"], tmp_path, pool(2), forker)
    check(Saves.alone, saves, SHORT_SEEDS[:1])
    check(Saves.with_another, saves, SHORT_SEEDS)


@pytest.mark.slow
@over_kinds
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_torchtitan_loads_after_a_kill_is_whole(
    tmp_path: Path, strategy: str, kind: Callable[[Saves, int], str]
) -> None:
    torchtitan_or_skip()
    own = Pool(2)  # torchtitan changes processes
    with ExitStack() as stack, ProcessPoolExecutor(1, start_method(), import_torchtitan) as forker:
        stack.callback(own.stop)
        saves = Saves(ByTorchtitan(), STRATEGIES[strategy], tmp_path, own, forker)
        saves.know_earlier(lambda folder: shutil.rmtree(folder / "checkpoint" / "step-4"))
        check(kind, saves, SEEDS[strategy])


def import_torchtitan() -> None:
    """Import torchtitan, in the process that jobs are forked from."""
    torchtitan_on_cpu.prepare()
    importlib.import_module("torchtitan_training")
    gc.freeze()
