"""Nodes, each a job of its own as torchrun would start it, that tests kill, stop and start again."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness.pool import free_port, start_method
from node_training import Training, run_rank

LONGEST = 150.0
"""Seconds, beyond those of its steps, after which a run has failed."""
MOST_LIVES = 4
"""How often a node starts, before a run has failed."""


@dataclass(frozen=True)
class Event:
    """Something that happens to a node.

    Args:
        kind: ``kill`` of all ranks, ``kill rank`` of the last one alone, after which an agent kills and starts all of
            them, ``stop`` of all ranks, ``continue``, or ``start``.
        node: The node.
        step: When the training has made so many steps.
        seconds: After how long ranks that are stopped go on, or a node that was killed is started again; None is never.
        until: After how many steps they do so instead.
    """

    kind: str
    node: int
    step: int
    seconds: float | None = None
    until: int | None = None


@dataclass
class Node:
    """A job of one node, of which there may have been several lives.

    Args:
        number: Its number.
        lives: What each rank of each life has written down.
        processes: The ranks of the present life.
        stopped: Whether it is stopped.
    """

    number: int
    lives: list[list[Path]] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    stopped: bool = False

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def read(self, life: int = -1, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank has written down."""
        path = self.lives[life][rank]
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def texts(self) -> str:
        """All that its ranks have written, for a test that fails."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for life in self.lives for path in life if path.exists())


class Jobs:
    """Nodes that train together, and the store over which they meet.

    Args:
        training: What they train.
        gpus: Ranks of each node.
        folder: Where ranks write.
    """

    def __init__(self, training: Training, gpus: int, folder: Path) -> None:
        self.training, self.gpus, self.folder = training, gpus, folder
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.endpoint = f"127.0.0.1:{self.store.port}"
        self.nodes = [Node(number) for number in range(training.members)]
        self._timers: list[tuple[float, Event]] = []

    def start(self, node: Node) -> None:
        """Start a node, again if it has run before."""
        assert len(node.lives) < MOST_LIVES, node.texts()
        life, context, port = len(node.lives), start_method(), free_port()
        paths = [self.folder / f"node{node.number}.life{life}.rank{rank}" for rank in range(self.gpus)]
        node.lives.append(paths)
        node.processes = [
            context.Process(
                target=run_rank,
                args=(self.training, node.number, rank, self.gpus, port, self.endpoint, path),
                daemon=True,
            )
            for rank, path in enumerate(paths)
        ]
        for process in node.processes:
            process.start()

    def run(self, *events: Event) -> list[Node]:
        """Run until all nodes have ended; return them.

        Raises:
            AssertionError: If they do not end.
        """
        deadline, left = time.monotonic() + LONGEST + self.training.steps * self.training.pace, list(events)
        for node in self.nodes[: self.training.first]:
            self.start(node)
        try:
            while any(process.is_alive() for node in self.nodes for process in node.processes) or self._timers:
                assert time.monotonic() < deadline, "\n".join(node.texts() for node in self.nodes)
                alive = [p.sentinel for node in self.nodes for p in node.processes if p.is_alive()]
                multiprocessing.connection.wait(alive, 0.05)
                step = max(
                    (line.get("step", 0) for node in self.nodes if node.lives for line in node.read()), default=0
                )
                for event in [event for event in left if event.step <= step]:
                    left.remove(event)
                    self._happen(event)
                    if event.until is not None:
                        again = "continue" if event.kind == "stop" else "start"
                        left.append(Event(again, event.node, event.until))
                self._watch()
        finally:
            for node in self.nodes:
                node.signal(signal.SIGKILL)
                for process in node.processes:
                    process.join()
        return self.nodes

    def _happen(self, event: Event) -> None:
        node = self.nodes[event.node]
        if event.kind == "start":
            self.start(node)
        elif event.kind == "kill rank":
            os.kill(node.processes[-1].pid, signal.SIGKILL)
        elif event.kind == "kill":
            node.signal(signal.SIGKILL)
            for process in node.processes:
                process.join()
            node.processes = []
            if event.seconds is not None:
                self._timers.append((time.monotonic() + event.seconds, Event("start", event.node, 0)))
        elif event.kind == "continue":
            node.signal(signal.SIGCONT)
        else:
            node.signal(signal.SIGSTOP)
            if event.seconds is not None:
                self._timers.append((time.monotonic() + event.seconds, Event("continue", event.node, 0)))

    def _watch(self) -> None:
        """Start again what is due, and what an agent would start again: a node of which a rank has died."""
        for timer in [timer for timer in self._timers if timer[0] <= time.monotonic()]:
            self._timers.remove(timer)
            self._happen(timer[1])
        for node in self.nodes:
            if any(process.exitcode for process in node.processes):
                node.signal(signal.SIGKILL)
                for process in node.processes:
                    process.join()
                self.start(node)


@dataclass(frozen=True)
class Outcome:
    """What has become of a run.

    Args:
        held_out: The loss in the end, of each node that has made the last exchange.
        weights: The hashes of their weights.
        downtime: The longest time between two steps of a node that was neither killed nor stopped, in seconds.
        disagreements: Exchanges after which agreed weights differed between nodes that had made them together.
        forks: Exchanges that nodes have made apart, all of which had been taken for lost by others.
        fewest: The fewest nodes that trained together, once all had met.
        returned: Lives, but for the first, in which a node has trained with others.
        left: Process groups and threads, in the end, between nodes or beyond the main thread.
        correlations: What nodes know, in the end, of how changes of each fragment correlate.
    """

    held_out: list[float]
    weights: set[str]
    downtime: float
    disagreements: list[int]
    forks: list[int]
    fewest: int
    returned: int
    left: list[str]
    correlations: set[tuple[float, ...]]


def outcome(nodes: list[Node], spared: set[int]) -> Outcome:
    """What has become of a run in which nothing happened to the nodes ``spared``."""
    lines = [[node.read(life) for life in range(len(node.lives))] for node in nodes]
    last = [line for lives in lines for line in lives[-1]] if lines else []
    agreed: dict[tuple[int, int], dict[int, set[str]]] = {}
    for node in nodes:
        for life, ranks in enumerate(node.lives):
            for rank in range(len(ranks)):
                for line in node.read(life, rank):
                    if "agreed" in line:
                        rounds = agreed.setdefault((line["exchange"], rank), {})
                        rounds.setdefault(line["round"], set()).add(line["agreed"])
    together = [[line["nodes"] for line in lines[number][0] if "step" in line] for number in spared]
    assert all(together), "\n".join(nodes[number].texts() for number in spared)
    ends = [line for line in last if "groups" in line]
    return Outcome(
        [line["held_out"] for line in last if "held_out" in line],
        {line["weights"] for line in last if "weights" in line},
        max(longest_gap(node) for node in nodes if node.number in spared),
        sorted({at for (at, _), rounds in agreed.items() if any(len(hashes) > 1 for hashes in rounds.values())}),
        sorted({at for (at, _), rounds in agreed.items() if len(rounds) > 1}),
        min(min(each[each.index(max(each)) :]) for each in together),
        sum(any("step" in line for line in life) for lives in lines for life in lives[1:]),
        [name for line in ends for name in line["groups"]]
        + [name for line in ends for name in line["threads"] if name != "MainThread"],
        {tuple(line["correlations"]) for line in last if "correlations" in line},
    )


def longest_gap(node: Node, life: int = 0) -> float:
    """The longest time between two steps of a node, in seconds."""
    times = [line["time"] for line in node.read(life) if "step" in line]
    return max((after - before for before, after in pairwise(times)), default=0.0)
