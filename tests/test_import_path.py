"""In no process of the tests is the folder ``kernels`` a module of that name, which is Hugging Face's.

bitsandbytes and transformers look for it. Installed, ours is ``fsdp_zpp.kernels``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

from harness.launch import in_fake_world, launch
from harness.pool import Pool

ROOT = Path(__file__).parents[1]
Found = tuple[list[str], list[str]]


def find_kernels() -> Found:
    """Where this process looks for modules, and the folders in which it finds one named kernels."""
    spec = importlib.util.find_spec("kernels")
    return sys.path, [] if spec is None else list(spec.submodule_search_locations or [])


def assert_not_ours(found: Found) -> None:
    """Fail if the repository's root is on the path, or a folder of the repository passes for that module."""
    path, folders = found
    assert ROOT not in [Path(folder).resolve() for folder in path]
    assert not any(Path(folder).resolve().is_relative_to(ROOT) and ".venv" not in folder for folder in folders)


def test_the_process_of_the_tests_does_not_find_ours() -> None:
    assert_not_ours(find_kernels())


def test_workers_do_not_find_ours(pool: Callable[[int], Pool]) -> None:
    for found in (*pool(2).run(find_kernels), in_fake_world(8, 4, find_kernels)):
        assert_not_ours(found)


def test_scripts_do_not_find_ours(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import json\nfrom {__name__} import find_kernels\nprint(json.dumps(find_kernels()))\n")
    done = launch(1, script)
    assert done.returncode == 0, done.stderr
    assert_not_ours(json.loads(done.stdout))
