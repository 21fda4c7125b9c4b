"""Cost of a step on a rank's CPU, counted: beside torch's FSDP, and at 16 and at 1,024 ranks.

Beside it, the length of the walks of benchmarks/scale/walks.py that a newcomer makes through the code.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.benchmarks import BENCHMARKS, load
from harness.covering import ADAPTERS
from harness.launch import groups_of_this_rank, in_fake_world, launch
from harness.pool import device_type
from harness.training import train
from harness.wiretap import wiretap
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_zpp
from fsdp_zpp import Strategy, plan
from fsdp_zpp.runtime.lifecycle import StepTracker
from fsdp_zpp_kernels import ops

contenders = load("scale", "contenders")
BLOCKS = 8
UNITS = BLOCKS + 1  # the root is one, too, and not resharded between forward and backward
GATHERS = 2 * BLOCKS + 1
COPIES = "copy_ _foreach_copy_ _to_copy clone cat chunk_cat split_with_sizes_copy all_gather_copy_in".split()


class Cost(NamedTuple):
    """Calls of a step: collectives by hop, ops of kernels, torch's copies, and functions of Python and C."""

    collectives: Counter[tuple[str, str]]
    kernels: Counter[str]
    copies: int
    functions: int


class Copies(TorchDispatchMode):
    """Counts torch's copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in COPIES
        return func(*args, **(kwargs or {}))


def profiled(function: Callable[[], object], note: Callable[[FrameType, str, Any], None]) -> None:
    gc.collect()  # so that no finalizer of an earlier object counts
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()


def functions_called(step: Callable[[], None]) -> int:
    events: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        events[event] += 1

    profiled(step, note)
    return events["call"] + events["c_call"]


def cost_of(name: str) -> Cost:
    """In a fake world: the cost of a contender's warm step."""
    contenders.prepare_kernels_only()
    step = contenders.make_step(contenders.CONTENDERS[name], BLOCKS)
    for _ in range(3):
        step()
    kernels: Counter[str] = Counter()
    call = ops.Op.__call__

    def counted(op: Any, *args: Any, **kwargs: Any) -> Any:
        kernels[op.__name__] += 1
        return call(op, *args, **kwargs)

    with wiretap(contenders.GPUS_PER_NODE) as tap, patch.object(ops.Op, "__call__", counted):
        step()
    with Copies() as copies:
        step()
    return Cost(Counter(tap.order), kernels, copies.count, functions_called(step))


@cache
def cost(name: str) -> Cost:
    """In a process of its own, since hooks of an earlier contender would count, too."""
    found: Cost = in_fake_world(contenders.WORLD, contenders.GPUS_PER_NODE, cost_of, name)
    return found


ON_TWO_HOPS = {
    ("all_gather", "inter"): 1,  # of less than a MiB, so in one chunk
    ("all_gather", "intra"): GATHERS,
    ("all_to_all", "intra"): UNITS,
    ("all_to_all", "inter"): UNITS,
}
OF_GRADIENTS = {"quantize": UNITS, "dequantize_sum_quantize": UNITS, "dequantize_sum": UNITS}
RUNS = 2  # what is encoded at once between nodes: the root, and all blocks, which are of one size
KERNELS = {
    "IGG": {},
    "zeropp": OF_GRADIENTS | {"quantize": UNITS + RUNS, "dequantize": GATHERS},
    "delta": OF_GRADIENTS | {"quantize_delta": RUNS, "add_delta": RUNS, "dequantize": GATHERS},
}
over_adapters = pytest.mark.parametrize("adapter", ["fsdp1", "fsdp2"])
over_strategies = pytest.mark.parametrize("strategy", KERNELS)


@over_strategies
@over_adapters
def test_between_nodes_weights_are_encoded_and_sent_a_chunk_at_a_time(adapter: str, strategy: str) -> None:
    found = cost(f"{adapter} {strategy}")
    assert found.collectives == ON_TWO_HOPS
    assert found.kernels == KERNELS[strategy]


@over_strategies
@over_adapters
def test_a_step_copies_no_more_than_hsdp_and_calls_fewer_functions_than_torchs(adapter: str, strategy: str) -> None:
    found, hsdp = cost(f"{adapter} {strategy}"), cost("fsdp2 HSDP")
    # Without codecs, torch's ops bring a gradient's chunks in the order of the hops and its sums in the dtype to send,
    # which with codecs kernels do; but for small values, which one copy a unit brings.
    allowed = 2 * UNITS if strategy == "IGG" else UNITS
    assert found.copies <= hsdp.copies + allowed
    # HSDP calls a tenth more under torch 2.13 than under 2.11, so FSDP1 is compared with itself.
    stock, part = {"fsdp1": (cost("fsdp1 FULL_SHARD"), 0.66), "fsdp2": (hsdp, 0.66)}[adapter]
    assert found.functions <= part * stock.functions


def test_four_micro_batches_cross_nodes_once_and_call_fewer_functions_than_hsdp() -> None:
    found = cost("fsdp2 delta-IIG x 4")
    gathers = 4 * GATHERS
    inside = {("all_gather", "intra"): gathers, ("all_to_all", "intra"): 4 * UNITS}
    assert found.collectives == ON_TWO_HOPS | inside
    # The last micro-batch adds its sums to the accumulated ones, and encodes these.
    gradients = {"quantize": 5 * UNITS, "dequantize_sum": 5 * UNITS}
    assert found.kernels == gradients | {"quantize_delta": RUNS, "add_delta": RUNS, "dequantize": gathers}
    assert found.functions <= 0.66 * cost("fsdp2 HSDP x 4").functions


# ---- on any world

PACKAGE = Path(fsdp_zpp.__file__).parent
A_VIEW_FOR_EVERY_RANK = "chunk"  # one call, but as many tensors as ranks
STRATEGIES = {"GGG": Strategy("GGG"), "NNN": Strategy("NNN"), "loco": Strategy.loco()}
# Clipping reduces norms over a mesh of torch's.
CASE = Case(steps=1, micro_batches=2, clip=None)


def calls_in(function: Callable[[], object], folder: Path = PACKAGE) -> Counter[str]:
    """Calls of Python functions defined in a folder, by name; and of anyone's that makes a view for every rank."""
    calls: Counter[str] = Counter()
    within = str(folder)

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(within):
            calls[f"{path}: {frame.f_code.co_qualname}"] += 1
        elif event == "c_call" and arg.__name__ == A_VIEW_FOR_EVERY_RANK:
            calls[A_VIEW_FOR_EVERY_RANK] += 1

    profiled(function, note)
    return calls


def wait_for_earlier_models() -> None:
    """Until they are gone, for they would hear of this one's events; a GPU's autograd thread may still hold one."""
    for _ in range(100):
        gc.collect()
        if not any(type(each) is StepTracker for each in gc.get_objects()):
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
    with wiretap(contenders.GPUS_PER_NODE) as tap:
        calls = calls_in(lambda: train(adapter, model, CASE, optimizer=optimizer, first_step=1))
    return Counter(tap.order), calls, groups


def all_step_counts() -> dict[tuple[str, str], tuple[Any, ...]]:
    """In a fake world: :func:`step_counts` of everything, which takes less time than to start a process for each."""
    return {(str(a), name): step_counts(a, strategy) for a in ADAPTERS for name, strategy in STRATEGIES.items()}


def test_a_step_is_the_same_work_on_any_world_and_groups_are_made_once() -> None:
    few, many = (in_fake_world(world, contenders.GPUS_PER_NODE, all_step_counts) for world in (16, 1024))
    for contender, (collectives, calls, _) in many.items():
        assert few[contender] == many[contender], contender
        assert collectives
        assert calls
        assert not calls[A_VIEW_FOR_EVERY_RANK], contender
    assert sum(groups for *_, groups in many.values()) <= 3  # of the two hops, and of the rank alone


def test_a_plan_takes_no_longer_for_more_gpus() -> None:
    def planned(nodes: int) -> Counter[str]:
        cluster = {"nodes": nodes, "gpus_per_node": 8, "inter_gbps": 400, "intra_gbps": 3600, "gpu_memory": 80}
        return calls_in(lambda: plan(70e9, units=80, **cluster), PACKAGE / "planner")

    few, many = planned(2), planned(128)
    assert many.total() <= 1.05 * few.total()  # what is out of memory at few is compared at many


# ---- walks of a newcomer

MOST_ON_A_WALK = {
    "fsdp1 wrapping of a block": (152, 22, 60),
    "fsdp1 gather": (68, 8, 24),
    "fsdp1 gather that prefetches": (84, 9, 31),
    "fsdp1 gradient": (70, 10, 24),
    "fsdp1 LoRA base from a file": (423, 21, 122),
    "fsdp1 LoRA first forward": (433, 25, 175),
    "fsdp1 exchange of local steps": (273, 18, 122),
    "fsdp2 wrapping of a block": (114, 22, 59),
    "fsdp2 gather": (50, 8, 20),
    "fsdp2 gather that prefetches": (60, 8, 24),
    "fsdp2 gradient": (62, 11, 27),
    "fsdp2 LoRA base from a file": (423, 21, 122),
    "fsdp2 LoRA first forward": (342, 25, 164),
    "fsdp2 exchange of local steps": (277, 17, 104),
}
"""Calls, files and changes of file, by walk."""


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="counted with torch 2.13")
@pytest.mark.skipif(device_type() == "cuda", reason="its ranks are processes on the CPU")
def test_walks_are_no_longer_than_they_were() -> None:
    done = launch(4, BENCHMARKS / "scale" / "walks.py")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (fsdp.*?) \| (\d+) \| (\d+) \| (\d+) \|$", done.stdout, re.MULTILINE)
    found = {name: tuple(map(int, counts)) for name, *counts in rows}
    assert found.keys() == MOST_ON_A_WALK.keys()
    longer = {
        name: walk
        for name, walk in found.items()
        if any(count > most for count, most in zip(walk, MOST_ON_A_WALK[name], strict=True))
    }
    assert not longer, f"--show them: {longer}, at most {MOST_ON_A_WALK}"
