"""transformers' checks of its FSDP pass with ours: what is a unit, files, 16 bits, experts, and training beside DDP.

They train alike on every rank, which only exact strategies can; those with a parameter scope ``N`` are left out, since
transformers asks for resharding after each forward, which contradicts it. Checks of HSDP are left out: they look for
torch's mesh of replicas and shards in each parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from foreign.transformers_mixin import run_check, why_not
from harness.pool import Pool

from fsdp_zpp import Strategy

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SCOPES = ("GGG", "IGG", "III", "IIG", "GNG")
OF_ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "phi3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "ernie4_5_moe",
)
CHECKS = {
    "structure, untied": ("fsdp2_sharding_structure", False),
    "structure, tied": ("fsdp2_sharding_structure", True),
    "save and load": ("fsdp2_save_load",),
    "save and load sharded": ("fsdp2_save_load_dcp",),
    "bf16": ("fsdp2_bf16_training",),
    "DDP, untied": ("fsdp2_plan_vs_ddp", False),
    "DDP, tied": ("fsdp2_plan_vs_ddp", True),
}


@pytest.mark.parametrize("architecture", OF_ARCHITECTURES)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_checks_of_transformers(pool: Callable[[int], Pool], architecture: str, check: tuple[object, ...]) -> None:
    name, *arguments = check
    number = OF_ARCHITECTURES.index(architecture) + [*CHECKS.values()].index(check)
    strategy = Strategy(SCOPES[number % len(SCOPES)], gpus_per_node=1)
    pool(2).run(run_check, name, architecture, strategy, *arguments)


EXPERTS = {
    "tp and DDP": (4, "fsdp2_expert_parallel_2d_vs_ddp"),
    "bf16": (4, "fsdp2_expert_parallel_bf16_grads"),
    "bf16, each expert once": (2, "fsdp2_expert_parallel_bf16_grads"),
}


@pytest.mark.parametrize("levels", SCOPES)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "ernie4_5_moe"])
@pytest.mark.parametrize(("world", "check"), EXPERTS.values(), ids=EXPERTS)
def test_checks_of_expert_parallelism(
    pool: Callable[[int], Pool], world: int, check: str, architecture: str, levels: str
) -> None:
    pool(world).run(run_check, check, architecture, Strategy(levels, gpus_per_node=1))
