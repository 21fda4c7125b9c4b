"""CPU time of a step beside FSDP2's HSDP: Python's and torch's own around kernels and networks, on one CPU.

    PYTHONHASHSEED=0 setarch -R python benchmarks/scale/beside_hsdp.py

One rank of 16, in nodes of 8, runs in torch's fake process group. The model has a root and layers of nine parameters,
like those of a Llama; each is a unit, unless a name says otherwise. Kernels are prepared as for a GPU and not launched.
The CPU time of the model's own computation, measured beside without FSDP, is subtracted.

Each contender has a process of its own, and they make a few steps in turns, so that the machine's other work falls on
all of them. Addresses of memory make one process 5 % faster than the next of the same contender: setarch -R gives all
of them the same, and several sets of processes follow each other. Prints a Markdown table and
writes the result (beside-hsdp.json) to ``--out``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

from case import join_fake_world
from contenders import COMPUTATION, CONTENDERS, GPUS_PER_NODE, REFERENCE, WORLD, make_step, prepare_kernels_only
from manifest import manifest
from report import beside_hsdp

from fsdp_zpp.bench.results import write


def work(name: str, blocks: int, pipe: Connection) -> None:
    """Make as many steps as the pipe asks for, again and again, and answer with the CPU seconds of each."""
    join_fake_world(WORLD, GPUS_PER_NODE)
    prepare_kernels_only()
    step = make_step(CONTENDERS[name], blocks)
    while (steps := pipe.recv()) is not None:
        seconds = []
        for _ in range(steps):
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
        pipe.send(seconds)


def measure(names: list[str], blocks: int, rounds: int, steps: int) -> dict[str, float]:
    """Return the median CPU time of a step of each contender, in seconds, after a round that warms up."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in names:
        pipes[name], other_end = spawn.Pipe()
        processes.append(spawn.Process(target=work, args=(name, blocks, other_end), daemon=True))
        processes[-1].start()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name, pipe in pipes.items():
            pipe.send(steps)
            answer = pipe.recv()
            if number:
                seconds[name] += answer
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, metavar="NAME")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--sets", type=int, default=5, help="of processes, one after the other")
    parser.add_argument("--rounds", type=int, default=8, help="of a set")
    parser.add_argument("--steps", type=int, default=5, help="of a contender in a round")
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), help="folder for beside-hsdp.json")
    arguments = parser.parse_args()
    accumulating = [f"{name} x 4" for name in (COMPUTATION, REFERENCE) if any(" x " in n for n in arguments.contenders)]
    names = list(dict.fromkeys((COMPUTATION, REFERENCE, *arguments.contenders, *accumulating)))
    made_by = manifest()
    sets = [measure(names, arguments.blocks, arguments.rounds, arguments.steps) for _ in range(arguments.sets)]
    rows = [
        {"contender": name, "us_a_layer": [round(each[name] / arguments.blocks * 1e6, 1) for each in sets]}
        for name in names
    ]
    write(arguments.out / "beside-hsdp.json", made_by, arguments, rows)
    print(beside_hsdp(rows))


if __name__ == "__main__":
    main()
