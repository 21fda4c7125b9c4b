"""The table on README's first screen: a line for each training, under torch's strategies and under ours."""

from __future__ import annotations

from dataclasses import dataclass

from markdown_tables import markdown
from result_files import Result, Row

Results = dict[str, Result]
HEAD = ("training", "FULL_SHARD, ms", "HSDP, ms", "fsdp_zpp, ms", "against FULL_SHARD", "against HSDP")


@dataclass(frozen=True)
class Training:
    """One line.

    Attributes:
        title: What is trained, on which machines.
        run: Name of the result.
        full_shard: Name of FULL_SHARD there.
        ours: Names of our strategies there, by what the page calls them beside the first.
    """

    title: str
    run: str
    full_shard: str
    ours: dict[str, str]


ZEROPP = {"": "fsdp2:zeropp", "with deltas": "fsdp2:zeropp-delta"}
ALONE = {name: f"{strategy}-alone" for name, strategy in ZEROPP.items()}
TRAININGS = (
    Training("Llama 1.35B, 2 nodes of 2", "1.35B-2x2-eager", "fsdp2:full_shard", ZEROPP),
    Training("Llama 6.7B, 2 nodes of 2", "6.7B-2x2", "fsdp2:full_shard", ZEROPP),
    Training("LoRA of 6.7B, 2 nodes of 2", "lora-6.7B-2x2", "full_shard", {"": "fsdp2:once-zeropp"}),
    Training("mixture of experts, 2.6B, 2 nodes of 1", "moe-2.6B-2x1", "fsdp2:full_shard", ZEROPP),
    Training("Llama 6.7B, 1 machine of 4 without NVLink", "6.7B-1x4-no-p2p", "fsdp2:full_shard", ALONE),
)
HSDP = "fsdp2:hybrid_shard"


def table(results: Results) -> str:
    """Return the table; a line without HSDP is of a run in which HSDP is the same as replicating."""
    return markdown(HEAD, (_line(training, results[training.run]["rows"]) for training in TRAININGS))


def _line(training: Training, rows: list[Row]) -> list[str]:
    times = {row["strategy"]: row["step_ms"] for row in rows if "step_ms" in row}
    ours = {name: times[strategy] for name, strategy in training.ours.items()}
    full_shard, hsdp = times[training.full_shard], times.get(HSDP)
    steps = ", ".join(f"{name} {step:.0f}".strip() for name, step in ours.items())
    against = [_range([other / step for step in ours.values()]) if other else "" for other in (full_shard, hsdp)]
    return [training.title, f"{full_shard:.0f}", f"{hsdp:.0f}" if hsdp else "", steps, *against]


def _range(ratios: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{ratio:.1f}x" for ratio in sorted(ratios)))
