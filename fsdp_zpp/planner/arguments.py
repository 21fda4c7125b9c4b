"""Options of the planner's command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdp_zpp.config.error_feedback import LoCo
from fsdp_zpp.config.local_steps import LocalSteps

from .argument_types import codec, codec_or_auto, count, dtype, feedback
from .bandwidth import DEFAULT_MIB
from .catalog import GPUS, LINKS, NETWORKS
from .config import MemoryBudget, whole
from .hardware import LAUNCH_MS, OF_HOST_LINK, OPTIMIZER_GBS, UTILIZATION
from .model_size import DEFAULT_UNITS

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
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw memory against step time, e.g. plan.png")


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
            f"of the exchanges, none, int8, int4, or topk with --exchange-feedback (default: {LocalSteps.codec})",
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
