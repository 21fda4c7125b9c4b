"""Nodes that train together are killed, stopped and started again; the others go on, and who returns is equal.

Each node is a job of its own, as torchrun would start it. Its ranks write down what they do.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import multiprocessing.connection
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case, Fsdp1, Fsdp2
from harness.pool import free_port, start_method
from torch import Tensor
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from fsdp_zpp import (
    Elastic,
    Int4,
    LocalSteps,
    LoCo,
    Strategy,
    agreed_weights,
    count_tokens,
    end_training,
    exchange_weights,
    members,
)
from fsdp_zpp.local_steps._torch_members import Members
from fsdp_zpp.runtime.unit import named_units

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nodes of tests share no GPU")

VOCABULARY, LENGTH, SEQUENCES = 61, 17, 16
CASE = Case(clip=None)
LONGEST = 150.0
"""Seconds, beyond those of its steps, after which a run has failed."""


# ---- a rank of a node


@dataclass(frozen=True)
class Training:
    """The model that all nodes train."""

    adapter: Adapter = field(default_factory=Fsdp2)
    levels: str = "III"
    steps: int = 60  # after which nodes end, once all members are there
    pace: float = 0.0  # seconds that a step takes at least, as those of a larger model
    local_steps: LocalSteps = field(default_factory=lambda: LocalSteps(8, codec=Int4(32), error_feedback=LoCo()))
    members: int = 4
    fewest: int = 1
    first: int = 4  # nodes that begin together
    counts_tokens: bool = False
    trainer: str | None = None  # a folder, to train by transformers' Trainer
    fails: int = 0  # the exchange that all nodes have to repeat

    def strategy(self, endpoint: str) -> Strategy:
        # Waits are those of nodes on a machine that is busy with other things, too.
        waits = {"timeout": 20.0, "heartbeat": 2.0, "last_call": 2.0, "join_timeout": 100.0}
        elastic = Elastic(self.members, self.fewest, endpoint=endpoint, **waits)
        return Strategy(self.levels, local_steps=replace(self.local_steps, elastic=elastic))


def batch(node: int, step: int) -> Tensor:
    """Sequences in which a token follows from the one before, four times of five."""
    generator = torch.Generator().manual_seed(100_003 * (node + 1) + step)
    tokens = [torch.randint(VOCABULARY, (SEQUENCES,), generator=generator)]
    for _ in range(LENGTH - 1):
        other = torch.randint(VOCABULARY, (SEQUENCES,), generator=generator)
        follows = torch.rand(SEQUENCES, generator=generator) < 0.8
        tokens.append(torch.where(follows, (7 * tokens[-1] + 3) % VOCABULARY, other))
    return torch.stack(tokens, 1).to(models.device())


def digest(tensors: Mapping[str, Tensor]) -> str:
    sums = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        sums.update(name.encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()[:12]


def agreed_here(model: Any) -> dict[str, Any]:
    """A hash of the agreed weights that this rank holds, and which exchange they are from."""
    fragments = [unit.fragment for unit in named_units(model) if unit.fragment is not None]
    named = [(f"{at} {name}", each) for at, part in enumerate(fragments) for name, each in part.outer.agreed.items()]
    progress = fragments[0].progress
    return {"agreed": digest(dict(named)), "exchange": progress.committed, "round": progress.round}


def fail_once(exchange: int) -> None:
    """Have this rank report that an exchange has failed; not when it is repeated."""
    commit, attempts = Members.commit, itertools.count(1)

    def commit_but_once(self: Members, failure: str = "") -> bool:
        return commit(self, "told to" if next(attempts) == exchange else failure)

    Members.commit = commit_but_once


def train(training: Training, node: int, endpoint: str, log: Any) -> None:
    """Train until the training has made its steps, whoever has made them."""
    if training.fails:
        fail_once(training.fails)
    adapter, gpus = training.adapter, dist.get_world_size()
    model = adapter.make(CASE, training.strategy(endpoint))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = nodes = 0
    # All members see the same in the same step, so they end together.
    while step < training.steps or nodes < training.members:
        started = time.monotonic()
        tokens = batch(node, step)[dist.get_rank() :: gpus]
        loss = models.loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if training.counts_tokens:
            count_tokens(model, tokens.numel() * gpus)
        _, nodes, step = members(model)
        log(step=step, nodes=nodes, loss=loss.item(), **agreed_here(model))
        time.sleep(max(training.pace - (time.monotonic() - started), 0))
    exchange_weights(model)
    weights = digest(adapter.full_weights(model))
    fits = [unit.fragment.outer.last_fit for unit in named_units(model) if unit.fragment is not None]
    with torch.no_grad(), agreed_weights(model):  # on what no node trains on
        held_out = torch.stack([models.loss_of(model, batch(-1, step)) for step in range(16)]).mean().item()
    log(held_out=held_out, weights=weights, correlations=[each["correlation"] for each in fits])
    end_training(model)
    del model, optimizer, loss
    gc.collect()
    groups = [name for name in dist.distributed_c10d._world.pg_names.values() if name.startswith("fsdp_zpp.")]
    log(left=groups + [each.name for each in threading.enumerate() if each.name != "MainThread"])


def train_with_trainer(training: Training, node: int, endpoint: str, log: Any) -> None:
    """Train by transformers' Trainer, whose steps and learning rates are written down."""
    from harness import llama
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fsdp_zpp.integrations.transformers import use_strategy

    class Log(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
            model, rate = others["model"], others["lr_scheduler"].get_last_lr()[0]
            log(step=state.global_step, nodes=members(model).nodes, rate=rate, **agreed_here(model))
            time.sleep(training.pace)

    rows = [{"input_ids": each, "labels": each} for each in batch(node, 0).cpu().repeat(8 * training.steps, 1)]
    arguments = TrainingArguments(
        training.trainer, use_cpu=True, max_steps=training.steps, data_seed=node, report_to=[], disable_tqdm=True
    )
    trainer = use_strategy(Trainer(llama.make_base(), arguments, train_dataset=rows), training.strategy(endpoint))
    trainer.add_callback(Log())
    trainer.train()
    exchange_weights(trainer.model)
    log(weights=agreed_here(trainer.model)["agreed"], made=members(trainer.model).step)
    end_training(trainer.model)


def run_rank(training: Training, node: int, rank: int, gpus: int, port: int, endpoint: str, path: Path) -> None:
    """A process: be a rank of a node."""
    gc.freeze()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(gpus)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(gpus), "GROUP_WORLD_SIZE": "1"}
    work(training, node, endpoint, path)


def work(training: Training, node: int, endpoint: str, path: Path) -> None:
    """Train as a rank of a node, as the environment has it, and write down what happens."""
    torch.set_num_threads(1)
    # For each record, torch's log finds out the caller's name by a walk through all modules.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    with path.open("a", buffering=1) as file:
        sys.stderr = file

        def log(**values: Any) -> None:
            file.write(json.dumps({"pid": os.getpid(), **values}) + "\n")

        log()
        dist.init_process_group("gloo")
        try:
            (train if training.trainer is None else train_with_trainer)(training, node, endpoint, log)
        except Exception as error:
            log(error=str(error), traceback=traceback.format_exc())
            if "the training has ended" not in str(error):
                os._exit(1)
        dist.destroy_process_group()


# ---- nodes

Event = tuple[int, str, int]
"""After how many steps of the training a node is to ``start``, ``stop`` or ``continue``, or loses all ranks (``kill``)
or the last one alone (``kill rank``), after which an agent kills and starts all of them."""


@dataclass
class Node:
    """A job of one node, of which there may have been several lives."""

    number: int
    lives: list[list[Path]] = field(default_factory=list)  # what each rank of each life has written down
    processes: list[Any] = field(default_factory=list)  # the ranks of the present life

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()
        self.processes = []

    def read(self, life: int = -1, rank: int = 0) -> list[dict[str, Any]]:
        """The notes of a rank."""
        path = self.lives[life][rank] if self.lives else Path()
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def texts(self) -> str:
        """All that its ranks have written, for a test that fails."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for life in self.lives for path in life if path.exists())


class Jobs:
    """Nodes of ``gpus`` ranks each that train together, and the store over which they meet."""

    def __init__(self, training: Training, gpus: int, folder: Path) -> None:
        self.training, self.gpus, self.folder = training, gpus, folder
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.endpoint = f"127.0.0.1:{self.store.port}"
        self.nodes = [Node(number) for number in range(training.members)]

    def paths(self, node: Node) -> list[Path]:
        """Where the ranks of its next life write."""
        return [self.folder / f"node{node.number}.life{len(node.lives)}.rank{rank}" for rank in range(self.gpus)]

    def start(self, node: Node) -> None:
        """Start a node, again if it has run before."""
        assert len(node.lives) < 4, node.texts()
        context, port, paths = start_method(), free_port(), self.paths(node)
        node.lives.append(paths)
        for rank, path in enumerate(paths):
            arguments = (self.training, node.number, rank, self.gpus, port, self.endpoint, path)
            node.processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
            node.processes[-1].start()

    def run(self, *events: Event) -> list[Node]:
        """Run until all nodes have ended; return them."""
        deadline, left = time.monotonic() + LONGEST + self.training.steps * self.training.pace, [*events]
        for node in self.nodes[: self.training.first]:
            self.start(node)
        try:
            while alive := [each for node in self.nodes for each in node.processes if each.is_alive()]:
                assert time.monotonic() < deadline, "\n".join(node.texts() for node in self.nodes)
                multiprocessing.connection.wait([each.sentinel for each in alive], 0.05)
                step = max(line.get("step", 0) for node in self.nodes for line in [{}, *node.read()])
                while left and left[0][0] <= step:
                    self._happen(*left.pop(0)[1:])
                for node in self.nodes:
                    if any(process.exitcode for process in node.processes):  # as an agent does
                        node.kill()
                        self.start(node)
        finally:
            for node in self.nodes:
                node.kill()
        assert not left
        return self.nodes

    def _happen(self, kind: str, number: int) -> None:
        node = self.nodes[number]
        if kind == "start":
            self.start(node)
        elif kind == "kill":
            node.kill()
        elif kind == "kill rank":
            os.kill(node.processes[-1].pid, signal.SIGKILL)
        else:
            node.signal(signal.SIGSTOP if kind == "stop" else signal.SIGCONT)


def check(nodes: list[Node], spared: int, fewest: int, returned: int, forks: bool = True) -> None:
    """Fail unless a run has ended as it should, in which nothing happened to the node ``spared``.

    Args:
        nodes: All nodes.
        spared: The number of one.
        fewest: At most so many nodes have trained together at some time after all had met.
        returned: Lives, but for the first, in which a node has trained with others.
        forks: Whether nodes may have made exchanges apart, all of which had been taken for lost by others.
    """
    agreed: dict[tuple[int, int], dict[int, set[str]]] = {}
    lives = [
        (node, life, rank) for node in nodes for life in range(len(node.lives)) for rank in range(len(node.lives[0]))
    ]
    for node, life, rank in lives:
        for line in node.read(life, rank):
            if "agreed" in line:
                rounds = agreed.setdefault((line["exchange"], rank), {})
                rounds.setdefault(line["round"], set()).add(line["agreed"])
    assert all(len(hashes) == 1 for rounds in agreed.values() for hashes in rounds.values())
    assert forks or all(len(rounds) == 1 for rounds in agreed.values())
    ends = [line for node in nodes for line in node.read() if "held_out" in line]
    assert len(ends) == len(nodes), "\n".join(node.texts() for node in nodes)
    assert len({line["weights"] for line in ends}) == 1
    assert max(line["held_out"] for line in ends) < 3.2  # from 4.1, the logarithm of the vocabulary
    (correlations,) = {tuple(line["correlations"]) for line in ends}
    assert any(each < 1 for each in correlations)  # all are 1 until one is known
    together = [line["nodes"] for line in nodes[spared].read(0) if "step" in line]
    assert min(together[together.index(max(together)) :]) <= fewest
    trained = [any("step" in line for line in node.read(life)) for node, life, rank in lives if life and not rank]
    assert sum(trained) == returned
    assert [line["left"] for node in nodes for line in node.read() if "left" in line] == [[]] * len(nodes)


def test_a_rank_that_is_killed_restarts_its_node_alone(tmp_path: Path) -> None:
    local_steps = LocalSteps(5, codec=Int4(32), spread=False)
    training = Training(Fsdp1(), "NNI", steps=24, members=2, first=2, local_steps=local_steps, counts_tokens=True)
    nodes = Jobs(training, 2, tmp_path).run((8, "kill rank", 1))
    check(nodes, 0, fewest=2, returned=1)


def test_an_exchange_that_has_failed_is_repeated_from_the_state_before_it(tmp_path: Path) -> None:
    def agreed(fails: int) -> tuple[dict[int, str], set[int]]:
        local_steps = LocalSteps(4, codec=Int4(32), error_feedback=LoCo(), spread=False)
        training = Training(steps=12, members=2, first=2, local_steps=local_steps, fails=fails)
        (tmp_path / str(fails)).mkdir()
        lines = [line for line in Jobs(training, 1, tmp_path / str(fails)).run()[0].read() if "agreed" in line]
        return {line["exchange"]: line["agreed"] for line in lines}, {line["round"] for line in lines}

    (expected, _), (repeated, rounds) = agreed(0), agreed(2)
    assert len(rounds) == 2
    assert repeated == expected


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "gpus", "fewest"), [(Fsdp1(), 2, 1), (Fsdp2(), 1, 3)], ids=["fsdp1", "fsdp2"])
def test_nodes_come_and_go_at_random_moments(tmp_path: Path, adapter: Adapter, gpus: int, fewest: int) -> None:
    training, chance = Training(adapter, steps=400, pace=0.1, fewest=fewest, first=3), random.Random(gpus)
    at = [45 * place + chance.randrange(30, 70) for place in range(6)]
    events = ("start", 3), ("kill", 0), ("start", 0), ("stop", 1), ("continue", 1), ("kill rank", 3)
    nodes = Jobs(training, gpus, tmp_path).run(*((step, *event) for step, event in zip(at, events, strict=True)))
    # Any two groups of three of four nodes have one in common.
    check(nodes, 2, fewest=3, returned=2, forks=fewest < 3)


@pytest.mark.slow
def test_trainer_takes_over_the_step_and_its_learning_rate(tmp_path: Path) -> None:
    training = Training(steps=80, pace=0.3, members=2, first=1, trainer=str(tmp_path))
    first, second = Jobs(training, 2, tmp_path).run((10, "start", 1))  # accelerate needs two processes
    (there,), (here,) = ([line for line in node.read() if "weights" in line] for node in (first, second))
    assert there["weights"] == here["weights"]
    assert there["made"] == here["made"] == 80
    rates, own = ({line["step"]: line["rate"] for line in node.read() if "rate" in line} for node in (first, second))
    assert max(own) == max(rates) == 80
    joined = [line["step"] for line in second.read() if line.get("nodes") == 2]
    assert 10 < min(joined) < 80
    assert {step: own[step] for step in joined} == {step: rates[step] for step in joined}


@pytest.mark.slow
def test_torchrun_starts_a_node_again(tmp_path: Path) -> None:
    jobs = Jobs(Training(members=2), 2, tmp_path)
    # Otherwise ranks that start again find the addresses of those that were killed, in the store that torchrun keeps.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    arguments = [jobs.endpoint, str(tmp_path)]
    running = [subprocess.Popen([*agent, __file__, str(at), *arguments], env=environment) for at in range(2)]
    first, second = jobs.nodes
    first.lives, second.lives = [jobs.paths(first)], [jobs.paths(second)]
    try:
        deadline = time.monotonic() + LONGEST
        while not any(line.get("step") == 20 for line in second.read(rank=1)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(second.read(rank=1)[0]["pid"], signal.SIGKILL)
        assert [each.wait(LONGEST) for each in running] == [0, 0]
    finally:
        for each in running:
            each.kill()
            each.wait()
    second.lives.append(jobs.paths(second))
    check(jobs.nodes, 0, fewest=2, returned=1)


if __name__ == "__main__":  # under torchrun, which has set the environment
    number, store, folder = sys.argv[1:]
    life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    work(Training(members=2, first=2), int(number), store, Path(folder, f"node{number}.life{life}.rank{rank}"))
