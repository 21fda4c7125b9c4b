"""Clipping by the norm of gradients that are sharded over different meshes, which torch refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Case
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.messages import Refusal, Reply, assert_refused, attempt as attempt_call
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import Strategy, clip_grad_norm_, fully_shard

NORMS = [2.0, 1.0, 3.0, math.inf]
TOLERANCE = 1e-6
"""Of norms and gradients, relative: sums of the same fp32 values in another order."""
over_norms = pytest.mark.parametrize("norm_type", NORMS)


def shard(net: models.Net, levels: list[str | None]) -> models.Net:
    """Shard each block, and the rest, by strategies of their own; None is torch's own ``fully_shard``."""
    for module, letters in zip([*net.blocks, net], levels, strict=True):
        Fsdp2().apply(module, STOCK if letters is None else Strategy(letters, gpus_per_node=2))
    return net


def norm_and_gradients(net: Any, clip: Callable[..., Tensor], **arguments: Any) -> tuple[float, dict[str, Tensor]]:
    """Make a backward and clip; return the norm before that, and all gradients."""
    models.loss_of(net, models.batch(0, 0)).backward()
    norm: Any = clip(net.parameters(), 0.1, **arguments)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm), Fsdp2().full_gradients(net)


def differences(ours: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> float:
    return max(abs(ours[0] / expected[0] - 1), models.distance(ours[1], expected[1]))


def difference_from_torch(levels: list[str | None], norm_type: float, foreach: bool | None) -> tuple[float, float]:
    """In a worker: how far our clipping of different parts is from torch's of one mesh; and the norm."""
    # With three rows for four ranks one has nothing of a parameter, of which torch has no largest value.
    sizes = {} if math.isinf(norm_type) else {"hidden": 3}
    arguments = {"norm_type": norm_type, "foreach": foreach}
    net = shard(models.make_net(**sizes), levels)
    expected = shard(models.make_net(**sizes), [None] * 4)
    ours = norm_and_gradients(net, clip_grad_norm_, **arguments)
    return differences(ours, norm_and_gradients(expected, torch.nn.utils.clip_grad_norm_, **arguments)), ours[0]


@over_norms
@pytest.mark.parametrize(
    "levels", [["GGG"] * 4, ["III", "IGG", "NNN", "GGG"], ["III", None, None, None]], ids=["one", "several", "torch"]
)
def test_norm_is_that_of_one_mesh(pool: Callable[[int], Pool], levels: list[str | None], norm_type: float) -> None:
    foreach = None if norm_type == 2.0 else False
    found, norms = zip(*pool(4).run(difference_from_torch, levels, norm_type, foreach), strict=True)
    assert max(found) <= TOLERANCE
    assert len(set(norms)) == 1


def largest_of_uneven_shards() -> float:
    """In a worker: the same for the largest value where some ranks have nothing of a parameter."""
    net = shard(models.make_net(hidden=3), ["III", "GGG", "GGG", "GGG"])
    norm, _ = norm_and_gradients(net, clip_grad_norm_, norm_type=math.inf)
    whole = shard(models.make_net(hidden=3), [None] * 4)
    models.loss_of(whole, models.batch(0, 0)).backward()
    return norm - max(float(gradient.abs().max()) for gradient in Fsdp2().full_gradients(whole).values())


def test_largest_value_takes_ranks_that_hold_nothing(pool: Callable[[int], Pool]) -> None:
    assert max(map(abs, pool(4).run(largest_of_uneven_shards))) <= TOLERANCE


class Block(nn.Module):
    """Linears that tensor parallelism splits, and a norm of which each of its ranks has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks(ranks: range, part: Callable[[nn.Sequential, Any], nn.Module], clip: Callable[..., Tensor]) -> Any:
    """Train two blocks a little on the batches of ``ranks``; return the norm and the gradients of ``part`` of them."""
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block()).to(models.device())
    shown = part(net, clip)
    for rank in ranks:
        torch.manual_seed(rank)
        (net(torch.randn(4, 6).to(models.device())).square().mean() / len(ranks)).backward()
    norm = clip(shown.parameters())
    return float(norm), {name: p.grad for name, p in shown.named_parameters()}


def beside_tensor_parallelism(levels: str, norm_type: float) -> float:
    """In a worker: how far clipping is from that of a net on one rank, if tensor parallelism splits some parameters."""
    mesh = init_device_mesh(device_type(), (4, 2), mesh_dim_names=("dp", "tp"))
    strategy = Strategy(levels, gpus_per_node=2)

    def sharded(net: nn.Sequential, clip: object) -> nn.Module:
        for block in net:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, strategy=strategy, mesh=mesh["dp"])
        return fully_shard(net, strategy=strategy, mesh=mesh["dp"])

    dp = mesh["dp"].get_local_rank()
    norm, gradients = blocks(range(dp, dp + 1), sharded, partial(clip_grad_norm_, max_norm=0.1, norm_type=norm_type))
    expected = blocks(
        range(4), lambda net, _: net, partial(torch.nn.utils.clip_grad_norm_, max_norm=0.1, norm_type=norm_type)
    )
    return differences((norm, {name: g.full_tensor() for name, g in gradients.items()}), expected)


@pytest.mark.parametrize(("levels", "norm_type"), [("IGG", 2.0), ("III", 2.0), ("NNN", math.inf), ("III", 1.0)])
def test_copies_beside_tensor_parallelism_count_once(
    pool: Callable[[int], Pool], levels: str, norm_type: float
) -> None:
    assert max(pool(8).run(beside_tensor_parallelism, levels, norm_type)) <= 1e-5  # through sums of split products


def beside_experts(levels: str) -> tuple[float, float]:
    """In a worker: the norm of a mixture whose experts are on a mesh of their own, and what it is by definition."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(0)
    block = Block().to(models.device())
    experts = distribute_tensor(torch.randn(4, 6, 6, device=models.device()), mesh["ep"], [Shard(0)])
    block.experts = nn.ParameterList([nn.Parameter(experts)])
    fully_shard(block.experts, mesh=mesh["efsdp"], strategy=Strategy(levels, gpus_per_node=1))
    fully_shard(block, mesh=mesh["efsdp", "ep"]._flatten(), strategy=Strategy("GGG", gpus_per_node=2))
    torch.manual_seed(dist.get_rank())
    output = block(torch.randn(4, 6, device=models.device()))
    block.experts.unshard()  # which has no forward of its own
    (output.square().mean() + block.experts[0].to_local().sin().sum()).backward()
    whole = [parameter.grad.full_tensor() for parameter in block.parameters() if parameter.grad is not None]
    assert len(whole) == 7
    return float(clip_grad_norm_(block.parameters(), 1.0)), math.sqrt(sum(float(g.square().sum()) for g in whole))


@pytest.mark.parametrize("levels", ["GGG", "III"])
def test_experts_of_all_ranks_count_once(pool: Callable[[int], Pool], levels: str) -> None:
    for norm, expected in pool(4).run(beside_experts, levels):
        assert norm == pytest.approx(expected, rel=TOLERANCE)


def over_stages(norm_type: float) -> float:
    """In a worker: the same, if a rank has one of two stages of the net."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))

    def of_stage(net: nn.Sequential, clip: object) -> nn.Module:
        for index, block in enumerate(net):  # both are there to compute with, and a rank clips one
            fully_shard(block, strategy=Strategy("III" if index else "GGG", gpus_per_node=1), mesh=mesh["dp"])
        return net[mesh["pp"].get_local_rank()]

    dp = mesh["dp"].get_local_rank()
    clip = partial(clip_grad_norm_, max_norm=0.1, norm_type=norm_type, pp_mesh=mesh["pp"])
    norm, gradients = blocks(range(dp, dp + 1), of_stage, clip)
    whole, expected = blocks(
        range(2), lambda net, _: net, partial(torch.nn.utils.clip_grad_norm_, max_norm=0.1, norm_type=norm_type)
    )
    own = {name: expected[f"{mesh['pp'].get_local_rank()}.{name}"] for name in gradients}
    return differences((norm, {name: gradient.full_tensor() for name, gradient in gradients.items()}), (whole, own))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norm_is_over_all_stages_of_a_pipeline(pool: Callable[[int], Pool], norm_type: float) -> None:
    assert max(pool(4).run(over_stages, norm_type)) <= TOLERANCE


def of_unreduced_and_plain_gradients() -> tuple[float, list[float]]:
    """In a worker: clip a parameter whose gradient is left to be summed, one that has none here, and plain ones."""
    mesh = init_device_mesh(device_type(), (4,))
    ones = torch.ones(4, device=models.device())
    summed, sometimes = (nn.Parameter(distribute_tensor(ones, mesh, [Shard(0)])) for _ in range(2))
    plain = nn.Parameter(ones.clone())
    summed.grad = DTensor.from_local(ones, mesh, [Partial()])  # fours, of which a rank has one
    if dist.get_rank() == 0:
        sometimes.grad = DTensor.from_local(6 * ones[:1], mesh, [Shard(0)], shape=ones.shape, stride=ones.stride())
    plain.grad = 3 * ones
    norm = clip_grad_norm_([summed, plain, sometimes], 1.0)
    return float(norm), [float(plain.grad[0]), float(summed.grad.to_local()[0])]


def test_gradients_may_be_unreduced_missing_or_plain(pool: Callable[[int], Pool]) -> None:
    norm = math.sqrt(4 * 16 + 4 * 9 + 36)
    for found, gradients in pool(4).run(of_unreduced_and_plain_gradients):
        assert found == pytest.approx(norm)
        assert gradients == pytest.approx([3 / norm, 1 / norm])


def test_no_gradients_have_a_norm_of_zero() -> None:
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0) == 0


def error_of_a_nan(norm_type: float) -> str:
    """In a worker: what clipping says if one rank has a gradient that is not a number."""
    net = shard(models.make_net(), ["III", "GGG", "GGG", "GGG"])
    models.loss_of(net, models.batch(0, 0)).backward()
    if dist.get_rank() == 1:
        gradient: Any = net.head.weight.grad
        gradient.to_local().fill_(math.nan)
    with pytest.raises(RuntimeError) as caught:
        clip_grad_norm_(net.parameters(), 1.0, norm_type, error_if_nonfinite=True)
    return str(caught.value)


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, "nan"), (math.inf, "inf")])
def test_a_norm_that_is_not_finite_raises_on_every_rank(
    pool: Callable[[int], Pool], norm_type: float, norm: str
) -> None:
    for said in pool(4).run(error_of_a_nan, norm_type):
        assert f"the norm of the gradients is {norm}, so they can't be clipped" in said


def flattened() -> None:
    clip_grad_norm_(Fsdp1().make(Case(), STOCK).parameters(), 1.0)


REFUSED: dict[str, Refusal] = {
    "negative": (lambda: clip_grad_norm_([], 1.0, -1.0), ValueError, "norm_type must be above 0, got -1.0"),
    "fsdp1": (flattened, ValueError, "call model.clip_grad_norm_(max_norm) of the outermost"),
}


def attempt(name: str) -> Reply:
    """In a worker: how one call is refused."""
    return attempt_call(REFUSED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_norm_is_refused(pool: Callable[[int], Pool], name: str) -> None:
    assert_refused(pool(4).run(attempt, name), REFUSED[name])


def clipped_by_torch(inner: str, outer: str | None, as_generator: bool) -> str:
    """In a worker: what torch's clipping says of a block and the rest of a net with other scopes, or with torch's."""
    net = models.make_net()
    fully_shard(net.blocks[0], strategy=Strategy(inner, gpus_per_node=2))
    torch_fully_shard(net) if outer is None else fully_shard(net, strategy=Strategy(outer, gpus_per_node=2))
    models.loss_of(net, models.batch(0, 0)).backward()
    try:
        torch.nn.utils.clip_grad_norm_(net.parameters() if as_generator else list(net.parameters()), 1.0)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("inner", "outer", "named"),
    [
        ("III", "NNN", ["Strategy(levels='III', gpus_per_node=2)", "Strategy(levels='NNN', gpus_per_node=2)"]),
        ("III", None, ["Strategy(levels='III', gpus_per_node=2)", "torch's own fully_shard"]),
        ("IGG", "NGG", []),
    ],
)
@pytest.mark.parametrize("as_generator", [True, False])
def test_torch_names_the_strategies_and_the_remedy(
    pool: Callable[[int], Pool], inner: str, outer: str | None, named: list[str], as_generator: bool
) -> None:
    for said in pool(4).run(clipped_by_torch, inner, outer, as_generator):
        assert bool(said) == bool(named)
        assert all(name in said for name in [*named, "fsdp_zpp.clip_grad_norm_" if named else ""]), said
