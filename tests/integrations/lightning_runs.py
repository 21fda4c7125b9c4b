"""A small net trained under Lightning: by its Trainer or its Fabric, under either of torch's FSDPs."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import models
from harness.launch import ROOT
from harness.messages import Refusal, collected
from harness.pool import device_type
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import CodecState, Strategy, fully_shard, traffic
from fsdp_zpp.integrations.lightning import fabric as our_fabric, pytorch as our_trainer
from fsdp_zpp.integrations.lightning.wrapping import wrapped_on_cpu

STOCK = None
"""Stands for Lightning's own strategy and torch's own full sharding where a strategy could be."""
BATCHES = 1000
"""More than any run takes: it ends by its number of steps, in the middle of an epoch."""
ACCELERATOR = device_type().replace("cuda", "gpu")


@dataclass(frozen=True)
class Way:
    """``trainer`` or ``fabric``, and ``fsdp1`` or ``fsdp2``."""

    framework: str
    fsdp: str

    def __str__(self) -> str:
        return f"{self.framework}-{self.fsdp}"


WAYS = [Way(framework, fsdp) for framework in ("trainer", "fabric") for fsdp in ("fsdp1", "fsdp2")]
TRAINER_FSDP1, TRAINER_FSDP2, FABRIC_FSDP1, FABRIC_FSDP2 = WAYS


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

    @property
    def is_stock_fsdp1(self) -> bool:
        """Whether Lightning does it all with FSDP1."""
        return self.strategy is STOCK and self.way.fsdp == "fsdp1"


@dataclass
class Outcome:
    """What a rank has seen.

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
    """Batches by row, the same in each evaluation; the Trainer would take a list for several loaders."""
    return torch.stack([models.batch(99, index) for index in range(2)])


class Module(LightningModule):
    """The net for the Trainer."""

    def __init__(self, run: Run, outcome: Outcome) -> None:
        super().__init__()
        self.run, self.outcome, self.net = run, outcome, models.make_net()

    def configure_model(self) -> None:
        # Lightning calls this before each fit and each evaluation.
        if self.run.way.fsdp == "fsdp2" and not isinstance(self.net, torch_fsdp.FSDPModule):
            shard(self.net, self.run.strategy, self.device_mesh["data_parallel"])

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
        let_gather(self.run, self.trainer.strategy)

    def configure_gradient_clipping(self, *arguments: Any, **keywords: Any) -> None:
        if not self.run.is_stock_fsdp1:
            super().configure_gradient_clipping(*arguments, **keywords)
        elif self.run.clip is not None:
            # Lightning refuses to clip by the norm here; this is what its documentation says to do instead.
            self.trainer.model.clip_grad_norm_(self.run.clip)


def shard(net: nn.Module, strategy: Strategy | None, mesh: DeviceMesh | None) -> nn.Module:
    """Shard each block and the rest by ``fully_shard``."""
    for module in (*net.blocks, net):
        if strategy is STOCK:
            torch_fsdp.fully_shard(module, mesh=mesh)
        else:
            fully_shard(module, strategy=strategy, mesh=mesh)
    return net


def note_traffic(run: Run, outcome: Outcome, model: nn.Module) -> None:
    """Note what ``model`` has sent so far."""
    if run.strategy is not STOCK:
        outcome.sent.append(traffic(model))


class StockTrainerFsdp(trainer_strategies.FSDPStrategy):
    """Lightning's own, but for CPUs, where Lightning refuses that very class, and FSDP wants to be told the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        with wrapped_on_cpu(model, self, self.kwargs) as wrapped:
            return super()._setup_model(wrapped)


class StockFabricFsdp(fabric_strategies.FSDPStrategy):
    """Likewise."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        with wrapped_on_cpu(module, self, self._fsdp_kwargs) as wrapped:
            return super().setup_module(wrapped)


def make_strategy(run: Run) -> Any:
    """The strategy of Lightning, or ours in its place."""
    theirs, stock_fsdp, ours = {
        "trainer": (trainer_strategies, StockTrainerFsdp, our_trainer),
        "fabric": (fabric_strategies, StockFabricFsdp, our_fabric),
    }[run.way.framework]
    if run.way.fsdp == "fsdp2":
        kind: Any = (theirs if run.strategy is STOCK else ours).ModelParallelStrategy
        first = {"parallelize_fn": lambda net, mesh: shard(net, run.strategy, mesh["data_parallel"])}
        return kind(
            **(first if run.way.framework == "fabric" else {}),
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=not run.full,
        )
    return (stock_fsdp if run.strategy is STOCK else ours.FSDPStrategy)(
        sharding_strategy="FULL_SHARD" if run.strategy is STOCK else run.strategy,
        auto_wrap_policy={models.Block},
        state_dict_type="full" if run.full and device_type() == "cuda" else "sharded",
    )


def let_gather(run: Run, strategy: Any) -> None:
    """Have FSDP1 save full state dicts, if ``run`` does, on CPUs too, where the strategy is refused otherwise."""
    if run.full and run.way.fsdp == "fsdp1":
        strategy._state_dict_type = "full"


def ranks() -> dict[str, int]:
    """The arguments with which Lightning takes the ranks of this process group for its own."""
    world = dist.get_world_size()
    per_node = min(world, torch.cuda.device_count()) if device_type() == "cuda" else world
    return {"devices": per_node, "num_nodes": world // per_node}  # more than one where ranks share GPUs


def node_rank() -> str:
    """The number of the node that this rank is on, as :func:`ranks` lays them out."""
    return str(dist.get_rank() // ranks()["devices"])


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """What Lightning runs in: it may clear variables that other tests of this process need.

    On a CPU, FSDP1 does not move what it gathers to the CPU: torch does not copy it then, and reuses or frees it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, NODE_RANK=node_rank()))
        if device_type() == "cpu":
            for module, config in ((torch_fsdp, FullStateDictConfig), (torch_fsdp.api, FullOptimStateDictConfig)):
                in_place = partial(_without_move, config)
                stack.enter_context(mock.patch.object(module, config.__name__, in_place))
        yield


def _without_move(config: Callable[..., Any], offload_to_cpu: bool, rank0_only: bool) -> Any:
    return config(offload_to_cpu=False, rank0_only=rank0_only)


def perform(run: Run) -> Outcome:
    """In a worker: train, and evaluate if asked to."""
    outcome = Outcome()
    with environment(), collected() as records:
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
        strategy=make_strategy(run),
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
    fabric = Fabric(accelerator=ACCELERATOR, **ranks(), strategy=make_strategy(run))
    fabric.launch()
    # One after the other: ModelParallelStrategy can't set up both together.
    model = fabric.setup_module(models.make_net())
    let_gather(run, fabric.strategy)
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
        return shard(net, strategy, mesh["data_parallel"])

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


def _set_up(kind: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    with environment():
        fabric = Fabric(accelerator=ACCELERATOR, **ranks(), strategy=kind(*arguments, **keywords))
        fabric.launch()
        fabric.setup_module(models.make_net())


def _class_for_instance() -> None:
    our_trainer.FSDPStrategy(sharding_strategy=Strategy)


def _hybrid_shard() -> None:
    our_fabric.FSDPStrategy(sharding_strategy=Strategy.zeropp(), device_mesh=(2, 2))


def _strategy_of_the_other() -> None:
    Fabric(accelerator=ACCELERATOR, strategy=our_trainer.FSDPStrategy(sharding_strategy=Strategy.zeropp()))


def _cpu_offload() -> None:
    strategy = Strategy.zeropp(gpus_per_node=2)
    _set_up(our_fabric.FSDPStrategy, sharding_strategy=strategy, cpu_offload=True)


def _full_state_dict() -> None:
    strategy = Strategy.zeropp(gpus_per_node=2)
    _set_up(our_fabric.FSDPStrategy, sharding_strategy=strategy, state_dict_type="full")


def _data_for_some_ranks() -> None:
    strategy = Strategy.zeropp(gpus_per_node=2)
    _set_up(our_fabric.ModelParallelStrategy, lambda net, mesh: shard(net, strategy, None))


def _data_for_some_ranks_of_a_trainer() -> None:
    run = Run(TRAINER_FSDP2, Strategy.zeropp(gpus_per_node=2))
    strategy = our_trainer.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    with environment():
        trainer = Trainer(accelerator=ACCELERATOR, **ranks(), strategy=strategy, logger=False, barebones=True)
        module = Module(run, Outcome())
        shard(module.net, run.strategy, None)
        trainer.fit(module, Batches(1))


def _scopes_beside_tensor_parallelism() -> None:
    strategy = Strategy("III", gpus_per_node=1)

    def parallelize(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
        parallelize_module(net.blocks[0], mesh["tensor_parallel"], {"up": ColwiseParallel()})
        return shard(net, strategy, mesh["data_parallel"])

    _set_up(our_fabric.ModelParallelStrategy, parallelize, data_parallel_size=2, tensor_parallel_size=2)


def _two_dimensional_mesh() -> None:
    strategy = Strategy.zeropp(gpus_per_node=2)
    _set_up(
        our_fabric.ModelParallelStrategy,
        lambda net, mesh: shard(net, strategy, mesh),
        data_parallel_size=2,
        tensor_parallel_size=2,
    )


def _codec_state_in_state() -> None:
    net = shard(models.make_net(), Strategy.zeropp(gpus_per_node=2), None)
    our_fabric.FSDPStrategy().save_checkpoint("", {"model": net, "codecs": CodecState(net)})


REFUSED: dict[str, Refusal] = {
    "the class Strategy": (_class_for_instance, TypeError, "did you mean Strategy()?"),
    "HYBRID_SHARD's mesh": (_hybrid_shard, ValueError, 'Strategy("III", gpus_per_node=...)'),
    "a Trainer's strategy in Fabric": (_strategy_of_the_other, ValueError, "for the Trainer of lightning.pytorch"),
    "offloading on a CPU": (_cpu_offload, ValueError, "needs an accelerator to offload from"),
    "full state dicts on a CPU": (_full_state_dict, ValueError, 'pass state_dict_type="sharded"'),
    "data for some ranks": (_data_for_some_ranks, ValueError, "pass data_parallel_size=4, tensor_parallel_size=1"),
    "data for some ranks of a Trainer": (_data_for_some_ranks_of_a_trainer, ValueError, 'mesh=device_mesh["data_par'),
    "III beside tensor parallelism": (_scopes_beside_tensor_parallelism, NotImplementedError, "use optimizer scope G"),
    "both dimensions of the mesh": (_two_dimensional_mesh, ValueError, 'as in mesh["dp"]'),
    "codec state in Fabric's state": (_codec_state_in_state, TypeError, "leave it out"),
}
"""What is refused."""
