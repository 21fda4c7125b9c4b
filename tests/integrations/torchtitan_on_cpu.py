"""Lets torchtitan run where there is no GPU, as it is: its question which device to use gets another answer.

torchtitan asks torch for an accelerator when it is imported, and takes CUDA if there is none. Here torch answers "cpu"
to that one question. ``python torchtitan_on_cpu.py SCRIPT ...`` runs a script after that.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

_CPU = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    synchronize=lambda: None,
    empty_cache=lambda: None,
    get_device_name=lambda device=None: "CPU",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=2**34),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda device=None: None,
)
"""Names that torchtitan asks a device module for."""


@dataclass(frozen=True)
class Run:
    """A training and what it has done.

    Args:
        losses: Of each step, the mean over all ranks.
        metrics: What torchtitan has logged in the last step.
        traffic: What this rank has sent until each step; empty for torchtitan's own.
        validated: Losses of validations.
    """

    losses: list[float]
    metrics: dict[str, float]
    traffic: list[dict[str, dict[str, int]]]
    validated: list[float]


def prepare() -> None:
    """Import the module in which torchtitan keeps its device, and have that be the CPU if there is no GPU.

    Besides, torchtitan calls functions of torch 2.14.
    """
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(schedule.step).parameters:
            schedule.step = _taking_micro_batches(schedule.step)  # type: ignore[method-assign]
    if torch.cuda.is_available():
        return
    with (
        mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu"),
        mock.patch.object(torch._utils, "_get_device_module", return_value=_CPU),
    ):
        importlib.import_module("torchtitan.tools.utils")


def _taking_micro_batches(step: Any) -> Any:
    """Return a schedule's step as it is from torch 2.14 on, which takes a list of micro-batches and not a batch."""

    def step_of(self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **options: Any) -> Any:
        arguments = [torch.cat(each) for each in zip(*(arg_mbs or []), strict=True)]
        named = {name: torch.cat([each[name] for each in kwarg_mbs]) for name in kwarg_mbs[0]}
        target = None if target_mbs is None else torch.cat(target_mbs)
        return step(self, *arguments, target=target, **options, **named)

    return step_of


def call(name: str, *arguments: Any) -> Any:
    """Call a function of ``torchtitan_training``, without torchtitan in the process that names it.

    That of another module is named with it, as ``module.function``.
    """
    prepare()
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module or "torchtitan_training"), function)(*arguments)


if __name__ == "__main__":
    prepare()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
