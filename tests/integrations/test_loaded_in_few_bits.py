"""Trainer, and so axolotl, train adapters on models that bitsandbytes has loaded in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import llama, models
from harness.pool import Pool
from hugging_face import new_job
from trainer_training import logged, make_trainer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fsdp_zpp import Int8, Strategy, dequantize_frozen_params, quantize_frozen_params
from fsdp_zpp.frozen.modules import FrozenModule
from fsdp_zpp.integrations.transformers import use_strategy

BITS: dict[str, dict[str, Any]] = {
    # As axolotl loads them.
    "4 bits": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "8 bits": {"load_in_8bit": True},
}
PLAIN: dict[str, Any] = {"weights": None, "gradients": None, "gpus_per_node": 2}


def load(folder: str, bits: str) -> Any:
    config = BitsAndBytesConfig(**BITS[bits])
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map=models.device(), dtype=torch.float32
    )
    return model.requires_grad_(False)


def trained(folder: str, bits: str, frozen: Any) -> tuple[list[float], list[float], int]:
    """In a worker: the losses of a training, those of plain layers of the same values, and how many are quantized."""
    losses, quantized = [], 0
    for is_plain in (False, True):
        with new_job():
            model = load(folder, bits)
            if is_plain:
                quantize_frozen_params(model, frozen, dtype=torch.float32)
                dequantize_frozen_params(model)
                for name in ("is_loaded_in_4bit", "is_loaded_in_8bit", "hf_quantizer", "quantization_method"):
                    vars(model).pop(name, None)
                model.is_quantized = False
            strategy = Strategy.mixzpp(**PLAIN, frozen=None if is_plain else frozen)
            trainer = use_strategy(make_trainer(f"{folder}/out", llama.adapt(model, {"default": "lora"})), strategy)
            trainer.train()
            quantized += sum(isinstance(module, FrozenModule) for module in trainer.model.modules())
            losses.append(logged(trainer, "loss") + logged(trainer, "eval_loss"))
    return losses[0], losses[1], quantized


@pytest.mark.parametrize("frozen", ["auto", "as stored", Int8(64)], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_adapters_train_as_on_plain_layers(pool: Callable[[int], Pool], tmp_path: Path, bits: str, frozen: Any) -> None:
    llama.make_base().save_pretrained(tmp_path)
    for losses, plain, quantized in pool(4).run(trained, str(tmp_path), bits, frozen):
        assert quantized == (14 if frozen == "as stored" else 16)
        assert len(losses) == 6
        assert losses == pytest.approx(plain, rel=1e-4)  # Trainer logs few digits
