"""Exchanges of local-update training beside the algorithm as torch's own SGD makes it, on all the weights at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import Pool
from harness.wiretap import wiretap

from fsdp_zpp import Codec, Int4, Int8, LoCo
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.outer_step import OuterStep
from fsdp_zpp.config.local_steps import LocalSteps

ROUNDS = 5
SHAPES = [(33, 7), (5,), (1, 2)]
LAYOUTS = [(4, 1), (4, 2)]
"""Ranks, and how many are on a node."""
FEEDBACK = LoCo(beta=0.0, reset_every=0)
over_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0] // layout[1]} nodes")
EACH_WAY = [("errors", "inter"), ("errors_back", "back")]
"""Where a state has the errors on the way there and back."""
Weights = list[list[torch.Tensor]]
"""Of each round, the shards."""


def named(shards: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return shards by names, as an exchange takes them."""
    return {str(index): shard for index, shard in enumerate(shards)}


def initial(local: int) -> list[torch.Tensor]:
    """Return the weights of a local index, the same on all nodes."""
    generator = torch.Generator().manual_seed(local)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def steps_of(round_: int, rank: int) -> list[torch.Tensor]:
    """Return what a rank's own steps add to its weights in a round; partly what other nodes' add."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (round_, 100 * round_ + rank + 1))
    return [0.01 * (torch.randn(shape, generator=common) + torch.randn(shape, generator=own)) for shape in SHAPES]


def train(
    config: LocalSteps, gpus_per_node: int, dtype: torch.dtype = torch.float32, resume_after: int | None = None
) -> tuple[Weights, torch.Tensor, int, dict[Any, int], int]:
    """In a worker: several rounds of steps, each with an exchange.

    Returns:
        The weights after each round, the agreed ones in the end, the bytes that the collectives sent between nodes,
        the bytes counted, and the elements of a node's chunk.
    """
    mesh, traffic = process_mesh(dist.group.WORLD, gpus_per_node), Traffic()
    shards = [shard.to(device(), dtype) for shard in initial(dist.get_rank() % gpus_per_node)]
    outer = OuterStep(config, mesh, traffic)
    outer.start(named(shards))
    after: Weights = []
    with wiretap(gpus_per_node) as tap:
        for round_ in range(ROUNDS):
            for shard, step in zip(shards, steps_of(round_, dist.get_rank()), strict=True):
                shard += step.to(shard)
            outer.exchange(named(shards))
            after.append([shard.cpu().clone() for shard in shards])
            if round_ == resume_after:
                state = outer.state_dict()
                outer.exchange(named([shard + 1 for shard in shards]))  # what was saved does not change with it
                outer = OuterStep(config, mesh, traffic)
                outer.load_state_dict(state, named(shards))
    agreed = torch.cat([part.cpu() for part in outer.agreed.values()])
    chunk = sum(-(-shard.numel() // mesh.topology.nodes) for shard in shards)
    return after, agreed, tap.total("inter"), traffic.sent, chunk


def expected(config: LocalSteps, gpus_per_node: int, local: int) -> Weights:
    """Return one local index's weights after each round by torch's SGD, as in DiLoCo's algorithm 1."""
    weights = [torch.nn.Parameter(each.double()) for each in initial(local)]
    options = {"lr": config.outer_lr, "momentum": config.outer_momentum, "nesterov": config.nesterov}
    optimizer = torch.optim.SGD(weights, **options)
    ranks = range(local, 4, gpus_per_node)
    after: Weights = []
    for round_ in range(ROUNDS):
        changes = [[step.double() for step in steps_of(round_, rank)] for rank in ranks]
        for index, weight in enumerate(weights):
            weight.grad = -sum(change[index] for change in changes) / len(ranks)
        optimizer.step()
        after.append([weight.detach().clone() for weight in weights])
    return after


def distance(results: Weights, wanted: Weights) -> float:
    """Return the largest difference of a weight."""
    return max(
        (one.double() - other).abs().max().item()
        for here, there in zip(results, wanted, strict=True)
        for one, other in zip(here, there, strict=True)
    )


@over_layouts
@pytest.mark.parametrize(
    "config",
    [
        LocalSteps(codec=None, outer_momentum=0.9),
        LocalSteps(codec=None, outer_momentum=0.9, nesterov=False),
        LocalSteps(codec=None, outer_lr=1, outer_momentum=0, nesterov=False),
    ],
    ids=["Nesterov", "momentum", "mean"],
)
def test_without_a_codec_it_is_sgd_on_the_mean_of_changes(
    pool: Callable[[int], Pool], layout: tuple[int, int], config: LocalSteps
) -> None:
    for rank, (after, *_) in enumerate(pool(4).run(train, config, layout[1])):
        assert distance(after, expected(config, layout[1], rank % layout[1])) < 1e-6


@over_layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("codec", [None, Int8(32), Int4(32)], ids=str)
def test_nodes_agree_bit_for_bit(
    pool: Callable[[int], Pool], layout: tuple[int, int], codec: Codec | None, dtype: torch.dtype
) -> None:
    results = pool(4).run(train, LocalSteps(codec=codec), layout[1], dtype)
    for rank, (after, agreed, *_) in enumerate(results):
        first, first_agreed, *_ = results[rank % layout[1]]
        assert torch.equal(agreed, first_agreed)
        assert distance(after, first) == 0
        shards = torch.cat([shard.flatten() for shard in after[-1]])
        assert torch.equal(agreed.to(dtype), shards)


@over_layouts
def test_four_bits_with_feedback_come_nearer(pool: Callable[[int], Pool], layout: tuple[int, int]) -> None:
    # Without momentum, what one exchange leaves out is what the next one is to make up for.
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
    codecs = {"int8": {"codec": Int8(32)}, "int4": {"codec": Int4(32)}}
    codecs["with feedback"] = {"codec": Int4(32), "error_feedback": FEEDBACK}
    off = {}
    for name, options in codecs.items():
        config = LocalSteps(**plain, **options)
        results = pool(4).run(train, config, layout[1])
        off[name] = max(
            distance(after[-1:], expected(config, layout[1], rank % layout[1])[-1:])
            for rank, (after, *_) in enumerate(results)
        )
    assert off["int8"] < off["with feedback"] < off["int4"] < 0.05


def errors_left(reset_every: int) -> list[list[bool]]:
    """In a worker: after each exchange, whether there are errors on the way there and back."""
    mesh = process_mesh(dist.group.WORLD, 2)
    outer = OuterStep(LocalSteps(codec=Int4(32), error_feedback=LoCo(reset_every=reset_every)), mesh, Traffic())
    shards = [torch.randn(40, device=device())]
    dist.broadcast(shards[0], 0)
    outer.start(named(shards))
    results = []
    for _ in range(4):
        shards[0] += torch.randn_like(shards[0])
        outer.exchange(named(shards))
        state = outer.state_dict()
        results.append([state[name]["errors"][hop] is not None for name, hop in EACH_WAY])
    return results


def test_errors_are_reset_both_ways(pool: Callable[[int], Pool]) -> None:
    for results in pool(4).run(errors_left, 2):
        assert results == [[True, True], [False, False], [True, True], [False, False]]


def agreed_dtype() -> torch.dtype:
    """In a worker: that of the agreed weights where another one is torch's default."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        outer = OuterStep(LocalSteps(), process_mesh(dist.group.WORLD, 2), Traffic())
        outer.start(named([torch.zeros(5, device=device())]))
        outer.exchange(named([torch.ones(5, device=device())]))
        return outer.agreed["0"].dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_agreed_weights_are_fp32_whatever_the_default(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(agreed_dtype) == [torch.float32] * 4


@over_layouts
@pytest.mark.parametrize("codec", [None, Int4(32)], ids=str)
def test_each_byte_between_nodes_is_counted(
    pool: Callable[[int], Pool], layout: tuple[int, int], codec: Codec | None
) -> None:
    nodes = layout[0] // layout[1]
    for _, _, sent, counted, chunk in pool(4).run(train, LocalSteps(codec=codec), layout[1]):
        payload = 4 * chunk if codec is None else codec.nbytes(chunk)
        # To each other node its chunk of the changes, and from each chunk's owner the update.
        assert sent == sum(counted.values()) == ROUNDS * 2 * (nodes - 1) * payload
        assert counted.keys() == {("reduce", "inter"), ("gather", "inter")}


@pytest.mark.parametrize(
    "feedback",
    [None, LoCo(), LoCo(dtype=Int8(32)), LoCo(reset_every=2)],
    ids=["none", "fp32", "int8", "reset every 2"],
)
def test_it_goes_on_from_a_checkpoint_bit_for_bit(pool: Callable[[int], Pool], feedback: LoCo | None) -> None:
    config = LocalSteps(codec=Int4(32), error_feedback=feedback)
    whole, resumed = (pool(4).run(train, config, 2, torch.bfloat16, after) for after in (None, 2))
    for (one, agreed, *_), (other, agreed_again, *_) in zip(whole, resumed, strict=True):
        assert torch.equal(agreed, agreed_again)
        assert distance(one, other) == 0


def refusals() -> list[str]:
    """In a worker: errors of what can't be."""
    mesh = process_mesh(dist.group.WORLD, 2)
    plain, fed_back = LocalSteps(), LocalSteps(error_feedback=LoCo())
    outer, other, larger = (OuterStep(config, mesh, Traffic(), "root") for config in (plain, fed_back, plain))
    outer.start(named([torch.zeros(5)]))
    other.start(named([torch.zeros(5)]))
    larger.start(named([torch.zeros(9)]))
    calls: list[Callable[[], Any]] = [
        lambda: OuterStep(plain, process_mesh(dist.group.WORLD, 4), Traffic(), "root"),
        lambda: outer.exchange(named([torch.zeros(6)])),
        lambda: outer.load_state_dict(larger.state_dict(), named([torch.zeros(5)])),
        lambda: outer.load_state_dict(other.state_dict(), named([torch.zeros(5)])),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError, match="root: ") as error:
            call()
        messages.append(str(error.value))
    return messages


def test_what_does_not_fit_is_refused(pool: Callable[[int], Pool]) -> None:
    for messages in pool(4).run(refusals):
        for message, part in zip(
            messages,
            ("is one node", "got shards of {'0': 6} values", "has shards of {'0': 9} values", "with error feedback"),
            strict=True,
        ):
            assert part in message


def beside_another_axis(config: LocalSteps, rounds: list[list[str]]) -> torch.Tensor:
    """In a worker: exchange a copy, the same for each local index, and what other axes have sharded; return the copy.

    Args:
        config: How.
        rounds: What is exchanged, in each of several rounds.
    """
    local = dist.get_rank() % 2
    shards = {"own": torch.zeros(33 * (local + 1), device=device()), "copy": torch.zeros(40, device=device())}
    outer = OuterStep(config, process_mesh(dist.group.WORLD, 2), Traffic())
    outer.start(shards)
    for round_, names in enumerate(rounds):
        generator = torch.Generator().manual_seed(10 * round_ + dist.get_rank() // 2)
        shards["copy"] += torch.randn(40, generator=generator).to(device())
        shards["own"] += 100 * torch.randn(33 * (local + 1), generator=generator).to(device())
        exchanged = {name: shards[name] for name in names}
        outer.send(exchanged, {"own": ("tp",), "copy": ()})
        outer.receive(exchanged)
    return shards["copy"].cpu()


@pytest.mark.parametrize(
    "config",
    [
        LocalSteps(codec=Int8(32)),
        LocalSteps(codec=Int4(32), error_feedback=LoCo()),
        LocalSteps(codec=Int4(64), error_feedback=LoCo(dtype=Int8(128))),
    ],
    ids=["int8", "int4, feedback", "int4, feedback in int8"],
)
def test_copies_do_not_depend_on_what_else_is_exchanged(pool: Callable[[int], Pool], config: LocalSteps) -> None:
    alone = pool(4).run(beside_another_axis, config, [["copy"]] * 4)
    for names in (["own", "copy"], ["copy", "own"]):
        rounds = [names, ["copy"], names, ["copy"]]
        copies = pool(4).run(beside_another_axis, config, rounds)
        assert all(torch.equal(copy, alone[0]) for copy in (*alone, *copies))


def kept_until_read() -> set[str]:
    """In a worker: what is kept of a model until an exchange is over, even if the model goes."""
    step = OuterStep(LocalSteps(), process_mesh(dist.group.WORLD, 1), Traffic())
    shards = named(initial(0))
    step.start(shards)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with patch("fsdp_zpp.collectives.outer_step.keep_until_read", note):
        step.exchange(shards)
    state = {"products": step.products} | step.agreed
    return {name for name, tensor in state.items() if tensor.data_ptr() in kept}


def test_all_that_an_exchange_writes_to_outlives_the_model(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(kept_until_read) == [{"products", *named(SHAPES)}] * 2  # type: ignore[arg-type]
