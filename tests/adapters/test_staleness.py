"""Every change of weights that an event announces is seen by the next forward; any other is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzz.modules import ScheduleFree
from harness import models
from harness.adapter import Adapter, Case, Fsdp1, Fsdp2
from harness.covering import ADAPTERS, over_adapters, over_each, over_pairs
from harness.links import CYCLES, late_hops
from harness.pool import Pools, device_type
from harness.strategies import FOURTEEN, PRESETS
from harness.training import logits, train
from harness.wiretap import wiretap
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import CodecState, Int4Delta, Int8, Strategy, fully_shard, invalidate
from fsdp_zpp.comm.weight_gather import StaleSecondaryError

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


def forwards_between(adapter: Adapter, model: Any) -> list[Tensor]:
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


def left_out_before_a_step(adapter: Adapter, model: Any) -> list[Tensor]:
    """FSDP1 may have prefetched a block in vain."""
    optimizer = models.make_optimizer("sgd", model.parameters())
    logits(model)
    models.loss_of(model, models.batch(0, 0)).backward()
    inner(model).skipped = 1
    logits(model)
    inner(model).skipped = None
    optimizer.step()
    found = [logits(model), logits(model)]
    assert torch.equal(*found)  # also if a block that was prefetched stays as it was, whatever the model is told
    return found


def frozen_weights_in_an_unknown_optimizer(adapter: Adapter, model: Any) -> list[Tensor]:
    """It announces no steps, and writes to all that it was given."""
    for parameter in inner(model).blocks[-1].parameters():
        parameter.requires_grad_(False)
    optimizer, found = models.make_optimizer("sgd", model.parameters()), []
    for step in range(2):
        models.loss_of(model, models.batch(step, 0)).backward()
        for parameter in optimizer.param_groups[0]["params"]:
            adapter.local(parameter).data.mul_(0.5)
        optimizer.zero_grad()
        found.append(logits(model))
    return found


WAYS = [
    unknown_optimizer,
    optimizer_of_what_this_rank_holds,
    forwards_between,
    inference_mode_between,
    optimizer_with_modes,
    written_after_a_step,
    left_out_before_a_step,
    frozen_weights_in_an_unknown_optimizer,
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
# In the order of ways, so that each meets a strategy under which it matters. Differences would be sent whole by a model
# that is told, and as changes by another.
STRATEGIES = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in ("IGG", "IIG", "NNN")} | {
    "zeropp on nodes of one": Strategy.zeropp(gpus_per_node=1),
    "NGG int8": Strategy.zeropp(levels="NGG", gpus_per_node=2),
    "NNG": Strategy("NNG", gpus_per_node=2),
    "GGG": Strategy("GGG", gpus_per_node=2),
    "zeropp": ZEROPP,
}


@over_each(
    2, rest=False, way=WAYS, adapter={"fsdp1": PREFETCHING, "fsdp2": Fsdp2(), "fsdp1 flat": FLAT}, strategy=STRATEGIES
)
def test_weights_are_never_stale(pool: Pools, way: Way, adapter: Adapter, strategy: Strategy) -> None:
    untold, told = (pool(4).run(computed, way, adapter, strategy, each) for each in (False, True))
    for found, expected in zip(untold, told, strict=True):
        assert found.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


# ---- writes that nothing announces


def written_between_forwards(adapter: Adapter) -> str:
    """In a worker: the error of a forward after weights were changed in place."""
    model = adapter.make(Case(), HPZ)
    logits(model)
    with torch.no_grad():
        for parameter in inner(model).blocks.parameters():
            parameter.mul_(1.5)
    with pytest.raises(StaleSecondaryError) as raised:
        logits(model)
    return str(raised.value)


@over_adapters
def test_an_unannounced_write_raises(pool: Pools, adapter: Adapter) -> None:
    for message in pool(4).run(written_between_forwards, adapter):
        assert "the weights of blocks.0 were changed" in message
        assert "call fsdp_zpp.invalidate(model) on every rank" in message


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
def test_a_write_in_a_forward_must_be_announced(pool: Pools, adapter: Adapter) -> None:
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
def test_a_step_of_one_model_leaves_another_fresh(pool: Pools, adapter: Adapter) -> None:
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
def test_a_unit_that_a_forward_leaves_out_is_gathered_when_used_again(pool: Pools, adapter: Adapter) -> None:
    for all_units, in_vain, without, again, at_last in pool(4).run(skipped_later, adapter):
        assert all_units == in_vain == again == at_last > without


# ---- differences, which depend on what nodes hold already


def change_weights(how: str, adapter: Adapter, saved: Any, resumed: Any) -> None:
    """Load those of another model, or those that were saved once more, write to some, or make a step."""
    if how in ("other", "same"):
        source = adapter.make(Case(), DELTAS) if how == "other" else saved
        # A checkpoint is loaded in place where state dicts show the shards.
        adapter.load_from(source, resumed, "in place" if isinstance(adapter, Fsdp2) else "FULL_STATE_DICT")
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
    if how != "same":
        adapter.load_from(resumed, fresh, adapter.state_dict_kinds[0])
        expected = logits(fresh)
    return torch.equal(logits(resumed), expected)


@over_pairs(rest=False, adapter=ADAPTERS, how=["other", "same", "written", "written on one rank", "stepped"])
def test_a_resumed_model_computes_with_weights_that_changed_since(pool: Pools, adapter: Adapter, how: str) -> None:
    assert pool(4).run(computes_with_changed_weights, adapter, how) == [True] * 4


# ---- hops that take long: nothing reads what another stream has yet to make, or reuses its memory

on_a_gpu = pytest.mark.skipif(device_type() == "cpu", reason="on a CPU all is done in turn")
WITHOUT_CODECS = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in FOURTEEN}
LATE_STRATEGIES = WITHOUT_CODECS | {name: replace(preset, gpus_per_node=2) for name, preset in PRESETS.items()}
CASE = Case(micro_batches=2, steps=3)


def trained_late(adapter: Adapter, strategy: Strategy, level: str) -> list[str]:
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
def test_late_hops_change_no_weights(pool: Pools, adapter: Adapter, strategy: Strategy, level: str) -> None:
    assert pool(4).run(trained_late, adapter, strategy, level) == [[]] * 4


def hook_in_a_stream(model: Any) -> None:
    """Have all-reduce hooks run in a stream of the user's."""
    stream = torch.cuda.Stream()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradient: None, stream=stream)


@on_a_gpu
def test_a_hook_may_have_a_stream_of_its_own(pool: Pools) -> None:
    assert pool(4).run(trained_late, Fsdp2(tune=hook_in_a_stream), ZEROPP, "inter") == [[]] * 4


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
def test_slow_layers_compute_with_their_own_weights(pool: Pools) -> None:
    assert pool(4).run(with_slow_layers, CYCLES) == pool(4).run(with_slow_layers, 1)
