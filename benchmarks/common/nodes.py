"""Several nodes out of one host, so that NCCL talks over sockets between them and over NVLink inside."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable

import throttle
import torch.distributed as dist

from fsdp_zpp.bench.run import join

STARTED_BY = "FSDP_ZPP_BENCHMARK_COMMAND"
"""Environment variable that tells ranks of emulated nodes the command that started them."""
SPEED_VARIABLES = ("NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_SCALE_LAUNCH_QUEUES", "THROTTLE_")
"""Environment variables that change how fast hops are, or how far the CPU gets ahead of the GPU."""


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options of the nodes, of :func:`start` and of :func:`join`."""
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=2)
    parser.add_argument("--gpus", type=int, help="GPUs that there are, for emulated nodes that share them (nodes.py)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying it out")
    parser.add_argument("--pin", action="store_true", help="give each rank of a machine an equal share of its cores")
    parser.add_argument("--worker", action="store_true", help="this process is one rank, started by torchrun")


def add_throttle(parser: argparse.ArgumentParser) -> None:
    """Add the option that limits the network between nodes."""
    parser.add_argument("--gbps", type=float, help="Gbit/s that each node sends at most (throttle.c)")


def start(arguments: argparse.Namespace, work: Callable[[argparse.Namespace], None]) -> None:
    """Start the nodes, or, with ``--worker``, be one rank of one and do its ``work``.

    Args:
        arguments: Command line with the options of :func:`add_layout` and, for a choice, ``gbps`` and ``fast_network``.
        work: Work of a rank that has its device and the process group.
    """
    if not arguments.worker:
        if (gbps := getattr(arguments, "gbps", None)) is not None:
            os.environ |= throttle.per_process(gbps)
        slow = not getattr(arguments, "fast_network", False)
        command = [*sys.argv, "--worker"]
        run_on_emulated_nodes(arguments.nodes, arguments.gpus_per_node, command, slow=slow, gpus=arguments.gpus)
        return
    if getattr(arguments, "pin", False):
        pin()
    join(arguments.device)
    work(arguments)
    dist.destroy_process_group()


def pin() -> None:
    """Keep this rank, and the threads that it will start, on its own share of the cores that it may use.

    Raises:
        ValueError: If there are fewer cores than ranks.
    """
    # Ranks of emulated nodes share one machine.
    local = "" if STARTED_BY in os.environ else "LOCAL_"
    rank, ranks = int(os.environ[f"{local}RANK"]), int(os.environ[f"{local}WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    if not (share := len(cores) // ranks):
        raise ValueError(f"--pin gives each rank cores of its own, but {ranks} ranks have {len(cores)} cores")
    os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def command() -> list[str]:
    """Return the command that started this run, also in a rank that :func:`start` has started."""
    return ["python", *json.loads(os.environ.get(STARTED_BY, json.dumps(sys.argv)))]


def environment() -> dict[str, str]:
    """Return this rank's :data:`SPEED_VARIABLES`."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(SPEED_VARIABLES)}


def run_on_emulated_nodes(
    nodes: int,
    gpus_per_node: int,
    command: list[str],
    port: int = int(os.environ.get("MASTER_PORT", "29511")),
    slow: bool = True,
    gpus: int | None = None,
) -> None:
    """Run ``command`` under one torchrun a node, each seeing its own share of the GPUs.

    ``CUDA_VISIBLE_DEVICES`` and ``MASTER_PORT`` are honoured, so that two runs fit on one host.
    ``NCCL_HOSTID`` makes NCCL take the shares for different hosts. With one node nothing is emulated. Nodes that share
    GPUs also share their speed, so the strategy that computes longest loses most; they need NVIDIA's MPS
    (``nvidia-cuda-mps-control -d``), or kernels that wait for other ranks hold up those they wait for.

    Args:
        nodes: Number of nodes.
        gpus_per_node: GPUs of each.
        command: A Python script and its arguments.
        port: Rendezvous port on localhost.
        slow: Whether NCCL is to take them for different hosts.
        gpus: GPUs that there are, if fewer than all nodes need: nodes then share them.

    Raises:
        ValueError: If there are too few GPUs for one node, or nodes that share them are not to be different hosts.
        RuntimeError: If any node fails; the others are ended.
    """
    gpus = nodes * gpus_per_node if gpus is None else gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    if gpus < gpus_per_node or (gpus < nodes * gpus_per_node and not slow):
        raise ValueError(
            f"{nodes} nodes of {gpus_per_node} on {gpus} GPUs: ranks of one host need GPUs of their own, as NCCL has it"
        )
    processes = []
    for node in range(nodes):
        variables = dict(os.environ)
        first = node * gpus_per_node
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible[(first + gpu) % gpus] for gpu in range(gpus_per_node))
        if nodes > 1 and slow:
            variables |= {"NCCL_HOSTID": f"node{node}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        variables.setdefault("OMP_NUM_THREADS", "4")
        variables[STARTED_BY] = json.dumps([part for part in command if part != "--worker"])
        if gpus < nodes * gpus_per_node:
            # A hop that waits for other ranks must not hold up later launches of another stream.
            variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        # NCCL cuts sends and receives into pieces of 128 KiB, collectives into 512; sockets are slow with small ones.
        variables.setdefault("NCCL_P2P_NET_CHUNKSIZE", str(512 * 2**10))
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={node}"]
        torchrun += [f"--nproc-per-node={gpus_per_node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        processes.append(subprocess.Popen([*torchrun, *command], env=variables))
    failed = False
    for process in processes:
        failed |= process.wait() != 0
        if failed:
            for other in processes:
                other.terminate()
    if failed:
        raise RuntimeError(f"a node failed: {' '.join(command)}")
