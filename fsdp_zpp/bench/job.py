"""The running job: its process group, this rank's device, and the memory that is free on all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def join(device: str) -> torch.device:
    """Join the process group under torchrun and return this rank's device, ``cuda`` or ``cpu``."""
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own)
    return own


@contextmanager
def joined() -> Iterator[torch.device]:
    """Return a context of the process group of torchrun's ranks: on GPUs where there are any, else on CPUs.

    Raises:
        ValueError: If torchrun has not started this process, or has started only one.
    """
    if "RANK" not in os.environ:
        raise ValueError(
            "bench runs under torchrun only: torchrun --nproc-per-node NUMBER_OF_GPUS -m fsdp_zpp bench --model ..."
        )
    if os.environ.get("WORLD_SIZE") == "1":
        raise ValueError(
            "bench compares how ranks communicate, and torchrun has started only one; start one for each GPU, two or "
            "more: --nproc-per-node 2"
        )
    place = join("cuda" if torch.cuda.is_available() else "cpu")
    try:
        yield place
    finally:
        dist.destroy_process_group()


def is_rank_zero() -> bool:
    """Return whether this rank is the one that reports."""
    return os.environ.get("RANK", "0") == "0"


def free_gib(place: torch.device) -> float | None:
    """Return the GiB that are free on the fullest GPU of the job; None on CPUs. Collective."""
    if place.type != "cuda":
        return None
    dist.barrier()  # NCCL's first buffers are allocated now
    free = torch.tensor(float(torch.cuda.mem_get_info(place)[0]), device=place)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    return free.item() / 2**30
