"""How fully_shard's groups are gathered when their weights have a codec: what is copied, when, and by whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Case
from harness.covering import over_each
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import train
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_zpp import Int8, Strategy, fully_shard, traffic
from fsdp_zpp.collectives.hops import all_gather_single
from fsdp_zpp.collectives.weight_gather import WeightGather

ZEROPP = Strategy.zeropp(gpus_per_node=2)
QWZ = Strategy("GGG", weights=Int8(256), gpus_per_node=2)
ENCODED = [ZEROPP, QWZ, Strategy("NGG", weights=Int8(256), gpus_per_node=2)]
MICRO_BATCHES = Case(micro_batches=2)


class CopiesIn(TorchDispatchMode):
    """Counts the copies of shards that torch makes before a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.fsdp.all_gather_copy_in.default
        return func(*args, **(kwargs or {}))


def copies_of_a_forward(strategy: Strategy | None) -> int:
    """In a worker: how often shards are copied in a forward."""
    model = Fsdp2().make(Case(), strategy)
    with CopiesIn() as copies:
        models.loss_of(model, models.batch(0, 0))
    return copies.count


@pytest.mark.parametrize("strategy", ENCODED, ids=str)
def test_encoded_shards_are_not_copied_before_the_gather(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    units = len(models.Net().blocks) + 1
    assert pool(4).run(copies_of_a_forward, strategy) == [0] * 4
    assert pool(4).run(copies_of_a_forward, STOCK) == [units] * 4


def gathers_of_a_step(strategy: Strategy) -> int:
    """In a worker: how often units are gathered in a step of two micro-batches."""
    adapter, gathered = Fsdp2(), []
    model = adapter.make(MICRO_BATCHES, strategy)
    gather = WeightGather.__call__

    def counted(self: WeightGather, *args: Any, **kwargs: Any) -> None:
        gathered.append(self.label)
        gather(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGather, "__call__", counted)
        train(adapter, model, dataclasses.replace(MICRO_BATCHES, steps=1))
    return len(gathered)


@pytest.mark.parametrize("strategy", ENCODED, ids=str)
def test_units_are_gathered_as_often_as_they_are_unsharded(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    blocks = len(models.Net().blocks)
    # The root, as torch has it, stays unsharded from its forward to its backward; what scope N keeps, for the step.
    times = blocks + 1 if strategy.parameters == "N" else 2 * (2 * blocks + 1)
    assert pool(4).run(gathers_of_a_step, strategy) == [times] * 4


class LateGather(AllGather):
    """A user's all-gather, which is made when it is waited for."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """The work to wait for."""

        class Late(dist.Work):
            def wait(self, *args: Any) -> bool:
                all_gather_single()(output_tensor, input_tensor.clone(), group=group)
                return True

        return Late()


def gathered_late() -> bool:
    """In a worker: whether a warm unit shows all weights after a gather that a user has set since."""
    adapter = Fsdp2()
    model = adapter.make(Case(), Strategy("IGG", gpus_per_node=2))
    train(adapter, model, Case(steps=2))
    block: Any = model.blocks[0]
    expected = [parameter.full_tensor() for parameter in block.parameters()]
    block.set_custom_all_gather(LateGather())
    block.unshard(async_op=True).wait()
    return all(map(torch.equal, block.parameters(), expected))


def test_a_gather_that_a_user_sets_is_waited_for(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(gathered_late) == [True] * 4


def torchs_names(strategy: Strategy | None) -> set[str]:
    """In a worker: what torch calls the gathers of a forward, as a profiler sees it."""
    model = Fsdp2().make(Case(), strategy)
    models.loss_of(model, models.batch(0, 0))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        models.loss_of(model, models.batch(0, 0))
    return {event.name for event in profiler.events() if event.name.startswith("FSDP::all_gather")}


@pytest.mark.parametrize("strategy", [ZEROPP, QWZ], ids=str)
def test_profiles_have_torchs_own_names_for_gathers(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    assert pool(4).run(torchs_names, strategy) == pool(4).run(torchs_names, STOCK)


def plainly(model: Any) -> None:
    """As torch does by itself."""


def ahead(model: Any) -> None:
    """Gathered before its turn, in the forward as in the backward."""
    first, *others = model.blocks
    first.set_modules_to_forward_prefetch(others)
    others[-1].set_modules_to_backward_prefetch([first])


def by_hand(model: Any) -> None:
    """Asked for by the user, who waits or has FSDP wait."""
    model.blocks[0].register_forward_pre_hook(lambda *_: model.blocks[1].unshard())
    model.blocks[1].register_forward_pre_hook(lambda *_: model.blocks[2].unshard(async_op=True) and None)


def trained(strategy: Strategy, way: Callable[[Any], None]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """In a worker: the weights after a few steps of a model that is gathered so, and the bytes of its gathers."""
    adapter = Fsdp2(tune=way)
    model = adapter.make(MICRO_BATCHES, strategy)
    train(adapter, model, MICRO_BATCHES)
    return adapter.full_weights(model), traffic(model)["gather"]


@over_each(strategy=ENCODED, way=[ahead, by_hand])
def test_prefetching_and_unsharding_by_hand_change_neither_weights_nor_bytes(
    pool: Callable[[int], Pool], strategy: Strategy, way: Callable[[Any], None]
) -> None:
    plain = pool(4).run(trained, strategy, plainly)
    for (ours, sent), (expected, sent_plainly) in zip(pool(4).run(trained, strategy, way), plain, strict=True):
        assert models.distance(ours, expected) == 0
        assert sent == sent_plainly


def with_embedding_apart(in_the_backward: bool) -> tuple[dict[str, Tensor], int]:
    """In a worker: the weights after a few steps, and the bytes gathered, of a model whose embedding is a unit."""
    adapter, case = Fsdp2(), Case()
    net = models.make_net()
    adapter.apply(net.embedding, QWZ)
    net.embedding.set_unshard_in_backward(in_the_backward)
    model = adapter.shard(net, case, QWZ)
    train(adapter, model, case)
    return adapter.full_weights(model), sum(traffic(model)["gather"].values())


def test_a_unit_is_not_gathered_for_a_backward_that_needs_no_weights(pool: Callable[[int], Pool]) -> None:
    with_it, without = pool(4).run(with_embedding_apart, True), pool(4).run(with_embedding_apart, False)
    for (weights, sent), (expected, sent_with_it) in zip(without, with_it, strict=True):
        assert models.distance(weights, expected) == 0
        assert sent < sent_with_it


class Counting(AllGather):
    """A user's own all-gather."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.calls += 1
        all_gather_single()(output_tensor, input_tensor, group=group)
        return None


def gathered_by_the_user() -> tuple[dict[str, Tensor], int]:
    """In a worker: the weights after a few steps of a model whose gathers, once sharded, a user has replaced."""
    adapter, counting = Fsdp2(), Counting()
    model = adapter.make(MICRO_BATCHES, QWZ)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(counting)
    train(adapter, model, MICRO_BATCHES)
    return adapter.full_weights(model), counting.calls


def test_a_users_all_gather_replaces_the_strategys(pool: Callable[[int], Pool]) -> None:
    exact = pool(4).run(trained, Strategy("GGG", gpus_per_node=2), plainly)
    for (weights, calls), (expected, _) in zip(pool(4).run(gathered_by_the_user), exact, strict=True):
        assert calls > 0
        assert models.distance(weights, expected) <= 1e-6


class Heads(nn.Module):
    """A matrix and heads of one size, of which some are small enough for codecs to leave them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(256, 256, bias=False)
        self.heads = nn.ModuleList(nn.Linear(256, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return sum((head(x) * 10.0**place for place, head in enumerate(self.heads)), x.new_zeros(()))


def losses_of_heads(strategy: Strategy | None) -> list[float]:
    """In a worker: the losses of a training that unshards by hand before each forward, as torch's tutorial does."""
    torch.manual_seed(0)
    model: Any = Heads().to(models.device())
    if strategy is not None:
        fully_shard(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    losses = []
    for step in range(4):
        if strategy is not None:
            model.unshard(async_op=True)
        torch.manual_seed(step)
        loss = model(torch.randn(4, 256).to(models.device())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("levels", ["GGG", "IGG", "NNG", "III"])
def test_parameters_keep_their_order_however_often_torch_initializes_a_group(
    pool: Callable[[int], Pool], levels: str, nodes: int
) -> None:
    expected = pool(4).run(losses_of_heads, None)[0]
    for losses in pool(4).run(losses_of_heads, Strategy(levels, gpus_per_node=4 // nodes)):
        assert losses == pytest.approx(expected, rel=1e-4)


def bytes_of_a_forward(early: bool) -> int:
    """In a worker: what a forward sends between nodes, maybe after an ``unshard()`` before FQNs are known."""
    model: Any = fully_shard(Heads().to(models.device()), strategy=QWZ)
    if early:
        model.unshard()
        model.reshard()
    before = traffic(model)["gather"]["inter"]
    model(torch.ones(4, 256, device=models.device()))
    return traffic(model)["gather"]["inter"] - before


def test_an_unshard_before_the_first_forward_leaves_bytes_as_they_are(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(bytes_of_a_forward, True) == pool(4).run(bytes_of_a_forward, False)
