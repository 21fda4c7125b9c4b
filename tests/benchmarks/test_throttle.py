"""Links between emulated nodes that are slow: who is throttled, by how much, and what is said where none is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.benchmarks import load
from harness.launch import ROOT

throttle = load("common", "throttle")
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
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ | variables | {"RANK": str(rank)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = self.read()

    def read(self) -> Any:
        return json.loads(self.process.stdout.readline())

    def write_to(self, other: Rank) -> int:
        """Have it write to another one; the bytes that it could write at once."""
        print(json.dumps(other.address), file=self.process.stdin, flush=True)
        return int(self.read())


@pytest.mark.skipif(not shutil.which("cc"), reason="a C compiler makes the throttle")
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


def test_what_can_not_be_throttled_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")  # as run.py has it
    compare = load("loss", "compare")
    monkeypatch.setenv("PATH", "")
    for layout, said in {
        (2, 2, 1.0): "2 nodes of 2; links between them are not throttled: there is no C compiler (cc)\n",
        (2, 2, 0.0): "2 nodes of 2; links between them are not throttled: --gbps 0\n",
        (1, 4, 1.0): "One node of 4: no link between nodes, and so nothing to throttle\n",
    }.items():
        assert compare.slow_links(*layout) == {}
        assert capsys.readouterr().out == said
