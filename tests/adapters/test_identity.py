"""What outlives a backward belongs to parameters: sums of micro-batches and errors, whatever is trained meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, original_name
from harness.covering import ADAPTERS, over_each, over_pairs
from harness.fsdp2 import Fsdp2
from harness.late_hops import late_hops
from harness.pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_zpp import Int4, Int8, LoCo, Strategy

SCOPES = ("GGG", "IGG", "IIG", "GNG", "III", "NGG", "NNG", "NNN")
WIDTH, HEADS = 64, 4


class Heads(nn.Module):
    """A trunk and heads of one size, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(HEADS))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        x, scale = self.trunk(x), torch.linspace(0.1, 2, WIDTH, device=x.device)
        return torch.stack([(self.heads[i](x) * scale).mean() for i in used]).sum()


def make_heads() -> Heads:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Heads().to(models.device())


def inputs(step: int) -> Tensor:
    """Other values on each rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator).to(models.device())


def train_only(model: nn.Module, heads: Sequence[int], trunk: bool = True) -> None:
    """Have the trunk and some heads require gradients, on whatever modules show."""
    for name, parameter in model.named_parameters():
        name = original_name(name)
        parameter.requires_grad_(trunk if "trunk" in name else int(name.split(".")[1]) in heads)


# ---- accumulated gradients

CHANGES: dict[str, list[tuple[Sequence[int], bool]]] = {
    "one then another": [((0,), True), ((1,), True)],
    "both then one": [((0, 1), True), ((1,), True)],
    "one then both": [((2,), True), ((0, 2), True)],
    "back again": [((0,), True), ((1, 3), True), ((0,), True)],
    "the trunk is frozen": [((0, 1), True), ((1,), False)],
}


def accumulated(adapter: Adapter, strategy: Any, change: str) -> dict[str, Tensor]:
    """In a worker: gradients of a step in which other parameters are trained in each micro-batch."""
    model = adapter.wrap(make_heads(), strategy)
    for number, (heads, trunk) in enumerate(CHANGES[change]):
        last = number == len(CHANGES[change]) - 1
        train_only(model, heads, trunk)
        with adapter.micro_batch(model, last, False), late_hops("inter"):
            (10.0**-number * model(inputs(number), range(HEADS))).backward()
    return adapter.full_gradients(model)


@over_pairs(rest=False, scopes=SCOPES, change=CHANGES)
def test_gradients_stay_with_their_parameters(
    pool: Callable[[int], Pool], scopes: str, change: list[tuple[Sequence[int], bool]]
) -> None:
    name = next(key for key, value in CHANGES.items() if value is change)
    expected = pool(4).once(accumulated, Fsdp2(), STOCK, name)
    for ours, stock in zip(
        pool(4).run(accumulated, Fsdp2(), Strategy(scopes, gpus_per_node=2), name), expected, strict=True
    ):
        assert models.distance(ours, stock) <= 1e-5


def divided(strategy: Any, dtype: torch.dtype | None, factor: float | None) -> Tensor:
    """In a worker: a gradient of which the first of three micro-batches has all, reduced in ``dtype``."""
    model = make_heads()
    Fsdp2().wrap(model, strategy, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(True)  # gloo can't multiply while it sums
    for micro_batch in range(3):
        with Fsdp2().micro_batch(model, micro_batch == 2, False), late_hops("inter"):
            (model(inputs(0), [0, 1]) * float(micro_batch == 0)).backward()
    return Fsdp2().full_gradients(model)["trunk.weight"]


@over_each(
    scopes=[*SCOPES, "zeropp"], how=[(torch.float16, None), (None, 10.0), (torch.float16, 10.0), (torch.float32, None)]
)
def test_earlier_micro_batches_are_divided_like_the_last(
    pool: Callable[[int], Pool], scopes: str, how: tuple[torch.dtype | None, float | None]
) -> None:
    strategy = Strategy.zeropp(gpus_per_node=2) if scopes == "zeropp" else Strategy(scopes, gpus_per_node=2)
    expected = pool(4).once(divided, STOCK, *how)[0]
    ours = pool(4).run(divided, strategy, *how)[0]
    # fp16 has 11 bits; a code of Int8 and one of Int4 are half a step off at most.
    bound = 0.2 if scopes == "zeropp" else 2e-3
    assert (ours - expected).norm() <= bound * expected.norm()


# ---- errors that are fed back


def summed_error(adapter: Adapter, strategy: Strategy, how: str) -> dict[str, float]:
    """In a worker: how far the sum of a head's gradients is from that of the exact ones, if heads take turns.

    Args:
        how: Whether other heads are ``"frozen"``, or just ``"idle"``, in units of their own or in one.
    """
    model, exact = make_heads(), make_heads()
    if how == "idle in units":
        for i, head in enumerate(model.heads):
            model.heads[i] = adapter.wrap(head, strategy)
    model = adapter.wrap(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sums, exact_sums = ({original_name(name): 0.0 for name, _ in exact.named_parameters()} for _ in range(2))
    for step in range(16):
        used = [step % HEADS]
        if how == "frozen":
            train_only(model, used)
        model(inputs(step), used).backward()
        exact(inputs(step), used).backward()
        for name, gradient in adapter.full_gradients(model).items():
            sums[name] = sums[name] + gradient
        for name, parameter in exact.named_parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                exact_sums[name] = exact_sums[name] + parameter.grad.cpu() / dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        exact.zero_grad()
    return {name: float((sums[name] - s).norm() / s.norm()) for name, s in exact_sums.items()}


FEEDBACK = {"fp32 errors": LoCo(beta=0.0), "int8 errors": LoCo(beta=0.0, dtype=Int8(128))}


@over_pairs(rest=False, adapter=ADAPTERS, scopes=("IGG", "IIG", "III", "NNN"), config=FEEDBACK, how=("frozen", "idle"))
def test_errors_wait_for_their_parameters(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, config: LoCo, how: str
) -> None:
    make = partial(Strategy, scopes, gradients=Int4(128), intra_gradients=Int8(128), gpus_per_node=2)
    ours = pool(4).run(summed_error, adapter, make(error_feedback=config), how)[0]
    without = pool(4).run(summed_error, adapter, make(), how)[0]
    for name, error in ours.items():
        # The last of four errors is left out, instead of the sum of all.
        assert error <= 0.6 * without[name], name


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_a_head_that_is_frozen_meanwhile_is_like_one_in_a_unit_of_its_own(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    strategy = Strategy("IGG", gradients=Int4(128), error_feedback=LoCo(beta=0.0), gpus_per_node=2)
    together, apart = (pool(4).run(summed_error, adapter, strategy, how)[0] for how in ("frozen", "idle in units"))
    assert together == pytest.approx(apart, rel=1e-3)
