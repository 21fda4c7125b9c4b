"""Experts on a mesh of their own, or with a strategy of their own, beside dense weights in one ``fully_shard`` call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.messages import Refusal, assert_refused, attempt
from harness.pool import Pool, device_type
from mixtures import STEPS, WIDTH, batch, by, make, mesh_of, on_experts_mesh, train, weights_of, wrapped
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from fsdp_zpp import CodecState, Int4, Int4Delta, Int8, LoCo, Strategy, fully_shard, quantize_frozen_params, traffic
from fsdp_zpp.runtime.unit import StrategyUnit, named_units

TWO: dict[str, Any] = {"gpus_per_node": 2}

pytestmark = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has no mesh for a parameter"
)


@cache
def losses_and_weights_of_stock(layout: str | None) -> tuple[list[float], list[Tensor]]:
    """In a worker: losses under torch's own ``fully_shard``, and the weights after them."""
    net = wrapped(fsdp.fully_shard, layout)
    return train(net), [weight.detach() for weight in weights_of(net)]


def losses_and_distance(strategy: Strategy, layout: str | None) -> tuple[list[float], list[float], float]:
    """In a worker: losses under a strategy and under torch's own ``fully_shard``, and how far weights are apart."""
    expected, stock = losses_and_weights_of_stock(layout)
    net = wrapped(by(strategy), layout)
    losses = train(net)
    pairs = zip(weights_of(net), stock, strict=True)
    return losses, expected, max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("levels", ["GGG", "IGG", "IIG", "III", "NNG", "NNN"])
@pytest.mark.parametrize("layout", ["across", "within"])
def test_experts_on_a_mesh_of_their_own_train_as_with_torch(
    pool: Callable[[int], Pool], levels: str, layout: str
) -> None:
    for losses, expected, distance in pool(4).run(losses_and_distance, Strategy(levels, **TWO), layout):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert distance <= 1e-5


CODED = [
    Strategy.zeropp(**TWO),
    Strategy.zeropp(weights=Int4Delta(), **TWO),
    Strategy.loco(**TWO),
    Strategy("III", gradients=Int4(), error_feedback=LoCo(), **TWO),
    Strategy("NNG", weights=Int8(64), gradients=Int4(32), **TWO),
    Strategy.zeropp(overrides={"Experts": Strategy.zeropp(weights=Int4Delta())}, **TWO),
]


@pytest.mark.parametrize("strategy", CODED, ids=range(len(CODED)))
def test_codecs_encode_experts_too(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    for losses, expected, distance in pool(4).run(losses_and_distance, strategy, "across"):
        assert losses == pytest.approx(expected, rel=2e-2)
        assert distance > 1e-5


OVERRIDDEN = [
    Strategy("IGG", overrides={"Experts": Strategy("III")}, **TWO),
    Strategy("III", overrides={"Exp*": Strategy("GGG"), "*": Strategy("NNN")}, **TWO),
    Strategy("GGG", overrides={"Experts": Strategy("IGG"), "LayerNorm": Strategy("NNG")}, **TWO),
    Strategy("NNN", overrides={"Mixture": Strategy("IIG"), "Experts": Strategy("GGG", gpus_per_node=1)}, **TWO),
]


@pytest.mark.parametrize("strategy", OVERRIDDEN, ids=range(len(OVERRIDDEN)))
@pytest.mark.parametrize("layout", ["across", None])
def test_overrides_shard_by_other_scopes(pool: Callable[[int], Pool], strategy: Strategy, layout: str | None) -> None:
    for losses, expected, distance in pool(4).run(losses_and_distance, strategy, layout):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert distance <= 1e-5


def clipped_norms(strategy: Strategy) -> tuple[float, float]:
    """In a worker: the norm of all gradients that torch clips, by a strategy and by torch's own ``fully_shard``."""
    norms = []
    for wrap in (by(strategy), fsdp.fully_shard):
        net = wrapped(wrap, None)
        net(batch(0, 0)).square().mean().backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        norms.append(norm.full_tensor().item())
    return norms[0], norms[1]


@pytest.mark.parametrize("optimizer", ["G", "I"])
def test_torch_clips_parts_of_one_mesh_together(pool: Callable[[int], Pool], optimizer: str) -> None:
    strategy = Strategy(f"II{optimizer}", overrides={"Experts": Strategy(f"NI{optimizer}")}, **TWO)
    for ours, stock in pool(4).run(clipped_norms, strategy):
        assert ours == pytest.approx(stock, rel=1e-5)


def sent_between_nodes(levels: str) -> tuple[int, int]:
    """In a worker: bytes that were gathered between nodes, and what they should be: each weight once a step."""
    net = wrapped(by(Strategy(levels, **TWO)), "across")
    train(net)
    # Experts are on one rank of each node, and of dense weights each node has a half, in rows that are filled up.
    expected = sum(p.to_local().numel() for name, p in net.named_parameters() if ".experts." in name)
    for name, p in net.named_parameters():
        if ".experts." not in name:
            expected += -(-p.shape[0] // 4) * p[:1].numel()
    return traffic(net)["gather"]["inter"], STEPS * expected * 4


def test_experts_cross_nodes_once_a_step(pool: Callable[[int], Pool]) -> None:
    for sent, expected in pool(4).run(sent_between_nodes, "IGG"):
        assert sent == expected


def resumed(strategy: Strategy) -> bool:
    """In a worker: whether a training goes on bit for bit with the codec state of all parts."""
    net = wrapped(by(strategy), "across")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, range(2), optimizer)
    weights, state = [p.detach().to_local().clone() for p in net.parameters()], CodecState(net).state_dict()
    expected = train(net, range(2, 4), optimizer)
    other = wrapped(by(strategy), "across")
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), weights, strict=True):
            parameter.to_local().copy_(value)
    CodecState(other).load_state_dict(state)
    return train(other, range(2, 4), torch.optim.SGD(other.parameters(), lr=0.1)) == expected


def test_codec_state_of_all_parts_is_saved(pool: Callable[[int], Pool]) -> None:
    strategy = Strategy.loco(weights=Int4Delta(), overrides={"Experts": Strategy.loco(gradients=Int4(32))}, **TWO)
    assert pool(4).run(resumed, strategy) == [True] * 4


def error_of_frozen_experts(strategy: Strategy) -> tuple[float, list[str]]:
    """In a worker: how far an output is off once experts are quantized, and which parameters are left."""
    mesh = mesh_of("across")
    net = make(mesh["ep"].get_local_rank())
    expected = net(batch(0, 0))
    for block in net:
        block.experts.requires_grad_(False)
        by(strategy)(block, shard_placement_fn=on_experts_mesh(block, mesh))
    by(strategy)(net)
    output = net(batch(0, 0))
    return float((output - expected).norm() / expected.norm()), [name for name, _ in net.named_parameters()]


def test_frozen_experts_are_quantized_over_their_mesh(pool: Callable[[int], Pool]) -> None:
    strategy = Strategy("IGG", frozen=Int8(64), **TWO)
    for error, names in pool(4).run(error_of_frozen_experts, strategy):
        assert 0 < error <= 0.01
        assert not any(".experts." in name for name in names)


def ranks_of_parameters(strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """In a worker: the ranks of parameters' meshes, each of which was given one made for it, without ``mesh=``."""
    mesh = mesh_of("across")
    everyone = mesh["efsdp", "ep"]._flatten("dp")

    def place(parameter: nn.Parameter) -> Any:
        own = mesh["efsdp"] if parameter.ndim == 3 else everyone
        return _fsdp_common.ShardPlacementResult(Shard(0), _fsdp_common.FSDPMeshInfo(own, shard_mesh_dim=0))

    net = make(mesh["ep"].get_local_rank())
    for block in net:
        by(strategy)(block, shard_placement_fn=place)
    parameters: dict[str, Any] = dict(net.named_parameters())
    return {name: tuple(dist.get_process_group_ranks(p.device_mesh.get_group())) for name, p in parameters.items()}


def test_each_parameter_is_sharded_over_the_mesh_that_it_was_given(pool: Callable[[int], Pool]) -> None:
    for rank, ranks in enumerate(pool(4).run(ranks_of_parameters, Strategy("IGG", **TWO))):
        for name, own in ranks.items():
            assert own == ((rank % 2, rank % 2 + 2) if ".experts." in name else (0, 1, 2, 3))


def levels_of_a_list(order: tuple[int, int]) -> list[str]:
    """In a worker: the scopes of the units of a norm and a linear layer that are gathered together."""
    parts: list[nn.Module] = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = nn.ModuleList(parts).to(models.device())
    strategy = Strategy("IGG", overrides={"LayerNorm": Strategy("GGG")}, **TWO)
    fully_shard([parts[place] for place in order], strategy=strategy)
    units = [unit for unit in named_units(model) if isinstance(unit, StrategyUnit)]
    assert all(unit.sharded.numel() for unit in units)
    return sorted(f"{unit.strategy.levels} {unit.sharded.numel()}" for unit in units)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_overrides_of_one_module_of_a_list_leave_the_others(
    pool: Callable[[int], Pool], order: tuple[int, int]
) -> None:
    for levels in pool(4).run(levels_of_a_list, order):
        assert [each.split()[0] for each in levels] == ["GGG", "IGG"]


def quantized_before() -> None:
    block, mesh = make(0)[0], mesh_of("across")
    block.experts.requires_grad_(False)
    quantize_frozen_params(block, Int8(64))
    block.experts.more = nn.Parameter(torch.zeros(2, 2, 2))
    fully_shard(block, strategy=Strategy.zeropp(**TWO), shard_placement_fn=on_experts_mesh(block, mesh))


def placed_wrongly() -> None:
    fully_shard(make(0), strategy=Strategy.zeropp(**TWO), shard_placement_fn=lambda p: "rows")


def in_two_ways() -> None:
    block, mesh = make(0)[0], mesh_of("across")
    place = on_experts_mesh(block, mesh) if dist.get_rank() else lambda p: None
    fully_shard(block, strategy=Strategy.zeropp(**TWO), shard_placement_fn=place)


def over_other_ranks() -> None:
    mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=("efsdp",))
    half = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    block = make(0)[0]
    fully_shard(block, mesh=half, strategy=Strategy.zeropp(**TWO), shard_placement_fn=on_experts_mesh(block, mesh))


REFUSED: dict[str, Refusal] = {
    "no placement": (placed_wrongly, ValueError, "must return a Shard or None, or a ShardPlacementResult"),
    "different on each rank": (in_two_ways, ValueError, "gave parameters other meshes or strategies than"),
    "a base from before": (quantized_before, ValueError, "pass frozen= to the strategies"),
    "ranks of unknown nodes": (over_other_ranks, ValueError, "leave gpus_per_node to torchrun, or give the overrides"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_on_every_rank(pool: Callable[[int], Pool], name: str) -> None:
    assert_refused(pool(4).run(attempt, REFUSED[name]), REFUSED[name])
