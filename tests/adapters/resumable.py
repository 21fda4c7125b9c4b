"""A training that may be killed at any moment and then goes on from its last checkpoint.

    export PYTHONPATH=tests
    torchrun --standalone --nproc-per-node 4 --max-restarts 10 tests/adapters/resumable.py fsdp2 LoCo FOLDER 24 3 10

trains 24 steps, saves a checkpoint every 3 steps, kills some rank ten times, and leaves losses and weights in the
folder.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import lora, models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS
from harness.pool import TIMEOUT, device_type
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_zpp import (
    CodecState,
    Int4,
    Int4Delta,
    Int8,
    LoCo,
    Strategy,
    load_frozen_params,
    quantize_frozen_params,
    save_frozen_params,
)

ZEROPP = Strategy.zeropp(weights=Int8(64), gradients=Int4(64))
STRATEGIES = {
    "zeropp": ZEROPP,
    "LoCo": replace(ZEROPP, error_feedback=LoCo(reset_every=7)),
    "Int4Delta": replace(ZEROPP, weights=Int4Delta(64, Int8(64))),
    "frozen": replace(ZEROPP, frozen=Int8(64)),
    "LoCo and Int4Delta": replace(ZEROPP, error_feedback=LoCo(reset_every=7), weights=Int4Delta(64, Int8(64))),
}
SAMPLES, BATCH, MICRO_BATCHES = 40, 8, 2
MOMENTS = ("saving", "saved", "forward", "loss", "backward", "optimizer")
"""When a rank may be killed, in the order in which they come in a step."""


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        adapter: The name of an adapter.
        strategy: The name of a strategy.
        folder: Where checkpoints, losses and weights go.
        steps: How many.
        save_every: The number of steps between checkpoints.
        kills: How often a rank is killed, at random moments.
    """

    adapter: str
    strategy: str
    folder: Path
    steps: int
    save_every: int = 3
    kills: int = 0

    def deaths(self, world: int) -> list[tuple[int, int, int]]:
        """The step, the moment and the rank of each, in the order of time."""
        chance = random.Random(f"{self.adapter} {self.strategy}")
        moments = range(len(MOMENTS))
        return sorted(
            (chance.randrange(1, self.steps), chance.choice(moments), chance.randrange(world))
            for _ in range(self.kills)
        )


class Order:
    """In which order samples are trained on: the same whatever the number of ranks."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.left = torch.empty(0, dtype=torch.long)

    def take(self, n: int) -> Tensor:
        """The next ``n`` samples."""
        if len(self.left) < n:
            self.left = torch.randperm(SAMPLES, generator=self.generator)
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"generator": self.generator.get_state().tolist(), "left": self.left.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        self.left = torch.tensor(state["left"], dtype=torch.long)


class Run:
    """One start of a job, in a process group."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.adapter: Adapter = {str(adapter): adapter for adapter in ADAPTERS}[job.adapter]
        self.strategy = replace(STRATEGIES[job.strategy], gpus_per_node=max(1, self.world // 2))
        self.killed = len(list(job.folder.glob("killed-*")))
        self.deaths = job.deaths(self.world)[self.killed :]
        self.model = self._make()
        self.optimizer = models.make_optimizer("adamw", (p for p in self.model.parameters() if p.requires_grad))
        self.order = Order()

    def _make(self) -> Any:
        if self.strategy.frozen is None:
            return self.adapter.make(Case(model=(("blocks", 2),)), self.strategy)
        net = lora.make_net(blocks=2, rank=4)  # a row for each rank, or FSDP1, stock too, can't load its checkpoints
        if self.killed % 2:  # from its files, or quantized anew
            for parameter in net.parameters():
                if not parameter.requires_grad and parameter.dim() == 2:
                    parameter.zero_()
            load_frozen_params(net, self.job.folder / "base", gpus_per_node=self.strategy.gpus_per_node)
        else:
            quantize_frozen_params(net, self.strategy.frozen, gpus_per_node=self.strategy.gpus_per_node)
            if not self.killed:
                save_frozen_params(net, self.job.folder / "base")
        return self.adapter.shard(net, Case(), self.strategy)

    def train(self) -> Iterator[tuple[int, float]]:
        """Train from the newest checkpoint to the end; the number of each step and its loss."""
        first = self._load()
        for step in range(first, self.job.steps):
            if step % self.job.save_every == 0 and step > first:
                self._save(step)
            yield step, self._step(step)

    def _step(self, step: int) -> float:
        self._may_die(step, "forward")
        total = 0.0
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            samples = self.order.take(BATCH)[self.rank :: self.world]
            with self.adapter.micro_batch(self.model, last, False):
                loss = models.loss_of(self.model, torch.stack([_sample(int(i)) for i in samples])) / MICRO_BATCHES
                if last:
                    self._may_die(step, "loss")
                    loss.register_hook(lambda gradient: self._may_die(step, "backward"))
                loss.backward()
            total += loss.item()
        self.adapter.clip(self.model, 0.5)
        self._may_die(step, "optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _may_die(self, step: int, moment: str) -> None:
        if self.deaths and self.deaths[0][2] == self.rank and self.deaths[0][:2] <= (step, MOMENTS.index(moment)):
            (self.job.folder / f"killed-{self.killed}").write_text(f"rank {self.rank} in step {step}, {moment}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    # ---- checkpoints

    def _states(self) -> tuple[dict[str, Any], CodecState]:
        self.adapter.before_load(self.model)
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states, "order": self.order}, CodecState(self.model)

    def _save(self, step: int) -> None:
        state, codecs = self._states()
        unfinished = self.job.folder / f"unfinished-{step}"
        dcp.save({**state, "codecs": codecs}, checkpoint_id=unfinished)
        self._may_die(step, "saving")
        dist.barrier()
        if self.rank == 0:
            unfinished.rename(self.job.folder / f"step-{step}")
        self._may_die(step, "saved")
        dist.barrier()

    def _load(self) -> int:
        """Go on from the newest checkpoint; the step that comes next."""
        if self.rank == 0:
            for unfinished in self.job.folder.glob("unfinished-*"):
                shutil.rmtree(unfinished)
        dist.barrier()
        steps = [int(path.name.removeprefix("step-")) for path in self.job.folder.glob("step-*")]
        if not steps:
            return 0
        path = self.job.folder / f"step-{max(steps)}"
        state, codecs = self._states()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        # Another number of ranks finds no entries of its own.
        dcp.load({"codecs": codecs}, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        return max(steps)


def _sample(i: int) -> Tensor:
    return torch.randint(61, (models.SEQUENCE + 1,), generator=torch.Generator().manual_seed(i)).to(models.device())


def main(job: Job) -> None:
    """In a process that an elastic agent has started: run the job, from wherever it has come to."""
    torch.set_num_threads(1)
    if device_type() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type() == "cuda" else "gloo", timeout=TIMEOUT)
    run = Run(job)
    with (job.folder / f"losses-{run.rank}").open("a", buffering=1) as file:
        for step, loss in run.train():
            print(step, loss.hex(), file=file)
    weights = run.adapter.full_weights(run.model)
    if run.rank == 0:
        torch.save(weights, job.folder / "weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    adapter, strategy, folder, *numbers = sys.argv[1:]
    main(Job(adapter, strategy, Path(folder), *map(int, numbers)))
