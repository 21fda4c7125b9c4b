"""Predicted time of a step: communication, computation, and what the CPU takes to launch them.

The rule is PaRO's (section 3), T = max(t_comm, t_comp), with the CPU as a third: whichever takes longest hides the
others. Computation is FLOPs over FLOP/s: 6 a trainable parameter and token, 4 a frozen one. Attention's share that
grows with the sequence, recomputation and the optimizer are left out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.resolve import ResolvedStrategy

from .axes import Axes
from .config import Cluster, StepConfig
from .model_size import ModelSize
from .volume import Volume

_NOTHING = Volume()

OF_CODECS = 0.08
"""Share by which codecs lengthen a unit's launch: over NVLink, where nothing else differs, a step with zeropp takes
1.06 (FSDP) to 1.14 (FSDP2) times that of FULL_SHARD (benchmarks/step/results/1.35B-2x1-fast.json)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
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
        """Return the time of all hops, their sum: they use different links, but each waits for the other's result.

        Copies from and to the host are hops, too.
        """
        return self.host + self.inter + self.intra + self.exchange

    @property
    def total(self) -> float:
        """Return the step's time: communication except exchanges overlaps fully with the rest; waits are added."""
        hops = self.host + self.inter + self.intra
        return max(hops, self.computation, self.launch) + self.optimizer + self.wait


def step_time(
    volume: Volume, size: ModelSize, cluster: Cluster, work: StepConfig, axes: Axes, resolved: ResolvedStrategy
) -> StepTime:
    """Return the time that ``volume``, the computation and its launch take.

    The GPUs of a node share its network, which therefore sends gpus_per_node * volume.inter bytes at inter_gbps. Tensor
    parallelism and a pipeline divide the computation; bubbles of the pipeline are left out.
    """
    # Beside a quantized base, what is trained and encoded is a small part, in one unit if the model is wrapped once.
    encodes = resolved.frozen is None and (resolved.weights, *resolved.gradient_codecs) != (None, None, None)
    launches = size.count * work.micro_batches / axes.pp
    return StepTime(
        inter=_seconds(cluster.gpus_per_node * volume.inter, cluster.inter_gbps),
        intra=_seconds(volume.intra, cluster.intra_gbps),
        computation=_computation(size, work) / (axes.tp * axes.pp),
        launch=work.launch_ms / 1e3 * launches * (1 + OF_CODECS * encodes),
    )


def with_exchanges(
    step: StepTime,
    exchange: Volume,
    fragments: int,
    cluster: Cluster,
    local_steps: LocalSteps,
    moments: Volume = _NOTHING,
) -> StepTime:
    """Return the average time of local steps and their exchanges.

    Training waits for an exchange, less the ``overlap`` steps that it may take to arrive. Without an overlap, the
    average wait is the same whether fragments are spread or exchanged at once. Training always waits for the node's
    ranks to put their parts together afterwards, and for moments.

    This assumes that all fragments have the same size and all steps take the same time, that spread fragments are due
    at equal intervals, and that those on their way take turns on the network between nodes, which the steps leave idle.
    It leaves out encoding, the outer optimizer, and copies from and to the CPU under ``offload``.

    Args:
        step: The time of a step inside a node.
        exchange: Bytes that one rank sends when each fragment is exchanged once.
        fragments: Number of fragments.
        cluster: The cluster.
        local_steps: When fragments are exchanged.
        moments: Bytes that one rank sends when each fragment's moments are averaged once.
    """
    every = local_steps.last_every
    between = _seconds(cluster.gpus_per_node * exchange.inter, cluster.inter_gbps) / every
    inside = _seconds(exchange.intra, cluster.intra_gbps) / every
    starts = min(fragments, every) if local_steps.spread else 1
    # The share of all steps during which an exchange is on its way.
    hiding = min(1.0, local_steps.overlap * starts / every)
    averaged = _seconds(cluster.gpus_per_node * moments.inter, cluster.inter_gbps)
    averaged = (averaged + _seconds(moments.intra, cluster.intra_gbps)) / (every * (local_steps.moments_every or 1))
    wait = max(0.0, between - hiding * step.total) + inside + averaged
    return dataclasses.replace(step, exchange=between + inside + averaged, wait=wait)


def _seconds(nbytes: int, gbps: float | None) -> float:
    return 0.0 if gbps is None else nbytes * 8 / (gbps * 1e9)


def _computation(size: ModelSize, work: StepConfig) -> float:
    """Return the seconds of forward and backward.

    Per parameter and token they take 2 FLOPs for the output, 2 for the gradient of the input and, if the parameter is
    trainable, 2 for its own gradient. In a mixture of experts, only the experts that a token is routed to count.
    """
    if work.tokens is None or work.tflops is None:
        return 0.0
    flops = (6 * size.active_trainable + 4 * size.active_frozen) * work.tokens * work.micro_batches
    return flops / (work.tflops * 1e12)
