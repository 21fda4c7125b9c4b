"""Layers that bitsandbytes or transformers has quantized in memory become part of a base, kept or encoded anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import stored_checkpoints as stored
import torch
import torch.distributed as dist
from harness import llama, lora, models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.messages import collected
from harness.pool import Pool
from packed_model import WIDTH, make, packed_linear, x
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Linear

from fsdp_zpp import NF4, Int8, Strategy, quantize_frozen_params
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.frozen.modules import FrozenModule, frozen_modules


def four_bits(**options: Any) -> tuple[nn.Module, Tensor]:
    layer = packed_linear(3, **options)
    state = layer.weight.quant_state
    state.dtype = torch.float32
    return layer, bnb.functional.dequantize_4bit(layer.weight.data, state)


def eight_bits(seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    layer = bnb.nn.Linear8bitLt(WIDTH, WIDTH, bias=True, has_fp16_weights=False)
    layer.load_state_dict({"weight": torch.randn(WIDTH, WIDTH) / 8, "bias": torch.randn(WIDTH)})
    layer.weight = layer.weight._quantize(models.device())
    layer = layer.to(models.device()).requires_grad_(False)
    return layer, bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)


def used_eight_bits() -> tuple[nn.Module, Tensor]:
    """A layer whose scales a forward has moved."""
    layer, expected = eight_bits()
    layer.eval()(torch.randn(2, WIDTH, device=models.device(), dtype=torch.float16))
    assert layer.weight.SCB is None
    return layer, expected


def fp8(seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    layer = FP8Linear(256, 128, block_size=(128, 128), has_bias=True).to(models.device()).requires_grad_(False)
    layer.weight.copy_(torch.randn(128, 256).to(torch.float8_e4m3fn))
    layer.weight_scale_inv.copy_(torch.rand(1, 2) + 0.5)
    layer.bias.zero_()
    return layer, Fp8Dequantize(None)._dequantize_one(layer.weight.data, layer.weight_scale_inv.data, torch.float32)


LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "nf4": lambda: four_bits(compress_statistics=False),
    "nf4, nested": four_bits,
    "nf4 in bytes": lambda: four_bits(storage=torch.uint8),
    # Not larger ones: bitsandbytes' kernel for CPUs takes the wrong scales where a row ends within a block.
    "nf4 in other blocks": lambda: four_bits(blocksize=32),
    "fp4": lambda: four_bits(quant_type="fp4"),
    "int8": eight_bits,
    "int8, used": used_eight_bits,
    "fp8": fp8,
}


@pytest.mark.parametrize("codec", ["as stored", Int8(64), NF4(64)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_taken_over_with_its_owners_values(name: str, codec: Codec | str) -> None:
    layer, expected = LAYERS[name]()
    bias = None if layer.bias is None else layer.bias.clone()
    report = quantize_frozen_params(layer, codec, min_numel=1, dtype=torch.float32)
    assert (report.weights, report.parameters) == (1, expected.numel())
    assert type(layer).__name__ == "FrozenLinear"
    assert isinstance(layer, FrozenModule)
    if isinstance(codec, Codec):
        parameter = nn.Parameter(expected.clone(), requires_grad=False)
        lora.round_weight(parameter, codec)
        expected = parameter.data
    assert torch.equal(layer.weight.dequantize(), expected)
    x = torch.randn(3, expected.shape[1], device=models.device())
    expected_output = nn.functional.linear(x, expected, None if bias is None else bias.float())
    assert torch.equal(layer(x), expected_output)
    assert set(dict(layer.named_parameters())) <= {"bias"}


def test_as_stored_leaves_plain_layers() -> None:
    model = nn.Sequential(packed_linear(1), nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    report = quantize_frozen_params(model, "as stored", min_numel=1)
    assert report.weights == 1
    assert report.left["not stored quantized"] == ("1.weight",)
    assert type(model[1]) is nn.Linear
    assert ": frozen base as stored, " in str(report)


def test_by_default_packed_layers_stay_as_stored_and_plain_ones_are_encoded() -> None:
    (packed, expected), plain = eight_bits(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model = nn.Sequential(packed, plain.to(models.device()))
    report = quantize_frozen_params(model, dtype=torch.float32)
    assert (report.weights, report.stored) == (2, 1)
    assert ": frozen base as int8(256), but 1 of 2 weights as stored, " in str(report)
    assert torch.equal(model[0].weight.dequantize(), expected)
    assert model[1].weight.frozen.codec == Int8(256)
    alone = nn.Sequential(eight_bits()[0])
    assert ": frozen base as stored, " in str(quantize_frozen_params(alone))


def logged(adapter: Adapter) -> tuple[list[str], list[str], int]:
    """In a worker: codecs, and what is logged, of a model with packed layers under MixZ++; bytes of a packed chunk."""
    model = make()
    with collected() as records:
        sharded = adapter.wrap(model, Strategy.mixzpp(gpus_per_node=2))
        with torch.no_grad():
            sharded(x())
    weights = {path: weight for path, _, weight in frozen_modules(sharded)}
    codecs = [str(weight.codec) for weight in weights.values()]
    return codecs, [line for _, line in records], next(iter(weights.values())).local_nbytes


@over_adapters
def test_mixzpp_does_not_encode_packed_layers_anew(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    results = pool(4).run(logged, adapter)
    for codecs, _, nbytes in results:
        assert codecs == ["nf4(64)", "nf4(64)", "int8(256)"]
        assert nbytes == WIDTH * WIDTH // 2 * (1 / 2 + 4 / 64)  # a rank of two has half
    assert any(
        "frozen base as int8(256), but 2 of 3 weights as stored, sharded inside" in line for line in results[0][1]
    )


def test_an_adapter_on_a_layer_of_eight_bits_works_on() -> None:
    layer, _ = eight_bits()
    model = nn.Sequential(layer)
    model.is_loaded_in_8bit = True
    adapted = get_peft_model(model, LoraConfig(target_modules=["0"], r=4, init_lora_weights=False))
    x = torch.randn(4, WIDTH, device=models.device())
    before = adapted(x)
    quantize_frozen_params(adapted, "as stored", min_numel=1)
    # LLM.int8 rounds the input to 8 bits, too.
    torch.testing.assert_close(adapted(x), before, rtol=0, atol=0.05 * before.abs().max().item())
    adapted(x).sum().backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


def loaded(adapter: Adapter, folder: str, by_strategy: bool) -> tuple[bool, int, float]:
    """In a worker: whether a loaded model computes what it does dequantized, and how many modules are frozen."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=models.device())
    model.requires_grad_(False)
    if not by_strategy:
        quantize_frozen_params(model, "as stored", gpus_per_node=2)
    adapted = llama.adapt(model, {"default": "lora"})
    alone = llama.adapt(stored.dequantized(Path(folder), torch.bfloat16), {"default": "lora"})
    # PEFT draws A in another dtype on what bitsandbytes has packed.
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                alone.get_parameter(name).copy_(parameter)
    sharded: Any = llama.shard(adapter, adapted, Strategy.mixzpp(gpus_per_node=2, weights=None, frozen="as stored"))
    frozen = sum(isinstance(module, FrozenModule) for module in sharded.modules())
    ours, theirs = llama.logits_of(sharded), llama.logits_of(alone)
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    with llama.peft_of(sharded).disable_adapter(), alone.disable_adapter():
        return torch.equal(llama.logits_of(sharded), llama.logits_of(alone)), frozen, difference


@over_pairs(rest=False, adapter=ADAPTERS, name=["nf4, nested", "int8"], by_strategy=[True, False])
def test_a_loaded_model_is_taken_over_by_its_strategy(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, name: str, by_strategy: bool
) -> None:
    stored.FORMATS[name](tmp_path)
    for same, frozen, difference in pool(4).run(loaded, adapter, str(tmp_path), by_strategy):
        assert (same, frozen) == (True, 14)
        # PEFT's layers round the adapter's output to bf16, on what bitsandbytes has packed, before they add it.
        assert difference < 0.01


def broadcast(codec: Any) -> list[bool]:
    """In a worker: whether layers have the first rank's values, which other ranks' differ from."""
    same = []
    for layer_of in (eight_bits, fp8):
        layer, _ = layer_of(seed=dist.get_rank())
        expected = layer_of(seed=0)[1]
        quantize_frozen_params(layer, codec, min_numel=1, gpus_per_node=2, sync_module_states=True, dtype=torch.float32)
        weight = layer.weight.dequantize()
        same.append(
            torch.equal(weight, expected) if codec == "as stored" else torch.allclose(weight, expected, atol=0.1)
        )
    return same


@pytest.mark.parametrize("codec", ["as stored", Int8(64)], ids=str)
def test_the_first_ranks_codes_are_broadcast(pool: Callable[[int], Pool], codec: Any) -> None:
    assert pool(4).run(broadcast, codec) == [[True, True]] * 4
