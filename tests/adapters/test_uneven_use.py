"""Ranks may use different parameters, and clear gradients in between; gradients are still those of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case, Fsdp2, on_cpu
from harness.covering import ADAPTERS, WITH_FLAT, over_adapters, over_each, over_pairs
from harness.pool import Pools
from harness.training import logits, train
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Int4, Int8, LoCo, Strategy

WIDTH = 6
HEADS = {"a": 3, "b": 5, "c": 3, "d": 4}
"""Outputs of each head: two are of one size, and none divides by the ranks."""


class Heads(nn.Module):
    """A trunk and some heads, of which a forward uses what ``uses`` says, in that order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, size) for name, size in HEADS.items()})
        self.uses: str = "abcd"
        self.runs_all = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        losses = {name: self.heads[name](x).square().mean() for name in (HEADS if self.runs_all else self.uses)}
        return sum((losses[name] for name in self.uses), start=x.square().mean())


def inputs(step: int, micro_batch: int) -> Tensor:
    """Other ones on each rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + 7919 * dist.get_rank())
    return torch.randn(2, WIDTH, generator=generator).to(models.device())


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Give every parameter that any rank has used the mean of its gradients."""
    for p in parameters:
        used = torch.tensor(float(p.grad is not None), device=models.device())
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(gradient)
        dist.all_reduce(used)
        p.grad = gradient / dist.get_world_size() if used else None


# ---- ranks that use different parameters

Uses = list[list[str]]
"""For each micro-batch of a step, what each rank uses."""
WITHIN_A_UNIT: list[Uses] = [
    [["a", "b", "c", "ab"], ["b", "c", "a", ""], ["abc", "abc", "abc", "abc"]],
    [["ab", "ba", "abc", "cab"], ["ab", "ab", "ab", "ab"]],  # in another order
    [["a", "", "", ""], ["bc", "bc", "bc", "bc"]],
    [["a", "b", "c", ""], ["", "", "", ""]],  # only before the last
]


def distance_from_unsharded(adapter: Adapter, scopes: str, steps: list[Uses], way: str) -> float:
    """In a worker: how far steps of AdamW get from those of a model that is not sharded.

    Every head is a unit if all of them are "run" or "kept" gathered in a step; fully_shard may reduce "unused" ones.
    """
    net, plain = Heads().to(models.device()), Heads().to(models.device())
    strategy = Strategy(scopes, gpus_per_node=2)
    arguments = {"reshard_after_forward": False} if way == "kept" and scopes[0] != "N" else {}
    for name, head in net.heads.items() if way in ("run", "kept") else ():
        net.heads[name] = adapter.wrap(head, strategy, **arguments)
    model: Any = adapter.wrap(net, strategy, **arguments)
    net.runs_all = way == "run"
    if way == "unused":
        model.set_reduce_scatter_unused_params(True)
    # FSDP1 has one gradient for all parameters of a unit, so that AdamW decays what nobody uses.
    decay = 0.1 if adapter.torch_name == "fully_shard" and way != "unused" else 0.0
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=0.1, weight_decay=decay) for m in (model, plain)]
    for step, uses in enumerate(steps):
        for micro_batch, by_rank in enumerate(uses):
            net.uses = plain.uses = by_rank[dist.get_rank()]
            last = micro_batch == len(uses) - 1
            with adapter.micro_batch(model, last, False):
                if way == "kept":
                    model.set_reshard_after_backward(last)
                model(inputs(step, micro_batch)).backward()
            plain(inputs(step, micro_batch)).backward()
        average(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return models.distance(adapter.full_weights(model), on_cpu(dict(plain.named_parameters())))


@over_pairs(adapter=ADAPTERS, scopes=["GGG", "IIG", "III", "NNG", "NNN"])
def test_gradients_are_those_of_all_ranks(pool: Pools, adapter: Adapter, scopes: str) -> None:
    assert max(pool(4).run(distance_from_unsharded, adapter, scopes, WITHIN_A_UNIT, "")) <= 1e-6


@pytest.mark.parametrize("scopes", ["GGG", "IIG", "NNG"])
def test_unused_parameters_may_be_reduced(pool: Pools, scopes: str) -> None:
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("torch 2.13 has set_reduce_scatter_unused_params")
    assert max(pool(4).run(distance_from_unsharded, Fsdp2(), scopes, WITHIN_A_UNIT, "unused")) <= 1e-6


BETWEEN_UNITS: Uses = [["a", "b", "abd", ""], ["abcd"] * 4]


@over_each(rest=False, scopes=["NGG", "NIG", "NNG", "NII", "NNI"], adapter=ADAPTERS)
def test_gradients_of_units_that_only_some_ranks_use_are_those_of_all_ranks(
    pool: Pools, adapter: Adapter, scopes: str
) -> None:
    """Units that are gathered again for the backward must be used on all ranks, as with torch's own sharding."""
    assert max(pool(4).run(distance_from_unsharded, adapter, scopes, [BETWEEN_UNITS] * 2, "run")) <= 1e-6


ORDERS: Uses = [["abcd"] * 4, ["ad", "da", "bc", "dcba"], ["b", "", "a", "cab"], ["abcd"] * 4]
"""In the first micro-batch all heads are gathered; in the last, all ranks reduce in one order, as torch's own must."""


@pytest.mark.parametrize("scopes", ["GGG", "NIG", "NNG"])
def test_units_that_stay_gathered_may_be_used_in_any_order(pool: Pools, scopes: str) -> None:
    assert max(pool(4).run(distance_from_unsharded, Fsdp2(), scopes, [ORDERS] * 2, "kept")) <= 1e-6


def untouched(adapter: Adapter, scopes: str, micro_batches: int, feedback: LoCo) -> tuple[bool, float]:
    """In a worker: whether a parameter that no forward uses has a gradient, and how far AdamW moved it."""
    net = models.make_net()
    net.blocks[0].extra = nn.Parameter(torch.ones(3, 5, device=models.device()))
    codecs: Any = {"gradients": Int4(32), "intra_gradients": Int8(32), "error_feedback": feedback}
    model = adapter.shard(net, Case(), Strategy(scopes, gpus_per_node=2, **codecs))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    gradients = []
    for micro_batch in range(micro_batches):
        with adapter.micro_batch(model, micro_batch == micro_batches - 1, False):
            models.loss_of(model, models.batch(0, micro_batch)).backward()
        gradients.append(net.blocks[0].extra.grad)
    optimizer.step()
    moved = (adapter.full_weights(model)["blocks.0.extra"] - 1).abs().max().item()
    return any(gradient is not None for gradient in gradients), moved


@over_each(
    rest=False,
    scopes=["NNN", "III", "NNG", "IIG", "GGG"],
    micro_batches=[1, 2],
    feedback={"inter": LoCo(), "both": LoCo(hops="both"), "int8": LoCo(dtype=Int8(32))},
)
def test_a_parameter_that_no_forward_uses_gets_no_gradient(
    pool: Pools, scopes: str, micro_batches: int, feedback: LoCo
) -> None:
    """FSDP1 has one gradient for all parameters of a unit, so there they are zeros."""
    assert pool(4).run(untouched, Fsdp2(), scopes, micro_batches, feedback) == [(False, 0.0)] * 4


# ---- what a micro-batch leaves out

Backwards = list[tuple[bool, bool]]
"""For each micro-batch of a step: it synchronizes, it leaves out a block."""

LEFT_OUT: dict[str, Backwards] = {
    # Stock FSDP1 is no oracle: it forgets the block's gradient if another micro-batch runs it before the last.
    "after a reduction": [(True, False), (False, True), (True, True)],
    "by the last": [(False, False), (True, True)],
}


def distances_of_steps(adapter: Adapter, backwards: Backwards, scopes: str) -> list[float]:
    """In a worker: the distances of gradients and weights from a net that is not sharded, after each of two steps."""
    model, net = adapter.make(Case(), Strategy(scopes, gpus_per_node=2)), models.make_net()
    inner = next(module for module in model.modules() if isinstance(module, models.Net))
    optimizers = [models.make_optimizer("sgd", m.parameters()) for m in (model, net)]
    distances = []
    for step in range(2):
        for micro_batch, (synced, skips) in enumerate(backwards):
            inner.skipped = net.skipped = 1 if skips else None
            with adapter.micro_batch(model, synced, False):
                models.loss_of(model, models.batch(step, micro_batch)).backward()
            models.loss_of(net, models.batch(step, micro_batch)).backward()
            if synced and not skips:
                logits(model)  # gathers the block, which the next micro-batches leave out
        average(net.parameters())
        if adapter in ADAPTERS:  # torch gathers no gradients of flat parameters
            exact = {name: p.grad.cpu() for name, p in net.named_parameters()}
            distances.append(models.distance(adapter.full_gradients(model), exact))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        exact = {name: p.detach().cpu() for name, p in net.named_parameters()}
        distances.append(models.distance(adapter.full_weights(model), exact))
    return distances


@over_pairs(rest=False, adapter=WITH_FLAT, backwards=LEFT_OUT, scopes=["GGG", "IIG", "III", "NNG"])
def test_micro_batches_may_leave_out_a_unit_that_others_have_used(
    pool: Pools, adapter: Adapter, backwards: Backwards, scopes: str
) -> None:
    assert max(map(max, pool(4).run(distances_of_steps, adapter, backwards, scopes))) <= 1e-6


# ---- sums in fp32


MANY = 96


def gradient_of_accumulation(adapter: Adapter, strategy: Strategy | None) -> Tensor:
    """In a worker: the trunk's full gradient of many micro-batches, in bf16, or in fp64 for None."""
    net = Heads().to(models.device(), torch.bfloat16)
    if strategy is None:
        net = net.double()
        for micro_batch in range(MANY):
            net(inputs(0, micro_batch).bfloat16().double()).backward()
        average(net.parameters())
        return net.trunk.weight.grad.cpu()
    model = adapter.wrap(net, strategy)
    for micro_batch in range(MANY):
        with adapter.micro_batch(model, micro_batch == MANY - 1, False):
            model(inputs(0, micro_batch).bfloat16()).backward()
    return adapter.full_gradients(model)["trunk.weight"].double()


@over_each(rest=False, adapter=ADAPTERS, where={"GGG": ("GGG", 2), "IIG": ("IIG", 2), "one node": ("NNG", 4)})
def test_many_bf16_micro_batches_are_summed_in_fp32(pool: Pools, adapter: Adapter, where: tuple[str, int]) -> None:
    exact = pool(4).once(gradient_of_accumulation, adapter, None)[0]
    ours = pool(4).run(gradient_of_accumulation, adapter, Strategy(where[0], gpus_per_node=where[1]))[0]
    # A sum in bf16, which has 8 bits, is 0.005 to 0.01 off; one in fp32 of as many rounded gradients far less.
    assert (ours - exact).norm() / exact.norm() <= 0.003


# ---- gradients that are cleared


def questions_of_each_step(adapter: Adapter) -> list[int]:
    """In a worker: how often steps ask what was used, of which the second alone has two micro-batches."""
    model = adapter.make(Case(), Strategy("IIG", gpus_per_node=2))
    optimizer, counts = torch.optim.SGD(model.parameters(), lr=0.1), []
    for micro_batches in (1, 1, 2, 1):
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as ask:
            train(adapter, model, Case(steps=1, micro_batches=micro_batches, clip=None), optimizer=optimizer)
        counts.append(ask.call_count)
    return counts[1:]


@over_adapters
def test_a_step_of_one_micro_batch_does_not_ask_what_others_have_used(pool: Pools, adapter: Adapter) -> None:
    assert pool(4).run(questions_of_each_step, adapter) == [[0, 1, 0]] * 4


def discarded(adapter: Adapter, scopes: str, clear: str) -> float:
    """In a worker: the distance that a micro-batch makes whose gradients are cleared before the last."""
    weights = []
    for with_it in (True, False):
        model = adapter.make(Case(wrap_blocks=clear != "what is wrapped"), Strategy(scopes, gpus_per_node=2))
        optimizer = models.make_optimizer("sgd", model.parameters())
        if with_it:
            with adapter.micro_batch(model, False, False):
                models.loss_of(model, models.batch(5, 0)).backward()
            {"optimizer": optimizer, "model": model}.get(clear, getattr(model, "module", model)).zero_grad()
        train(adapter, model, Case(steps=1, micro_batches=2), optimizer=optimizer)
        weights.append(adapter.full_weights(model))
    return models.distance(*weights)


@over_each(
    rest=False,
    adapter=ADAPTERS,
    scopes=["NNN", "NII", "III", "NNG", "IIG", "GGG"],
    clear=["optimizer", "model", "what is wrapped"],
)
def test_zero_grad_drops_accumulated_gradients(pool: Pools, adapter: Adapter, scopes: str, clear: str) -> None:
    assert max(pool(4).run(discarded, adapter, scopes, clear)) == 0


def left_after_an_evaluation(adapter: Adapter, scopes: str) -> list[float]:
    """In a worker: the gradients that an optimizer reads once the model has cleared them while it is unsharded."""
    model = adapter.make(Case(), Strategy(scopes, gpus_per_node=2))
    held, left = list(model.parameters()), []
    for set_to_none in (False, True):
        models.loss_of(model, models.batch(0, 0)).backward()
        assert any(p.grad is not None for p in held)
        logits(model)
        model.zero_grad(set_to_none=set_to_none)
        left += [adapter.local(p.grad).norm().item() for p in held if p.grad is not None]
    return left


@over_each(rest=False, adapter=ADAPTERS, scopes=["GGG", "NGG", "NII", "NNG"])
def test_zero_grad_of_an_unsharded_model_reaches_what_the_optimizer_reads(
    pool: Pools, adapter: Adapter, scopes: str
) -> None:
    for left in pool(4).run(left_after_an_evaluation, adapter, scopes):
        assert not any(left)


def distance_of_gradients(adapter: Adapter, scopes: str, moved: bool) -> float:
    """In a worker: how far gradients are from the exact ones, of which an optimizer has cleared a part in between."""
    torch.manual_seed(0)
    # A PReLU has one number, of which three of four ranks hold nothing.
    net = nn.Sequential(nn.PReLU(), nn.Linear(WIDTH, WIDTH, bias=False)).to(models.device())
    plain = copy.deepcopy(net)
    strategy = Strategy(scopes, gpus_per_node=2)
    net[0], net[1] = (adapter.wrap(part, strategy) for part in net)
    model: Any = adapter.wrap(net, strategy)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in net]
    if moved:
        model._apply(torch.clone)
    for micro_batch in range(2):
        with adapter.micro_batch(model, micro_batch == 1, False):
            model(inputs(0, micro_batch)).square().sum().backward()
        plain(inputs(0, micro_batch)).square().sum().backward()
        if micro_batch == 0:
            optimizers[1].zero_grad()
            plain[1].zero_grad()
    average(plain.parameters())
    exact = on_cpu({name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    return models.distance(adapter.full_gradients(model), exact)


@over_each(
    rest=False,
    adapter=ADAPTERS,
    case={"GGG": ("GGG", False), "IIG": ("IIG", False), "NNG": ("NNG", False), "moved": ("NNG", True)},
)
def test_an_optimizer_drops_only_gradients_of_its_own_parameters(
    pool: Pools, adapter: Adapter, case: tuple[str, bool]
) -> None:
    assert max(pool(4).run(distance_of_gradients, adapter, *case)) <= 1e-6
