"""``gathered_weights`` hands out what the full state dict has, in the memory of one unit, and disturbs nothing.

Receivers of its updates follow a training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, SCOPES, WITH_FLAT, over_adapters, over_each
from harness.live_bytes import LiveBytes
from harness.pool import Pools, device_type
from harness.training import train
from harness.two_axes import trained
from harness.wiretap import wiretap
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_zpp import (
    LocalSteps,
    Strategy,
    agreed_weights,
    gathered_weights,
)

STRATEGIES = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in SCOPES} | {"stock": STOCK}
ZEROPP = Strategy.zeropp(gpus_per_node=2)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """In a worker: the oracle."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def assert_same(ours: dict[str, Any], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype, name
        assert torch.equal(ours[name], expected.to(ours[name].device)), name


def assert_delivered(weights: dict[str, Any], expected: dict[str, Tensor], to: int | None) -> None:
    """To one rank, or to all of them for None."""
    assert weights.keys() == expected.keys()
    if to in (None, dist.get_rank()):
        assert_same(weights, expected)
    else:
        assert not any(isinstance(value, Tensor) for value in weights.values())


def assert_has_full_state(model: nn.Module) -> None:
    """All of it, before anything else could reshard the model."""
    weights = dict(gathered_weights(model))
    assert_same(weights, full_state(model))


def forward(model: nn.Module) -> Tensor:
    return models.loss_of(model, models.batch(0, 0))


def equal_at_all_moments(adapter: Adapter, strategy: Any, case: Case) -> None:
    """In a worker: before any forward, in a step, after it and after an evaluation."""
    model = adapter.make(case, strategy)
    weights, expected = dict(gathered_weights(model)), full_state(model)
    if case.precision is not None:
        # A state dict is the first to have FSDP round buffers to mixed precision, and shows them rounded.
        for name in [name for name in expected if name.endswith("shift")]:
            assert weights.pop(name).dtype == expected.pop(name).dtype
    assert_same(weights, expected)
    loss = forward(model)
    assert_has_full_state(model)
    loss.backward()  # which gathers again what was resharded
    assert all(p.grad is not None for p in model.parameters() if p.numel())
    model.zero_grad()
    train(adapter, model, Case(steps=1))
    assert_has_full_state(model)
    with torch.no_grad():
        forward(model)
    assert_has_full_state(model)


CASES = {"fp32": Case(), "mixed": Case(precision=Precision(torch.bfloat16, torch.float32))}
CASES |= {f"{name}, tied": replace(case, model=(("tied", True),)) for name, case in CASES.items()}


@over_each(rest=False, adapter=WITH_FLAT, strategy=STRATEGIES, case=CASES)
def test_it_has_the_full_state_dict_bit_for_bit(pool: Pools, adapter: Adapter, strategy: Any, case: Case) -> None:
    pool(4).run(equal_at_all_moments, adapter, strategy, case)


class WithExtraState(nn.Linear):
    """A layer that has an object for state dicts."""

    def get_extra_state(self) -> Any:
        return {"scale": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def in_part(adapter: Adapter, dtype: torch.dtype | None, to: int | None) -> None:
    """In a worker: a model in 16 and 32 bits, with integers and objects, of which parts are sharded and compiled."""
    net = models.make_net(blocks=3)
    net.head.bfloat16()
    net.blocks[0].up = WithExtraState(22, 37).to(models.device())
    net.blocks[0].compile(backend="aot_eager")
    net.blocks[1].half()
    net.register_buffer("seen", torch.tensor([3, 4]).to(models.device()))
    truth = {name: value.cpu().clone() for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    net.head = adapter.wrap(net.head, ZEROPP)
    net.blocks[1] = torch.compile(adapter.wrap(net.blocks[1], Strategy("NNN", gpus_per_node=2)))
    net.blocks[2] = checkpoint_wrapper(adapter.wrap(net.blocks[2], Strategy("III", gpus_per_node=2)))
    weights = dict(gathered_weights(net, dtype=dtype, rank=to))
    cast = {name: v.to(dtype) if dtype and v.is_floating_point() else v for name, v in truth.items()}
    assert_delivered(weights, cast, to)
    for value in weights.values():
        if value is not None:
            value.zero_()  # it is the caller's
    assert_same(dict(gathered_weights(torch.compile(net))), truth)


@over_each(rest=False, adapter=ADAPTERS, dtype=[None, torch.bfloat16, torch.float32], to=[None, 0, 3])
def test_it_casts_and_delivers_what_is_sharded_in_part(
    pool: Pools, adapter: Adapter, dtype: torch.dtype | None, to: int | None
) -> None:
    pool(4).run(in_part, adapter, dtype, to)


EVEN = Case(model=(("width", 32), ("hidden", 40), ("vocabulary", 64)))


def bytes_sent(adapter: Adapter, dtype: torch.dtype | None, to: int | None) -> list[int]:
    """In a worker: what this rank sends between nodes, and the bytes of the weights."""
    model = adapter.make(EVEN, Strategy("GGG", gpus_per_node=2))
    sent = 0

    def counting(count: Callable[..., int], original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += count(tensor, *args)
            return original(tensor, *args, **kwargs)

        return call

    def broadcast(tensor: Tensor, source: int) -> int:
        return tensor.nbytes * (source == dist.get_rank())  # once, to the other node

    def to_another_node(tensor: Tensor, *args: Any) -> int:
        return tensor.nbytes * (to is not None and dist.get_rank() // 2 != to // 2)

    def exchange(out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> int:
        node = dist.get_rank() // 2
        return tensor.itemsize * sum(numel for rank, numel in enumerate(sent) if rank // 2 != node)

    counts = {"broadcast": broadcast, "gather": to_another_node, "all_to_all_single": exchange}
    with wiretap(2) as tap, patch.multiple(dist, **{n: counting(c, getattr(dist, n)) for n, c in counts.items()}):
        gathered = gathered_weights(model, dtype=dtype, rank=to)
        agreed = dict(tap.sent)
        total = sum(value.nbytes for name, value in gathered if value is not None and "shift" not in name)
    assert not agreed, "the comparison of arguments is no gather"
    return [sent + tap.total("inter"), total]


@over_each(rest=False, adapter=ADAPTERS, dtype=[None, torch.bfloat16, torch.float32], to=[None, 2])
def test_it_sends_one_full_gather_in_the_dtype_asked_for(
    pool: Pools, adapter: Adapter, dtype: torch.dtype | None, to: int | None
) -> None:
    ranks = pool(4).run(bytes_sent, adapter, dtype, to)
    full = max(total for _, total in ranks)
    numel = sum(parameter.numel() for parameter in models.make_net(**dict(EVEN.model)).parameters())
    assert full == numel * (dtype or torch.float32).itemsize
    # Each byte goes to the other node once; half of them if only one of its ranks gets all.
    assert sum(sent for sent, _ in ranks) == (full if to is None else full // 2)


LARGE_BLOCKS = (("width", 46), ("hidden", 151), ("vocabulary", 50), ("blocks", 4))
MODELS: dict[str, Any] = {
    "blocks": LARGE_BLOCKS,
    "units of one tensor": (("width", 46), ("vocabulary", 501), ("blocks", 0)),
}


AGREED = 0 if device_type() == "cpu" else 3 * 8
"""Bytes of the flags by which ranks agree that are counted: their copies to a GPU."""


def allowed_bytes(adapter: Adapter, model: Any, strategy: Any, dtype: torch.dtype | None) -> int:
    """In a worker: the bytes of the largest unit, or of a tensor that the caller has and the next one, if more."""
    ranks = {"G": 4, "I": 2, "N": 1}["G" if strategy is STOCK else strategy.levels[2]]
    pads = adapter == ADAPTERS[1]  # it pads rows, and has a cast copy of a rank's own part while it gathers
    weights = list(gathered_weights(model, dtype=dtype))
    full = {name: (ranks * -(-len(w) // ranks) * w[0].nbytes if pads else w.nbytes) for name, w in weights}
    cast = 1 / ranks if pads and dtype is not None and ranks > 1 else 0
    units: dict[str, int] = {}
    for name, nbytes in full.items():
        unit = ".".join(name.split(".")[:2])  # an item of the module list, or the embedding or the head
        units[unit] = units.get(unit, 0) + nbytes
    return int(max(*units.values(), *(held + next_ * (1 + cast) for held, next_ in pairwise(full.values()))))


def peak_bytes(adapter: Adapter, strategy: Any, sizes: Any, dtype: torch.dtype | None, to: int | None) -> list[int]:
    """In a worker: the most that is alive while weights pass through a loop, and what may be."""
    model = adapter.make(Case(model=sizes), strategy)
    allowed = allowed_bytes(adapter, model, strategy, dtype)
    with LiveBytes(allowed) as live:
        for _ in gathered_weights(model, dtype=dtype, rank=to):
            pass
    return [live.peak, allowed]


@over_each(
    use={f"{adapter}-{name}": (adapter, sizes) for adapter in WITH_FLAT for name, sizes in MODELS.items()},
    strategy=STRATEGIES,
    how=[(dtype, to) for dtype in (None, torch.bfloat16) for to in (None, 1)],
)
def test_it_takes_the_memory_of_one_unit_at_most(
    pool: Pools, use: tuple[Adapter, Any], strategy: Any, how: tuple[torch.dtype | None, int | None]
) -> None:
    (adapter, sizes), (dtype, to) = use, how
    for rank, (peak, allowed) in enumerate(pool(4).run(peak_bytes, adapter, strategy, sizes, dtype, to)):
        assert peak <= allowed, rank
        if to in (None, rank):
            assert peak, "or it sees nothing"
        elif dtype is None:  # which would be a copy of its part
            assert peak <= AGREED, rank


def of_nodes(adapter: Adapter) -> None:
    """In a worker: with local steps, nodes differ until they show the agreed weights."""
    model = adapter.make(Case(), Strategy("III", local_steps=LocalSteps(every=2), gpus_per_node=2))
    train(adapter, model, Case(clip=None))
    assert_has_full_state(model)
    own = dict(gathered_weights(model))
    with agreed_weights(model):
        assert_has_full_state(model)
        agreed = dict(gathered_weights(model))
    assert models.distance(own, agreed) > 0


@over_adapters
def test_nodes_hand_out_their_own_weights_unless_the_agreed_ones_are_shown(pool: Pools, adapter: Adapter) -> None:
    pool(4).run(of_nodes, adapter)


def beside_tensor_parallelism(adapter: Adapter, to: int | None) -> None:
    """In a worker: parameters that two parallelisms have sharded."""
    run = trained(adapter, Strategy("GGG", gpus_per_node=2), steps=1)
    assert_delivered(dict(gathered_weights(run.model, rank=to)), full_state(run.model), to)


@over_each(rest=False, adapter=ADAPTERS, to=[None, 5])
def test_other_parallelisms_are_gathered_too(pool: Pools, adapter: Adapter, to: int | None) -> None:
    pool(8).run(beside_tensor_parallelism, adapter, to)


def test_a_model_that_is_not_sharded_is_handed_out_as_it_is() -> None:
    net = models.make_net(tied=True)
    assert_same(dict(gathered_weights(net, rank=0)), net.state_dict())


def leave_early(model: nn.Module) -> None:
    """At every third tensor, also by the garbage collector."""
    for count in range(0, len(full_state(model)), 3):
        gathered = gathered_weights(model)
        for _ in range(count):
            next(gathered)
        if count % 2:
            gathered.close()
        del gathered


def amid_accumulation(adapter: Adapter, strategy: Any) -> float:
    """In a worker: the distance from a training without it, and at each moment what it hands out."""
    case, trained = Case(model=(("blocks", 1),)), []
    for asked in (False, True):
        model = adapter.make(case, strategy)
        optimizer = models.make_optimizer("sgd", model.parameters())
        for step in range(2):
            for micro_batch in range(2):
                with adapter.micro_batch(model, micro_batch == 1, False):
                    loss = models.loss_of(model, models.batch(step, micro_batch))
                    if asked and micro_batch == 0:
                        dict(gathered_weights(model))  # between a forward and its backward
                    loss.backward()
                if asked:
                    weights = dict(gathered_weights(model))
            if asked:
                leave_early(model)
                assert_same(weights, full_state(model))
            optimizer.step()
            optimizer.zero_grad()
        trained.append(adapter.full_weights(model))
    return models.distance(*trained)


@over_each(rest=False, adapter=WITH_FLAT, strategy={name: STRATEGIES[name] for name in ("III", "IIG", "NNG", "stock")})
def test_accumulated_gradients_stay_also_if_it_is_left_early(pool: Pools, adapter: Adapter, strategy: Any) -> None:
    assert pool(4).run(amid_accumulation, adapter, strategy) == [0.0] * 4


def of_one_model(adapter: Adapter) -> None:
    """In a worker: two iterators in turn, of which one is left half-way; then other memory."""
    model = adapter.make(Case(), ZEROPP)
    train(adapter, model, Case(steps=1))
    expected = full_state(model)
    one, other = gathered_weights(model), gathered_weights(model, dtype=torch.bfloat16)
    first: dict[str, Tensor] = {}
    for count, (name, weight) in enumerate(one):
        first[name] = weight
        if count < 4:
            name, weight = next(other)
            assert torch.equal(weight, expected[name].to(weight.device, torch.bfloat16))
    assert_same(first, expected)
    other.close()  # type: ignore[attr-defined]  # it is a generator
    assert_same(dict(gathered_weights(model)), expected)

    for parameter in model.parameters():  # other memory, which FSDP has not seen yet
        if adapter.torch_name == "fully_shard":
            parameter.data.to_local().fill_(3)
        else:
            parameter.data = torch.full_like(parameter, 3)
    assert all((value == 3).all() for name, value in gathered_weights(model) if "shift" not in name)


@over_adapters
def test_iterators_may_run_at_once_and_see_what_was_written(pool: Pools, adapter: Adapter) -> None:
    pool(4).run(of_one_model, adapter)
