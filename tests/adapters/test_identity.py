"""Sums of micro-batches and errors outlive a backward, and belong to parameters, whatever is trained meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Fsdp2, original_name
from harness.covering import ADAPTERS, over_each
from harness.links import late_hops
from harness.pool import Pools
from harness.training import without_gradient
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_zpp import CodecState, Int4, Int8, LoCo, Strategy

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


@over_each(rest=False, scopes=SCOPES, change=list(CHANGES))
def test_gradients_stay_with_their_parameters(pool: Pools, scopes: str, change: str) -> None:
    expected = pool(4).once(accumulated, Fsdp2(), STOCK, change)
    found = pool(4).run(accumulated, Fsdp2(), Strategy(scopes, gpus_per_node=2), change)
    for ours, stock in zip(found, expected, strict=True):
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
    rest=False,
    scopes=[*SCOPES, "zeropp"],
    how=[(torch.float16, None), (None, 10.0), (torch.float16, 10.0), (torch.float32, None)],
)
def test_earlier_micro_batches_are_divided_like_the_last(
    pool: Pools, scopes: str, how: tuple[torch.dtype | None, float | None]
) -> None:
    strategy = Strategy.zeropp(gpus_per_node=2) if scopes == "zeropp" else Strategy(scopes, gpus_per_node=2)
    expected = pool(4).once(divided, STOCK, *how)[0]
    ours = pool(4).run(divided, strategy, *how)[0]
    # fp16 has 11 bits; a code of Int8 and one of Int4 are half a step off at most.
    bound = 0.2 if scopes == "zeropp" else 2e-3
    assert (ours - expected).norm() <= bound * expected.norm()


# ---- errors that are fed back


def mean_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Means over ranks of what an unsharded model has accumulated."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
    return {name: parameter.grad.cpu() / dist.get_world_size() for name, parameter in model.named_parameters()}


IN_TURN = {
    "fp32 errors": LoCo(beta=0.0),
    "int8 errors": LoCo(beta=0.0, dtype=Int8(128)),
    "both hops": LoCo(beta=0.0, hops="both"),
}
FREE = tuple(f"heads.{i}.weight" for i in range(HEADS))
STEPS = 45


def head_of(step: int, how: str) -> int:
    """The head that this rank uses, another one in each step; the last rank may be a head ahead."""
    return (step + (how == "one ahead" and dist.get_rank() == 3)) % 3


def forward_in_turn(model: nn.Module, step: int, how: str) -> Tensor:
    """Use the head of a step; where the others are frozen, they take part in the forward."""
    head = head_of(step, how)
    if how == "frozen":
        train_only(model, [head], trunk=False)
    loss: Tensor = model(inputs(step), range(3) if how == "frozen" else [head])
    return loss


def in_turn(adapter: Adapter, strategy: Any, how: str) -> tuple[dict[str, Tensor], list[frozenset[str]]]:
    """In a worker: summed gradients, and which parameters had none in each step."""
    model, sums, without = adapter.wrap(make_heads(), strategy), {}, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(STEPS):
        forward_in_turn(model, step, how).backward()
        gradients = adapter.full_gradients(model)
        without.append(without_gradient(model))
        for name, gradient in gradients.items():
            sums[name] = sums.get(name, 0.0) + gradient
            used = {f"heads.{(step + each) % 3}.weight" for each in ((0, 1) if how == "one ahead" else (0,))}
            assert name in used or name not in FREE or not gradient.any(), f"{name} got a gradient in step {step}"
        optimizer.step()
        optimizer.zero_grad()
    return sums, without


def exact_in_turn(how: str) -> dict[str, Tensor]:
    """In a worker: the means over ranks of the gradients that ``in_turn`` sums."""
    model = make_heads()
    for step in range(STEPS):
        forward_in_turn(model, step, how).backward()
    return mean_gradients(model)


TURNS = {f"{adapter}-{how}": (adapter, how) for how in ("idle", "one ahead", "frozen") for adapter in ADAPTERS}
"""Uses of heads in turn: the others are used but frozen, or just idle, or are one ahead on some ranks."""


@over_each(rest=False, scopes=["GGG", "IIG", "III", "NNG", "NNN"], turns=TURNS, config=IN_TURN)
def test_heads_in_turn_get_all_of_their_gradients_and_no_others(
    pool: Pools, scopes: str, turns: tuple[Adapter, str], config: LoCo
) -> None:
    """Errors of a head wait until any rank uses it again; in between it has no gradient, as in stock."""
    adapter, how = turns
    codecs = {"gradients": Int4(2048), "intra_gradients": Int8(128) if config.hops == "both" else None}
    strategy = Strategy(scopes, error_feedback=config, gpus_per_node=2, **codecs)
    exact = pool(4).once(exact_in_turn, how)[0]
    ours, without = pool(4).run(in_turn, adapter, strategy, how)[0]
    for name in ours:
        assert (ours[name] - exact[name]).norm() <= 0.08 * exact[name].norm() + 1e-7, name
    if how != "one ahead":
        assert without == pool(4).once(in_turn, adapter, STOCK, how)[0][1]
    elif adapter.torch_name == "fully_shard":  # a flat parameter has one gradient for all
        assert without == [frozenset({f"heads.{(step + 2) % 3}.weight", "heads.3.weight"}) for step in range(STEPS)]


def resumed_in_turn(adapter: Adapter, strategy: Strategy) -> None:
    """In a worker: errors of heads that are frozen at the moment are in codec state."""

    def gradients(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[dict[str, Tensor]]:
        found = []
        for step in steps:
            train_only(model, [step % 3])
            model(inputs(step), [step % 3]).backward()
            found.append(adapter.full_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

    models_and_optimizers = []
    for _ in range(2):
        model = adapter.wrap(make_heads(), strategy)
        models_and_optimizers.append((model, torch.optim.SGD(model.parameters(), lr=0.0)))
    first, second = models_and_optimizers
    gradients(*first, range(5))
    CodecState(second[0]).load_state_dict(CodecState(first[0]).state_dict())
    for expected, ours in zip(*(gradients(*each, range(5, 9)) for each in (first, second)), strict=True):
        assert models.distance(ours, expected) == 0


@over_each(rest=False, adapter=ADAPTERS, scopes=("IIG", "III"))
def test_errors_of_what_is_frozen_are_saved(pool: Pools, adapter: Adapter, scopes: str) -> None:
    pool(4).run(
        resumed_in_turn, adapter, Strategy(scopes, gradients=Int4(128), error_feedback=LoCo(beta=0.0), gpus_per_node=2)
    )


def with_a_small_unit(adapter: Adapter, strategy: Strategy, of_held: bool) -> dict[str, Tensor]:
    """In a worker: weights of a net with a unit of one row, of which some ranks hold nothing."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False)).to(models.device())
    net[1] = adapter.wrap(net[1], strategy)
    model = adapter.wrap(net, strategy)
    held = [p for p in model.parameters() if adapter.local(p).numel() or not of_held]
    optimizer = torch.optim.SGD(held, lr=0.5)
    for step in range(5):
        for _ in range(2):  # a backward is not a step
            model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapter.full_weights(model)


@over_each(rest=False, adapter=ADAPTERS, scopes=("GGG", "IIG"))
def test_an_optimizer_may_leave_out_what_its_rank_does_not_hold(pool: Pools, adapter: Adapter, scopes: str) -> None:
    """Errors of its gradient are fed back all the same."""
    strategy = Strategy(scopes, gradients=Int4(128), error_feedback=LoCo(reset_every=3), gpus_per_node=2)
    ours, expected = (pool(4).run(with_a_small_unit, adapter, strategy, of_held)[0] for of_held in (True, False))
    assert models.distance(ours, expected) == 0
