"""Errors of blocks of a flat parameter that straddle norms, biases and matrices.

    python benchmarks/loss/run.py straddling

quantizes the weights (int8, blocks of 256) and the gradients (int4, blocks of 128) of one Llama layer once as FSDP lays
them out, side by side, and once with every parameter starting a block of its own; prints the relative error,
|quantized - true| / |true|, of the matrices and of the whole unit. Takes a minute on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from manifest import manifest
from markdown_tables import aligned
from tables import straddling as table
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from fsdp_zpp import Codec, Int4, Int8
from fsdp_zpp.bench.results import write

HIDDEN = (128, 768, 2048)
"""Widths of the layers."""


def layer_and_gradients(hidden: int) -> list[tuple[Tensor, Tensor]]:
    """Return weights and gradients of a Llama layer, in FSDP's order, after one backward of a random objective."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_attention_heads=hidden // 64)
    config._attn_implementation = "sdpa"
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    x = torch.randn(1, 256, hidden)
    out = layer(x, position_embeddings=rotary(x, torch.arange(256)[None]))
    hidden_states = out[0] if isinstance(out, tuple) else out
    (hidden_states * torch.randn_like(x)).mean().backward()
    return [(p.detach().flatten(), p.grad.flatten()) for p in layer.parameters() if p.grad is not None]


def round_trip(values: Tensor, codec: Codec) -> Tensor:
    """Return ``values`` as a receiver decodes them."""
    out = torch.empty_like(values)
    codec.decode(codec.encode(values, 1, 1), out, 1, 1)
    return out


def relative_errors(tensors: list[Tensor], codec: Codec) -> dict[str, float]:
    """Return the errors of a unit laid out as one flat tensor, and of its parameters one by one."""
    flat = torch.cat(tensors)
    together = round_trip(flat, codec).split([t.numel() for t in tensors])
    apart = [round_trip(t, codec) for t in tensors]
    large = max(t.numel() for t in tensors) // 8

    def error(decoded: list[Tensor] | tuple[Tensor, ...], least: int) -> float:
        pairs = [(d, t) for d, t in zip(decoded, tensors, strict=True) if t.numel() >= least]
        squares = sum((d - t).square().sum().item() for d, t in pairs)
        return (squares / sum(t.square().sum().item() for _, t in pairs)) ** 0.5

    return {
        f"{part}, {layout}": error(decoded, least)
        for part, least in (("matrices", large), ("unit", 0))
        for layout, decoded in (("straddling", together), ("apart", apart))
    }


def main(arguments: list[str]) -> None:
    """Measure, write the result and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/straddling"), help="folder of result.json")
    options = parser.parse_args(arguments)
    errors = []
    for hidden in HIDDEN:
        pairs = layer_and_gradients(hidden)
        for name, codec, tensors in (
            ("weights", Int8(256), [w for w, _ in pairs]),
            ("gradients", Int4(128), [g for _, g in pairs]),
        ):
            errors.append({"what": f"{name}, {codec}, hidden {hidden}", "errors": relative_errors(tensors, codec)})
    write(options.output / "result.json", manifest(), argparse.Namespace(hidden=HIDDEN), errors)
    print(aligned(table(errors)))
