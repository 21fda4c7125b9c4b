"""One rank of a node that trains with others that come and go, and writes down what it does."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.fsdp2 import Fsdp2
from harness.pool import device_type
from torch import Tensor

from fsdp_zpp import (
    Elastic,
    Int4,
    LocalSteps,
    Strategy,
    agreed_weights,
    count_tokens,
    end_training,
    exchange_weights,
    members,
)
from fsdp_zpp.runtime.unit import named_units

VOCABULARY, LENGTH, SEQUENCES = 61, 17, 16
CASE = Case(clip=None)
PATIENT = (("timeout", 20.0), ("heartbeat", 2.0), ("last_call", 2.0), ("join_timeout", 100.0))
"""Waits of nodes on a machine that is busy with other things, too."""
QUICK = (("timeout", 5.0), ("heartbeat", 1.5), ("last_call", 1.5), ("join_timeout", 100.0))
"""Waits of nodes whose downtime is measured."""


@dataclass(frozen=True)
class Training:
    """What all nodes train.

    Args:
        adapter: Which FSDP.
        levels: Letters of the strategy.
        steps: After how many steps of the training nodes end, once all members are there.
        pace: Seconds that a step takes at least.
        local_steps: How nodes exchange; ``elastic`` is filled in.
        members: The most nodes.
        fewest: The fewest nodes that train.
        first: Nodes that begin together.
        counts_tokens: Whether changes are weighted by tokens.
        waits: How long nodes wait for each other.
        trainer: A folder, to train by transformers' Trainer.
    """

    adapter: Adapter = field(default_factory=Fsdp2)
    levels: str = "III"
    steps: int = 60
    pace: float = 0.0
    local_steps: LocalSteps = field(default_factory=lambda: LocalSteps(8, codec=Int4(32)))
    members: int = 4
    fewest: int = 1
    first: int = 4
    counts_tokens: bool = False
    waits: tuple[tuple[str, float], ...] = PATIENT
    trainer: str | None = None

    def strategy(self, endpoint: str) -> Strategy:
        """The strategy of all nodes."""
        elastic = Elastic(self.members, self.fewest, endpoint=endpoint, **dict(self.waits))
        return Strategy(self.levels, local_steps=replace(self.local_steps, elastic=elastic))


def batch(node: int, step: int) -> Tensor:
    """Sequences in which a token follows from the one before, four times of five."""
    generator = torch.Generator().manual_seed(100_003 * (node + 1) + step)
    tokens = [torch.randint(VOCABULARY, (SEQUENCES,), generator=generator)]
    for _ in range(LENGTH - 1):
        random = torch.randint(VOCABULARY, (SEQUENCES,), generator=generator)
        follows = torch.rand(SEQUENCES, generator=generator) < 0.8
        tokens.append(torch.where(follows, (7 * tokens[-1] + 3) % VOCABULARY, random))
    return torch.stack(tokens, 1).to(models.device())


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of all values."""
    sums = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        sums.update(name.encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def groups_between_nodes() -> list[str]:
    """The process groups of this rank that are not of its node alone."""
    return [name for name in dist.distributed_c10d._world.pg_names.values() if name.startswith("fsdp_zpp.")]


def agreed_here(model: Any) -> dict[str, Any]:
    """A hash of the agreed weights that this rank holds, and which exchange they are from."""
    fragments = [unit.fragment for unit in named_units(model) if unit.fragment is not None]
    named = [(f"{at} {name}", each) for at, part in enumerate(fragments) for name, each in part.outer.agreed.items()]
    progress = fragments[0].progress
    return {"agreed": digest(dict(named))[:12], "exchange": progress.committed, "round": progress.round}


@torch.no_grad()
def held_out_loss(model: Any) -> float:
    """The loss on what no node trains on."""
    with agreed_weights(model):
        return torch.stack([models.loss_of(model, batch(-1, step)) for step in range(16)]).mean().item()


def train(training: Training, node: int, endpoint: str, log: Any) -> None:
    """Train until the training has made its steps, whoever has made them."""
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
        time.sleep(max(training.pace - (time.monotonic() - started), 0))  # a pace, as that of a larger model
    exchange_weights(model)
    weights = digest(adapter.full_weights(model))
    fits = [unit.fragment.outer.last_fit for unit in named_units(model) if unit.fragment is not None]
    known = [each["correlation"] for each in fits]
    log(held_out=held_out_loss(model), weights=weights, nodes=members(model).nodes, correlations=known)
    end_training(model)
    del model, optimizer, loss
    gc.collect()
    log(groups=groups_between_nodes(), threads=[each.name for each in threading.enumerate()], ended=True)


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
    log(held_out=0.0, weights=agreed_here(trainer.model)["agreed"], made=members(trainer.model).step)
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
    with path.open("a", buffering=1) as file:
        sys.stderr = file

        def log(**values: Any) -> None:
            file.write(json.dumps({"time": time.monotonic(), **values}) + "\n")

        log(pid=os.getpid())
        if device_type() == "cuda":
            # A node is a machine of its own to NCCL, so nodes may share GPUs, but its ranks may not.
            os.environ |= {"NCCL_HOSTID": f"node{node}"}
            torch.cuda.set_device(
                (node * int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"])) % torch.cuda.device_count()
            )
            dist.init_process_group("nccl", device_id=models.device())
        else:
            dist.init_process_group("gloo")
        try:
            (train if training.trainer is None else train_with_trainer)(training, node, endpoint, log)
        except Exception as error:
            log(error=str(error), traceback=traceback.format_exc(), ended="the training has ended" in str(error))
            if "the training has ended" not in str(error):
                os._exit(1)
        dist.destroy_process_group()


if __name__ == "__main__":  # under torchrun, which has set the environment
    number, store, folder = sys.argv[1:]
    life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    work(Training(members=2, first=2), int(number), store, Path(folder, f"node{number}.life{life}.rank{rank}"))
