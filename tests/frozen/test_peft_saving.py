"""An adapter that was trained on a quantized and sharded base is saved as on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapted_llama import CODEC, MIXZPP, TIED, optimizer_of, oracle, sharded, steps
from harness import llama, models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.fsdp1 import Fsdp1
from harness.messages import Reply, attempt
from harness.pool import Pool
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import LlamaForCausalLM

from fsdp_zpp import Strategy, quantize_frozen_params, save_adapter


def saved_and_loaded(adapter: Adapter, kind: str, folder: str, tied: bool) -> tuple[float, float, bool, bool, float]:
    """In a worker: how far a saved adapter is from the one in memory, and what saving changed."""
    model, alone = sharded(adapter, {"default": kind}, tied=tied), oracle({"default": kind}, tied=tied)
    optimizer = optimizer_of(model)
    steps(model, alone=False, optimizer=optimizer)
    trained = steps(alone, alone=True)
    before = llama.logits_of(model)
    save_adapter(model, folder)
    unchanged = torch.equal(llama.logits_of(model), before)
    loaded = PeftModel.from_pretrained(llama.rounded_base(CODEC, tied=tied), folder)
    same = torch.equal(llama.logits_of(loaded), before)
    named = dict(loaded.named_parameters())
    weights = models.distance({name: named[name].detach() for name in trained}, trained)
    steps(model, alone=False, count=1, optimizer=optimizer)  # training goes on
    steps(alone, alone=True, count=1)
    ours, theirs = llama.logits_of(model), llama.logits_of(alone)
    after = ((ours - theirs).norm() / theirs.norm()).item()
    difference = ((llama.logits_of(loaded) - before).norm() / before.norm()).item()
    return difference, weights, unchanged, same, after


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        *(pytest.param(kind, False, id=kind) for kind in ("lora", "rslora", "dora", "embedding", "head trained")),
        *(pytest.param(kind, True, id=f"{kind}, tied") for kind in TIED),
    ],
)
@over_adapters
def test_a_saved_adapter_loads_on_one_device_bit_for_bit(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str, tied: bool, tmp_path: Path
) -> None:
    for logits, weights, unchanged, same, after in pool(4).run(saved_and_loaded, adapter, kind, str(tmp_path), tied):
        assert unchanged
        assert same, logits
        assert weights <= 1e-4
        assert after <= 1e-4


def saved_from_replicas(adapter: Adapter, folder: str) -> bool:
    """In a worker: whether an adapter that every rank holds whole is saved as it is."""
    strategy = Strategy("NNN", frozen=CODEC, gpus_per_node=2)
    model = sharded(adapter, {"default": "lora"}, strategy)
    steps(model, alone=False, count=1)
    save_adapter(model, folder)
    loaded = PeftModel.from_pretrained(llama.rounded_base(CODEC), folder).to(models.device())
    return torch.equal(llama.logits_of(loaded), llama.logits_of(model))


@over_adapters
def test_an_adapter_that_is_not_sharded_is_saved(pool: Callable[[int], Pool], adapter: Adapter, tmp_path: Path) -> None:
    assert all(pool(4).run(saved_from_replicas, adapter, str(tmp_path)))


def one_by_one(model: Any) -> torch.optim.Optimizer:
    """In a worker: an optimizer for views of one memory, which a kernel for several parameters updates in no order."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False, fused=False)


def refused_ties(adapter: Adapter) -> str:
    """In a worker: what is said to adapters that are views of one memory, which works where nothing is sharded."""
    base = llama.make_base(tied=True).requires_grad_(False)
    quantize_frozen_params(base, CODEC, gpus_per_node=2)
    model, alone = llama.adapt(base, {"default": "tied embedding"}), oracle({"default": "tied embedding"}, tied=True)
    assert torch.equal(llama.logits_of(model), llama.logits_of(alone))
    trained = [steps(each, alone=True, optimizer=one_by_one(each)) for each in (model, alone)]
    assert models.distance(*trained) <= 1e-5
    base = llama.make_base(tied=True)
    model = llama.shard(adapter, llama.adapt(base, {"default": "tied embedding"}), MIXZPP)
    try:
        llama.logits_of(model)
    except ValueError as error:
        return str(error)
    return ""


# fully_shard itself refuses parameters that are not contiguous.
def test_ties_that_sharding_loses_are_refused(pool: Callable[[int], Pool]) -> None:
    for said in pool(4).run(refused_ties, Fsdp1()):
        assert said.startswith("the adapter 'default' has ensure_weight_tying=True and targets a tied embedding")


def saved_where_it_can_not_be(path: str) -> str:
    """In a worker: what saving to a file says."""
    try:
        save_adapter(llama.adapt(llama.make_base(), {"default": "lora"}), path)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_failure_to_save_is_an_error_on_all_ranks(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    for said in pool(2).run(saved_where_it_can_not_be, str(path)):
        assert said.startswith(f"the adapter could not be saved to {path}")


def test_models_without_the_adapter_are_refused() -> None:
    with pytest.raises(ValueError, match="no PeftModel in this LlamaForCausalLM"):
        save_adapter(llama.make_base(), "nowhere")
    with pytest.raises(ValueError, match=r"no adapter \['missing'\] in this model; choose from \['default'\]"):
        save_adapter(llama.adapt(llama.make_base(), {"default": "lora"}), "nowhere", adapters=["missing"])


# ---- save_pretrained, transformers' and PEFT's


def refused_and_saved(adapter: Adapter, scopes: str, adapted: bool, folder: str) -> tuple[list[Reply], list[str], bool]:
    """In a worker: how calls without a state dict are refused, what they left, and whether one with it saves all."""
    model: Any = llama.make_base()
    if adapted:
        model = llama.adapt(model.requires_grad_(False), {"default": "lora"})
    before = {name: value.clone() for name, value in llama.make_base().state_dict().items()}
    model = llama.shard(adapter, model, Strategy(scopes, gpus_per_node=2))
    inner, is_first = llama.peft_of(model), dist.get_rank() == 0
    replies = [
        attempt((lambda given=given: inner.save_pretrained(folder, **given), RuntimeError, ""))
        for given in ({}, {"is_main_process": is_first}, {"state_dict": None})
    ]
    dist.barrier()
    left = [path.name for path in Path(folder).glob("*.safetensors")]
    dist.barrier()
    if adapted:
        save_adapter(model, folder)
        return replies, left, (Path(folder) / "adapter_model.safetensors").exists()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if is_first:
        inner.save_pretrained(folder, state_dict=state)
    dist.barrier()
    loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
    return replies, left, all(torch.equal(loaded[name], value.cpu()) for name, value in before.items())


@over_each(adapter=ADAPTERS, adapted={"whole": False, "adapted": True}, scopes=["GGG", "IGG", "III", "NNG"])
def test_save_pretrained_of_a_sharded_model_is_refused_on_every_rank(
    pool: Callable[[int], Pool], adapter: Adapter, adapted: bool, scopes: str, tmp_path: Path
) -> None:
    for replies, left, whole in pool(4).run(refused_and_saved, adapter, scopes, adapted, str(tmp_path)):
        for kind, text, sent in replies:
            assert (kind, sent) == ("RuntimeError", 0)
            assert "is sharded, and save_pretrained would write what one rank holds" in text
            assert "fsdp_zpp.save_adapter(model, path)" in text
            assert "full state dict" in text
        assert left == []
        assert whole


def saved_where_weights_are_whole(folder: str) -> list[bool]:
    """In a worker: whether transformers saves all of a model that each rank holds, or that is summoned."""
    expected, equal = llama.make_base().state_dict(), []
    for scopes in ("NNN", "IGG"):
        model = llama.shard(Fsdp1(), llama.make_base(), Strategy(scopes, gpus_per_node=2))
        with nullcontext() if scopes == "NNN" else FullyShardedDataParallel.summon_full_params(model, writeback=False):
            # On all ranks: state dicts are collective, and transformers' takes one.
            model.module.save_pretrained(f"{folder}/{dist.get_rank()} {scopes}")
        dist.barrier()
        loaded = LlamaForCausalLM.from_pretrained(f"{folder}/0 {scopes}").state_dict()
        equal.append(all(torch.equal(loaded[name], value.cpu()) for name, value in expected.items()))
    return equal


def test_save_pretrained_works_where_ranks_hold_whole_weights(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    assert pool(4).run(saved_where_weights_are_whole, str(tmp_path)) == [[True, True]] * 4
