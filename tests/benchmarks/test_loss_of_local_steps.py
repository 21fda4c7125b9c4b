"""The study of what local steps do to the loss: on two processes as two nodes, its names, its tables and its figure."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from harness.benchmarks import load, tiny_study
from harness.launch import launch

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo, TopK

configurations = load("loss", "configurations")
local_gaps = load("loss", "local_gaps")


def diloco(**options: Any) -> LocalSteps:
    """Local steps with DiLoCo's momentum."""
    return LocalSteps(outer_momentum=0.9, **options)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("local32:none", diloco(every=32, codec=None)),
        ("local128:int8", diloco(every=128, codec=Int8(128))),
        ("local8:int4", diloco(every=8, codec=Int4(128))),
        ("local32:int4+loco", diloco(every=32, codec=Int4(128), error_feedback=LoCo(beta=0.8))),
        ("local32:int4:at-once", diloco(every=32, codec=Int4(128), spread=False)),
        ("local32:int4:overlap1:mix0.5", diloco(every=32, codec=Int4(128), overlap=1, mix=0.5)),
        ("local32:int4:outer0.5:momentum0.8", LocalSteps(every=32, codec=Int4(128), outer_lr=0.5, outer_momentum=0.8)),
        ("local32:none:momentum-auto", LocalSteps(every=32, codec=None, outer_momentum="auto")),
        ("local8-1024-32:int4:start256", diloco(every=((0, 8), (1024, 32)), codec=Int4(128), start=256)),
        ("local32:int4:moments3", diloco(every=32, codec=Int4(128), moments_every=3)),
        (
            "local32:topk+loco",
            LocalSteps(
                every=32,
                codec=TopK(),
                error_feedback=LoCo(beta=0, decay=0.95, reset_every=0),
                outer_lr=1,
                outer_momentum=0,
                nesterov=False,
            ),
        ),
        (
            "local32:int4:outer1:momentum0",
            LocalSteps(every=32, codec=Int4(128), outer_lr=1, outer_momentum=0, nesterov=False),
        ),
    ],
)
def test_names_say_how_nodes_exchange(name: str, meant: LocalSteps) -> None:
    assert configurations.local_steps(name) == meant


def test_a_name_gives_a_strategy_with_local_steps() -> None:
    strategy = configurations.sharding("local32:int4+loco", 1)
    assert strategy.local_steps == configurations.local_steps("local32:int4+loco")
    for name in local_gaps.LOCAL_NAMES:
        configurations.sharding(name, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--configs int4", "'int4' is unknown"),
        ("--configs local32:int5", "'local32:int5' is unknown"),
        ("--configs local32:int4:later3", "changes 'later'"),
        ("--configs local32:none+loco", "error_feedback corrects the error of the codec"),
        ("--configs full_shard@fast", "could not convert string to float"),
    ],
)
def test_unknown_names_are_refused(options: str, message: str) -> None:
    refused = launch(1, "benchmarks/loss/run.py", "local-steps", *options.split(), on_cpu=True)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_trains_on_two_nodes_what_is_not_there_yet(tmp_path: Path) -> None:
    options = [*tiny_study(), "--validate-every", "4", "--output", str(tmp_path)]
    for names in ("full_shard@1e-2", "full_shard@1e-2,full_shard,local3:int4+loco,local3:none:at-once:overlap1"):
        command = ("local-steps", "--worker", *options, "--configs", names, "--lr", "5e-3")
        done = launch(2, "benchmarks/loss/run.py", *command, on_cpu=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2x1-full_shard-lr0.005, seed 0: ")
    results = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results.keys() == {
        "2x1-full_shard-lr0.01-seed0.json",
        "2x1-full_shard-lr0.005-seed0.json",
        "2x1-local3-int4+loco-lr0.005-seed0.json",
        "2x1-local3-none-at-once-overlap1-lr0.005-seed0.json",
    }
    assert {result["arguments"]["lr"] for result in results.values()} == {5e-3, 1e-2}
    rows = [results[name]["rows"][0] for name in sorted(results)]
    assert len({tuple(row["validation"][0]) for row in rows}) == 1  # the same weights
    for row in rows:
        losses = [loss for _, loss in row["validation"]]
        assert len(losses) == 3
        assert losses[-1] < losses[0]
        # A last exchange changes what nodes agree on, and FULL_SHARD has none.
        assert (row["before_last_exchange"] is None) == (row["name"] == "full_shard")
        assert row["before_last_exchange"] != losses[-1]
    at_once = rows[-1]
    assert at_once["name"] == "local3:none:at-once:overlap1"
    # After four of eight steps nodes agree on the exchange after the third.
    assert at_once["validation"][1][1] != at_once["validation"][0][1]


def record(name: str, lr: float, seed: int, loss: float, nodes: int = 2) -> dict[str, Any]:
    """What a run leaves, as far as tables go."""
    row = {"name": name, "seed": seed, "parameters": 25.7e6, "validation": [[0, 5.0], [1000, loss]]}
    return {"arguments": {"nodes": nodes, "lr": lr}, "rows": [row]}


RECORDS = [
    record("full_shard", 1e-3, 0, 1.0),
    record("full_shard", 2e-3, 0, 0.9),
    record("full_shard", 2e-3, 1, 0.8),
    record("local32:int4", 1e-3, 0, 0.99),
    record("local8:int4", 1e-3, 0, 0.909),
    record("local8:int4", 1e-3, 1, 0.816),
    record("local8:int4", 2e-3, 0, math.nan),
    record("full_shard", 2e-3, 0, 2.0, nodes=4),
    record("local32:int4+loco:overlap1", 1e-3, 0, 2.02, nodes=4),
    record("local32:int4+loco", 1e-3, 0, 2.01, nodes=4),
]


def test_gaps_are_between_the_best_learning_rates_on_as_many_nodes() -> None:
    assert local_gaps.table(RECORDS).splitlines()[2:] == [
        "| 2 | full_shard | 0.002 | 2 | 0.8500 ± 0.0707 |  |",
        "| 2 | local8:int4 | 0.001 | 2 | 0.8625 ± 0.0658 | +1.50 ± 0.71 |",
        "| 2 | local32:int4 | 0.001 | 1 | 0.9900 | +10.00 |",
        "| 4 | full_shard | 0.002 | 1 | 2.0000 |  |",
        "| 4 | local32:int4+loco | 0.001 | 1 | 2.0100 | +0.50 |",
        "| 4 | local32:int4+loco:overlap1 | 0.001 | 1 | 2.0200 | +1.00 |",
    ]


def test_learning_rates_are_compared_on_the_same_seeds() -> None:
    assert local_gaps.learning_rates(RECORDS).splitlines() == [
        "| nodes | configuration | seeds | lr 0.001 | lr 0.002 |",
        "|---|---|---|---|---|",
        "| 2 | full_shard | 0 | 1.0000 | **0.9000** |",
        "| 2 | local8:int4 | 0 | **0.9090** | nan |",
    ]


def test_without_a_common_seed_the_learning_rate_with_most_seeds_counts() -> None:
    tuned = local_gaps.TunedRuns(
        [record("full_shard", 1e-3, 0, 1.0), *(record("full_shard", 2e-3, seed, 2.0) for seed in (1, 2))]
    )
    assert tuned.rates == {"full_shard": 2e-3}


def test_runs_on_different_texts_are_not_compared() -> None:
    other = record("local32:int4", 1e-3, 0, 0.9)
    other["arguments"]["text"] = "another"
    with pytest.raises(ValueError, match=r"different settings can't be compared: \[\('text', 'another'\)\]"):
        local_gaps.table([*RECORDS, other])


def test_draws_what_was_trained_at_three_places_or_more_and_says_it_in_words() -> None:
    figures = load("loss", "local_figures")
    some = [record(f"local{every}:int4+loco:at-once", 1e-3, 0, 1 + every / 100) for every in (8, 32)]
    started = [record(f"local32:none:start{start}", 1e-3, 0, 1.5, nodes=4) for start in (4, 8)]

    def drawn(*more: dict[str, Any]) -> str:
        return "".join(re.findall(r"<text[^>]*>([^<]*)</text>", figures.local_steps_svg(local_gaps.by_nodes(more))))

    assert drawn(*RECORDS, *some, *started) == ""
    more = record("local128:int4+loco:at-once", 1e-3, 0, 1.35)
    assert "4 bits, error feedback, exchanged at once" in drawn(*RECORDS, *some, more)
    assert "+50.0" in drawn(*RECORDS, *some, more)  # 1.35 where the reference has 0.9
    steady = record("local32:none", 1e-3, 0, 1.9, nodes=4)
    text = drawn(*RECORDS, *some, *started, steady)
    assert "4 nodes, full precision, every 32 steps" in text
    assert "Synchronous steps at the start" in text
    assert "25.7 M parameters" in text
