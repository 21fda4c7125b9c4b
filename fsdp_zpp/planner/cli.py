"""``python -m fsdp_zpp plan``: an option for each argument of ``plan``, from the argument's annotation and docs."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_zpp.codecs import Codec
from fsdp_zpp.names import did_you_mean
from fsdp_zpp.strategy.configuration import codec_from_name
from fsdp_zpp.strategy.error_feedback import LoCo

from .cluster import (
    DEFAULT_MIB,
    DTYPES,
    GPUS,
    LINKS,
    NETWORKS,
    links_are_slow,
    measure_bandwidth,
    named_figures,
    whole,
    world,
)
from .model_size import ModelSize, equal_units, pretrained_size
from .plan import plan
from .report import Plan, plan_to_json

# ---- argument types


def codec(text: str) -> Codec | None:
    """Parse a codec: ``none``, or the name of a codec, with a block (``int8:256``) or without."""
    try:
        return codec_from_name(text)
    except (ValueError, ModuleNotFoundError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _feedback(text: str) -> LoCo | None:
    if text == "none":
        return None
    hops, _, errors = text.partition(":")
    try:
        return LoCo(hops=hops, dtype=codec(errors or "none"))  # type: ignore[arg-type]  # LoCo checks both
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _dtype(text: str) -> torch.dtype:
    if text not in DTYPES:
        hint = did_you_mean(text, DTYPES, before="; ")
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype; allowed are {', '.join(DTYPES)}{hint}")
    return DTYPES[text]


_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _count(text: str) -> float:
    factor = _SUFFIXES.get(text[-1:].lower(), 1.0)
    try:
        return float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid float value: {text!r}; a number of parameters is written 8e9, or 8B with a suffix K, M, B or T"
        ) from None


def _trainable_count(text: str, params: int) -> float:
    """Parse a number of parameters, or a share of ``params`` such as ``0.3%``, which is rounded to at least 1."""
    number, percent, rest = text.partition("%")
    try:
        value = float(number) if percent else _count(number)
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

_TYPES: dict[str, tuple[Any, str]] = {
    # Whole numbers are floats here so that 70e9 can be written; the planner refuses fractions.
    "int": (float, "N"),
    "float": (float, "X"),
    "str": (str, "NAME"),
    "Codec": (codec, "CODEC"),
    "Codec | FrozenName": (codec, "CODEC"),
    "Codec | Literal['auto']": (lambda text: text if text == "auto" else codec(text), "CODEC"),
    "LoCo": (_feedback, "HOPS"),
    "torch.dtype": (_dtype, "DTYPE"),
}
"""Parser and metavar of an option, by the annotation of the argument of ``plan``."""

_GROUPS = {
    "cluster": "nodes gpus_per_node gpu link net inter_gbps intra_gbps gpu_memory",
    "step": "micro_batches tokens tflops activations",
    "codecs and dtypes": "presets weights gradients intra_gradients error_feedback frozen compute reduce storage "
    "optimizer_bytes",
}
_SYNTAX = (
    "CODEC is none, int8 or int4, with a block as int8:256 or without; for --gradients also int3, for --weights "
    "int4delta and int2delta, for --frozen nf4. HOPS is none, inter or both; inter:int8:256 keeps errors in 8 bits. "
    "DTYPE is bf16, fp16 or fp32."
)
_NAMES = [name for names in _GROUPS.values() for name in names.split()]
_CATALOG = {"gpu": GPUS, "link": LINKS, "net": NETWORKS}
_PARAMETERS = inspect.signature(plan).parameters


def _helps() -> dict[str, str]:
    """Return the help of each option: the text of its argument in the docstring of ``plan``."""
    docstring = inspect.getdoc(plan) or ""
    section = docstring.partition("Args:\n")[2].partition("\nRaises:")[0]
    helps = dict.fromkeys(_PARAMETERS, "")  # python -OO leaves docstrings out
    for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        words = " ".join(text.split()).removeprefix("True if ").rstrip(".")
        words = re.sub(r"``([^`]+)``", lambda found: _option(found[1]), words).replace("%", "%%")
        if name in _CATALOG:
            words += f"; names are {', '.join(_CATALOG[name])}"
        if words[1].islower() and not words.startswith(("Gbit", "GiB")):
            words = words[0].lower() + words[1:]
        helps[name] = words + _default(name)
    return helps


def _default(name: str) -> str:
    default = _PARAMETERS[name].default
    if default in (None, inspect.Parameter.empty):
        return ""
    shown = next((short for short, dtype in DTYPES.items() if dtype is default), default)
    return f" (default: {shown:g})" if isinstance(shown, float) else f" (default: {shown})"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name in _PARAMETERS else name


def _add(group: argparse._ArgumentGroup, name: str, said: str) -> None:
    parameter = _PARAMETERS[name]
    if parameter.annotation == "bool | None":
        group.add_argument(_option(name), action=argparse.BooleanOptionalAction, help=said)
    else:
        parse, metavar = _TYPES[parameter.annotation.removesuffix(" | None")]
        default = None if parameter.default is parameter.empty else parameter.default
        group.add_argument(_option(name), type=parse, default=default, metavar=metavar, help=said)


def _add_model(group: argparse._ArgumentGroup, helps: dict[str, str]) -> None:
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--params", type=_count, metavar="N", help="number of parameters, e.g. 70e9 or 70B")
    which.add_argument(
        "--model", metavar="CONFIG", help="a config.json, a directory that has one, or a name on the Hugging Face hub"
    )
    # Kept as text: a share becomes a number only once the number of parameters is known.
    group.add_argument("--trainable", metavar="N|X%", help=f"{helps['trainable']}; or a share, e.g. 0.3%%")
    _add(group, "units", helps["units"])


# ---- cli

NOTHING_FITS = 1

EXAMPLE = (
    "python -m fsdp_zpp plan --params 70e9 --trainable 0.3% --nodes 16 --gpus-per-node 8 --gpu a100 --net 100gbe "
    "--micro-batches 10 --tokens 4096"
)


def add_plan(subparsers: argparse._SubParsersAction[Any], formatter: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        usage="python -m fsdp_zpp plan [options]",
        formatter_class=formatter,
        help="memory, traffic and step time of torch's strategies, presets and all letters, and the choice",
        description="Show memory, traffic and predicted step time of torch's strategies, presets and all 14 "
        "combinations of letters, and choose one.",
        epilog=f"Example: {EXAMPLE}. Exit status: 0 if a strategy fits, {NOTHING_FITS} if none does, 2 for errors.",
    )
    helps = _helps()
    _add_model(parser.add_argument_group("model"), helps)
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title, _SYNTAX if "weights" in names else None)
        for name in names.split():
            _add(group, name, helps[name])
        if title == "cluster":
            group.add_argument(
                "--measure",
                type=float,
                nargs="?",
                const=DEFAULT_MIB,
                metavar="MIB",
                help="under torchrun: measure the bandwidths that are not given, with gathers of this many MiB per "
                f"rank (default: {DEFAULT_MIB}); nodes and GPUs default to those of the job",
            )
    report = parser.add_argument_group("report")
    report.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Make the plan, report it and return the exit status. Under torchrun only rank 0 reports."""
    with errors_of_arguments(arguments.parser):
        result = _plan(arguments)
    if is_rank_zero():
        print(plan_to_json(result) if arguments.json else result)
    return NOTHING_FITS if result.choice is None else 0


@contextmanager
def errors_of_arguments(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Return a context that exits with 2 on errors in arguments; other errors are bugs and keep their tracebacks."""
    try:
        yield
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        # All ranks have the same arguments and so the same error: one report is enough.
        if is_rank_zero():
            parser.error(str(error))
        raise SystemExit(2) from None


def _plan(arguments: argparse.Namespace) -> Plan:
    # Names are checked before the hub is asked for a model.
    named_figures(arguments.gpu, arguments.link, arguments.net)
    size = _size(arguments)
    options = {name: getattr(arguments, name) for name in _NAMES}
    if arguments.measure is not None:
        given = {name: options[name] for name in ("nodes", "gpus_per_node", "inter_gbps", "intra_gbps")}
        options |= _measured(given, arguments.measure, arguments.link)
    missing = [_option(name) for name in ("nodes", "gpus_per_node") if options[name] is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given, or --measure under torchrun, which finds them")
    return plan(size, **options)


def _size(arguments: argparse.Namespace) -> ModelSize:
    if arguments.model is None:
        size = equal_units(arguments.params, arguments.units)
    elif arguments.units is not None:
        raise ValueError(f"--units {arguments.units:g} goes with --params; a --model has units of its own; remove one")
    else:
        size = pretrained_size(arguments.model)
    if arguments.trainable is None:
        return size
    return size.with_trainable(_trainable_count(arguments.trainable, size.params))


def _measured(given: dict[str, Any], mib: float, link: str | None) -> dict[str, Any]:
    """Measure the arguments of the cluster that are None in ``given``, in the running job, and return them."""
    if given["inter_gbps"] is not None and given["intra_gbps"] is not None:
        raise ValueError(
            "--measure has nothing to measure: --inter-gbps and --intra-gbps are both given; remove one of the three"
        )
    if "RANK" not in os.environ:
        raise ValueError("--measure runs under torchrun only: torchrun [options] -m fsdp_zpp plan --measure ...")
    gpus = None if given["gpus_per_node"] is None else whole("--gpus-per-node", given["gpus_per_node"])
    if torch.cuda.is_available():
        # Without this call, all ranks of a node would measure on the node's first GPU.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        bandwidth = measure_bandwidth(world(), gpus, mib)
        found = {name: getattr(bandwidth, name) for name, value in given.items() if value is None}
        # Slow links may change the node size, so a given size leaves them out. A given link's name tells its speed.
        if gpus is None and link is None:
            found["slow_links"] = links_are_slow(world(), bandwidth if "intra_gbps" in found else None)
    finally:
        dist.destroy_process_group()
    return found


def is_rank_zero() -> bool:
    return os.environ.get("RANK", "0") == "0"
