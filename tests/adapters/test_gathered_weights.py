"""``gathered_weights`` hands out what the full state dict has, in the memory of one unit, and disturbs nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, SCOPES, WITH_FLAT, over_adapters, over_each, over_pairs
from harness.live_bytes import LiveBytes
from harness.pool import Pool, device_type
from harness.training import train
from harness.wiretap import wiretap
from local_nodes import strategy_of
from tensor_parallel_nets import trained
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_zpp import Strategy, agreed_weights, gathered_weights

BF16 = Precision(torch.bfloat16, torch.float32)
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


def forward(model: nn.Module) -> Tensor:
    return models.loss_of(model, models.batch(0, 0))


def step(adapter: Adapter, model: nn.Module) -> None:
    train(adapter, model, Case(steps=1))


MOMENTS: dict[str, Callable[[Adapter, Any], object]] = {
    "before any forward": lambda adapter, model: None,
    "in a step": lambda adapter, model: forward(model),
    "after a step": step,
    "after an evaluation": lambda adapter, model: torch.no_grad()(forward)(model),
}


def equal_to_state_dict(adapter: Adapter, strategy: Any, case: Case, moment: str) -> None:
    """In a worker: all of them, before anything else could reshard the model."""
    model = adapter.make(case, strategy)
    loss = MOMENTS[moment](adapter, model)
    weights, expected = dict(gathered_weights(model)), full_state(model)
    if moment == "before any forward" and case.precision is not None:
        # A state dict is the first to have FSDP round buffers to mixed precision, and shows them rounded.
        for name in [name for name in expected if name.endswith("shift")]:
            assert weights.pop(name).dtype == expected.pop(name).dtype
    assert_same(weights, expected)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()  # which gathers again what was resharded
        assert all(p.grad is not None for p in model.parameters() if p.numel())


@over_pairs(
    rest=False,
    adapter=WITH_FLAT,
    strategy=STRATEGIES,
    precision={"fp32": None, "mixed": BF16},
    tied=[False, True],
    moment=list(MOMENTS),
)
def test_it_has_the_full_state_dict_bit_for_bit(
    pool: Callable[[int], Pool],
    adapter: Adapter,
    strategy: Any,
    precision: Precision | None,
    tied: bool,
    moment: str,
) -> None:
    case = Case(model=(("tied", tied),), precision=precision)
    pool(4).run(equal_to_state_dict, adapter, strategy, case, moment)


def in_part(adapter: Adapter, dtype: torch.dtype | None, to: int | None) -> None:
    """In a worker: a model in 16 and 32 bits, with integers, of which some parts are sharded and others are not."""
    net = models.make_net()
    net.head.bfloat16()
    net.blocks[1].half()
    net.register_buffer("seen", torch.tensor([3, 4]).to(models.device()))
    truth = {name: value.cpu().clone() for name, value in net.state_dict().items()}
    net.head = adapter.wrap(net.head, ZEROPP)
    net.blocks[1] = torch.compile(adapter.wrap(net.blocks[1], Strategy("NNN", gpus_per_node=2)))
    net.blocks[2] = checkpoint_wrapper(adapter.wrap(net.blocks[2], Strategy("III", gpus_per_node=2)))
    weights = dict(gathered_weights(net, dtype=dtype, rank=to))
    assert weights.keys() == truth.keys()
    if to in (None, dist.get_rank()):
        assert_same(weights, {name: v.to(dtype) if dtype and v.is_floating_point() else v for name, v in truth.items()})
        for value in weights.values():  # they are the caller's
            value.zero_()
    else:
        assert not any(isinstance(value, Tensor) for value in weights.values())
    assert_same(dict(gathered_weights(net)), truth)


@over_each(adapter=ADAPTERS, dtype=[None, torch.bfloat16, torch.float32], to=[None, 0, 3])
def test_it_casts_and_delivers_what_is_sharded_in_part(
    pool: Callable[[int], Pool], adapter: Adapter, dtype: torch.dtype | None, to: int | None
) -> None:
    pool(4).run(in_part, adapter, dtype, to)


def left_early(adapter: Adapter, strategy: Any) -> None:
    """In a worker: it is left at every tensor in turn, also by the garbage collector."""
    model, other = adapter.make(Case(), strategy), adapter.make(Case(), strategy)
    step(adapter, model)
    step(adapter, other)
    names = list(full_state(model))
    for count in range(len(names)):
        gathered = gathered_weights(model)
        for _ in range(count):
            next(gathered)
        if count % 2:
            gathered.close()
        del gathered
    assert_same(dict(gathered_weights(model)), full_state(other))
    assert train(adapter, model, Case(steps=2)) == train(adapter, other, Case(steps=2))


@over_each(adapter=WITH_FLAT, strategy=STRATEGIES)
def test_leaving_early_changes_nothing(pool: Callable[[int], Pool], adapter: Adapter, strategy: Any) -> None:
    pool(4).run(left_early, adapter, strategy)


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


@over_each(adapter=ADAPTERS, dtype=[None, torch.bfloat16, torch.float32], to=[None, 2])
def test_it_sends_one_full_gather_in_the_dtype_asked_for(
    pool: Callable[[int], Pool], adapter: Adapter, dtype: torch.dtype | None, to: int | None
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
    "embedding": (("width", 46), ("hidden", 51), ("vocabulary", 251), ("blocks", 5)),
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


@over_pairs(
    rest=False,
    adapter=WITH_FLAT,
    strategy=STRATEGIES,
    sizes=MODELS,
    dtype=[None, torch.bfloat16],
    to=[None, 1],
)
def test_it_takes_the_memory_of_one_unit_at_most(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Any, sizes: Any, dtype: torch.dtype | None, to: int | None
) -> None:
    for rank, (peak, allowed) in enumerate(pool(4).run(peak_bytes, adapter, strategy, sizes, dtype, to)):
        assert peak <= allowed, rank
        if to in (None, rank):
            assert peak, "or it sees nothing"
        elif dtype is None:  # which would be a copy of its part
            assert peak <= AGREED, rank


def ahead(adapter: Adapter) -> float:
    """In a worker: the share of tensors whose gather had begun before the caller asked for them."""
    model = adapter.make(Case(model=LARGE_BLOCKS), ZEROPP)
    begun: list[int] = []
    from fsdp_zpp.runtime import full_tensors

    original = full_tensors.Pending.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        begun.append(1)
        original(self, *args, **kwargs)

    early = total = 0
    with patch.object(full_tensors.Pending, "__init__", note):
        for _ in gathered_weights(model):
            early, total = early + (len(begun) > total + 1), total + 1
    return early / total


@over_adapters
def test_the_next_tensors_are_gathered_ahead(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert all(share > 0.8 for share in pool(4).run(ahead, adapter))


def of_nodes(adapter: Adapter) -> None:
    """In a worker: with local steps, nodes differ until they show the agreed weights."""
    model = adapter.make(Case(), strategy_of("III", 2, every=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for count in range(3):
        models.loss_of(model, models.batch(count, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = dict(gathered_weights(model))
    assert_same(own, full_state(model))
    with agreed_weights(model):
        agreed = dict(gathered_weights(model))
        assert_same(agreed, full_state(model))
    assert models.distance(own, agreed) > 0
    for name, are_equal in (("own", False), ("agreed", True)):
        weights = {"own": own, "agreed": agreed}[name]["head.weight"].contiguous()
        others = [torch.empty_like(weights) for _ in range(4)]
        dist.all_gather(others, weights)
        assert torch.equal(others[0], others[2]) is are_equal, name


@over_adapters
def test_nodes_hand_out_their_own_weights_unless_the_agreed_ones_are_shown(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    pool(4).run(of_nodes, adapter)


def beside_tensor_parallelism(adapter: Adapter, to: int | None) -> None:
    """In a worker: parameters that two parallelisms have sharded."""
    run = trained(adapter, Strategy("GGG", gpus_per_node=2), steps=1)
    weights = dict(gathered_weights(run.model, rank=to))
    if to in (None, dist.get_rank()):
        assert_same(weights, full_state(run.model))
    else:
        full_state(run.model)
        assert not any(isinstance(value, Tensor) for value in weights.values())


@over_each(adapter=ADAPTERS, to=[None, 5])
def test_other_parallelisms_are_gathered_too(pool: Callable[[int], Pool], adapter: Adapter, to: int | None) -> None:
    pool(8).run(beside_tensor_parallelism, adapter, to)


def replaced(adapter: Adapter) -> None:
    """In a worker: a parameter that was given other memory, which FSDP has not seen yet."""
    model = adapter.make(Case(), ZEROPP)
    forward(model).backward()
    for parameter in model.parameters():
        if adapter.torch_name == "fully_shard":
            parameter.data.to_local().fill_(3)
        else:
            parameter.data = torch.full_like(parameter, 3)
    assert all((value == 3).all() for name, value in gathered_weights(model) if "shift" not in name)


@over_adapters
def test_it_has_what_was_written_to_parameters(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(replaced, adapter)


def test_a_model_that_is_not_sharded_is_handed_out_as_it_is() -> None:
    net = models.make_net(tied=True)
    assert_same(dict(gathered_weights(net, rank=0)), net.state_dict())
