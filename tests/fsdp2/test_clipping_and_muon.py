"""Gradients that are sharded over meshes: clipping over several, and Muon on whole matrices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Case, Fsdp1, Fsdp2
from harness.benchmarks import load
from harness.covering import over_each
from harness.messages import Refusal, Reply, assert_refused, attempt
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import Strategy, clip_grad_norm_, fully_shard

FSDP2 = Fsdp2()

# ---- clipping by the norm of gradients over different meshes, which torch refuses

TOLERANCE = 1e-6
"""The relative tolerance of norms and gradients: sums of the same fp32 values in another order."""
MOST = 1e-4
"""The norm that gradients are clipped to."""


def shard(net: models.Net, levels: list[str | None]) -> models.Net:
    """Shard each block, and the rest, by strategies of their own; None is torch's own ``fully_shard``."""
    for module, letters in zip([*net.blocks, net], levels, strict=True):
        FSDP2.apply(module, STOCK if letters is None else Strategy(letters, gpus_per_node=2))
    return net


def differences(norm: float, clipped: dict[str, Tensor], before: list[dict[str, Tensor]], norm_type: float) -> float:
    """How far a norm and clipped gradients are from their definition, given gradients before: these, then others."""
    expected = float(torch.cat([g.flatten().cpu() for each in before for g in each.values()]).norm(norm_type))
    scaled = {name: gradient * (MOST / (expected + 1e-6)) for name, gradient in before[0].items()}
    return max(abs(norm / expected - 1), models.distance(clipped, scaled))


def differences_of_parts(levels: list[str | None], norm_type: float) -> tuple[float, float]:
    """In a worker: how far clipping of parts with scopes of their own is from its definition; and the norm."""
    net = shard(models.make_net(hidden=3), levels)  # with three rows for four ranks one has nothing of a parameter
    models.loss_of(net, models.batch(0, 0)).backward()
    before = FSDP2.full_gradients(net)
    norm = float(clip_grad_norm_(net.parameters(), MOST, norm_type, foreach=None if norm_type == 2.0 else False))
    return differences(norm, FSDP2.full_gradients(net), [before], norm_type), norm


@over_each(
    rest=False,
    norm_type=[2.0, 3.0, math.inf],
    levels={"several": ["III", "NNN", "GGG"], "one": ["GGG"] * 3, "torch": ["III", None, None]},
)
def test_norm_is_that_of_one_mesh(pool: Callable[[int], Pool], levels: list[str | None], norm_type: float) -> None:
    found, norms = zip(*pool(4).run(differences_of_parts, levels, norm_type), strict=True)
    assert max(found) <= TOLERANCE
    assert len(set(norms)) == 1


class Block(nn.Module):
    """Linears that tensor parallelism splits, and a norm of which each of its ranks has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def sharded_beside(axis: str, levels: str) -> tuple[nn.Module, DeviceMesh | None]:
    """In a worker: a block after a backward, split along another axis, too; and the mesh of stages, if it is one."""
    names, sizes = {"tp": (("dp", "tp"), (2, 2)), "ep": (("efsdp", "ep"), (2, 2)), "pp": (("pp", "dp"), (2, 2))}[axis]
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=names)
    torch.manual_seed(mesh["pp"].get_local_rank() if axis == "pp" else 0)
    block: Any = Block().to(models.device())
    if axis == "tp":
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if axis == "ep":
        experts = distribute_tensor(torch.randn(4, 6, 6, device=models.device()), mesh["ep"], [Shard(0)])
        block.experts = nn.ParameterList([nn.Parameter(experts)])
        fully_shard(block.experts, mesh=mesh["efsdp"], strategy=Strategy(levels, gpus_per_node=1))
        fully_shard(block, mesh=mesh["efsdp", "ep"]._flatten(), strategy=Strategy("GGG", gpus_per_node=2))
    else:
        fully_shard(block, mesh=mesh["dp"], strategy=Strategy(levels, gpus_per_node=mesh["dp"].size() // 2))
    torch.manual_seed(dist.get_rank() // 2 if axis == "tp" else dist.get_rank())
    loss = block(torch.randn(4, 6, device=models.device())).square().mean()
    if axis == "ep":
        block.experts.unshard()  # which has no forward of its own
        loss = loss + block.experts[0].to_local().sin().sum()
    loss.backward()
    return block, mesh["pp"] if axis == "pp" else None


def differences_beside(axis: str, levels: str, norm_type: float) -> float:
    """In a worker: how far clipping of what is split along another axis, too, is from its definition."""
    block, stages = sharded_beside(axis, levels)
    before: list[Any] = [{name: gradient.clone() for name, gradient in whole_gradients(block).items()}]
    assert len(before[0]) == 6 + (axis == "ep")
    if stages is not None:
        of_stages: list[Any] = [None] * 2
        dist.all_gather_object(of_stages, before[0], group=stages.get_group())
        before.append(of_stages[1 - stages.get_local_rank()])
    norm = float(clip_grad_norm_(block.parameters(), MOST, norm_type, pp_mesh=stages))
    return differences(norm, whole_gradients(block), before, norm_type)


def whole_gradients(block: nn.Module) -> dict[str, Tensor]:
    gradients: dict[str, Any] = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {name: gradient.full_tensor() for name, gradient in gradients.items()}


@pytest.mark.parametrize(
    ("axis", "levels", "norm_type"),
    [("tp", "III", 2.0), ("ep", "III", 2.0), ("pp", "GGG", 2.0), ("pp", "III", math.inf)],
)
def test_norm_counts_copies_once_and_what_is_elsewhere_too(
    pool: Callable[[int], Pool], axis: str, levels: str, norm_type: float
) -> None:
    assert max(pool(4).run(differences_beside, axis, levels, norm_type)) <= TOLERANCE


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


def error_of_a_nan() -> None:
    """In a worker: clipping raises if one rank has a gradient that is not a number."""
    net = shard(models.make_net(), ["III", "GGG", "GGG"])
    models.loss_of(net, models.batch(0, 0)).backward()
    if dist.get_rank() == 1:
        gradient: Any = net.head.weight.grad
        gradient.to_local().fill_(math.nan)
    for norm_type, norm in ((2.0, "nan"), (math.inf, "inf")):
        with pytest.raises(RuntimeError, match=f"the norm of the gradients is {norm}, so they can't be clipped"):
            clip_grad_norm_(net.parameters(), 1.0, norm_type, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_raises_on_every_rank(pool: Callable[[int], Pool]) -> None:
    pool(4).run(error_of_a_nan)


def flattened() -> None:
    clip_grad_norm_(Fsdp1().make(Case(), STOCK).parameters(), 1.0)


REFUSALS: dict[str, Refusal] = {
    "negative": (lambda: clip_grad_norm_([], 1.0, -1.0), ValueError, "norm_type must be above 0, got -1.0"),
    "fsdp1": (flattened, ValueError, "call model.clip_grad_norm_(max_norm) of the outermost"),
}


def attempts() -> dict[str, Reply]:
    """In a worker: how each call is refused."""
    return {name: attempt(refusal) for name, refusal in REFUSALS.items()}


def test_what_has_no_norm_is_refused(pool: Callable[[int], Pool]) -> None:
    replies = pool(4).run(attempts)
    for name, refusal in REFUSALS.items():
        assert_refused([of_rank[name] for of_rank in replies], refusal)


def clipped_by_torch(inner: str, outer: str | None) -> list[str]:
    """In a worker: what torch's clipping says of a block and the rest of a net with other scopes, or with torch's.

    It is given a generator of parameters, and a list.
    """
    net = models.make_net()
    fully_shard(net.blocks[0], strategy=Strategy(inner, gpus_per_node=2))
    torch_fully_shard(net) if outer is None else fully_shard(net, strategy=Strategy(outer, gpus_per_node=2))
    models.loss_of(net, models.batch(0, 0)).backward()
    said = []
    for parameters in (net.parameters(), list(net.parameters())):
        try:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("inner", "outer", "named"), [("III", "NNN", True), ("III", None, True), ("IGG", "NGG", False)]
)
def test_torch_names_the_remedy(pool: Callable[[int], Pool], inner: str, outer: str | None, named: bool) -> None:
    for said in chain(*pool(4).run(clipped_by_torch, inner, outer)):
        assert bool(said) == named
        assert ("fsdp_zpp.clip_grad_norm_" in said) == named, said


# ---- Muon, torch's and the one of the guide, on shards of every scope

sent_bytes = load("common", "sent_bytes")
STEPS = 2
Muon = Callable[..., torch.optim.Optimizer]


def whole_muon(matrices: Any, **arguments: Any) -> torch.optim.Optimizer:
    """Make the optimizer of the guide."""
    optimizer: torch.optim.Optimizer = load("common", "guides_muon").whole_muon(matrices, **arguments)
    return optimizer


def step_all(net: nn.Module, rows: int, muon: Muon) -> Callable[[], Counter[str]]:
    """Return the step of two optimizers, Muon for the matrices of blocks, which returns its collectives by hop."""
    matrices = [p for name, p in net.named_parameters() if "blocks" in name and p.ndim == 2]
    assert {p.shape[0] for p in matrices} == {rows, 22}
    others = [p for name, p in net.named_parameters() if "blocks" not in name or p.ndim != 2]
    optimizers = muon(matrices, lr=0.02), torch.optim.SGD(others, lr=0.1)

    def step() -> Counter[str]:
        with sent_bytes.DTensorCollectives(2) as collectives:
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return Counter(collective.hop for collective in collectives.made)

    return step


@cache
def trained_alone(rows: int) -> dict[str, Tensor]:
    """Train with torch's Muon on this rank alone, on the batches of all ranks."""
    net, world = models.make_net(hidden=rows), dist.get_world_size()
    step = step_all(net, rows, torch.optim.Muon)
    for index in range(STEPS):
        for rank in range(world):
            (models.loss_of(net, models.batch(index, 0, rank)) / world).backward()
        step()
    return {name: parameter.detach().cpu() for name, parameter in net.named_parameters()}


def compared_to_one_rank(levels: str, rows: int, muon: Muon) -> tuple[float, Counter[str]]:
    """In a worker: how far training in a scope is from that on one rank, and the collectives of the last step.

    Muon iterates in fp32, not in bf16, where a rounding error of a gradient becomes one of 2^-8.
    """
    with patch.object(Tensor, "bfloat16", lambda self: self.clone()):
        net = FSDP2.make(Case(model=(("hidden", rows),)), Strategy(levels, gpus_per_node=2))
        step, hops = step_all(net, rows, muon), Counter[str]()
        for index in range(STEPS):
            models.loss_of(net, models.batch(index, 0)).backward()
            hops = step()
        return models.distance(FSDP2.full_weights(net), trained_alone(rows)), hops


@pytest.mark.parametrize(
    ("muon", "levels", "rows"),
    [
        pytest.param(torch.optim.Muon, "IGG", 37, id="rows that do not divide by four"),
        pytest.param(whole_muon, "GGG", 3, id="fewer rows than ranks"),
        pytest.param(whole_muon, "III", 32, id="inside nodes"),
    ],
)
def test_muon_trains_as_torchs_on_one_rank_and_keeps_to_the_hop_of_its_shards(
    pool: Callable[[int], Pool], muon: Muon, levels: str, rows: int
) -> None:
    hop = "intra" if levels == "III" else "inter"
    for distance, hops in pool(4).run(compared_to_one_rank, levels, rows, muon):
        assert distance <= 1e-5
        assert set(hops) == {hop}
        if muon is whole_muon:
            assert hops[hop] == 4  # once a matrix
