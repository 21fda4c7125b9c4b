"""What CPU offload costs in time: copies between the host's memory and the GPU, and the optimizer's step on the CPU.

Copies. FSDP keeps shards in the dtype in which they are stored, and copies a unit's shard to the GPU whenever ranks
gather from it: with equal parameter and optimizer scopes for each forward and backward, as torch's FSDP does; with the
scopes I or N over a finer one once a step, since what is gathered again then comes from what is kept on the GPU, and
never if the unit is frozen. A shard's gradient is copied back once a step, in the same dtype (torch's
``foreach_reduce`` and ``_offload_grad``). Bytes divide by the bandwidth of one GPU's link to its host.

The optimizer. Its step is bound by memory: it reads parameters, gradients and state, and writes the first and the last.
With s bytes stored for a parameter and o bytes of state that is 3 s + 2 o, 28 for Adam in fp32. GPUs of a node share
its CPUs, whose bandwidth counts for all of them together. The optimizer has to be a fused or vectorized one
(``torch.optim.AdamW(..., fused=True)``): one that makes a pass for each operation moves a multiple.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_zpp.config.resolve import ResolvedStrategy

from .config import Offload, Precision
from .model_size import Units
from .step_time import StepTime
from .volume import gathers_in_step, shard_numel


@dataclass(frozen=True)
class HostWork:
    """Bytes that offloaded parameters of one GPU move in an optimizer step.

    Attributes:
        down: Bytes of parameters that are copied to the GPU.
        up: Bytes of gradients that are copied to the host.
        optimizer: Bytes that the optimizer reads and writes in the host's memory.
    """

    down: int = 0
    up: int = 0
    optimizer: int = 0

    def __add__(self, other: HostWork) -> HostWork:
        return HostWork(self.down + other.down, self.up + other.up, self.optimizer + other.optimizer)


def host_work(
    size: Units, resolved: ResolvedStrategy, micro_batches: int, precision: Precision, pipelined: bool = False
) -> HostWork:
    """Return what units move by the rules at the top of this file; arguments are those of ``step_volume``."""
    parameters, _, optimizer = resolved.scopes
    total = HostWork()
    for unit in size.units:
        gathers = gathers_in_step(unit, micro_batches, pipelined)
        trained = shard_numel(unit.trainable, optimizer, resolved.topology)
        # A base with a codec of its own is not FSDP's, and stays on the GPU.
        frozen = shard_numel(unit.frozen, optimizer, resolved.topology) if resolved.frozen is None else 0
        stored = precision.storage.itemsize
        of_frozen = frozen * (precision.frozen_storage or precision.storage).itemsize
        reads = (gathers, gathers) if parameters == optimizer else (1, 0)
        one = HostWork(
            down=reads[0] * trained * stored + reads[1] * of_frozen,
            up=trained * stored,
            optimizer=trained * (3 * stored + 2 * precision.optimizer_bytes),
        )
        total += HostWork(unit.count * one.down, unit.count * one.up, unit.count * one.optimizer)
    return total


def with_offload(step: StepTime, work: HostWork, offload: Offload, gpus_per_node: int) -> StepTime:
    """Return the time of a step whose parameters are offloaded.

    Args:
        step: The time of the step without.
        work: What one GPU's parameters move.
        offload: The host.
        gpus_per_node: Number of GPUs that share its CPUs.
    """
    return replace(
        step,
        host=(work.down + work.up) * 8 / (offload.gbps * 1e9),
        optimizer=gpus_per_node * work.optimizer / (offload.optimizer_gbs * 1e9),
    )
