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
    """Run ``command``, a script or ``-m`` and a module, with its arguments, on all ranks of one host.

    Args:
        processes: Number of ranks.
        command: What each runs.
        timeout: Seconds after which those that still run are killed.
        on_cpu: Whether GPUs are hidden, as they are where there are fewer than ranks.
        working: The folder that each runs in, from which the path of a script counts.

    Returns:
        The exit code of the first rank that failed, after which the others are ended, and what all have printed.
    """
    arguments, context, port = [str(part) for part in command], start_method(), free_port()
    if on_cpu or torch.cuda.device_count() < processes:
        gpus = {"CUDA_VISIBLE_DEVICES": ""}
    else:
        # Not as clients of NVIDIA's MPS: a rank that is killed would take down all others on its GPU.
        gpus = {"CUDA_MPS_PIPE_DIRECTORY": os.devnull}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_main, args=(rank, processes, port, arguments, working, folder, gpus), daemon=True)
            for rank in range(processes)
        ]
        for process in ranks:
            process.start()
        code = _wait(ranks, time.monotonic() + timeout)
        out, err = ("".join(_printed(folder, name, rank) for rank in range(processes)) for name in ("out", "err"))
    return CompletedProcess(arguments, code, out, err)


def _wait(ranks: list[multiprocessing.Process], deadline: float) -> int:
    """The exit code of the first that fails, or 0; what then runs is killed."""
    running, failed = list(ranks), 0
    while running and not failed and time.monotonic() < deadline:
        ready = multiprocessing.connection.wait([p.sentinel for p in running], deadline - time.monotonic())
        ended = [p for p in running if p.sentinel in ready]
        for process in ended:
            process.join()
        failed = next((p.exitcode for p in ended if p.exitcode), 0)
        running = [p for p in running if p not in ended]
    for process in running:
        process.kill()
        process.join()
    return failed or (-signal.SIGKILL if running else 0)


def _printed(folder: str, name: str, rank: int) -> str:
    path = Path(folder, f"{name}{rank}")
    return path.read_text() if path.exists() else ""


def _main(
    rank: int, world: int, port: int, arguments: list[str], working: Path, folder: str, gpus: dict[str, str]
) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, f"{name}{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    os.chdir(working)
    os.environ |= gpus | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
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
    """Process groups that this rank is in."""
    return len(dist.distributed_c10d._world.pg_names)


def _join(world: int, gpus_per_node: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(gpus_per_node), "GROUP_WORLD_SIZE": str(world // gpus_per_node)}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
