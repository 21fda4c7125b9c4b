"""Links between emulated nodes that are slow: who is throttled, by how much, and what is said where none is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.benchmarks import load

throttle = load("common", "throttle")
emulated_nodes = load("loss", "emulated_nodes")
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="a C compiler makes the throttle")
RANK = """
import json, os, socket, sys
mine = socket.socket()
mine.bind(("127.0.0.1", 0))
mine.listen()
print(json.dumps(mine.getsockname()), flush=True)
for address in map(json.loads, sys.stdin):
    other = socket.create_connection(address)
    other.setblocking(False)
    print(os.writev(other.fileno(), [b"head", bytes(2**17)]), flush=True)
    other.close()
"""
"""A rank that listens as gloo does and, for each address that it is given, writes once to who listens there."""
GBPS = 0.08
DEPTH = int(5e-3 * GBPS * 1e9 / 8)
"""Bytes that a bucket holds."""


class Rank:
    """A process that runs ``RANK``."""

    def __init__(self, rank: int, variables: dict[str, str]) -> None:
        environment = os.environ | variables | {"RANK": str(rank)}
        command = [sys.executable, "-c", RANK]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.address = self.read()

    def read(self) -> Any:
        return json.loads(self.process.stdout.readline())

    def write_to(self, other: Rank) -> int:
        """Have it write to another one; the bytes that it could write at once."""
        self.process.stdin.write(json.dumps(other.address) + "\n")
        self.process.stdin.flush()
        return int(self.read())


@needs_compiler
def test_a_node_shares_one_bucket_for_what_it_sends_to_others() -> None:
    variables = throttle.per_node(GBPS, nodes=2, ranks_per_node=2)
    buckets = Path(variables["THROTTLE_BUCKETS"])
    ranks = [Rank(rank, variables) for rank in range(3)]
    try:
        assert [rank.address[0] for rank in ranks] == ["127.77.0.1", "127.77.0.1", "127.77.0.2"]
        whole = 4 + 2**17
        assert ranks[0].write_to(ranks[1]) == whole  # as the system takes it
        assert throttle.sent_by_nodes(buckets) == [0, 0]
        first = ranks[0].write_to(ranks[2])
        assert 0 < first <= DEPTH < whole
        assert throttle.sent_by_nodes(buckets) == [first, 0]
        back = ranks[2].write_to(ranks[1])  # another node's bucket, which is full
        assert 0 < back <= DEPTH
        assert throttle.sent_by_nodes(buckets) == [first, back]
    finally:
        for rank in ranks:
            rank.process.communicate()


@needs_compiler
def test_a_script_starts_itself_again_on_two_nodes_of_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        assert command[5:] == ["run.py", "compare", "--gpus-per-node=2"]
        assert json.loads(os.environ[emulated_nodes.STARTED_BY]) == ["run.py", "compare"]
        assert emulated_nodes.throttled_to() == 2
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["run.py", "compare"])
    monkeypatch.setattr(emulated_nodes, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as exited:
        emulated_nodes.start(None, 2.0)
    assert exited.value.code == 3
    assert "2 nodes of 2; links between them are throttled to 2 Gbit/s a node" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ((2, 2, 1.0), "2 nodes of 2; links between them are not throttled: there is no C compiler (cc)\n"),
        ((2, 2, 0.0), "2 nodes of 2; links between them are not throttled: --gbps 0\n"),
        ((1, 4, 1.0), "One node of 4: no link between nodes, and so nothing to throttle\n"),
    ],
)
def test_what_can_not_be_throttled_is_said(
    layout: tuple[int, int, float], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert emulated_nodes.slow_links(*layout) == {}
    assert capsys.readouterr().out == said
