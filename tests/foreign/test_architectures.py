"""transformers' architectures train as with stock, and transformers' own checks of FSDP pass, with ours in its place.

The checks are in transformers' source distribution, which lacks the module by which they start processes: a pool of
workers does that here. They train alike on every rank, which only exact strategies can; those with a parameter scope
``N`` are left out, since transformers asks for resharding after each forward, which contradicts it. Checks of HSDP are
left out: they look for torch's mesh of replicas and shards in each parameter.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from harness import models
from harness.adapter import STOCK
from harness.covering import over_each
from harness.fsdp2 import Fsdp2
from harness.pool import Pool, device_type
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from fsdp_zpp import Strategy, fully_shard
from fsdp_zpp.config.levels import LEGAL_LEVELS

pytestmark = pytest.mark.slow

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 128}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "phi3": {},
    "olmo2": {},
    "cohere": {},
    "granite": {},
    "starcoder2": {},
    "stablelm": {},
    "glm": {},
    "nemotron": {},
    "smollm3": {},
    "gpt2": _GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "bloom": {"n_layer": 2, "n_head": 4},
    "phi": {},
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": _DEEPSEEK,
    "ernie4_5_moe": _EXPERTS | {"moe_layer_start_index": 0, "moe_num_shared_experts": 1},
}
"""By the name of the type, what it needs beside the sizes that all have."""


def config_of(architecture: str, **options: Any) -> PretrainedConfig:
    """The configuration of a small model."""
    dropout = dict.fromkeys(
        ("attention_dropout", "dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout"), 0.0
    )
    return AutoConfig.for_model(architecture, **_SIZES | dropout | ARCHITECTURES[architecture] | options)


# ---- trained beside stock

STEPS = 20
TOLERANCE = 1e-5
"""Relative and absolute, of losses, norms and weights, as in transformers' comparison with DDP."""
COSINE = 0.97
NOISE = 1e-5
"""The share of the whole gradient's norm below which a parameter's has no direction but rounding's."""

CLEAR = 20.0
"""What routers are multiplied by: at random, experts are nearly tied, and any rounding of weights routes anew."""


def make(architecture: str, strategy: Strategy | None) -> nn.Module:
    """A model with random weights, the same on every rank, whose layers are units."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(architecture)).to(models.device())
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight")):
            parameter.data.mul_(CLEAR)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == 2 and type(module[0]) is not nn.Linear:
            if any("experts" in name for name, each in model.named_modules() if each is module):
                continue
            for layer in module:
                Fsdp2().apply(layer, strategy)
    return Fsdp2().apply(model, strategy)


def batch(rank: int) -> Tensor:
    """Tokens."""
    return torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(rank)).to(models.device())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def trained(architecture: str, strategy: Strategy | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of the gradient in all steps on one batch, and the weights in the end."""
    model: Any = make(architecture, strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    tokens, values = batch(0), []
    for _ in range(STEPS):
        loss = loss_of(model, tokens)
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        values += [loss.item(), norm.full_tensor().item()]
        optimizer.step()
        optimizer.zero_grad()
    return values, Fsdp2().full_weights(model)


_stock: dict[str, Any] = {}


def check_training(architecture: str, strategy: Strategy) -> None:
    """In a worker: fail unless a strategy trains as stock does, on the same tokens on every rank."""
    if architecture not in _stock:
        _stock.clear()
        _stock[architecture] = trained(architecture, STOCK)
    values, weights = trained(architecture, strategy)
    expected_values, expected_weights = _stock[architecture]
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected_values), rtol=TOLERANCE, atol=TOLERANCE)
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@over_each(rest=False, architecture=list(ARCHITECTURES), levels=LEGAL_LEVELS)
def test_exact_strategies_train_as_stock(pool: Callable[[int], Pool], architecture: str, levels: str) -> None:
    pool(4).run(check_training, architecture, Strategy(levels, gpus_per_node=2))


def cosines(architecture: str, strategy: Strategy) -> dict[str, float]:
    """In a worker: of the gradient of each parameter in the first step, other tokens on each rank, with stock's."""
    gradients = []
    for each in (strategy, STOCK):
        model = make(architecture, each)
        loss_of(model, batch(dist.get_rank())).backward()
        gradients.append(Fsdp2().full_gradients(model))
    ours, stock = gradients
    whole = torch.stack([value.norm() for value in stock.values()]).norm()
    return {
        name: F.cosine_similarity(ours[name].flatten(), value.flatten(), dim=0).item()
        for name, value in stock.items()
        if value.norm() > NOISE * whole
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_of_zeropp_point_where_stock_s_do(pool: Callable[[int], Pool], architecture: str) -> None:
    found = pool(4).run(cosines, architecture, Strategy.zeropp(gpus_per_node=2))[0]
    assert {name: cosine for name, cosine in found.items() if cosine <= COSINE} == {}


# ---- transformers' checks

FOLDER = "FSDP_ZPP_TRANSFORMERS"
"""The environment variable that names the folder of an unpacked source distribution of transformers."""
PACKAGE = "tests_of_transformers"


def why_not() -> str:
    """Why the checks can't run, for ``pytest.skip``; empty if they can."""
    get = f"pip download --no-deps --no-binary :all: transformers=={transformers.__version__}"
    if FOLDER not in os.environ:
        return f"set {FOLDER} to the folder of an unpacked source distribution of transformers ({get})"
    folder = Path(os.environ[FOLDER])
    if not (folder / "tests" / "test_fsdp_mixin.py").exists():
        return f"{FOLDER}={folder} has no tests/test_fsdp_mixin.py; unpack there what this downloads: {get}"
    if f"Version: {transformers.__version__}\n" not in (folder / "PKG-INFO").read_text():
        return f"{FOLDER}={folder} is not transformers {transformers.__version__}, which is installed ({get})"
    return ""


def load() -> Any:
    """The module of the checks."""
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(Path(os.environ[FOLDER]) / "tests")]
        processes = ModuleType(f"{PACKAGE}.distributed_testing_utils")
        for name, value in _PROCESSES.items():
            setattr(processes, name, value)
        sys.modules |= {PACKAGE: package, processes.__name__: processes}
        try:
            importlib.import_module("parameterized")
        except ImportError:  # its decorators are not asked for what they decorate
            stand_in: Any = ModuleType("parameterized")
            stand_in.parameterized = mock.MagicMock()
            sys.modules["parameterized"] = stand_in
    return importlib.import_module(f"{PACKAGE}.test_fsdp_mixin")


def _start_processes(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a pool of workers runs the checks")


_PROCESSES: dict[str, Any] = {
    "_get_distributed_backend": lambda: dist.get_backend(),
    "_get_distributed_device_type": device_type,
    "_get_rank_device": lambda rank: models.device(),
    "_set_rank_device": lambda rank: None,
    "_start_rank_processes": _start_processes,
}


@contextmanager
def ours(strategy: Strategy) -> Iterator[None]:
    """A context in which transformers shards with a strategy."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with mock.patch(
            "transformers.distributed.fsdp.fully_shard", wraps=partial(fully_shard, strategy=strategy)
        ) as f:
            yield
            assert f.called
    finally:
        torch.use_deterministic_algorithms(deterministic)


def run_check(name: str, architecture: str, strategy: Strategy, *args: Any) -> None:
    """In a worker: run one of the module's checks on a small model.

    Args:
        name: The check's name, without what all of them begin and end with.
        architecture: A key of ``ARCHITECTURES``.
        strategy: The strategy.
        *args: What the check takes beside a configuration.
    """
    config = config_of(architecture)
    check = getattr(load(), f"_test_{name}_impl")
    with ours(strategy):
        check(dist.get_rank(), type(config), config.to_diff_dict(), *args)


SCOPES = ("GGG", "IGG", "III", "IIG", "GNG")
CHECKED = "llama mistral qwen2 qwen3 gemma2 phi3 olmo2 mixtral qwen3_moe deepseek_v3 ernie4_5_moe".split()
CHECKS = {
    "structure, untied": ("fsdp2_sharding_structure", False),
    "structure, tied": ("fsdp2_sharding_structure", True),
    "save and load": ("fsdp2_save_load",),
    "save and load sharded": ("fsdp2_save_load_dcp",),
    "bf16": ("fsdp2_bf16_training",),
    "DDP, untied": ("fsdp2_plan_vs_ddp", False),
    "DDP, tied": ("fsdp2_plan_vs_ddp", True),
}


needs_source = pytest.mark.skipif(bool(why_not()), reason=why_not())


@needs_source
@pytest.mark.parametrize("architecture", CHECKED)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_checks_of_transformers(pool: Callable[[int], Pool], architecture: str, check: tuple[object, ...]) -> None:
    name, *arguments = check
    number = CHECKED.index(architecture) + [*CHECKS.values()].index(check)
    strategy = Strategy(SCOPES[number % len(SCOPES)], gpus_per_node=1)
    pool(2).run(run_check, name, architecture, strategy, *arguments)


EXPERTS = {
    "tp and DDP": (4, "fsdp2_expert_parallel_2d_vs_ddp"),
    "bf16": (4, "fsdp2_expert_parallel_bf16_grads"),
    "bf16, each expert once": (2, "fsdp2_expert_parallel_bf16_grads"),
}


@needs_source
@pytest.mark.parametrize("levels", SCOPES)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "ernie4_5_moe"])
@pytest.mark.parametrize(("world", "check"), EXPERTS.values(), ids=EXPERTS)
def test_checks_of_expert_parallelism(
    pool: Callable[[int], Pool], world: int, check: str, architecture: str, levels: str
) -> None:
    pool(world).run(run_check, check, architecture, Strategy(levels, gpus_per_node=1))
