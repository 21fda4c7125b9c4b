"""What a save of a frozen base does to the disk, step by step, and what may happen at each of the steps."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from fsdp_zpp import load_frozen_params, quantize_frozen_params
from fsdp_zpp.frozen.files import base_writer

from . import frozen_files as files, models

FILE_SIZE = 20_000
"""Smaller than a base, so that there are several files."""
STEPS: list[tuple[Any, str]] = [
    (base_writer, "save_file"),
    (os, "fsync"),
    (fcntl, "flock"),
    *((Path, name) for name in ("mkdir", "open", "iterdir", "replace", "unlink")),
]
_ORIGINALS = [
    # The order of steps is what matters, and to wait for a disk takes long.
    (owner, name, (lambda descriptor: None) if name == "fsync" else getattr(owner, name))
    for owner, name in STEPS
]


class Killed(BaseException):
    """Ends a process: nothing that it does afterwards has an effect."""


@dataclass
class Steps:
    """The steps of a save that were begun, and those that had an effect."""

    begun: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@contextmanager
def at_steps(happen: Callable[[int], None]) -> Iterator[Steps]:
    """Let ``happen(number)`` run before each step of a save.

    In such a context within ``happen``, the steps are those of the inner one alone.
    """
    steps = Steps()

    def watched(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            steps.begun.append(name)
            happen(len(steps.begun) - 1)
            result = original(*arguments, **options)
            steps.done.append(name)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, original in _ORIGINALS:
            patch.setattr(owner, name, watched(name, original))
        yield steps


@contextmanager
def dying_at(step: int) -> Iterator[Steps]:
    """Kill what saves at a step."""

    def happen(number: int) -> None:
        if number >= step:
            raise Killed

    with at_steps(happen) as steps:
        yield steps


@contextmanager
def failing_at(step: int) -> Iterator[Steps]:
    """Let a step fail."""

    def happen(number: int) -> None:
        if number == step:
            raise OSError("No space left on device")

    with at_steps(happen) as steps:
        yield steps


def quantized(seed: int, group: dist.ProcessGroup | None = None) -> models.Net:
    """A base on the CPU that differs from those of other seeds."""
    base = files.make_base(seed)
    quantize_frozen_params(base, files.CODEC, process_group=group, device="cpu")
    return base


def stored_in(folder: Path, group: dist.ProcessGroup | None = None) -> Tensor:
    """What a base computes that is loaded from a folder."""
    net = files.make_empty()
    load_frozen_params(net, folder, process_group=group, device="cpu")
    return files.output_of(net)
