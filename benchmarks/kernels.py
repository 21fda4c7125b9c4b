"""Bytes a second of each kernel, read and written, against a device copy in the same run. Needs one GPU.

python benchmarks/kernels.py --out runs/kernels
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from fsdp_zpp.kernels import dequantize, dequantize_sum, dequantize_sum_quantize, quantize, quantize_corrected
from triton.testing import do_bench


def bytes_a_second(function: Callable[[], object], nbytes: int) -> float:
    """From the median time of many calls."""
    return nbytes / do_bench(function, warmup=20, rep=80, return_mode="median") * 1e3


def device_copy(nbytes: int) -> float:
    """Bytes a second, read and written, of a copy on the device."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return bytes_a_second(lambda: target.copy_(source), 2 * nbytes)


ERROR_BLOCK = {"fp32": 0, "int8": 256}


def error_states(values: int) -> dict[str, torch.Tensor]:
    """Errors of ``values`` in 8 chunks, as error feedback keeps them."""
    errors = torch.zeros(values, device="cuda")
    return {"fp32": errors, "int8": quantize(errors, 1, 8, 8, ERROR_BLOCK["int8"])}


def measure(values: int, block: int) -> dict[str, float]:
    """Bytes a second of every kernel on ``values`` bf16 values in 8 chunks."""
    x = torch.randn(values, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    rates: dict[str, float] = {}
    for bits in (8, 4):
        payload = quantize(x, 2, 4, bits, block)
        both = x.nbytes + payload.nbytes
        rates[f"quantize int{bits}"] = bytes_a_second(lambda b=bits: quantize(x, 2, 4, b, block), both)
        for name, errors in error_states(values).items():
            rates[f"quantize int{bits} with {name} errors"] = bytes_a_second(
                lambda b=bits, e=errors, k=ERROR_BLOCK[name]: quantize_corrected(x, e, 2, 4, b, block, k, 0.8),
                both + 2 * errors.nbytes,
            )
        rates[f"dequantize int{bits}"] = bytes_a_second(
            lambda b=bits, p=payload: dequantize(p, out, 4, 2, b, block), both
        )
        for peers in (4, 8):
            rows, total = payload.view(peers, 8 // peers, -1), out[: values // peers]
            rates[f"dequantize + sum int{bits} over {peers}"] = bytes_a_second(
                lambda b=bits, r=rows, t=total: dequantize_sum(r, t, 1, r.shape[1], b, block, 0.25),
                payload.nbytes + total.nbytes,
            )

            def requantize(b: int = bits, r: torch.Tensor = rows) -> torch.Tensor:
                return dequantize_sum_quantize(r, values // 8, 1, r.shape[1], b, block, 4, block, 0.25)

            nbytes = payload.nbytes + requantize().nbytes
            rates[f"dequantize + sum int{bits} over {peers} + quantize int4"] = bytes_a_second(requantize, nbytes)
    return rates


def main() -> None:
    """Measure, print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=2**28)
    parser.add_argument("--blocks", type=int, nargs="+", default=[256])
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"))
    arguments = parser.parse_args()
    copy = device_copy(2**30)
    rates = {block: measure(arguments.values, block) for block in arguments.blocks}
    lines = [f"| {arguments.values} bf16 values | " + " | ".join(f"block {b}, TB/s (of a copy)" for b in rates) + " |"]
    lines += ["|---|" + "---|" * len(rates), f"| device copy | {' | '.join([f'{copy / 1e12:.2f}'] * len(rates))} |"]
    for name in rates[arguments.blocks[0]]:
        cells = [f"{rates[b][name] / 1e12:.2f} ({rates[b][name] / copy:.2f})" for b in rates]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "kernels.md").write_text("\n".join(lines) + "\n")
    (arguments.out / "kernels.json").write_text(
        json.dumps({"machine": versions, "copy": copy, "rates": rates}, indent=1)
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
