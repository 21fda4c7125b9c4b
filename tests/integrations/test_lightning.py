"""Lightning's Trainer and Fabric, under either of torch's FSDPs, with a strategy."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from harness.covering import over_each
from harness.launch import launch
from harness.messages import assert_refused, attempt
from harness.pool import Pool, device_type, outnumber_gpus
from lightning.pytorch.plugins.precision import FSDPPrecision as LightningFSDPPrecision
from lightning_refusals import REFUSED
from lightning_runs import (
    Outcome,
    Run,
    perform,
    run_example,
    saved_by_model_checkpoint,
    train_beside_tensor_parallelism,
    without_node_size,
)
from lightning_ways import FABRIC_FSDP2, STOCK, TRAINER_FSDP1, TRAINER_FSDP2, WAYS, Way
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp import Int4Delta, Strategy
from fsdp_zpp.integrations.lightning.pytorch import FSDPPrecision

STATEFUL = Strategy.loco(weights=Int4Delta(), gpus_per_node=2)
"""Strategy with both kinds of codec state: errors of gradients, and bases of weight deltas."""
LOCAL = Strategy.diloco(every=3, gpus_per_node=2)
ROUNDING = 2e-6
"""Sums over ranks in another order change the last bits of a gradient, and a few steps of AdamW a loss by this."""

over_ways = pytest.mark.parametrize("way", WAYS, ids=str)


@pytest.fixture(scope="module")
def outcomes(pool: Callable[[int], Pool]) -> Callable[[Run], list[Outcome]]:
    """Return ``outcomes(run)``: what each of four ranks has seen, trained once for all tests that compare with it."""
    trained: dict[Run, list[Outcome]] = {}

    def get(run: Run) -> list[Outcome]:
        if run not in trained:
            trained[run] = pool(4).run(perform, run)
        return trained[run]

    return get


@over_ways
def test_trains_and_evaluates_as_lightnings_own(outcomes: Callable[[Run], list[Outcome]], way: Way) -> None:
    by_strategy = outcomes(Run(way, Strategy("GGG", gpus_per_node=2), validate=True))
    # Lightning's own FSDPStrategy can't evaluate after a fit, so all are compared with its ModelParallelStrategy.
    stock = outcomes(Run(replace(way, fsdp="fsdp2"), STOCK, validate=True))
    for own, other in zip(by_strategy, stock, strict=True):
        assert own.losses == pytest.approx(other.losses, rel=ROUNDING)
        assert own.validation == pytest.approx(other.validation, rel=ROUNDING)
        assert len(own.losses) == 6
        assert len(own.validation) == 8  # two batches after each step, and after all of them


@pytest.mark.parametrize("framework", ["trainer", "fabric"])
def test_lightnings_own_fsdp_gives_the_same_losses(outcomes: Callable[[Run], list[Outcome]], framework: str) -> None:
    by_strategy = outcomes(Run(Way(framework, "fsdp1"), Strategy("GGG", gpus_per_node=2), validate=True))
    stock = outcomes(Run(Way(framework, "fsdp1"), STOCK))
    for own, other in zip(by_strategy, stock, strict=True):
        assert own.losses == pytest.approx(other.losses, rel=ROUNDING)


@over_ways
def test_zeropp_is_within_a_percent_of_full_shard(outcomes: Callable[[Run], list[Outcome]], way: Way) -> None:
    by_strategy = outcomes(Run(way, Strategy.zeropp(gpus_per_node=2)))
    stock = outcomes(Run(replace(way, fsdp="fsdp2"), STOCK, validate=True))
    for own, other in zip(by_strategy, stock, strict=True):
        assert own.losses == pytest.approx(other.losses, rel=1e-2)
        assert own.losses[1:] != other.losses[1:]


@over_ways
def test_accumulation_sends_nothing_between_nodes_before_the_last_micro_batch(
    outcomes: Callable[[Run], list[Outcome]], way: Way
) -> None:
    strategy = Strategy("IIG", gpus_per_node=2)
    steps, micro_batches = 2, 3
    several = outcomes(Run(way, strategy, steps=steps, micro_batches=micro_batches))
    one = outcomes(Run(way, strategy, steps=steps, micro_batches=1))
    for own, other in zip(several, one, strict=True):
        for step in range(steps):
            first, second, third, after = own.sent[step * micro_batches :][: micro_batches + 1]
            assert first["reduce"]["inter"] == second["reduce"]["inter"] == third["reduce"]["inter"]
            assert first["reduce"]["intra"] < second["reduce"]["intra"] < third["reduce"]["intra"]
            assert second["gather"]["inter"] == third["gather"]["inter"]
            assert third["reduce"]["inter"] < after["reduce"]["inter"]
        for kind in ("gather", "reduce"):
            assert own.sent[-1][kind]["inter"] == other.sent[-1][kind]["inter"] > 0


@pytest.mark.parametrize(
    ("strategy", "full"),
    [(STATEFUL, False), (STATEFUL, True), (LOCAL, False)],
    ids=["sharded", "full", "local steps"],
)
@over_ways
def test_resumes_bit_for_bit(
    outcomes: Callable[[Run], list[Outcome]], tmp_path: Path, way: Way, strategy: Strategy, full: bool
) -> None:
    run = Run(way, strategy, steps=4, micro_batches=1, full=full, save_to=tmp_path)
    whole = outcomes(run)
    rest = outcomes(replace(run, save_to=None, resume=tmp_path / "step=2.ckpt"))
    for own, other in zip(rest, whole, strict=True):
        assert own.losses == other.losses[2:]
        assert own.warnings == []


@over_each(framework=["trainer", "fabric"], fsdp=["fsdp1", "fsdp2"])
def test_offloaded_parameters_train_and_resume_as_others(
    outcomes: Callable[[Run], list[Outcome]], tmp_path: Path, framework: str, fsdp: str
) -> None:
    way = Way(framework, fsdp)
    # Lightning clips by torch's function for FSDP2, whose sums of CPU gradients NCCL doesn't take.
    clip = None if device_type() == "cuda" and way.fsdp == "fsdp2" else 0.5
    run = Run(way, STATEFUL, steps=4, micro_batches=2, clip=clip, offload=True, save_to=tmp_path)
    kept = outcomes(replace(run, offload=False, save_to=None))
    whole = outcomes(run)
    rest = outcomes(replace(run, save_to=None, resume=tmp_path / "step=2.ckpt"))
    for own, other, resumed in zip(whole, kept, rest, strict=True):
        assert own.losses == pytest.approx(other.losses, rel=0 if device_type() == "cpu" else 1e-3)
        assert resumed.losses == own.losses[4:]
        assert resumed.warnings == []


@pytest.mark.parametrize("way", [TRAINER_FSDP1, FABRIC_FSDP2], ids=str)
def test_starts_over_with_a_warning_without_codec_state(
    outcomes: Callable[[Run], list[Outcome]], tmp_path: Path, way: Way
) -> None:
    run = Run(way, STATEFUL, save_to=tmp_path)
    whole = outcomes(run)
    shutil.rmtree(tmp_path / "step=2.ckpt" / "codecs")
    rest = outcomes(replace(run, save_to=None, resume=tmp_path / "step=2.ckpt"))
    for rank, (own, other) in enumerate(zip(rest, whole, strict=True)):
        assert own.losses != other.losses[4:]
        assert any("errors start from zero" in warning for warning in own.warnings) == (rank == 0)


def test_a_strategy_without_codec_state_goes_on_from_lightnings_own_checkpoint(
    outcomes: Callable[[Run], list[Outcome]], tmp_path: Path
) -> None:
    run = Run(TRAINER_FSDP1, STOCK, save_to=tmp_path)
    whole = outcomes(run)
    zeropp = Strategy.zeropp(gpus_per_node=2)
    rest = outcomes(replace(run, strategy=zeropp, save_to=None, resume=tmp_path / "step=2.ckpt"))
    assert not (tmp_path / "step=2.ckpt" / "codecs").exists()
    for own, other in zip(rest, whole, strict=True):
        assert own.losses == pytest.approx(other.losses[4:], rel=1e-2)
        assert own.warnings == []


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_codec_state_is_removed_with_its_checkpoint_and_found_by_a_link(
    pool: Callable[[int], Pool], outcomes: Callable[[Run], list[Outcome]], tmp_path: Path, full: bool
) -> None:
    run = Run(TRAINER_FSDP2, STATEFUL, full=full, save_to=tmp_path)
    pool(4).run(saved_by_model_checkpoint, run)
    expected = {"last.ckpt", "step=2.ckpt"} | ({"step=2.ckpt.codecs"} if full else set())
    assert {path.name for path in tmp_path.iterdir()} == expected
    rest = outcomes(replace(run, save_to=None, resume=tmp_path / "last.ckpt"))
    whole = outcomes(Run(TRAINER_FSDP2, STATEFUL))
    assert [own.losses for own in rest] == [other.losses[4:] for other in whole]


def test_a_checkpoint_of_weights_alone_has_no_codec_state(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    run = Run(TRAINER_FSDP2, STATEFUL, full=True, save_to=tmp_path, weights_only=True)
    pool(4).run(saved_by_model_checkpoint, run)
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "step=2.ckpt"}


def test_codec_state_goes_when_its_checkpoint_is_overwritten(
    outcomes: Callable[[Run], list[Outcome]], tmp_path: Path
) -> None:
    for strategy, expected in ((STATEFUL, True), (Strategy.zeropp(gpus_per_node=2), False)):
        outcomes(Run(FABRIC_FSDP2, strategy, steps=2, full=True, save_to=tmp_path))
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


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(pool: Callable[[int], Pool], name: str) -> None:
    if name.endswith("on a CPU") and device_type() != "cpu":
        pytest.skip("GPUs can")
    if name == "data for some ranks" and outnumber_gpus(4):
        pytest.skip("Lightning's default has as many ranks share data as there are nodes, here one a rank")
    refusal = REFUSED[name]
    assert_refused(pool(4).run(attempt, refusal), refusal)


@pytest.mark.parametrize("levels", ["GGG", "III"])
def test_works_beside_tensor_parallelism(pool: Callable[[int], Pool], levels: str) -> None:
    stock = pool(4).once(train_beside_tensor_parallelism, STOCK)
    by_strategy = pool(4).run(train_beside_tensor_parallelism, Strategy(levels, gpus_per_node=1))
    assert by_strategy == [pytest.approx(losses, rel=ROUNDING) for losses in stock]


@pytest.mark.skipif(outnumber_gpus(4), reason="ranks that share a GPU are of different nodes")
@over_ways
def test_nodes_are_as_lightning_has_started_them(pool: Callable[[int], Pool], way: Way) -> None:
    for outcome in pool(4).run(without_node_size, Run(way, Strategy("IGG"), steps=1, micro_batches=1)):
        assert outcome.sent[-1]["gather"]["inter"] == 0  # four processes on one node


@pytest.mark.skipif(outnumber_gpus(4), reason="the example takes a GPU a rank")
def test_example_resumes_in_new_processes(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    tiny = ["--preset", "loco", "--gpus-per-node", "2", "--hidden", "32", "--layers", "2", "--output", str(tmp_path)]

    def losses(printed: str) -> list[float]:
        return [float(loss) for loss in re.findall(r"^micro-batch \d+: loss (.*)$", printed, re.MULTILINE)]

    def run_here(*options: str) -> list[float]:
        return losses(pool(4).run(run_example, [*tiny, *options])[0])

    whole, half = run_here("--steps", "4"), run_here("--steps", "2")
    resume = ["--steps", "4", "--resume", str(tmp_path / "step-2.ckpt")]
    rest = launch(4, "examples/lightning_finetune.py", *tiny, *resume, on_cpu=device_type() == "cpu")
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert half + losses(rest.stdout) == whole
    assert len(whole) == 8
    assert run_here("--steps", "4", "--fsdp2") == pytest.approx(whole, rel=1e-2)
    sent = dict(re.findall(r"'(gather|reduce)': {'inter': (\d+)", rest.stdout))
    assert int(sent["gather"]) > 0
    assert int(sent["reduce"]) > 0
