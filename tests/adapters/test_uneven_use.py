"""Ranks may use different parameters, and clear gradients in between; gradients are still those of all ranks."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case, on_cpu
from harness.covering import ADAPTERS, SCOPES, over_each, over_pairs
from harness.fsdp2 import Fsdp2
from harness.pool import Pools
from harness.training import logits, train
from heads import WIDTH, Heads, average, inputs, shard_heads
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Int4, Int8, LoCo, Strategy, fully_shard

Uses = list[list[str]]
"""For each micro-batch of a step, what each rank uses."""
WITHIN_A_UNIT: list[Uses] = [
    [["a", "b", "c", "ab"], ["b", "c", "a", ""], ["abc", "abc", "abc", "abc"]],
    [["ab", "ba", "abc", "cab"], ["ab", "ab", "ab", "ab"]],  # in another order
    [["a", "", "", ""], ["bc", "bc", "bc", "bc"]],
    [["a", "b", "c", ""], ["", "", "", ""]],  # only before the last
]


def distance_from_unsharded(
    adapter: Adapter,
    scopes: str,
    steps: list[Uses],
    apart: bool = False,
    keep: bool = False,
    unused: bool = False,
    run_all: bool = False,
) -> float:
    """In a worker: how far two rounds of steps of AdamW get from those of a model that is not sharded.

    Args:
        adapter: Shards it.
        scopes: The strategy's.
        steps: What each rank uses in each micro-batch.
        apart: Whether every head is a unit.
        keep: Whether what is gathered stays gathered in a step.
        unused: Whether fully_shard is told to reduce what is not used.
        run_all: Whether ranks run the heads that they don't use, too.
    """
    arguments = {"reshard_after_forward": False} if keep and scopes[0] != "N" else {}
    model, net = shard_heads(adapter, Strategy(scopes, gpus_per_node=2), apart, **arguments)
    plain = Heads().to(models.device())
    net.runs_all = run_all
    if unused:
        model.set_reduce_scatter_unused_params(True)
    # FSDP1 has one gradient for all parameters of a unit, so that AdamW decays what nobody uses.
    decay = 0.1 if adapter.torch_name == "fully_shard" and not unused else 0.0
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=0.1, weight_decay=decay) for m in (model, plain)]
    for step, uses in enumerate(steps * 2):
        for micro_batch, by_rank in enumerate(uses):
            net.uses = plain.uses = by_rank[dist.get_rank()]
            last = micro_batch == len(uses) - 1
            with adapter.micro_batch(model, last, False):
                if keep:
                    model.set_reshard_after_backward(last)
                model(inputs(step, micro_batch)).backward()
            plain(inputs(step, micro_batch)).backward()
        average(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return models.distance(adapter.full_weights(model), on_cpu(dict(plain.named_parameters())))


@over_pairs(adapter=ADAPTERS, scopes=SCOPES)
def test_gradients_are_those_of_all_ranks(pool: Pools, adapter: Adapter, scopes: str) -> None:
    assert max(pool(4).run(distance_from_unsharded, adapter, scopes, WITHIN_A_UNIT)) <= 1e-6


@pytest.mark.parametrize("scopes", SCOPES)
def test_unused_parameters_may_be_reduced(pool: Pools, scopes: str) -> None:
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("torch 2.13 has set_reduce_scatter_unused_params")
    assert max(pool(4).run(distance_from_unsharded, Fsdp2(), scopes, WITHIN_A_UNIT, False, False, True)) <= 1e-6


BETWEEN_UNITS: Uses = [["a", "b", "abd", ""], ["abcd"] * 4]


@over_each(scopes=["NGG", "NIG", "NNG", "NII", "NNI"], adapter=ADAPTERS)
def test_gradients_of_units_that_only_some_ranks_use_are_those_of_all_ranks(
    pool: Pools, adapter: Adapter, scopes: str
) -> None:
    """All ranks run all units; what a rank does not use is no part of its loss.

    What is gathered again for the backward must be used on all ranks, as with torch's own sharding.
    """
    found = pool(4).run(distance_from_unsharded, adapter, scopes, [BETWEEN_UNITS], True, False, False, True)
    assert max(found) <= 1e-6


ORDERS: Uses = [["abcd"] * 4, ["ad", "da", "bc", "dcba"], ["b", "", "a", "cab"], ["abcd"] * 4]
"""In the first micro-batch all heads are gathered; in the last, all ranks reduce in one order, as torch's own must."""


@pytest.mark.parametrize("scopes", ["GGG", "IGG", "NIG", "NNG", "III"])
def test_units_that_stay_gathered_may_be_used_in_any_order(pool: Pools, scopes: str) -> None:
    assert max(pool(4).run(distance_from_unsharded, Fsdp2(), scopes, [ORDERS], True, True)) <= 1e-6


def untouched(adapter: Adapter, scopes: str, micro_batches: int, feedback: LoCo | None) -> tuple[bool, float]:
    """In a worker: whether a parameter that no forward uses has a gradient, and how far AdamW moved it."""
    net = models.make_net()
    net.blocks[0].extra = nn.Parameter(torch.ones(3, 5, device=models.device()))
    codecs = {} if feedback is None else {"gradients": Int4(32), "intra_gradients": Int8(32)}
    model = adapter.shard(net, Case(), Strategy(scopes, gpus_per_node=2, error_feedback=feedback, **codecs))
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
    scopes=["NNN", "III", "NNG", "IIG", "GGG"],
    micro_batches=[1, 2],
    feedback={"none": None, "inter": LoCo(), "both": LoCo(hops="both")},
)
def test_a_parameter_that_no_forward_uses_gets_no_gradient(
    pool: Pools, scopes: str, micro_batches: int, feedback: LoCo | None
) -> None:
    """FSDP1 has one gradient for all parameters of a unit, so there they are zeros."""
    assert pool(4).run(untouched, Fsdp2(), scopes, micro_batches, feedback) == [(False, 0.0)] * 4


class Shift(nn.Module):
    """A scale and a shift, of which a forward may leave out the shift."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.shifts = True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift if self.shifts else x * self.scale


def hooks_of_a_step(strategy: Strategy) -> dict[str, int]:
    """In a worker: how often hooks run in a step in which one rank uses a parameter, before the last micro-batch."""
    net: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), Shift()).to(models.device())
    fully_shard([net[0], net[1]], strategy=strategy)
    fully_shard(net, strategy=strategy)
    runs: Counter[str] = Counter()
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: runs.update([name]))
    for micro_batch, net[1].shifts in enumerate((dist.get_rank() == 1, False)):
        net.set_requires_gradient_sync(micro_batch == 1)
        net(inputs(0, micro_batch)).square().mean().backward()
    return dict(runs)


def test_hooks_of_modules_in_one_call_run_once(pool: Pools) -> None:
    expected = dict.fromkeys(("0.weight", "0.bias", "1.scale", "1.shift"), 1)
    assert pool(4).run(hooks_of_a_step, Strategy("IIG", gpus_per_node=2)) == [expected] * 4


# ---- gradients that are cleared


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


@over_each(adapter=ADAPTERS, scopes=["GGG", "NGG", "NII", "NNG"])
def test_zero_grad_of_an_unsharded_model_reaches_what_the_optimizer_reads(
    pool: Pools, adapter: Adapter, scopes: str
) -> None:
    for left in pool(4).run(left_after_an_evaluation, adapter, scopes):
        assert not any(left)


class Scale(nn.Module):
    """One number, of which three of four ranks hold no element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def of_another_optimizer(adapter: Adapter, scopes: str, moved: bool) -> list[float]:
    """In a worker: gradients of a number and of the rest, each over the exact one, after the other's was cleared."""
    torch.manual_seed(0)
    net = nn.Sequential(Scale(), nn.Linear(WIDTH, WIDTH, bias=False)).to(models.device())
    plain = copy.deepcopy(net)
    strategy = Strategy(scopes, gpus_per_node=2)
    net[0], net[1] = (adapter.wrap(part, strategy) for part in net)
    model = adapter.wrap(net, strategy)
    own, rest = (torch.optim.SGD(part.parameters(), lr=0.1) for part in net)
    if moved:
        model._apply(torch.clone)
    for micro_batch in range(2):
        with adapter.micro_batch(model, micro_batch == 1, False):
            model(inputs(0, micro_batch)).square().sum().backward()
        plain(inputs(0, micro_batch)).square().sum().backward()
        if micro_batch == 0:
            rest.zero_grad()
            plain[1].weight.grad = None
    del own
    average(plain.parameters())
    exact = on_cpu({name: p.grad for name, p in plain.named_parameters()})
    ours = adapter.full_gradients(model)
    return [models.distance({name: ours[name]}, {name: exact[name]}) for name in exact]


@over_each(
    adapter=ADAPTERS, case={"GGG": ("GGG", False), "IIG": ("IIG", False), "NNG": ("NNG", False), "moved": ("NNG", True)}
)
def test_an_optimizer_drops_only_gradients_of_its_own_parameters(
    pool: Pools, adapter: Adapter, case: tuple[str, bool]
) -> None:
    for distances in pool(4).run(of_another_optimizer, adapter, *case):
        assert max(distances) <= 1e-6
