"""Tools of the tests: every pair of values is covered, and what hangs or fails ends."""

from __future__ import annotations

import itertools
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from harness import pool as pool_module
from harness.covering import covering_array, over_each, over_pairs
from harness.launch import launch
from harness.pool import Pool, WorkerError, device_type

FACTORS = {"a": ["x", "y"], "b": [1, 2, 3], "c": {"yes": True, "no": False}}


def default_of(decorator: pytest.MarkDecorator) -> list[tuple[object, ...]]:
    """Return the values that a decorator has tests run over by default."""
    return [parameters.values for parameters in decorator.args[1] if not parameters.marks]


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (14, 5, 4, 3, 2), (4, 4, 4, 4)], ids=str)
def test_every_pair_of_values_is_in_some_test(sizes: tuple[int, ...]) -> None:
    chosen = covering_array(list(itertools.product(*map(range, sizes))))
    for (i, one), (j, other) in itertools.combinations(enumerate(sizes), 2):
        assert {(row[i], row[j]) for row in chosen} == set(itertools.product(range(one), range(other)))
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 1.5 * largest[0] * largest[-1] + 2


def test_combinations_beyond_pairs_are_slow_tests() -> None:
    assert len(over_pairs(**FACTORS).args[1]) == 12
    assert 6 <= len(default_of(over_pairs(**FACTORS))) < 9
    assert len(over_pairs(rest=False, **FACTORS).args[1]) == len(default_of(over_pairs(**FACTORS)))
    assert default_of(over_each(**FACTORS)) == [("x", 1, True), ("x", 3, True), ("y", 2, False)]
    assert {(a, c) for a, _, c in default_of(over_each(3, **FACTORS))} == {(a, c) for a in "xy" for c in (True, False)}
    marked = {parameters.values: parameters.marks for parameters in over_each(**FACTORS).args[1]}
    wide = {values for values, marks in marked.items() if pytest.mark.wide in marks}
    pairs = {values for values in marked if pytest.mark.slow not in marked[values]}
    assert wide < set(default_of(over_pairs(**FACTORS)))
    assert pairs >= set(default_of(over_pairs(**FACTORS)))
    assert {parameters.id for parameters in over_each(**FACTORS).args[1]} >= {"x-1-yes", "y-3-no"}


def hang() -> None:
    """Wait for what no one does, in a worker."""
    if pool_module.dist.get_rank() == 1:
        threading.Event().wait()


@pytest.mark.skipif(device_type() == "cuda", reason="needs no GPU, and there may be one only")
def test_a_worker_that_hangs_fails_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timedelta(minutes=2) > pool_module.TIMEOUT
    pool = Pool(2)
    pool.run(os.getpid)
    monkeypatch.setattr(pool_module, "TIMEOUT", timedelta(seconds=0.5))
    # On a busy machine the other one may be late, too.
    with pytest.raises(WorkerError, match=r"failed on ranks \[(0, )?1\] of 2, first on rank [01]:\nno answer in time"):
        pool.run(hang)


@pytest.mark.skipif(device_type() == "cuda", reason="needs no GPU, and there may be one only")
def test_a_pool_runs_what_is_to_be_run_once_once() -> None:
    pool = Pool(2)
    first = pool.once(os.getpid)
    pool.stop()
    assert pool.run(os.getpid) != first
    assert pool.once(os.getpid) == first
    pool.stop()


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys, threading\nprint('here', flush=True)\n")
    assert launch(2, script).stdout.split() == ["here", "here"]
    with script.open("a") as file:
        file.write("threading.Event().wait() if os.environ['RANK'] == '0' else sys.exit(f'rank 1: {sys.argv[1]}')\n")
    done = launch(2, script, "told")
    assert done.returncode != 0
    assert done.stderr.strip() == "rank 1: told"
