"""Runs a script on several processes as torchrun would, but for the seconds in which each imports torch."""

from __future__ import annotations

import io
import multiprocessing.connection
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from .pool import free_port, start_method

ROOT = Path(__file__).parents[2]


def launch(
    processes: int, *command: str | Path, timeout: float = 100, on_cpu: bool = False, working: Path = ROOT
) -> CompletedProcess[str]:
    """Run a script, or ``-m`` and a module, with its arguments, on all ranks of one host.

    Ranks are killed after ``timeout`` seconds, or once one of them has failed, whose exit code is returned with the
    output of all. They see no GPUs if there are too few of them, or with ``on_cpu``.
    """
    arguments, context = [str(part) for part in command], start_method()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    environment |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    # On GPUs, ranks are no clients of NVIDIA's MPS: one that is killed would take down all others on its GPU.
    hides_gpus = on_cpu or torch.cuda.device_count() < processes
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if hides_gpus else {"CUDA_MPS_PIPE_DIRECTORY": os.devnull}
    with tempfile.TemporaryDirectory() as folder:
        ranks, printed = [], [[Path(folder, f"{name}{rank}") for name in ("out", "err")] for rank in range(processes)]
        for rank, files in enumerate(printed):
            of_rank = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            for file in files:
                file.touch()
            ranks.append(context.Process(target=_main, args=(arguments, working, of_rank, files), daemon=True))
            ranks[-1].start()
        code = _wait(ranks, time.monotonic() + timeout)
        out, err = ("".join(file.read_text() for file in files) for files in zip(*printed, strict=True))
    return CompletedProcess(arguments, code, out, err)


def _wait(ranks: list[multiprocessing.Process], deadline: float) -> int:
    """Return the exit code of the first that fails, or 0; those that still run are killed."""
    while (running := [p for p in ranks if p.exitcode is None]) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            break
        multiprocessing.connection.wait([p.sentinel for p in running], max(deadline - time.monotonic(), 0))
    code = next((p.exitcode for p in ranks if p.exitcode), -signal.SIGKILL if running else 0)
    for process in running:
        process.kill()
        process.join()
    return code


def _main(arguments: list[str], working: Path, environment: dict[str, str], printed: list[Path]) -> None:
    for descriptor, file in enumerate(printed, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(working)
    os.environ |= environment
    torch.set_num_threads(1)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(working / Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def printed_by(script: str, arguments: list[str]) -> str:
    """In a worker: the output of a script of the repository that is run as one of this worker's ranks."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [script, *arguments]), redirect_stdout(printed):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return printed.getvalue()


def in_fake_world(world: int, gpus_per_node: int, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` on rank 0 of ``world``, in a process of its own, on the CPU: a process has one world only."""
    with ProcessPoolExecutor(1, start_method(), _join, initargs=(world, gpus_per_node)) as executor:
        return executor.submit(function, *args).result()


def groups_of_this_rank() -> int:
    """The number of process groups that this rank is in."""
    return len(dist.distributed_c10d._world.pg_names)


def _join(world: int, gpus_per_node: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(gpus_per_node), "GROUP_WORLD_SIZE": str(world // gpus_per_node)}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
