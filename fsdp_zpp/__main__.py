"""``python -m fsdp_zpp``, or ``fsdp_zpp``: the commands of this package."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.metadata import version

from fsdp_zpp.bench.cli import add_bench
from fsdp_zpp.environment import add_env
from fsdp_zpp.planner.cli import add_plan
from fsdp_zpp.suggestions import did_you_mean


class _Version(argparse.Action):
    """Looks the version up only when asked: without an installation there is none."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        print(f"fsdp_zpp {version('fsdp_zpp')}")
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
