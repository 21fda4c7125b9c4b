"""How fully_shard's groups are gathered when their weights have a codec: when, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Case, Fsdp2
from harness.covering import over_each
from harness.pool import Pool
from harness.training import logits, train
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from fsdp_zpp import Int8, Strategy, fully_shard, invalidate, traffic
from fsdp_zpp.comm.hops import ALL_GATHER

FSDP2 = Fsdp2()
HPZ, ZEROPP = Strategy("IGG", gpus_per_node=2), Strategy.zeropp(gpus_per_node=2)
KEPT = Strategy("NGG", gpus_per_node=2)
QWZ = Strategy("GGG", weights=Int8(256), gpus_per_node=2)
ENCODED = [ZEROPP, QWZ, Strategy("NGG", weights=Int8(256), gpus_per_node=2)]
MICRO_BATCHES = Case(steps=2, micro_batches=2)


# ---- what a gather does


def with_embedding_apart(in_the_backward: bool) -> tuple[dict[str, Tensor], int]:
    """In a worker: the weights after a few steps, and the bytes gathered, of a model whose embedding is a unit."""
    net = models.make_net()
    FSDP2.apply(net.embedding, QWZ)
    net.embedding.set_unshard_in_backward(in_the_backward)
    model = FSDP2.shard(net, Case(), QWZ)
    train(FSDP2, model, Case(steps=2))
    return FSDP2.full_weights(model), sum(traffic(model)["gather"].values())


def test_a_unit_is_not_gathered_for_a_backward_that_needs_no_weights(pool: Callable[[int], Pool]) -> None:
    with_it, without = pool(4).run(with_embedding_apart, True), pool(4).run(with_embedding_apart, False)
    for (weights, sent), (expected, sent_with_it) in zip(without, with_it, strict=True):
        assert models.distance(weights, expected) == 0
        assert sent < sent_with_it


# ---- prefetched, or by hand


def plainly(model: Any) -> None:
    """As torch does by itself."""


def ahead(model: Any) -> None:
    """Gathered before its turn, in the forward as in the backward."""
    first, *others = model.blocks
    first.set_modules_to_forward_prefetch(others)
    others[-1].set_modules_to_backward_prefetch([first])


def by_hand(model: Any) -> None:
    """Asked for by the user, who waits or has FSDP wait."""
    model.register_forward_pre_hook(lambda *_: model.blocks[0].unshard())
    model.blocks[0].register_forward_pre_hook(lambda *_: model.blocks[1].unshard(async_op=True) and None)


def trained(strategy: Strategy, way: Callable[[Any], None]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """In a worker: the weights after a few steps of a model that is gathered so, and the bytes of its gathers."""
    adapter = Fsdp2(tune=way)
    model = adapter.make(MICRO_BATCHES, strategy)
    train(adapter, model, MICRO_BATCHES)
    return adapter.full_weights(model), traffic(model)["gather"]


@over_each(rest=False, strategy=ENCODED, way=[ahead, by_hand])
def test_prefetching_and_unsharding_by_hand_change_neither_weights_nor_bytes(
    pool: Callable[[int], Pool], strategy: Strategy, way: Callable[[Any], None]
) -> None:
    plain = pool(4).once(trained, strategy, plainly)
    for (ours, sent), (expected, sent_plainly) in zip(pool(4).run(trained, strategy, way), plain, strict=True):
        assert models.distance(ours, expected) == 0
        assert sent == sent_plainly


def manual_unshard(strategy: Strategy) -> None:
    """In a worker: unshard() by hand, before and after the first forward, gathers the weights of the moment."""
    model = FSDP2.make(Case(), strategy)
    block = model.blocks[0]
    initial = {name: p.detach().clone() for name, p in models.make_net().blocks[0].named_parameters()}
    block.unshard()
    assert all(torch.equal(p, initial[name]) for name, p in block.named_parameters())
    block.reshard()
    train(FSDP2, model, Case(steps=2))
    expected = {name: p.full_tensor() for name, p in block.named_parameters()}
    block.unshard(async_op=True).wait()
    assert all(torch.equal(p, expected[name]) for name, p in block.named_parameters())
    assert not torch.equal(expected["up.weight"], initial["up.weight"])
    before = logits(model)
    handle = model.blocks[1].unshard(async_op=True)
    model.blocks[1].reshard()
    handle.wait()
    assert torch.equal(logits(model), before)
    model.blocks[1].unshard(async_op=True)  # of the weights of now, while the next forward needs the changed ones
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    invalidate(model)
    assert not torch.equal(logits(model), before)


@pytest.mark.parametrize("strategy", [HPZ, KEPT], ids=str)
def test_unshard_by_hand_gathers_the_weights_of_the_moment(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    pool(4).run(manual_unshard, strategy)


# ---- by a gather of the user's


class UsersGather(AllGather):
    """A user's own all-gather, which is made when it is waited for."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        self.calls += 1

        class Late(dist.Work):
            def wait(self, *args: Any) -> bool:
                getattr(dist, ALL_GATHER)(output_tensor, input_tensor.clone(), group=group)
                return True

        return Late()


def gathered_by_the_user(strategy: Strategy) -> tuple[dict[str, Tensor], int, bool]:
    """In a worker: the weights after a few steps of a model whose gathers, once sharded, a user has replaced.

    At last, whether a warm unit that is unsharded by hand shows all of its weights.
    """
    gather = UsersGather()
    model = FSDP2.make(MICRO_BATCHES, strategy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
    train(FSDP2, model, MICRO_BATCHES)
    weights, block = FSDP2.full_weights(model), model.blocks[0]
    expected = [parameter.full_tensor() for parameter in block.parameters()]
    block.unshard(async_op=True).wait()
    return weights, gather.calls, all(map(torch.equal, block.parameters(), expected))


@pytest.mark.parametrize("strategy", [HPZ, QWZ], ids=str)
def test_a_users_all_gather_replaces_the_strategys_and_is_waited_for(
    pool: Callable[[int], Pool], strategy: Strategy
) -> None:
    exact = pool(4).once(trained, Strategy("GGG", gpus_per_node=2), plainly)
    for (weights, calls, all_shown), (expected, _) in zip(
        pool(4).run(gathered_by_the_user, strategy), exact, strict=True
    ):
        assert calls > 0
        assert all_shown
        assert models.distance(weights, expected) <= 1e-6


# ---- before the first forward, when parameters have no names


class Heads(nn.Module):
    """A matrix and heads of one size, of which some are small enough for codecs to leave them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(256, 256, bias=False)
        self.heads = nn.ModuleList(nn.Linear(256, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return sum((head(x) * 10.0**place for place, head in enumerate(self.heads)), x.new_zeros(()))


def trained_heads(strategy: Strategy | None, early: bool = True) -> tuple[list[float], int]:
    """In a worker: the losses of a training, and what its gathers send between nodes.

    It may unshard by hand before each forward, as torch's tutorial does.
    """
    torch.manual_seed(0)
    model: Any = Heads().to(models.device())
    if strategy is not None:
        fully_shard(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    losses = []
    for step in range(3):
        if strategy is not None and early:
            model.unshard(async_op=True)
        torch.manual_seed(step)
        loss = model(torch.randn(4, 256).to(models.device())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, 0 if strategy is None else traffic(model)["gather"]["inter"]


@over_each(rest=False, levels=["GGG", "NNG", "III"], nodes=[1, 2])
def test_parameters_keep_their_order_however_often_torch_initializes_a_group(
    pool: Callable[[int], Pool], levels: str, nodes: int
) -> None:
    expected, _ = pool(4).once(trained_heads, None)[0]
    for losses, _ in pool(4).run(trained_heads, Strategy(levels, gpus_per_node=4 // nodes)):
        assert losses == pytest.approx(expected, rel=1e-4)


def test_an_unshard_before_the_first_forward_changes_neither_losses_nor_bytes(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(trained_heads, QWZ, True) == pool(4).run(trained_heads, QWZ, False)
