"""Tiny checkpoints that are stored quantized, each made by the library that owns the format, and read by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moe
import torch
from accelerate import init_empty_weights
from bitsandbytes import functional
from harness import llama, models
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config, LlamaConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

SIZES = llama.CONFIG | {"hidden_size": 128, "intermediate_size": 256}
"""Weights of one and of several of fp8's blocks."""
FILE = "model.safetensors"


def plain(folder: Path, kind: str = "llama") -> Path:
    """A checkpoint in full precision."""
    if kind == "llama":
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    else:
        model = moe.make_base(kind, hidden_size=128, moe_intermediate_size=128)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    return folder


def _bitsandbytes(folder: Path, **options: Any) -> Path:
    source = plain(folder / "plain")
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, device_map="cpu")
    model.save_pretrained(folder)
    return folder


def fp8(folder: Path, kind: str = "llama", **options: Any) -> Path:
    """All matrices of the layers in fp8, by transformers' own operation."""
    source = plain(folder / "plain", kind)
    config = FineGrainedFP8Config(**options)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
    tensors: dict[str, Tensor] = {}
    for key, value in load_file(source / FILE).items():
        chosen = ".layers." in key and value.dim() == 2 and not key.endswith("mlp.gate.weight")
        tensors |= quantize.convert({key: value}) if chosen else {key: value}
    content = json.loads((source / "config.json").read_text()) | {"quantization_config": config.to_dict()}
    (folder / "config.json").write_text(json.dumps(content, default=str))
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


FORMATS: dict[str, Callable[[Path], Path]] = {
    "nf4": lambda folder: _bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4, nested": lambda folder: _bitsandbytes(
        folder,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage="bfloat16",
    ),
    "fp4": lambda folder: _bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "int8": lambda folder: _bitsandbytes(folder, load_in_8bit=True),
    "fp8": fp8,
    "fp8, ue8m0": lambda folder: fp8(folder, scale_fmt="ue8m0"),
    "fp8, other blocks": lambda folder: fp8(folder, weight_block_size=(64, 128)),
}
"""A function for each format, that makes a checkpoint in a folder."""


def empty(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The frozen model of a checkpoint, without values."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.requires_grad_(False)


def owners_model(folder: Path) -> Any:
    """The model as transformers loads it on a CPU, in bf16."""
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": "cpu"}
    if AutoConfig.from_pretrained(folder).quantization_config["quant_method"] == "fp8":
        # What it does anyway where there is no GPU; where there is one, it would call its kernels with a CPU's memory.
        how["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, **how)


def decoded(folder: Path) -> dict[str, Tensor]:
    """All of a checkpoint's tensors by the names that models had before they were quantized, by the owner, in fp32."""
    with safe_open(folder / FILE, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    values: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if f"{key}_scale_inv" in tensors:
            by_owner = Fp8Dequantize(None)._dequantize_one(value, tensors[f"{key}_scale_inv"], torch.float32)
        elif f"{key}.absmax" in tensors:
            parts = {name: part for name, part in tensors.items() if name.startswith(f"{key}.")}
            state = functional.QuantState.from_dict(parts, torch.device("cpu"))
            state.dtype = torch.float32
            by_owner = functional.dequantize_4bit(value, state)
        elif value.dtype == torch.int8:
            by_owner = functional.int8_vectorwise_dequant(value, tensors[key.replace("weight", "SCB")])
        elif key.endswith(("_scale_inv", "SCB", "weight_format")) or ".weight." in key:
            continue
        else:
            by_owner = value.float()
        values[key] = by_owner
    return values


def dequantized(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model that the owner dequantizes, on one device."""
    model = AutoModelForCausalLM.from_config(empty(folder).config, dtype=dtype)
    model.load_state_dict(decoded(folder))
    return model.to(models.device()).requires_grad_(False)


def change(folder: Path, act: Callable[[dict[str, Tensor]], None]) -> Path:
    """Edit the tensors of a checkpoint of one file."""
    tensors = {key: value.clone() for key, value in load_file(folder / FILE).items()}
    act(tensors)
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder
