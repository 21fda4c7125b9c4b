"""Experts of mixture-of-experts models, stacks of matrices, are quantized, sharded and adapted like other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe
import pytest
import torch
import torch.distributed as dist
from harness import llama, models
from harness.adapter import STOCK, Adapter
from harness.covering import ADAPTERS, over_adapters
from harness.llama import greedy_tokens
from harness.pool import Pool
from harness.wiretap import sent_in
from peft import PeftModel
from torch import Tensor, nn

from fsdp_zpp import (
    NF4,
    Int4,
    Int8,
    Strategy,
    dequantize_frozen_params,
    load_frozen_params,
    quantize_frozen_params,
    save_adapter,
    save_frozen_params,
)
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.frozen._tensor import FrozenTensor
from fsdp_zpp.frozen.modules import frozen_modules

CODEC = Int8(64)
MIXZPP = Strategy("IGG", frozen=CODEC, gpus_per_node=2)
over_kinds = pytest.mark.parametrize("kind", moe.KINDS)


def losses_and_gradients(model: Any, alone: bool) -> dict[str, Tensor]:
    """In a worker: leave the mean gradient of all ranks' batches on ``model``; ``alone`` takes them all itself."""
    ranks = range(dist.get_world_size()) if alone else [dist.get_rank()]
    for rank in ranks:
        (llama.loss_of(model, llama.tokens(0, rank)) / len(ranks)).backward()
    return {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


# ---- what is computed


def same_logits(adapter: Adapter, kind: str) -> list[bool]:
    """In a worker: whether logits are the oracle's, bit for bit, wherever the base is and however it is quantized."""
    same = []
    for scopes, codec, experts in (
        ("IGG", CODEC, "grouped_mm"),
        ("GGG", Int4(32), "batched_mm"),
        ("NNN", NF4(64), "eager"),
        ("IIG", Int8(256), "eager"),
    ):
        model = moe.make_base(kind, experts=experts).requires_grad_(False)
        model.lm_head.requires_grad_(True)
        oracle = moe.rounded_base(codec, kind, experts=experts)
        oracle.lm_head = moe.make_base(kind).lm_head
        model = moe.shard(adapter, model, Strategy(scopes, frozen=codec, gpus_per_node=2))
        same += [torch.equal(moe.logits_of(model), moe.logits_of(oracle)) for _ in range(2)]
    return same


@over_kinds
@over_adapters
def test_forward_equals_the_dequantized_model(pool: Callable[[int], Pool], adapter: Adapter, kind: str) -> None:
    assert pool(4).run(same_logits, adapter, kind) == [[True] * 8] * 4


def gradients(adapter: Adapter, kind: str, experts: bool, quantized_first: bool) -> tuple[bool, float]:
    """In a worker: whether logits are the oracle's, and how far adapters' gradients are from its."""
    base = moe.make_base(kind)
    if quantized_first:
        quantize_frozen_params(base.requires_grad_(False), CODEC, gpus_per_node=2)
    model = moe.shard(adapter, moe.adapt(base, experts), MIXZPP)
    alone = moe.adapt(moe.rounded_base(CODEC, kind), experts)
    same = torch.equal(moe.logits_of(model), moe.logits_of(alone))
    losses_and_gradients(model, alone=False)
    return same, models.distance(adapter.full_gradients(model), losses_and_gradients(alone, alone=True))


@pytest.mark.parametrize(
    ("kind", "experts", "quantized_first"),
    [("qwen3", False, True), ("qwen3", True, False), ("qwen3", True, True), ("deepseek", True, True)],
    ids=["attention", "adapters first", "quantized first", "deepseek"],
)
@over_adapters
def test_gradients_of_adapters_equal_the_dequantized_models(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str, experts: bool, quantized_first: bool
) -> None:
    for same, distance in pool(4).run(gradients, adapter, kind, experts, quantized_first):
        assert same
        assert distance <= 1e-5


def generated(adapter: Adapter, kind: str) -> tuple[list[int], list[int]]:
    """In a worker: greedy tokens of a model with adapted experts, and those of the dequantized model."""
    model = moe.shard(adapter, moe.adapt(moe.make_base(kind)), MIXZPP)
    alone = moe.adapt(moe.rounded_base(CODEC, kind))
    moe.logits_of(model)
    return greedy_tokens(model, 8), greedy_tokens(alone, 8)


@over_kinds
@over_adapters
def test_generation_equals_the_dequantized_models(pool: Callable[[int], Pool], adapter: Adapter, kind: str) -> None:
    for ours, expected in pool(4).run(generated, adapter, kind):
        assert ours == expected
        assert len(set(ours)) > 4


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@over_kinds
def test_nothing_dense_is_kept_for_the_backward(kind: str, experts: str) -> None:
    model = moe.make_base(kind, experts=experts).requires_grad_(False)
    smallest = min(p[0].numel() for p in moe.chosen(model).values() if p.dim() == 3)
    quantize_frozen_params(model, CODEC)
    model = moe.adapt(model, experts=False)
    plain = {p.data_ptr() for p in model.parameters()}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = llama.loss_of(model, torch.arange(4, device=models.device())[None])
    dense = [tensor for tensor in kept if not isinstance(tensor, FrozenTensor) and tensor.data_ptr() not in plain]
    assert max(tensor.numel() for tensor in dense) < smallest
    loss.backward()


# ---- what it costs


def costs(adapter: Adapter, kind: str, scope: str) -> tuple[int, int, int, list[int]]:
    """In a worker: values to quantize, bytes at rest as reported and held, and bytes between nodes step by step."""
    base = moe.make_base(kind)
    numel = sum(p.numel() for p in moe.chosen(base).values())
    model = moe.adapt(base)
    report = quantize_frozen_params(model, CODEC, placement=scope, gpus_per_node=2)
    assert report.parameters == numel
    model = moe.shard(adapter, model, STOCK)
    counted = []
    for _ in range(3):
        _, sent = sent_in(lambda: llama.loss_of(model, llama.tokens(0)).backward(), model, 2)
        counted.append(sent["gather"]["inter"])
    held = sum(unit.nbytes for unit in {weight.holder for _, _, weight in frozen_modules(model)})
    return numel, report.bytes_after, held, counted


@pytest.mark.parametrize(
    ("kind", "scope", "share"), [("qwen3", "N", 1), ("qwen3", "I", 1 / 2), ("deepseek", "G", 1 / 4)]
)
@over_adapters
def test_experts_at_rest_and_on_the_wire_take_their_scopes_share(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str, scope: str, share: float
) -> None:
    for numel, reported, held, (first, *others) in pool(4).run(costs, adapter, kind, scope):
        # A scale of four bytes for each 64 codes, and blocks are not cut.
        assert numel * share < reported <= 1.10 * numel * share
        assert held == (2 * reported if scope == "G" else reported)
        assert (first > 0) == (scope == "G")
        assert others == [0, 0]


# ---- to and from files


def saved(adapter: Adapter, kind: str, path: str) -> Tensor:
    """In a worker: logits of a model whose base and adapter are saved."""
    model = moe.shard(adapter, moe.adapt(moe.make_base(kind)), MIXZPP)
    logits = moe.logits_of(model)
    save_frozen_params(model, f"{path}/base")
    save_adapter(model, f"{path}/adapter")
    return logits


def loaded(adapter: Adapter, kind: str, path: str) -> list[Tensor]:
    """In a worker: logits of models that both were loaded into, sharded and alone."""
    base = moe.make_base(kind).requires_grad_(False)
    for parameter in base.parameters():
        parameter.data.zero_()
    load_frozen_params(base, f"{path}/base", gpus_per_node=1)
    model = PeftModel.from_pretrained(base, f"{path}/adapter", is_trainable=True)
    alone = PeftModel.from_pretrained(moe.rounded_base(CODEC, kind), f"{path}/adapter")
    model = moe.shard(adapter, model, Strategy("GGG", gpus_per_node=1))
    return [moe.logits_of(model), moe.logits_of(alone)]


@pytest.mark.parametrize(("adapter", "kind"), list(zip(ADAPTERS, moe.KINDS, strict=True)), ids=str)
def test_a_saved_base_and_adapter_load_at_another_world_size(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str, tmp_path: Path
) -> None:
    expected = pool(4).run(saved, adapter, kind, str(tmp_path))[0]
    for logits in pool(2).run(loaded, adapter, kind, str(tmp_path)):
        assert all(torch.equal(each, expected) for each in logits)


# ---- one stack


class Experts(nn.Module):
    """Stacks of matrices: one that is large enough, one of a single matrix, and a convolution's weight."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = nn.Parameter(torch.randn(experts, rows, columns))
        self.positions = nn.Parameter(torch.randn(1, 64, 64))
        self.router = nn.Parameter(torch.randn(64, 64))
        self.convolution = nn.Conv1d(64, 64, 3, bias=False)


def test_stacks_of_matrices_are_quantized() -> None:
    net = Experts(5, 32, 48).requires_grad_(False)
    report = quantize_frozen_params(net)
    assert (report.weights, report.parameters) == (1, 5 * 32 * 48)
    assert report.left == {
        "of Experts, not nn.Linear or nn.Embedding": ("positions", "router"),
        "of Conv1d, not nn.Linear or nn.Embedding": ("convolution.weight",),
    }


def rows_alone(codec: Codec, rows: int) -> list[bool]:
    """In a worker: whether each matrix of a stack is, dequantized alone, what it is in all of it."""
    same = []
    for scope in "NIG":
        net = Experts(5, rows, 40).to(models.device()).requires_grad_(False)
        whole = net.stack.detach().clone()
        quantize_frozen_params(net, codec, placement=scope, gpus_per_node=2)
        dense = net.stack + 0
        same += [torch.equal(net.stack[index] + 0, dense[index]) for index in (0, 1, 2, -2, torch.tensor(4))]
        same.append(torch.equal(net.stack.transpose(1, 2)[3] + 0, dense[3].T))
        same.append(bool((dense - whole).norm() < 0.2 * whole.norm()))
        dequantize_frozen_params(net)
        same.append(type(net) is Experts and torch.equal(net.stack, dense))
    return same


@pytest.mark.parametrize(("codec", "rows"), [(Int8(64), 64), (Int8(64), 33), (Int4(128), 64), (NF4(64), 64)], ids=str)
def test_one_matrix_of_a_stack_is_dequantized_alone(pool: Callable[[int], Pool], codec: Codec, rows: int) -> None:
    assert pool(4).run(rows_alone, codec, rows) == [[True] * 24] * 4
