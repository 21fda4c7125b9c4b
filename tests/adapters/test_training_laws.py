"""One training, many laws: what each strategy computes with, sends, keeps, shows and says, seen in one training."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2, Precision
from harness.covering import ADAPTERS, SCOPES, WITH_FLAT, over_adapters, over_each, over_pairs
from harness.links import machine
from harness.messages import collected
from harness.pool import Pools, device_type
from harness.strategies import INSIDE_WITH_FEEDBACK, PRESETS
from harness.training import train, without_gradient
from harness.wiretap import Sent, Wiretap, sent_in, wiretap
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

from fsdp_zpp import Codec, CodecState, Int2Delta, Int3, Int4, Int4Delta, Int8, Strategy, invalidate, traffic
from fsdp_zpp.codecs import Delta
from fsdp_zpp.runtime.log_line import summarize
from fsdp_zpp.strategy.error_feedback import Topology
from fsdp_zpp.strategy.strategy import ResolvedStrategy

# ---- what a training shows


@dataclass(frozen=True)
class Record:
    """A training as one rank sees it; phases are the forwards and backwards of its last step and evaluations."""

    steps: list[tuple[dict[str, Tensor], frozenset[str]]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    used: list[tuple[str, int, Tensor]] = field(default_factory=list)  # what forwards computed with, after which step
    taps: dict[str, Wiretap] = field(default_factory=dict)  # of each phase
    sent: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)  # by traffic(): bytes of a kind on a hop
    shown: dict[str, Any] = field(default_factory=dict)  # by modules after each phase
    held: list[int] = field(default_factory=list)  # elements of parameters, gradients and states of the optimizer
    shards: list[Tensor] = field(default_factory=list)  # this rank's parameters at the end
    loss: Tensor = field(default_factory=partial(torch.zeros, ()))  # of an evaluation, the mean over ranks
    lines: list[tuple[str, str]] = field(default_factory=list)  # that were logged
    kept: set[str] = field(default_factory=set)  # names of what codecs keep from step to step

    def total(self, hop: str, *collectives: str) -> int:
        return sum(tap.total(hop, *collectives) for tap in self.taps.values())

    def traffic(self, kind: str, hop: str) -> int:
        return sum(sent[kind, hop] for sent in self.sent.values())


def recorded(
    adapter: Adapter, case: Case, strategy: Strategy | None, gpus_per_node: int, with_gradients: bool
) -> bytes:
    """In a worker: train, evaluate twice, and once more after weights were announced as changed."""
    with machine(None), collected() as lines:
        model = adapter.make(case, strategy)
        observer = Observer(adapter, model, strategy, gpus_per_node)
        optimizer = models.make_optimizer(case.optimizer, model.parameters())
        for step in range(case.steps):
            observer.train(case, step)
            if with_gradients and step == 0:
                observer.record.gradients.update(adapter.full_gradients(model))
            if case.clip is not None:
                adapter.clip(model, case.clip)
            optimizer.step()
            observer.note_step(optimizer)
            optimizer.zero_grad()
        observer.evaluate()
    observer.record.lines.extend(lines)
    return pickle.dumps(observer.record)  # a pool would send each tensor in an open file


class Observer:
    """In a worker: a model whose record is written while it trains."""

    def __init__(self, adapter: Adapter, model: Any, strategy: Strategy | None, gpus_per_node: int) -> None:
        self.adapter, self.model, self.strategy, self.gpus_per_node = adapter, model, strategy, gpus_per_node
        self.record = Record()
        block = next(module for module in model.modules() if isinstance(module, models.Block))
        for name in ("up", "norm"):
            getattr(block, name).register_forward_pre_hook(partial(self._note_use, name))

    def _note_use(self, name: str, module: Any, inputs: Any) -> None:
        self.record.used.append(
            (f"blocks.0.{name}.weight", len(self.record.steps), module.weight.detach().cpu().clone())
        )

    def train(self, case: Case, step: int) -> None:
        for i in range(case.micro_batches):
            with self.adapter.micro_batch(self.model, i == case.micro_batches - 1, case.synced):
                with self._phase(f"forward {i}"):
                    loss = models.loss_of(self.model, models.batch(step, i)) / case.micro_batches
                with self._phase(f"backward {i}"):
                    loss.backward()

    def note_step(self, optimizer: Any) -> None:
        parameters = list(self.model.parameters())
        states = [next(value for name, value in s.items() if name != "step") for s in optimizer.state.values()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        local = self.adapter.local
        self.record.held[:] = [sum(local(t).numel() for t in tensors) for tensors in (parameters, gradients, states)]
        self.record.shards[:] = [local(p).detach().cpu().clone() for p in parameters]
        self.record.steps.append((self.adapter.full_weights(self.model), without_gradient(self.model)))

    def evaluate(self) -> None:
        with torch.no_grad():
            for name in ("evaluation", "evaluation again"):
                with self._phase(name):
                    loss = models.loss_of(self.model, models.batch(70, 0))
            if self.strategy is not STOCK:
                invalidate(self.model)
                with self._phase("invalidated"):
                    models.loss_of(self.model, models.batch(70, 0))
                self.record.kept.update(set(CodecState(self.model).state_dict()) - {"layout"})
        dist.all_reduce(loss)
        self.record.loss.copy_(loss.cpu() / dist.get_world_size())
        if self.adapter.torch_name == "fully_shard":
            states = [{name: type(value) for name, value in b.state_dict().items()} for b in self.model.blocks]
            self.record.shown["state dicts"] = states
            self.model.state_dict()
            self.record.shown["after a state dict"] = self._shown()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        before: Any = {} if self.strategy is STOCK else traffic(self.model)
        with wiretap(self.gpus_per_node) as self.record.taps[name]:
            yield
        after: Any = {} if self.strategy is STOCK else traffic(self.model)
        self.record.sent[name] = Counter(
            {(kind, hop): n - before[kind][hop] for kind, hops in after.items() for hop, n in hops.items()}
        )
        self.record.shown[name] = self._shown()

    def _shown(self) -> Any:
        # Shards of FSDP1 have the shapes of their scope.
        has_shapes = self.adapter.torch_name == "fully_shard"
        return {
            name: (type(p), type(p.data), p.requires_grad, p.shape if has_shapes else None)
            for name, p in self.model.named_parameters()
        }


# ---- which trainings


@dataclass(frozen=True)
class Row:
    """A training, and how far its weights may be from stock's, and its gradient and that of a parameter, if at all."""

    adapter: Adapter
    strategy: Strategy  # which names its nodes
    case: Case
    world: int = 4
    bound: float | None = None
    near: tuple[float, float] | None = None
    stock: Adapter | None = None  # what it is compared with, if that needs other arguments

    @property
    def topology(self) -> Topology:
        assert self.strategy.gpus_per_node is not None
        return Topology(self.world, self.strategy.gpus_per_node)

    @property
    def resolved(self) -> ResolvedStrategy:
        return self.strategy.resolve(self.topology)

    @property
    def hops(self) -> set[str]:
        """The hops that there are."""
        sizes = {"intra": self.topology.gpus_per_node, "inter": self.topology.nodes}
        return {hop for hop, size in sizes.items() if size > 1}

    @property
    def kept_hops(self) -> set[str]:
        """The hops that weights need not cross again, since a rank or a node keeps them."""
        beyond = {"N": self.hops, "I": self.hops & {"inter"}, "G": set()}[self.strategy.parameters]
        return beyond - {"I": {"inter"}, "N": self.hops, "G": set()}[self.strategy.optimizer]

    @property
    def is_split(self) -> bool:
        """True if FSDP1 makes a unit by itself of parameters that are frozen in another."""
        return self.case.frozen and not self.case.wrap_blocks and isinstance(self.adapter, Fsdp1)

    @property
    def is_plain(self) -> bool:
        """True for the usual net, a unit for each block."""
        return self.case.model == () and self.case.wrap_blocks and self.adapter in WITH_FLAT


Group = list[Any]
"""Parameters of tests, each a row."""


def rows(group: str, make: Callable[..., Row | None], over: pytest.MarkDecorator) -> Group:
    """The rows that ``make`` makes of each combination of values."""
    made = [(make(*each.values), each) for each in over.args[1]]
    return [pytest.param(row, id=f"{group}-{each.id}", marks=each.marks) for row, each in made if row is not None]


def over(*groups: Group, where: Callable[[Row], bool] = lambda row: True) -> pytest.MarkDecorator:
    """Parametrize a test with the rows of some groups that its law holds for."""
    return pytest.mark.parametrize("row", [each for group in groups for each in group if where(each.values[0])])


NETS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "twice": {"twice": True},
    "frozen and unused": {"unused": True},
}
EVEN = (("width", 24), ("hidden", 36), ("vocabulary", 64))
MICRO_BATCHES = {"one": {}, "no sync": {"micro_batches": 3}, "synced": {"micro_batches": 3, "synced": True}}
UNITS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "one unit": {"wrap_blocks": False},
    "reentrant": {"checkpointing": "inside reentrant"},
}
LAYOUTS = {"2x2": (4, 2), "4x1": (4, 1), "1x4": (4, 4)}
"""Nodes and GPUs of each; the number of ranks and of GPUs a node."""


def exact(
    adapter: Adapter,
    scopes: str,
    layout: tuple[int, int],
    net: str,
    micro_batches: dict[str, Any],
    units: dict[str, Any],
    optimizer: str,
) -> Row | None:
    reentrant = units == UNITS["reentrant"]
    if device_type() == "cuda" and net == "twice" and reentrant and adapter.torch_name == "FullyShardedDataParallel":
        # Stock gets other weights each time (0.25 off an unsharded model), unless CUDA_LAUNCH_BLOCKING=1: torch's own
        # gradients race where a unit runs twice under reentrant checkpointing.
        return None
    model, frozen = tuple(NETS[net].items()), net.startswith("frozen")
    case = Case(model, frozen=frozen, optimizer=optimizer, steps=2, **micro_batches, **units)
    # AdamW divides by the root of squares that start near zero, which magnifies rounding.
    bound = 1e-6 if optimizer == "sgd" else 1e-4
    return Row(adapter, Strategy(scopes, gpus_per_node=layout[1]), case, layout[0], bound)


OTHERS = {"net": list(NETS), "micro_batches": MICRO_BATCHES, "units": UNITS, "optimizer": ["sgd", "adamw-fused"]}
# NNI reduces as none of the others does, and the other seven as one of these.
EXACT = rows(
    "exact", exact, over_pairs(rest=False, adapter=ADAPTERS, scopes=[*SCOPES, "NNI"], layout=LAYOUTS, **OTHERS)
)
ON_FOUR_NODES = Row(
    ADAPTERS[0], Strategy("IIG", gpus_per_node=2), Case(EVEN, steps=2, micro_batches=2), world=8, bound=1e-6
)
EXACT.append(pytest.param(ON_FOUR_NODES, id="4x2"))
# Rounding does not grow from step to step, and one block has no other to prefetch.
EXACT += [
    pytest.param(
        Row(adapter, Strategy(scopes, gpus_per_node=2), Case((("blocks", 1),), steps=10), bound=1e-6),
        id=f"10 steps-{adapter}",
    )
    for adapter, scopes in zip(ADAPTERS, ("IGG", "III"), strict=True)
]


# ---- arguments of one adapter


def second_dimension(parameter: nn.Parameter) -> Shard | None:
    """Shard every matrix whose second dimension divides by four there."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def prefetch(model: Any) -> None:
    """Prefetch two blocks ahead in both directions."""
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])


def divide_by_3(force_sum: bool, model: Any) -> None:
    """Another divide factor than the world size."""
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(force_sum)


def divided(force_sum: bool = True) -> Fsdp2:
    return Fsdp2(tune=partial(divide_by_3, force_sum))


def fsdp1(**arguments: Any) -> Fsdp1:
    return Fsdp1(arguments=tuple(arguments.items()))


def fsdp2(**arguments: Any) -> Fsdp2:
    return Fsdp2(arguments=tuple(arguments.items()))


THREE_BLOCKS = {"model": (("blocks", 3),)}
ARGUMENTS: dict[str, tuple[Adapter, dict[str, Any]]] = {
    "flat": (Fsdp1(use_orig_params=False), {"model": (("tied", True),), "micro_batches": 2}),
    "no limit, backward post": (
        fsdp1(limit_all_gathers=False, backward_prefetch=BackwardPrefetch.BACKWARD_POST),
        THREE_BLOCKS,
    ),
    "forward prefetch alone": (fsdp1(forward_prefetch=True, backward_prefetch=None), THREE_BLOCKS),
    "outside no_reentrant": (Fsdp1(), {"checkpointing": "outside no_reentrant"}),
    "outside reentrant": (Fsdp1(), {"checkpointing": "outside reentrant"}),
    "a list of modules": (Fsdp2(pairs=True), THREE_BLOCKS),
    "keep after forward": (fsdp2(reshard_after_forward=False), {}),
    "reshard after forward": (fsdp2(reshard_after_forward=True), {}),
    "no sync kept unsharded": (Fsdp2(keep_unsharded=True), {"micro_batches": 3}),
    "synced kept unsharded": (Fsdp2(keep_unsharded=True), {"micro_batches": 3, "synced": True}),
    "second dimension": (
        fsdp2(shard_placement_fn=second_dimension),
        {"model": (("width", 24), ("hidden", 36))},
    ),
    "prefetch": (Fsdp2(tune=prefetch), THREE_BLOCKS),
    "divided by 3": (divided(), {"clip": None}),
    "premultiplied by 1/3": (divided(force_sum=False), {"clip": None}),
    "cpu offload": (fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)), {"clip": None}),
}


def with_arguments(name: str, scopes: str) -> Row | None:
    # Weights that stay unsharded can't be resharded after the forward, and are shown as shards after a backward.
    if scopes == "NNG" and name in ("reshard after forward", "synced kept unsharded"):
        return None
    adapter, case = ARGUMENTS[name]
    # Gloo can't premultiply; torch's own are forced to sum, which is the same but for rounding.
    stock = divided() if name == "premultiplied by 1/3" else None
    return Row(adapter, Strategy(scopes, gpus_per_node=2), Case(steps=2, **case), bound=1e-6, stock=stock)


WITH_ARGUMENTS = rows("arguments", with_arguments, over_each(name=list(ARGUMENTS), scopes=SCOPES))

# ---- codecs

BF16 = Precision(torch.bfloat16, torch.bfloat16)
LIKE = (("NNI", "INI"), ("NII", "III"), ("NIG", "IIG", "GIG"), ("NGG", "IGG", "GGG"), ("NNG", "ING", "GNG"), ("NNN",))
"""Scopes that differ in that of the parameters alone: what is kept of weights, and where, is no arithmetic."""


def coded(adapter: Adapter, scopes: str) -> Row:
    strategy = Strategy(scopes, weights=Int8(64), gradients=Int8(64), gpus_per_node=2)
    case = Case(steps=2, micro_batches=2, clip=None)
    return Row(adapter, strategy, case, near=(0.05, 0.05))


# Scopes that are compared with each other are trained under one adapter.
CODED = [
    pytest.param(coded(adapter, scopes), id=f"coded-{adapter}-{scopes}")
    for adapter, like in zip(ADAPTERS * 3, LIKE, strict=True)
    for scopes in like
]

CODECS = {
    "int4 weights": (Strategy("GGG", weights=Int4(32)), None),
    "int4 gradients": (Strategy("IGG", gradients=Int4(32)), (0.2, 0.3)),
    "int3 gradients": (Strategy("IGG", gradients=Int3(32)), (0.3, 0.4)),
    "int4 between only": (Strategy("GGG", gradients=Int4(32), intra_gradients=None), (0.2, 0.3)),
    "inside": (INSIDE_WITH_FEEDBACK, (0.2, 0.3)),
    "zeropp NGG": (Strategy.zeropp(levels="NGG"), None),
} | {name: (PRESETS[name], None) for name in ("zeropp", "loco", "delta", "delta2")}
"""Strategies, and how far the whole gradient and that of a parameter may be from stock's.

A wrong mean, order or dtype would be off by far more than quantization noise.
"""


def with_codecs(
    adapter: Adapter, codecs: tuple[Strategy, Any], layout: tuple[int, int], precision: Precision | None
) -> Row:
    strategy, near = codecs
    row = Row(
        adapter,
        replace(strategy, gpus_per_node=layout[1]),
        # Weights are used in the forward, in the recomputation and in evaluations.
        Case(steps=2, clip=None, checkpointing="inside no_reentrant", precision=precision),
        near=near,
    )
    has_codecs = row.resolved.weights is not None or row.resolved.gradient_codecs != (None, None)
    return row if has_codecs else replace(row, bound=0.0, near=None)


def on_layouts(names: Iterable[str], *layouts: str) -> Group:
    return rows(
        "codecs",
        with_codecs,
        over_pairs(
            rest=False,
            adapter=ADAPTERS,
            codecs={name: CODECS[name] for name in names},
            layout={name: LAYOUTS[name] for name in layouts},
            precision={"fp32": None, "bf16": BF16},
        ),
    )


# On one node most codecs are for a hop that there is not.
WITH_CODECS = [*on_layouts(CODECS, "2x2", "4x1"), *on_layouts(("inside", "zeropp NGG", "delta"), "1x4")]
ALONE = [
    pytest.param(Row(adapter, Strategy.zeropp(gpus_per_node=1), Case(), 1, bound=0.0), id=f"alone-{adapter}")
    for adapter in ADAPTERS
]


unpickled = cache(pickle.loads)


def records(pool: Pools, row: Row) -> list[Record]:
    gpus_per_node, with_gradients = row.topology.gpus_per_node, row.case.clip is None
    found = pool(row.world).once(recorded, row.adapter, row.case, row.strategy, gpus_per_node, with_gradients)
    return list(map(unpickled, found))


def records_of_stock(pool: Pools, row: Row) -> list[Record]:
    """As on one node, whatever the layout, so that fewer are trained."""
    adapter, with_gradients = row.stock or row.adapter, row.case.clip is None
    found = pool(row.world).once(recorded, adapter, row.case, STOCK, row.world, with_gradients)
    return list(map(unpickled, found))


# ---- what is computed


@over(EXACT, WITH_ARGUMENTS, WITH_CODECS, ALONE, where=lambda row: row.bound is not None)
def test_weights_and_missing_gradients_are_stocks_after_every_step(pool: Pools, row: Row) -> None:
    """On one node, where torch's own collectives do it all in full precision, bit for bit."""
    for ours, stock in zip(records(pool, row), records_of_stock(pool, row), strict=True):
        assert len(ours.steps) == row.case.steps
        for (weights, absent), (expected, absent_in_stock) in zip(ours.steps, stock.steps, strict=True):
            assert absent == absent_in_stock
            assert models.distance(weights, expected) <= row.bound
        assert ours.loss.item() == pytest.approx(stock.loss.item(), rel=1e-6)


@over(EXACT, WITH_ARGUMENTS, CODED, WITH_CODECS)
def test_forwards_compute_with_the_weights_of_the_moment(pool: Pools, row: Row) -> None:
    """Encoded ones within half a step, vectors as they are; the same on all ranks, in recomputations too."""
    first, *others = records(pool, row)
    net = models.make_net(**dict(row.case.model))
    held = [{name: p.detach().cpu() for name, p in net.named_parameters()}, *(weights for weights, _ in first.steps)]
    assert {step for _, step, _ in first.used} == set(range(row.case.steps + 1))
    codec = None if row.strategy.optimizer == "N" else row.resolved.weights  # every rank has all weights
    bounds = half_steps(codec, held)
    for name, step, used in first.used:
        exact = held[step][name]
        if codec is None or used.ndim == 1:
            assert torch.equal(used, exact.to(used.dtype))
        elif step == 0 or not isinstance(codec, Delta):  # whose steps are those of changes from then on
            rounding = 0 if used.dtype == torch.float32 else 2**-8 * exact.abs().max()  # bf16 has 8 bits
            assert 0 < (used.float() - exact).abs().max() <= bounds[step] + rounding
    for other in others:
        assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(other.used, first.used, strict=True))


def half_steps(codec: Codec | None, held: list[dict[str, Tensor]]) -> list[float]:
    """Half a step of a codec on a block's matrices, after each step of a training."""
    matrices = [torch.cat([w.flatten() for n, w in of.items() if "blocks.0" in n and w.ndim == 2]) for of in held]
    return [float(matrix.abs().max()) / (14 if isinstance(codec, Int4) else 254) * (1 + 1e-4) for matrix in matrices]


@over(WITH_CODECS, where=lambda row: row.case.precision is not None and row.resolved.weights is not None)
def test_weights_are_encoded_from_full_precision_not_from_a_copy_in_16_bits(pool: Pools, row: Row) -> None:
    in_full = replace(row, case=replace(row.case, precision=None))
    encoded, exact = (records(pool, each)[0].used for each in (row, in_full))
    assert all(torch.equal(a, b.bfloat16()) for (_, step, a), (*_, b) in zip(encoded, exact, strict=True) if step == 0)


@over(CODED, WITH_CODECS, where=lambda row: row.bound is None)
def test_encoded_gradients_and_losses_are_near_stocks(pool: Pools, row: Row) -> None:
    for ours, stock in zip(records(pool, row), records_of_stock(pool, row), strict=True):
        assert ours.loss.item() == pytest.approx(stock.loss.item(), rel=0.01)
        if row.near is None:
            continue
        whole = [torch.cat([r.gradients[name].flatten() for name in stock.gradients]) for r in (ours, stock)]
        assert models.distance({"": whole[0]}, {"": whole[1]}) <= row.near[0]
        assert 1e-4 < models.distance(ours.gradients, stock.gradients) <= row.near[1]


@pytest.mark.parametrize("place", range(len(LIKE) - 1))
def test_the_parameters_scope_changes_no_bit(pool: Pools, place: int) -> None:
    first, *others = (records(pool, coded(ADAPTERS[place % 2], scopes))[0] for scopes in LIKE[place])
    for other in others:
        assert models.distance(other.steps[-1][0], first.steps[-1][0]) == 0


@over(EXACT, CODED, where=lambda row: row.strategy.optimizer != "G")
def test_replicas_stay_equal_bit_for_bit(pool: Pools, row: Row) -> None:
    shards = row.topology.shard_count(row.strategy.optimizer)
    found = records(pool, row)
    for rank, record in enumerate(found):
        assert all(map(torch.equal, record.shards, found[rank % shards].shards))


# ---- what is sent


@over(EXACT, CODED, WITH_CODECS)
def test_traffic_agrees_with_the_wire(pool: Pools, row: Row) -> None:
    # On one node torch's own collectives do it all, unless the strategy keeps or encodes something even there.
    is_ours = row.topology.nodes > 1
    gathers = is_ours or row.strategy.parameters == "N"
    reduces = is_ours or row.resolved.gradient_codecs[0] is not None or row.resolved.scopes.gradients == "N"
    for record in records(pool, row):
        for hop in ("inter", "intra"):
            # An all-reduce ends in an all-gather, where a rank's optimizer needs more than its own chunk.
            up = record.traffic("reduce", hop) - record.total(hop, "all_to_all")
            assert up == 0 if row.strategy.optimizer == "G" else up >= 0
            assert record.traffic("gather", hop) + up == (record.total(hop, "all_gather") if gathers else 0)
        assert bool(record.total("intra", "reduce_scatter") + record.total("inter", "reduce_scatter")) != reduces


@over(WITH_CODECS, where=lambda row: row.bound is not None and row.strategy.parameters != "N")
def test_one_node_sends_what_stock_sends_and_codecs_keep_nothing(pool: Pools, row: Row) -> None:
    for ours, stock in zip(records(pool, row), records_of_stock(pool, row), strict=True):
        assert {phase: ours.taps[phase].sent for phase in stock.taps} == {p: t.sent for p, t in stock.taps.items()}
        assert ours.kept == set()


@over(WITH_CODECS, where=lambda row: row.topology.nodes == 1 and row.resolved.gradient_codecs[0] is not None)
def test_a_codec_named_for_the_hop_inside_stays_on_one_node(pool: Pools, row: Row) -> None:
    for ours, stock in zip(records(pool, row), records_of_stock(pool, row), strict=True):
        tap, in_stock = ours.taps["backward 0"], stock.taps["backward 0"]
        assert tap.total("intra", "all_gather") == in_stock.total("intra", "all_gather")
        in_fp32 = in_stock.total("intra", "reduce_scatter") * (1 if row.case.precision is None else 2)
        assert 0 < tap.total("intra", "all_to_all") < 0.35 * in_fp32
        assert 1e-6 < models.distance(ours.steps[-1][0], stock.steps[-1][0]) < 0.05
        assert len(ours.kept) == 3
        assert all("errors of" in name for name in ours.kept)


@over(EXACT, CODED, where=lambda row: row.case.micro_batches > 1 and not row.case.synced)
def test_the_gradient_scope_is_how_far_a_micro_batch_reduces(pool: Pools, row: Row) -> None:
    crossed = {"N": set(), "I": {"intra"}, "G": {"intra", "inter"}}[row.strategy.levels[1]] & row.hops
    *earlier, last = (f"backward {i}" for i in range(row.case.micro_batches))
    for record in records(pool, row):
        sent = {
            phase: {hop for hop in row.hops if tap.total(hop, "all_to_all", "reduce_scatter")}
            for phase, tap in record.taps.items()
        }
        assert all(sent[phase] == crossed for phase in earlier)
        assert sent[last] == row.hops


@over(EXACT, CODED, WITH_CODECS, where=lambda row: bool(row.kept_hops))
def test_weights_are_sent_once_after_they_may_have_changed(pool: Pools, row: Row) -> None:
    synced = row.case.micro_batches if row.case.synced else 1
    fresh = {"evaluation", "invalidated", *(f"forward {i}" for i in range(synced))}
    for record in records(pool, row):
        for hop in row.kept_hops:
            sent = {phase: n for phase, tap in record.taps.items() if (n := tap.total(hop, "all_gather"))}
            sent = {phase: n for phase, n in sent.items() if "backward" not in phase or row.strategy.optimizer == "G"}
            assert sent.keys() == fresh
            if not row.case.frozen and not isinstance(row.strategy.weights, Delta):
                assert len(set(sent.values())) == 1


INTER, INTRA = ("all_gather", "inter"), ("all_gather", "intra")


@over(
    CODED,
    WITH_CODECS,
    WITH_ARGUMENTS,
    where=lambda row: row.is_plain and row.hops == {"intra", "inter"} and row.strategy.optimizer == "G",
)
def test_secondary_shards_and_they_alone_are_sent_before_the_first_unit_computes(pool: Pools, row: Row) -> None:
    units = 3  # the root and two blocks; secondary shards as small as these go as one
    kept = row.strategy.parameters != "G"
    for record in records(pool, row):
        order = record.taps["evaluation"].order
        assert order == ([INTER] + [INTRA] * units if kept else [INTER, INTRA] * units)


# ---- what is held, shown and said


@over(EXACT, CODED, where=lambda row: not row.case.frozen)
def test_each_state_is_cut_into_the_shards_of_the_optimizers_scope(pool: Pools, row: Row) -> None:
    net = models.Net(**dict(row.case.model))
    total = sum(p.numel() for p in net.parameters())
    shards = row.topology.shard_count(row.strategy.optimizer)
    held = [record.held for record in records(pool, row)]
    # FSDP's alignment belongs to no parameter, so shards differ in size, but together they are the model.
    assert [sum(of_state) for of_state in zip(*held, strict=True)] == [total * row.world / shards] * 3
    if row.case.model == EVEN:
        assert all(one == pytest.approx(total / shards, rel=0.02) for of_rank in held for one in of_rank)


@over(EXACT, WITH_ARGUMENTS, where=lambda row: not row.is_split)
def test_modules_show_what_stock_would_show(pool: Pools, row: Row) -> None:
    """Parameters and, of fully_shard, state dicts, after each forward and backward, whatever a scope keeps."""
    for ours, stock in zip(records(pool, row), records_of_stock(pool, row), strict=True):
        for phase, shown in stock.shown.items():
            assert ours.shown[phase] == shown, phase


@over(EXACT, CODED, WITH_CODECS, ALONE, where=lambda row: not row.is_split)
def test_one_rank_logs_one_line(pool: Pools, row: Row) -> None:
    """A warning if a part of the strategy is not active."""
    net = models.Net(**dict(row.case.model))
    units = 1 + row.case.wrap_blocks * (len(net.blocks) + (net.unused is not None))
    summary = summarize(row.strategy, row.resolved)
    said = f"Net: {row.strategy.levels} on {row.topology}, {units} unit{'s' * (units > 1)}: {summary}"
    start = f"Net: {row.strategy.levels} on "  # other lines are warnings, as of backwards that all synchronize
    first, *others = ([line for line in r.lines if line[1].startswith(start)] for r in records(pool, row))
    assert others == [[]] * (row.world - 1)
    [(level, line)] = first
    assert without_sizes(line) == without_sizes(said)
    assert ("KiB a rank)" in line) == (row.resolved.error_feedback is not None)
    assert level == ("WARNING" if summary.inactive else "INFO")


def without_sizes(line: str) -> str:
    return re.sub(r"; [\d.]+ \w+ a rank", "", line)


def differently_seeded(adapter: Adapter, scopes: str) -> tuple[str, int]:
    """In a worker: what a net says whose weights are others on every rank, and how many lines it has logged."""
    with collected() as lines:
        model = adapter.shard(models.make_net(seed=dist.get_rank()), Case(), Strategy(scopes, gpus_per_node=2))
        try:
            models.loss_of(model, models.batch(0, 0))
        except ValueError as error:
            return str(error), len(lines)
    return "", 0


@over_each(rest=False, adapter=ADAPTERS, scopes=[*SCOPES, "NNI"])
def test_replicas_must_start_equal(pool: Pools, adapter: Adapter, scopes: str) -> None:
    for said, lines in pool(4).run(differently_seeded, adapter, scopes):
        assert ("they hold different weights" in said) == (scopes[2] != "G")
        assert lines == 0  # nothing is logged of what is refused


PHASES = "encode intra_all_gather decode intra_all_to_all decode_sum_encode inter_all_to_all decode_sum".split()


def names_in_a_profile(adapter: Adapter) -> set[str]:
    """In a worker: what a step is made of, as a profiler sees it."""
    model = adapter.make(Case(), Strategy.zeropp(gpus_per_node=2))
    train(adapter, model, Case(steps=1, clip=None))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(adapter, model, Case(steps=1, clip=None))
    return {event.name for event in profiler.events() if event.name.startswith("fsdp_zpp::")}


@over_adapters
def test_every_phase_of_every_unit_has_a_name_in_profiles(pool: Pools, adapter: Adapter) -> None:
    for names in pool(4).run(names_in_a_profile, adapter):
        assert names >= {f"fsdp_zpp::{phase} (blocks.{i})" for phase in PHASES for i in range(2)}
        # Units as small as these are prefetched together, in a hop that is named after the first and the last.
        assert any(re.fullmatch(r"fsdp_zpp::inter_all_gather \(.* to blocks\.1\)", name) for name in names)


# ---- larger trainings


# Large enough for scales and padding to weigh what they do in a real model. The root has no weight to speak of.
LARGE = (("blocks", 3), ("width", 192), ("hidden", 1024), ("vocabulary", 3))
IN_BF16 = Case(model=LARGE, precision=BF16, steps=1, clip=None)


def bytes_sent(adapter: Adapter, strategy: Strategy | None) -> Sent:
    """In a worker: what the second step of a large model sends, by the wiretap and by traffic()."""
    model = adapter.make(IN_BF16, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, IN_BF16, optimizer=optimizer)
    step = partial(train, adapter, model, IN_BF16, optimizer=optimizer, first_step=1)
    return sent_in(step, model, 2, counts=strategy is not STOCK)


@over_adapters
def test_zeropp_sends_a_quarter_between_nodes_and_differences_half_or_less(pool: Pools, adapter: Adapter) -> None:
    codecs = Int8(64), Int4Delta(64, Int8(64)), Int2Delta(64, Int8(64))
    of_codecs = [Strategy("IGG", weights=codec, gpus_per_node=2) for codec in codecs]
    strategies = (Strategy.zeropp(gpus_per_node=2), STOCK, *of_codecs)
    sent = [pool(4).run(bytes_sent, adapter, strategy) for strategy in strategies]
    for (tap, own), (stock, _), (_, of_whole), *of_deltas in zip(*sent, strict=True):
        assert 0 < tap.total("inter") <= 0.27 * stock.total("inter")
        assert tap.total("inter") == own["gather"]["inter"] + own["reduce"]["inter"]
        for (_, of_delta), (least, most) in zip(of_deltas, ((0.4, 0.62), (0.27, 0.38)), strict=True):
            assert of_delta["gather"]["intra"] == of_whole["gather"]["intra"]
            assert least < of_delta["gather"]["inter"] / of_whole["gather"]["inter"] < most
