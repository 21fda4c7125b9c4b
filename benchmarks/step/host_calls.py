"""Calls on the host in a step, within each other, from a trace of torch.profiler, and whose each of them is."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

BACKWARD, STEP = "host_time::backward", "host_time::step"
"""Labels that host_traces.py puts around each backward and each step."""

OURS, FSDP, DTENSOR, COMPILED = "fsdp_zpp", "torch's FSDP", "DTensor", "torch.compile: guards and wrappers"
TRITON, AUTOGRAD, OPTIMIZER, MODEL = "Triton's launcher", "autograd", "optimizer", "modules of the model"
OTHER, OPERATORS, STRATEGYS = "other Python", "operators of the model", "operators of sharding"
COLLECTIVES = "collectives, until enqueued"
"""Whose time on the host is, unless it is a CUDA call's."""
_FILES = {
    "benchmarks/": MODEL,  # the training loop
    "fsdp_zpp/bench/": MODEL,
    "fsdp_zpp": OURS,
    "torch/distributed/fsdp/": FSDP,
    "torch/distributed/_composable": FSDP,
    "torch/distributed/tensor/": DTENSOR,
    "torch/distributed/": COLLECTIVES,
    "torch/_dynamo/": COMPILED,
    "torch/_functorch/": COMPILED,
    "torch/_inductor/": COMPILED,
    "torchinductor": COMPILED,
    "triton/": TRITON,
    "torch/autograd/function.py": AUTOGRAD,
    "torch/autograd/graph.py": AUTOGRAD,
    "torch/optim/": OPTIMIZER,
    "torch/nn/": MODEL,
    "transformers/": MODEL,
}
"""Whose Python a file has, by the first of these that its path has; helpers are their callers'."""
_NATIVE = {
    r"CompiledFunction|Torch-Compiled|TorchDynamo|AOTDispatcher|^## Call": COMPILED,
    r"RegisterPostBackwardFunction": FSDP,  # fully_shard's node, by which it reduces
    r"^autograd::|^torch::autograd::|Backward\d*$|^host_time::backward": AUTOGRAD,
    r"^fsdp_zpp::": OURS,
    r"^FSDP::|^FullyShardedDataParallel": FSDP,
    r"^Optimizer\.": OPTIMIZER,
    r"^PythonSubclass": DTENSOR,
    r"^host_time::": MODEL,
}
"""Whose time without any Python is, by patterns of an event's name; other events are operators."""


@cache
def owner_of_file(path: str) -> str:
    """Return whose Python a file has; empty for what others only call, such as contextlib."""
    path = re.split(r"(?:site|dist)-packages/", path)[-1]
    return next((owner for part, owner in _FILES.items() if part in path), "")


# ---- events as calls within each other


@dataclass(frozen=True, eq=False)
class Call:
    """A call on a thread, in microseconds, within its ``parent``."""

    name: str
    kind: str
    start: float
    end: float
    parent: Call | None = None

    @property
    def is_cuda(self) -> bool:
        return self.kind in ("cuda_runtime", "cuda_driver")

    @property
    def is_python(self) -> bool:
        return self.kind == "python_function"

    @property
    def line(self) -> Iterator[Call]:
        """Yield this call and those around it, from the innermost."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    @cached_property
    def is_collective(self) -> bool:
        """Return whether this is in a collective, or is one."""
        own = self.name.startswith(("c10d::", "_c10d_functional::", "record_param_comms"))
        return own or (self.parent is not None and self.parent.is_collective)

    @cached_property
    def label(self) -> str:
        """Return the innermost label of sharding or of the optimizer around this; empty in the model."""
        # FSDP1's forward has that of the model in it.
        if self.name.endswith(".forward"):
            return ""
        if self.name.startswith(("fsdp_zpp::", "FSDP::", "FullyShardedDataParallel.", "Optimizer.")):
            return self.name
        return self.parent.label if self.parent is not None else ""

    @cached_property
    def native(self) -> str:
        """Return whose time of this call is that has no Python in it."""
        if self.is_collective:
            return COLLECTIVES
        if found := _owner_of_event(self.name):
            return found
        return OPTIMIZER if self.label.startswith("Optimizer.") else STRATEGYS if self.label else OPERATORS

    @cached_property
    def owner(self) -> str:
        """Return whose time this is, by the innermost frame that is anybody's, or the innermost operator."""
        label = None
        for call in self.line:
            if call.is_python and (found := owner_of_file(call.name.partition("(")[0])):
                return found
            if call.kind == "user_annotation":
                label = label or call  # torch has labels that code of ours enters
            elif not call.is_python:
                return label.native if label else call.native
        return label.native if label else OTHER

    @cached_property
    def key(self) -> tuple[str, str, bool]:
        """Return the key by which times in traces with and without stacks are compared."""
        if self.is_python:
            return self.parent.key if self.parent is not None else ("", BACKWARD, False)
        return without_unit(self.label), without_unit(self.name), self.is_collective


@cache
def without_unit(name: str) -> str:
    """Return a label without the unit or the number in it."""
    return re.sub(r" \(.*\)| for .*|[#:] ?\d[\d/]*.*", "", name)


@cache
def _owner_of_event(name: str) -> str:
    """Return whose time without Python an event's is; empty for operators."""
    return next((owner for pattern, owner in _NATIVE.items() if re.search(pattern, name)), "")


Piece = tuple[float, float, Call]
"""Start, end, and the innermost call from one to the other."""


def pieces(events: Iterable[dict[str, Any]]) -> Iterator[Piece]:
    """Yield the time of one thread's events, in order, each moment with the innermost call."""
    stack: list[Call] = []
    now = 0.0
    spans = ((float(e["ts"]), float(e["ts"]) + float(e.get("dur") or 0), e) for e in events)
    for start, end, event in sorted(spans, key=lambda span: (span[0], -span[1])):
        while stack and stack[-1].end <= start:
            call = stack.pop()
            yield now, call.end, call
            now = call.end
        if stack:
            yield now, start, stack[-1]
        while stack and stack[-1].is_python and stack[-1].end < end and event["cat"] == "user_annotation":
            stack.pop()  # the label begins in Python's __enter__, and outlasts it
        if stack:
            end = min(end, stack[-1].end)  # timestamps are rounded, and a label ends in __exit__
        now = start
        stack.append(Call(event["name"], event["cat"], start, end, stack[-1] if stack else None))
    while stack:
        call = stack.pop()
        yield now, call.end, call
        now = call.end


KINDS = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function")


def threads(events: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the events of the host by thread, CUDA's on the thread of the operator that they are from."""
    by_thread: dict[str, list[dict[str, Any]]] = defaultdict(list)
    operators: dict[Any, str] = {}
    for event in events:
        # Annotations of collectives are asynchronous, so they don't lie within others.
        is_asynchronous = re.match(r"(nccl|gloo|mpi|ucc):", str(event.get("name")))
        if event.get("ph") == "X" and event.get("cat") in KINDS and "ts" in event and not is_asynchronous:
            by_thread[str(event.get("tid"))].append(event)
            if event["cat"] == "cpu_op":
                operators[(event.get("args") or {}).get("External id")] = str(event.get("tid"))
    for thread, own in list(by_thread.items()):
        if all(event["cat"].startswith("cuda") for event in own):
            # CUPTI's number of the thread, which the profiler did not translate.
            ids = [(event.get("args") or {}).get("External id") for event in own]
            if found := Counter(operators[one] for one in ids if one in operators):
                by_thread[found.most_common(1)[0][0]] += by_thread.pop(thread)
    return by_thread


def critical(events: Iterable[dict[str, Any]]) -> tuple[list[Piece], int]:
    """Return the time of the labelled steps on the critical thread, and the number of steps.

    Raises:
        ValueError: If there is no labelled step.
    """
    by_thread = threads(events)
    main = next((name for name, own in by_thread.items() if any(event["name"] == STEP for event in own)), None)
    if main is None:
        raise ValueError(f"the trace has no step with the label {STEP}")
    own = list(pieces(by_thread.pop(main)))
    calls = {call for _, _, call in own}
    steps = sum(call.name == STEP for call in calls)
    windows = sorted((call.start, call.end) for call in calls if call.name == BACKWARD)
    in_steps = [piece for piece in own if any(call.name == STEP for call in piece[2].line)]
    autograds = max((_within(windows, pieces(other)) for other in by_thread.values()), key=_evaluated, default=[])
    if not _evaluated(autograds):
        return in_steps, steps
    covered = [(start, end) for start, end, _ in autograds]
    return autograds + _without(covered, in_steps), steps


def _evaluated(found: list[Piece]) -> float:
    """Return the time in nodes of autograd."""
    return sum(end - start for start, end, call in found if is_in_node(call))


def is_in_node(call: Call) -> bool:
    """Return whether a call is in a node of autograd."""
    return any(other.name.startswith("autograd::engine") for other in call.line)


def _within(windows: list[tuple[float, float]], found: Iterable[Piece]) -> list[Piece]:
    """Return the parts of pieces that lie in windows; both are in order."""
    parts, first = [], 0
    for start, end, call in found:
        while first < len(windows) and windows[first][1] <= start:
            first += 1
        for left, right in windows[first:]:
            if left >= end:
                break
            if max(left, start) < min(right, end):
                parts.append((max(left, start), min(right, end), call))
    return parts


def _without(covered: list[tuple[float, float]], found: Iterable[Piece]) -> list[Piece]:
    """Return the parts of pieces outside of what is covered; both are in order."""
    ends = [(float("-inf"), float("-inf")), *covered, (float("inf"), float("inf"))]
    gaps = [(before[1], after[0]) for before, after in pairwise(ends) if before[1] < after[0]]
    return _within(gaps, found)
