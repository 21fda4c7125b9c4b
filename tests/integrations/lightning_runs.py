"""A small net trained under Lightning: by its Trainer or its Fabric, under either of torch's FSDPs."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.fabric.strategies as fabric_strategies
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import models
from harness.launch import ROOT
from harness.messages import collected
from harness.offload import without_pinning
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ways import (
    ACCELERATOR,
    STOCK,
    Way,
    environment,
    let_gather,
    make_strategy,
    ranks,
    shard,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.integrations.lightning import fabric as our_fabric

BATCHES = 1000
"""More than any run takes: it ends by its number of steps, in the middle of an epoch."""


@dataclass(frozen=True)
class Run:
    """How to train.

    Args:
        way: By what.
        strategy: A strategy, or STOCK.
        steps: Optimizer steps of the whole training.
        micro_batches: Backwards a step.
        clip: Largest norm of the gradient.
        full: Whether checkpoints are files, with everything gathered.
        save_to: Folder in which a checkpoint is saved after the second step.
        weights_only: Whether it is to hold nothing else.
        resume: Checkpoint to go on from.
        validate: Whether to evaluate after each step and after all of them.
        offload: Whether parameters are offloaded to the CPU.
    """

    way: Way
    strategy: Strategy | None
    steps: int = 3
    micro_batches: int = 2
    clip: float | None = 0.5
    full: bool = False
    save_to: Path | None = None
    weights_only: bool = False
    resume: Path | None = None
    validate: bool = False
    offload: bool = False

    @property
    def is_stock_fsdp1(self) -> bool:
        """Return whether Lightning does it all with FSDP1."""
        return self.strategy is STOCK and self.way.fsdp == "fsdp1"


@dataclass
class Outcome:
    """An outcome of a run, as a rank has seen it.

    Attributes:
        losses: Of each micro-batch.
        sent: Bytes sent before each micro-batch and after the last, by kind and hop; empty for STOCK.
        validation: Losses of evaluation.
        warnings: What was logged as such.
    """

    losses: list[float] = field(default_factory=list)
    sent: list[dict[Any, Any]] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Batches:
    """Micro-batches that depend on their number alone, and a position that the Trainer saves in checkpoints."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches, self.position = micro_batches, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            yield models.batch(*divmod(self.position - 1, self.micro_batches))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def evaluation_batches() -> Tensor:
    """Return batches by row, the same in each evaluation; the Trainer would take a list for several loaders."""
    return torch.stack([models.batch(99, index) for index in range(2)])


class Module(LightningModule):
    """A LightningModule of the net, for the Trainer."""

    def __init__(self, run: Run, outcome: Outcome) -> None:
        super().__init__()
        self.run, self.outcome, self.net = run, outcome, models.make_net()

    def configure_model(self) -> None:
        # Lightning calls this before each fit and each evaluation.
        if self.run.way.fsdp == "fsdp2" and not isinstance(self.net, torch_fsdp.FSDPModule):
            shard_net(self.net, self.run.strategy, self.device_mesh["data_parallel"], self.run.offload)

    def configure_optimizers(self) -> Any:
        return models.make_optimizer("adamw", self.parameters())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        note_traffic(self.run, self.outcome, self.trainer.model)
        loss = models.loss_of(self.net, batch)
        self.outcome.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.outcome.validation.append(models.loss_of(self.net, batch).item())

    def on_train_start(self) -> None:
        let_gather(self.run.way, self.run.full, self.trainer.strategy)

    def configure_gradient_clipping(self, *arguments: Any, **keywords: Any) -> None:
        if not self.run.is_stock_fsdp1:
            super().configure_gradient_clipping(*arguments, **keywords)
        elif self.run.clip is not None:
            # Lightning refuses to clip by the norm here; this is what its documentation says to do instead.
            self.trainer.model.clip_grad_norm_(self.run.clip)


def shard_net(net: nn.Module, strategy: Strategy | None, mesh: DeviceMesh | None, offload: bool = False) -> nn.Module:
    """Shard each block and the rest by ``fully_shard``."""
    return shard(net, net.blocks, strategy, mesh, offload)  # type: ignore[arg-type]


def note_traffic(run: Run, outcome: Outcome, model: nn.Module) -> None:
    """Note what ``model`` has sent so far."""
    if run.strategy is not STOCK:
        outcome.sent.append(traffic(model))


def make_own_strategy(run: Run) -> Any:
    """Return the strategy of Lightning, or ours in its place."""
    return make_strategy(
        run.way,
        run.strategy,
        full=run.full,
        layer=models.Block,
        parallelize=lambda net, mesh: shard_net(net, run.strategy, mesh["data_parallel"], run.offload),
        offload=run.offload,
    )


def perform(run: Run) -> Outcome:
    """In a worker: train, and evaluate if asked to."""
    outcome = Outcome()
    with environment(), without_pinning() if run.offload else nullcontext(), collected() as records:
        if run.way.framework == "trainer":
            often = {"every_n_train_steps": 2, "save_top_k": -1}
            saving = ModelCheckpoint(run.save_to, "{step}", enable_version_counter=False, **often)
            train_by_trainer(run, outcome, saving)
        else:
            train_by_fabric(run, outcome)
    outcome.warnings = [message for level, message in records if level == "WARNING"]
    return outcome


def train_by_trainer(run: Run, outcome: Outcome, saving: ModelCheckpoint) -> None:
    """Train as users of the Trainer do."""
    trainer = Trainer(
        accelerator=ACCELERATOR,
        **ranks(),
        strategy=make_own_strategy(run),
        max_steps=run.steps,
        accumulate_grad_batches=run.micro_batches,
        gradient_clip_val=None if run.is_stock_fsdp1 else run.clip,
        callbacks=[] if run.save_to is None else [saving],
        enable_checkpointing=run.save_to is not None,
        num_sanity_val_steps=0,
        val_check_interval=run.micro_batches if run.validate else BATCHES,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(run, outcome)
    trainer.fit(module, Batches(run.micro_batches), evaluation_batches(), ckpt_path=run.resume)
    note_traffic(run, outcome, trainer.model)
    if run.validate:
        trainer.validate(module, evaluation_batches(), verbose=False)


def train_by_fabric(run: Run, outcome: Outcome) -> None:
    """Train as users of Fabric do."""
    fabric = Fabric(accelerator=ACCELERATOR, **ranks(), strategy=make_own_strategy(run))
    fabric.launch()
    # One after the other: ModelParallelStrategy can't set up both together.
    model = fabric.setup_module(models.make_net())
    let_gather(run.way, run.full, fabric.strategy)
    optimizer = fabric.setup_optimizers(models.make_optimizer("adamw", model.parameters()))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if run.resume is not None:
        fabric.load(run.resume, state)
    for step in range(state["step"], run.steps):
        for index in range(run.micro_batches):
            note_traffic(run, outcome, model)
            with fabric.no_backward_sync(model, enabled=index < run.micro_batches - 1):
                loss = models.loss_of(model, models.batch(step, index))
                fabric.backward(loss / run.micro_batches)
            outcome.losses.append(loss.item())
        if run.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=run.clip)
        optimizer.step()
        optimizer.zero_grad()
        if run.validate:
            evaluate(model, outcome)
        if run.save_to is not None and step == 1:
            fabric.save(run.save_to / "step=2.ckpt", state | {"step": step + 1})
    note_traffic(run, outcome, model)
    if run.validate:
        evaluate(model, outcome)


@torch.no_grad()
def evaluate(model: nn.Module, outcome: Outcome) -> None:
    """Evaluate as users of Fabric do."""
    model.eval()
    outcome.validation += [models.loss_of(model, batch).item() for batch in evaluation_batches()]
    model.train()


def saved_by_model_checkpoint(run: Run) -> None:
    """In a worker: train with a ModelCheckpoint that keeps the last of several checkpoints, and a link to it."""
    saving = ModelCheckpoint(
        run.save_to, "{step}", every_n_train_steps=1, save_last="link", save_weights_only=run.weights_only
    )
    with environment():
        train_by_trainer(replace(run, steps=2), Outcome(), saving)


def without_node_size(run: Run) -> Outcome:
    """In a worker: train where the launcher has not said how many processes a node has, as Lightning's own does not."""
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        return perform(run)


def train_beside_tensor_parallelism(strategy: Strategy | None) -> list[float]:
    """In a worker: the losses of two data-parallel pairs of ranks that share each block."""
    layout: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def parallelize(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for block in net.blocks:
            parallelize_module(block, mesh["tensor_parallel"], layout)
        return shard_net(net, strategy, mesh["data_parallel"])

    with environment():
        source: Any = fabric_strategies if strategy is STOCK else our_fabric
        own = source.ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=2)
        fabric = Fabric(accelerator=ACCELERATOR, **ranks(), strategy=own)
        fabric.launch()
        model = fabric.setup_module(models.make_net(hidden=36))
        optimizer = fabric.setup_optimizers(models.make_optimizer("adamw", model.parameters()))
        losses = []
        for step in range(2):
            loss = models.loss_of(model, models.batch(step, 0, rank=dist.get_rank() // 2))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def run_example(arguments: list[str]) -> str:
    """In a worker: what examples/lightning_finetune.py prints."""
    printed = io.StringIO()
    with environment(), mock.patch.object(sys, "argv", ["", *arguments]), contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / "lightning_finetune.py"), run_name="__main__")
    return printed.getvalue()
