"""``python -m fsdp_zpp plan``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from fsdp_zpp.codecs.codec import Codec
from fsdp_zpp.names import did_you_mean
from fsdp_zpp.strategy.configuration import codec_from_name
from fsdp_zpp.strategy.error_feedback import LoCo
from fsdp_zpp.strategy.local_steps import LocalSteps
from fsdp_zpp.strategy.strategy import check_levels

from .cluster import (
    DEFAULT_MIB,
    DTYPES,
    GPUS,
    LAUNCH_MS,
    LINKS,
    NETWORKS,
    OF_HOST_LINK,
    OPTIMIZER_GBS,
    UTILIZATION,
    Hardware,
    MemoryBudget,
    links_are_slow,
    measure_bandwidth,
    measure_host_link,
    whole,
    world,
)
from .model_size import DEFAULT_UNITS, ModelSize, equal_units, pretrained_size
from .plan import plan
from .report import Plan, draw_plan, plan_to_json

# ---- argument types
#
# How values on the planner's command line are parsed.


def codec(text: str) -> Codec | None:
    """Parse a codec: ``none``, or the name of a codec, with a block (``int8:256``) or without.

    Raises:
        argparse.ArgumentTypeError: If ``text`` is not a codec.
    """
    try:
        return codec_from_name(text)
    except (ValueError, ModuleNotFoundError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def feedback(text: str) -> LoCo | None:
    """Parse error feedback: ``none``, ``inter`` or ``both``, the latter two with a codec of the errors or without.

    Raises:
        argparse.ArgumentTypeError: If ``text`` is not error feedback.
    """
    if text == "none":
        return None
    hops, _, errors = text.partition(":")
    try:
        return LoCo(hops=hops, dtype=codec(errors or "none"))  # type: ignore[arg-type]  # LoCo checks both
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def codec_or_auto(text: str) -> Codec | Literal["auto"] | None:
    """Parse a codec like :func:`codec`, or ``auto``."""
    return "auto" if text == "auto" else codec(text)


def dtype(text: str) -> torch.dtype:
    """Parse the short name of a dtype.

    Raises:
        argparse.ArgumentTypeError: If strategies do not take the dtype.
    """
    if text not in DTYPES:
        hint = did_you_mean(text, DTYPES, before="; ")
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype; allowed are {', '.join(DTYPES)}{hint}")
    return DTYPES[text]


_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def count(text: str) -> float:
    """Parse a number of parameters, such as ``8e9`` or ``8B``.

    Raises:
        argparse.ArgumentTypeError: If ``text`` is none.
    """
    factor = _SUFFIXES.get(text[-1:].lower(), 1.0)
    try:
        return float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid float value: {text!r}; a number of parameters is written 8e9, or 8B with a suffix K, M, B or T"
        ) from None


def trainable_count(text: str, params: int) -> float:
    """Parse a number of parameters, or a share of ``params`` such as ``0.3%``, which is rounded to at least 1.

    Raises:
        ValueError: If ``text`` is neither.
    """
    number, percent, rest = text.partition("%")
    try:
        value = float(number) if percent else count(number)
    except (ValueError, argparse.ArgumentTypeError):
        value = None
    if value is None or rest or (percent and not 0 < value <= 100):
        raise ValueError(f"--trainable must be a number of parameters or a share above 0% and up to 100%, got {text!r}")
    if percent:
        return max(1, round(params * value / 100))
    # A fraction is most likely a share without its percent sign.
    if value < 1:
        raise ValueError(f"--trainable is a number of parameters, got {text!r}; a share has a percent sign, 0.3%")
    return value


# ---- arguments
#
# Options of the planner's command line.

_CODEC_HELP = "none, int8, int4, or with a block, int8:256; for --weights also int4delta, for --frozen nf4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the planner's options."""
    _add_model(parser.add_argument_group("model"))
    _add_cluster(parser.add_argument_group("cluster"))
    _add_offload(parser.add_argument_group("CPU offload"))
    _add_axes(parser.add_argument_group("other parallelisms"))
    _add_step(parser.add_argument_group("step"))
    _add_codecs(parser.add_argument_group("codecs and dtypes"))
    _add_local_steps(parser.add_argument_group("local steps"))
    report = parser.add_argument_group("report")
    report.add_argument("--json", action="store_true", help="print JSON instead of the table")
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw step times and memory, e.g. plan.png")


def _add_model(group: argparse._ArgumentGroup) -> None:
    which = group.add_mutually_exclusive_group(required=True)
    # Counts are floats here so that 70e9 can be written; the planner refuses fractions.
    which.add_argument("--params", type=count, metavar="N", help="parameters, e.g. 70e9 or 70B")
    which.add_argument(
        "--model", metavar="CONFIG", help="a config.json, a directory that has one, or a name on the Hugging Face hub"
    )
    # Kept as text: a share can be resolved only when the number of parameters is known.
    group.add_argument(
        "--trainable", metavar="N|X%", help="number or share of trainable parameters, e.g. 0.3%% (default: all)"
    )
    group.add_argument(
        "--units",
        type=float,
        metavar="N",
        help=f"number of FSDP units that --params are wrapped in (default: {DEFAULT_UNITS}; --model has its own)",
    )


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--nodes", type=float, metavar="N", help="number of nodes")
    add("--gpus-per-node", type=float, metavar="N", help="GPUs of each node")
    add("--gpu", metavar="NAME", help=f"GPU, for its memory, link and computation: {', '.join(GPUS)}")
    add("--link", metavar="NAME", help=f"link between the GPUs of a node (default: the GPU's): {', '.join(LINKS)}")
    add(
        "--net",
        metavar="NAME",
        help=f"network card of a node, several as 8xib-ndr: {', '.join(NETWORKS)}",
    )
    add("--inter-gbps", type=float, metavar="X", help="Gbit/s of a whole node to the others, all its cards together")
    add("--intra-gbps", type=float, metavar="X", help="Gbit/s of one GPU to the others of its node")
    add(
        "--measure",
        type=float,
        nargs="?",
        const=DEFAULT_MIB,
        metavar="MIB",
        help="under torchrun: measure the bandwidths that are not given, with gathers of this many MiB per rank "
        f"(default: {DEFAULT_MIB}); nodes and GPUs default to those of the job",
    )
    add(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="memory of a GPU in GiB, the number in its name, e.g. 80 (default: that of --gpu, or no limit)",
    )


def _add_offload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--cpu-offload",
        action="store_true",
        help="offload parameters, gradients and optimizer state to the host's memory, as FSDP does",
    )
    add(
        "--host-memory",
        type=float,
        metavar="GIB",
        help="GiB of a node's host that the training may take (default: no limit)",
    )
    add(
        "--host-gbps",
        type=float,
        metavar="X",
        help="Gbit/s at which one GPU copies from the host's memory, or to it (default: "
        f"{OF_HOST_LINK:g} of the peak of the link that --gpu has to its host; --measure finds it on GPUs)",
    )
    add(
        "--optimizer-gbs",
        type=float,
        metavar="X",
        help="GB/s at which all CPUs of a node read and write memory in the optimizer's step (default: "
        f"{OPTIMIZER_GBS:g})",
    )


def _add_axes(group: argparse._ArgumentGroup) -> None:
    for name, what in (
        ("tp", "ranks of tensor parallelism, which share --tokens"),
        ("pp", "stages of a pipeline"),
        ("cp", "ranks of context parallelism, which are data-parallel ranks to a strategy"),
        ("ep", "ranks of expert parallelism; experts are sharded over the ranks of a stage that have the same ones"),
    ):
        group.add_argument(f"--{name}", type=float, default=1, metavar="N", help=f"{what} (default: 1)")
    group.add_argument(
        "--experts-strategy",
        metavar="LEVELS",
        help="letters of the experts' strategy, e.g. IGG (default: those of dense parameters)",
    )


def _add_step(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--micro-batches", type=float, default=1, metavar="N", help="micro-batches in an optimizer step (default: 1)")
    add("--tokens", type=float, metavar="N", help="tokens on one GPU in a micro-batch, for the computation time")
    add("--tflops", type=float, metavar="X", help="TFLOP/s that one GPU achieves, for the computation time")
    add(
        "--utilization",
        type=float,
        metavar="X",
        help=f"instead of --tflops, share of the peak of --gpu that it achieves (default: {UTILIZATION})",
    )
    add(
        "--launch-ms",
        type=float,
        metavar="X",
        help="milliseconds in which the CPU launches forward and backward of one unit (default: "
        f"{LAUNCH_MS:g} with --gpu and --tokens, else left out)",
    )
    for name, what in (
        ("activations", "of activations on a GPU"),
        ("reserve", "of a GPU that no tensor can use: CUDA context, NCCL, gaps"),
    ):
        default = getattr(MemoryBudget, name)
        add(f"--{name}", type=float, default=default, metavar="GIB", help=f"GiB {what} (default: {default:g})")


def _add_codecs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--presets",
        action=argparse.BooleanOptionalAction,
        help="plan presets with their own codecs and torch's strategies beside the letters (default: if no codec of "
        "what is sent is given)",
    )
    add("--weights", type=codec, metavar="CODEC", help=f"codec of the weight gather: {_CODEC_HELP} (default: none)")
    add("--gradients", type=codec, metavar="CODEC", help="codec of the inter-node gradient reduction (default: none)")
    add(
        "--intra-gradients",
        type=codec_or_auto,
        default="auto",
        metavar="CODEC",
        help="codec of the intra-node gradient reduction, or auto: int8 if --gradients has a codec (default: auto)",
    )
    add(
        "--error-feedback",
        type=feedback,
        metavar="HOPS",
        help="LoCo's error feedback: inter (on the hop between nodes) or both; inter:int8:256 keeps errors in 8 bits "
        "(default: none)",
    )
    add("--frozen", type=codec, metavar="CODEC", help="codec of frozen weights, which stay encoded (default: none)")
    for name, what, default in (
        ("compute", "of forward and backward", "bf16"),
        ("reduce", "of gradients without a codec", "bf16"),
        ("storage", "of the shards that the optimizer updates", "fp32"),
        ("frozen-storage", "of the shards of frozen weights", None),
    ):
        said = default or "as --storage, or as --compute beside presets"
        # argparse passes a default that is a string through ``type``, too.
        add(f"--{name}", type=dtype, default=default, metavar="DTYPE", help=f"dtype {what} (default: {said})")
    add(
        "--optimizer-bytes",
        type=float,
        default=8,
        metavar="N",
        help="bytes of optimizer state per trainable parameter (default: 8, Adam)",
    )


_EXCHANGES = {
    "exchange_codec": "codec",
    "exchange_feedback": "error_feedback",
    "exchange_overlap": "overlap",
    "exchange_at_once": "spread",
    "exchange_offload": "offload",
    "exchange_moments_every": "moments_every",
}
"""The argument of :class:`LocalSteps` behind each option."""


def _add_local_steps(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--local-steps",
        type=float,
        metavar="N",
        help="also plan local-update training, which changes the mathematics: nodes step on their own and exchange "
        "weights every N steps",
    )
    # Options that are not given are left out of the namespace, so that LocalSteps has the only defaults.
    for name, what in (
        (
            "codec",
            f"of the exchanges, none, int8 or int4 (default: {LocalSteps.codec})",
        ),
        (
            "feedback",
            "of the errors, which turns error feedback on: none (fp32) or int8 (default: no feedback)",
        ),
    ):
        add(f"--exchange-{name}", type=codec, metavar="CODEC", default=argparse.SUPPRESS, help=f"codec {what}")
    add(
        "--exchange-overlap",
        type=float,
        metavar="N",
        default=argparse.SUPPRESS,
        help="steps that an exchange may take to arrive",
    )
    add(
        "--exchange-moments-every",
        type=float,
        metavar="N",
        default=argparse.SUPPRESS,
        help="also average the optimizer's moments in every Nth exchange, as int8 (default: never)",
    )
    for name, default, what in (
        ("at-once", False, "exchange all units after the same step, instead of spreading them over the N steps"),
        ("offload", True, "keep agreed weights and momentum on the CPU"),
    ):
        add(f"--exchange-{name}", action="store_const", const=default, default=argparse.SUPPRESS, help=what)


def local_steps(arguments: argparse.Namespace) -> LocalSteps | None:
    """Return the local steps that parsed options ask for, if any.

    Raises:
        ValueError: If a value is out of range, or there are options of exchanges without ``--local-steps``.
        TypeError: If the errors of exchanges are to be kept as another codec than ``int8``.
    """
    given = {name: getattr(arguments, name) for name in _EXCHANGES if hasattr(arguments, name)}
    if arguments.local_steps is None:
        if given:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{names}: needs --local-steps")
        return None
    if "exchange_feedback" in given:
        given["exchange_feedback"] = LoCo(dtype=given["exchange_feedback"])
    if "exchange_overlap" in given:
        given["exchange_overlap"] = whole("--exchange-overlap", given["exchange_overlap"], least=0)
    if "exchange_moments_every" in given:
        given["exchange_moments_every"] = whole("--exchange-moments-every", given["exchange_moments_every"])
    options = {_EXCHANGES[name]: value for name, value in given.items()}
    return LocalSteps(whole("--local-steps", arguments.local_steps), **options)


# ---- cli

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
