"""Entropy of what nodes send: bits that a lossless stage after the codecs could save.

    python benchmarks/loss/run.py entropy

trains a GPT-2 under zeropp (``w8:int4``) and with deltas in 4 and 2 bits (``d4:int4``, ``d2:int4``) on simulated nodes
of one rank. At four steps it takes the payloads that rank 0 sends, and computes the entropy of codes and scales, the
size after zlib and LZMA, and the error with shorter scales. Takes fifteen minutes on two cores. jobs.py says how runs
are made.
"""

from __future__ import annotations

import lzma
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tables
import torch
import torch.distributed as dist
from configurations import sharding
from jobs import Run, add_options, carry_out, parse_configs, parser_of, settings_of
from markdown_tables import aligned
from result_files import Row
from torch import Tensor
from training import Corpus, Trainee, train, under_fsdp1

from fsdp_zpp import codecs
from fsdp_zpp_kernels import PayloadLayout, dequantize, quantize, quantize_delta

SMALL = {"gpus_per_node": 1, "device": "cpu", "simulate": True, "seeds": [0], "validation_tokens": 2**14}
SMALL |= {"hidden": 256, "intermediate": 1024, "layers": 4, "heads": 4, "sequence": 128, "batch": 4, "tokens": 307_200}


def entropy(counts: Tensor) -> float:
    """Return the Shannon entropy of a histogram or a distribution, in bits a symbol."""
    shares = counts.double() / counts.sum()
    return -(shares * shares.log2()).nansum().item()


@dataclass(frozen=True)
class Sent:
    """Payload of a unit's chunk that goes to another node, uint8 [nbytes], and the values that it encodes."""

    what: str
    layout: PayloadLayout
    payload: Tensor
    values: Tensor

    def symbols(self) -> tuple[Tensor, Tensor]:
        """Return the codes, one to a byte, and the bytes of the scales, [scales, 4], as integers."""
        numel, row = len(self.values), self.payload[None]
        codes, scales = (part(row, numel).reshape(-1, 1) for part in (self.layout.codes, self.layout.scales))
        bits = self.layout.bits
        codes = torch.cat([codes >> start & ((1 << bits) - 1) for start in range(0, 8, bits)], dim=1)
        return codes.flatten()[:numel], scales.view(torch.uint8)

    def squared_error(self, mantissa: int) -> float:
        """Return the error of decoding with scales of so many bits of mantissa; bf16 has 7."""
        row, out, cut, layout = self.payload[None].clone(), torch.empty_like(self.values), 23 - mantissa, self.layout
        scales = layout.scales(row, len(out)).view(torch.int32)
        scales.copy_((scales + (1 << cut >> 1)) >> cut << cut)
        dequantize(row, out, 1, 1, layout.bits, layout.block, layout.tail)
        return (out - self.values).double().square().sum().item()


def measured(units: Sequence[Sent]) -> Row:
    """Return figures of one kind of payload over all units; entropies are of each unit's own histogram."""
    layout, symbols, nbytes = units[0].layout, [unit.symbols() for unit in units], sum(len(u.payload) for u in units)
    values, scales = (sum(map(len, parts)) for parts in zip(*symbols, strict=True))
    of_codes = [entropy(codes.bincount()) * len(codes) for codes, _ in symbols]
    of_scales = sum(entropy(byte.bincount()) * len(byte) for _, scales in symbols for byte in scales.T)
    errors = [sum(unit.squared_error(mantissa) for unit in units) ** 0.5 for mantissa in range(24)]
    row = {"what": units[0].what, "codec": f"int{layout.bits}({layout.block})", "values": values, "bytes": nbytes}
    row |= {"code_bytes": values * layout.bits // 8, "scale_bytes": 4 * scales, "bits_a_code": sum(of_codes) / values}
    row["bits_a_code_of_units"] = [bits / len(codes) for bits, (codes, _) in zip(of_codes, symbols, strict=True)]
    row["ideal_bytes"] = nbytes - row["code_bytes"] - row["scale_bytes"] + (sum(of_codes) + of_scales) / 8
    row["error"] = errors[23] / sum(unit.values.square().sum().item() for unit in units) ** 0.5
    row |= {"bits_a_scale": of_scales / scales, "error_growth_bf16": errors[7] / errors[23] - 1}
    row["mantissa_bits"] = next(bits for bits, error in enumerate(errors) if error <= 1.01 * errors[23])
    for name, stage in (("zlib", zlib.compress), ("lzma", lzma.compress)):
        began = time.thread_time()
        row[f"{name}_bytes"] = sum(len(stage(unit.payload.numpy().tobytes())) for unit in units)
        row[f"{name}_seconds"] = time.thread_time() - began
    return row


class Tap:
    """Takes what rank 0 sends in a step, which begins where the optimizer's last one did."""

    sent: tuple[Sent, ...] = ()

    def quantize(self, values: Tensor, rows: int, cols: int, *layout: int) -> Tensor:
        """Stand in for the codecs' ``quantize``. The first chunk of the gradients stays here."""
        payload = quantize(values, rows, cols, *layout)
        return self._take("weights" if layout[0] == 8 else "gradients", values, payload, layout)

    def quantize_delta(self, values: Tensor, base: Tensor, bits: int, block: int, *layout: int) -> Tensor:
        """Stand in for the codecs' ``quantize_delta``."""
        held = torch.empty(values.numel())
        dequantize(base, held, len(base), 1, bits, block, *layout[2:])
        return self._take("deltas", values - held, quantize_delta(values, base, bits, block, *layout), layout)

    def _take(self, what: str, values: Tensor, payload: Tensor, layout: tuple[int, ...]) -> Tensor:
        if dist.get_rank() == 0:
            chunks = zip(payload, values.float().clone().view(len(payload), -1), strict=True)
            self.sent += tuple(Sent(what, PayloadLayout(*layout), *each) for each in chunks)[what == "gradients" :]
        return payload

    def train(self, run: Run, corpus: Corpus, device: torch.device) -> Row:
        """Train, and measure payloads at the beginning, after a tenth, in the middle and at the end."""
        steps, step, before, rows, is_first = run.settings.steps, 0, 0, list[Row](), dist.get_rank() == 0

        @contextmanager
        def stepping() -> Iterator[None]:
            nonlocal step, before
            now = sum(dist.group.WORLD.sent[kind, "inter"] for kind in ("all_gather", "all_to_all"))
            if is_first and step and step in (1, steps // 10, steps // 2, steps - 1):
                if now - before != (taken := sum(len(unit.payload) for unit in self.sent)):
                    raise RuntimeError(f"step {step} sent {now - before} bytes, of which {taken} were taken")
                for what in sorted({unit.what for unit in self.sent}):
                    rows.append({"step": step, **measured([unit for unit in self.sent if unit.what == what])})
            self.sent = () if is_first else self.sent
            step, before = step + 1, now
            yield

        def prepare(*model: Any) -> Trainee:
            return replace(under_fsdp1(*model, strategy=sharding(run.name, 1), lr=run.settings.lr), stepping=stepping)

        return train(run.settings, prepare, run.seed, corpus, device) | {"payloads": rows}


def main(given: list[str]) -> None:
    """Train and report, or be the ranks of a job."""
    parser = parser_of(__doc__)
    parser.add_argument("--lr", type=float, default=1e-3)
    add_options(parser, Path("runs/entropy"))
    parser.set_defaults(**SMALL)
    arguments, tap = parse_configs(parser, ("w8:int4", "d4:int4", "d2:int4"), given), Tap()

    def runs(sha256: str) -> list[Run]:
        settings, names = settings_of(arguments, sha256), product(arguments.configs, arguments.seeds)
        return [Run(name, seed, settings, f"entropy-{name}") for name, seed in names]

    with patch.multiple(codecs, quantize=tap.quantize, quantize_delta=tap.quantize_delta):
        carry_out(arguments, runs, lambda _, results, __: print(f"\n{aligned(tables.entropy(results))}"), tap.train)
