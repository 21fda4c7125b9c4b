"""Runs mutants against the tests, to show which faults the suite notices, and by which test.

    python tests/mutants/run.py --reach               # once, as long as the suite: which tests reach which mutants
    python tests/mutants/run.py --jobs 2              # all mutants that have no result yet
    python tests/mutants/run.py --only layout --only codes-are-truncated --tests "tests/kernel tests/codecs"

Each mutant is put into a copy of the checkout. First comes one row of each test function that reaches its line,
beginning with those that are fast and reach few other mutants; then the other rows; if none is known to reach it, the
tests of the folders that test its folder. What survives meets all other tests with ``--until all``. A test that fails,
or hangs, kills the mutant if it passes without it. Results are written after each mutant, so that a run can go on where
it was ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from mutants import reach  # noqa: E402
from mutants.catalog import PACKAGES, ROOT, Mutant, Sources, load_mutants  # noqa: E402

KEPT = ROOT / "runs" / "mutants"
FIRST = 40  # tests that run before the others of a stage: most mutants die by one of them
LEAST_SECONDS = 300  # of a run of tests before it counts as a hang: a test whose ranks hang ends in two minutes itself
STAGES = {"functions": "one row of each function", "rows": "other rows of them", "all": "other tests"}
"""The stages that a mutant meets, one after the other, by their names for ``--until``."""
FOLDERS = {
    "codecs": "codecs kernel comm local_steps",
    "fsdp_zpp_kernels": "kernel codecs comm local_steps",
    "strategy": "strategy adapters fsdp1 fsdp2 runtime local_steps",
    "comm": "comm adapters fsdp1 fsdp2 runtime local_steps",
    "local_steps": "local_steps adapters runtime comm",
    "runtime": "runtime adapters fsdp1 fsdp2 local_steps integrations inference",
    "frozen": "frozen inference integrations",
    "planner": "planner bench",
    "bench": "bench",
    "fsdp1": "fsdp1 adapters runtime local_steps comm integrations inference",
    "fsdp2": "fsdp2 adapters runtime local_steps comm integrations inference",
    "inference_weights.py": "inference frozen integrations",
    "integrations": "integrations",
}
"""The folders of tests that test a folder or file of the package, where nothing was measured."""


class Ended(NamedTuple):
    """The end of a run of tests: by the test that failed or hung, or by something else; by nothing if all passed."""

    by: str
    is_test: bool = False
    hangs: bool = False


class Copy:
    """A copy of the checkout, to be mutated."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._sources = Sources(folder)
        self._writes = int(time.time())

    def mutate(self, mutant: Mutant) -> str:
        """Put ``mutant`` in; return the path of its file."""
        place, text = self._sources.mutated(mutant)
        self._write(place.path, text)
        return place.path

    def restore(self, path: str) -> None:
        """Take the mutant in the file ``path`` out."""
        self._write(path, "\n".join(self._sources.lines[path]))

    def _write(self, path: str, text: str) -> None:
        self._writes += 1  # a new time, so that Python compiles the file again
        (self.root / path).write_text(text)
        os.utime(self.root / path, (self._writes, self._writes))

    def run(self, tests: Sequence[str], seconds: float) -> Ended:
        """Run ``tests`` until one fails, for at most ``seconds``."""
        listed, printed = (self.root.with_name(f"{self.root.name}.{name}") for name in ("tests", "printed"))
        listed.write_text("\n".join(tests))
        options = ["-x", "-v", "-o", "addopts=", "-p", "no:cacheprovider", "--wide", f"@{listed}"]
        process = processes().Process(target=_run_pytest, args=(self.root, options, printed))
        process.start()
        process.join(seconds)
        code = process.exitcode
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that hang outlive pytest
        process.join()
        text = printed.read_text()
        if code == 0:
            return Ended("")
        if code in (1, None) and (last := _last_started(text, tests)):
            return Ended(last, is_test=True, hangs=code is None)
        cannot_import = "ImportError while loading conftest" in text or "ERROR collecting" in text
        if code is None or code in (1, 2) or code < 0 or cannot_import:
            return Ended(f"pytest, which ended with {code} before a test")
        raise RuntimeError(f"pytest ended with {code}:\n{text[-4000:]}")


def processes() -> Any:
    """How runs of pytest start: forked from one process that has imported what tests import, but nothing of ours."""
    import torch  # in this process alone, as the package, which changes torch
    from harness.pool import PRELOADED

    os.environ |= {"OMP_NUM_THREADS": "1"} | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    multiprocessing.set_forkserver_preload(["pytest", *(name for name in PRELOADED if name not in PACKAGES)])
    return multiprocessing.get_context("forkserver")


class _Forks:
    """A plugin of pytest: ranks of pools are forked from pytest itself, which has imported all that they need.

    Scripts that are launched are not, for they would print to where pytest reads.
    """

    def pytest_collection_finish(self) -> None:
        if "harness.pool" in sys.modules:
            sys.modules["harness.pool"].start_method = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]


def _run_pytest(root: Path, options: list[str], printed: Path) -> None:
    import pytest

    os.setsid()
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(root)
    os.environ |= environment(root)
    others = [path for path in sys.path if not Path(path).is_relative_to(ROOT)]
    sys.path[:] = [str(root), str(root / "kernels"), *others]
    assert PACKAGES.keys().isdisjoint(sys.modules), "the package must come from the copy"
    # A process that has used a GPU can't be forked.
    sys.exit(pytest.main(options, plugins=[_Forks()] if "TRITON_INTERPRET" in os.environ else []))


def _last_started(printed: str, tests: Sequence[str]) -> str:
    """The test that pytest has named last, which is the one that failed or hangs."""
    for line in reversed(printed.splitlines()):
        if ".py::" in line and (named := [test for test in tests if line.startswith(test)]):
            return max(named, key=len)
    return ""


def environment(root: Path) -> dict[str, str]:
    """The environment of tests of the checkout in ``root``, whose package comes before any that is installed."""
    path = os.pathsep.join(filter(None, (str(root), str(root / "kernels"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class Suite:
    """The tests that mutants meet, chosen by pytest's arguments."""

    def __init__(self, arguments: str) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *shlex.split(arguments)]
        found = subprocess.run(command, cwd=ROOT, env=environment(ROOT), capture_output=True, text=True)
        self.tests = [line for line in found.stdout.splitlines() if ".py::" in line]
        if found.returncode or not self.tests:
            raise SystemExit(f"pytest does not collect {arguments!r}:\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
        digest = hashlib.sha256("\n".join(self.tests).encode())
        for path in sorted((ROOT / "tests").rglob("*.py")):
            if HERE not in path.parents:
                digest.update(path.read_bytes())
        self.key = digest.hexdigest()[:16]
        self._map: reach.Map | None = None
        if (KEPT / "reach" / "map.json").exists():
            self._map = reach.Map(KEPT / "reach")

    def stages(self, mutant: Mutant, path: str, first: str) -> dict[str, list[str]]:
        """Return the tests that ``mutant`` in the file ``path`` meets, by stage; ``first`` comes before all others."""
        known = set(self.tests)
        tests = [] if self._map is None else [test for test in self._map.tests_reaching(mutant) if test in known]
        if not tests:
            folders = FOLDERS.get(path.split("/")[1], "").split()
            tests = [test for each in folders for test in self.tests if test.startswith(f"tests/{each}/")] or self.tests
        if first in known:
            tests = list(dict.fromkeys([first, *tests]))
        functions: dict[str, str] = {}
        for test in tests:
            functions.setdefault(test.partition("[")[0], test)
        met, of_functions = set(tests), set(functions.values())
        rows = [test for test in tests if test not in of_functions]
        # The first of rows that share what a worker returns reaches what the worker does, and the others do not.
        rows += [test for test in self.tests if test not in met and test.partition("[")[0] in functions]
        others = [test for test in self.tests if test not in met.union(rows)]
        stages = list(functions.values()), rows, others
        return dict(zip(STAGES, stages, strict=True))

    def limit(self, tests: Sequence[str]) -> float:
        """Seconds after which a run of ``tests`` counts as a hang."""
        seconds = {} if self._map is None else self._map.seconds
        return LEAST_SECONDS + sum(4 * seconds.get(test, 2.0) for test in tests)


class Results:
    """The result of each mutant, in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        read: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.of: dict[str, dict[str, Any]] = read.get("mutants", {})
        self.passing: dict[str, bool] = read.get("without a mutant", {})

    def note(self, name: str, **result: object) -> None:
        """Note the result of a mutant."""
        with self._lock:
            self.of[name] = result
            self._write()

    def note_passing(self, test: str, passes: bool) -> None:
        """Note whether ``test`` passes without a mutant."""
        with self._lock:
            self.passing[test] = passes
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps({"mutants": self.of, "without a mutant": self.passing}, indent=1) + "\n")
        written.replace(self._path)

    def stages_met(self, mutant: Mutant, key: str) -> list[str]:
        """Return the stages of the tests of ``key`` that ``mutant`` has survived, or all if it was killed."""
        known = self.of.get(mutant.name, {})
        if known.get("tests") != key or known["change"] != [mutant.before, mutant.after]:
            return []
        return list(STAGES) if known["killed"] else known["survived"]


def judge(mutant: Mutant, copy: Copy, suite: Suite, results: Results, stages: Sequence[str]) -> None:
    """Run ``mutant`` against the tests of ``stages`` until one kills it, and note the result."""
    began, killer, known = time.monotonic(), "", results.of.get(mutant.name, {})
    survived = [] if known.get("killed") else results.stages_met(mutant, suite.key)
    path = copy.mutate(mutant)
    try:
        tests = suite.stages(mutant, path, known.get("by", ""))
        for stage in stages:
            if stage not in survived and not killer:
                killer = _first_killer(tests[stage], mutant, copy, suite, results)
                survived = [*survived, *([] if killer else [stage])]
    finally:
        copy.restore(path)
    change, seconds = [mutant.before, mutant.after], round(time.monotonic() - began)
    note = {"killed": bool(killer), "by": killer, "survived": survived, "seconds": seconds}
    results.note(mutant.name, kind=mutant.kind, change=change, tests=suite.key, **note)
    verdict = f"killed by {killer}" if killer else f"SURVIVED {', '.join(STAGES[each] for each in survived)}"
    print(f"{mutant.name}: {verdict}, {seconds} s", flush=True)


def _first_killer(tests: Sequence[str], mutant: Mutant, copy: Copy, suite: Suite, results: Results) -> str:
    tests = [test for test in tests if results.passing.get(f"{suite.key} {test}", True)]
    for lot in (tests[:FIRST], tests[FIRST:]):
        left = lot
        while left and (ended := copy.run(left, suite.limit(left))).by:
            if not ended.is_test or _fails_by(ended, mutant, copy, suite, results):
                return ended.by
            left = [test for test in left if test != ended.by]
    return ""


def _fails_by(ended: Ended, mutant: Mutant, copy: Copy, suite: Suite, results: Results) -> bool:
    """Return whether a test that failed among others fails alone, too, and passes without ``mutant``."""
    if not ended.hangs and not copy.run([ended.by], suite.limit([ended.by])).by:
        return False
    # Here, where ranks are forked, a test may fail that passes in a run of the suite.
    return _passes_without(ended.by, mutant, copy, suite, results)


def _passes_without(test: str, mutant: Mutant, copy: Copy, suite: Suite, results: Results) -> bool:
    key = f"{suite.key} {test}"
    if key not in results.passing:
        copy.restore(copy.mutate(mutant))
        results.note_passing(key, not copy.run([test], suite.limit([test])).by)
        copy.mutate(mutant)
    return results.passing[key]


def note_reach(arguments: str) -> None:
    """Run the tests, and keep which of them reach which mutants."""
    folder = KEPT / "reach"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reach.prepare(folder)
    with tempfile.TemporaryDirectory() as site:
        Path(site, "sitecustomize.py").write_text(reach.SITE)
        env = environment(ROOT) | {reach.FOLDER: str(folder)}
        env["PYTHONPATH"] = os.pathsep.join((site, str(HERE.parent), env["PYTHONPATH"]))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants.reach", *shlex.split(arguments)]
        subprocess.run(command, cwd=ROOT, env=env)  # some tests that count calls fail while these are added
    reach.put_together(folder)


def table(mutants: Sequence[Mutant], results: Results) -> str:
    """How many mutants of each kind were killed, how many survived, and which."""
    kinds = dict.fromkeys(each.kind for each in mutants)
    verdicts = {each.name: results.of.get(each.name, {}).get("killed") for each in mutants}
    lines = [f"{'kind':24}{'killed':>8}{'survived':>10}{'not run':>9}"]
    for kind in (*kinds, "all"):
        count = Counter(verdicts[each.name] for each in mutants if kind in ("all", each.kind))
        lines.append(f"{kind:24}{count[True]:8}{count[False]:10}{count[None]:9}")
    survivors = [each for each in mutants if verdicts[each.name] is False]
    return "\n".join([*lines, *(f"survived: {each.name}. {each.why}" for each in survivors)])


def run_all(
    mutants: Sequence[Mutant], suite: Suite, results: Results, stages: Sequence[str], options: argparse.Namespace
) -> None:
    """Judge ``mutants``, several at a time, each in a copy that its thread keeps."""
    until, is_over, own = time.monotonic() + options.limit_seconds, threading.Event(), threading.local()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(options.jobs) as threads:

        def run(mutant: Mutant) -> None:
            if time.monotonic() > until or is_over.is_set():
                return
            if not hasattr(own, "copy"):
                own.copy = Copy(Path(scratch, threading.current_thread().name))
            judge(mutant, own.copy, suite, results, stages)

        try:
            list(threads.map(run, mutants))
        finally:
            is_over.set()  # after an error or Ctrl-C, those that run end, and no other begins


def main() -> None:
    """Read the command line, and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reach", action="store_true", help="measure which tests reach which mutants")
    parser.add_argument("--only", action="append", metavar="NAME or KIND", help="run these mutants alone")
    parser.add_argument("--tests", default="", metavar="ARGUMENTS", help="pytest's, as in 'tests/strategy -k loco'")
    parser.add_argument("--until", choices=STAGES, default="rows", help="the last stage that survivors meet")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="begin with no mutant after these")
    parser.add_argument("--again", action="store_true", help="run mutants that have met these tests, too")
    parser.add_argument("--results", type=Path, default=KEPT / "results.json", help="the file of results")
    options = parser.parse_args()
    if options.reach:
        note_reach(options.tests)
        return
    mutants = load_mutants()
    if options.only:
        kinds = {each.kind for each in mutants}
        if unknown := set(options.only) - kinds - {each.name for each in mutants}:
            parser.error(
                f"--only: {', '.join(unknown)} is neither a mutant nor a kind; kinds are {', '.join(sorted(kinds))}"
            )
        mutants = [each for each in mutants if {each.name, each.kind} & set(options.only)]
    if on_gpus := [each.name for each in mutants if each.needs == "cuda"]:
        import torch

        if not torch.cuda.is_available():
            print(f"left out, since they need a GPU: {', '.join(on_gpus)}")
            mutants = [each for each in mutants if each.needs != "cuda"]
    suite, results = Suite(options.tests), Results(options.results)
    stages = list(STAGES)[: list(STAGES).index(options.until) + 1]
    met = [set(results.stages_met(each, suite.key)) for each in mutants]
    waiting = [each for each, known in zip(mutants, met, strict=True) if options.again or not known.issuperset(stages)]
    print(f"{len(waiting)} of {len(mutants)} mutants meet {len(suite.tests)} tests", flush=True)
    run_all(waiting, suite, results, stages, options)
    print(table(mutants, results))


if __name__ == "__main__":
    main()
