"""Predicted time of a step: communication, computation, and what the CPU takes to launch them.

The rule is PaRO's (section 3), T = max(t_comm, t_comp), with the CPU as a third: whichever takes longest hides the
others. Computation is FLOPs over FLOP/s: 6 a trainable parameter and token, 4 a frozen one. Attention's share that
grows with the sequence, recomputation and the optimizer are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fsdp_zpp.codecs import Blockwise
from fsdp_zpp.strategy.error_feedback import Topology, error_nbytes
from fsdp_zpp.strategy.local_steps import MOMENT_CODEC, LocalSteps
from fsdp_zpp.strategy.strategy import ResolvedStrategy, Strategy

from .cluster import Cluster, Offload, Precision
from .memory import Figures, Memory, Volume, gathers_in_step, nbytes, shard_numel
from .model_size import AxisRanks, Case, ModelSize, Part, Units

# ---- node size
#
# Which ranks count as a node, and which links its hops take, on a machine whose links are slow.
#
# The rule is that of training, [Note: Links] in strategy/strategy.py. On several machines without NVLink there are
# three levels: a GPU's own memory, its machine, all machines. The planner compares both node sizes there. A hop between
# nodes of one GPU goes over two kinds of links: to ranks of the same machine, and out of it.


def strategy_topology(strategy: Strategy, ranks: Topology, cluster: Cluster) -> Topology:
    """Return the layout that ``strategy`` sees of ``ranks``, over which it shards on machines."""
    if strategy.gpus_per_node is not None:
        return Topology(ranks.world, strategy.gpus_per_node)
    return Topology(ranks.world, 1) if splits_machine(strategy, cluster) else ranks


def splits_machine(strategy: Strategy, cluster: Cluster) -> bool:
    """Return whether each GPU of the only machine counts as a node, without the strategy's saying so."""
    alone = cluster.slow_links and cluster.nodes == 1 and cluster.gpus_per_node > 1
    return alone and strategy.gpus_per_node is None and strategy.follows_links


def on_machines(hops: Volume, seen: Topology, ranks: Topology) -> Volume:
    """Split the bytes that a rank sends between nodes and inside them into those that leave its machine and the others.

    The strategy sees nodes in ``seen``, and ``ranks`` are on machines, which are as large or larger.
    """
    if seen.nodes == 1 or seen == ranks:
        return hops
    # The peers of a hop between nodes are one rank of each other node, and get equally much.
    beside = ranks.gpus_per_node // seen.gpus_per_node - 1
    inside = hops.inter * beside // (seen.nodes - 1)
    return Volume(hops.inter - inside, hops.intra + inside)


# ---- activations
#
# Activations that other parallelisms send are the textbook's figures, in each micro-batch and with what backward sends:
#
# - tp, with sequence parallelism (arXiv 2205.05198): four all-gathers and four reduce-scatters of a layer's
# activations; - cp, as ring attention (arXiv 2310.01889): keys and values twice, and their gradients once; - ep: each
# token to the experts that it is routed to, and back, as if tokens spread evenly; - pp: the activations that a stage
# hands on, and their gradients. With two stages, each sends one of them.
#
# A byte counts once for each rank that it goes to. Savings of frameworks, and what they compute again, are not in it.

_COLLECTIVES_OF_TP = 8
_PASSES_OF_CP = 3
_EXCHANGES_OF_EP = 4


def activation_volumes(case: Case) -> dict[str, Volume]:
    """Return the bytes that one rank sends in a step along each axis but data parallelism, as far as they are known."""
    ranks_of = case.axes.others(case.cluster)
    if not ranks_of or case.size.layer is None or case.work.tokens is None:
        return {}
    layer, axes, routing, parts = case.size.layer, case.axes, case.size.routing, case.parts
    tokens = case.work.tokens * case.work.micro_batches
    layers, expert_layers = _layers(parts[0]), _layers(parts[-1])
    own = tokens * layer.hidden / axes.tp  # the ranks of tensor parallelism share the tokens
    to_each_peer = {
        "tp": _COLLECTIVES_OF_TP * layers * own,
        "cp": None if layer.keys is None else _PASSES_OF_CP * layers * 2 * tokens * layer.keys / axes.tp,
        "ep": None if routing is None else _EXCHANGES_OF_EP * expert_layers * own * routing.chosen / axes.ep,
        "pp": own,
    }
    return {
        axis: _sent(axis, ranks_of[axis], round(values * case.precision.compute.itemsize), case.cluster.gpus_per_node)
        for axis, values in to_each_peer.items()
        if values is not None and axis in ranks_of
    }


def _layers(part: Part) -> int:
    return sum(unit.count for unit in part.units.units if unit.reshard_after_forward)


def _sent(axis: str, ranks: AxisRanks, to_each: int, gpus_per_node: int) -> Volume:
    together = ranks.on_a_node(gpus_per_node)
    if axis != "pp":
        return Volume(to_each * (ranks.size - together), to_each * (together - 1))
    # A stage has neighbours alone: one on each side, but for the first and the last.
    neighbours = min(ranks.size - 1, 2)
    elsewhere = neighbours if together == 1 else int(together < ranks.size)
    return Volume(to_each * elsewhere, to_each * (neighbours - elsewhere))


# ---- offload
#
# CPU offload takes time for copies between the host's memory and the GPU, and for the optimizer's step on the CPU.
#
# Copies. FSDP keeps shards in the dtype in which they are stored, and copies a unit's shard to the GPU whenever ranks
# gather from it: with equal parameter and optimizer scopes for each forward and backward, as torch's FSDP does; with
# the scopes I or N over a finer one once a step, since what is gathered again then comes from what is kept on the GPU,
# and never if the unit is frozen. A shard's gradient is copied back once a step, in the same dtype (torch's
# ``foreach_reduce`` and ``_offload_grad``). Bytes divide by the bandwidth of one GPU's link to its host.
#
# The optimizer. Its step is bound by memory: it reads parameters, gradients and state, and writes the first and the
# last. With s bytes stored for a parameter and o bytes of state that is 3 s + 2 o, 28 for Adam in fp32. GPUs of a node
# share its CPUs, whose bandwidth counts for all of them together. The optimizer has to be a fused or vectorized one
# (``torch.optim.AdamW(..., fused=True)``): one that makes a pass for each operation moves a multiple.


@dataclass(frozen=True)
class HostWork(Figures):
    """Bytes that offloaded parameters of one GPU move in an optimizer step.

    Args:
        down: Bytes of parameters that are copied to the GPU.
        up: Bytes of gradients that are copied to the host.
        optimizer: Bytes that the optimizer reads and writes in the host's memory.
    """

    down: int = 0
    up: int = 0
    optimizer: int = 0


def host_work(
    size: Units, resolved: ResolvedStrategy, micro_batches: int, precision: Precision, pipelined: bool = False
) -> HostWork:
    """Return the work of units by the rules at the top of this section; arguments are those of ``step_volume``."""
    parameters, _, optimizer = resolved.scopes
    stored, total = precision.storage.itemsize, HostWork()
    for unit in size.units:
        gathers = gathers_in_step(unit, micro_batches, pipelined)
        trained = shard_numel(unit.trainable, optimizer, resolved.topology)
        # A base with a codec of its own is not FSDP's, and stays on the GPU.
        frozen = shard_numel(unit.frozen, optimizer, resolved.topology) if resolved.frozen is None else 0
        reads, reads_of_frozen = (gathers, gathers) if parameters == optimizer else (1, 0)
        down = reads * trained * stored + reads_of_frozen * frozen * precision.of_frozen.itemsize
        steps = trained * (3 * stored + 2 * precision.optimizer_bytes)
        total += HostWork(down, trained * stored, steps) * unit.count
    return total


def with_offload(step: StepTime, work: HostWork, offload: Offload, gpus_per_node: int) -> StepTime:
    """Return the time of a step whose parameters, which move ``work`` on each GPU, are offloaded."""
    return replace(
        step,
        host=(work.down + work.up) * 8 / (offload.gbps * 1e9),
        optimizer=gpus_per_node * work.optimizer / (offload.optimizer_gbs * 1e9),
    )


# ---- exchange
#
# Additions of local steps to a step inside a node: exchanges between nodes, their bytes and their memory.
#
# Between exchanges a node is a job of its own (``ResolvedStrategy.within_node``), so memory.py plans it as
# one.
#
# In an exchange, a rank sends a part of each unit that is trained: its shard under the optimizer scope I, one of
# gpus_per_node equal parts under N. The planner knows the size of a unit and not its parameters, so it takes a unit for
# one flat tensor, padded once. Under N, the last rank of a node may hold, and send, a little less than the figures.
# Optimizers are taken to keep a moment for each 4 bytes of their state, as AdamW keeps two in fp32.

_FP32 = 4


def per_step(exchanged: Exchanges, local_steps: LocalSteps) -> Volume:
    """Return the bytes of exchanges averaged over the steps of the last segment, rounded up to whole bytes."""
    times = local_steps.moments_every or 1
    steps, sent = local_steps.every * times, exchanged.sent * times + exchanged.moments_sent
    return Volume(-(-sent.inter // steps), -(-sent.intra // steps))


class Exchanges(NamedTuple):
    """Bytes of one rank: sent when units are exchanged once, which takes ``every`` steps, and when moments are averaged
    once, every ``moments_every`` times; the memory that exchanges add on a GPU; and the number of units."""

    sent: Volume
    moments_sent: Volume
    memory: Memory
    fragments: int = 1


def exchanges(size: ModelSize, resolved: ResolvedStrategy, local_steps: LocalSteps, precision: Precision) -> Exchanges:
    """Return the figures of all units.

    The buffers of the largest unit count in full beside the units that are gathered: an exchange has a stream of its
    own, and torch's allocator does not reuse memory across streams at once. However many units are due together, they
    are exchanged one after the other. Errors stay on the GPU under ``offload``, too.
    """
    sent, moments_sent, memory, working, fragments = Volume(), Volume(), Memory(), 0, 0
    for unit in size.units:
        if unit.trainable:
            one = _exchange(unit.trainable, resolved, local_steps, precision)
            sent += one.sent * unit.count
            moments_sent += one.moments_sent * unit.count
            memory += replace(one.memory, working=0) * unit.count
            working = max(working, one.memory.working)
            fragments += unit.count
    return Exchanges(sent, moments_sent, replace(memory, working=working), fragments)


def _exchange(numel: int, resolved: ResolvedStrategy, local_steps: LocalSteps, precision: Precision) -> Exchanges:
    """Return the figures of one rank in the exchange of one unit of ``numel`` trainable elements."""
    codec, feedback = local_steps.codec, local_steps.error_feedback
    nodes, gpus, stored = resolved.topology.nodes, resolved.topology.gpus_per_node, precision.storage.itemsize
    part = shard_numel(numel, "I", resolved.topology)  # which this rank exchanges
    chunk = -(-part // nodes)  # of which it makes the outer step
    payload = nbytes(codec, chunk, _FP32)
    # The update is made of all nodes' changes.
    payload_back = nbytes(None if codec is None else codec.for_sum_of(nodes), chunk, _FP32)
    # Ranks of a node that hold the same weights put their parts together afterwards.
    shares_node = resolved.scopes.optimizer == "N" and gpus > 1
    inside = (gpus - 1) * part if shares_node else 0
    moments = -(-precision.optimizer_bytes // _FP32)
    errors = 0
    if feedback is not None:  # on the way there and back
        there = error_nbytes(feedback, (None, codec), "G", Topology(nodes, 1), chunk)
        errors = there + feedback.nbytes(chunk)
    # The agreed weights on the GPU, and as rounded to the dtype of the weights.
    copies = (stored + _FP32) * part if stored != _FP32 else _FP32 * part if local_steps.offload else 0
    values, change, payloads = _FP32 * chunk, _FP32 * nodes * chunk, nodes * payload
    buffers = max(
        change + copies,
        # The mean, and payloads sent and received; without a codec, changes are sent from where they are.
        change + values + payloads * (1 if codec is None else 2),
        change + 2 * values,  # the outer step, from the mean to the update
        change + (nodes + 1) * payload_back,  # the update, one payload sent and one from each node
        change + values + _fed_back(local_steps) * nodes * chunk + payloads,
        (gpus + 1) * part * stored if shares_node else 0,
    )
    if moments and local_steps.moments_every is not None:
        # The moments in fp32, one after the other, and beside them payloads sent and received, or a chunk's signs.
        buffers = max(buffers, change + max(2 * nodes * MOMENT_CODEC.nbytes(chunk), values))
    if moments and local_steps.stop is not None:
        buffers = max(buffers, 2 * change)  # before the stop, the exact mean, sent from where they are
    sent = Volume((nodes - 1) * (payload + payload_back), inside * stored)
    moments_sent = Volume()
    if local_steps.moments_every is not None:
        between = 2 * (nodes - 1) * moments * MOMENT_CODEC.nbytes(chunk)
        moments_sent = Volume(between, inside * precision.optimizer_bytes)
    outer = 0 if local_steps.offload else change + values
    return Exchanges(sent, moments_sent, Memory(outer=outer, errors=errors, working=buffers))


def _fed_back(local_steps: LocalSteps) -> int:
    # Codecs without a kernel for it hold the change with its errors added, the new errors, and two temporaries for
    # whether these are finite.
    feedback = local_steps.error_feedback
    if feedback is None or isinstance(local_steps.codec, Blockwise):
        return 0
    return 3 * _FP32 + 1 + (0 if feedback.dtype is None else _FP32)


# ---- step time

OF_CODECS = 0.08
"""Share by which codecs lengthen a unit's launch: over NVLink, where nothing else differs, a step with zeropp takes
1.06 (FSDP) to 1.14 (FSDP2) times that of FULL_SHARD (1.35B-2x1-fast in benchmarks/step/results/1.35B-h200.json)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Args:
        inter: Time on the network between nodes.
        intra: Time on the network inside a node.
        computation: Time of forward and backward; 0 if ``tokens`` and ``tflops`` were not given.
        exchange: Time of the exchanges of local steps, averaged over the steps; not included in ``inter`` and
            ``intra``.
        wait: The part of ``exchange`` for which training waits.
        launch: Time in which the CPU launches all units; 0 if ``launch_ms`` was neither given nor known of the GPU.
        host: With CPU offload, time of the copies between the host's memory and the GPU.
        optimizer: With CPU offload, time of the optimizer's step on the CPU, which nothing hides. Optimizers that step
            in the backward hide a part of it.
    """

    inter: float
    intra: float
    computation: float
    exchange: float = 0.0
    wait: float = 0.0
    launch: float = 0.0
    host: float = 0.0
    optimizer: float = 0.0

    @property
    def communication(self) -> float:
        """Return the sum of all hops' times, the host's, too: each waits for the other's result."""
        return self.host + self.inter + self.intra + self.exchange

    @property
    def total(self) -> float:
        """Return the step's time: communication except exchanges overlaps fully with the rest; waits are added."""
        hops = self.host + self.inter + self.intra
        return max(hops, self.computation, self.launch) + self.optimizer + self.wait


def step_time(volume: Volume, resolved: ResolvedStrategy, case: Case) -> StepTime:
    """Return the time that ``volume``, the computation and its launch take.

    The GPUs of a node share its network, which therefore sends gpus_per_node * volume.inter bytes at inter_gbps. Tensor
    parallelism and a pipeline divide the computation; bubbles of the pipeline are left out.
    """
    cluster, axes = case.cluster, case.axes
    # Beside a quantized base, what is trained and encoded is a small part, in one unit if the model is wrapped once.
    encodes = resolved.frozen is None and (resolved.weights, *resolved.gradient_codecs) != (None, None, None)
    launches = case.size.count * case.work.micro_batches / axes.pp
    return StepTime(
        inter=_seconds(cluster.gpus_per_node * volume.inter, cluster.inter_gbps),
        intra=_seconds(volume.intra, cluster.intra_gbps),
        computation=_computation(case) / (axes.tp * axes.pp),
        launch=case.work.launch_ms / 1e3 * launches * (1 + OF_CODECS * encodes),
    )


def with_exchanges(step: StepTime, exchanged: Exchanges, cluster: Cluster, local_steps: LocalSteps) -> StepTime:
    """Return the average time of local steps and their exchanges.

    Training waits for an exchange, less the ``overlap`` steps that it may take to arrive, and always for the node's
    ranks to put their parts together afterwards, and for moments. Fragments are taken to have the same size and to be
    due at equal intervals, and steps to leave the network between nodes idle. Encoding, the outer optimizer, and copies
    from and to the CPU under ``offload`` are left out.
    """
    every, exchange, moments = local_steps.every, exchanged.sent, exchanged.moments_sent
    between = _seconds(cluster.gpus_per_node * exchange.inter, cluster.inter_gbps) / every
    inside = _seconds(exchange.intra, cluster.intra_gbps) / every
    starts = min(exchanged.fragments, every) if local_steps.spread else 1
    # The share of all steps during which an exchange is on its way.
    hiding = min(1.0, local_steps.overlap * starts / every)
    averaged = _seconds(cluster.gpus_per_node * moments.inter, cluster.inter_gbps)
    averaged = (averaged + _seconds(moments.intra, cluster.intra_gbps)) / (every * (local_steps.moments_every or 1))
    wait = max(0.0, between - hiding * step.total) + inside + averaged
    return replace(step, exchange=between + inside + averaged, wait=wait)


def _seconds(nbytes: int, gbps: float | None) -> float:
    return 0.0 if gbps is None else nbytes * 8 / (gbps * 1e9)


def _computation(case: Case) -> float:
    """Return the seconds of forward and backward.

    Per parameter and token they take 2 FLOPs for the output, 2 for the gradient of the input and, if the parameter is
    trainable, 2 for its own gradient. In a mixture of experts, only the experts that a token is routed to count.
    """
    size, work = case.size, case.work
    if work.tokens is None or work.tflops is None:
        return 0.0
    flops = (6 * size.active_trainable + 4 * size.active_frozen) * work.tokens * work.micro_batches
    return flops / (work.tflops * 1e12)
