"""Starts a comparison on all of this machine as nodes, with links between them that are as slow as a network."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import torch
from nodes import STARTED_BY, run_on_emulated_nodes
from throttle import NoThrottleError, per_node

RANKS_ON_CPU = 4


def add_gbps(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how slow links are."""
    default = 25.0 if torch.cuda.is_available() else 0.25
    text = f"Gbit/s that a node sends to others at most, unless torchrun starts this; 0: no limit (default: {default})"
    parser.add_argument("--gbps", type=float, default=default, help=text)


def throttled_to() -> float | None:
    """Return the Gbit/s that this rank's node sends to others at most; None if there is no limit."""
    gbps = os.environ.get("THROTTLE_GBPS")
    return float(gbps) if gbps else None


def start(gpus_per_node: int | None, gbps: float) -> None:
    """Start this script again, on all ranks, and wait for them. Exits if a rank fails.

    Args:
        gpus_per_node: Ranks of a node; by default half of all, if their number is even.
        gbps: Gbit/s that a node sends to others at most; 0 for no limit.
    """
    gpus = torch.cuda.device_count()
    ranks = gpus or RANKS_ON_CPU
    of_node = gpus_per_node or (ranks // 2 if ranks > 1 and ranks % 2 == 0 else ranks)
    nodes = max(1, ranks // of_node)
    os.environ |= slow_links(nodes, of_node, gbps)
    os.environ[STARTED_BY] = json.dumps(sys.argv)
    command = [*sys.argv, f"--gpus-per-node={of_node}"]
    if gpus:
        try:
            run_on_emulated_nodes(nodes, of_node, command)
        except RuntimeError as error:
            sys.exit(str(error))
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    sys.exit(subprocess.run([*torchrun, *command], check=False).returncode)


def slow_links(nodes: int, of_node: int, gbps: float) -> dict[str, str]:
    """Return the variables that make links slow, and print how slow they are, or why they are not."""
    if nodes == 1:
        print(f"One node of {of_node}: no link between nodes, and so nothing to throttle", flush=True)
        return {}
    reason = "--gbps 0" if gbps <= 0 else ""
    try:
        variables = {} if reason else per_node(gbps, nodes, of_node)
    except NoThrottleError as error:
        variables, reason = {}, str(error)
    how = f"not throttled: {reason}" if reason else f"throttled to {gbps:g} Gbit/s a node (common/throttle.c)"
    print(f"{nodes} nodes of {of_node}; links between them are {how}", flush=True)
    return variables
