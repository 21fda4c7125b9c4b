"""Exchanges of weights between nodes that train on their own, beside the algorithm in plain loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness.covering import over_each, over_pairs
from harness.models import device
from top_k_codec import TopK
from torch import Tensor

from fsdp_zpp import Codec, Int4, Int8, LocalSteps, LoCo
from fsdp_zpp.comm.flat_layout import FlatLayout, Piece
from fsdp_zpp.comm.hops import Traffic
from fsdp_zpp.comm.mesh import process_mesh
from fsdp_zpp.local_steps.outer_step import OuterOptimizer, OuterStep

OnRanks = Callable[..., list[Any]]
ROUNDS = 5
Shapes = Sequence[tuple[int, ...]]
SHAPES: Shapes = [(33, 7), (5,), (1, 2), (0, 3), (700,)]
LAYOUTS = [(2, 2), (4, 1), (3, 1)]
"""Nodes, and ranks of each."""
SPARSE = TopK(0.05, 4, 128)


def sparse(codec: Codec = SPARSE, **feedback: Any) -> LocalSteps:
    """SparseLoCo's outer step."""
    feedback = {"beta": 0, "decay": 0.95, "reset_every": 0} | feedback
    return LocalSteps(outer_lr=1, outer_momentum=0, codec=codec, error_feedback=LoCo(**feedback))


CONFIGS = {
    "fp32": LocalSteps(codec=None),
    "int8": LocalSteps(codec=Int8(32)),
    "int4, feedback": LocalSteps(codec=Int4(32), error_feedback=LoCo()),
    "int4, feedback in int8": LocalSteps(codec=Int4(64), error_feedback=LoCo(dtype=Int8(128))),
    "int4, reset every 2": LocalSteps(codec=Int4(32), error_feedback=LoCo(reset_every=2)),
    "top 4 bits": sparse(),
    "top 8 bits, int8": sparse(TopK(0.3, 8, 128), dtype=Int8(128)),
}


def named(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {str(index): each for index, each in enumerate(tensors)}


def initial(local: int, shapes: Shapes = SHAPES) -> list[Tensor]:
    """Return the weights of a local index, the same on all nodes."""
    generator = torch.Generator().manual_seed(local)
    return [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]


def steps_of(round_: int, rank: int, shapes: Shapes = SHAPES) -> list[Tensor]:
    """Return what a rank's own steps add in a round: partly what others' add, and to a few weights far more."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (round_, 100 * round_ + rank + 1))
    steps = []
    for shape in shapes:
        shared, alone, size = (torch.empty(shape, dtype=torch.float32) for _ in range(3))
        step = shared.normal_(generator=common) + alone.normal_(generator=own)
        steps.append(0.002 * step / size.uniform_(0.05, 1, generator=own))
    return steps


def exchange(outer: OuterStep, shards: dict[str, Tensor]) -> None:
    outer.send(shards)
    outer.receive(shards)


def train(
    config: LocalSteps, dtype: torch.dtype = torch.float32, resume_after: int | None = None, shapes: Shapes = SHAPES
) -> dict[str, Any]:
    """On a rank: several rounds of steps, each with an exchange; the weights after each, and what is kept."""
    mesh, traffic, rank = process_mesh(dist.group.WORLD), Traffic(), dist.get_rank()
    shards = [shard.to(device(), dtype) for shard in initial(rank % mesh.topology.gpus_per_node, shapes)]
    outer, after = OuterStep(config, mesh, traffic), []
    outer.start(named(shards))
    for round_ in range(ROUNDS):
        for shard, step in zip(shards, steps_of(round_, rank, shapes), strict=True):
            shard += step.to(shard)
        exchange(outer, named(shards))
        after.append(flat(shards))
        if round_ == resume_after:
            state = outer.state_dict()
            exchange(outer, named([shard + 1 for shard in shards]))  # what was saved does not change with it
            outer = OuterStep(config, mesh, traffic)
            outer.load_state_dict(state, named(shards))
    state = outer.state_dict()
    errors = [
        state[name] and state[name]["errors"][hop] for name, hop in (("errors", "inter"), ("errors_back", "back"))
    ]
    return {
        "after": after,
        "agreed": flat(outer.agreed.values()),
        "errors": [each and each["state"] for each in errors],
        "sent": dist.group.WORLD.sent,
        "counted": traffic.sent,
        "chunk": sum(-(-shard.numel() // mesh.topology.nodes) for shard in shards),
    }


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.cpu().flatten() for tensor in tensors])


def peers_of(rank: int, layout: tuple[int, int]) -> range:
    """The ranks of all nodes that have the same local index."""
    return range(rank % layout[1], layout[0] * layout[1], layout[1])


def nbytes_between_nodes(config: LocalSteps, nodes: int, chunk: int) -> tuple[int, int]:
    """Return the bytes to each other node of its chunks of changes, and of updates from each chunk's owner."""
    codec = config.codec
    there = 4 * chunk if codec is None else codec.nbytes(chunk)
    back = 4 * chunk if codec is None else codec.for_sum_of(nodes).nbytes(chunk)
    return ROUNDS * (nodes - 1) * there, ROUNDS * (nodes - 1) * back


@over_each(rest=False, config=CONFIGS, layout=LAYOUTS, dtype=[torch.bfloat16, torch.float32])
def test_nodes_agree_bit_for_bit_count_each_byte_and_go_on_from_a_checkpoint(
    on_ranks: OnRanks, config: LocalSteps, layout: tuple[int, int], dtype: torch.dtype
) -> None:
    results, resumed = (on_ranks(*layout, train, config, dtype, after) for after in (None, 2))
    for rank, (found, again) in enumerate(zip(results, resumed, strict=True)):
        first = results[rank % layout[1]]
        assert torch.equal(found["agreed"], first["agreed"])
        assert torch.equal(found["agreed"].to(dtype), found["after"][-1])
        assert all(torch.equal(*each) for each in zip(found["after"], first["after"], strict=True))
        assert all(torch.equal(*each) for each in zip(found["after"], again["after"], strict=True))
        assert torch.equal(found["agreed"], again["agreed"])
        for one, other in zip(found["errors"], again["errors"], strict=True):
            assert one is other is None or torch.equal(one, other)
        there, back = nbytes_between_nodes(config, layout[0], found["chunk"])
        assert found["counted"] == {("reduce", "inter"): there, ("gather", "inter"): back}
        assert found["sent"] == {("all_to_all", "inter"): there, ("all_gather", "inter"): back}


def decoded(codec: Codec, values: Tensor) -> Tensor:
    """The values that a chunk decodes to."""
    out = torch.empty_like(values)
    codec.decode(codec.encode(values, 1, 1), out, 1, 1)
    return out


def by_hand(layout: tuple[int, int], local: int, codec: Codec, decay: float) -> list[Tensor]:
    """SparseLoCo's algorithm 1 on one parameter, for a local index, and what owners of chunks make of means.

    On the device of the ranks, since GPUs round otherwise than CPUs.
    """
    shapes = SHAPES[-1:]
    nodes, back = layout[0], codec.for_sum_of(layout[0])
    chunk = -(-700 // nodes)
    zeros = partial(torch.zeros, device=device())
    weights, after = initial(local, shapes)[0].to(device()), []
    errors, errors_back = zeros(nodes, nodes, chunk), zeros(nodes, chunk)
    for round_ in range(ROUNDS):
        update = zeros(nodes, chunk)
        for index, rank in enumerate(peers_of(local, layout)):
            change = zeros(nodes * chunk)
            change[:700] = weights - (weights + steps_of(round_, rank, shapes)[0].to(device()))
            for owner in range(nodes):
                momentum = decay * errors[index, owner] + change.view(nodes, chunk)[owner]
                sent = decoded(codec, momentum)
                errors[index, owner] = momentum - sent
                update[owner] += sent
        for owner in range(nodes):
            wanted = decay * errors_back[owner] - update[owner] / nodes
            update[owner] = decoded(back, wanted)
            errors_back[owner] = wanted - update[owner]
        weights = weights + update.flatten()[:700]
        after.append(weights.cpu())
    return after


@over_pairs(rest=False, layout=LAYOUTS, codec=[SPARSE, Int4(32)], decay=[1.0, 0.95])
def test_it_is_sparseloco(on_ranks: OnRanks, layout: tuple[int, int], codec: Codec, decay: float) -> None:
    results = on_ranks(*layout, train, sparse(codec, decay=decay), torch.float32, None, SHAPES[-1:])
    for rank, found in enumerate(results):
        for ours, theirs in zip(found["after"], by_hand(layout, rank % layout[1], codec, decay), strict=True):
            assert (ours - theirs).abs().max() < 1e-6


def test_errors_are_reset_both_ways(on_ranks: OnRanks) -> None:
    def errors_left() -> list[bool]:
        outer, left = OuterStep(CONFIGS["int4, reset every 2"], process_mesh(dist.group.WORLD), Traffic()), []
        shards = named([torch.ones(40, device=device())])
        outer.start(shards)
        for round_ in range(4):
            shards["0"] += steps_of(round_, dist.get_rank())[-1][:40].to(device())
            exchange(outer, shards)
            state: Any = outer.state_dict()
            left += [state["errors"]["errors"]["inter"] is not None, state["errors_back"]["errors"]["back"] is not None]
        return left

    assert on_ranks(2, 2, errors_left) == [[True, True, False, False] * 2] * 4


def test_the_default_dtype_makes_no_difference(on_ranks: OnRanks) -> None:
    of_default = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            of_default[dtype] = on_ranks(2, 2, train, CONFIGS["int4, feedback in int8"])
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(*of_default.values(), strict=True):
        assert torch.equal(one["agreed"], other["agreed"])
        assert all(torch.equal(*each) for each in zip(one["errors"], other["errors"], strict=True))


def test_what_does_not_fit_is_refused(on_ranks: OnRanks) -> None:
    def refused() -> None:
        mesh, plain = process_mesh(dist.group.WORLD), LocalSteps()
        fed_back = LocalSteps(error_feedback=LoCo())
        outer, other, larger = (OuterStep(config, mesh, Traffic(), "root") for config in (plain, fed_back, plain))
        small, large = ({"0": torch.zeros(numel)} for numel in (5, 9))
        outer.start(small)
        other.start(small)
        larger.start(large)
        for call, message in (
            (lambda: OuterStep(plain, process_mesh(dist.group.WORLD, 4), Traffic(), "root"), "is one node"),
            (lambda: outer.send(large), "got shards of {'0': 9} values"),
            (lambda: outer.load_state_dict(larger.state_dict(), small), "has shards of {'0': 9} values"),
            (lambda: outer.load_state_dict(other.state_dict(), small), "with error feedback"),
        ):
            with pytest.raises(ValueError, match="root: ") as error:
                call()
            assert message in str(error.value)

    on_ranks(2, 2, refused)


def test_all_that_an_exchange_writes_to_outlives_the_model(on_ranks: OnRanks) -> None:
    kept: list[int] = []

    def kept_until_read() -> set[str]:
        step, shards = OuterStep(LocalSteps(), process_mesh(dist.group.WORLD), Traffic()), named(initial(0)[:2])
        step.start(shards)
        exchange(step, shards)
        state = {"products": step.products} | step.agreed
        return {name for name, tensor in state.items() if tensor.data_ptr() in kept}

    with patch(
        "fsdp_zpp.local_steps.outer_step.keep_until_read", lambda tensor: kept.append(tensor.data_ptr()) or tensor
    ):
        assert on_ranks(2, 1, kept_until_read) == [{"products", "0", "1"}] * 2


# ---- copies

EXCHANGES = ("int8", "int4, feedback in int8", "top 4 bits")


@pytest.mark.parametrize("name", EXCHANGES)
def test_copies_do_not_depend_on_what_else_is_exchanged(on_ranks: OnRanks, name: str) -> None:
    """Values that are the same for each local index, beside what another axis has sharded, and ranks may lack."""

    def exchanged(rounds: list[list[str]]) -> Tensor:
        mesh, local, node = process_mesh(dist.group.WORLD), dist.get_rank() % 2, dist.get_rank() // 2
        shards = {"own": torch.zeros(33 * (2 * local), device=device()), "copy": torch.zeros(300, device=device())}
        placements = {"copy": (), "own": ("tp",)}
        outer = OuterStep(CONFIGS[name], mesh, Traffic())
        outer.start(shards)
        for round_, names in enumerate(rounds):
            generator = torch.Generator().manual_seed(10 * round_ + node)
            shards["copy"] += torch.randn(300, generator=generator).to(device())
            shards["own"] += 100 * torch.randn(66 * local, generator=generator).to(device())
            some = {name: shards[name] for name in names}
            outer.send(some, placements)
            outer.receive(some)
        return shards["copy"].cpu()

    alone = on_ranks(2, 2, exchanged, [["copy"]] * 4)
    for names in (["own", "copy"], ["copy", "own"]):
        beside = on_ranks(2, 2, exchanged, [names, ["copy"]] * 2)
        assert all(torch.equal(copy, alone[0]) for copy in (*alone, *beside))


# ---- the outer optimizer, whose fitted momentum local_steps/test_local_training.py compares with a search

ONE_PART = FlatLayout.dense([Piece(0, "a", 37)])


def started(config: LocalSteps) -> OuterOptimizer:
    optimizer = OuterOptimizer(config)
    optimizer.start("a", 37, *[torch.device("cpu")] * 2)
    return optimizer


@pytest.mark.parametrize("products", [(0.0, 0.0), (1.0, float("inf")), (float("nan"), 1.0)], ids=str)
def test_what_is_not_finite_leaves_the_momentum(products: tuple[float, float]) -> None:
    optimizer = started(LocalSteps(outer_momentum="auto"))
    optimizer.step(torch.ones(37), ONE_PART)
    optimizer.adapt_momentum((0.2, 1.0))
    optimizer.step(torch.ones(37), ONE_PART)
    before = optimizer.state_dict()[1]["correlation"]
    assert before < 1  # as it is at first
    assert optimizer.adapt_momentum(products) is None
    assert optimizer.state_dict()[1]["correlation"] == before


@pytest.mark.parametrize("warms_up", [False, True])
def test_a_resumed_training_takes_the_momentum_that_it_is_given(warms_up: bool) -> None:
    saved = started(LocalSteps(outer_momentum=0.5))
    saved.step(torch.ones(37), ONE_PART)
    resumed = started(LocalSteps(outer_momentum=0.8))
    resumed.load_state_dict(*saved.state_dict())
    if warms_up:
        resumed.warm_up({"a": torch.ones(37)})
    else:
        resumed.step(torch.ones(37), ONE_PART)
    assert torch.equal(resumed.state_dict()[0]["a"], torch.full((37,), 1.8))
