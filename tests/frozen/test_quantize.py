"""quantize_frozen_params: what it takes, says and refuses, and what modules with a quantized weight still do."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import llama, lora, models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import over_adapters
from harness.messages import Refusal, Reply, assert_refused, attempt, collected
from harness.pool import Pools
from torch import nn
from transformers import LlamaForCausalLM

from fsdp_zpp import NF4, Int4, Int8, Strategy, dequantize_frozen_params, quantize_frozen_params
from fsdp_zpp.codecs import Codec
from fsdp_zpp.frozen import weight
from fsdp_zpp.frozen._torch_modules import frozen_sites
from fsdp_zpp.frozen.base_files import check_base, describe_base

CODEC = Int8(64)

# ---- what it says


def frozen_in_two_goes(adapter: Adapter) -> list[tuple[str, str]]:
    block, table = 66 * 91, 66 * 71
    net = lora.make_net()
    net.head.requires_grad_(True)
    with collected() as records:
        for weights, parameters in ((5, 4 * block + table), (1, table)):
            report = quantize_frozen_params(net, Int8(256), gpus_per_node=2)
            assert (report.weights, report.parameters, report.bytes_before) == (weights, parameters, 4 * parameters)
            assert list(report.left) == ["1-D"]
            net.head.requires_grad_(False)
        model, tokens = adapter.shard(net, Case(), STOCK), models.batch(0, 0)[:, :-1] % 71
        assert torch.equal(model(tokens), lora.rounded_net(Int8(256))(tokens))
    return records


def logged(adapter: Adapter, frozen: bool) -> list[tuple[str, str]]:
    with collected() as records:
        net = lora.make_net() if frozen else models.make_net()
        model = adapter.shard(net, Case(), Strategy.mixzpp(gpus_per_node=2))
        for _ in range(2):
            models.loss_of(model, models.batch(0, 0)).backward()
    return records


def said(adapter: Adapter) -> list[list[tuple[str, str]]]:
    return [frozen_in_two_goes(adapter), logged(adapter, frozen=True), logged(adapter, frozen=False)]


@over_adapters
def test_a_call_quantizes_what_was_frozen_since_and_rank_0_logs_one_line(pool: Pools, adapter: Adapter) -> None:
    (lines, by_strategy, nothing), *others = pool(4).run(said, adapter)
    assert [level for level, _ in lines + by_strategy] == ["INFO"] * 4
    where = "frozen base as int8(256), sharded inside nodes on 2 nodes x 2"
    assert lines[0][1].startswith(f"Net: {where}: 5 weights, ")
    assert "left as they are: 6 1-D (blocks.0.norm.weight, ...)" in lines[0][1]
    assert f"{where}: 6 weights" in by_strategy[1][1]
    assert [line for level, line in nothing if level == "WARNING"] == [
        "Net: frozen=auto is NOT active: no frozen weight can or should be quantized"
    ]
    assert others == [[[], [], []]] * 3


def test_large_matrices_of_linear_and_embedding_and_stacks_are_quantized_and_the_rest_is_named() -> None:
    net = nn.Module()
    net.small, net.large = nn.Linear(8, 8), nn.Linear(64, 64)
    net.trainable, net.kernel = nn.Linear(64, 64), nn.Conv2d(16, 16, 5)
    net.bounded, net.double = nn.Embedding(64, 64, max_norm=1.0), nn.Linear(64, 64).double()
    net.stack, net.positions = (nn.Parameter(torch.randn(count, 64, 64)) for count in (5, 1))
    net.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64, bias=False))
    net.requires_grad_(False)
    net.trainable.requires_grad_(True)
    net.also = nn.Linear(64, 64, bias=False)
    net.also.weight = net.large.weight
    report = quantize_frozen_params(net)
    assert (report.weights, report.parameters) == (2, 6 * 4096)
    assert net.also.weight.frozen is net.large.weight.frozen
    assert {reason: names[0] for reason, names in report.left.items()} == {
        "smaller than 4096 values": "small.weight",
        "1-D": "small.bias",
        "of Conv2d, not nn.Linear or nn.Embedding": "kernel.weight",
        "of Module, not nn.Linear or nn.Embedding": "positions",
        "an nn.Embedding with max_norm, which writes to it": "bounded.weight",
        "a Parameter of torch.float64": "double.weight",
        "of ParametrizationList, not nn.Linear or nn.Embedding": "parametrized.parametrizations.weight.original0",
    }


# ---- what it refuses


def refusals_of(adapter: Adapter) -> dict[str, Refusal]:

    def quantized(*arguments: Any, net: Callable[[], Any] = lora.make_net, **options: Any) -> Callable[[], Any]:
        return lambda: quantize_frozen_params(net(), *arguments, **{"gpus_per_node": 2} | options)

    def on_meta() -> nn.Module:
        return lora.make_net().to("meta")

    mixzpp = Strategy.mixzpp(gpus_per_node=2)
    return {
        "codec": (quantized(8), TypeError, "codec must be a codec such as Int8(256)"),
        "placement": (quantized(placement="Q"), ValueError, "one of the scopes N or I, got 'Q'"),
        "nodes": (quantized(gpus_per_node=3), ValueError, "allowed are [1, 2, 4]"),
        "min_numel": (quantized(min_numel=0), ValueError, "min_numel must be a positive int, got 0"),
        "dtype": (quantized(dtype=torch.int8), ValueError, "dtype must be one of torch.float32"),
        "meta": (quantized(net=on_meta), ValueError, "embedding.weight is on the meta device"),
        "meta by strategy": (lambda: adapter.apply(on_meta(), mixzpp), ValueError, "is on the meta device"),
        "no such file": (quantized(checkpoint="nowhere.safetensors"), ValueError, "there is no nowhere.safetensors"),
    }


def attempts(adapter: Adapter) -> dict[str, Reply]:
    return {name: attempt(refusal) for name, refusal in refusals_of(adapter).items()}


@over_adapters
def test_bad_input_is_refused_on_every_rank(pool: Pools, adapter: Adapter) -> None:
    replies = pool(4).run(attempts, adapter)
    for name, refusal in refusals_of(adapter).items():
        assert_refused([of_rank[name] for of_rank in replies], refusal)


def differently_seeded() -> None:
    for scope in ("N", "I"):
        net = lora.make_net(seed=dist.get_rank())
        quantize_frozen_params(net, placement=scope, gpus_per_node=2)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"the frozen base of Net: .*they hold different weights"):
                net(models.batch(0, 0)[:, :-1] % 71)
    net = lora.make_net(seed=dist.get_rank())
    quantize_frozen_params(net, gpus_per_node=2, sync_module_states=True)
    weights = {path: frozen for path, _, _, frozen in frozen_sites(net)}
    oracle = lora.rounded_net(Int8(256)).blocks[0].up.base.weight
    assert torch.equal(weights["blocks.0.up.base"].dequantize(), oracle)


def test_replicas_of_a_base_must_be_equal_unless_rank_0s_are_sent(pool: Pools) -> None:
    pool(4).run(differently_seeded)


# ---- modules


def test_a_quantized_module_is_one_of_its_kind() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(101, 64), nn.Linear(64, 96, bias=False)).requires_grad_(False)
    plain = copy.deepcopy(net)
    quantize_frozen_params(net, CODEC)
    layer, tokens = net[1], torch.arange(101)
    assert isinstance(layer, nn.Linear)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((96, 64), torch.float32, "cpu")
    assert list(net.state_dict()) == list(net.parameters()) == list(net.buffers()) == []
    # A step of 1/127 of a block's largest value, rounded.
    bound = plain[1].weight.abs().max().item() / 254 + 1e-6
    torch.testing.assert_close(layer.weight + 0, plain[1].weight.data, rtol=0, atol=bound)
    expected = net(tokens)
    copied = copy.deepcopy(net)
    assert type(copied[1]) is nn.Linear
    assert torch.equal(copied(tokens), expected)
    assert torch.equal(net[1](expected.new_ones(64)), copied[1](expected.new_ones(64)))
    assert net.to(torch.bfloat16)(tokens).dtype == torch.bfloat16
    assert torch.equal(net.to(torch.float32)(tokens), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(tokens), copied(tokens))
    assert dequantize_frozen_params(net) == 2
    assert type(net[1]) is nn.Linear
    assert torch.equal(net(tokens), expected)


WRITES: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "in place": (lambda layer: layer.weight.add_(1), "can't be written to"),
    "data": (lambda layer: setattr(layer.weight, "data", torch.zeros(1)), "can't be written to"),
    "assign": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(1))), "can't be written to"),
    "reset": (lambda layer: layer.reset_parameters(), "can't be written to"),
    "unfreeze": (lambda layer: layer.weight.requires_grad_(), "can't be trained"),
    "unfreeze the layer": (lambda layer: layer.requires_grad_(), "can't be trained"),
}


@pytest.mark.parametrize(("write", "message"), WRITES.values(), ids=WRITES)
def test_writes_to_a_quantized_weight_are_refused(write: Callable[[nn.Linear], Any], message: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    quantize_frozen_params(net)
    with pytest.raises(RuntimeError, match=message):
        write(net[0])


def quantized_llama(tied: bool = True) -> LlamaForCausalLM:
    model = llama.make_base(tied=tied).requires_grad_(False)
    quantize_frozen_params(model, CODEC)
    return model


def test_tied_modules_show_one_tensor_and_so_do_their_copies() -> None:
    model = quantized_llama()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, nn.Parameter)
    copied, expected = copy.deepcopy(model), llama.logits_of(model)
    assert type(copied.lm_head) is nn.Linear
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert torch.equal(llama.logits_of(copied), expected)
    assert copied.num_parameters() == llama.make_base(tied=True).num_parameters()
    model.tie_weights()
    assert torch.equal(llama.logits_of(model), expected)
    model.to(torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype is torch.bfloat16


def test_tie_weights_ties_quantized_modules() -> None:
    untied = quantized_llama(tied=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    untied.config.tie_word_embeddings = True
    untied.tie_weights()
    assert untied.lm_head.weight is untied.model.embed_tokens.weight
    oracle = llama.rounded_base(CODEC)
    oracle.lm_head.weight = oracle.model.embed_tokens.weight
    assert torch.equal(llama.logits_of(untied), llama.logits_of(oracle))


def test_save_pretrained_refuses_to_leave_the_base_out(tmp_path: Path) -> None:
    model = quantized_llama()
    expected = llama.logits_of(model)
    with pytest.raises(RuntimeError, match=r"15 weights of this LlamaForCausalLM .*save_frozen_params\(model, path\)"):
        model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="15 weights of this LlamaModel"):
        model.model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    adapted = llama.adapt(model, {"default": "lora"})
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    copy.deepcopy(adapted.unload()).save_pretrained(tmp_path / "copy")
    dequantize_frozen_params(model)
    model.save_pretrained(tmp_path / "model")
    for folder in ("copy", "model"):
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / folder).to(models.device())
        assert torch.equal(llama.logits_of(loaded), expected)


# Under either FSDP a first forward in inference mode is torch's to refuse: its own parameters are made there, too.


def trained_after_inference(kind: str, gpus_per_node: int) -> None:
    """In a worker: a first forward computes as much with inference mode as without, and so does a training after it."""
    outcomes = []
    for mode in (torch.inference_mode, torch.no_grad):
        model: Any = llama.adapt(llama.make_base(tied=True), {"default": kind})
        quantize_frozen_params(model, CODEC, gpus_per_node=gpus_per_node)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        with mode():
            logits = model(input_ids=llama.tokens(99, 0)).logits.tolist()
        outcomes.append((logits, llama.train(model, optimizer)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("kind", "gpus_per_node"), [("lora", 2), ("dora", 1)])
def test_a_first_forward_in_inference_mode_changes_nothing_in_training(
    pool: Pools, kind: str, gpus_per_node: int
) -> None:
    pool(2).run(trained_after_inference, kind, gpus_per_node)


@pytest.mark.parametrize("codec", [Int4(128), NF4(64)], ids=str)
def test_weights_are_encoded_piece_by_piece_as_at_once(monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
    monkeypatch.setattr(weight, "_PIECE", 512)
    net, oracle, read = lora.make_base(), lora.make_base(), []
    encode = codec.encode
    monkeypatch.setattr(
        type(codec), "encode", lambda self, flat, *rest: read.append(flat.numel()) or encode(flat, *rest)
    )
    quantize_frozen_params(net, codec)
    assert 0 < max(read) <= 512
    monkeypatch.undo()
    for parameter in oracle.parameters():
        if parameter.dim() == 2:
            lora.round_weight(parameter, codec)
    assert torch.equal(lora.output_of(net), lora.output_of(oracle))


# ---- a base is told from another one by a few of its scales


def test_another_base_is_refused_and_another_codec_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def described(seed: int = 0, codec: Codec = CODEC) -> tuple[nn.Module, Any]:
        net = lora.make_base(seed)
        quantize_frozen_params(net, codec)
        return net, json.loads(json.dumps(describe_base(net)))  # as a file gives it back

    base, saved = described()
    assert saved
    for of_weight in saved.values():
        of_weight["scales"] = [scale * (1 + 1e-6) for scale in of_weight["scales"]]  # as another kernel may round
    check_base(base, saved, "it")
    with pytest.raises(ValueError, match=f"it was saved with another base: {len(saved)} of the {len(saved)} quantized"):
        check_base(described(seed=1)[0], saved, "it")
    caplog.set_level(logging.WARNING, "fsdp_zpp")
    check_base(described(codec=NF4(64))[0], saved, "it")
    assert "it was saved with int8(64) of" in caplog.text
