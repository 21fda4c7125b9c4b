"""Before the last micro-batch of a step, ranks may use different parameters; gradients are those of all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, on_cpu
from harness.adapters import ADAPTERS, LEVELS, over_adapters
from harness.covering import over_each, over_pairs
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from torch import Tensor, nn

from fsdp_zpp import Int4, LoCo, Strategy

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


Uses = list[list[str]]
"""For each micro-batch, what each rank uses."""

WITHIN_A_UNIT: dict[str, Uses] = {
    "others on each rank": [["a", "b", "c", "ab"], ["b", "c", "a", ""], ["abc", "abc", "abc", "abc"]],
    "in another order": [["ab", "ba", "abc", "cab"], ["ab", "ab", "ab", "ab"]],
    "once, on one rank": [["a", "", "", ""], ["bc", "bc", "bc", "bc"]],
    "only before the last": [["a", "b", "c", ""], ["", "", "", ""]],
}


def shard_heads(adapter: Adapter, strategy: Any, apart: bool, **arguments: Any) -> tuple[Any, Heads]:
    """In a worker: the sharded model, and what is inside of it; ``apart`` makes every head a unit."""
    net = Heads().to(models.device())
    extra = {} if adapter.torch_name == "fully_shard" else {"use_orig_params": True, "device_id": models.device()}
    if apart:
        for name, head in net.heads.items():
            net.heads[name] = adapter.apply(head, strategy, **arguments, **extra)
    return adapter.apply(net, strategy, **arguments, **extra), net


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


def distance_from_unsharded(
    adapter: Adapter,
    levels: str,
    uses: Uses,
    apart: bool,
    keep: bool = False,
    unused: bool = False,
    run_all: bool = False,
) -> float:
    """In a worker: how far two steps of AdamW get from those of a model that is not sharded.

    Args:
        adapter: Shards it.
        levels: The strategy's letters.
        uses: What each rank uses in each micro-batch.
        apart: Whether every head is a unit.
        keep: Whether what is gathered stays gathered in a step.
        unused: Whether fully_shard is told to reduce what is not used.
        run_all: Whether ranks run the heads that they don't use, too.
    """
    arguments = {"reshard_after_forward": False} if keep and levels[0] != "N" else {}
    model, net = shard_heads(adapter, Strategy(levels, gpus_per_node=2), apart, **arguments)
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


@over_pairs(adapter=ADAPTERS, levels=LEVELS, uses=WITHIN_A_UNIT)
def test_gradients_are_those_of_all_ranks(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str, uses: Uses
) -> None:
    assert max(pool(4).run(distance_from_unsharded, adapter, levels, uses, False)) <= 1e-6


@pytest.mark.parametrize("levels", LEVELS)
def test_what_is_not_used_may_be_reduced(pool: Callable[[int], Pool], levels: str) -> None:
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("torch 2.13 has set_reduce_scatter_unused_params")
    for uses in WITHIN_A_UNIT.values():
        assert max(pool(4).run(distance_from_unsharded, Fsdp2(), levels, uses, False, False, True)) <= 1e-6


BETWEEN_UNITS: Uses = [["a", "b", "abd", ""], ["abcd"] * 4]


@pytest.mark.parametrize("levels", ["NGG", "NIG", "NNG", "NII", "NNI"])
@over_adapters
def test_units_that_only_some_ranks_use(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    """All ranks run all units; what a rank does not use is no part of its loss.

    What is gathered again for the backward must be used on all ranks, as with torch's own sharding.
    """
    assert max(pool(4).run(distance_from_unsharded, adapter, levels, BETWEEN_UNITS, True, False, False, True)) <= 1e-6


ORDERS: Uses = [["abcd"] * 4, ["ad", "da", "bc", "dcba"], ["b", "", "a", "cab"], ["abcd"] * 4]
"""In the first micro-batch all heads are gathered; in the last, all ranks reduce in one order, as torch's own must."""


@pytest.mark.parametrize("levels", ["GGG", "IGG", "NGG", "NIG", "NNG", "III", "NII"])
def test_units_that_stay_gathered_may_be_used_in_any_order(pool: Callable[[int], Pool], levels: str) -> None:
    assert max(pool(4).run(distance_from_unsharded, Fsdp2(), levels, ORDERS, True, True)) <= 1e-6


def gradient_of_accumulation(adapter: Adapter, strategy: Any, micro_batches: int) -> Tensor:
    """In a worker: the trunk's full gradient of many micro-batches, in bf16, or in fp64 for None."""
    net = Heads().to(models.device())
    if strategy is None:
        net = net.to(torch.bfloat16).double()
        for micro_batch in range(micro_batches):
            net(inputs(0, micro_batch).bfloat16().double()).backward()
        average(net.parameters())
        return net.trunk.weight.grad.cpu()
    net = net.to(torch.bfloat16)
    extra = {} if adapter.torch_name == "fully_shard" else {"use_orig_params": True, "device_id": models.device()}
    model = adapter.apply(net, strategy, **extra)
    for micro_batch in range(micro_batches):
        with adapter.micro_batch(model, micro_batch == micro_batches - 1, False):
            model(inputs(0, micro_batch).bfloat16()).backward()
    return next(g for name, g in adapter.full_gradients(model).items() if name.endswith("trunk.weight")).double()


@over_each(adapter=ADAPTERS, levels=["GGG", "IGG", "IIG"], gpus_per_node=[2, 4])
def test_many_bf16_micro_batches_are_summed_in_fp32(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str, gpus_per_node: int
) -> None:
    if gpus_per_node == 4:
        levels = levels.replace("GGG", "IGG")  # GGG on one node is torch's own
    exact = pool(4).run(gradient_of_accumulation, adapter, None, 96)[0]
    ours = pool(4).run(gradient_of_accumulation, adapter, Strategy(levels, gpus_per_node=gpus_per_node), 96)[0]
    # A sum in bf16, which has 8 bits, is 0.005 to 0.01 off; one in fp32 of as many rounded gradients far less.
    assert (ours - exact).norm() / exact.norm() <= 0.003


# ---- clearing gradients


def cleared(adapter: Adapter, levels: str, how: str, apart: bool) -> float:
    """In a worker: the distance that a first micro-batch makes whose gradients are cleared before the last."""
    results = []
    for with_it in (True, False):
        model, _ = shard_heads(adapter, Strategy(levels, gpus_per_node=2), apart)
        if with_it:
            with adapter.micro_batch(model, False, False):
                model(inputs(0, 0)).backward()
            inner = getattr(model, "module", model)
            {"the model": model, "what is wrapped": inner}[how].zero_grad()
        with adapter.micro_batch(model, True, False):
            model(inputs(0, 1)).backward()
        results.append(adapter.full_gradients(model))
    return models.distance(*results)


@over_pairs(adapter=ADAPTERS, levels=["GGG", "IIG", "NNG", "III"], how=["the model", "what is wrapped"])
def test_zero_grad_of_what_is_wrapped(pool: Callable[[int], Pool], adapter: Adapter, levels: str, how: str) -> None:
    assert max(pool(4).run(cleared, adapter, levels, how, False)) == 0


class Scale(nn.Module):
    """One number, of which three of four ranks hold no element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def of_another_optimizer(adapter: Adapter, levels: str, leave_out: bool, moved: bool) -> list[float]:
    """In a worker: gradients of a number and of the rest, each over the exact one, after the other's was cleared."""
    torch.manual_seed(0)
    net = nn.Sequential(Scale(), nn.Linear(WIDTH, WIDTH, bias=False)).to(models.device())
    plain = copy.deepcopy(net)
    extra = {} if adapter.torch_name == "fully_shard" else {"use_orig_params": True, "device_id": models.device()}
    strategy = Strategy(levels, gpus_per_node=2)
    net[0], net[1] = (adapter.apply(part, strategy, **extra) for part in net)
    model = adapter.apply(net, strategy, **extra)

    def held(module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if not leave_out or adapter.local(p).numel()]

    own = torch.optim.SGD(held(net[0]) or [nn.Parameter(torch.zeros(1))], lr=0.1)
    rest = torch.optim.SGD(held(net[1]), lr=0.1)
    if moved:
        model._apply(torch.clone)
    with adapter.micro_batch(model, False, False):
        model(inputs(0, 0)).square().sum().backward()
    rest.zero_grad()
    with adapter.micro_batch(model, True, False):
        model(inputs(0, 1)).square().sum().backward()
    del own
    plain(inputs(0, 0)).square().sum().backward()
    plain[1].weight.grad = None
    plain(inputs(0, 1)).square().sum().backward()
    average(plain.parameters())
    exact = on_cpu({name: p.grad for name, p in plain.named_parameters()})
    ours = adapter.full_gradients(model)
    return [models.distance({name: ours[name]}, {name: exact[name]}) for name in exact]


@pytest.mark.parametrize(
    ("levels", "moved"), [("GGG", False), ("IIG", False), ("NNG", False), ("NNG", True)], ids=lambda value: str(value)
)
@over_adapters
def test_another_optimizer_clears_its_own_only(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str, moved: bool
) -> None:
    for distances in pool(4).run(of_another_optimizer, adapter, levels, False, moved):
        assert max(distances) <= 1e-6


# ---- error feedback


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
