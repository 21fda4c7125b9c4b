"""Every change of weights that an event announces is seen by the next forward; any other is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fuzz.modules import ScheduleFree
from harness import models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2
from harness.covering import ADAPTERS, over_adapters, over_each, over_pairs
from harness.links import CYCLES, late_hops
from harness.pool import Pool, device_type, shared_folder
from harness.strategies import FOURTEEN, PRESETS
from harness.training import load, logits, mean_loss, save, train
from harness.wiretap import wiretap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import CodecState, Int4Delta, Int8, Strategy, fully_shard, invalidate
from fsdp_zpp.collectives.secondary_shard import StaleSecondaryError

HPZ, ZEROPP = Strategy("IGG", gpus_per_node=2), Strategy.zeropp(gpus_per_node=2)
DELTAS = Strategy("IGG", weights=Int4Delta(64, whole=Int8(64)), gpus_per_node=2)
ONE_STEP = Case(steps=1, clip=None)

# ---- ways to change weights: each returns what forwards on it have computed


def inner(model: Any) -> models.Net:
    return next(module for module in model.modules() if isinstance(module, models.Net))


def unknown_optimizer(adapter: Adapter, model: Any) -> list[Tensor]:
    """It announces no steps, neither before nor after one that does."""
    for first_step, optimizer in ((0, models.PlainSgd(model)), (2, None), (3, models.PlainSgd(model))):
        train(adapter, model, Case(steps=2 if first_step == 0 else 1), optimizer=optimizer, first_step=first_step)
    return []


def optimizer_of_what_this_rank_holds(adapter: Adapter, model: Any) -> list[Tensor]:
    """Some ranks' optimizers hold nothing of some units."""
    held = [p for p in model.parameters() if adapter.local(p).numel()]
    case = Case(steps=2, micro_batches=2, synced=True)
    train(adapter, model, case, optimizer=torch.optim.SGD(held, lr=0.1))
    return []


def two_optimizers(adapter: Adapter, model: Any) -> list[Tensor]:
    """Each steps in its turn."""
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[::2], parameters[1::2])]
    for step in range(3):
        models.loss_of(model, models.batch(step, 0)).backward()
        optimizers[step % 2].step()
        model.zero_grad()
    return []


def forwards_between(adapter: Adapter, model: Any) -> list[Tensor]:
    """An evaluation before each step, and one after it, before its gradients are gone."""
    optimizer, found = models.make_optimizer("sgd", model.parameters()), []
    for step in range(2):
        models.loss_of(model, models.batch(step, 0)).backward()
        found.append(logits(model))
        optimizer.step()
        found.append(logits(model))
        optimizer.zero_grad()
    return found


def inference_mode_between(adapter: Adapter, model: Any) -> list[Tensor]:
    """Its secondary shards are what the next training step starts from.

    torch has the first forward of all not be in inference mode.
    """
    optimizer, found = models.make_optimizer("sgd", model.parameters()), []
    for step in range(2):
        train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=2 * step)
        with torch.inference_mode():
            found.append(models.loss_of(model, models.batch(step, 5)).clone())
    return found


def checkpoint_loaded_in_place(adapter: Adapter, model: Any) -> list[Tensor]:
    """A checkpoint is loaded, and its result is not set on the model."""
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, Case(steps=2), optimizer=optimizer)
    with shared_folder() as folder:
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=2)
        found = [logits(model)]
        dcp.load(get_model_state_dict(model), checkpoint_id=folder)
    train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=4)
    return [*found, logits(model)]


def optimizer_with_modes(adapter: Adapter, model: Any) -> list[Tensor]:
    """It evaluates other weights than it trains."""
    optimizer, found = ScheduleFree(model.parameters()), []
    for step in range(3):
        for micro_batch in range(2):
            optimizer.train()  # as Trainer calls it
            (models.loss_of(model, models.batch(step, micro_batch)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        found.append(logits(model))
        optimizer.train()
        found.append(logits(model))
    assert not torch.allclose(found[-1], found[-2], atol=1e-3)
    return found


def written_after_a_step(adapter: Adapter, model: Any) -> list[Tensor]:
    """Whatever the next forward finds is taken for what the step has made."""
    train(adapter, model, ONE_STEP)
    for parameter in model.parameters():
        adapter.local(parameter).data.mul_(0.5)
    return [logits(model), logits(model)]


def replaced_after_a_step(adapter: Adapter, model: Any) -> list[Tensor]:
    train(adapter, model, ONE_STEP)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    return [logits(model), logits(model)]


def left_out_before_a_step(adapter: Adapter, model: Any) -> list[Tensor]:
    """FSDP1 may have prefetched a block in vain."""
    optimizer = models.make_optimizer("sgd", model.parameters())
    logits(model)
    models.loss_of(model, models.batch(0, 0)).backward()
    inner(model).skipped = 1
    logits(model)
    inner(model).skipped = None
    optimizer.step()
    return [logits(model), logits(model)]


WAYS = [
    unknown_optimizer,
    optimizer_of_what_this_rank_holds,
    two_optimizers,
    forwards_between,
    inference_mode_between,
    checkpoint_loaded_in_place,
    optimizer_with_modes,
    written_after_a_step,
    replaced_after_a_step,
    left_out_before_a_step,
]
Way = Callable[[Adapter, Any], list[Tensor]]


def computed(way: Way, adapter: Adapter, strategy: Strategy, told: bool) -> dict[str, Tensor]:
    """In a worker: what forwards on a way compute, and the weights at its end.

    A model that is ``told`` gathers its weights anew before each forward, since it hears that they were changed.
    """
    model = adapter.make(Case(), strategy)
    if told:
        model.register_forward_pre_hook(lambda *unused: invalidate(model), prepend=True)
    before = adapter.full_weights(model)
    found = {f"forward {i}": value.cpu() for i, value in enumerate(way(adapter, model))}
    weights = adapter.full_weights(model)
    assert models.distance(weights, before) > 0.01  # or there was nothing to become stale
    return found | weights


PREFETCHING, FLAT = Fsdp1(arguments=(("forward_prefetch", True),)), Fsdp1(use_orig_params=False)
# In the order of ways, so that each meets a strategy under which it matters.
STRATEGIES = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in ("IGG", "IIG", "III", "NNN")} | {
    "IGG on nodes of one": Strategy("IGG", gpus_per_node=1),
    "zeropp": ZEROPP,
    "NGG int8": Strategy.zeropp(levels="NGG", gpus_per_node=2),
    "NNG": Strategy("NNG", gpus_per_node=2),
    "NGG on one node": Strategy("NGG", gpus_per_node=4),
    "GGG": Strategy("GGG", gpus_per_node=2),
}
# Not with differences: what is told is sent whole, what is not as a change.


@over_each(
    2, rest=False, way=WAYS, adapter={"fsdp1": PREFETCHING, "fsdp2": Fsdp2(), "fsdp1 flat": FLAT}, strategy=STRATEGIES
)
def test_weights_are_never_stale(pool: Callable[[int], Pool], way: Way, adapter: Adapter, strategy: Strategy) -> None:
    if way is replaced_after_a_step:
        adapter = PREFETCHING  # parameters of others are DTensors, or are the shard
    untold, told = (pool(4).run(computed, way, adapter, strategy, each) for each in (False, True))
    for found, expected in zip(untold, told, strict=True):
        assert found.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


# ---- writes that nothing announces


def write_behind_its_back(adapter: Adapter, strategy: Strategy | None, announce: bool) -> Any:
    """In a worker: logits once weights were changed in place between forwards, or what is said of it."""
    model = adapter.make(Case(), strategy)
    before = logits(model)
    with torch.no_grad():
        for p in inner(model).blocks.parameters():  # not the root's, which stock keeps unsharded after a forward
            p.mul_(1.5)
    if announce and strategy is not STOCK:
        invalidate(model)
    try:
        after = logits(model)
    except StaleSecondaryError as error:
        return str(error)
    assert not torch.equal(after, before), "ignored"
    return after


@over_adapters
def test_an_unannounced_write_raises(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for message in pool(4).run(write_behind_its_back, adapter, HPZ, False):
        assert "the weights of blocks.0 were changed" in message
        assert "call fsdp_zpp.invalidate(model) on every rank" in message


@over_each(rest=False, adapter=ADAPTERS, scopes=["IGG", "NNG", "NGG", "NII"])
def test_an_announced_write_is_used(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    strategy = Strategy(scopes, gpus_per_node=2)
    ours = pool(4).run(write_behind_its_back, adapter, strategy, True)
    stock = pool(4).once(write_behind_its_back, adapter, STOCK, True)
    for mine, expected in zip(ours, stock, strict=True):
        assert (mine - expected).abs().max() <= 1e-5


def written_in_a_forward(adapter: Adapter, tell: bool) -> str:
    """In a worker: what comes of a write to a block that a forward has begun to send."""
    model = adapter.make(Case(), ZEROPP)
    train(adapter, model, ONE_STEP)
    net = inner(model)
    last = list(net.blocks[-1].parameters())

    def write(*unused: Any) -> None:
        for parameter in last:
            parameter.detach().mul_(0.5)
        if tell:
            invalidate(model)

    net.blocks[0].register_forward_hook(write)
    try:
        models.loss_of(model, models.batch(2, 0))
    except StaleSecondaryError as error:
        return str(error)
    return "no error"


@over_adapters
def test_a_write_in_a_forward_must_be_announced(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(written_in_a_forward, adapter, True) == ["no error"] * 4
    assert all("in a forward" in message for message in pool(4).run(written_in_a_forward, adapter, False))


# ---- what stays fresh


def two_models(adapter: Adapter) -> int:
    """In a worker: bytes between nodes of the forward of a model after another one has made steps."""
    first, second = adapter.make(Case(), HPZ), adapter.make(Case(), Strategy.zeropp(gpus_per_node=1))
    for model in (first, second):
        train(adapter, model, Case(steps=2))
    logits(second)
    train(adapter, first, Case(steps=2))
    with wiretap(1) as tap:
        logits(second)
    return tap.total("inter")


@over_adapters
def test_a_step_of_one_model_leaves_another_fresh(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(two_models, adapter) == [0] * 4


def skipped_later(adapter: Adapter) -> list[int]:
    """In a worker: bytes of the inter-node hops of each step, of which some leave out a block."""
    model = adapter.make(Case(), ZEROPP)
    counts = []
    for skipped in (None, 1, 1, None, None):
        inner(model).skipped = skipped
        with wiretap(2) as tap:
            train(adapter, model, ONE_STEP)
        counts.append(tap.total("inter", "all_gather"))
    return counts


@over_adapters
def test_a_unit_that_a_forward_leaves_out_is_gathered_when_used_again(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    for all_units, in_vain, without, again, at_last in pool(4).run(skipped_later, adapter):
        assert all_units == in_vain == again == at_last > without


# ---- differences, which depend on what nodes hold already


def resumed(adapter: Adapter, path: str, looked_at: bool, codecs_last: bool) -> None:
    """In a worker: a training that goes on, and one that goes on from its checkpoint, are the same."""
    case = Case(steps=2)
    first, second = adapter.make(case, DELTAS), adapter.make(case, DELTAS)
    optimizers = [models.make_optimizer("adamw-foreach", model.parameters()) for model in (first, second)]
    train(adapter, first, case, optimizer=optimizers[0])
    if looked_at:
        mean_loss(first, 0)  # an evaluation gathers what the last step changed
    save(first, optimizers[0], CodecState(first), path)
    expected = train(adapter, first, case, optimizer=optimizers[0], first_step=2)
    codecs = CodecState(second)
    assert len(codecs.state_dict()) > 1  # also before a first forward: torch.distributed.checkpoint asks, then loads
    if codecs_last:
        train(adapter, second, case, optimizer=optimizers[1], first_step=50)
        state = {"codecs": codecs.state_dict()}
        dcp.load(state, checkpoint_id=path)
        load(second, optimizers[1], None, path)
        codecs.load_state_dict(state["codecs"])
    else:  # it has had no step yet, and torch makes one to have states of the optimizer to load into
        load(second, optimizers[1], codecs, path)
    assert train(adapter, second, case, optimizer=optimizers[1], first_step=2) == expected
    assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0


@over_pairs(
    rest=False,
    adapter=ADAPTERS,
    looked_at={"after a step": False, "after an evaluation": True},
    codecs_last={"codecs first": False, "codecs last": True},
)
def test_resuming_is_exact(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, looked_at: bool, codecs_last: bool
) -> None:
    pool(4).run(resumed, adapter, str(tmp_path / "checkpoint"), looked_at, codecs_last)


def change_weights(how: str, adapter: Adapter, saved: Any, resumed: Any) -> None:
    """Load those of another model, or those that were saved once more, write to some, or make a step."""
    if how.startswith(("other", "same")):
        # A checkpoint is loaded in place where state dicts show the shards.
        kind = next((kind for kind in adapter.state_dict_kinds if kind == how.partition(" ")[2]), None)
        source = adapter.make(Case(), DELTAS) if how.startswith("other") else saved
        adapter.load_from(source, resumed, kind or adapter.state_dict_kinds[0])
    elif how == "stepped":  # without a forward before
        for parameter in resumed.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(resumed.parameters(), lr=0.1).step()
    else:
        for parameter in resumed.parameters() if how == "written" or dist.get_rank() == 1 else ():
            adapter.local(parameter).data.mul_(1.5)
        invalidate(resumed)


def computes_with_changed_weights(adapter: Adapter, how: str) -> bool:
    """In a worker: whether a model that has resumed, and was changed then, computes with the weights that it has.

    That is, as one that was given these and has no history; if they are those of before, as the one that was saved.
    """
    model, resumed, fresh = (adapter.make(Case(), DELTAS) for _ in range(3))
    train(adapter, model, Case(steps=2))
    if how == "written on one rank":
        invalidate(model)  # so that what other ranks go on with is what they would send whole
    expected = logits(model)
    adapter.load_from(model, resumed, adapter.state_dict_kinds[0])
    CodecState(resumed).load_state_dict(CodecState(model).state_dict())
    change_weights(how, adapter, model, resumed)
    if not how.startswith("same"):
        adapter.load_from(resumed, fresh, adapter.state_dict_kinds[0])
        expected = logits(fresh)
    return torch.equal(logits(resumed), expected)


@over_each(
    adapter=ADAPTERS,
    how=["other", "other in place", "same", "same in place", "written", "written on one rank", "stepped"],
)
def test_a_resumed_model_computes_with_weights_that_changed_since(
    pool: Callable[[int], Pool], adapter: Adapter, how: str
) -> None:
    assert pool(4).run(computes_with_changed_weights, adapter, how) == [True] * 4


# ---- hops that take long: nothing reads what another stream has yet to make, or reuses its memory

on_a_gpu = pytest.mark.skipif(device_type() == "cpu", reason="on a CPU all is done in turn")
WITHOUT_CODECS = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in FOURTEEN}
LATE_STRATEGIES = WITHOUT_CODECS | {name: replace(preset, gpus_per_node=2) for name, preset in PRESETS.items()}
CASE = Case(micro_batches=2, steps=3)


def compared(adapter: Adapter, strategy: Strategy, level: str) -> list[str]:
    """In a worker: the weights that differ once hops of a level have taken long."""
    weights: list[dict[str, Any]] = []
    for levels in ((), (level,)):
        model = adapter.make(CASE, strategy)
        with late_hops(*levels):
            train(adapter, model, CASE)
        weights.append(adapter.full_weights(model))
    return [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])]


@on_a_gpu
@over_pairs(rest=False, adapter=ADAPTERS, strategy=LATE_STRATEGIES, level=("inter", "intra"))
def test_late_hops_change_no_weights(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, level: str
) -> None:
    assert pool(4).run(compared, adapter, strategy, level) == [[]] * 4


def with_a_hook_in_a_stream(levels: tuple[str, ...]) -> dict[str, Tensor]:
    """In a worker: weights of a training whose all-reduce hooks run in a stream of the user's."""
    model = Fsdp2().make(CASE, ZEROPP)
    stream = torch.cuda.Stream()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradient: None, stream=stream)
    with late_hops(*levels):
        train(Fsdp2(), model, CASE)
    return Fsdp2().full_weights(model)


@on_a_gpu
def test_a_hook_may_have_a_stream_of_its_own(pool: Callable[[int], Pool]) -> None:
    in_time, late = (pool(4).run(with_a_hook_in_a_stream, levels) for levels in ((), ("inter",)))
    for ours, theirs in zip(in_time, late, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def with_slow_layers(cycles: int) -> list[float]:
    """In a worker: losses of a frozen bf16 base with trained layers in fp32, whose layers compute for long."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256).bfloat16().requires_grad_(False), Cast(cycles)) for _ in range(4)]
    model = nn.Sequential(*layers).to(models.device())
    for layer in model:
        fully_shard(layer, strategy=ZEROPP)
    fully_shard(model, strategy=ZEROPP)
    losses = []
    for step in range(3):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).bfloat16().to(models.device())
        loss = model(x).float().square().mean()
        loss.backward()
        invalidate(model)  # after which torch's own copy of what was gathered is made once more
        losses.append(loss)
    return [loss.item() for loss in losses]


class Cast(nn.Module):
    """A trained layer in fp32 between others in bf16, which computes for long."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.layer, self.cycles = nn.Linear(256, 256), cycles

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(self.cycles)
        return self.layer(x.float()).bfloat16()


@on_a_gpu
def test_slow_layers_compute_with_their_own_weights(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(with_slow_layers, CYCLES) == pool(4).run(with_slow_layers, 1)
