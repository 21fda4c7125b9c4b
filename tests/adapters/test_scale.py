"""What a rank does grows with the model, not with the world: counted at 16 and at 1,024 ranks."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters
from harness.launch import groups_of_this_rank, in_fake_world
from harness.training import train
from harness.wiretap import wiretap

import fsdp_zpp
from fsdp_zpp import Strategy, plan
from fsdp_zpp.runtime.lifecycle import LifecycleHooks

PACKAGE = Path(fsdp_zpp.__file__).parent
KERNELS = str(PACKAGE / "kernels")  # where the CPU's reference decodes one peer at a time
A_VIEW_FOR_EVERY_RANK = "chunk"  # one call, but as many tensors as ranks
GPUS_PER_NODE = 8
SMALL, LARGE = 16, 1024
STRATEGIES = {"GGG": Strategy("GGG"), "NNN": Strategy("NNN"), "loco": Strategy.loco()}
# Of 3 blocks; the root is a unit, too. Clipping reduces norms over a mesh of torch's.
CASE = Case(steps=1, micro_batches=2, clip=None)


def calls_in(function: Callable[[], object], folder: Path = PACKAGE) -> Counter[str]:
    """Calls of Python functions defined in a folder, by name; and of anyone's that makes a view for every rank."""
    calls: Counter[str] = Counter()
    within = str(folder)

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(within) and not path.startswith(KERNELS):
            calls[f"{path}: {frame.f_code.co_qualname}"] += 1
        elif event == "c_call" and arg.__name__ == "chunk":
            calls[A_VIEW_FOR_EVERY_RANK] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def wait_for_earlier_models() -> None:
    """Until they are gone, for they would hear of this one's events; a GPU's autograd thread may still hold one."""
    for _ in range(100):
        gc.collect()
        if not any(type(each) is LifecycleHooks for each in gc.get_objects()):
            return
    raise AssertionError("an earlier model is still there")


def step_counts(adapter: Adapter, strategy: Strategy) -> tuple[Any, ...]:
    """In a fake world: this rank's collectives in a warm step, the calls within fsdp_zpp, and new process groups."""
    wait_for_earlier_models()
    before = groups_of_this_rank()
    model = adapter.make(CASE, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, CASE, optimizer=optimizer)
    groups = groups_of_this_rank() - before
    with wiretap(GPUS_PER_NODE) as tap:
        calls = calls_in(lambda: train(adapter, model, CASE, optimizer=optimizer, first_step=1))
    return Counter(tap.order), calls, groups


def all_step_counts() -> dict[tuple[str, str], tuple[Any, ...]]:
    """In a fake world: :func:`step_counts` of everything, which takes less time than to start a process for each."""
    return {(str(a), name): step_counts(a, strategy) for a in ADAPTERS for name, strategy in STRATEGIES.items()}


@cache
def counts_at(world: int) -> dict[tuple[str, str], tuple[Any, ...]]:
    return in_fake_world(world, GPUS_PER_NODE, all_step_counts)


@pytest.mark.parametrize("strategy", STRATEGIES)
@over_adapters
def test_a_step_is_the_same_work_on_any_world(adapter: Adapter, strategy: str) -> None:
    few, many = (counts_at(world)[str(adapter), strategy] for world in (SMALL, LARGE))
    for at_few, at_many in zip(few, many, strict=True):
        assert at_few == at_many
    collectives, calls, _ = many
    assert collectives
    assert calls
    assert not calls[A_VIEW_FOR_EVERY_RANK]


def test_groups_are_made_once() -> None:
    for world in (SMALL, LARGE):
        assert sum(groups for *_, groups in counts_at(world).values()) <= 3  # of the two hops, and of the rank alone


def test_a_plan_takes_no_longer_for_more_gpus() -> None:
    def planned(nodes: int) -> Counter[str]:
        cluster = {"nodes": nodes, "gpus_per_node": 8, "inter_gbps": 400, "intra_gbps": 3600, "gpu_memory": 80}
        return calls_in(lambda: plan(70e9, units=80, **cluster), PACKAGE / "planner")

    few, many = planned(2), planned(128)
    assert many.total() <= 1.05 * few.total()  # what is out of memory at few is compared at many
