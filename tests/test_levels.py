"""All fourteen letters: what a rank holds of each state, and what a micro-batch reduces.

test_parity.py has the weights that they train.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.adapters import ADAPTERS, LEVELS, over_adapters
from harness.covering import over_each, over_pairs
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import Pool, device_type
from harness.training import gradients, logits, train, trained_weights
from harness.wiretap import Wiretap, wiretap
from torch import Tensor, nn

from fsdp_zpp import Int4, Int8, Strategy
from fsdp_zpp.strategy import LEGAL_LEVELS

over_levels = pytest.mark.parametrize("levels", LEGAL_LEVELS)
SHARDS = {"N": 1, "I": 2, "G": 4}
"""Into how many shards a letter cuts a state on 2 nodes x 2."""


# ---- what a rank holds


def shard_sizes(adapter: Adapter, levels: str) -> tuple[int, int, int, int]:
    """In a worker: elements of the model and, on this rank, of parameters, gradients and optimizer states."""
    case = Case(model=(("width", 24), ("hidden", 36), ("vocabulary", 64)))
    model = adapter.make(case, Strategy(levels, gpus_per_node=2))
    optimizer = models.make_optimizer("adamw", model.parameters())
    models.loss_of(model, models.batch(0, 0)).backward()
    parameters = list(model.parameters())
    held = sum(adapter.local(p).numel() for p in parameters)
    held_gradients = sum(adapter.local(p.grad).numel() for p in parameters if p.grad is not None)
    optimizer.step()
    states = sum(adapter.local(state["exp_avg"]).numel() for state in optimizer.state.values())
    return sum(p.numel() for p in models.make_net(**dict(case.model)).parameters()), held, held_gradients, states


@over_levels
@over_adapters
def test_optimizer_sees_its_own_letters_shard(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    replies = pool(4).run(shard_sizes, adapter, levels)
    for total, *held in replies:
        for one in held:
            assert one == pytest.approx(total / SHARDS[levels[2]], rel=0.02)
    # FSDP's alignment belongs to no parameter, so shards differ in size, but together they are the model.
    assert sum(held for _, held, _, _ in replies) == replies[0][0] * 4 / SHARDS[levels[2]]


def replicas_differ(adapter: Adapter, levels: str) -> bool:
    """In a worker: whether weights differ between ranks that hold the same part, after training with codecs."""
    strategy = Strategy(levels, weights=Int8(64), gradients=Int4(32), gpus_per_node=2)
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(micro_batches=2, clip=None))
    own = torch.cat([adapter.local(p).detach().flatten().cpu() for p in model.parameters()])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    step = {"N": 1, "I": 2}[levels[2]]
    return any(not every[dist.get_rank() % step].equal(other) for other in every[dist.get_rank() % step :: step])


@pytest.mark.parametrize("levels", [levels for levels in LEGAL_LEVELS if levels[2] != "G"])
@over_adapters
def test_replicas_stay_equal_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    assert pool(4).run(replicas_differ, adapter, levels) == [False] * 4


# ---- what a micro-batch reduces


def reduced_bytes(adapter: Adapter, levels: str, synced: bool) -> list[Wiretap]:
    """In a worker: what the backward of each of three micro-batches reduces."""
    model = adapter.make(Case(), Strategy(levels, gpus_per_node=2))
    taps = []
    for micro_batch in range(3):
        with adapter.micro_batch(model, micro_batch == 2, synced):
            loss = models.loss_of(model, models.batch(0, micro_batch))
            with wiretap(2) as tap:
                loss.backward()
        taps.append(tap)
    return taps


@over_levels
@over_adapters
def test_gradient_letter_says_how_far_a_micro_batch_reduces(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str
) -> None:
    crossed = {"N": set(), "I": {"intra"}, "G": {"intra", "inter"}}[levels[1]]
    for earlier, middle, last in pool(4).run(reduced_bytes, adapter, levels, False):
        for tap in (earlier, middle):
            assert {level for level in ("intra", "inter") if tap.total(level, "all_to_all")} == crossed
        assert last.total("intra", "all_to_all") > 0
        assert last.total("inter", "all_to_all") > 0


def shown_before_the_last(adapter: Adapter, levels: str) -> list[bool]:
    """In a worker: whether a parameter has a gradient after a first micro-batch, and after the last."""
    model = adapter.make(Case(), Strategy(levels, gpus_per_node=2))
    shown = []
    for last in (False, True):
        with adapter.micro_batch(model, last, False):
            models.loss_of(model, models.batch(0, int(last))).backward()
        shown.append(any(p.grad is not None for p in model.parameters()))
    return shown


@pytest.mark.parametrize("levels", [levels for levels in LEGAL_LEVELS if levels != "NNN"])
def test_sums_that_wait_are_not_shown_as_gradients(pool: Callable[[int], Pool], levels: str) -> None:
    """FSDP1 would take them for a user's own and copy them, while another stream may still be at them."""
    for before, after in pool(4).run(shown_before_the_last, Fsdp1(), levels):
        assert not before
        assert after


def discarded(adapter: Adapter, levels: str, clear: str) -> float:
    """In a worker: the distance that a micro-batch makes whose gradients are cleared before the last."""
    weights = []
    for with_it in (True, False):
        model = adapter.make(Case(), Strategy(levels, gpus_per_node=2))
        optimizer = models.make_optimizer("sgd", model.parameters())
        if with_it:
            with adapter.micro_batch(model, False, False):
                models.loss_of(model, models.batch(5, 0)).backward()
            (optimizer if clear == "optimizer" else model).zero_grad()
        train(adapter, model, Case(steps=1, micro_batches=2), optimizer=optimizer)
        weights.append(adapter.full_weights(model))
    return models.distance(*weights)


@over_pairs(adapter=ADAPTERS, levels=["NNN", "NII", "III", "NNG", "IIG", "GGG"], clear=["optimizer", "model"])
def test_zero_grad_clears_what_waits(pool: Callable[[int], Pool], adapter: Adapter, levels: str, clear: str) -> None:
    assert max(pool(4).run(discarded, adapter, levels, clear)) == 0


def left_after_an_evaluation(adapter: Adapter, levels: str, set_to_none: bool) -> list[float]:
    """In a worker: the gradients that an optimizer reads once the model has cleared them while it is unsharded."""
    model = adapter.make(Case(), Strategy(levels, gpus_per_node=2))
    held = list(model.parameters())
    models.loss_of(model, models.batch(0, 0)).backward()
    assert any(p.grad is not None for p in held)
    logits(model)
    model.zero_grad(set_to_none=set_to_none)
    return [adapter.local(p.grad).norm().item() for p in held if p.grad is not None]


@over_pairs(adapter=ADAPTERS, levels=["GGG", "NGG", "NII", "NNG"], set_to_none=[True, False])
def test_zero_grad_after_an_evaluation(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str, set_to_none: bool
) -> None:
    for left in pool(4).run(left_after_an_evaluation, adapter, levels, set_to_none):
        assert not any(left)


def sometimes_skipped(adapter: Adapter, levels: str) -> float:
    """In a worker: the distance from a net that is not sharded, when the last micro-batch leaves out a block."""
    model, net = adapter.make(Case(), Strategy(levels, gpus_per_node=2)), models.make_net()
    inner = next(module for module in model.modules() if isinstance(module, models.Net))
    optimizers = [models.make_optimizer("sgd", m.parameters()) for m in (model, net)]
    for step in range(2):
        for micro_batch in range(2):
            inner.skipped = net.skipped = 1 if micro_batch == 1 else None
            with adapter.micro_batch(model, micro_batch == 1, False):
                models.loss_of(model, models.batch(step, micro_batch)).backward()
            models.loss_of(net, models.batch(step, micro_batch)).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return models.distance(adapter.full_weights(model), {name: p.detach().cpu() for name, p in net.named_parameters()})


@over_each(adapter=ADAPTERS, levels=LEGAL_LEVELS)
def test_last_micro_batch_may_leave_out_a_unit(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    assert max(pool(4).run(sometimes_skipped, adapter, levels)) <= 1e-6


def left_out_after_a_reduction(adapter: Adapter, levels: str) -> float:
    """In a worker: as :func:`sometimes_skipped`, when a block is used by a first, synchronized micro-batch alone.

    Stock FSDP1 is no oracle: it forgets that gradient if another micro-batch runs the block before the last.
    """
    model, net = adapter.make(Case(), Strategy(levels, gpus_per_node=2)), models.make_net()
    inner = next(module for module in model.modules() if isinstance(module, models.Net))
    for micro_batch in range(3):
        inner.skipped = net.skipped = None if micro_batch == 0 else 1
        with adapter.micro_batch(model, micro_batch != 1, False):
            models.loss_of(model, models.batch(0, micro_batch)).backward()
        models.loss_of(net, models.batch(0, micro_batch)).backward()
        if micro_batch == 0:
            logits(model)  # gathers the block
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    exact = {name: p.grad.cpu() for name, p in net.named_parameters()}
    return models.distance(adapter.full_gradients(model), exact)


@over_each(adapter=ADAPTERS, levels=LEVELS)
def test_gradients_of_a_synchronized_micro_batch_stay(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str
) -> None:
    assert max(pool(4).run(left_out_after_a_reduction, adapter, levels)) <= 1e-6


def accumulated_in_bf16(adapter: Adapter, levels: str) -> tuple[float, float]:
    """In a worker: the distance of gradients of four bf16 micro-batches from the sum of each alone, and of one."""
    case = Case(precision=Precision(torch.bfloat16, torch.float32))
    singles = [gradient_of(adapter, case, levels, [micro_batch]) for micro_batch in range(4)]
    exact = {name: sum(single[name] for single in singles) for name in singles[0]}
    together = gradient_of(adapter, case, levels, list(range(4)))
    return models.distance(together, exact), models.distance(singles[0], exact)


def gradient_of(adapter: Adapter, case: Case, levels: str, micro_batches: list[int]) -> dict[str, Tensor]:
    """In a worker: full gradients of some micro-batches."""
    model = adapter.make(case, Strategy(levels, gpus_per_node=2))
    for micro_batch in micro_batches:
        with adapter.micro_batch(model, micro_batch == micro_batches[-1], False):
            models.loss_of(model, models.batch(0, micro_batch)).backward()
    return adapter.full_gradients(model)


@over_each(adapter=ADAPTERS, levels=[levels for levels in LEVELS if levels != "NNN"])
def test_micro_batches_are_summed_in_fp32(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    for together, one in pool(4).run(accumulated_in_bf16, adapter, levels):
        assert together <= 1e-6
        assert one > 0.1


# ---- with codecs, frozen parameters, and weights that only rank 0 has


stock_gradients = cache(partial(gradients, case=Case(), strategy=STOCK))


def gradients_beside_stock(adapter: Adapter, strategy: Strategy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In a worker: our gradients and torch's."""
    return gradients(adapter, Case(), strategy), stock_gradients(adapter)


@over_each(adapter=ADAPTERS, levels=LEGAL_LEVELS)
def test_encoded_gradients(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    strategy = Strategy(levels, gradients=Int8(64), gpus_per_node=2)
    for ours, exact in pool(4).run(gradients_beside_stock, adapter, strategy):
        error = sum((ours[name] - g).square().sum() for name, g in exact.items()).sqrt()
        norm = sum(g.square().sum() for g in exact.values()).sqrt()
        # Half a step of 1/127 of a block's largest value, a hop; three of them where sums are gathered again.
        assert 0 < error <= 0.02 * norm


class Adapted(nn.Module):
    """A block with a small trainable detour beside its frozen weights."""

    def __init__(self, block: models.Block, width: int) -> None:
        super().__init__()
        self.block = block.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 3, bias=False), nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.up(self.down(x))


def adapted(adapter: Adapter, strategy: Any) -> Any:
    """In a worker: a net of adapted blocks, one unit each."""
    net = models.make_net()
    net.requires_grad_(False)
    net.blocks = nn.ModuleList(Adapted(block, 22) for block in net.blocks).to(models.device())
    if adapter.torch_name == "fully_shard":
        for block in net.blocks:
            adapter.apply(block, strategy)
        return adapter.apply(net, strategy)
    for i, block in enumerate(net.blocks):
        net.blocks[i] = adapter.apply(block, strategy, use_orig_params=True, device_id=models.device())
    return adapter.apply(net, strategy, use_orig_params=True, device_id=models.device())


def adapted_weights(adapter: Adapter, strategy: Any) -> tuple[dict[str, Tensor], dict[str, int], bool]:
    """In a worker: weights after training, bytes sent in a warm backward, whether frozen weights got gradients."""
    model = adapted(adapter, strategy)
    optimizer = models.make_optimizer("adamw", (p for p in model.parameters() if p.requires_grad))
    train(adapter, model, Case(steps=3, micro_batches=2), optimizer=optimizer)
    loss = models.loss_of(model, models.batch(9, 0))
    with wiretap(2) as tap:
        loss.backward()
    allocated = any(p.grad is not None for p in model.parameters() if not p.requires_grad)
    reduced = {level: tap.total(level, "all_to_all") for level in ("intra", "inter")}
    return adapter.full_weights(model), reduced, allocated


@cache
def stock_adapted_weights(adapter: Adapter) -> dict[str, Tensor]:
    """In a worker: what torch's own full sharding makes of it."""
    return adapted_weights(adapter, STOCK)[0]


def adapted_beside_stock(adapter: Adapter, strategy: Strategy) -> tuple[float, dict[str, int], bool]:
    """In a worker: as :func:`adapted_weights`, but the weights' distance from stock."""
    weights, reduced, allocated = adapted_weights(adapter, strategy)
    return models.distance(weights, stock_adapted_weights(adapter)), reduced, allocated


@over_each(adapter=ADAPTERS, levels=LEVELS)
def test_frozen_beside_trainable(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    trainable = 3 * (22 * 3 + 3 * 22) * 4
    strategy = Strategy(levels, gpus_per_node=2)
    for distance, reduced, allocated in pool(4).run(adapted_beside_stock, adapter, strategy):
        assert distance <= 1e-4
        assert not allocated
        # Half of the values go to the other rank of the node; padding is what FSDP aligns small parameters with.
        assert 0 < reduced["intra"] <= 0.75 * trainable
        assert 0 < reduced["inter"] <= 0.4 * trainable


def encoded_run(adapter: Adapter, strategy: Strategy | None) -> float:
    """In a worker: the loss on one batch after training on it."""
    model = adapter.make(Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    for _ in range(8):
        loss = models.loss_of(model, models.batch(0, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    return loss.item() / dist.get_world_size()


stock_run = cache(partial(encoded_run, strategy=STOCK))


def encoded_beside_stock(adapter: Adapter, strategy: Strategy) -> tuple[float, float]:
    """In a worker: the losses of ours and of stock."""
    return encoded_run(adapter, strategy), stock_run(adapter)


@over_each(adapter=ADAPTERS, levels=LEVELS)
def test_encoded_strategies_train(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    strategy = Strategy(levels, weights=Int8(64), gradients=Int4(32), gpus_per_node=2)
    for ours, stock in pool(4).run(encoded_beside_stock, adapter, strategy):
        assert ours == pytest.approx(stock, rel=0.01)


def synchronized(levels: str) -> float:
    """In a worker: the distance of weights that only rank 0 had, from rank 0's."""
    adapter = Fsdp1(arguments=(("sync_module_states", True),))
    strategy = Strategy(levels, gpus_per_node=2)
    net = models.make_net(seed=dist.get_rank())
    weights = adapter.full_weights(adapter.shard(net, Case(), strategy))
    return models.distance(weights, {name: p.detach().cpu() for name, p in models.make_net().named_parameters()})


@pytest.mark.skipif(device_type() == "cpu", reason="torch synchronizes module states on accelerators only")
@pytest.mark.parametrize("levels", ["NNN", "III", "GGG"])
def test_module_states_are_synchronized_over_all_nodes(pool: Callable[[int], Pool], levels: str) -> None:
    assert pool(4).run(synchronized, levels) == [0] * 4


def test_trained_weights_do_not_depend_on_the_parameters_letter(pool: Callable[[int], Pool]) -> None:
    """What is kept of the weights, and where, is no matter of arithmetic: it may not change a bit."""

    def run(levels: str) -> dict[str, Tensor]:
        strategy = Strategy(levels, weights=Int8(64), gradients=Int4(32), gpus_per_node=2)
        return pool(4).run(trained_weights, Fsdp1(), Case(micro_batches=2), strategy)[0]

    for first, *others in (("NNI", "INI"), ("NII", "III"), ("NIG", "IIG", "GIG"), ("NGG", "IGG", "GGG")):
        expected = run(first)
        assert all(models.distance(run(other), expected) == 0 for other in others)


# ---- what would go wrong in silence


def differently_seeded(adapter: Adapter, levels: str) -> str:
    """In a worker: what a forward of a net says whose weights are others on every rank."""
    model = adapter.shard(models.make_net(seed=dist.get_rank()), Case(), Strategy(levels, gpus_per_node=2))
    try:
        models.loss_of(model, models.batch(0, 0))
    except ValueError as error:
        return str(error)
    return ""


@over_levels
@over_adapters
def test_replicas_must_start_equal(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    for said in pool(4).run(differently_seeded, adapter, levels):
        assert ("they hold different weights" in said) == (levels[2] != "G")


def untouched(adapter: Adapter, levels: str, micro_batches: int) -> tuple[bool, float]:
    """In a worker: whether a parameter that no forward uses has a gradient, and how far AdamW moved it."""
    net = models.make_net()
    net.blocks[0].extra = nn.Parameter(torch.ones(3, 5, device=models.device()))
    model = adapter.shard(net, Case(), Strategy(levels, gpus_per_node=2))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    gradients = []
    for micro_batch in range(micro_batches):
        with adapter.micro_batch(model, micro_batch == micro_batches - 1, False):
            models.loss_of(model, models.batch(0, micro_batch)).backward()
        gradients.append(net.blocks[0].extra.grad)
    optimizer.step()
    moved = (adapter.full_weights(model)["blocks.0.extra"] - 1).abs().max().item()
    return any(gradient is not None for gradient in gradients), moved


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("levels", ["NNN", "III", "NNG", "IIG", "GGG"])
def test_what_no_forward_uses_is_not_decayed(pool: Callable[[int], Pool], levels: str, micro_batches: int) -> None:
    """FSDP1 has one gradient for all parameters of a unit, so there they are zeros."""
    assert pool(4).run(untouched, Fsdp2(), levels, micro_batches) == [(False, 0.0)] * 4
