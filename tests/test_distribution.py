"""The source distribution and the wheel: built from the repository, and installed where nothing else of it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from harness.launch import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NOT_DISTRIBUTED = shutil.ignore_patterns(
    ".git", ".venv", "*.egg-info", "build", "dist", "runs", "__pycache__", ".*_cache"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and a wheel that was built from it."""
    source = tmp_path_factory.mktemp("source") / "fsdp_zpp"
    shutil.copytree(ROOT, source, ignore=NOT_DISTRIBUTED, symlinks=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "dist"


def test_the_wheel_has_all_modules_and_nothing_else(built: Path) -> None:
    with ZipFile(built / f"fsdp_zpp-{VERSION}-py3-none-any.whl") as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "fsdp_zpp").rglob("*.py")}
    kernels = {f"fsdp_zpp/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert packed == own | kernels | {"fsdp_zpp/py.typed"}


def test_the_wheel_asks_for_all_that_it_imports_or_has_torch_and_safetensors_import(built: Path) -> None:
    with ZipFile(built / f"fsdp_zpp-{VERSION}-py3-none-any.whl") as wheel:
        metadata = wheel.read(f"fsdp_zpp-{VERSION}.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: ([a-z_-]+)[^;\n]*$", metadata, re.MULTILINE)
    # Without NumPy, torch.distributed's *_object* functions and safetensors' save_file raise.
    assert sorted(required) == ["numpy", "safetensors", "torch", "triton"]


def test_the_source_distribution_has_the_licence_and_readme(built: Path) -> None:
    with tarfile.open(built / f"fsdp_zpp-{VERSION}.tar.gz") as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "fsdp_zpp/__init__.py", "kernels/__init__.py"} <= packed


def test_the_wheel_works_by_itself(built: Path, tmp_path: Path) -> None:
    """In an environment that has what this one has, except for this package as it is installed here."""
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh/bin/python"
    wheel = built / f"fsdp_zpp-{VERSION}-py3-none-any.whl"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    # Editable installs are known by .pth files, which are read in an environment's own folder alone.
    (site,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import fsdp_zpp, fsdp_zpp.kernels; print(fsdp_zpp.__file__, fsdp_zpp.Strategy.zeropp())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in ((python, "-c", code), (python, "-m", "fsdp_zpp", "--version")):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert str(site) in done.stdout or done.stdout == f"fsdp_zpp {VERSION}\n"


def test_changelog_and_citation_are_of_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert next(name for name in newest if name != "Unreleased") == VERSION
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == VERSION  # type: ignore[index]
