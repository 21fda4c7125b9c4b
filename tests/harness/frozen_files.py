"""A frozen net with all kinds of tensors, its files, and what a failed call must have left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fsdp_zpp import Int8
from fsdp_zpp.frozen.modules import FrozenModule

from . import lora, models

CODEC = Int8(64)
INDEX = "frozen_base.safetensors.index.json"


def make_base(seed: int = 0, tied: bool = False, **arguments: Any) -> models.Net:
    """A frozen net with norms, biases and persistent buffers, all of them random."""
    net = models.Net(**lora.SIZES | {"blocks": 2, "tied": tied} | arguments).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return net


def make_empty(**arguments: Any) -> models.Net:
    """The same without values; ties hold."""
    with torch.device("meta"):
        return models.Net(**lora.SIZES | {"blocks": 2} | arguments).requires_grad_(False)


def rounded(net: models.Net) -> models.Net:
    """The net with every matrix as its codec gives it back."""
    for parameter in net.parameters():
        if parameter.dim() == 2:
            lora.round_weight(parameter, CODEC)
    return net


def output_of(net: nn.Module) -> Tensor:
    """What it computes from a fixed batch, without ranks."""
    return net(torch.arange(14).view(2, 7))


def write_checkpoint(path: Path, tensors: dict[str, Tensor], **changes: Tensor | None) -> Path:
    """A safetensors file of ``tensors``, some of them changed or left out; dots in names are double underscores."""
    state = dict(tensors)
    for name, value in changes.items():
        key = name.replace("__", ".")
        state.pop(key, None)
        state |= {} if value is None else {key: value}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.detach().clone() for key, value in state.items()}, path)
    return path


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the index of a saved base."""
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Edit the tensors of a saved base of one file."""
    (file,) = folder.glob("*.safetensors")
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def snapshot(net: nn.Module) -> dict[str, Any]:
    """All that a failed call must leave as it was: classes, tensors themselves, and their values."""
    tensors = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers())}
    kept = {
        name: (id(tensor), tensor.is_meta, tensor.nan_to_num().sum().item() if not tensor.is_meta else 0.0)
        for name, tensor in tensors.items()
    }
    return kept | {"frozen": [name for name, module in net.named_modules() if isinstance(module, FrozenModule)]}
