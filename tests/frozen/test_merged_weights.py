"""``gathered_weights`` of models with adapters: merged as PEFT merges an unsharded model, or the adapter alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe
import pytest
import stored_checkpoints as stored
import torch
import torch.distributed as dist
from adapted_llama import CODEC, MIXZPP, oracle, sharded
from harness import llama
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.models import device
from harness.pool import Pool
from peft import (
    PeftModel,
    PrefixTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import Tensor

from fsdp_zpp import Strategy, gathered_weights, quantize_frozen_params, save_adapter

EXACT = Strategy("IGG", gpus_per_node=2)


def assert_same(ours: dict[str, Any], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype, name
        assert torch.equal(ours[name].cpu(), expected.cpu()), name


def assert_merged(model: Any, alone: PeftModel, folder: str) -> None:
    """In a worker: merged weights are those of an unsharded model, and the adapter is what save_adapter writes."""
    weights = dict(gathered_weights(model, merged=True))
    adapter = dict(gathered_weights(model, adapters_only=True))
    of_one = dict(gathered_weights(model, merged=True, dtype=torch.bfloat16, rank=1))
    active = alone.active_adapter
    save_adapter(model, folder, adapters=[active])
    saved = Path(folder, "" if active == "default" else active, "adapter_model.safetensors")
    dist.barrier()
    assert_same(adapter, load_file(saved))
    expected = {name: value.clone() for name, value in alone.to(device()).merge_and_unload().state_dict().items()}
    assert_same(weights, expected)
    if dist.get_rank() == 1:
        assert_same(of_one, {name: value.bfloat16() for name, value in expected.items()})
    else:
        assert set(of_one.values()) == {None}
        assert of_one.keys() == expected.keys()


def quantized(adapter: Adapter, kind: str, folder: str) -> None:
    adapters = {"default": kind, "other": "lora"}
    model = sharded(adapter, adapters)
    llama.logits_of(model)
    assert_merged(model, oracle(adapters), folder)


def in_full_precision(adapter: Adapter, kind: str, folder: str) -> None:
    adapters = {"chosen": kind, "other": "rslora"}
    dtype = torch.float32 if adapter == ADAPTERS[0] else llama.ADAPTED  # PEFT's adapters are in fp32
    model = llama.shard(adapter, llama.adapt(llama.make_base(dtype), adapters), EXACT)
    assert_merged(model, llama.adapt(llama.make_base(dtype), adapters), folder)


def of_experts(adapter: Adapter, kind: str, folder: str) -> None:
    model = moe.shard(adapter, moe.adapt(moe.make_base(kind)), MIXZPP)
    assert_merged(model, moe.adapt(moe.rounded_base(CODEC, kind)), folder)


def switched(adapter: Adapter) -> None:
    """In a worker: other adapters become active, between forwards."""
    adapters = {"default": "lora", "other": "rslora"}
    model = sharded(adapter, adapters)
    for name in ("default", "other", "default"):
        llama.peft_of(model).set_adapter(name)
        alone = oracle(adapters)
        alone.set_adapter(name)
        weights, of_adapter = (
            dict(gathered_weights(model, merged=True)),
            dict(gathered_weights(model, adapters_only=True)),
        )
        llama.logits_of(model)
        assert_same(of_adapter, {n: v.clone() for n, v in get_peft_model_state_dict(alone, adapter_name=name).items()})
        assert_same(weights, alone.merge_and_unload().state_dict())


@over_adapters
def test_the_active_adapter_is_handed_out_after_switches(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(switched, adapter)


KINDS = [kind for kind in llama.KINDS if kind != "tied embedding"]  # which can't be sharded


@over_each(2, adapter=ADAPTERS, kind=KINDS)
def test_adapters_are_merged_into_a_quantized_base_as_peft_merges_them(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str, tmp_path: Path
) -> None:
    pool(4).run(quantized, adapter, kind, str(tmp_path))


@over_each(adapter=ADAPTERS, kind=KINDS)
def test_adapters_are_merged_into_full_precision_as_peft_merges_them(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str, tmp_path: Path
) -> None:
    pool(4).run(in_full_precision, adapter, kind, str(tmp_path))


@over_each(adapter=ADAPTERS, kind=moe.KINDS)
def test_adapters_of_experts_are_merged(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str, tmp_path: Path
) -> None:
    pool(4).run(of_experts, adapter, kind, str(tmp_path))


@pytest.mark.parametrize("format", ["fp8", "nf4", "int8"])
def test_adapters_are_merged_into_a_base_as_it_was_stored(format: str, tmp_path: Path) -> None:
    folder = stored.FORMATS[format](tmp_path)
    base = stored.empty(folder)
    quantize_frozen_params(base, "as stored", checkpoint=folder)
    ours, alone = (llama.adapt(model, {"default": "lora"}) for model in (base, stored.dequantized(folder)))
    adapter = get_peft_model_state_dict(ours)
    assert any(value.any() for name, value in adapter.items() if "lora_B" in name)
    set_peft_model_state_dict(alone, adapter)
    assert_same(dict(gathered_weights(ours, merged=True)), alone.merge_and_unload().state_dict())


def test_what_can_not_be_handed_out_is_refused() -> None:
    base = llama.make_base()
    with pytest.raises(ValueError, match="there is no PeftModel in this LlamaForCausalLM"):
        gathered_weights(base, merged=True)
    prompts = get_peft_model(llama.make_base(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="'default' is a PREFIX_TUNING adapter, which changes none"):
        gathered_weights(prompts, merged=True)
    with pytest.raises(ValueError, match="tensors that PEFT computes from its parameters"):
        gathered_weights(prompts, adapters_only=True)
    model = llama.adapt(base, {"default": "lora", "other": "lora"})
    with pytest.raises(ValueError, match="pass one"):
        gathered_weights(model, adapters_only=True, merged=True)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"\['default', 'other'\] are active; choose one"):
        gathered_weights(model, adapters_only=True)
    expected = model.merge_and_unload().state_dict()
    both = llama.adapt(llama.make_base(), {"default": "lora", "other": "lora"})
    both.base_model.set_adapter(["default", "other"])
    assert_same(dict(gathered_weights(both, merged=True)), expected)


@pytest.mark.parametrize("argument", [{"dtype": torch.bfloat16}, {"merged": True}])
def test_packed_weights_are_neither_cast_nor_merged(argument: dict[str, Any]) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    base = llama.make_base()
    base.model.layers[0].mlp.up_proj = bnb.nn.Linear4bit(64, 112, bias=False)
    model = llama.adapt(base, {"default": "lora"})
    with pytest.raises(ValueError, match=r"up_proj\.weight is packed by another quantizer"):
        gathered_weights(model, **argument)
