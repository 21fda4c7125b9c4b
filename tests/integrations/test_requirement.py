"""Errors where a framework is absent or too old."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import fsdp_zpp.integrations
from fsdp_zpp.integrations._requirement import require

FRAMEWORKS = ["accelerate", "transformers", "lightning", "torchtitan", "axolotl"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_there_is_an_extra_and_a_module_for_each(framework: str) -> None:
    assert framework in importlib.metadata.metadata("fsdp_zpp").get_all("Provides-Extra", [])
    folder = Path(fsdp_zpp.integrations.__file__).parent
    source = folder / f"{framework}.py"
    source = source if source.exists() else folder / framework / "__init__.py"
    assert f'require("{framework}", ' in source.read_text()


def test_an_absent_framework_is_named() -> None:
    with pytest.raises(ImportError, match=r"needs no_such_framework: run pip install '\.\[no_such_framework\]' in"):
        require("no_such_framework", "1.0")


def test_a_plugin_of_an_absent_framework_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['axolotl'] = None")
    code = "import fsdp_zpp.integrations.axolotl"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PYTHONPATH": str(tmp_path)})
    assert "fsdp_zpp.integrations.axolotl needs axolotl: run pip install '.[axolotl]' in your clone" in result.stderr


@pytest.mark.parametrize(
    ("installed", "enough"), [("1.9.1", False), ("1.13.0", True), ("1.13.0.dev1", False), ("2.0", True)]
)
def test_an_old_framework_is_named_with_its_version(installed: str, enough: bool) -> None:
    with patch("fsdp_zpp.integrations._requirement.version", lambda name: installed):
        if enough:
            require("accelerate", "1.13")
            return
        with pytest.raises(
            ImportError, match=f"needs accelerate 1.13 or later, and {installed} is installed: run pip install"
        ):
            require("accelerate", "1.13")


def test_fsdp_zpp_itself_imports_no_framework() -> None:
    names = ["accelerate", "transformers", "trl", "lightning", "torchtitan", "axolotl"]
    code = f"import sys, fsdp_zpp; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert result.stdout.strip() == "[]"
