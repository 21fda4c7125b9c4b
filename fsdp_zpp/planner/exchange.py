"""Additions of local steps to a step inside a node: exchanges between nodes, their bytes and their memory.

Between exchanges a node is a job of its own (``ResolvedStrategy.within_node``), so volume.py and memory.py plan it as
one.

In an exchange, a rank sends a part of each unit that is trained: its shard under the optimizer scope I, one of
gpus_per_node equal parts under N. The planner knows the size of a unit and not its parameters, so it takes a unit for
one flat tensor, padded once. Under N, the last rank of a node may hold, and send, a little less than the figures.
Optimizers are taken to keep a moment for each 4 bytes of their state, as AdamW keeps two in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_zpp.codecs.blockwise import Blockwise
from fsdp_zpp.config.error_feedback import error_nbytes
from fsdp_zpp.config.local_steps import MOMENT_CODEC, LocalSteps
from fsdp_zpp.config.resolve import ResolvedStrategy
from fsdp_zpp.config.topology import Topology

from .config import Precision
from .memory import Memory
from .model_size import ModelSize
from .volume import Volume, nbytes, shard_numel

_FP32 = 4


def fragment_count(size: ModelSize) -> int:
    """Return the number of units that are exchanged."""
    return sum(unit.count for unit in size.units if unit.trainable)


def exchange_volume(
    size: ModelSize, resolved: ResolvedStrategy, local_steps: LocalSteps, precision: Precision
) -> Volume:
    """Return the bytes that one rank sends when each unit is exchanged once, which takes ``every`` steps.

    Args:
        size: The size of the model.
        resolved: The strategy, on several nodes.
        local_steps: How they exchange.
        precision: The dtypes.
    """
    total = Volume()
    for unit in size.units:
        if unit.trainable:
            one = _Exchange(unit.trainable, resolved, local_steps, precision)
            total += Volume(unit.count * one.sent_between, unit.count * one.sent_inside)
    return total


def moment_volume(size: ModelSize, resolved: ResolvedStrategy, local_steps: LocalSteps, precision: Precision) -> Volume:
    """Return the bytes that one rank sends when each unit's moments are averaged once; none if they never are.

    That takes ``every * moments_every`` steps. Arguments are those of :func:`exchange_volume`.
    """
    total = Volume()
    for unit in size.units:
        if unit.trainable and local_steps.moments_every is not None:
            one = _Exchange(unit.trainable, resolved, local_steps, precision)
            total += Volume(unit.count * one.moments_sent_between, unit.count * one.moments_sent_inside)
    return total


def per_step(exchange: Volume, moments: Volume, local_steps: LocalSteps) -> Volume:
    """Return the bytes of exchanges averaged over the steps of the last segment, rounded up to whole bytes.

    Args:
        exchange: What :func:`exchange_volume` returns.
        moments: What :func:`moment_volume` returns.
        local_steps: How often both are sent.
    """
    times = local_steps.moments_every or 1
    steps = local_steps.last_every * times
    return Volume(
        -(-(exchange.inter * times + moments.inter) // steps), -(-(exchange.intra * times + moments.intra) // steps)
    )


def exchange_memory(
    size: ModelSize, resolved: ResolvedStrategy, local_steps: LocalSteps, precision: Precision
) -> Memory:
    """Return the memory that exchanges add on a GPU; arguments are those of :func:`exchange_volume`.

    The buffers of the largest unit count in full beside the units that are gathered: an exchange has a stream of its
    own, and torch's allocator does not reuse memory across streams at once. However many units are due together, they
    are exchanged one after the other. Errors stay on the GPU under ``offload``, too.
    """
    total, buffers = Memory(), 0
    for unit in size.units:
        if unit.trainable:
            one = _Exchange(unit.trainable, resolved, local_steps, precision)
            total += Memory(outer=one.outer_state, errors=one.errors) * unit.count
            buffers = max(buffers, one.buffers)
    return total + Memory(working=buffers)


def moment_buffers(chunk: int, nodes: int) -> int:
    """Return the peak bytes of buffers while moments are averaged, one moment after the other.

    Args:
        chunk: The number of values of which a rank makes the mean.
        nodes: The number of nodes.
    """
    # The moments in fp32, and beside them payloads sent and received, or the signs of a chunk.
    return nodes * _FP32 * chunk + max(2 * nodes * MOMENT_CODEC.nbytes(chunk), _FP32 * chunk)


@dataclass(frozen=True)
class _Exchange:
    """Exchange of one unit of ``numel`` trainable elements, on one rank."""

    numel: int
    resolved: ResolvedStrategy
    local_steps: LocalSteps
    precision: Precision

    @property
    def _nodes(self) -> int:
        return self.resolved.topology.nodes

    @property
    def _part(self) -> int:
        """Return the elements that this rank exchanges."""
        return shard_numel(self.numel, "I", self.resolved.topology)

    @property
    def _chunk(self) -> int:
        """Return the elements of which this rank makes the outer step."""
        return -(-self._part // self._nodes)

    @property
    def _payload(self) -> int:
        """Return the bytes of an encoded chunk."""
        return nbytes(self.local_steps.codec, self._chunk, _FP32)

    @property
    def _payload_back(self) -> int:
        """Return the bytes of an encoded chunk of the update, which is made of all nodes' changes."""
        codec = self.local_steps.codec
        return nbytes(None if codec is None else codec.for_sum_of(self._nodes), self._chunk, _FP32)

    @property
    def _shares_node(self) -> bool:
        """Return whether the ranks of a node hold the same weights, and put their parts together after an exchange."""
        return self.resolved.scopes.optimizer == "N" and self.resolved.topology.gpus_per_node > 1

    @property
    def sent_between(self) -> int:
        """Return the bytes to other nodes: a chunk of changes to each, and this rank's chunk of the update to all."""
        return (self._nodes - 1) * (self._payload + self._payload_back)

    @property
    def sent_inside(self) -> int:
        """Return the bytes to other GPUs of the node."""
        others = self.resolved.topology.gpus_per_node - 1
        return others * self._part * self.precision.storage.itemsize if self._shares_node else 0

    @property
    def _moments(self) -> int:
        return -(-self.precision.optimizer_bytes // _FP32)

    @property
    def _averages_moments(self) -> bool:
        return self.local_steps.moments_every is not None and self._moments > 0

    @property
    def moments_sent_between(self) -> int:
        """Return the bytes to other nodes of an average of moments: a chunk to each, and this rank's mean to all."""
        return 2 * (self._nodes - 1) * self._moments * MOMENT_CODEC.nbytes(self._chunk)

    @property
    def moments_sent_inside(self) -> int:
        """Return the bytes to other GPUs of the node."""
        others = self.resolved.topology.gpus_per_node - 1
        return others * self._part * self.precision.optimizer_bytes if self._shares_node else 0

    @property
    def outer_state(self) -> int:
        """Return the bytes of the agreed weights and the momentum on the GPU."""
        return 0 if self.local_steps.offload else _FP32 * (self._nodes + 1) * self._chunk

    @property
    def errors(self) -> int:
        """Return the bytes of the errors, on the way there and back."""
        feedback = self.local_steps.error_feedback
        if feedback is None:
            return 0
        across = Topology(self._nodes, 1)
        there = error_nbytes(feedback, (None, self.local_steps.codec), "G", across, self._chunk)
        return there + feedback.nbytes(self._chunk)

    @property
    def buffers(self) -> int:
        """Return the peak bytes of buffers over the phases of an exchange."""
        chunk = _FP32 * self._chunk
        change, payloads = self._nodes * chunk, self._nodes * self._payload
        # Without a codec, changes are sent from where they are.
        sent = payloads if self.local_steps.codec is not None else 0
        return max(
            change + self._agreed_copies,
            change + chunk + sent + payloads,  # the mean, and payloads sent and received
            change + 2 * chunk,  # the outer step, from the mean to the update
            change + (self._nodes + 1) * self._payload_back,  # of which one is sent
            change + chunk + self._fed_back * self._nodes + payloads,
            self._put_together,
            moment_buffers(self._chunk, self._nodes) if self._averages_moments else 0,
            # Before the stop, the exact mean of moments, sent from where they are.
            2 * change if self.local_steps.stop is not None and self._moments > 0 else 0,
        )

    @property
    def _fed_back(self) -> int:
        """Return the bytes in which a chunk is fed back its errors outside a kernel, if its codec has none.

        There are the sum with its errors, what of it is left out, and two temporaries for whether it is finite.
        """
        feedback, codec = self.local_steps.error_feedback, self.local_steps.codec
        if feedback is None or isinstance(codec, Blockwise):
            return 0
        decoded = 0 if feedback.dtype is None else _FP32
        return (3 * _FP32 + 1 + decoded) * self._chunk

    @property
    def _agreed_copies(self) -> int:
        """Return the bytes of the agreed weights on the GPU, and as rounded to the dtype of the weights."""
        itemsize = self.precision.storage.itemsize
        if itemsize == _FP32:
            return _FP32 * self._part if self.local_steps.offload else 0
        return (itemsize + _FP32) * self._part

    @property
    def _put_together(self) -> int:
        """Return the bytes of the node's parts, put together, and of this rank's own part."""
        gpus = self.resolved.topology.gpus_per_node
        return (gpus + 1) * self._part * self.precision.storage.itemsize if self._shares_node else 0
