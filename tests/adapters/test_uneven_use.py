"""Before the last micro-batch of a step, ranks may use different parameters; gradients are still those of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, on_cpu
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_pairs
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from heads import WIDTH, Heads, average, inputs, shard_heads
from torch import Tensor, nn

from fsdp_zpp import Int4, Int8, LoCo, Strategy, fully_shard

Uses = list[list[str]]
"""For each micro-batch, what each rank uses."""
WITHIN_A_UNIT: dict[str, Uses] = {
    "others on each rank": [["a", "b", "c", "ab"], ["b", "c", "a", ""], ["abc", "abc", "abc", "abc"]],
    "in another order": [["ab", "ba", "abc", "cab"], ["ab", "ab", "ab", "ab"]],
    "once, on one rank": [["a", "", "", ""], ["bc", "bc", "bc", "bc"]],
    "only before the last": [["a", "b", "c", ""], ["", "", "", ""]],
}


def distance_from_unsharded(
    adapter: Adapter,
    scopes: str,
    uses: Uses,
    apart: bool,
    keep: bool = False,
    unused: bool = False,
    run_all: bool = False,
) -> float:
    """In a worker: how far two steps of AdamW get from those of a model that is not sharded.

    Args:
        adapter: Shards it.
        scopes: The strategy's.
        uses: What each rank uses in each micro-batch.
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
    for step in range(2):
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


@over_pairs(adapter=ADAPTERS, scopes=SCOPES, uses=WITHIN_A_UNIT)
def test_gradients_are_those_of_all_ranks(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, uses: Uses
) -> None:
    assert max(pool(4).run(distance_from_unsharded, adapter, scopes, uses, False)) <= 1e-6


@pytest.mark.parametrize("scopes", SCOPES)
def test_unused_parameters_may_be_reduced(pool: Callable[[int], Pool], scopes: str) -> None:
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("torch 2.13 has set_reduce_scatter_unused_params")
    for uses in WITHIN_A_UNIT.values():
        assert max(pool(4).run(distance_from_unsharded, Fsdp2(), scopes, uses, False, False, True)) <= 1e-6


BETWEEN_UNITS: Uses = [["a", "b", "abd", ""], ["abcd"] * 4]


@pytest.mark.parametrize("scopes", ["NGG", "NIG", "NNG", "NII", "NNI"])
@over_adapters
def test_gradients_of_units_that_only_some_ranks_use_are_those_of_all_ranks(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    """All ranks run all units; what a rank does not use is no part of its loss.

    What is gathered again for the backward must be used on all ranks, as with torch's own sharding.
    """
    assert max(pool(4).run(distance_from_unsharded, adapter, scopes, BETWEEN_UNITS, True, False, False, True)) <= 1e-6


ORDERS: Uses = [["abcd"] * 4, ["ad", "da", "bc", "dcba"], ["b", "", "a", "cab"], ["abcd"] * 4]
"""In the first micro-batch all heads are gathered; in the last, all ranks reduce in one order, as torch's own must."""


@pytest.mark.parametrize("scopes", ["GGG", "IGG", "NGG", "NIG", "NNG", "III", "NII"])
def test_units_that_stay_gathered_may_be_used_in_any_order(pool: Callable[[int], Pool], scopes: str) -> None:
    assert max(pool(4).run(distance_from_unsharded, Fsdp2(), scopes, ORDERS, True, True)) <= 1e-6


def summed_with_feedback(heads: str) -> float:
    """In a worker: how far the sum of coarse gradients is from the exact one, where steps use one head each."""
    strategy = Strategy("IGG", gradients=Int4(32), intra_gradients=None, error_feedback=LoCo(beta=0.0), gpus_per_node=2)
    sums: list[dict[str, Tensor]] = []
    for sharded in (strategy, STOCK):
        model, net = shard_heads(Fsdp2(), sharded, False)
        total: dict[str, Tensor] = {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(len(heads)):
            net.uses = heads[step]
            model(inputs(step, 0)).backward()
            for name, gradient in Fsdp2().full_gradients(model).items():
                total[name] = total.get(name, 0) + gradient
            optimizer.step()
            optimizer.zero_grad()
        sums.append({name: value for name, value in total.items() if name.startswith("heads")})
    names = sums[1]
    error = sum((sums[0][name] - names[name]).square().sum() for name in names) ** 0.5
    return float(error / sum(value.square().sum() for value in names.values()) ** 0.5)


def test_errors_are_fed_back_to_the_parameters_that_made_them(pool: Callable[[int], Pool]) -> None:
    """What was sent differs from what was to be sent by the last error alone, whichever heads steps use."""
    alike = max(pool(4).run(summed_with_feedback, "a" * 24))
    in_turn = max(pool(4).run(summed_with_feedback, "acacabcabcaabbccacacabab"))
    assert in_turn <= max(2 * alike, 0.02)


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


@over_pairs(
    scopes=["NNN", "III", "NNG", "IIG", "GGG"],
    micro_batches=[1, 2],
    feedback={"none": None, "inter": LoCo(), "both": LoCo(hops="both")},
)
def test_a_parameter_that_no_forward_uses_gets_no_gradient(
    pool: Callable[[int], Pool], scopes: str, micro_batches: int, feedback: LoCo | None
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


def test_hooks_of_modules_in_one_call_run_once(pool: Callable[[int], Pool]) -> None:
    expected = dict.fromkeys(("0.weight", "0.bias", "1.scale", "1.shift"), 1)
    assert pool(4).run(hooks_of_a_step, Strategy("IIG", gpus_per_node=2)) == [expected] * 4
