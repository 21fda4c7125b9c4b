"""Step time, memory, utilization and bytes of strategies side by side, on the same model and data, in one run.

    python benchmarks/step.py --nodes 2 --gpus-per-node 2 --size 1.35B --strategies full_shard,hybrid_shard,zeropp
    python benchmarks/step.py --size 6.7B --lora 16 --micro-batch 1 --strategies fsdp2:hybrid_shard,mixzpp,fsdp2:mixzpp

emulates the nodes on one host (see nodes.py). Under torchrun on real nodes, start it with ``--worker`` instead.
Strategies go under FullyShardedDataParallel, or with ``fsdp2:`` before the name under fully_shard; DeepSpeed and
Megatron-FSDP are measured where they are installed. A strategy that fails is reported as that. Writes a Markdown table,
JSON with machine and versions, and a chart to ``--out``, after each strategy what there is.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender, contend, is_known, names
from interleaved import interleaved
from models import SIZES, Task
from nodes import add_layout, start
from overlap import overlap
from step_report import table, write
from step_timing import PeakMemory, rates, synchronize, timed_steps
from torch.profiler import ProfilerActivity, profile

PROFILED_STEPS = 2


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_layout(parser)
    parser.add_argument("--size", choices=SIZES, default="1.35B")
    parser.add_argument("--strategies", default="full_shard,hybrid_shard,zeropp", help=f"of {names()}")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="adapters on q, k, v, o of a frozen base; 0 trains all"
    )
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences a GPU in a micro-batch")
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="micro-batches a step, all but the last not synchronized"
    )
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations of each layer")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer, for all strategies")
    parser.add_argument("--generate", type=int, default=0, help="tokens to generate after training, on all ranks alike")
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after --warmup others")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--interleave",
        action="store_true",
        help="build all, then take a step of each in turn: what differs by a few percent on a machine that drifts",
    )
    parser.add_argument("--profile", action="store_true", help="also trace rank 0: what communication is not hidden")
    parser.add_argument("--out", type=Path, default=Path("runs/step"), help="folder for step.{md,json,png} and traces")
    parser.add_argument(
        "--fast-network", action="store_true", help="nodes in name only: NVLink between them, which shows other costs"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying it out")
    arguments = parser.parse_args()
    if arguments.interleave and (arguments.profile or arguments.generate):
        parser.error("--interleave times steps and nothing else: no --profile, no --generate")
    if arguments.interleave and arguments.compile:
        parser.error("--interleave has all strategies at once, with more graphs than torch compiles: no --compile")
    if arguments.interleave and arguments.steps < 2:
        parser.error("--interleave needs two --steps or more")
    unknown = [name for name in arguments.strategies.split(",") if not is_known(name)]
    if unknown:
        parser.error(f"unknown strategies {unknown}; known are {names()}")
    return arguments


def figures(arguments: argparse.Namespace, task: Task, contender: Contender, memory: PeakMemory) -> dict[str, Any]:
    """Step time in ms, peak memory in GiB, bytes sent in MiB a step, and what follows from them."""
    result: dict[str, Any] = {"build_peak_gib": memory.since_last(), "left_by_others_gib": memory.left_gib}
    tokens = task.tokens(dist.get_rank())
    losses = [contender.step(tokens) for _ in range(arguments.warmup)]
    memory.since_last()
    before = contender.sent()
    times = timed_steps(task, contender, tokens, arguments.steps)
    after = contender.sent()
    result |= rates(task, times, tokens) | {"peak_gib": memory.since_last()}
    if before is not None and after is not None:
        result["sent_mib_a_step"] = {hop: (after[hop] - before[hop]) / arguments.steps / 2**20 for hop in after}
    losses.append(contender.step(tokens))
    result["loss"] = [losses[0].item(), losses[-1].item()]
    return result


def profiled(arguments: argparse.Namespace, contender: Contender, tokens: torch.Tensor, name: str) -> dict[str, Any]:
    """What further steps show of communication on rank 0, whose trace is written."""
    if dist.get_rank() != 0:
        for _ in range(PROFILED_STEPS):
            contender.step(tokens)
        return {}
    cuda = arguments.device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        for _ in range(PROFILED_STEPS):
            contender.step(tokens)
        if cuda:
            torch.cuda.synchronize()
    arguments.out.mkdir(parents=True, exist_ok=True)
    trace = arguments.out / f"{name.replace(':', '-')}.trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    return overlap(trace, PROFILED_STEPS)


def generation(task: Task, contender: Contender, memory: PeakMemory) -> dict[str, Any]:
    """Tokens a second of a greedy generation, the same on all ranks, and its peak memory in GiB."""
    prompt = torch.arange(16, device=task.place)[None] + 100
    if contender.generate(prompt, task.generate) is None:
        return {}
    dist.barrier()
    synchronize(task)
    memory.since_last()
    began = time.perf_counter()
    tokens = contender.generate(prompt, task.generate)
    synchronize(task)
    seconds = time.perf_counter() - began
    assert tokens is not None
    gathered = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tokens)
    return {
        "generate_tokens_per_s": task.generate / seconds,
        "generate_peak_gib": memory.since_last(),
        "same_on_all_ranks": all(torch.equal(other, tokens) for other in gathered),
    }


def measure(arguments: argparse.Namespace, task: Task, name: str) -> dict[str, Any]:
    """All that is measured of one strategy."""
    memory = PeakMemory(task)
    began = time.perf_counter()
    contender = contend(task, name)
    try:
        dist.barrier()
        result = {"build_s": time.perf_counter() - began, **figures(arguments, task, contender, memory)}
        if arguments.profile:
            result |= profiled(arguments, contender, task.tokens(dist.get_rank()), name)
        if task.generate:
            result |= generation(task, contender, memory)
        return result
    finally:
        contender.close()


def attempt(arguments: argparse.Namespace, task: Task, name: str) -> dict[str, Any]:
    """What :func:`measure` finds, or how it fails, on any rank."""
    result: dict[str, Any] = {}
    failure: dict[str, Any] | None = None
    try:
        result = measure(arguments, task, name)
    except torch.OutOfMemoryError as error:
        failure = {"failed": "out of memory", "error": str(error).splitlines()[0]}
        traceback.clear_frames(error.__traceback__)
    except ModuleNotFoundError as error:
        failure = {"failed": f"not installed: {error.name}"}
    except Exception as error:
        traceback.print_exc()
        failure = {"failed": f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")[:200]}
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    if task.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # Ranks hold the same share, so they fail alike; one that does not fail waits for the others, until the timeout.
    failures: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return {"strategy": name, **next((one for one in failures if one), result)}


def work(arguments: argparse.Namespace) -> None:
    """One rank: measure all strategies in turn; rank 0 writes after each."""
    task, names_given, rows = Task.of(arguments), arguments.strategies.split(","), []
    if arguments.interleave:
        rows = interleaved(task, names_given, arguments.warmup, arguments.steps)
        if dist.get_rank() == 0:
            write(arguments, rows)
    else:
        for name in names_given:
            rows.append(attempt(arguments, task, name))
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
                write(arguments, rows)
    if dist.get_rank() == 0:
        print(table(rows))


if __name__ == "__main__":
    start(parse(), work)
