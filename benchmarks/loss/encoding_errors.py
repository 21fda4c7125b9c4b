"""Errors and entropies of codecs, without training. Each is a study of run.py: small-parameters, straddling and
gaussian-codes."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import tables
import torch
from entropy import Sent, entropy
from manifest import manifest
from markdown_tables import aligned
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from fsdp_zpp import Codec, Int4, Int8
from fsdp_zpp.bench.results import write
from fsdp_zpp.comm.flat_layout import Extent, FlatLayout, Piece, exact_places, sent_exactly
from fsdp_zpp.comm.hops import decode, encode

# ---- gradients of small parameters after codecs, on 64 ranks

_SMALL_PARAMETERS = """Gradients of small parameters after codecs, on 64 ranks.

    python benchmarks/loss/run.py small-parameters

takes the gradients of one decoder layer of four architectures after one backward of a language-model loss, lays them
out as ``fully_shard`` does on 8 nodes of 8 GPUs, and rounds them as zeropp's two hops do (int8 in blocks of 256, then
int4 in blocks of 128): once with everything encoded, once with small parameters left as they are. Prints, of each
model, the lowest cosine of a parameter to its exact gradient, and the largest share of values of a small parameter that
become zero. Takes two minutes on a CPU.
"""
RANKS, GPUS = 64, 8
WIDTH = 1024
_COMMON: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 16, "vocab_size": 512}
MODELS: dict[str, PretrainedConfig] = {
    "OPT": OPTConfig(**_COMMON, ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH, dropout=0.0),
    "Qwen2": Qwen2Config(**_COMMON, intermediate_size=2816, num_key_value_heads=4),
    "Llama": LlamaConfig(**_COMMON, intermediate_size=2816, num_key_value_heads=4),
    "Qwen3-MoE": Qwen3MoeConfig(
        **_COMMON, moe_intermediate_size=384, num_key_value_heads=4, head_dim=64, num_experts=32, num_experts_per_tok=4
    ),
}


def gradients_of(config: AutoConfig) -> dict[str, Tensor]:
    """Return the gradients of the first decoder layer after a backward."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    tokens = (torch.randint(512, (8, 1)) + torch.arange(128)) % 512
    model(input_ids=tokens, labels=tokens).loss.backward()
    layers = next(m for name, m in model.named_modules() if name.endswith("layers") and isinstance(m, nn.ModuleList))
    return {name: p.grad for name, p in layers[0].named_parameters() if p.grad is not None}


def _padded(gradient: Tensor) -> Tensor:
    """Append zero rows up to a multiple of the ranks."""
    return torch.cat([gradient, gradient.new_zeros(-len(gradient) % RANKS, *gradient.shape[1:])])


def rounded(gradients: dict[str, Tensor], *, spare: bool) -> dict[str, Tensor]:
    """Round a unit's gradients as hops under ``fully_shard`` do, and ``spare`` small parameters or encode them, too."""
    exact = dict(zip(gradients, sent_exactly([g.shape for g in gradients.values()]), strict=True))
    order = sorted(gradients, key=exact.__getitem__) if spare else list(gradients)
    padded = {name: _padded(gradients[name]) for name in order}
    pieces = [Piece(i, name, padded[name].numel() // RANKS) for i, name in enumerate(order)]
    layout = FlatLayout.dense(pieces, [exact[name] for name in order] if spare else ())
    flat = torch.cat([padded[name].reshape(RANKS, -1) for name in order], dim=1).flatten()
    nodes, numel = range(RANKS // GPUS), layout.numel
    starts = tuple((node * GPUS + local) * numel for local in range(GPUS) for node in nodes)
    places = exact_places(Extent(numel, starts, layout), starts, torch.device("cpu"), (), starts)
    for codec in (Int8(256), Int4(128)):
        payload = encode(codec, flat, RANKS // GPUS, GPUS, "unit", None, places)
        decode(codec, payload, flat, GPUS, RANKS // GPUS, "unit", places)
    return {
        piece.name: part.flatten()[: gradients[piece.name].numel()].view_as(gradients[piece.name])
        for piece, part in layout.split(flat).items()
    }


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of tensors of any magnitude; tiny gradients (of OPT's key biases) are below torch's epsilon."""
    return (one.mul(other).sum() / one.norm() / other.norm()).item() if one.norm() > 0 else 0.0


def figures(gradients: dict[str, Tensor], decoded: dict[str, Tensor]) -> dict[str, Any]:
    """Return the lowest cosine of a parameter, and the most zeros that a small one has beyond the exact ones."""
    exact = dict(zip(gradients, sent_exactly([g.shape for g in gradients.values()]), strict=True))
    cosines = {name: cosine(decoded[name].double(), g.double()) for name, g in gradients.items() if g.norm() > 0}
    worst = min(cosines, key=cosines.__getitem__)
    zeros = {
        name: ((decoded[name] == 0).float().mean() - (g == 0).float().mean()).item()
        for name, g in gradients.items()
        if exact[name]
    }
    most = max(zeros, key=zeros.__getitem__)
    return {"cosine": cosines[worst], "of": worst, "zeros": zeros[most], "zeros of": most}


def small_parameters(arguments: list[str]) -> None:
    """Measure, write the result and print the table."""
    parser = argparse.ArgumentParser(
        description=_SMALL_PARAMETERS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/small-parameters"), help="folder of result.json")
    options = parser.parse_args(arguments)
    rows = []
    for name, config in MODELS.items():
        gradients = gradients_of(config)
        encoded, spared = (figures(gradients, rounded(gradients, spare=spare)) for spare in (False, True))
        rows.append({"model": name, "encoded": encoded, "spared": spared})
    write(options.output / "result.json", manifest(), argparse.Namespace(hidden=WIDTH, ranks=RANKS), rows)
    print(aligned(tables.small_parameters(rows)))


# ---- blocks of a flat parameter that straddle norms, biases and matrices

_STRADDLING = """Errors of blocks of a flat parameter that straddle norms, biases and matrices.

    python benchmarks/loss/run.py straddling

quantizes the weights (int8, blocks of 256) and the gradients (int4, blocks of 128) of one Llama layer once as FSDP lays
them out, side by side, and once with every parameter starting a block of its own; prints the relative error,
|quantized - true| / |true|, of the matrices and of the whole unit. Takes a minute on a CPU.
"""
WIDTHS = (128, 768, 2048)
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


def straddling(arguments: list[str]) -> None:
    """Measure, write the result and print the table."""
    parser = argparse.ArgumentParser(description=_STRADDLING, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/straddling"), help="folder of result.json")
    options = parser.parse_args(arguments)
    errors = []
    for hidden in WIDTHS:
        pairs = layer_and_gradients(hidden)
        for name, codec, tensors in (
            ("weights", Int8(256), [w for w, _ in pairs]),
            ("gradients", Int4(128), [g for _, g in pairs]),
        ):
            errors.append({"what": f"{name}, {codec}, hidden {hidden}", "errors": relative_errors(tensors, codec)})
    write(options.output / "result.json", manifest(), argparse.Namespace(hidden=WIDTHS), errors)
    print(aligned(tables.straddling(errors)))


# ---- codes of normally distributed values

_GAUSSIAN_CODES = """Entropy of codes of normally distributed values, by sampling and by theory.

    python benchmarks/loss/run.py gaussian-codes

encodes normal values by the library's codecs and by the 2-bit quantizer of Lloyd and Max. Takes seconds on a CPU.
"""
SAMPLES = 2**24
OUTER, INNER = 1.510, 0.4528
"""Magnitudes of the levels of Lloyd's and Max's 2-bit quantizer, in units of a block's rms."""


def theory(codec: Int4 | Int8) -> float:
    """Return the entropy of a codec's codes, integrated over the largest magnitude of a block."""
    qmax, block = codec.layout.qmax, codec.block
    largest = torch.linspace(0.5, 8, 4001, dtype=torch.float64)
    # One of a block's magnitudes is the largest; the others are normal below it.
    within = torch.special.erf(largest / math.sqrt(2))
    density = torch.exp(-largest.square() / 2) * within ** (block - 1)
    edges = largest / qmax / math.sqrt(2) * (torch.arange(-qmax, qmax + 2)[:, None] - 0.5).clamp(-qmax, qmax)
    shares = torch.special.erf(edges).diff(dim=0) / (2 * within) * (block - 1) / block
    shares[[0, -1]] += 0.5 / block
    return entropy(shares @ density)


def gaussian_codes(arguments: list[str]) -> None:
    """Measure, write the result and print the table."""
    parser = argparse.ArgumentParser(description=_GAUSSIAN_CODES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gaussian-codes"), help="folder of result.json")
    options = parser.parse_args(arguments)
    values = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0))
    rows = []
    for codec in (Int4(128), Int4(256), Int8(256)):
        codes, _ = Sent("", codec.layout, codec.encode(values, 1, 1)[0], values).symbols()
        rows.append({"what": f"{codec}", "bits_a_code": entropy(codes.bincount()), "theory": theory(codec)})
    for block in (128, 256):
        blocks = values.view(-1, block)
        between = (OUTER + INNER) / 2 * blocks.square().mean(dim=1, keepdim=True).sqrt()
        codes = (blocks > 0).int() + (blocks > between).int() + (blocks > -between).int()
        outer = math.erfc((OUTER + INNER) / 2 / math.sqrt(2)) / 2
        by_theory = entropy(torch.tensor([outer, 0.5 - outer, 0.5 - outer, outer]))
        what = f"levels of +-{INNER} and +-{OUTER} times the rms, blocks of {block}"
        rows.append({"what": what, "bits_a_code": entropy(codes.flatten().bincount()), "theory": by_theory})
    write(options.output / "result.json", manifest(), argparse.Namespace(samples=SAMPLES, seed=0), rows)
    print(aligned(tables.gaussian_codes(rows)))
