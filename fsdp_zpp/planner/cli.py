"""``python -m fsdp_zpp plan``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from fsdp_zpp.config.levels import check_levels

from .argument_types import trainable_count
from .arguments import add_arguments, local_steps
from .bandwidth import links_are_slow, measure_bandwidth, world
from .chart import draw_plan
from .config import whole
from .hardware import Hardware
from .host_link import measure_host_link
from .json_report import plan_to_json
from .model_size import ModelSize, equal_units, pretrained_size
from .plan import plan
from .report import Plan

NOTHING_FITS = 1

_OPTIONS = (
    "gpu link net utilization micro_batches tokens tflops launch_ms gpu_memory activations reserve weights gradients "
    "intra_gradients error_feedback frozen compute reduce storage frozen_storage optimizer_bytes tp pp cp ep "
    "experts_strategy presets cpu_offload host_gbps host_memory optimizer_gbs"
).split()

EXAMPLE = (
    "python -m fsdp_zpp plan --params 70e9 --trainable 0.3% --nodes 16 --gpus-per-node 8 --gpu a100 --net 100gbe "
    "--micro-batches 10 --tokens 4096"
)


def add_plan(subparsers: argparse._SubParsersAction[Any], formatter: Any) -> None:
    """Add the subcommand ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        usage="python -m fsdp_zpp plan [options]",
        formatter_class=formatter,
        help="memory, traffic and step time of torch's strategies, presets and all letters, and the choice",
        description="Show memory, traffic and predicted step time of torch's strategies, presets and all 14 "
        "combinations of letters, and choose one.",
        epilog=f"Example: {EXAMPLE}. Exit status: 0 if a strategy fits, {NOTHING_FITS} if none does, 2 for errors.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Make the plan, report it and return the exit status. Under torchrun only rank 0 reports."""
    try:
        result = _plan(arguments)
        if _rank_zero():
            _report(result, arguments)
    # These are errors of the arguments; anything else is a bug and keeps its traceback.
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        # All ranks have the same arguments and so the same error; one message is enough.
        if _rank_zero():
            arguments.parser.error(str(error))
        return 2
    return NOTHING_FITS if result.choice is None else 0


def _plan(arguments: argparse.Namespace) -> Plan:
    Hardware(arguments.gpu, arguments.link, arguments.net)  # names are checked before the hub is asked for a model
    if arguments.experts_strategy is not None:
        check_levels(arguments.experts_strategy)
    size = _size(arguments)
    cluster = {name: getattr(arguments, name) for name in ("nodes", "gpus_per_node", "inter_gbps", "intra_gbps")}
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    if arguments.measure is not None:
        measures_host = arguments.cpu_offload and arguments.host_gbps is None and arguments.gpu is None
        found = _measured(cluster, arguments.measure, arguments.link, measures_host)
        options["host_gbps"] = found.pop("host_gbps", arguments.host_gbps)
        cluster |= found
    missing = [f"--{name.replace('_', '-')}" for name in ("nodes", "gpus_per_node") if cluster[name] is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given, or --measure under torchrun, which finds them")
    return plan(size, **cluster, **options, local_steps=local_steps(arguments))


def _size(arguments: argparse.Namespace) -> ModelSize:
    if arguments.model is None:
        size = equal_units(arguments.params, units=arguments.units)
    elif arguments.units is not None:
        raise ValueError(f"--units {arguments.units:g} goes with --params; a --model has units of its own; remove one")
    else:
        size = pretrained_size(arguments.model)
    if arguments.trainable is None:
        return size
    return size.with_trainable(trainable_count(arguments.trainable, size.params))


def _measured(given: dict[str, Any], mib: float, link: str | None, measures_host: bool) -> dict[str, Any]:
    """Measure the arguments of the cluster that were not given on the running job, and return them.

    Without GPUs there is no link to the host that could be measured.
    """
    if given["inter_gbps"] is not None and given["intra_gbps"] is not None:
        raise ValueError(
            "--measure has nothing to measure: --inter-gbps and --intra-gbps are both given; remove one of the three"
        )
    if "RANK" not in os.environ:
        raise ValueError("--measure runs under torchrun only: torchrun [options] -m fsdp_zpp plan --measure ...")
    gpus = None if given["gpus_per_node"] is None else whole("--gpus-per-node", given["gpus_per_node"])
    if torch.cuda.is_available():
        # Otherwise all ranks of a node would measure on its first GPU.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        bandwidth = measure_bandwidth(world(), gpus, mib)
        found = {name: getattr(bandwidth, name) for name, value in given.items() if value is None}
        # A node size that is given stays, and so does what the name of a link says.
        if gpus is None and link is None:
            found["slow_links"] = links_are_slow(world(), bandwidth if "intra_gbps" in found else None)
        if measures_host:
            found["host_gbps"] = measure_host_link()
    finally:
        dist.destroy_process_group()
    return found


def _rank_zero() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _report(result: Plan, arguments: argparse.Namespace) -> None:
    print(plan_to_json(result) if arguments.json else result)
    if arguments.plot is not None:
        draw_plan(result, arguments.plot)
        print(f"wrote {arguments.plot}", file=sys.stderr)  # not among the JSON that a program reads
