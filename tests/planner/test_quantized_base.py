"""The plan of a quantized base against counted bytes, kept and gathered; and plans of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import models
from harness.pool import Pool
from harness.wiretap import wiretap
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_zpp import Int8, Strategy, plan
from fsdp_zpp.config.levels import LEGAL_LEVELS
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.frozen.base import FrozenBase
from fsdp_zpp.planner.config import MemoryBudget, Precision
from fsdp_zpp.planner.frozen_base import gathers_of
from fsdp_zpp.planner.memory import memory_per_gpu
from fsdp_zpp.planner.model_size import ModelSize, Unit, module_size
from fsdp_zpp.planner.volume import Volume, step_volume

CODEC, TWO_BY_TWO = Int8(256), Topology(4, 2)
FULL = Precision(compute=torch.float32, reduce=torch.float32)
WIDTH = 64  # whose square is the least that is quantized, in whole blocks on every rank


class Layer(nn.Module):
    """A trainable and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tuned, self.base = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(self.tuned(x))


class Model(nn.Module):
    """A frozen embedding and head, and layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made() -> Model:
    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    for layer in model.layers:
        layer.tuned.requires_grad_(True)
    return model


def counted_and_planned() -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """In a worker, by scopes: what the second of two steps sends, and bytes of the base, at rest and gathered."""
    size, micro_batches, found = module_size(made()), 2, {}
    without = ModelSize(tuple(replace(unit, frozen=0) for unit in size.units))
    for scopes in LEGAL_LEVELS:
        strategy = Strategy(scopes, frozen=CODEC, gpus_per_node=2)
        model = FullyShardedDataParallel(
            made().to(models.device()),
            sharding_strategy=strategy,
            device_id=models.device(),
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            use_orig_params=False,  # with it, FSDP pads each parameter
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with wiretap(2) as tap:
                for micro_batch in range(micro_batches):
                    context = model.no_sync() if micro_batch < micro_batches - 1 else torch.enable_grad()
                    with context:
                        model(torch.arange(4, device=models.device())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (base,) = FrozenBase.below(model)
        memory, less = (
            memory_per_gpu(each, strategy.resolve(TWO_BY_TWO), micro_batches, FULL, MemoryBudget())
            for each in (size, without)
        )
        found[scopes] = (
            (
                Volume(tap.total("inter"), tap.total("intra")),
                sum(unit.nbytes for unit in base.units),
                base.units[0]._buffers.nbytes,  # which no public name shows
            ),
            (
                step_volume(size, strategy.resolve(TWO_BY_TWO), micro_batches, FULL),
                memory.parameters + memory.shard - less.parameters - less.shard,
                gathers_of(size, CODEC, strategy.resolve(TWO_BY_TWO)).buffers,
            ),
        )
    return found


def test_a_quantized_base_is_planned_as_it_is_counted(pool: Callable[[int], Pool]) -> None:
    for found in pool(4).run(counted_and_planned):
        assert len(found) == 14
        assert {scopes: counted for scopes, (counted, _) in found.items()} == {
            scopes: planned for scopes, (_, planned) in found.items()
        }


def test_each_further_unit_adds_the_same_bytes() -> None:
    strategy = Strategy("IGG", frozen=CODEC)

    def sent(layers: int) -> int:
        size = ModelSize((Unit(8, 8192, reshard_after_forward=False), Unit(8, 4096, layers)))
        return gathers_of(size, CODEC, strategy.resolve(TWO_BY_TWO)).sent

    in_both_directions = 2 * CODEC.nbytes(2048)
    assert {sent(n + 1) - sent(n) for n in range(3, 12)} == {in_both_directions}


def test_under_scope_g_each_node_holds_the_whole_base() -> None:
    cluster = {"nodes": 8, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400}
    found = plan(70e9, trainable=70e6, units=80, **cluster, frozen=CODEC)
    least = (70e9 - 70e6) * (1 + 4 / 256) / 8
    assert all(found[scopes].memory.parameters >= least for scopes in LEGAL_LEVELS)
    assert not found["GGG"].fits or found["GGG"].memory.total > least


def tiny(kind: str) -> tuple[nn.Module, int]:
    """A mixture of experts without values, and how many elements its idle experts have."""
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    experts = {
        "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
        "deepseek_v3": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        },
    }
    config = transformers.AutoConfig.for_model(kind, **common, **experts[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    inner = 24 if kind == "mixtral" else 12
    layers = 2 if kind == "deepseek_v3" else 3
    return model, layers * 6 * 3 * 16 * inner


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_only_experts_that_a_token_is_routed_to_count_as_computation(kind: str) -> None:
    model, idle = tiny(kind)
    size = module_size(model)
    assert (size.idle_trainable, size.idle_frozen) == (idle, 0)
    assert size.params == sum(p.numel() for p in model.parameters())
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    frozen = module_size(model)
    assert (frozen.idle_trainable, frozen.idle_frozen) == (0, idle)
    split = size.with_trainable(size.params // 4)
    assert split.idle_trainable + split.idle_frozen == idle
    assert split.idle_trainable == idle // 4
    cluster = {"nodes": 2, "gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 1}
    found = plan(frozen, **cluster, tokens=1000, tflops=1)["GGG"].time.computation
    expected = (6 * frozen.trainable + 4 * (frozen.frozen - idle)) * 1000 / 1e12
    assert found == pytest.approx(expected)


def test_a_model_without_experts_has_no_idle_parameters() -> None:
    size = module_size(made())
    assert (size.idle_trainable, size.idle_frozen) == (0, 0)
    with pytest.raises(ValueError, match="idle_frozen must be at most 3, got 4"):
        ModelSize((Unit(1, 3),), idle_frozen=4)
