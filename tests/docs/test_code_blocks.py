"""Every block of code in README and docs/ does what its page says; blocks start from what a comment says is given."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness.launch import ROOT, launch
from harness.pool import Pool
from pages import PAGES, Block, blocks_of
from reader import RANKS, run_python

from fsdp_zpp import Strategy
from fsdp_zpp.bench.arguments import add_arguments, check
from fsdp_zpp.torch_internals import major_minor

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


PYTHON = ("python", "diff")
SINCE = {"docs/guides/experts.md": (2, 12)}
"""The torch that a page says it needs."""


def run_blocks(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and not block.not_run]


@pytest.mark.parametrize("page", sorted({block.page for block in run_blocks(*PYTHON)}))
def test_python_runs_on_four_ranks(pool: Callable[[int], Pool], page: str, tmp_path: Path) -> None:
    if major_minor(torch.__version__) < SINCE.get(page, (0, 0)):
        pytest.skip(f"needs torch {SINCE[page]}")
    pool(RANKS).run(run_python, [block for block in run_blocks(*PYTHON) if block.page == page], tmp_path)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in PYTHON and b.not_run], ids=str)
def test_python_that_is_not_run_is_python(block: Block) -> None:
    ast.parse(block.code)


def _strategies(tree: Any, names: tuple[str, ...]) -> list[Any]:
    """What stands under one of these names, anywhere."""
    if isinstance(tree, list):
        return [found for item in tree for found in _strategies(item, names)]
    if not isinstance(tree, dict):
        return []
    return [found for key, value in tree.items() for found in ([value] if key in names else _strategies(value, names))]


@pytest.mark.parametrize("block", run_blocks("yaml"), ids=str)
def test_strategies_in_yaml_are_strategies(block: Block) -> None:
    tree = yaml.safe_load(block.code)
    assert tree
    for found in _strategies(tree, ("strategy", "fsdp_zpp")):
        Strategy.from_dict(found)


@pytest.mark.parametrize("block", run_blocks("json"), ids=str)
def test_deepspeeds_configurations_in_json_are_taken(block: Block) -> None:
    tree = json.loads(block.code)
    if "zero_optimization" in tree:
        Strategy.from_deepspeed(tree)


def printed_texts() -> list[tuple[Block, Block]]:
    """Texts that a page says a command has printed, each with the block of that command."""
    pairs = []
    for page in PAGES:
        commands: list[Block] = []
        for block in blocks_of(page):
            commands += [block] if block.language == "bash" else []
            pairs += [(block, commands[-1])] if block.printed_by else []
    return pairs


@pytest.mark.parametrize(("text", "commands"), printed_texts(), ids=str)
def test_commands_print_what_pages_say(text: Block, commands: Block) -> None:
    assert text.printed_by == "the command above"
    command = shlex.split(commands.code.replace("\\\n", " ").splitlines()[-1])
    assert command[:3] == ["python", "-m", "fsdp_zpp"]
    done = launch(1, *command[1:])
    assert done.returncode == 0, done.stderr
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in text.code.splitlines():
        assert " ".join(line.split()) in [*printed, "..."], line


@pytest.mark.parametrize("block", run_blocks("bash"), ids=str)
def test_commands_exist(block: Block, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # commands are for the repository's root
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
            del words[0]
        if words:
            _check_command(words, tmp_path)


def _check_command(words: list[str], folder: Path) -> None:
    """Run what predicts or reports; of what trains, see that it is there and knows its options."""
    match words:
        case ["export" | "cd" | "git" | "touch", *_] | ["python" | "python3", "-m", "venv", *_]:
            pass
        case ["pip", "uninstall", *_]:
            pass
        case ["pip", "install", *packages]:
            for package in packages:
                for extra in re.findall(r"\[(.+)\]", package):
                    assert set(extra.split(",")) <= set(EXTRAS), package
        case ["./run", what, *_]:
            assert f"    {what})" in (ROOT / "run").read_text(), words
        case ["python", "-m", "fsdp_zpp", *options] | ["fsdp_zpp", *options] if not {"--measure"} & set(words):
            done = launch(1, "-m", "fsdp_zpp", *options, working=folder)
            assert done.returncode == 0, done.stderr
        case ["torchrun", *_] if "bench" in words:
            parser = argparse.ArgumentParser()
            add_arguments(parser)
            check(parser.parse_args(words[words.index("bench") + 1 :]))
        case ["swift", "sft", "--external_plugins", "strategy.py", *_]:  # which the page shows
            pass
        case ["torchrun" | "python" | "accelerate", *_]:
            _check_script(words)
        case ["sbatch", script, *_] | ["axolotl", "train", script, *_]:
            assert (ROOT / script).is_file(), script
        case ["docker", "run", *_] if "torchrun" in words:
            _check_script(words[words.index("torchrun") :])
        case _:
            pytest.fail(f"no test knows what {shlex.join(words)} is")


def _check_script(words: list[str]) -> None:
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    if not scripts:
        assert "-m" in words, words
        return
    script = ROOT / words[scripts[0]]
    if script.parts[-2] not in ("examples", "step", "loss", "kernels", "scale"):
        return  # the reader's own
    assert script.is_file(), script
    source = "".join(
        file.read_text() for folder in (script.parent, ROOT / "benchmarks" / "common") for file in folder.glob("*.py")
    )
    for option in re.findall(r"--[\w-]+", " ".join(words[scripts[0] + 1 :])):
        assert f'"{option}"' in source, f"{script.name} knows no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_blocks_are_of_a_known_language(page: Path) -> None:
    """So that none is passed over: what is not run is text."""
    fences = len(re.findall(r"^ *```", page.read_text(), re.MULTILINE))
    blocks = blocks_of(page)
    assert fences == 2 * len(blocks)
    assert {block.language for block in blocks} <= {"python", "diff", "yaml", "json", "bash", "text", "mermaid"}
