"""Host time of a step by category, from small traces made by hand; times are in microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from harness.benchmarks import load

host_time, host_calls = load("step", "host_time"), load("step", "host_calls")
Event = dict[str, Any]
MAIN, AUTOGRAD, CUPTIS = 7, "8", -123
"""Threads: profilers write a number or a text, and CUPTI may have a number of its own."""


def event(cat: str, name: str, start: float, end: float, tid: int | str = MAIN, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}


def label(name: str, start: float, end: float, tid: int | str = MAIN) -> Event:
    return event("user_annotation", name, start, end, tid)


def trace() -> list[Event]:
    """A step of 1000 with a backward from 300 to 800, in which autograd's thread works from 350 to 700."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    return [
        {"ph": "M", "name": "process_name"},  # metadata have neither time nor category
        event("cpu_op", "aten::mm", -50, -10),
        label(host_calls.STEP, 0, 1000),
        label("FSDP::pre_forward (layers.0)", 10, 110),
        label("fsdp_zpp::decode (layers.0)", 20, 100),
        label("nccl:_all_gather_base", 30, 500),
        event("cpu_op", "c10d::_allgather_base_", 30, 60),
        event("cpu_op", "record_param_comms", 35, 55),
        event("cuda_driver", "cuLaunchKernelEx", 40, 50),
        event("cpu_op", "aten::mm", 120, 290, **{"External id": 5}),
        event("cuda_runtime", "cudaLaunchKernel", 130, 134, CUPTIS, **{"External id": 5}),
        event("cuda_runtime", "cudaLaunchKernel", 140, 280, CUPTIS, **{"External id": 5}),
        label(host_calls.BACKWARD, 300, 800),
        event("cpu_op", node, 350, 700, AUTOGRAD),
        event("cuda_runtime", "cudaEventSynchronize", 400, 600, AUTOGRAD),
        event("cpu_op", "aten::add", 750, 760),
        label("Optimizer.step#AdamW.step", 800, 990),
        event("cpu_op", "aten::_fused_adamw_", 850, 900),
        event("kernel", "gemm", 0, 5000, 0),
    ]


def test_times_of_the_critical_thread_add_up_to_the_step() -> None:
    found = host_time.figures(trace())
    times = {name: ms * 1e3 for name, ms in found["categories_ms"].items()}
    assert times == {
        host_time.OURS: pytest.approx(80 - 30),
        host_time.FSDP: pytest.approx(100 - 80),
        host_time.COLLECTIVES: pytest.approx(30),
        # A launch takes 4 here, so what it takes beyond 20 is a wait.
        host_time.LAUNCHES: pytest.approx(4 + 20),
        host_time.BLOCKED: pytest.approx(140 - 20),
        host_time.OPERATORS: pytest.approx(170 - 144 + 10),
        host_time.AUTOGRAD: pytest.approx(500 - 10 - 200),
        host_time.SYNCHRONIZES: pytest.approx(200),
        host_time.OPTIMIZER: pytest.approx(190),
        host_time.MODEL: pytest.approx(10 + 10 + 10 + 10),
    }
    assert sum(times.values()) == pytest.approx(1000)
    assert found["traced_ms"] == pytest.approx(1)


def test_sharding_has_the_work_in_its_labels_and_its_own_kinds_anywhere() -> None:
    found = host_time.figures(
        [
            label(host_calls.STEP, 0, 1000),
            label("FSDP::pre_forward (layers.0)", 0, 300),
            event("cpu_op", "aten::copy_", 10, 200),
            event("cuda_runtime", "cudaLaunchKernel", 20, 24),
            event("cuda_runtime", "cudaLaunchKernel", 30, 190),  # 140 of it are a wait
            event("cpu_op", "aten::mm", 300, 400),
            event("cuda_runtime", "cudaLaunchKernel", 310, 314),
            label("Optimizer.step#AdamW.step", 500, 900),
            event("cpu_op", "c10d::allreduce_", 500, 510),
            event("cpu_op", "aten::_fused_adamw_", 600, 700),
            event("cuda_runtime", "cudaLaunchKernel", 610, 614),
            event("cpu_op", "PythonSubclass", 700, 750),
        ]
    )
    assert {name: ms * 1e3 for name, ms in found["sharding_ms"].items()} == {
        host_time.FSDP: pytest.approx(300 - 190),
        host_time.DTENSOR: pytest.approx(50),
        host_time.STRATEGYS: pytest.approx(190 - 164),
        host_time.COLLECTIVES: pytest.approx(10),
        host_time.LAUNCHES: pytest.approx(4 + 20),
    }
    whole = found["categories_ms"]
    assert whole[host_time.BLOCKED] == pytest.approx(0.14)
    assert whole[host_time.LAUNCHES] == pytest.approx(0.004 + 0.02 + 0.004 + 0.004)


def test_python_of_sharding_counts_in_hooks_without_a_label() -> None:
    node = "autograd::engine::evaluate_function: MulBackward0"
    stacks = [
        label(host_calls.STEP, 0, 100),
        event("cpu_op", node, 0, 80),
        python("fsdp_zpp/fsdp2/_torch_gradients.py(1): post_backward", 20, 60),
        python("torch/nn/modules/module.py(1): inner", 60, 70),
    ]
    found = host_time.figures([label(host_calls.STEP, 0, 100), event("cpu_op", node, 0, 80)], stacks)
    assert found["sharding_ms"] == {host_time.OURS: pytest.approx(0.04)}


def test_calls_are_counted_and_waits_have_a_place() -> None:
    found = host_time.figures(trace())
    expected = {host_time.LAUNCHES: 2, "collectives": 1, "CUDA calls in collectives": 1, "nodes of autograd": 1}
    assert expected.items() <= found["calls"].items()
    node = "autograd::engine::evaluate_function: MmBackward0"
    assert {row["where"]: row["ms"] for row in found["waits"]} == {
        f"cudaEventSynchronize in {node}": pytest.approx(0.2),
        "cudaLaunchKernel in aten::mm": pytest.approx(0.12),
    }


def python(name: str, start: float, end: float) -> Event:
    return event("python_function", name, start, end)


def test_python_in_a_label_is_divided_as_in_the_trace_with_stacks() -> None:
    ours = "fsdp_zpp::decode (layers.0)"
    plain = [label(host_calls.STEP, 0, 100), label(ours, 10, 90)]
    stacks = [
        label(host_calls.STEP, 0, 1000),
        # A label begins within Python's __enter__ and ends within __exit__.
        python("torch/autograd/profiler.py(9): __enter__", 80, 110),
        label(ours, 100, 900),
        python("torch/distributed/fsdp/_fully_shard/_fsdp_param.py(1): alloc", 300, 500),
        python("contextlib.py(1): inner", 350, 400),
        python("torch/autograd/profiler.py(9): __exit__", 880, 920),
    ]
    times = host_time.figures(plain, stacks)["categories_ms"]
    assert times[host_time.FSDP] == pytest.approx(0.08 / 4)
    assert times[host_time.OURS] == pytest.approx(0.08 * 3 / 4)
    assert sum(times.values()) == pytest.approx(0.1)


def test_a_folder_of_traces_becomes_a_result_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace_file = tmp_path / "zeropp.host.trace.json.gz"
    trace_file.write_bytes(gzip.compress(json.dumps({"traceEvents": trace()}).encode()))
    measured = {"host_ms": 0.9, "until_gpu_done_ms": 1.1, "trace": trace_file.name, "stacks": None}
    rows = [{"strategy": "zeropp", "host_time": measured}, {"strategy": "full_shard", "failed": "out of memory"}]
    (tmp_path / "step.json").write_text(json.dumps({"manifest": {}, "arguments": {}, "rows": rows}))
    host_time.analyse(tmp_path)
    (row,) = rows = json.loads((tmp_path / "host-time.json").read_text())["rows"]
    assert sum(row["categories_ms"].values()) == pytest.approx(1)
    printed = capsys.readouterr().out
    assert "| sum | 1.0 |" in printed
    assert "| work of sharding | 0.1 |" in printed
    page = host_time.table_of_sharding(rows)
    assert "| work of sharding | 0.1 |" in page
    assert "| model, autograd, optimizer | 0.6 |" in page
    assert "| waits | 0.3 |" in page
