"""A plugin of pytest that measures which tests reach which lines, in all processes of a run, and its results.

A process measures from its start, by a sitecustomize on its path. Children of a fork server begin a measurement of
their own, since they do not save their parent's. Workers of a pool live on across tests and may be killed: they ask
which test runs whenever they receive a task, and save before they reply. A process that is killed otherwise is not
counted.
"""

from __future__ import annotations

import ast
import json
import os
import sqlite3
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import coverage
import pytest

from .catalog import PACKAGE, ROOT, Mutant, Sources

FOLDER = "FSDP_ZPP_COVER"
"""The environment variable with the folder of the measurements."""
CURRENT = "FSDP_ZPP_COVER_CURRENT"
"""The environment variable with the file that names the test that runs."""
SITE = "from mutants import cover\n\ncover.begin()\n"
"""The text of a sitecustomize.py."""

_measured: coverage.Coverage | None = None


def begin() -> None:
    """Measure this process, and anew each child of it that multiprocessing forks."""
    _start()
    util.register_after_fork(begin, _begin_in_child)


def _start() -> None:
    global _measured
    data = Path(os.environ[FOLDER], f"data.{os.getpid()}.{time.time_ns()}")
    # Without a source=, saving does not look for files that nothing has reached.
    _measured = coverage.Coverage(data_file=str(data), include=[f"{ROOT / PACKAGE}/*"], config_file=False)
    _measured.set_option("run:disable_warnings", ["no-data-collected"])
    _measured.start()
    _switch()


def _begin_in_child(_: object) -> None:
    if _measured is not None:
        _measured.stop()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]  # as the documentation has it
    _start()
    util.Finalize(None, _save, exitpriority=0)  # since such a process runs nothing that is registered with atexit
    if "harness.pool" in sys.modules:
        _follow_tasks()


def _follow_tasks() -> None:
    receive, send = Connection.recv, Connection.send

    def receive_task(self: Connection) -> Any:
        task = receive(self)
        _switch()
        return task

    def send_reply(self: Connection, reply: Any) -> None:
        _save()
        send(self, reply)

    Connection.recv, Connection.send = receive_task, send_reply  # type: ignore[method-assign]


def _switch() -> None:
    path = Path(os.environ.get(CURRENT, os.devnull))
    if _measured is not None:
        _measured.switch_context(path.read_text() if path.exists() else "")


def _save() -> None:
    if _measured is not None:
        _measured.save()


class Plugin:
    """Says which test runs, and for how long each has."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._current = Path(os.environ[FOLDER], f"current.{os.getpid()}")
        self._set("")
        os.environ[CURRENT] = str(self._current)

    def _set(self, test: str) -> None:
        written = self._current.with_suffix(".new")
        written.write_text(test)
        written.replace(self._current)  # workers see one name or the other

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._set(item.nodeid)
        _switch()
        result = yield
        self._set("")
        _switch()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[FOLDER], f"seconds.{os.getpid()}").write_text(json.dumps(self._seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest call the plugin; with pytest-xdist, in each of its processes."""
    config.pluginmanager.register(Plugin())


class Map:
    """The results of a run: its tests, with their seconds, and the lines that they reach, as the files were then."""

    def __init__(self, folder: Path) -> None:
        self._data = coverage.CoverageData(str(folder / "coverage"))
        self._data.read()
        tests: dict[str, tuple[float, int]] = json.loads((folder / "tests.json").read_text())
        self.seconds = {test: seconds for test, (seconds, _) in tests.items()}
        self._cost = {test: seconds * lines for test, (seconds, lines) in tests.items()}
        self._sources = Sources(folder)
        self._lines_of: dict[str, int] = defaultdict(int)
        self._measured = {str(Path(path).relative_to(ROOT)): path for path in self._data.measured_files()}

    def tests_reaching(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach the line of ``mutant``, or another of its statement.

        Tests that are fast and reach few other lines come first.
        """
        try:
            place = self._sources.find(mutant)
        except LookupError:  # the catalogue is younger
            return []
        if place.path not in self._measured:
            return []
        by_line = self._data.contexts_by_lineno(self._measured[place.path])
        lines = _statement(self._sources.tree(place.path), place.line)
        reaching = {test for line in lines for test in by_line.get(line, ())}
        return sorted(reaching & self._cost.keys(), key=self._cost.__getitem__)


def _statement(tree: ast.Module, line: int) -> range:
    """The lines of the statement around ``line``; if it has a body, only those before the body."""
    found = range(line, line + 1)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            stop = body[0].lineno if body else (node.end_lineno or 0) + 1
            if line < stop:  # inner statements come later
                found = range(node.lineno, stop)
    return found


def put_together(folder: Path) -> None:
    """Combine what the processes of a run have left in ``folder`` into the files that :class:`Map` reads."""
    combined = coverage.Coverage(data_file=str(folder / "coverage"), config_file=False)
    combined.combine([str(path) for path in folder.glob("data.*")])
    combined.save()
    seconds: dict[str, float] = {}
    for path in folder.glob("seconds.*"):
        seconds |= json.loads(path.read_text())
    lines = dict.fromkeys(seconds, 0)
    with sqlite3.connect(folder / "coverage") as data:
        rows = data.execute("select context, numbits from line_bits join context on context.id = context_id")
        for test, bits in rows:
            if test in lines:
                lines[test] += int.from_bytes(bits, "little").bit_count()
    (folder / "tests.json").write_text(json.dumps({test: (seconds[test], lines[test]) for test in seconds}))
    for path, text in Sources().lines.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("\n".join(text))
