"""Planned memory, to the byte."""

from __future__ import annotations

import pytest
import torch

from fsdp_zpp import Int8, plan
from fsdp_zpp.planner.config import GIB
from fsdp_zpp.planner.model_size import ModelSize, Unit


@pytest.mark.parametrize(
    ("scopes", "bytes_of_states"),
    [  # 100 trainable elements on 2 x 2 in 16-bit compute: weights, shard, optimizer, gradients
        ("NNN", (0, 400, 800, 400)),
        ("NNI", (200, 200, 400, 400)),
        ("NII", (200, 200, 400, 200)),
        ("INI", (0, 200, 400, 400)),
        ("III", (0, 200, 400, 200)),
        ("NNG", (200, 100, 200, 400)),
        ("NIG", (200, 100, 200, 200)),
        ("NGG", (200, 100, 200, 100)),
        ("ING", (100, 100, 200, 400)),
        ("IIG", (100, 100, 200, 200)),
        ("IGG", (100, 100, 200, 100)),
        ("GNG", (0, 100, 200, 400)),
        ("GIG", (0, 100, 200, 200)),
        ("GGG", (0, 100, 200, 100)),
    ],
)
def test_each_state_takes_its_scopes_share(scopes: str, bytes_of_states: tuple[int, ...]) -> None:
    small = {"params": 100, "units": 1, "nodes": 2, "gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 1}
    memory = plan(**small, micro_batches=2)[scopes].memory
    assert (memory.parameters, memory.shard, memory.optimizer, memory.gradients) == bytes_of_states
    # A single micro-batch leaves nothing to accumulate but the shard's own gradient.
    assert plan(**small)[scopes].memory.gradients == memory.shard


def test_states_of_odd_sizes_are_padded() -> None:
    memory = plan(101, units=1, nodes=2, gpus_per_node=2, inter_gbps=1, intra_gbps=1, micro_batches=2)["IIG"].memory
    assert (memory.parameters, memory.shard, memory.gradients) == (2 * 26 * 2, 26 * 4, 2 * 26 * 4)


def test_frozen_weights_have_no_gradient_and_no_optimizer_state() -> None:
    two = {"nodes": 2, "gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 1, "micro_batches": 2, "presets": False}
    size = ModelSize((Unit(trainable=0, frozen=4096), Unit(trainable=4, frozen=0)))
    for frozen_storage, width in ((None, 4), (torch.bfloat16, 2)):
        memory = plan(size, **two, frozen_storage=frozen_storage)["IIG"].memory
        assert (memory.parameters, memory.shard) == (2 * 2048 + 4, width * 1024 + 4)
        assert (memory.optimizer, memory.gradients) == (8, 8)
    encoded = plan(size, **two, frozen=Int8(256))
    # 1024 codes and 4 scales a shard; of those a rank has its own, its node's, or all.
    assert {scopes: encoded[scopes].memory.parameters for scopes in ("GIG", "IIG", "NIG")} == {
        "GIG": 2 * 1040,  # as under I: a node keeps what its first gather has brought there
        "IIG": 2 * 1040 + 4,
        "NIG": 4 * 1040 + 8,
    }
    assert all(encoded[scopes].memory.shard == 4 for scopes in ("GIG", "IIG", "NIG"))


def test_working_memory_is_the_kept_unit_and_two_more_and_a_gradient() -> None:
    size = ModelSize((Unit(50, reshard_after_forward=False), Unit(100, 7, count=2), Unit(30, 1000)))
    made = plan(size, nodes=2, gpus_per_node=2, inter_gbps=1, intra_gbps=1)
    gradient = 100 * (2 + 4)
    assert made["GGG"].memory.working == 2 * (50 + 1030 + 107) + gradient
    assert made["NIG"].memory.working == gradient  # the weights are there already
    one_layer = plan(100, units=1, nodes=2, gpus_per_node=2, inter_gbps=1, intra_gbps=1)
    assert one_layer["GGG"].memory.working == 2 * 100 + gradient


def test_activations_and_reserve_are_gib_and_decide_what_fits() -> None:
    small = {"params": 1000, "nodes": 2, "gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 1, "activations": 3}
    memory = plan(**small, reserve=0.5)["GGG"].memory
    assert (memory.activations, memory.reserve) == (3 * GIB, GIB // 2)
    states = memory.total - memory.activations - memory.reserve
    exactly = memory.total / GIB
    assert plan(**small, reserve=0.5, gpu_memory=exactly)["GGG"].fits
    assert not plan(**small, reserve=0.5, gpu_memory=exactly - 1 / GIB)["GGG"].fits
    assert states == sum(getattr(memory, name) for name in ("parameters", "shard", "optimizer", "gradients", "working"))
