"""The command ``fsdp_zpp``: ``plan``, ``bench`` and ``env``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from functools import partial

import torch

from fsdp_zpp.bench.results import versions
from fsdp_zpp.bench.run import add_bench
from fsdp_zpp.planner.cli import add_plan

from .names import did_you_mean

# ---- environment
#
# ``python -m fsdp_zpp env``: facts of the machine and the job for a bug report.

PACKAGES = (
    "fsdp_zpp torch triton safetensors transformers peft accelerate trl lightning torchtitan axolotl bitsandbytes"
).split()
"""Packages whose versions are shown: this one, its requirements, and packages that it works with."""

_VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "TRITON_", "GLOO_", "FSDP_ZPP_", "OMP_NUM_THREADS")
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")
"""Variables whose names match may hold secrets, so their values are hidden."""
_BY_TORCHRUN = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
_BY_SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")

Sections = dict[str, dict[str, str]]


def add_env(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], formatter: Callable[..., argparse.HelpFormatter]
) -> None:
    parser = subparsers.add_parser(
        "env",
        usage="python -m fsdp_zpp env [--json]",
        formatter_class=formatter,
        help="versions, GPUs, nodes and variables: what a bug report needs",
        description="Show versions, GPUs, nodes and the environment variables on which communication depends. Run it "
        "under the launcher of the job that fails; rank 0 prints.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        shown = {"versions": _versions(), "GPUs": _gpus(), "nodes": _nodes(), "variables": _variables()}
        print(json.dumps(shown, indent=1) if arguments.json else as_text(shown))
    return 0


def as_text(shown: Sections) -> str:
    lines = []
    for title, values in shown.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<{max(map(len, values))}}  {value}" for name, value in values.items()] or ["  none"]
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    installed = versions(PACKAGES)
    nccl = installed.pop("nccl", "none")
    shown = dict.fromkeys(("python", "system", *PACKAGES), "not installed")
    shown |= {"system": platform.platform()} | installed
    return shown | ({"CUDA": str(torch.version.cuda), "NCCL": nccl} if torch.cuda.is_available() else {})


def _gpus() -> dict[str, str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = {index: torch.cuda.get_device_properties(index) for index in range(count)}
    return {
        f"GPU {index}": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        for index, gpu in properties.items()
    }


def _nodes() -> dict[str, str]:
    node = {"host": platform.node(), "CPU cores": str(os.cpu_count())}
    if "LOCAL_WORLD_SIZE" in os.environ:
        return node | {name: os.environ.get(name, "not set") for name in _BY_TORCHRUN}
    if "SLURM_STEP_TASKS_PER_NODE" in os.environ:
        return node | {name: os.environ.get(name, "not set") for name in _BY_SRUN}
    return node | {"launcher": "none: LOCAL_WORLD_SIZE is not set (torchrun sets it)"}


def _variables() -> dict[str, str]:
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return {name: "(hidden)" if _SECRET.search(name) else value for name, value in variables.items()}


# ---- main


class _Version(argparse.Action):
    """Looks the version up only for ``--version``: ``versions`` also asks for GPUs, which takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        print("fsdp_zpp", versions(["fsdp_zpp"]).get("fsdp_zpp", "is not installed"))
        parser.exit()


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    formatter = partial(argparse.HelpFormatter, max_help_position=28, width=100)
    parser = argparse.ArgumentParser(prog="python -m fsdp_zpp", description=__doc__, formatter_class=formatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_plan(commands, formatter)
    add_bench(commands, formatter)
    add_env(commands, formatter)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = getattr(parsed, "parser", parser)
        options = [option for action in command._actions for option in action.option_strings]
        asked = [did_you_mean(each.partition("=")[0], options) for each in unknown if each.startswith("-")]
        command.error(" ".join([f"unrecognized arguments: {' '.join(unknown)};", *filter(None, asked)]).rstrip(";"))
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
