"""Checkpoints of small models in every format that quantized checkpoints have, and the models that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moe
import packed_codes_by_hand as by_hand
import torch
from accelerate import init_empty_weights
from harness import llama, models
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

Tensors = dict[str, Tensor]
Write = Callable[[int, int, int], by_hand.Stored]
"""Returns the stored tensors of a weight [out, in] and their values, by a seed."""


def _group(inputs: int) -> int:
    return 32 if inputs % 32 == 0 else inputs


def _four_bit(out: int, inputs: int, seed: int) -> by_hand.Stored:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05
    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    parts = {"weight": codes} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    # Flat, since bitsandbytes 0.50.2 decodes matrices on the CPU as if no block spanned two rows.
    flat, flat_state = quantize_4bit(weight.view(1, -1), blocksize=64, quant_type="nf4", compress_statistics=True)
    return parts, dequantize_4bit(flat, flat_state).view_as(weight)


def _eight_bit(out: int, inputs: int, seed: int) -> by_hand.Stored:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    weight = torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05
    codes, scales, _ = int8_vectorwise_quant(weight.half())
    parts = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, int8_vectorwise_dequant(codes, scales)


def _compressed(kind: str, weights: dict[str, Any]) -> dict[str, Any]:
    """The configuration that compressed-tensors writes."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    described = {"config_groups": {"group_0": group}, "format": kind, "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp.gate$"], **described}


def _integers(bits: int, sym: bool, strategy: str) -> dict[str, Any]:
    group = 32 if strategy == "group" else None
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy, "group_size": group}
    return _compressed("pack-quantized", weights)


@dataclass(frozen=True)
class Format:
    """A format of checkpoints.

    Attributes:
        config: Its ``quantization_config``.
        write: Writes a matrix.
        experts: Whether single experts are stored in it, too.
    """

    config: dict[str, Any]
    write: Write
    experts: bool = True


_GPTQ = {"quant_method": "gptq", "group_size": 32, "checkpoint_format": "gptq"}
FORMATS = {
    "gptq4": Format(_GPTQ | {"bits": 4, "sym": False}, lambda o, i, s: by_hand.gptq(o, i, s, group=_group(i))),
    "gptq4 in order of activations": Format(
        _GPTQ | {"bits": 4, "sym": True, "desc_act": True},
        lambda o, i, s: by_hand.gptq(o, i, s, group=_group(i), sym=True, act=True),
    ),
    "gptq8 v2": Format(
        _GPTQ | {"bits": 8, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda o, i, s: by_hand.gptq(o, i, s, group=_group(i), bits=8, v2=True),
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda o, i, s: by_hand.awq(o, i, s, group=_group(i)),
    ),
    "int4": Format(_integers(4, True, "group"), lambda o, i, s: by_hand.packed_integers(o, i, s, group=_group(i))),
    "int8 by rows": Format(
        _integers(8, False, "channel"),
        lambda o, i, s: by_hand.packed_integers(o, i, s, bits=8, group=None, sym=False),
    ),
    "int8 plain": Format(
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
        by_hand.plain_integers,
    ),
    "nvfp4": Format(
        _compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
        ),
        by_hand.nvfp4,
    ),
    "fp8 by rows": Format(
        _compressed("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}),
        by_hand.fp8_rows,
    ),
    "fp8": Format({"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}, by_hand.fp8),
    "nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _four_bit, experts=False
    ),
    "int8 of bitsandbytes": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, _eight_bit, experts=False
    ),
    "mxfp4": Format({"quant_method": "mxfp4"}, by_hand.gptq),  # of gpt-oss's stacks alone
}
"""Every format, in the variants that differ in what has to be read."""


@dataclass
class _Written:
    """What a checkpoint has, and what that is worth."""

    stored: Tensors = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)


def make(kind: str) -> Any:
    """A model in full precision: ``llama``, or one of :func:`moe.make_base`."""
    return llama.make_base() if kind == "llama" else moe.make_base(kind)


def make_empty(kind: str) -> Any:
    """The same without values, frozen."""
    with init_empty_weights():
        model: Any = LlamaForCausalLM(LlamaConfig(**llama.CONFIG)) if kind == "llama" else moe.construct(kind)
    model.tie_weights()
    return model.requires_grad_(False)


def _written(kind: str, format: str) -> _Written:
    """Quantize what checkpoints of this format have quantized; random codes, which need no quantizer."""
    base, written, how = make(kind), _Written(), FORMATS[format]
    experts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for seed, (name, tensor) in enumerate(base.state_dict().items()):
        linear = name.endswith("_proj.weight") or name.endswith("_mqa.weight") or re.search("_[ab]_proj", name)
        if tensor.dim() == 3 and format == "mxfp4":
            parts, values = by_hand.mxfp4(tensor.shape[0], tensor.shape[2], tensor.shape[1], 10 * seed)
            written.stored |= {f"{name}_{end}": part for end, part in parts.items()}
            written.values[name] = values.to(tensor.dtype)
        elif tensor.dim() == 3 and kind != "gpt_oss":
            prefix, stack = name.rsplit(".", 1)
            rows = tensor.shape[1] // len(experts[stack])
            matrices = []
            for expert in range(len(tensor)):
                for part, matrix in zip(experts[stack], tensor[expert].split(rows), strict=True):
                    own = f"{prefix}.{expert}.{part}"
                    matrices.append(
                        _write(written, how if how.experts else None, own, matrix, 1000 * seed + len(matrices))
                    )
            written.values[name] = torch.cat(matrices).view_as(tensor)
        elif linear and tensor.dim() == 2 and format != "mxfp4":
            written.values[name] = _write(written, how, name.removesuffix(".weight"), tensor, 10 * seed)
        else:
            written.stored[name] = written.values[name] = tensor.clone()
    return written


def _write(written: _Written, how: Format | None, module: str, weight: Tensor, seed: int) -> Tensor:
    """Add a matrix to what is stored, and return its values."""
    if how is None:
        written.stored[f"{module}.weight"] = weight.clone()
        return weight
    parts, values = how.write(*weight.shape, seed)
    written.stored |= {f"{module}.{end}": part for end, part in parts.items()}
    return values.to(weight.dtype)


def write(folder: Path, kind: str, format: str) -> Path:
    """Write a checkpoint, with the model's configuration, and in a folder in it the values that it stands for."""
    (folder / "values").mkdir(parents=True)
    written = _written(kind, format)
    for path, tensors in ((folder, written.stored), (folder / "values", written.values)):
        named = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(named, path / "model.safetensors", {"format": "pt"})
    config = make(kind).config.to_dict() | {"quantization_config": FORMATS[format].config}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def dequantized(kind: str, folder: str | Path) -> Any:
    """The oracle: the model with the values that the checkpoint in a folder stands for."""
    model = make(kind)
    model.load_state_dict(load_file(Path(folder) / "values" / "model.safetensors"))
    return model.to(models.device())
