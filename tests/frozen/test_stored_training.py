"""LoRA trains on a base that stays as it is stored as it does on the model that the format's owner dequantizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_checkpoints as stored
import torch
import torch.distributed as dist
from adapted_llama import optimizer_of, steps
from harness import llama, models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_each
from harness.pool import Pool
from peft import PeftModel

from fsdp_zpp import Int8, Strategy, dequantize_frozen_params, quantize_frozen_params, save_adapter, traffic
from fsdp_zpp.codecs.base import Codec

LORA = {"default": "lora"}


def trained(
    adapter: Adapter, folder: str, scope: str, kept_on: int | None, saved: str
) -> tuple[bool, bool, float, bool, float]:
    """In a worker: what a sharded model on a kept base computes, trains and saves, beside the owner's on one device."""
    checkpoint = Path(folder)
    model = stored.empty(checkpoint)
    quantize_frozen_params(model, "as stored", checkpoint=checkpoint, placement=scope, gpus_per_node=kept_on)
    sharded: Any = llama.shard(adapter, llama.adapt(model, LORA), Strategy(f"{scope}GG", gpus_per_node=2))
    alone = llama.adapt(stored.dequantized(checkpoint), LORA)
    before = torch.equal(llama.logits_of(sharded), llama.logits_of(alone))
    greedy = llama.greedy_tokens(sharded, 4) == llama.greedy_tokens(alone, 4)
    steps(sharded, alone=False, optimizer=optimizer_of(sharded))
    expected = steps(alone, alone=True)
    save_adapter(sharded, saved)
    logits = llama.logits_of(sharded)
    on_dequantized = PeftModel.from_pretrained(stored.dequantized(checkpoint), saved)
    named = dict(on_dequantized.named_parameters())
    distance = models.distance({name: named[name].detach() for name in expected}, expected)
    same = torch.equal(llama.logits_of(on_dequantized), logits)
    if dist.get_rank():
        return before, greedy, distance, same, 0.0
    original = stored.owners_model(checkpoint)
    theirs = llama.logits_of(PeftModel.from_pretrained(original, saved), on=torch.device("cpu")).float()
    return before, greedy, distance, same, ((theirs - logits).norm() / logits.norm()).item()


@over_each(adapter=ADAPTERS, name=list(stored.FORMATS), scope=["I", "G"])
def test_lora_trains_and_its_adapter_loads_on_the_original(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, name: str, scope: str
) -> None:
    folder = stored.FORMATS[name](tmp_path / "base")
    # The default size of a node is all four ranks, so that the base moves to the strategy's nodes of two.
    kept_on = None if scope == "I" else 2
    for result in pool(4).run(trained, adapter, str(folder), scope, kept_on, str(tmp_path / "adapter")):
        before, greedy, distance, same, difference = result
        assert before
        assert greedy
        assert distance <= 1e-4
        assert same
        assert difference < 0.03  # bf16, in which LLM.int8 rounds activations, too


def recoded(adapter: Adapter, folder: str, codec: Codec) -> bool:
    """In a worker: whether a base that was encoded anew is what its codec leaves of the owner's values."""
    model = stored.empty(Path(folder))
    quantize_frozen_params(model, codec, checkpoint=folder, gpus_per_node=2)
    alone = stored.dequantized(Path(folder))
    quantize_frozen_params(alone, codec, gpus_per_node=2)
    dequantize_frozen_params(alone)
    sharded = llama.shard(adapter, llama.adapt(model, LORA), Strategy.zeropp(gpus_per_node=2, weights=None))
    return torch.equal(llama.logits_of(sharded), llama.logits_of(llama.adapt(alone, LORA)))


@over_each(adapter=ADAPTERS, name=["nf4, nested", "int8", "fp8"])
def test_a_base_is_encoded_anew_by_each_rank(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, name: str
) -> None:
    folder = stored.FORMATS[name](tmp_path)
    assert pool(4).run(recoded, adapter, str(folder), Int8(64)) == [True] * 4


def sent(folder: str) -> int:
    """In a worker: bytes of a forward's gathers."""
    model = stored.empty(Path(folder))
    quantize_frozen_params(model, "as stored", checkpoint=folder, gpus_per_node=2)
    llama.logits_of(model)
    return sum(count for levels in traffic(model).values() for count in levels.values())


def test_codes_are_gathered_as_bytes(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    folder = stored.FORMATS["fp4"](tmp_path)
    layers = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    for ours in pool(4).run(sent, str(folder)):
        # A rank of two sends its half: codes of half a byte, and 4 bytes for the scale of 64 values.
        assert ours == pytest.approx(layers * (0.5 + 4 / 64) / 2, rel=1e-3)
