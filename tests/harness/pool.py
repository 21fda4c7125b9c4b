"""A pool of worker processes in one process group, kept across tests: starting torch takes longer than most tests."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=110)  # of a collective, and of a task
GRACE = 6.0  # seconds in which ranks answer once one has failed: they may hang in a collective that it never entered
PRELOADED = """
    torch.distributed.checkpoint.state_dict torch.distributed.fsdp torch.testing._internal.distributed.fake_pg
    transformers.models.llama.modeling_llama transformers.trainer peft matplotlib.pyplot lightning.pytorch
    torchao.float8 fsdp_zpp
""".split()
"""Modules that processes of tests import anyway, slowly; those that are not installed are left out."""
SHARE_GPUS = "FSDP_ZPP_SHARE_GPUS"  # has workers share GPUs where there are too few: slow, since NCCL's kernels spin


class WorkerError(AssertionError):
    """A test function failed on some ranks."""


def device_type() -> str:
    """``cuda`` where there are GPUs, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def outnumber_gpus(world: int) -> bool:
    """Return whether there are GPUs, but fewer than ``world`` workers, which share them or can't run."""
    return device_type() == "cuda" and torch.cuda.device_count() < world


def too_few_gpus(world: int) -> str:
    """Return the reason, if any, why ``world`` workers can't run."""
    too_few = outnumber_gpus(world) and SHARE_GPUS not in os.environ
    return f"needs {world} GPUs, has {torch.cuda.device_count()}" if too_few else ""


def start_method() -> multiprocessing.context.BaseContext:
    """Processes of tests are forked from one that has imported torch, which takes seconds each time."""
    if device_type() == "cuda":  # whose driver does not survive a fork, should an import ever touch it
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def free_port() -> int:
    """A port that nothing listens on."""
    while True:  # beyond those that the system gives to connections, one of which could take it in the meantime
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def init_process_group(rank: int, world: int, port: int) -> None:
    """Be a rank of a new process group, with the GPU of its number if there are any."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    if device_type() == "cpu":
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return
    host, gpu = divmod(rank, torch.cuda.device_count())
    if SHARE_GPUS in os.environ:
        # NCCL refuses two ranks on one GPU, unless it takes them for those of two hosts.
        os.environ |= {"NCCL_HOSTID": f"host{host}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ["LOCAL_RANK"] = str(gpu)  # from which frameworks choose a rank's GPU
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", timeout=TIMEOUT, device_id=torch.device("cuda", gpu))


@contextmanager
def shared_folder() -> Iterator[str]:
    """In workers: a new folder for all ranks, as long as any of them needs it."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        yield folders[0]
        dist.barrier()


def _work(rank: int, world: int, port: int, pipe: Connection) -> None:
    gc.freeze()  # or each collection would walk through all of torch
    init_process_group(rank, world, port)
    while (task := pipe.recv()) is not None:
        module, name, args, deadline = task
        # A rank that hangs says where, with the test's captured output, before the pool ends it.
        faulthandler.dump_traceback_later(max(deadline - GRACE - time.monotonic(), 1.0))
        try:
            result = getattr(importlib.import_module(module), name)(*args)
            pipe.send((True, result, len(dist.distributed_c10d._world.pg_map)))
        except BaseException:
            pipe.send((False, traceback.format_exc(), 0))
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


class Pool:
    """``world`` processes that run functions together, which they import by name, in one process group."""

    # The pool starts afresh after so many process groups, which tests of meshes leave: each has a thread of gloo.
    most_groups = 40

    def __init__(self, world: int) -> None:
        self.world = world
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._groups = 0
        self._kept: dict[bytes, list[Any]] = {}

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(*args)`` on all ranks; return their results by rank, or raise a ``WorkerError``."""
        if not self._processes:
            self._start()
        deadline = time.monotonic() + TIMEOUT.total_seconds()  # which processes that are still starting share
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # of a process that died, which is reported below
                pipe.send((function.__module__, function.__qualname__, args, deadline))
        replies = self._replies(deadline)
        failed = {rank: text for rank, (ok, text) in replies.items() if not ok}
        if failed:
            # The others may hang in a collective that the failed ranks never entered.
            self.stop(kill=True)
            first, text = next(iter(failed.items()))
            raise WorkerError(f"failed on ranks {sorted(failed)} of {self.world}, first on rank {first}:\n{text}")
        if self._groups > self.most_groups:
            self.stop(kill=True)
        return [result for _, (_, result) in sorted(replies.items())]

    def once(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run as :meth:`run` does, or return what the same call has returned before."""
        call = pickle.dumps((function, args))
        if call not in self._kept:
            self._kept[call] = self.run(function, *args)
        return self._kept[call]

    def _replies(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        """Return replies by rank, in the order of arrival: a rank that failed comes before those that it left."""
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        replies: dict[int, tuple[bool, Any]] = {}
        while waiting and (answered := wait(waiting, max(deadline - time.monotonic(), 0))):
            for pipe in answered:
                reply = self._receive(pipe)
                replies[waiting.pop(pipe)] = reply
                if not reply[0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return replies | dict.fromkeys(waiting.values(), (False, "no answer in time: hung in a collective?"))

    def _receive(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            ok, result, self._groups = pipe.recv()
        except (EOFError, ConnectionResetError):
            return False, "the process died"
        return ok, result

    def _start(self) -> None:
        context, port = start_method(), free_port()
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world, port, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def stop(self, kill: bool = False) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill() if kill else pipe.send(None)
            process.join()
            pipe.close()
        self._pipes, self._processes = [], []


Pools = Callable[[int], Pool]  # the fixture ``pool``: that many workers in one process group
