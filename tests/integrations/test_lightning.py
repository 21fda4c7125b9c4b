"""Lightning's Trainer, under either of torch's FSDPs, with a strategy."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import models
from harness.covering import over_each
from harness.launch import launch, printed_by
from harness.messages import Refusal, Reply, assert_refused, attempt, collected
from harness.offload import without_pinning
from harness.pool import Pools, device_type, outnumber_gpus
from hugging_face import offloads
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import FSDPPrecision as LightningFSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy as LightningFSDPStrategy
from lightning_ways import ACCELERATOR, STOCK, environment, let_gather, make_strategy, ranks, shard
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp import Int4Delta, Strategy, traffic
from fsdp_zpp.integrations.lightning import FSDPPrecision, FSDPStrategy, ModelParallelStrategy

WAYS = ("fsdp1", "fsdp2")
STATEFUL = Strategy.loco(weights=Int4Delta(), gpus_per_node=2)
"""Strategy with both kinds of codec state: errors of gradients, and bases of weight deltas."""
LOCAL = Strategy.diloco(every=3, gpus_per_node=2)
EXACT = Strategy("IIG", gpus_per_node=2)
ROUNDING = 2e-6
"""Sums over ranks in another order change the last bits of a gradient, and a few steps of AdamW a loss by this."""
BATCHES = 1000
"""More than any run takes: it ends by its number of steps, in the middle of an epoch."""

over_ways = pytest.mark.parametrize("way", WAYS)


@dataclass(frozen=True)
class Run:
    """How to train; ``strategy`` may be STOCK, and a checkpoint is saved after the second step."""

    way: str
    strategy: Strategy | None
    steps: int = 3
    micro_batches: int = 2
    clip: float | None = 0.5
    full: bool = False
    save_to: Path | None = None
    resume: Path | None = None
    validate: bool = False
    offload: bool = False

    @property
    def checkpoint(self) -> Path:
        assert self.save_to is not None
        return self.save_to / "step=2.ckpt"

    def resumed(self, **others: Any) -> Run:
        """Return a run that goes on from the checkpoint of this one."""
        return replace(self, **{"save_to": None, "resume": self.checkpoint} | others)


@dataclass
class Outcome:
    """An outcome of a run, as a rank has seen it: bytes are those sent before each micro-batch and after the last."""

    losses: list[float] = field(default_factory=list)
    sent: list[dict[Any, Any]] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_offloaded: bool = False


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
    # By row: the Trainer would take a list for several loaders.
    return torch.stack([models.batch(99, index) for index in range(2)])


class Module(LightningModule):
    def __init__(self, run: Run, outcome: Outcome) -> None:
        super().__init__()
        self.run, self.outcome, self.net = run, outcome, models.make_net()

    def configure_model(self) -> None:
        # Lightning calls this before each fit and each evaluation.
        if self.run.way == "fsdp2" and not isinstance(self.net, torch_fsdp.FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            shard(self.net, self.net.blocks, self.run.strategy, mesh, self.run.offload)  # type: ignore[arg-type]

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


def note_traffic(run: Run, outcome: Outcome, model: nn.Module) -> None:
    """Note what ``model`` has sent so far, and whether it is offloaded."""
    if run.strategy is not STOCK:
        outcome.sent.append(traffic(model))
    outcome.is_offloaded = offloads(model)


def strategy_of(run: Run) -> Any:
    return make_strategy(run.way, run.strategy, full=run.full, layer=models.Block, offload=run.offload)


def perform(run: Run) -> Outcome:
    outcome = Outcome()
    pinning = without_pinning() if run.offload else contextlib.nullcontext()
    often = {"every_n_train_steps": 2, "save_top_k": -1}
    saving = ModelCheckpoint(run.save_to, "{step}", enable_version_counter=False, **often)
    with environment(), pinning, collected() as records:
        train_by_trainer(run, outcome, *([] if run.save_to is None else [saving]))
    outcome.warnings = [message for level, message in records if level == "WARNING"]
    return outcome


def train_by_trainer(run: Run, outcome: Outcome, *callbacks: Callback) -> None:
    trainer = Trainer(
        accelerator=ACCELERATOR,
        **ranks(),
        strategy=strategy_of(run),
        max_steps=run.steps,
        accumulate_grad_batches=run.micro_batches,
        gradient_clip_val=run.clip,
        callbacks=list(callbacks),
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


Outcomes = Callable[[Run], list[Outcome]]
Saves = Callable[[Run], tuple[Run, list[Outcome]]]


@pytest.fixture(scope="module")
def outcomes(pool: Pools) -> Outcomes:
    """Return ``outcomes(run)``: what each of four ranks has seen, trained once for all tests that compare with it."""
    return lambda run: pool(4).once(perform, run)


@pytest.fixture(scope="module")
def saved(outcomes: Outcomes, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """Return ``saved(run)``: the run, with a checkpoint after its second step, and its outcomes."""

    @cache
    def get(run: Run) -> tuple[Run, list[Outcome]]:
        saves = replace(run, save_to=tmp_path_factory.mktemp("lightning"))
        return saves, outcomes(saves)

    return get


def stateful(way: str, **others: Any) -> Run:
    """Return a run with codec state of which one half may be resumed."""
    return Run(way, STATEFUL, steps=4, micro_batches=1, **others)


@over_ways
def test_trains_and_evaluates_as_lightnings_own(outcomes: Outcomes, way: str) -> None:
    by_strategy = outcomes(Run(way, EXACT, validate=True))
    # Lightning's own FSDPStrategy can't evaluate after a fit, so all are compared with its ModelParallelStrategy.
    stock = outcomes(Run("fsdp2", STOCK, validate=True))
    for own, other in zip(by_strategy, stock, strict=True):
        assert own.losses == pytest.approx(other.losses, rel=ROUNDING)
        assert own.validation == pytest.approx(other.validation, rel=ROUNDING)
        assert len(own.losses) == 6
        assert len(own.validation) == 8  # two batches after each step, and after all of them
        for step in range(3):
            first, last, after = own.sent[2 * step :][:3]
            assert first["reduce"]["inter"] == last["reduce"]["inter"] < after["reduce"]["inter"]
            assert first["reduce"]["intra"] < last["reduce"]["intra"] < after["reduce"]["intra"]


@over_ways
def test_zeropp_is_within_a_percent_of_full_shard(outcomes: Outcomes, way: str) -> None:
    by_strategy = outcomes(Run(way, Strategy.zeropp(gpus_per_node=2)))
    stock = outcomes(Run("fsdp2", STOCK, validate=True))
    for own, other in zip(by_strategy, stock, strict=True):
        assert own.losses == pytest.approx(other.losses, rel=1e-2)
        assert own.losses[1:] != other.losses[1:]


@over_each(
    rest=False, way=WAYS, kept={"sharded": (STATEFUL, False), "full": (STATEFUL, True), "local steps": (LOCAL, False)}
)
def test_resumes_bit_for_bit(outcomes: Outcomes, saved: Saves, way: str, kept: tuple[Strategy, bool]) -> None:
    strategy, full = kept
    run, whole = saved(replace(stateful(way, full=full), strategy=strategy))
    for own, other in zip(outcomes(run.resumed()), whole, strict=True):
        assert own.losses == other.losses[2:]
        assert own.warnings == []


@over_ways
def test_offloaded_parameters_train_and_resume_as_others(outcomes: Outcomes, saved: Saves, way: str) -> None:
    # Lightning clips by torch's function for FSDP2, whose sums of CPU gradients NCCL doesn't take.
    clip = None if device_type() == "cuda" and way == "fsdp2" else 0.5
    _, kept = saved(stateful(way, clip=clip))
    run, whole = saved(stateful(way, clip=clip, offload=True))
    for own, other, resumed in zip(whole, kept, outcomes(run.resumed()), strict=True):
        assert own.is_offloaded
        assert not other.is_offloaded
        assert own.losses == pytest.approx(other.losses, rel=0 if device_type() == "cpu" else 1e-3)
        assert resumed.losses == own.losses[2:]
        assert resumed.warnings == []


@over_ways
def test_starts_over_with_a_warning_without_codec_state(
    outcomes: Outcomes, saved: Saves, tmp_path: Path, way: str
) -> None:
    run, whole = saved(stateful(way))
    shutil.copytree(run.checkpoint, tmp_path / "step=2.ckpt")
    shutil.rmtree(tmp_path / "step=2.ckpt" / "codecs")
    rest = outcomes(run.resumed(resume=tmp_path / "step=2.ckpt"))
    for rank, (own, other) in enumerate(zip(rest, whole, strict=True)):
        assert own.losses != other.losses[2:]
        assert any("errors start from zero" in warning for warning in own.warnings) == (rank == 0)


def test_goes_on_from_lightnings_own_checkpoint(outcomes: Outcomes, saved: Saves) -> None:
    run, whole = saved(Run("fsdp2", STOCK))
    assert not (run.checkpoint / "codecs").exists()
    rest = outcomes(run.resumed(strategy=Strategy.zeropp(gpus_per_node=2)))
    for stock, resumed in zip(whole, rest, strict=True):
        assert resumed.losses == pytest.approx(stock.losses[4:], rel=1e-2)
        assert resumed.warnings == []


def resume_from_a_cut_off_save(run: Run) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the last save of {run.resume} was cut off")):
        perform(run)


@over_ways
def test_a_checkpoint_whose_save_was_cut_off_is_refused(pool: Pools, saved: Saves, tmp_path: Path, way: str) -> None:
    run, _ = saved(stateful(way))
    shutil.copytree(run.checkpoint, checkpoint := tmp_path / "step=2.ckpt")
    (checkpoint / "save_was_cut_off").touch()
    pool(4).run(resume_from_a_cut_off_save, run.resumed(resume=checkpoint))


def saved_by_callbacks(run: Run, weights: Path) -> None:
    """In a worker: train with checkpoints of which the last is kept, with a link to it, and others of weights alone."""
    often = {"filename": "{step}", "every_n_train_steps": 1}
    savings = [
        ModelCheckpoint(run.save_to, save_last="link", **often),
        ModelCheckpoint(weights, save_weights_only=True, mode="max", **often),  # or Lightning takes them for one
    ]
    with environment():
        train_by_trainer(replace(run, steps=2), Outcome(), *savings)


def test_codec_state_goes_with_its_checkpoint_alone(
    pool: Pools, outcomes: Outcomes, saved: Saves, tmp_path: Path
) -> None:
    run = replace(stateful("fsdp2", full=True), save_to=tmp_path / "all")
    pool(4).run(saved_by_callbacks, run, tmp_path / "weights")
    # The first checkpoint was removed, and its codec state with it.
    assert {path.name for path in (tmp_path / "all").iterdir()} == {
        "last.ckpt",
        "step=2.ckpt",
        "step=2.ckpt.codecs",
        "step=2.ckpt.saved_under",
    }
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"step=2.ckpt", "step=2.ckpt.saved_under"}
    rest = outcomes(run.resumed(resume=tmp_path / "all" / "last.ckpt"))
    _, whole = saved(stateful("fsdp2", full=True))
    assert [own.losses for own in rest] == [other.losses[2:] for other in whole]


def test_codec_state_goes_when_its_checkpoint_is_overwritten(outcomes: Outcomes, tmp_path: Path) -> None:
    for strategy, expected in ((STATEFUL, True), (Strategy.zeropp(gpus_per_node=2), False)):
        outcomes(Run("fsdp2", strategy, steps=2, full=True, save_to=tmp_path))
        assert (tmp_path / "step=2.ckpt.codecs").exists() == expected


@pytest.mark.parametrize(
    ("model", "optimizers", "message"),
    [
        (nn.Linear(1, 1), 1, "use auto_wrap_policy instead"),
        (mock.Mock(spec=FullyShardedDataParallel), 2, "it has 2 optimizers"),
    ],
    ids=["parts wrapped by hand", "several optimizers"],
)
def test_clips_the_norm_of_the_whole_model_alone(model: nn.Module, optimizers: int, message: str) -> None:
    strategy = mock.Mock(model=model, optimizers=[object()] * optimizers)
    with pytest.raises(NotImplementedError, match=message):
        FSDPPrecision(LightningFSDPPrecision("32-true"), strategy).clip_grad_by_norm(mock.Mock(), 1.0)


ZEROPP = Strategy.zeropp(gpus_per_node=2)


def _fit(strategy: Any, sharded_by: Callable[[LightningModule], None] = lambda module: None) -> None:
    run = Run("fsdp1", ZEROPP, steps=1, micro_batches=1)
    module = Module(run, Outcome())
    module.configure_model = lambda: sharded_by(module)  # type: ignore[method-assign]
    with environment():
        Trainer(
            accelerator=ACCELERATOR, **ranks(), strategy=strategy, max_steps=1, logger=False, enable_progress_bar=False
        ).fit(module, Batches(1))


def _shard_over_all(module: Any) -> None:
    shard(module.net, module.net.blocks, ZEROPP, None)


def _shard_over_both(module: Any) -> None:
    shard(module.net, module.net.blocks, ZEROPP, module.device_mesh)


TWO_DIMENSIONS = {"data_parallel_size": 2, "tensor_parallel_size": 2}
REFUSED: dict[str, Refusal] = {
    "the class Strategy": (
        lambda: FSDPStrategy(sharding_strategy=Strategy),
        TypeError,
        "did you mean Strategy()?",
    ),
    "a Strategy in Lightning's own class": (
        lambda: LightningFSDPStrategy(sharding_strategy=ZEROPP),
        AttributeError,
        "'Strategy' object has no attribute 'name'",  # as docs/guides/integrations.md has it
    ),
    "HYBRID_SHARD's mesh": (
        lambda: FSDPStrategy(sharding_strategy=ZEROPP, device_mesh=(2, 2)),
        ValueError,
        'Strategy("III", gpus_per_node=...)',
    ),
    "offloading on a CPU": (
        lambda: _fit(FSDPStrategy(sharding_strategy=ZEROPP, state_dict_type="sharded", cpu_offload=True)),
        ValueError,
        "needs an accelerator to offload from",
    ),
    "full state dicts on a CPU": (
        lambda: _fit(FSDPStrategy(sharding_strategy=ZEROPP, state_dict_type="full")),
        ValueError,
        'pass state_dict_type="sharded"',
    ),
    "data for some ranks": (
        lambda: _fit(ModelParallelStrategy(), _shard_over_all),
        ValueError,
        "pass data_parallel_size=4, tensor_parallel_size=1",
    ),
    "both dimensions of the mesh": (
        lambda: _fit(ModelParallelStrategy(**TWO_DIMENSIONS), _shard_over_both),
        ValueError,
        'mesh=device_mesh["data_par',
    ),
}


def attempt_named(name: str) -> Reply:
    return attempt(REFUSED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(pool: Pools, name: str) -> None:
    if name.endswith("on a CPU") and device_type() != "cpu":
        pytest.skip("GPUs can")
    if name == "data for some ranks" and outnumber_gpus(4):
        pytest.skip("Lightning's default has as many ranks share data as there are nodes, here one a rank")
    assert_refused(pool(4).run(attempt_named, name), REFUSED[name])


def without_node_size(run: Run) -> Outcome:
    """In a worker: train where the launcher has not said how many processes a node has, as Lightning's own does not."""
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        return perform(run)


@pytest.mark.skipif(outnumber_gpus(4), reason="ranks that share a GPU are of different nodes")
@over_ways
def test_nodes_are_as_lightning_has_started_them(pool: Pools, way: str) -> None:
    for outcome in pool(4).run(without_node_size, Run(way, Strategy("IGG"), steps=1, micro_batches=1)):
        assert outcome.sent[-1]["gather"]["inter"] == 0  # four processes on one node


def run_example(arguments: list[str]) -> str:
    with environment():
        return printed_by("examples/lightning_finetune.py", arguments)


@pytest.mark.skipif(outnumber_gpus(2), reason="the example takes a GPU a rank")
def test_example_resumes_in_new_processes(pool: Pools, tmp_path: Path) -> None:
    tiny = ["--preset", "loco", "--gpus-per-node", "1", "--hidden", "32", "--layers", "2", "--output", str(tmp_path)]

    def losses(printed: str) -> list[float]:
        return [float(loss) for loss in re.findall(r"^micro-batch \d+: loss (.*)$", printed, re.MULTILINE)]

    def run_here(*options: str) -> list[float]:
        return losses(pool(2).run(run_example, [*tiny, *options])[0])

    whole, half = run_here("--steps", "4"), run_here("--steps", "2")
    resume = ["--steps", "4", "--resume", str(tmp_path / "step-2.ckpt")]
    rest = launch(2, "examples/lightning_finetune.py", *tiny, *resume, on_cpu=device_type() == "cpu")
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert half + losses(rest.stdout) == whole
    assert len(whole) == 8
    assert run_here("--steps", "1", "--fsdp2") == pytest.approx(whole[:2], rel=1e-2)
    sent = dict(re.findall(r"'(gather|reduce)': {'inter': (\d+)", rest.stdout))
    assert int(sent["gather"]) > 0
    assert int(sent["reduce"]) > 0
