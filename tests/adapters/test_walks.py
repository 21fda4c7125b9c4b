"""How long the walks of benchmarks/scale/walks.py are that a newcomer makes through the code."""

from __future__ import annotations

import re

import pytest
import torch
from harness.benchmarks import BENCHMARKS
from harness.launch import launch
from harness.pool import device_type

MOST = {
    "fsdp1 wrapping of a block": (158, 69),
    "fsdp1 gather": (73, 26),
    "fsdp1 gather that prefetches": (90, 33),
    "fsdp1 gradient": (78, 31),
    "fsdp2 wrapping of a block": (118, 63),
    "fsdp2 gather": (52, 22),
    "fsdp2 gather that prefetches": (62, 26),
    "fsdp2 gradient": (70, 32),
}
"""Calls and changes of files, by walk."""


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="counted with torch 2.13")
@pytest.mark.skipif(device_type() == "cuda", reason="its ranks are processes on the CPU")
def test_walks_are_no_longer_than_they_were() -> None:
    done = launch(4, BENCHMARKS / "scale" / "walks.py")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (fsdp.*?) \| (\d+) \| (\d+) \| (\d+) \|$", done.stdout, re.MULTILINE)
    found = {name: (int(calls), int(changes)) for name, calls, _, changes in rows}
    assert found.keys() == MOST.keys()
    longer = {name: walk for name, walk in found.items() if walk[0] > MOST[name][0] or walk[1] > MOST[name][1]}
    assert not longer, f"--show them: {longer}, at most {MOST}"
