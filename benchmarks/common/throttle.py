"""Slow links between emulated nodes: compiles throttle.c, and says with which variables a process preloads it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
_BUCKET = struct.Struct("qQ")


class NoThrottleError(RuntimeError):
    """Links can't be made slow here; the message says why."""


def per_process(gbps: float) -> dict[str, str]:
    """Return the variables with which each process sends at most ``gbps`` Gbit/s by NCCL's sockets.

    Raises:
        NoThrottleError: If there is no C compiler, or the system is not Linux.
    """
    library = _compiled(Path(tempfile.mkdtemp(prefix="fsdp_zpp-throttle-")))
    # Others may preload something, too.
    preloaded = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return {"LD_PRELOAD": preloaded, "THROTTLE_GBPS": str(gbps)}


def per_node(gbps: float, nodes: int, ranks_per_node: int) -> dict[str, str]:
    """Return the variables with which the ranks of a node together send at most ``gbps`` Gbit/s to other nodes.

    They hold for ranks that torchrun starts, consecutive ones on a node, and for NCCL's and gloo's sockets.

    Raises:
        NoThrottleError: If there is no C compiler, or the system is not Linux.
    """
    variables = per_process(gbps)
    buckets = Path(variables["LD_PRELOAD"].split()[0]).with_name("buckets")
    buckets.write_bytes(bytes(_BUCKET.size * nodes))
    names = {"RANKS_PER_NODE": str(ranks_per_node), "BUCKETS": str(buckets)}
    return variables | {f"THROTTLE_{name}": value for name, value in names.items()} | {"GLOO_SOCKET_IFNAME": "lo"}


def sent_by_nodes(buckets: Path) -> list[int]:
    """Return the bytes that each node has sent to others, as ``THROTTLE_BUCKETS`` counts them."""
    return [sent for _, sent in _BUCKET.iter_unpack(buckets.read_bytes())]


def _compiled(folder: Path) -> Path:
    if sys.platform != "linux":
        raise NoThrottleError(f"the throttle is for Linux, and this is {sys.platform}")
    library = folder / "throttle.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoThrottleError("there is no C compiler (cc)") from None
    except subprocess.CalledProcessError as error:
        raise NoThrottleError(f"the C compiler (cc) failed: {error.stderr.strip()}") from None
    return library
