"""Exchanges of the largest changes alone, with errors that decay, beside SparseLoCo's algorithm in plain loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import Pool
from harness.wiretap import wiretap
from torch import Tensor

from fsdp_zpp import Codec, Int8, LocalSteps, LoCo, TopK
from fsdp_zpp.collectives.error_buffer import ErrorBuffer, encode_with_feedback
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece
from fsdp_zpp.collectives.held_errors import Extent
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.outer_step import OuterStep

ROUNDS, NUMEL = 6, 1000
LAYOUTS = [(4, 2), (3, 1), (4, 1)]
"""Ranks, and how many are on a node."""
over_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each[0] // each[1]} nodes of {each[1]}")
CODEC = TopK(0.05, 4, 128)


def sparse(codec: Codec = CODEC, **feedback: Any) -> LocalSteps:
    """SparseLoCo's outer step."""
    feedback = {"beta": 0, "decay": 0.95, "reset_every": 0} | feedback
    return LocalSteps(outer_lr=1, outer_momentum=0, nesterov=False, codec=codec, error_feedback=LoCo(**feedback))


def initial(local: int) -> Tensor:
    """The weights of a local index."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(local))


def step_of(round_: int, rank: int) -> Tensor:
    """What a rank's own steps add to its weights in a round; a few weights move far more than the others."""
    generator = torch.Generator().manual_seed(100 * round_ + rank + 1)
    return 0.01 * torch.randn(NUMEL, generator=generator) / torch.rand(NUMEL, generator=generator).add(0.05)


def train(config: LocalSteps, gpus_per_node: int, resume_after: int | None = None) -> dict[str, Any]:
    """In a worker: several rounds; the weights after each, the agreed ones, the errors and what was sent."""
    mesh, traffic = process_mesh(dist.group.WORLD, gpus_per_node), Traffic()
    shards = {"weight": initial(dist.get_rank() % gpus_per_node).to(device())}
    outer = OuterStep(config, mesh, traffic)
    outer.start(shards)
    after = []
    with wiretap(gpus_per_node) as tap:
        for round_ in range(ROUNDS):
            shards["weight"] += step_of(round_, dist.get_rank()).to(device())
            outer.exchange(shards)
            after.append(shards["weight"].cpu().clone())
            if round_ == resume_after:
                state = outer.state_dict()
                outer = OuterStep(config, mesh, traffic)
                outer.load_state_dict(state, shards)
    state = outer.state_dict()
    errors = [state["errors"]["errors"]["inter"], state["errors_back"]["errors"]["back"]]  # type: ignore[index]
    return {
        "after": after,
        "agreed": outer.agreed["weight"].cpu(),
        "errors": [None if each is None else each["state"] for each in errors],
        "sent": tap.total("inter"),
        "counted": traffic.sent,
    }


@over_layouts
@pytest.mark.parametrize("codec", [TopK(0.05, 4, 128), TopK(0.05, 2, 256), TopK(0.3, 8, 128)], ids=str)
def test_nodes_agree_bit_for_bit(pool: Callable[[int], Pool], layout: tuple[int, int], codec: TopK) -> None:
    results = pool(layout[0]).run(train, sparse(codec), layout[1])
    for rank, found in enumerate(results):
        first = results[rank % layout[1]]
        assert torch.equal(found["agreed"], first["agreed"])
        assert torch.equal(found["agreed"], found["after"][-1])
        assert all(torch.equal(*each) for each in zip(found["after"], first["after"], strict=True))


@over_layouts
def test_each_byte_between_nodes_is_counted(pool: Callable[[int], Pool], layout: tuple[int, int]) -> None:
    nodes = layout[0] // layout[1]
    chunk = -(-NUMEL // nodes)
    there, back = CODEC.nbytes(chunk), CODEC.for_sum_of(nodes).nbytes(chunk)
    for found in pool(layout[0]).run(train, sparse(), layout[1]):
        assert found["counted"] == {
            ("reduce", "inter"): ROUNDS * (nodes - 1) * there,
            ("gather", "inter"): ROUNDS * (nodes - 1) * back,
        }
        assert found["sent"] == sum(found["counted"].values())


def sent_of(codec: Codec, values: Tensor) -> Tensor:
    """What a chunk decodes to."""
    out = torch.empty_like(values)
    codec.decode(codec.encode(values, 1, 1), out, 1, 1)
    return out


def by_hand(layout: tuple[int, int], local: int, decay: float) -> list[Tensor]:
    """In a worker: SparseLoCo's algorithm 1, chunk by chunk, for a local index, and what chunks' owners make of means.

    On the device of the workers, since GPUs round otherwise than CPUs.
    """
    ranks = range(local, layout[0], layout[1])
    nodes, back = len(ranks), CODEC.for_sum_of(len(ranks))
    chunk = -(-NUMEL // nodes)
    zeros = partial(torch.zeros, device=device())
    weights, after = initial(local).to(device()), []
    errors, errors_back = zeros(nodes, nodes, chunk), zeros(nodes, chunk)
    for round_ in range(ROUNDS):
        update = zeros(nodes, chunk)
        for index, rank in enumerate(ranks):
            trained = weights + step_of(round_, rank).to(device())
            change = zeros(nodes * chunk)
            change[:NUMEL] = weights - trained
            for owner in range(nodes):
                momentum = decay * errors[index, owner] + change.view(nodes, chunk)[owner]
                sent = sent_of(CODEC, momentum)
                errors[index, owner] = momentum - sent
                update[owner] += sent
        for owner in range(nodes):
            wanted = decay * errors_back[owner] - update[owner] / nodes
            update[owner] = sent_of(back, wanted)
            errors_back[owner] = wanted - update[owner]
        weights = weights + update.flatten()[:NUMEL]
        after.append(weights.cpu())
    return after


@over_layouts
@pytest.mark.parametrize("decay", [1.0, 0.95, 0.5])
def test_it_is_sparseloco(pool: Callable[[int], Pool], layout: tuple[int, int], decay: float) -> None:
    wanted = [pool(layout[0]).run(by_hand, layout, local, decay)[0] for local in range(layout[1])]
    for rank, found in enumerate(pool(layout[0]).run(train, sparse(decay=decay), layout[1])):
        for ours, theirs in zip(found["after"], wanted[rank % layout[1]], strict=True):
            assert (ours - theirs).abs().max().item() < 1e-6


@over_layouts
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_what_was_sent_and_the_errors_are_all_changes(
    pool: Callable[[int], Pool], layout: tuple[int, int], beta: float
) -> None:
    results = pool(layout[0]).run(train, sparse(decay=1.0, beta=beta), layout[1])
    for local in range(layout[1]):
        of_nodes = results[local :: layout[1]]
        nodes = len(of_nodes)
        # Errors of changes have the sign of agreed minus trained weights, those of the update the other one.
        there = sum(each["errors"][0].view(nodes, -1) for each in of_nodes).flatten() / nodes
        back = torch.cat([each["errors"][1] for each in of_nodes])
        left_out = ((there - back) / (1 - beta))[:NUMEL]
        steps = sum(step_of(round_, rank) for round_ in range(ROUNDS) for rank in range(local, *layout))
        changes = initial(local) + steps / nodes
        assert (of_nodes[0]["agreed"] - left_out - changes).abs().max() < 1e-5
        assert left_out.abs().max() > 0.05


@pytest.mark.parametrize("dtype", [None, Int8(128)], ids=["fp32", "int8"])
@pytest.mark.parametrize("codec", [CODEC, Int8(128)], ids=str)
def test_it_goes_on_from_a_checkpoint_bit_for_bit(
    pool: Callable[[int], Pool], codec: Codec, dtype: Int8 | None
) -> None:
    whole, resumed = (pool(4).run(train, sparse(codec, dtype=dtype), 2, after) for after in (None, 2))
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one["agreed"], other["agreed"])
        assert all(torch.equal(*each) for each in zip(one["errors"], other["errors"], strict=True))


def copies(config: LocalSteps, rounds: list[list[str]]) -> Tensor:
    """In a worker: exchange a copy, the same for each local index, beside what other axes have sharded; return it."""
    local = dist.get_rank() % 2
    # This rank's part of the other parameter may be empty.
    shards = {"own": torch.zeros(300 * local, device=device()), "copy": torch.zeros(500, device=device())}
    outer = OuterStep(config, process_mesh(dist.group.WORLD, 2), Traffic())
    outer.start(shards)
    for round_, names in enumerate(rounds):
        generator = torch.Generator().manual_seed(10 * round_ + dist.get_rank() // 2)
        shards["copy"] += torch.randn(500, generator=generator).to(device())
        shards["own"] += 100 * torch.randn(300 * local, generator=generator).to(device())
        exchanged = {name: shards[name] for name in names}
        outer.send(exchanged, {"copy": (), "own": ("tp",)})
        outer.receive(exchanged)
    return shards["copy"].cpu()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_copies_do_not_depend_on_what_else_is_exchanged(pool: Callable[[int], Pool], bits: Any) -> None:
    config = sparse(TopK(0.1, bits, 128))
    alone = pool(4).run(copies, config, [["copy"]] * 4)
    beside = pool(4).run(copies, config, [["own", "copy"], ["copy"]] * 2)
    assert all(torch.equal(copy, alone[0]) for copy in (*alone, *beside))


@pytest.mark.parametrize("dtype", [None, Int8(128)], ids=["fp32", "int8"])
@pytest.mark.parametrize("codec", [CODEC, Int8(128)], ids=["without a kernel", "with a kernel"])
def test_errors_decay_once_each_time_they_are_used(codec: Codec, dtype: Int8 | None) -> None:
    one, other = Piece(0, "one", 256), Piece(1, "other", 256)
    both, alone = FlatLayout((one, other), (0, 256), 512), FlatLayout((one,), (0,), 256)
    buffer = ErrorBuffer(0.0, dtype, 0.5)
    errors = []
    for layout in (both, alone, alone, both):
        prepared = buffer.prepare(Extent(layout.numel, (0,), layout), torch.device("cpu"))
        errors.append(prepared.read().clone())
        if layout is both:  # the first is sent no more, and its errors decay alone
            encode_with_feedback(codec, step_of(0, 0)[:512].clone(), 1, 1, prepared)
    first, second, third, fourth = errors
    assert not first.any()
    assert second.any()
    assert torch.allclose(third, second / 2, rtol=1e-3, atol=0)
    assert torch.allclose(fourth[:256], second / 4, rtol=2e-2, atol=1e-4)
    undecayed = step_of(0, 0)[:512] - sent_of(codec, step_of(0, 0)[:512])
    rounding = 0 if dtype is None else undecayed.abs().max() / 127
    assert ((fourth[256:] - undecayed[256:] / 2).abs() <= rounding + 1e-7).all()


def test_decayed_scales_stay_short_enough_for_exact_products() -> None:
    codec = Int8(128)
    buffer = ErrorBuffer(0.0, codec, 0.95)
    for _ in range(4):
        prepared = buffer.prepare(Extent(512, (0,)), torch.device("cpu"))
        scales = codec.scales(prepared.state, 512)
        assert not (scales.view(torch.int32) & 0xFF).any()
        encode_with_feedback(codec, step_of(0, 0)[:512].clone(), 1, 1, prepared)
    assert scales.any()
