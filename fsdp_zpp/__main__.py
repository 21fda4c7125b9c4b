"""``python -m fsdp_zpp``: the commands of this package."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.metadata import version

from fsdp_zpp.environment import add_env
from fsdp_zpp.planner.cli import add_plan


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    formatter = partial(argparse.HelpFormatter, max_help_position=28, width=100)
    parser = argparse.ArgumentParser(prog="python -m fsdp_zpp", description=__doc__, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"fsdp_zpp {version('fsdp_zpp')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_plan(commands, formatter)
    add_env(commands, formatter)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
