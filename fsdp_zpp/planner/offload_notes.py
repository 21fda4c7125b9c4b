"""Notes on CPU offload: what it takes beside the strategy, and that it would help where nothing fits without."""

from __future__ import annotations

from collections.abc import Sequence

from .config import GIB, MemoryBudget, Offload
from .estimate import Estimate

ANY_HOST = Offload(gbps=1.0, optimizer_gbs=1.0)
"""A host of which no figure matters but that it has enough memory: what fits does not depend on its speed."""


def notes_on_offload(budget: MemoryBudget) -> list[str]:
    """Return notes on what is offloaded, if anything is."""
    offload = budget.offload
    if offload is None:
        return []
    what = (
        "Parameters, their gradients and optimizer state are offloaded: pass offload_policy=CPUOffloadPolicy() to "
        "fully_shard, or cpu_offload=CPUOffload(offload_params=True) to FullyShardedDataParallel. A quantized base, "
        "secondary shards, accumulated gradients and errors stay on the GPU."
    )
    speed = (
        f"A GPU is taken to copy {offload.gbps:,.4g} Gbit/s from and to the host, and the CPUs of a node to move "
        f"{offload.optimizer_gbs:,.4g} GB/s in a fused optimizer's step, which comes after the backward."
    )
    if not offload.assumed:
        return [what, speed]
    options = " and ".join(f"{name} (--{name.replace('_', '-')})" for name in offload.assumed)
    which, them = ("That is", "them") if len(offload.assumed) == 2 else ("Of these, one is", "it")
    assumption = (
        f"{which} assumed, not measured: pass {options} as benchmarks/step/offload.py prints {them} on your machine."
    )
    return [what, speed, assumption]


def hint_at_offload(offloaded: Sequence[Estimate]) -> list[str]:
    """Return a note on the smallest row that would fit with CPU offload, if any would.

    Args:
        offloaded: The rows with offload.
    """
    fitting = [estimate for estimate in offloaded if estimate.fits]
    if not fitting:
        return []
    # Exact mathematics first: local steps are never the answer to a lack of memory.
    smallest = min(fitting, key=lambda each: (each.strategy.local_steps is not None, each.memory.total))
    hint = (
        f"With CPU offload (cpu_offload=True, --cpu-offload), {len(fitting)} of {len(offloaded)} would fit: "
        f"{smallest.name} takes {smallest.gib:.1f} GiB a GPU, and {smallest.memory.host / GIB:.1f} GiB of its host for "
        "each."
    )
    return [hint]
