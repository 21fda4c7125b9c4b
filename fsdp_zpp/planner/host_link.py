"""Measures at which rate a GPU copies from its host's memory, with the copies that offloaded parameters make."""

from __future__ import annotations

from statistics import median

import torch
import torch.distributed as dist

MIB = 64
REPETITIONS = 5


def measure_host_link() -> float | None:
    """Return the Gbit/s of copies from and to pinned memory, of the slowest GPU if there is a job; None without a GPU.

    Collective over the job. All GPUs copy at once, since they share the host's memory.
    """
    if not torch.cuda.is_available():
        return None
    host = torch.empty(MIB * 2**20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    seconds = []
    for _ in range(REPETITIONS + 1):  # the first warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        device.copy_(host, non_blocking=True)
        host.copy_(device, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    rate = torch.tensor(2 * host.nbytes * 8 / median(seconds[1:]) / 1e9)
    if dist.is_initialized():
        # All ranks need the same figure, or they might choose different strategies.
        rate = rate.to("cuda" if "nccl" in dist.get_backend() else "cpu")
        dist.all_reduce(rate, dist.ReduceOp.MIN)
    return rate.item()
