"""accelerate in workers of a pool, which run one job after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin


@contextmanager
def new_job() -> Iterator[None]:
    """Return a context without what accelerate has kept for the process, and after which it keeps nothing."""
    _forget()
    tf32 = torch.backends.cuda.matmul.allow_tf32  # which accelerate allows if a model is to be compiled
    try:
        with mock.patch.dict(os.environ):  # plugins and arguments set variables for all that come
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def choose_own_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Make accelerate shard by its own FSDP2, which it does not choose on a CPU."""
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
