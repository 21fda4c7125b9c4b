"""Every block of code in README and docs/ does what its page says; blocks start from what a comment says is given."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from harness import llama
from harness.adapter import Adapter, Fsdp1, Fsdp2
from harness.launch import ROOT
from harness.pool import Pool, device_type
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_zpp import Strategy
from fsdp_zpp.__main__ import main
from fsdp_zpp.bench.run import add_arguments, check

RANKS, GPUS_PER_NODE = 4, 2
PYTHON = ("python", "diff")
LANGUAGES = {*PYTHON, "yaml", "json", "bash", "text", "mermaid"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
"""All pages that users and newcomers read."""


# ---- blocks

_FENCE = re.compile(r"(?ms)^(?P<indent> *)```(?P<language>\w+)[^\n`]*\n(?P<code>.*?)^(?P=indent)```$")
_COMMENT = re.compile(r"<!-- (given|not run|printed by): (.+?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of code, by the line of its first line, and what the comment above it says."""

    page: str
    line: int
    language: str
    code: str
    given: str = ""
    """The names that it starts from; empty: those that the block before it left."""
    not_run: str = ""
    """Why it is not run; empty: it is."""
    printed_by: str = ""
    """ "the command above" for a text whose lines the last command of the bash block before it prints."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    blocks, end = [], 0
    for fence in _FENCE.finditer(text):
        above = _COMMENT.findall(text[end : fence.start()])
        said = {kind.replace(" ", "_"): words for kind, words in above}
        line, code = text.count("\n", 0, fence.start("code")) + 1, textwrap.dedent(fence["code"])
        blocks.append(Block(str(page.relative_to(ROOT)), line, fence["language"], code, **said))
        end = fence.end()
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def run_blocks(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and not block.not_run]


def test_no_block_is_passed_over() -> None:
    for page in PAGES:
        blocks = blocks_of(page)
        assert len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) == 2 * len(blocks), page
        assert {block.language for block in blocks} <= LANGUAGES, page
    for block in BLOCKS:
        if block.language in PYTHON and block.not_run:
            ast.parse(block.code)


# ---- Python


def run_python(blocks: list[Block], folder: Path) -> None:
    """In a worker: run the blocks of a page, in a folder of all ranks, one after the other, as on two nodes of two."""
    namespace: dict[str, Any] = {}
    with _as_torchrun(folder):
        for number, block in enumerate(blocks):
            if block.given or not number:
                # Models of before must be gone, as its process groups, before there is more of it.
                namespace.clear()
                namespace |= {"__name__": "__main__"} | _given(block.given or "model", folder / str(number))
            code = block.code
            if block.language == "diff":
                kept = [line[1:] for line in code.splitlines() if not line.startswith("-")]
                code = textwrap.dedent("\n".join(kept)) + "\n"
            # Lines count as in the page, also in the traceback.
            padded = "\n" * (block.line - 1) + code
            exec(compile(padded, block.page, "exec", dont_inherit=True), namespace)


@contextmanager
def _as_torchrun(folder: Path) -> Iterator[None]:
    environment = {"LOCAL_WORLD_SIZE": str(GPUS_PER_NODE), "LOCAL_RANK": str(dist.get_rank() % GPUS_PER_NODE)}
    if device_type() == "cuda":
        del environment["LOCAL_RANK"]  # the GPU, which the pool has chosen
    work = folder / f"rank{dist.get_rank()}"
    work.mkdir()
    construct = FullyShardedDataParallel.__init__

    def construct_here(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        # Without a GPU, it wants to be told that it runs on the CPU, which would only distract a reader.
        construct(self, *args, **({"device_id": torch.device(device_type())} | kwargs))

    with (
        chdir(work),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(FullyShardedDataParallel, "__init__", construct_here),
    ):
        yield


def _given(kind: str, path: Path) -> dict[str, Any]:
    """The names that a block starts with, as ``docs/design/testing.md`` says; ``path`` is not there yet."""
    path.mkdir(exist_ok=True)
    dist.barrier()
    if kind == "nothing":
        return {"torch": torch}
    adapters = {"fsdp1": Fsdp1(), "fsdp2": Fsdp2()}
    if kind in adapters:
        return _trained(_model(path), adapters[kind])
    return {"model": _model, "lora": _lora}[kind](path)


def _model(path: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(llama.VOCABULARY, (2, 2, 16), generator=generator).to(device_type())
    return {
        "torch": torch,
        "nn": nn,
        "model": llama.make_base(),
        "Layer": LlamaDecoderLayer,
        "batches": [{"input_ids": part, "labels": part} for part in tokens],
        "path": path,
    }


def _lora(path: Path) -> dict[str, Any]:
    names, model = _model(path), llama.make_base(llama.ADAPTED)
    if dist.get_rank() == 0:
        model.save_pretrained(path / "base")
    dist.barrier()
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
    return names | {"model": model, "base": path / "base"}


def _trained(names: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    model = llama.shard(adapter, names["model"], Strategy.zeropp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**names["batches"][0]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return names | {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("page", sorted({block.page for block in run_blocks(*PYTHON)}))
def test_python_runs_on_four_ranks(pool: Callable[[int], Pool], page: str, tmp_path: Path) -> None:
    pool(RANKS).run(run_python, [block for block in run_blocks(*PYTHON) if block.page == page], tmp_path)


# ---- configurations


def _strategies(tree: Any, names: tuple[str, ...]) -> list[Any]:
    """All values under one of these names, anywhere."""
    if isinstance(tree, list):
        return [found for item in tree for found in _strategies(item, names)]
    if not isinstance(tree, dict):
        return []
    return [found for key, value in tree.items() for found in ([value] if key in names else _strategies(value, names))]


def test_strategies_in_yaml_and_deepspeeds_configurations_in_json_are_taken() -> None:
    for block in run_blocks("yaml"):
        tree = yaml.safe_load(block.code)
        assert tree, block
        for found in _strategies(tree, ("strategy", "fsdp_zpp")):
            Strategy.from_dict(found)
    for block in run_blocks("json"):
        tree = json.loads(block.code)
        if "zero_optimization" in tree:
            Strategy.from_deepspeed(tree)


# ---- commands


@pytest.mark.parametrize("page", sorted({block.page for block in run_blocks("bash")}))
def test_commands_exist_and_print_what_pages_say(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # commands are for the repository's root
    printed = ""
    for block in (block for block in BLOCKS if block.page == page):
        if block.language == "bash" and not block.not_run:
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
                    del words[0]
                if words:
                    printed = _check_command(words, capsys)
        if block.printed_by:
            assert block.printed_by == "the command above"
            lines = [" ".join(line.split()) for line in printed.splitlines()]
            for line in block.code.splitlines():
                assert " ".join(line.split()) in [*lines, "..."], line


def _check_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run what predicts or reports, and return what it prints; see that what trains is there and knows its options."""
    match words:
        case ["export" | "cd" | "git" | "touch", *_] | ["python" | "python3", "-m", "venv", *_]:
            pass
        case ["pip", "uninstall", *_] | ["swift", "sft", "--external_plugins", "strategy.py", *_]:
            pass
        case ["pip", "install", *packages]:
            for package in packages:
                for extra in re.findall(r"\[(.+)\]", package):
                    assert set(extra.split(",")) <= set(EXTRAS), package
        case ["./run", what, *_]:
            assert f"    {what})" in (ROOT / "run").read_text(), words
        case ["python", "-m", "fsdp_zpp", *options] | ["fsdp_zpp", *options] if not {"--measure"} & set(words):
            try:
                code = main(options)
            except SystemExit as exited:
                code = exited.code
            printed = capsys.readouterr()
            assert not code, printed.err
            return printed.out
        case ["torchrun", *_] if "bench" in words:
            parser = argparse.ArgumentParser()
            add_arguments(parser)
            check(parser.parse_args(words[words.index("bench") + 1 :]))
        case ["torchrun" | "python" | "accelerate", *_]:
            _check_script(words)
        case ["sbatch", script, *_] | ["axolotl", "train", script, *_]:
            assert (ROOT / script).is_file(), script
        case ["docker", "run", *_] if "torchrun" in words:
            _check_script(words[words.index("torchrun") :])
        case _:
            pytest.fail(f"no test knows what {shlex.join(words)} is")
    return ""


def _check_script(words: list[str]) -> None:
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    if not scripts:
        assert "-m" in words, words
        return
    script = ROOT / words[scripts[0]]
    if script.parts[-2] not in ("examples", "step", "loss", "kernels", "scale"):
        return  # the reader's own
    assert script.is_file(), script
    files = *script.parent.glob("*.py"), *(ROOT / "benchmarks/common").glob("*.py")
    source = "".join(file.read_text() for file in files)
    for option in re.findall(r"--[\w-]+", " ".join(words[scripts[0] + 1 :])):
        assert f'"{option}"' in source, f"{script.name} knows no {option}"
