"""Weights between nodes as differences: receivers stay near, at half the bytes, and a restart goes on exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Adapter, Case
from harness.adapters import ADAPTERS, over_adapters
from harness.bytes_on_the_wire import Sent, sent_in
from harness.covering import over_pairs
from harness.models import device
from harness.pool import Pool
from harness.training import logits, mean_loss, train
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_zpp import CodecState, Int4, Int4Delta, Int8, Strategy, invalidate, plan
from fsdp_zpp.activity import activity
from fsdp_zpp.hop import Traffic
from fsdp_zpp.topology import Topology, process_mesh
from fsdp_zpp.weight_gather import WeightGather

DIFFERENCES = Int4Delta(64, resident=Int8(64))
STRATEGY = Strategy("IGG", weights=DIFFERENCES, gpus_per_node=2)
NUMEL = 333


def block_steps(values: Tensor, codec: Int8 | Int4) -> Tensor:
    """The quantization step of each value, by the definition."""
    steps = [block.abs().max().expand(len(block)) / (2 ** (codec.bits - 1) - 1) for block in values.split(codec.block)]
    return torch.cat(steps)


def followed(gpus_per_node: int, dtype: torch.dtype) -> list[tuple[float, bool]]:
    """In a worker: over 30 steps of a walk, the error of what is gathered against its bound, and if all ranks agree.

    The bound: half a step of the 4-bit change, against what was held, and half one of the 8 bits that it is kept in.
    """
    world = dist.get_world_size()
    gather = WeightGather(process_mesh(dist.group.WORLD, gpus_per_node), DIFFERENCES, True, Traffic())
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(world, NUMEL, generator=generator)
    held = torch.zeros(world, NUMEL)
    found = []
    for step in range(30):
        out = torch.empty(world * NUMEL, dtype=dtype, device=device())
        gather(weights[dist.get_rank()].to(device()), out)
        now = out.float().cpu().view(world, NUMEL)
        rounding = now.abs() * torch.finfo(dtype).eps
        worst = 0.0
        for rank in range(world):
            bound = block_steps(now[rank], DIFFERENCES.resident) * 0.51 + rounding[rank]
            if step:
                bound += block_steps(weights[rank] - held[rank], DIFFERENCES.changes) * 0.51 + 2 * rounding[rank]
            worst = max(worst, ((now[rank] - weights[rank]).abs() / bound.clamp(min=1e-30)).max().item())
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, now)
        found.append((worst, all(torch.equal(other, now) for other in everyone)))
        held = now
        weights = weights + 0.01 * torch.randn(world, NUMEL, generator=generator)
        gather.invalidate(by_step=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gpus_per_node", [1, 2])
def test_errors_do_not_build_up(pool: Callable[[int], Pool], gpus_per_node: int, dtype: torch.dtype) -> None:
    for found in pool(4).run(followed, gpus_per_node, dtype):
        for error, equal in found:
            assert error <= 1
            assert equal


def after_events() -> list[float]:
    """In a worker: bytes between nodes of the first gather, after a step, after weights from elsewhere, and again."""
    traffic = Traffic()
    gather = WeightGather(process_mesh(dist.group.WORLD, 2), DIFFERENCES, True, traffic)
    shard = torch.ones(NUMEL, device=device())
    sent = []
    for event in (lambda: None, partial(gather.invalidate, by_step=True), gather.invalidate, lambda: None):
        event()
        before = traffic.sent.get(("gather", "inter"), 0)
        gather(shard, torch.empty(4 * NUMEL, device=device()))
        sent.append(traffic.sent["gather", "inter"] - before)
    return sent


def test_only_steps_are_differences(pool: Callable[[int], Pool]) -> None:
    whole, change = Int8(64).nbytes(NUMEL), Int4(64).nbytes(NUMEL)
    assert pool(4).run(after_events) == [[whole, change, whole, 0]] * 4


def trained_bytes(adapter: Adapter, strategy: Strategy) -> Sent:
    """In a worker: what the third of three steps sends."""
    model = adapter.make(Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, Case(steps=2), optimizer=optimizer)
    return sent_in(partial(train, adapter, model, Case(steps=1), optimizer=optimizer, first_step=2), model, 2)


@over_adapters
def test_bytes(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    """Counted on the collectives: half as many between nodes, as many inside."""
    whole = replace(STRATEGY, weights=DIFFERENCES.resident)
    for (tap, own), (tap_whole, own_whole) in zip(
        *(pool(4).run(trained_bytes, adapter, strategy) for strategy in (STRATEGY, whole)), strict=True
    ):
        assert own["gather"]["inter"] == tap.total("inter", "all_gather")
        assert own["gather"]["intra"] == own_whole["gather"]["intra"]
        assert 0.4 < own["gather"]["inter"] / own_whole["gather"]["inter"] < 0.62
        assert tap.total("inter", "all_gather") < tap_whole.total("inter", "all_gather")


def losses(adapter: Adapter, strategy: Strategy | None) -> float:
    """In a worker: the loss after twenty steps."""
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=20))
    return mean_loss(model, 0)


@over_adapters
def test_trains(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    ours, stock = (pool(4).run(losses, adapter, strategy)[0] for strategy in (STRATEGY, None))
    assert ours == pytest.approx(stock, rel=0.01)


def resumed(adapter: Adapter, path: str, looked_at: bool, codecs_last: bool) -> None:
    """In a worker: a training that goes on, and one that goes on from its checkpoint, are the same."""
    case = Case(steps=3)
    first, second = adapter.make(case, STRATEGY), adapter.make(case, STRATEGY)
    optimizers = [models.make_optimizer("adamw-foreach", model.parameters()) for model in (first, second)]
    train(adapter, first, case, optimizer=optimizers[0])
    if looked_at:
        mean_loss(first, 0)  # an evaluation gathers what the last step changed
    model_state, optimizer_state = get_state_dict(first, optimizers[0])
    state = {"model": model_state, "optimizer": optimizer_state, "codecs": CodecState(first)}
    dcp.save(state, checkpoint_id=path)
    expected = train(adapter, first, case, optimizer=optimizers[0], first_step=3)

    if codecs_last:  # else it has had no step yet, and torch makes one to have states of the optimizer to load into
        train(adapter, second, case, optimizer=optimizers[1], first_step=50)
    model_state, optimizer_state = get_state_dict(second, optimizers[1])
    codecs = CodecState(second)
    state = {"model": model_state, "optimizer": optimizer_state, "codecs": codecs.state_dict()}
    dcp.load(state, checkpoint_id=path)
    if not codecs_last:
        codecs.load_state_dict(state["codecs"])
    set_state_dict(second, optimizers[1], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if codecs_last:
        codecs.load_state_dict(state["codecs"])
    assert train(adapter, second, case, optimizer=optimizers[1], first_step=3) == expected
    assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0


@over_pairs(
    adapter=ADAPTERS,
    looked_at={"after a step": False, "after an evaluation": True},
    codecs_last={"codecs first": False, "codecs last": True},
)
def test_resuming_is_exact(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, looked_at: bool, codecs_last: bool
) -> None:
    pool(4).run(resumed, adapter, str(tmp_path / "checkpoint"), looked_at, codecs_last)


def loaded(adapter: Adapter, model: Any, resumed: Any) -> None:
    """Another model's weights."""
    adapter.load_from(adapter.make(Case(), STRATEGY), resumed, adapter.state_dict_kinds[0])


def written(adapter: Adapter, model: Any, resumed: Any) -> None:
    """Weights that are written to, and the write announced."""
    for parameter in resumed.parameters():
        adapter.local(parameter).data.mul_(1.5)
    invalidate(resumed)


def written_on_one_rank(adapter: Adapter, model: Any, resumed: Any) -> None:
    """Only one rank's part of them changes, but all have to know."""
    if dist.get_rank() == 1:
        for parameter in resumed.parameters():
            adapter.local(parameter).data.mul_(1.5)
    invalidate(resumed)


def stepped(adapter: Adapter, model: Any, resumed: Any) -> None:
    """A step that no forward precedes."""
    for parameter in resumed.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(resumed.parameters(), lr=0.1).step()


def unchanged(adapter: Adapter, model: Any, resumed: Any) -> None:
    """The weights that were saved, loaded once more."""
    adapter.load_from(model, resumed, adapter.state_dict_kinds[0])


def changed_after_resuming(adapter: Adapter, change: Callable[[Adapter, Any, Any], None]) -> bool:
    """In a worker: whether a model that has resumed, and was changed then, computes with the weights that it has.

    That is, as one that was given these and has no history; if they are those of before, as the one that was saved.
    """
    model, resumed, fresh = (adapter.make(Case(), STRATEGY) for _ in range(3))
    train(adapter, model, Case(steps=2))
    if change is written_on_one_rank:
        invalidate(model)  # so that what other ranks go on with is what they would send whole
    expected = logits(model)
    adapter.load_from(model, resumed, adapter.state_dict_kinds[0])
    CodecState(resumed).load_state_dict(CodecState(model).state_dict())
    change(adapter, model, resumed)
    if change is not unchanged:
        adapter.load_from(resumed, fresh, adapter.state_dict_kinds[0])
        expected = logits(fresh)
    return torch.equal(logits(resumed), expected)


@pytest.mark.parametrize(
    "change", [loaded, written, written_on_one_rank, stepped, unchanged], ids=lambda change: change.__name__
)
@over_adapters
def test_weights_that_change_after_resuming(
    pool: Callable[[int], Pool], adapter: Adapter, change: Callable[[Adapter, Any, Any], None]
) -> None:
    assert pool(4).run(changed_after_resuming, adapter, change) == [True] * 4


@pytest.mark.parametrize("levels", ["GGG", "NNG", "III", "NNN"])
def test_letters_without_a_secondary_shard_are_refused(levels: str) -> None:
    with pytest.raises(ValueError, match="secondary shard in each node, which"):
        Strategy(levels, weights=Int4Delta())


@pytest.mark.parametrize("name", ["gradients", "intra_gradients", "frozen"])
def test_only_weights_are_differences(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} can't be an Int4Delta"):
        Strategy("IGG", **{name: Int4Delta()})


def test_log_line() -> None:
    across, on_one_node = (activity(STRATEGY, Topology(4, gpus_per_node)) for gpus_per_node in (2, 4))
    assert "weights gathered as int8(64), changes as int4(64)" in across.active
    assert across.inactive == ()
    assert on_one_node.inactive[0].startswith("weights gathered as int8(64), changes as int4(64) (one node: no gain")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="block is 33"):
        Int4Delta(33)
    with pytest.raises(TypeError, match="resident must be an Int8"):
        Int4Delta(resident=Int4(128))  # type: ignore[arg-type]


def test_plan() -> None:
    cluster = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400}
    differences, whole = (plan(7e9, **cluster, weights=codec) for codec in (Int4Delta(), Int8(256)))
    assert differences["IGG"].strategy.weights == Int4Delta()
    assert differences["GGG"].strategy.weights == Int8(256)
    assert "weights as int8(256), changes as int4(256)" in str(differences)
    assert differences["GGG"].volume == whole["GGG"].volume
    assert differences["IGG"].memory == whole["IGG"].memory
    saved = whole["IGG"].volume.inter - differences["IGG"].volume.inter
    shard, others = 7e9 / 32, 3
    assert saved == pytest.approx(shard * others / 2, rel=0.01)
