"""Models of which all, adapters or a part is trained, and what programs of one process make of their files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from harness import llama
from peft import PeftModel
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from fsdp_zpp import NF4, Int8, Strategy

KINDS = ("full", "lora", "partly frozen")
# Without a codec of weights, or the sharded model would compute with weights that differ from those in files.
STRATEGIES = {
    "none": Strategy.zero3(gpus_per_node=2),
    "mixzpp": Strategy.mixzpp(weights=None, frozen=Int8(64), gpus_per_node=2),
    "nf4": Strategy.mixzpp(weights=None, frozen=NF4(64), gpus_per_node=2),
}
CELLS = list(itertools.product(KINDS, STRATEGIES))


def make_model(kind: str, tied: bool = False, other: bool = False, base: LlamaForCausalLM | None = None) -> Any:
    """Make a Llama of which all is trained, adapters are, or only the last layer and the norm; or another base."""
    model = llama.make_base(tied=tied) if base is None else base
    if other:
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.01)
    if kind == "lora":
        return llama.adapt(model, {"default": "lora"})
    if kind == "partly frozen":
        model.requires_grad_(False)
        for module in (model.model.layers[-1], model.model.norm):
            module.requires_grad_(True)
    return model


def logits_of(model: nn.Module) -> Tensor:
    """Return what a model answers, on the CPU."""
    tokens = torch.arange(1, 13, device=next(model.parameters()).device).view(1, -1)
    with torch.no_grad():
        return model(input_ids=tokens).logits.cpu()


def rounded_base(strategy: str) -> LlamaForCausalLM:
    """In one process: the base as a strategy leaves it."""
    frozen = STRATEGIES[strategy].frozen
    return (llama.make_base() if frozen is None else llama.rounded_base(frozen)).cpu()


def loaded(folder: Path, kind: str, strategy: str) -> nn.Module:
    """In one process: what ``from_pretrained`` makes of files, of adapters on what the base was rounded to."""
    if kind != "lora":
        return LlamaForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(rounded_base(strategy), folder)


def check_trained(logits: Tensor, kind: str) -> None:
    """Check that a trained model does not answer what it answered before, or files could hold anything."""
    assert not torch.allclose(logits, logits_of(make_model(kind).cpu()), atol=0.1)


def check_same(logits: Tensor, trained: Tensor) -> None:
    """Check that a model of files in one process answers as the sharded one, which sums in another order."""
    torch.testing.assert_close(logits, trained, rtol=1e-4, atol=1e-4)
