"""A rank that reads a quantized checkpoint needs memory for its shard and two tensors, not for a model."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from harness.pool import Pool
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp_zpp import Int8, quantize_frozen_params

WIDTH = 8192
"""Of weights: 32 of them are two gigabytes in fp8."""
MIB = 2**20


def _words(*shape: int) -> Tensor:
    """Random bits: any are codes."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _octets(*shape: int, most: int = 255) -> Tensor:
    return torch.randint(0, most + 1, shape, dtype=torch.uint8)


def _scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) + 0.5).to(dtype)


def _four_bit(width: int) -> dict[str, Tensor]:
    codes, state = functional.quantize_4bit(torch.randn(width, width).bfloat16(), quant_type="nf4")
    return {"weight": codes, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Tensor]]]] = {
    "fp8": (
        {"quant_method": "fp8"},
        lambda w: {
            "weight": _octets(w, w, most=0x7E).view(torch.float8_e4m3fn),
            "weight_scale_inv": _scales(w // 128, w // 128, dtype=torch.float32),
        },
    ),
    "nf4": ({"quant_method": "bitsandbytes"}, _four_bit),
    "int8": (
        {"quant_method": "bitsandbytes"},
        lambda w: {"weight": _octets(w, w).view(torch.int8), "SCB": _scales(w, dtype=torch.float32)},
    ),
    "gptq": (
        {"quant_method": "gptq"},
        lambda w: {
            "qweight": _words(w // 8, w),
            "qzeros": _words(w // 128, w // 8),
            "scales": _scales(w // 128, w),
            "g_idx": (torch.arange(w) // 128).int()[torch.randperm(w)],
        },
    ),
    "awq": (
        {"quant_method": "awq"},
        lambda w: {
            "qweight": _words(w, w // 8),
            "qzeros": _words(w // 128, w // 8),
            "scales": _scales(w // 128, w),
        },
    ),
    "int4": (
        {"quant_method": "compressed-tensors"},
        lambda w: {
            "weight_packed": _words(w, w // 8),
            "weight_scale": _scales(w, w // 32),
            "weight_shape": torch.tensor([w, w]),
        },
    ),
    "int8 plain": (
        {"quant_method": "compressed-tensors"},
        lambda w: {"weight": _octets(w, w).view(torch.int8), "weight_scale": _scales(w, 1)},
    ),
    "nvfp4": (
        {"quant_method": "compressed-tensors"},
        lambda w: {
            "weight_packed": _octets(w, w // 2),
            "weight_scale": _scales(w, w // 16).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.ones(1),
        },
    ),
    "mxfp4": (  # of a stack of eight matrices
        {"quant_method": "mxfp4"},
        lambda w: {
            "weight_blocks": _octets(8, w, w // 8 // 32, 16),
            "weight_scales": _octets(8, w, w // 8 // 32, most=7) + 118,
        },
    ),
}
"""For each format, its configuration, and random tensors of a weight of width x width values."""


class Stack(nn.Module):
    """A stack of eight matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, width // 8, width, dtype=torch.bfloat16))


def write(folder: Path, format: str, width: int, layers: int) -> None:
    """Write a checkpoint of equal layers, a file for each."""
    config, make = FORMATS[format]
    tensors, files = make(width), {}
    for layer in range(layers):
        named = {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
        save_file(named, folder / f"{layer}.safetensors")
        files |= dict.fromkeys(named, f"{layer}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


def memory() -> int:
    """Bytes of this process that no file backs: what pages of files take can be dropped at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon")


def peak(folder: str, format: str, codec: Any, width: int, layers: int) -> tuple[int, int]:
    """In a worker: how much its memory grows at most while it reads, and the bytes of its shard."""

    def make() -> nn.Module:
        return Stack(width) if format == "mxfp4" else nn.Linear(width, width, bias=False, dtype=torch.bfloat16)

    with torch.device("meta"):
        model = nn.Sequential(*(make() for _ in range(layers)))
    model.requires_grad_(False)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or memory that other tests have freed would be used again, uncounted
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
@pytest.mark.parametrize(
    ("format", "codec", "layers"),
    # CPUs take minutes to encode as much as two gigabytes.
    [("fp8", "as stored", 32), *((format, Int8(256), 4) for format in FORMATS)],
    ids=str,
)
def test_the_peak_is_the_shard_and_two_tensors(
    pool: Callable[[int], Pool], tmp_path: Path, format: str, codec: Any, layers: int
) -> None:
    write(tmp_path, format, WIDTH, layers)
    for grown, shard in pool(4).run(peak, str(tmp_path), format, codec, WIDTH, layers):
        print(f"{format}, {codec}: grew by {grown / MIB:.0f} MiB, of which the shard is {shard / MIB:.0f} MiB")
        assert 0.24 * WIDTH**2 * layers < shard < 0.27 * WIDTH**2 * layers
        assert grown <= shard + 2 * 2 * WIDTH**2  # two tensors in bf16
