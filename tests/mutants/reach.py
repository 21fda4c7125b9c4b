"""A plugin of pytest that notes which tests reach the line of which mutant, in all processes of a run, and its results.

Every process loads the package's files with a call of :func:`at` before the statement of each mutant, by a
sitecustomize on its path. A test that reaches it for the first time writes a line, so that nothing is lost with a
process that is killed. Workers of a pool live on across tests: they ask which test runs whenever they receive a task.
"""

from __future__ import annotations

import ast
import builtins
import json
import marshal
import os
from collections import defaultdict
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from .catalog import ROOT, Mutant, Sources, load_mutants

FOLDER = "FSDP_ZPP_REACH"  # the environment variable with the folder of the notes
CURRENT = "FSDP_ZPP_REACH_CURRENT"  # the one with the file that names the test that runs
SITE = "from mutants import reach\n\nreach.begin()\n"  # the text of a sitecustomize.py
CALL = "__mutants_reach_at__"

_reached: set[str] = set()
_test = ""
_file = -1


def at(mutant: str) -> None:
    """Note that the test that runs reaches the line of ``mutant``."""
    if mutant not in _reached:
        _reached.add(mutant)
        os.write(_file, f"{_test}\t{mutant}\n".encode())


def begin() -> None:
    """Have this process, and those that it forks, note what they reach."""
    global _file
    _file = os.open(Path(os.environ[FOLDER], "reached"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    setattr(builtins, CALL, at)
    compiled = {path.name: path for path in Path(os.environ[FOLDER], "code").iterdir()}
    load, prefix = SourceFileLoader.get_code, f"{ROOT}{os.sep}"

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        name = self.path.removeprefix(prefix).replace(os.sep, "+")
        if self.path.startswith(prefix) and name in compiled:
            return marshal.loads(compiled[name].read_bytes())  # type: ignore[no-any-return]
        return load(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    receive = Connection.recv

    def receive_task(self: Connection) -> Any:
        task = receive(self)
        _switch()
        return task

    Connection.recv = receive_task  # type: ignore[method-assign]
    os.register_at_fork(after_in_child=_switch)
    _switch()


def _switch() -> None:
    global _test
    path = Path(os.environ.get(CURRENT, os.devnull))
    test = path.read_text() if path.exists() else ""
    if test != _test:
        _test = test
        _reached.clear()


class Plugin:
    """Says which test runs, and for how long each has."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._current = Path(os.environ[FOLDER], f"{os.getpid()}.current")
        self._set("")
        os.environ[CURRENT] = str(self._current)

    def _set(self, test: str) -> None:
        written = self._current.with_suffix(".new")
        written.write_text(test)
        written.replace(self._current)  # workers see one name or the other
        _switch()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._set(item.nodeid)
        result = yield
        self._set("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[FOLDER], f"ran.{os.getpid()}").write_text(json.dumps(self._seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest call the plugin; with pytest-xdist, in each of its processes."""
    config.pluginmanager.register(Plugin())


def prepare(folder: Path) -> None:
    """Compile the files that have mutants, with a call before the statement of each."""
    sources = Sources()
    by_path: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for mutant in load_mutants():
        place = sources.find(mutant)
        by_path[place.path].append((place.line, mutant.name))
    (folder / "code").mkdir()
    for path, mutants in by_path.items():
        tree = sources.tree(path)
        for line, name in mutants:
            _instrument(tree, line, name)
        code = compile(ast.fix_missing_locations(tree), str(ROOT / path), "exec")
        (folder / "code" / path.replace(os.sep, "+")).write_bytes(marshal.dumps(code))


def _instrument(tree: ast.Module, line: int, mutant: str) -> None:
    """Put a call before the statement of ``line``; if it has none that Python runs often, into each function."""
    found: tuple[list[ast.stmt], int] | None = None
    for function in (node for node in ast.walk(tree) if _is_run(node)):
        for node in ast.walk(function):
            for block in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
                for i, statement in enumerate(block if isinstance(block, list) else []):
                    # Inner statements come later, and decide.
                    if statement.lineno <= line <= (statement.end_lineno or 0):
                        found = block, i
    if found is None:
        for function in (node for node in ast.walk(tree) if _is_run(node)):
            body: list[ast.stmt] = function.body  # type: ignore[attr-defined]
            body.insert(min(len(body) - 1, ast.get_docstring(function) is not None), _call(mutant, body[0]))
    else:
        block, i = found
        block.insert(i, _call(mutant, block[i]))


def _is_run(node: ast.AST) -> bool:
    # Triton reads the source of its kernels instead.
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and not any("jit" in ast.unparse(each) for each in node.decorator_list)  # type: ignore[attr-defined]


def _call(mutant: str, before: ast.stmt) -> ast.stmt:
    call = ast.Expr(ast.Call(ast.Name(CALL, ast.Load()), [ast.Constant(mutant)], []))
    return ast.copy_location(call, before)


class Map:
    """The results of a run: its tests, with their seconds, and the mutants that they reach."""

    def __init__(self, folder: Path) -> None:
        read = json.loads((folder / "map.json").read_text())
        self.seconds: dict[str, float] = read["seconds"]
        self._reaching: dict[str, list[str]] = read["reaching"]
        reached: dict[str, int] = defaultdict(int)
        for tests in self._reaching.values():
            for test in tests:
                reached[test] += 1
        self._cost = {test: seconds * reached[test] for test, seconds in self.seconds.items()}

    def tests_reaching(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach the line of ``mutant``; those that are fast and reach few others come first."""
        return sorted(self._reaching.get(mutant.name, ()), key=self._cost.__getitem__)


def put_together(folder: Path) -> None:
    """Combine what the processes of a run have left in ``folder`` into the file that :class:`Map` reads."""
    seconds: dict[str, float] = {}
    for path in folder.glob("ran.*"):
        seconds |= json.loads(path.read_text())
    reaching: dict[str, set[str]] = defaultdict(set)
    for line in (folder / "reached").read_text().splitlines():
        test, _, mutant = line.partition("\t")
        if test in seconds:
            reaching[mutant].add(test)
    in_order = {mutant: sorted(tests) for mutant, tests in reaching.items()}
    found = {"seconds": seconds, "reaching": in_order}
    (folder / "map.json").write_text(json.dumps(found, indent=1) + "\n")
