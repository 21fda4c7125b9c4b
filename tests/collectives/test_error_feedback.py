"""Error feedback in the two-hop reduction: what codecs leave out does not build up, on any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import Pool
from torch import Tensor

from fsdp_zpp import Codec, Int4, Int8, LoCo
from fsdp_zpp.collectives.error_buffer import ErrorBuffer, encode_with_feedback
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.held_errors import Extent
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import ProcessMesh, process_mesh
from fsdp_zpp.config.error_feedback import error_buffer_specs

CODECS = (Int8(64), Int4(32))
FED_BACK = {"inter": (None, Int4(32)), "both": CODECS}
"""For each setting, codecs whose errors are all fed back."""

STEPS = 6


def kept_by(keep: str, mesh: ProcessMesh, numel: int) -> tuple[int, int]:
    """Return the values of a gradient of which each rank keeps ``numel``, and where this rank's start."""
    world, gpus = mesh.topology.world, mesh.topology.gpus_per_node
    size = numel * {"G": world, "I": gpus, "N": 1}[keep]
    return size, {"G": mesh.rank, "I": mesh.rank % gpus, "N": 0}[keep] * numel


def gradient_of(step: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Make a noisy gradient, other noise on each rank."""
    fixed = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank + 2))
    return (fixed + 0.3 * noise).to(dtype)


def last_errors(reduce: GradientReduce, mesh: ProcessMesh, keep: str, numel: int) -> Tensor:
    """Return what this rank's part of the mean lacks for errors, by all senders' buffers: float64 [numel].

    Straight from the definition of the hops: who sends what to whom.
    """
    nodes, gpus, world = mesh.topology.nodes, mesh.topology.gpus_per_node, mesh.topology.world
    assert reduce.errors is not None
    own = {hop: reduce.errors.buffer(hop) for hop in ("intra", "inter", "back")}
    states: list[Any] = [None] * world
    dist.all_gather_object(states, {hop: b.state.cpu() for hop, b in own.items() if b is not None}, mesh_group(mesh))
    part = -(-numel // gpus) if keep == "N" else numel
    chunk = numel if keep == "G" else -(-part // nodes)

    def of(rank: int, hop: str, rows: int, columns: int) -> Tensor:
        state = states[rank].get(hop)
        return torch.zeros(rows, columns, dtype=torch.float64) if state is None else state.view(rows, columns).double()

    def of_chunk(node: int, local: int) -> Tensor:
        """Return for chunk ``node`` of the part of ``local`` what nodes did not send for it, and who sums it, back."""
        # Without a hop inside, what goes between nodes to be scattered is not a mean yet.
        mean = world if gpus == 1 and keep == "G" else 1
        between = sum(of(n * gpus + local, "inter", nodes, chunk)[node] for n in range(nodes)) / mean
        return between + of(node * gpus + local, "back", 1, chunk)[0]

    if keep == "G":
        node, local = divmod(mesh.rank, gpus)
        inside = sum(of(rank, "intra", gpus * nodes, numel)[local * nodes + node] for rank in range(world))
        return of_chunk(node, local) + inside / world
    parts = []
    for local in [mesh.rank % gpus] if keep == "I" else range(gpus):
        inside = sum(of(rank, "intra", gpus, part)[local] for rank in range(world)) / world
        parts.append(torch.cat([of_chunk(node, local) for node in range(nodes)])[:part] + inside)
    return torch.cat(parts)[:numel]


def mesh_group(mesh: ProcessMesh) -> dist.ProcessGroup:
    """Return all ranks of a mesh that is the world."""
    assert mesh.topology.world == dist.get_world_size()
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def telescoped(gpus_per_node: int, keep: str, config: LoCo, numel: int, dtype: torch.dtype) -> tuple[float, float]:
    """In a worker: how far the sum of what came differs from the identity, and from the sum of exact means."""
    mesh = process_mesh(dist.group.WORLD, gpus_per_node)
    reduce = GradientReduce(mesh, *FED_BACK[config.hops], Traffic(), optimizer_scope=keep, error_feedback=config)
    size, start = kept_by(keep, mesh, numel)
    came, exact = torch.zeros(2, numel, dtype=torch.float64)
    for step in range(STEPS):
        out = torch.empty(numel, device=device())
        reduce(gradient_of(step, mesh.rank, size, dtype).to(device()), out)
        came += out.cpu().double()
        gradients = [gradient_of(step, rank, size, dtype).double() for rank in range(mesh.topology.world)]
        exact += torch.stack(gradients).mean(0)[start : start + numel]
    expected = exact - last_errors(reduce, mesh, keep, numel) / (1 - config.beta)
    return (came - expected).abs().max().item(), (came - exact).abs().max().item()


# One node, or one GPU a node, turns scope I into another one, and one node alone leaves nothing between nodes.
SHAPES = [
    *((gpus, keep, "both") for gpus in (1, 2, 4) for keep in "GIN" if gpus == 2 or keep != "I"),
    *((gpus, keep, "inter") for gpus in (1, 2) for keep in "GIN" if gpus == 2 or keep != "I"),
]


@pytest.mark.parametrize("beta", [0.0, 0.8])
@pytest.mark.parametrize(("gpus_per_node", "keep", "hops"), SHAPES)
def test_the_sum_of_what_is_sent_lacks_the_last_error_alone(
    pool: Callable[[int], Pool], gpus_per_node: int, keep: str, hops: Any, beta: float
) -> None:
    """sum(sent) = sum(gradients) - last error / (1 - beta)."""
    feedback = LoCo(beta=beta, hops=hops)
    for dtype in (torch.float32, torch.bfloat16):
        if hops == "inter" and gpus_per_node > 1 and dtype == torch.bfloat16:
            continue  # what goes inside a node is rounded to it, too
        for off, without in pool(4).run(telescoped, gpus_per_node, keep, feedback, 333, dtype):
            assert off < 2e-5
            assert without > 1e-3  # or the identity would say nothing


LAYOUT = FlatLayout.dense([Piece(0, "always", 150), Piece(1, "at times", 100), Piece(2, "on one rank", 83)])


def idle_on(step: int, rank: int) -> list[str]:
    """The parameters of ``LAYOUT`` that a rank does not use in a step."""
    return ["at times"] * (step % 2) + ["on one rank"] * (step % 3 == 2 or rank != step % 4)


def telescoped_with_idle(gpus_per_node: int, keep: str, config: LoCo) -> tuple[float, list[float]]:
    """In a worker: how far the sum of what came differs from the identity, and what came where no rank sent."""
    mesh, numel = process_mesh(dist.group.WORLD, gpus_per_node), LAYOUT.numel
    reduce = GradientReduce(mesh, *FED_BACK[config.hops], Traffic(), optimizer_scope=keep, error_feedback=config)
    size, start = kept_by(keep, mesh, numel)
    came, exact, idle_came = torch.zeros(numel).double(), torch.zeros(numel).double(), []
    for step in range(2 * STEPS):
        gradients = [gradient_of(step, rank, size, torch.float32) for rank in range(mesh.topology.world)]
        for rank, gradient in enumerate(gradients):
            for begin, end in LAYOUT.runs(idle_on(step, rank)):
                gradient.view(-1, numel)[:, begin:end] = 0
        out = torch.empty(numel, device=device())
        own = gradients[mesh.rank].to(device())
        reduce.start(own, out, layout=LAYOUT, idle=idle_on(step, mesh.rank)).finish()
        came += out.cpu().double()
        exact += torch.stack(gradients).double().mean(0)[start : start + numel]
        idle_on_all = set.intersection(*(set(idle_on(step, rank)) for rank in range(mesh.topology.world)))
        idle_came += [out[begin:end].abs().max().item() for begin, end in LAYOUT.runs(idle_on_all)]
    expected = exact - last_errors(reduce, mesh, keep, numel) / (1 - config.beta)
    return (came - expected).abs().max().item(), idle_came


@pytest.mark.parametrize(("gpus_per_node", "keep", "hops"), SHAPES)
def test_errors_of_idle_parameters_stay_and_are_not_lost(
    pool: Callable[[int], Pool], gpus_per_node: int, keep: str, hops: Any
) -> None:
    """The identity holds, whoever uses what, and what no rank uses comes as zeros."""
    for off, idle_came in pool(4).run(telescoped_with_idle, gpus_per_node, keep, LoCo(beta=0.5, hops=hops)):
        assert off < 2e-5
        assert idle_came
        assert max(idle_came) == 0


@pytest.mark.parametrize("codec", [None, Int8(128)], ids=str)
@pytest.mark.parametrize("numel", [LAYOUT.numel, 160])
def test_idle_errors_do_not_decay_and_are_not_rounded_again_and_again(codec: Int8 | None, numel: int) -> None:
    """Neighbours in their blocks grow in every step, and chunks may cut the layout anywhere."""
    buffer, extent = ErrorBuffer(0.0, codec, decay=0.9), Extent(numel, (0, numel % LAYOUT.numel), LAYOUT)
    cpu = torch.device("cpu")
    marks = extent.marked(["at times"], cpu)
    assert marks is not None
    before = torch.empty(0)
    for step in range(60):
        values, idle = (1 + step) * gradient_of(step, 0, 2 * numel, torch.float32), step > 3
        if idle:
            values[marks] = 0
        if step == 4:
            before = buffer.read()[marks].clone()
        encode_with_feedback(Int4(32), values, 1, 2, buffer.prepare(extent, cpu, ["at times"] if idle else []))
    after = buffer.read()
    # In int8, at most one unit of the last scale; the largest error in a block is 127 units.
    assert (after[marks] - before).abs().max() <= (0 if codec is None else after.abs().max() / 127)
    assert before.abs().max() > 0


def plain_and_with_feedback(config: LoCo, codecs: tuple[Codec | None, Codec], keep: str) -> tuple[float, float]:
    """In a worker: root mean squares of the accumulated error over 150 noisy steps, without and with feedback."""
    mesh = process_mesh(dist.group.WORLD, 2)
    numel = 256
    size, start = kept_by(keep, mesh, numel)
    results = []
    for feedback in (None, config):
        reduce = GradientReduce(mesh, *codecs, Traffic(), optimizer_scope=keep, error_feedback=feedback)
        left_out = torch.zeros(numel, dtype=torch.float64)
        fixed = torch.randn(size, generator=torch.Generator().manual_seed(0))
        generators = [torch.Generator().manual_seed(rank + 1) for rank in range(mesh.topology.world)]
        for _ in range(150):
            gradients = [fixed + 0.01 * torch.randn(size, generator=generator) for generator in generators]
            out = torch.empty(numel, device=device())
            reduce(gradients[mesh.rank].to(device()), out)
            left_out += out.cpu().double() - torch.stack(gradients).double().mean(0)[start : start + numel]
        results.append(left_out.square().mean().sqrt().item() / 150)
    return results[0], results[1]


@pytest.mark.parametrize(
    ("config", "codecs", "keep"),
    [
        (LoCo(), (None, Int4(128)), "G"),
        (LoCo(beta=0.0), (None, Int4(128)), "I"),
        (LoCo(dtype=Int8(128)), (None, Int4(128)), "N"),
        (LoCo(hops="both"), (Int4(128), Int4(128)), "G"),
        (LoCo(hops="both", dtype=Int8(256)), (Int4(128), Int4(128)), "I"),
    ],
    ids=["inter", "inter classical", "inter in int8", "both", "both in int8"],
)
def test_feedback_keeps_errors_from_building_up(
    pool: Callable[[int], Pool], config: LoCo, codecs: tuple[Codec | None, Codec], keep: str
) -> None:
    for plain, with_feedback in pool(4).run(plain_and_with_feedback, config, codecs, keep):
        assert with_feedback < plain / 5


def after_overflow(config: LoCo) -> None:
    """In a worker: a gradient that is not finite is passed on so, and the next one is finite again."""
    mesh = process_mesh(dist.group.WORLD, 2)
    reduce = GradientReduce(mesh, *CODECS, Traffic(), error_feedback=config)
    size, _ = kept_by("G", mesh, 333)
    outs = []
    for step in range(3):
        gradient = gradient_of(step, mesh.rank, size, torch.float32).to(device())
        if step == 1:
            gradient[::32] = torch.inf if mesh.rank == 0 else 0
        out = torch.empty(333, device=device())
        reduce(gradient, out)
        outs.append(out)
    assert outs[0].isfinite().all()
    assert outs[1].isnan().any()
    assert outs[2].isfinite().all()


@pytest.mark.parametrize("config", [LoCo(hops="both"), LoCo(hops="both", dtype=Int8(64))], ids=str)
def test_an_overflow_is_not_fed_back(pool: Callable[[int], Pool], config: LoCo) -> None:
    pool(4).run(after_overflow, config)


@pytest.mark.parametrize("keep", ["G", "I", "N"])
@pytest.mark.parametrize("gpus_per_node", [1, 2, 4])
def test_errors_take_as_many_bytes_as_announced(pool: Callable[[int], Pool], gpus_per_node: int, keep: str) -> None:
    for config in (LoCo(), LoCo(hops="both"), LoCo(hops="both", dtype=Int8(64))):
        for announced, held in pool(4).run(bytes_of_errors, gpus_per_node, keep, config):
            assert announced == held
            assert (held > 0) == (config.hops == "both" or gpus_per_node < 4)


def bytes_of_errors(gpus_per_node: int, keep: str, config: LoCo) -> tuple[int, int]:
    """In a worker: bytes announced, and bytes there are after a reduction."""
    mesh = process_mesh(dist.group.WORLD, gpus_per_node)
    reduce = GradientReduce(mesh, *CODECS, Traffic(), optimizer_scope=keep, error_feedback=config)
    size, _ = kept_by(keep, mesh, 333)
    reduce(torch.ones(size, device=device()), torch.empty(333, device=device()))
    names = error_buffer_specs(config, CODECS, keep, mesh.topology, 333)
    buffers = [reduce.errors.buffer(name) for name in names] if reduce.errors is not None else []
    return reduce.error_nbytes(333), sum(buffer.state.nbytes for buffer in buffers if buffer is not None)
