"""CPU time, collectives and process groups of a step as the world grows, up to a thousand ranks and more, on one CPU.

    python benchmarks/scale/run.py --worlds 16,64,256,1024

One rank runs in torch's fake process group, whose collectives send nothing, so what is left is what every rank's CPU
must do for a step. A unit has the same number of values on every world, and they divide evenly, so the work on tensors
is the same. Codecs (on GPUs, kernel launches; here, the PyTorch reference) and collectives (here, copies that the fake
group makes for every rank) are timed apart: what is left is Python's and torch's own time around them, and how many
functions are called, which a busy machine does not change. Each case has a process of its own. Prints a Markdown table
and writes the result (scale.json) to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

import result_files
from case import STRATEGIES, measure
from manifest import manifest
from report import every_case


def in_process_of_its_own(arguments: argparse.Namespace, world: int, adapter: str, strategy: str) -> dict[str, Any]:
    """:func:`measure` in a new process."""
    case = [str(world), adapter, strategy]
    options = ["--gpus-per-node", "--blocks", "--steps", "--warmup"]
    values = [arguments.gpus_per_node, arguments.blocks, arguments.steps, arguments.warmup]
    command = [sys.executable, __file__, "--case", *case]
    command += [text for option, value in zip(options, values, strict=True) for text in (option, str(value))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="16,64,256,1024", help="numbers of ranks that divide 1024")
    parser.add_argument("--adapters", default="fsdp1,fsdp2")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20, help="timed steps, after --warmup others and the first")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), help="folder for scale.json")
    parser.add_argument("--case", nargs=3, metavar=("WORLD", "ADAPTER", "STRATEGY"), help="this one alone, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table and write the result."""
    arguments = parse()
    if arguments.case:
        world, adapter, strategy = arguments.case
        counts = {name: getattr(arguments, name) for name in ("gpus_per_node", "blocks", "steps", "warmup")}
        print(json.dumps(measure(int(world), adapter, strategy, **counts)))
        return
    made_by = manifest()
    rows = [
        in_process_of_its_own(arguments, int(world), adapter, strategy)
        for adapter in arguments.adapters.split(",")
        for strategy in arguments.strategies.split(",")
        for world in arguments.worlds.split(",")
    ]
    result_files.write(arguments.out / "scale.json", made_by, arguments, rows)
    print(every_case(rows, arguments.blocks))


if __name__ == "__main__":
    main()
