"""Source distribution and wheel: built from the repository, and installed where nothing else of it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import markdown
import pytest
import yaml
from build.util import project_wheel_metadata
from harness.launch import ROOT
from packaging.requirements import Requirement

from fsdp_zpp.__main__ import main

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
EXAMPLE = "https://github.com/OWNER/fsdp_zpp"  # in pyproject.toml, until there is an address
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


def test_distributions_have_all_modules_and_ask_for_all_that_these_import(built: Path) -> None:
    with ZipFile(built / f"fsdp_zpp-{VERSION}-py3-none-any.whl") as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
        described = wheel.read(f"fsdp_zpp-{VERSION}.dist-info/METADATA").decode()
    folders = ROOT / "fsdp_zpp", ROOT / "kernels/fsdp_zpp_kernels"
    own = {str(path.relative_to(each.parent)) for each in folders for path in each.rglob("*.py")}
    assert packed == own | {f"{each.name}/py.typed" for each in folders}
    # Without NumPy, torch.distributed's *_object* functions and safetensors' save_file raise.
    required = re.findall(r"^Requires-Dist: ([a-z_-]+)[^;\n]*$", described, re.MULTILINE)
    assert sorted(required) == ["numpy", "nvidia-ml-py", "safetensors", "torch"]
    with tarfile.open(built / f"fsdp_zpp-{VERSION}.tar.gz") as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "kernels/fsdp_zpp_kernels/__init__.py"} <= sources


def install_alone(wheel: Path, environment: Path) -> None:
    """Install a wheel and its dependencies, but nothing else, in a new environment."""
    venv.create(environment, with_pip=True)
    install = [environment / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True, env=without_path())
    (site,) = (environment / "lib").glob("python*/site-packages")
    for name in dependencies("fsdp_zpp"):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():  # pip's own setuptools, say
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))


def without_path() -> dict[str, str]:
    """The variables of this process, but for the one by which another Python would find this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def dependencies(name: str) -> set[str]:
    """The names of all that an installed distribution depends on, directly or not, without extras."""
    names: set[str] = set()
    pending = [name]
    while pending:
        for requirement in map(Requirement, metadata.requires(pending.pop()) or []):
            applies = requirement.marker is None or requirement.marker.evaluate()
            if applies and requirement.name not in names:
                names.add(requirement.name)
                pending.append(requirement.name)
    return names


@pytest.fixture(scope="module")
def alone(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its dependencies, but nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    install_alone(built / f"fsdp_zpp-{VERSION}-py3-none-any.whl", folder)
    return folder


def run(environment: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program with the Python of an environment."""
    variables = without_path() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [environment / "bin/python", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=environment, env=variables)


@pytest.mark.wide
def test_the_wheel_works_with_its_dependencies_alone(alone: Path, tmp_path: Path) -> None:
    assert run(alone, "-m", "fsdp_zpp", "--version").stdout == f"fsdp_zpp {VERSION}\n"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run(alone, *launcher, ROOT / "tests/save_and_load.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout).is_relative_to(alone)


INTEGRATIONS = {
    "accelerate": "run pip install '.[accelerate]' in your clone",
    "transformers": "run pip install '.[transformers]' in your clone",
    "torchtitan": "run pip install '.[torchtitan]' in your clone",
    "axolotl": "run pip install '.[axolotl]' in your clone",
    "lightning": "run pip install '.[lightning]' in your clone",
    "ms_swift": "run pip install '.[ms-swift]' in your clone",
    "llama_factory": "see docs/guides/llama-factory-ms-swift.md",
}


def test_an_integration_without_its_framework_says_what_to_install(alone: Path) -> None:
    code = f"""
import importlib
for name in {list(INTEGRATIONS)}:
    try:
        importlib.import_module(f"fsdp_zpp.integrations.{{name}}")
    except ImportError as error:
        print(error)
"""
    done = run(alone, "-c", code)
    for (integration, install), error in zip(INTEGRATIONS.items(), done.stdout.splitlines(), strict=True):
        needed = {"ms_swift": "ms-swift", "llama_factory": "llamafactory"}.get(integration, integration)
        assert error.startswith(f"fsdp_zpp.integrations.{integration} needs {needed}: {install}"), done.stderr


def test_the_version_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"fsdp_zpp {VERSION}\n"
    installed = metadata.version("fsdp_zpp")
    assert installed == VERSION, f"{installed} is installed: remove .venv/ready, and ./run installs {VERSION}"
    for page in ("docs/quickstart.md", "docs/reference/command-line.md"):
        assert re.findall(r"^  fsdp_zpp +(.+)$", (ROOT / page).read_text(), re.MULTILINE) == [VERSION], page
    assert f"{VERSION} is what the repository holds" in (ROOT / "docs/stability.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION


def test_the_changelog_has_a_section_of_this_version() -> None:
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert sections[1].startswith("[Unreleased]\n")
    heading, _, changes = sections[2].partition("\n")
    released = yaml.safe_load((ROOT / "CITATION.cff").read_text())["date-released"]
    assert heading == f"[{VERSION}] - {released}"
    assert "\n- " in changes


def described(folder: Path, repository: str) -> str:
    """The long description of the package, with an address of its repository unless that is empty."""
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    for name in ("fsdp_zpp", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=NOT_DISTRIBUTED)
    project = (ROOT / "pyproject.toml").read_text()
    if repository:
        commented = re.search(r"^# \[project\.urls\]\n(#.*\n)+", project, re.MULTILINE)
        assert commented is not None
        tables = re.sub(r"^# ?", "", commented[0], flags=re.MULTILINE).replace(EXAMPLE, repository)
        project = project.replace(commented[0], tables)
    (folder / "pyproject.toml").write_text(project)
    built = project_wheel_metadata(folder, isolated=False)
    assert built["Description-Content-Type"] == "text/markdown"
    return built["Description"]


def test_readme_on_an_index_links_to_the_files_of_its_version(tmp_path: Path) -> None:
    repository = "https://git.example/us/fsdp_zpp"
    description = described(tmp_path, repository)
    shown, own = (
        markdown.markdown(text, extensions=["fenced_code", "tables"])
        for text in (description, (ROOT / "README.md").read_text())
    )
    links = re.findall(r'(href|src)="([^"]+)"', shown)
    assert len(links) > 20
    for kind, link in links:
        base = f"{repository}/{'raw' if kind == 'src' else 'blob'}/v{VERSION}/"
        assert link.startswith(base)
        assert (ROOT / link.removeprefix(base).partition("#")[0]).is_file(), link
    assert re.sub(rf"{repository}/\w+/v{VERSION}/", "", shown) == own


def test_readme_stays_as_it_is_while_no_repository_is_known(tmp_path: Path) -> None:
    assert described(tmp_path, "").strip() == (ROOT / "README.md").read_text().strip()
