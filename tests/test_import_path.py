"""In no process of the tests does a folder of ours pass for the module ``kernels``, which is Hugging Face's.

bitsandbytes and transformers look for it, and a folder of that name on the path is a module of it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from harness.launch import in_fake_world, launch
from harness.pool import Pool

ROOT = Path(__file__).parents[1]


def find_kernels() -> list[str]:
    """Return the folders in which this process finds a module named kernels."""
    spec = importlib.util.find_spec("kernels")
    return [] if spec is None else list(spec.submodule_search_locations or [])


def assert_outside_repository(folders: list[str]) -> None:
    """Fail if a folder of the repository passes for that module."""
    assert not any(Path(folder).resolve().is_relative_to(ROOT) and ".venv" not in folder for folder in folders)


def test_the_process_of_the_tests_does_not_find_ours() -> None:
    assert_outside_repository(find_kernels())


def test_workers_do_not_find_ours(pool: Callable[[int], Pool]) -> None:
    for folders in (*pool(2).run(find_kernels), in_fake_world(8, 4, find_kernels)):
        assert_outside_repository(folders)


def test_scripts_do_not_find_ours(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import json\nfrom {__name__} import find_kernels\nprint(json.dumps(find_kernels()))\n")
    done = launch(1, script)
    assert done.returncode == 0, done.stderr
    assert_outside_repository(json.loads(done.stdout))
