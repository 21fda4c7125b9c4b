"""The command ``bench``: it measures the links and then each strategy in turn, and recommends one strategy."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_zpp.comm.agreement import agree, from_first_rank, run_on_first_rank
from fsdp_zpp.planner.choice import aligned
from fsdp_zpp.planner.cli import errors_of_arguments, is_rank_zero
from fsdp_zpp.planner.cluster import GIB, whole, world
from fsdp_zpp.planner.model_size import module_size
from fsdp_zpp.strategy.strategy import LEGAL_LEVELS

from .contenders import (
    ALONE,
    FULL_SHARD,
    NAMES_ON_NODES,
    TORCHS,
    Contender,
    Links,
    Planner,
    Recommendation,
    TorchFSDP,
    Training,
    candidates,
    contender,
    load_config,
    measure_links,
    network,
    recommend,
    utilization,
)
from .results import Row, Task, manifest, table, write

# ---- job


def join(device: str) -> torch.device:
    """Join the process group under torchrun and return this rank's device, ``cuda`` or ``cpu``."""
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own)
    return own


@contextmanager
def joined() -> Iterator[torch.device]:
    """Return a context with the process group of torchrun's ranks, on GPUs, or on CPUs if there are none."""
    if "RANK" not in os.environ:
        raise ValueError(
            "bench runs under torchrun only: torchrun --nproc-per-node NUMBER_OF_GPUS -m fsdp_zpp bench --model ..."
        )
    if os.environ.get("WORLD_SIZE") == "1":
        raise ValueError(
            "bench compares how ranks communicate, and torchrun has started only one; start one for each GPU, two or "
            "more: --nproc-per-node 2"
        )
    place = join("cuda" if torch.cuda.is_available() else "cpu")
    try:
        yield place
    finally:
        dist.destroy_process_group()


def free_gib(place: torch.device) -> float | None:
    """Return the free memory in GiB of the fullest GPU in the job; None on CPUs. Collective."""
    if place.type != "cuda":
        return None
    dist.barrier()  # allocates NCCL's first buffers
    least = torch.tensor(torch.cuda.mem_get_info(place)[0] / GIB, device=place)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


_log = logging.getLogger(__name__)


# ---- timing


def synchronize(task: Task) -> None:
    if task.device == "cuda":
        torch.cuda.synchronize()


class PeakMemory:
    """Peak memory of a contender, without the ``left_gib`` GiB that earlier contenders have not freed."""

    def __init__(self, task: Task) -> None:
        self._on_gpu = task.device == "cuda"
        self.left_gib = torch.cuda.memory_allocated() / GIB if self._on_gpu else 0.0

    def since_last(self) -> float | None:
        """Return the largest peak of any rank since the last call, in GiB; None on the CPU. Collective."""
        if not self._on_gpu:
            return None
        peak = torch.tensor(torch.cuda.max_memory_allocated() / GIB - self.left_gib, device="cuda")
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        torch.cuda.reset_peak_memory_stats()
        return peak.item()


class MeasuredStep(NamedTuple):
    """Milliseconds of a step: until this rank's GPU finishes, and until the slowest rank's ``step()`` returns."""

    whole: float
    host: float


def timed_steps(task: Task, training: Training, tokens: torch.Tensor, steps: int) -> list[MeasuredStep]:
    """Time each step; all ranks start together. Collective."""
    whole, host = [], []
    for _ in range(steps):
        dist.barrier()
        synchronize(task)
        began = time.perf_counter()
        training.step(tokens)
        host.append((time.perf_counter() - began) * 1e3)
        synchronize(task)
        whole.append((time.perf_counter() - began) * 1e3)
    return step_times(task, whole, host)


def step_times(task: Task, whole: list[float], host: list[float]) -> list[MeasuredStep]:
    """Pair this rank's step times with the slowest rank's host times. Collective."""
    slowest = torch.tensor(host, dtype=torch.float64, device=task.place)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [MeasuredStep(*both) for both in zip(whole, slowest.tolist(), strict=True)]


def rates(task: Task, times: list[MeasuredStep], tokens: torch.Tensor) -> dict[str, Any]:
    """Return times of the steps in ms (median, range, quartiles), tokens/s, and the share of the peak FLOP/s."""
    whole = [step.whole for step in times]
    lower, _, upper = statistics.quantiles(whole, n=4, method="inclusive") if len(whole) > 1 else whole * 3
    tokens_per_s = tokens.numel() * dist.get_world_size() / statistics.median(whole) * 1e3
    on_gpu = task.device == "cuda"
    return {
        "step_ms": statistics.median(whole),
        "fastest_ms": min(whole),
        "slowest_ms": max(whole),
        "quartiles_ms": [lower, upper],
        "host_ms": statistics.median(step.host for step in times) if on_gpu else None,
        "tokens_per_s": tokens_per_s,
        "utilization": utilization(task, tokens_per_s, torch.cuda.get_device_name() if on_gpu else ""),
    }


# ---- measuring

Make = Callable[[], Training]
Further = Callable[[Training, PeakMemory], Row]


class Schedule(NamedTuple):
    """Steps of a measurement: numbers of warm-up and of timed steps, and the function that times them."""

    warmup: int = 3
    steps: int = 8
    timed: Callable[[Task, Training, torch.Tensor, int], list[MeasuredStep]] = timed_steps


def measure(task: Task, make: Make, schedule: Schedule, further: Further | None = None) -> Row:
    """Build a training and measure its steps: time in ms, peak memory in GiB, bytes sent in MiB a step. Collective."""
    memory = PeakMemory(task)
    began = time.perf_counter()
    with closing(make()) as training:
        dist.barrier()
        result: Row = {"build_s": time.perf_counter() - began}
        result |= {"build_peak_gib": memory.since_last(), "left_by_others_gib": memory.left_gib}
        tokens = task.tokens(dist.get_rank())
        losses = [training.step(tokens) for _ in range(schedule.warmup)]
        memory.since_last()
        before = training.sent()
        times = schedule.timed(task, training, tokens, schedule.steps)
        after = training.sent()
        result |= rates(task, times, tokens) | {"peak_gib": memory.since_last()}
        if before is not None and after is not None:
            result["sent_mib_a_step"] = {hop: (after[hop] - before[hop]) / schedule.steps / 2**20 for hop in after}
        losses.append(training.step(tokens))
        result["loss"] = [losses[0].item(), losses[-1].item()]
        return result if further is None else result | further(training, memory)


def attempt(task: Task, name: str, make: Make, schedule: Schedule, further: Further | None = None) -> Row:
    """Return the row of :func:`measure` or, if ranks fail, the failure of the lowest of them. Collective."""
    result: Row = {}
    failure: dict[str, Any] | None = None
    try:
        result = measure(task, make, schedule, further)
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
    # Ranks have equal memory and work, so all fail alike. If only some fail, the others hang until a timeout.
    failures: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return {"strategy": name, **next((one for one in failures if one), result)}


# ---- run

_ON_CPU = (
    "on CPUs: ranks share this machine's cores and talk through its memory (gloo), so times show that all of this "
    "runs, not what GPUs would gain; bytes are those of GPUs"
)


class Findings(NamedTuple):
    """Result of a run. Each strategy has a row in ``rows``; of equally fast rows, the first is preferred."""

    links: Links
    rows: list[Row]
    recommendation: Recommendation
    notes: tuple[str, ...]


def measure_all(arguments: argparse.Namespace, config: Any, place: torch.device) -> Findings:
    """Measure the links and all strategies in turn. Collective; rank 0 writes the JSON file after each strategy."""
    _log.info("measuring the links")
    links = measure_links(arguments.gpus_per_node, place.type)
    fields = ("micro_batch", "micro_batches", "sequence", "checkpointing", "compile")
    work = {name: getattr(arguments, name) for name in fields}
    task = Task(config, links.nodes, links.gpus_per_node, lora=arguments.lora or 0, device=place.type, **work)
    planner = Planner(module_size(network(task)), task, links, free_gib(place))
    # Ranks may have different packages, but they must try the same strategies.
    names = arguments.strategies or from_first_rank(",".join(candidates(planner)))
    contenders = agree(world(), lambda: named_contenders(names, arguments.gpus_per_node, bool(task.lora)))
    notes = (_ON_CPU,) if place.type == "cpu" else ()
    rows: list[Row] = []
    for row in _measured(arguments, task, planner, contenders):
        rows.append(row)
        if arguments.json is not None:
            run_on_first_rank(partial(_write, arguments, Findings(links, rows, recommend(rows), notes)))
    return Findings(links, rows, recommend(rows), notes)


def _measured(
    arguments: argparse.Namespace, task: Task, planner: Planner, contenders: list[Contender]
) -> Iterator[Row]:
    schedule = Schedule(arguments.warmup, arguments.steps)
    beside_states = 0.0
    for number, one in enumerate(contenders, 1):
        _log.info("measuring %s (%d of %d)", one.label, number, len(contenders))
        about = {"label": one.label, "code": one.code, "is_torchs": one.is_torchs}
        reason = planner.does_not_fit(one, beside_states)
        if reason:
            yield {"strategy": one.name, **about, "failed": reason, "left_out": True}
            continue
        row = attempt(task, one.name, partial(TorchFSDP, task, one), schedule) | about
        if one.is_torchs and "step_ms" in row:
            row |= planner.sent(one)
        if one.strategy is TORCHS[FULL_SHARD] and row.get("peak_gib") is not None:
            beside_states = max(0.0, row["peak_gib"] - planner.states_gib(one))
        yield row


def _write(arguments: argparse.Namespace, findings: Findings) -> None:
    links = dataclasses.asdict(findings.links)
    said = findings.recommendation._asdict()
    made_by = manifest(["python", "-m", "fsdp_zpp", *sys.argv[1:]])
    write(arguments.json, made_by, arguments, findings.rows, links=links, recommendation=said, notes=findings.notes)


# ---- arguments

_SHOWN = [name for name in NAMES_ON_NODES if not name.endswith(LEGAL_LEVELS)]
_ADAPTERS = (
    "train adapters of this rank on q, k, v and o of attention (on all layers if the model has none of these names); "
    "the base is frozen, in bf16 (default: train the whole model)"
)
_ACCUMULATED = "micro-batches in an optimizer step, all but the last without synchronization"
_NODE = "ranks that share fast links, as in Strategy (default: as the machine is)"
_NUMBERS = {
    "lora": (1, "model", None, _ADAPTERS),
    "micro_batch": (1, "work of a step", 1, "sequences on one GPU in a micro-batch"),
    "micro_batches": (1, "work of a step", 1, _ACCUMULATED),
    "sequence": (1, "work of a step", 1024, "tokens of a sequence"),
    "gpus_per_node": (1, "measurement", None, _NODE),
    "steps": (2, "measurement", 8, "timed steps of each strategy"),
    "warmup": (1, "measurement", 3, "steps before them"),
}
"""Options that are whole numbers: minimum, group, default and help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    groups = {title: parser.add_argument_group(title) for title in ("model", "work of a step", "measurement", "report")}
    groups["model"].add_argument(
        "--model",
        required=True,
        metavar="CONFIG",
        help="a config.json, a directory that has one, or a name on the Hugging Face hub; weights are random",
    )
    for name, (_, title, default, said) in _NUMBERS.items():
        told = f"{said} (default: {default})" if default else said
        metavar = "RANK" if name == "lora" else "N"
        option = f"--{name.replace('_', '-')}"
        groups[title].add_argument(option, type=float, default=default, metavar=metavar, help=told)
    add = groups["model"].add_argument
    add("--checkpointing", action="store_true", help="recompute the activations of each layer")
    add("--compile", action="store_true", help="torch.compile each layer")
    groups["measurement"].add_argument(
        "--strategies",
        metavar="NAMES",
        help=f"the only strategies to try, separated by commas: {', '.join(_SHOWN)}; IIG: these scopes without codecs; "
        "zeropp-IIG: with those of zeropp. Prefix fsdp1: uses FullyShardedDataParallel; suffix "
        f"{ALONE} counts each GPU as a node (not for torch's own); once-zeropp: the base is quantized and the model "
        "wrapped once; mixzpp wraps each layer (default: those that may pay)",
    )
    add = groups["report"].add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures, after each strategy")


def check(arguments: argparse.Namespace) -> None:
    """Check the options that take whole numbers, which are parsed as floats, and convert them to int."""
    for name, (least, *_) in _NUMBERS.items():
        if (value := getattr(arguments, name)) is not None:
            setattr(arguments, name, whole(f"--{name.replace('_', '-')}", value, least))


def named_contenders(names: str, gpus_per_node: int | None, lora: bool) -> list[Contender]:
    """Return the contenders of comma-separated ``names``; those without a node size get ``gpus_per_node``."""
    found = []
    for name in names.split(","):
        own = name.removeprefix("fsdp1:")
        one = contender(own, fsdp2=own == name, called=name)
        frozen = None if one.is_torchs else one.strategy.frozen
        if not lora and (one.base, frozen) != (None, None):
            raise ValueError(f"--strategies {name} is for a frozen base, which --lora has; add --lora 16, say")
        found.append(one if gpus_per_node is None or one.gpus_per_node else one.on_nodes_of(gpus_per_node))
    return found


# ---- cli

NOTHING_MEASURED = 1

EXAMPLE = "torchrun --nproc-per-node 8 -m fsdp_zpp bench --model config.json --micro-batch 2 --json bench.json"


def add_bench(subparsers: argparse._SubParsersAction[Any], formatter: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        usage="torchrun [options] -m fsdp_zpp bench [options]",
        formatter_class=formatter,
        help="under torchrun: step time of your model under each strategy, and which to use",
        description="Measure the links of the running job and some steps of your model under torch's FULL_SHARD, HSDP "
        "and the strategies that may pay, and say which to use. Run it under torchrun, one process a GPU.",
        epilog=f"Example: {EXAMPLE}. Exit status: 0 if something was measured, {NOTHING_MEASURED} if nothing was, 2 "
        "for errors.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(format="%(message)s")
    logging.getLogger(__package__).setLevel(logging.INFO if is_rank_zero() else logging.WARNING)
    with errors_of_arguments(arguments.parser):
        check(arguments)
        if arguments.strategies is not None:  # names are checked before the hub is asked for a model
            named_contenders(arguments.strategies, arguments.gpus_per_node, arguments.lora is not None)
        config = load_config(arguments.model)
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        if most is not None and arguments.sequence > most:
            given = f"{arguments.sequence:,}"
            raise ValueError(f"--sequence must be at most {most:,}, the positions that the model has, got {given}")
        with joined() as place:
            findings = measure_all(arguments, config, place)
    if is_rank_zero():
        _report(findings, arguments)
    return 0 if findings.recommendation.strategy is not None else NOTHING_MEASURED


def _report(findings: Findings, arguments: argparse.Namespace) -> None:
    cells = table(findings.rows)
    print("\n".join(findings.links.lines()), end="\n\n")
    print("\n".join(aligned([tuple(cells), *zip(*cells.values(), strict=True)], names=1)))
    if any(row.get("sent_is_planned") for row in findings.rows):
        print("~: torch's own collectives are not counted; planned, as if every byte went to each rank by itself")
    print("", *findings.notes, findings.recommendation.line, sep="\n")
    if arguments.json is not None:
        print(f"wrote {arguments.json}", file=sys.stderr)
