"""Configurations of accelerate that a strategy can't honour are refused, and the error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from accelerate_training import TOKENS, ZEROPP, accelerators, plugin
from harness import llama
from harness.pool import Pool
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_zpp.integrations.accelerate import use_strategy


def refused(kind: str) -> str:
    """In a worker: what is said to something that can't be."""
    options: dict[str, Any] = {}
    if kind == "compiled":
        options = {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}
    if kind == "layers compiled":
        options = {"dynamo_plugin": TorchDynamoPlugin(backend="eager", use_regional_compilation=True)}
    is_old = patch("fsdp_zpp.integrations._requirement.version", lambda name: "1.13.0")
    with accelerators(**options) as accelerator, is_old:
        if kind == "late":
            accelerator._models.append(nn.Linear(2, 2))
        if kind == "twice":
            use_strategy(accelerator, ZEROPP)
        strategy: Any = "zeropp" if kind == "type" else ZEROPP
        plugins = {
            "FSDP1": {"fsdp_version": 1},
            "rank 0": {"cpu_ram_efficient_loading": True},
            "recomputed": {"activation_checkpointing": True},
        }
        own = plugin(**plugins[kind]) if kind in plugins else None
        try:
            use_strategy(accelerator, strategy, plugin=own)
            model = llama.make_base()
            if kind == "sharded":
                fully_shard(model)
            optimizer = torch.optim.SGD(llama.make_base().parameters() if kind == "other" else model.parameters())
            if kind == "recomputed":
                model = nn.Sequential(nn.Linear(4, 4))
            if kind == "unsharded":
                model = accelerator.prepare(model)
                model(input_ids=TOKENS.to(accelerator.device))
                optimizer = torch.optim.SGD(model.parameters())
            if kind == "both":
                models = [accelerator.prepare(llama.make_base()) for _ in range(2)]
                accelerator.prepare(torch.optim.SGD([p for model in models for p in model.parameters()]))
            if kind == "stepped":
                optimizer.state[next(iter(model.parameters()))] = {"step": 1}
            accelerator.prepare(model, optimizer)
        except (ImportError, TypeError, ValueError) as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("type", "strategy must be a Strategy such as Strategy.zeropp(), got 'zeropp'"),
        ("twice", "this accelerator has a strategy already"),
        ("late", "call use_strategy before accelerator.prepare"),
        ("compiled", "TorchDynamoPlugin(use_regional_compilation=True)"),
        ("layers compiled", "needs accelerate 1.14 or later to compile layer by layer, and 1.13.0 is installed"),
        ("FSDP1", "a strategy needs fsdp_version=2, and the plugin says 1"),
        ("rank 0", "cpu_ram_efficient_loading=True loads the weights on rank 0 alone"),
        ("recomputed", "it wraps none of this Sequential: name its layers"),
        ("sharded", "was sharded by torch's fully_shard before"),
        ("other", "a parameter that is not the model's"),
        ("unsharded", "a forward leaves the root unsharded"),
        ("stepped", "prepare both before training"),
        ("both", "the optimizer has parameters of 2 models"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(pool: Callable[[int], Pool], kind: str, message: str) -> None:
    for error in pool(4).run(refused, kind):
        assert message in error


def test_one_process_is_refused() -> None:
    with accelerators() as accelerator, pytest.raises(ValueError, match="accelerate launch or torchrun"):
        use_strategy(accelerator, ZEROPP)
