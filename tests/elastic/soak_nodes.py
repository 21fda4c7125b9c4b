"""Loses nodes at random moments of a training, again and again, and tells what has become of each run.

    python tests/elastic/soak_nodes.py --kills 10 --steps 300

For each kind of loss: a node that is killed and starts again, one rank of a node that is killed, and a node that is
stopped and goes on. Prints a line for each run, then a summary as JSON; fails if a run does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

from node_jobs import Event, Jobs, Outcome, outcome
from node_training import QUICK, Training

from fsdp_zpp import Int4, LocalSteps

KINDS = ("kill", "kill rank", "stop")


def run(training: Training, gpus: int, *events: Event) -> tuple[Outcome, float]:
    """One run; what has become of it, and how long it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(training, gpus, Path(folder))
        spared = set(range(training.members)) - {event.node for event in events}
        return outcome(jobs.run(*events), spared), time.monotonic() - started


def soak(kind: str, training: Training, gpus: int, kills: int, seed: int, undisturbed: float) -> dict[str, Any]:
    """Several runs with a loss of one kind each; a summary of them."""
    chance, found = random.Random(f"{kind} {seed}"), []
    for _ in range(kills):
        node, step = chance.randrange(training.members), chance.randrange(10, training.steps * 2 // 3)
        seconds = {"kill": chance.uniform(0, 6), "stop": chance.uniform(2, 15)}.get(kind)
        of, took = run(training, gpus, Event(kind, node, step, seconds))
        found.append(of)
        shown = asdict(of) | {"kind": kind, "node": node, "step": step, "seconds": seconds, "took": round(took, 1)}
        print(json.dumps(shown | {"weights": len(of.weights)}, default=str), flush=True)
    down = [of.downtime for of in found]
    losses = [of.held_out[0] / undisturbed - 1 for of in found]
    return {
        "kind": kind,
        "runs": len(found),
        "ended with all nodes equal": sum(
            len(of.weights) == 1 and len(of.held_out) == training.members for of in found
        ),
        "agreed after every exchange": sum(not of.disagreements for of in found),
        "made exchanges apart": sum(bool(of.forks) for of in found),
        "left something behind": sum(bool(of.left) for of in found),
        "nodes that returned": sum(of.returned for of in found),
        "downtime, median and most, in seconds": [round(each, 1) for each in (statistics.median(down), max(down))],
        "loss against that of an undisturbed run": [f"{min(losses):+.2%}", f"{max(losses):+.2%}"],
    }


def main() -> None:
    """Run all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="runs of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that a step takes at least")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--fewest", type=int, default=1, help="the fewest nodes that train")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of a node")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    training = Training(
        steps=given.steps,
        pace=given.pace,
        local_steps=LocalSteps(given.every, codec=Int4(32)),
        members=given.nodes,
        fewest=given.fewest,
        first=given.nodes,
        waits=QUICK,
    )
    undisturbed, took = run(training, given.gpus)
    loss = undisturbed.held_out[0]
    print(f"undisturbed: loss {loss:.4f}, longest step {undisturbed.downtime:.1f} s, {took:.0f} s", flush=True)
    summaries = [soak(kind, training, given.gpus, given.kills, given.seed, loss) for kind in given.kinds]
    print(json.dumps(summaries, indent=1))
    whole = all(each["ended with all nodes equal"] == each["runs"] for each in summaries)
    agreed = all(each["agreed after every exchange"] == each["runs"] for each in summaries)
    if not (whole and agreed) or any(each["left something behind"] for each in summaries):
        sys.exit(1)


if __name__ == "__main__":
    main()
