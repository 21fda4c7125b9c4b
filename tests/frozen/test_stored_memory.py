"""A rank that reads a quantized checkpoint needs memory for its shard and two tensors, not for a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.pool import Pool
from safetensors.torch import save_file
from torch import nn

from fsdp_zpp import Int8, quantize_frozen_params

WIDTH = 8192
"""Of matrices: 32 of them are two gigabytes in fp8."""
MIB = 2**20


def write(folder: Path, width: int, layers: int) -> None:
    """Write a checkpoint in fp8 in two files."""
    for part in range(2):
        tensors = {}
        for layer in range(part * layers // 2, (part + 1) * layers // 2):
            codes = torch.full((width, width), 0x38 + layer % 8, dtype=torch.uint8)
            tensors[f"{layer}.weight"] = codes.view(torch.float8_e4m3fn)
            tensors[f"{layer}.weight_scale_inv"] = torch.ones(width // 128, width // 128)
        save_file(tensors, folder / f"part{part}.safetensors")
    files = ", ".join(
        f'"{k}.weight{s}": "part{2 * k // layers}.safetensors"' for k in range(layers) for s in ("", "_scale_inv")
    )
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {' + files + "}}")


def memory() -> int:
    """Bytes of this process that no file backs: what pages of files take can be dropped at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon")


def peak(folder: str, codec: Any, width: int, layers: int) -> tuple[int, int]:
    """In a worker: how much its memory grows at most while it reads, and the bytes of its shard."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    model.requires_grad_(False)
    before, highest, done = memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        report = quantize_frozen_params(model, codec, checkpoint=folder, gpus_per_node=4)
    finally:
        done.set()
        watcher.join()
    return max(highest, memory()) - before, report.bytes_after


@pytest.mark.slow
# CPUs take minutes to encode as much.
@pytest.mark.parametrize(("codec", "layers"), [("as stored", 32), (Int8(256), 6)], ids=str)
def test_the_peak_is_the_shard_and_two_tensors(
    pool: Callable[[int], Pool], tmp_path: Path, codec: Any, layers: int
) -> None:
    write(tmp_path, WIDTH, layers)
    for grown, shard in pool(4).run(peak, str(tmp_path), codec, WIDTH, layers):
        print(f"{codec}: grew by {grown / MIB:.0f} MiB, of which the shard is {shard / MIB:.0f} MiB")
        assert 0.24 * WIDTH**2 * layers < shard < 0.27 * WIDTH**2 * layers
        assert grown <= shard + 2 * 2 * WIDTH**2  # two tensors in bf16
