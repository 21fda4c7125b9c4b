"""What rows of a run say to do, over rows that no machine has measured."""

from __future__ import annotations

from typing import Any

from fsdp_zpp.bench.contenders import contender
from fsdp_zpp.bench.recommendation import is_clearly_faster, recommend


def row(name: str, ms: float, peak: float | None = 10.0, spread: float = 0.01) -> dict[str, Any]:
    """A row whose steps differ by ``spread`` of their median."""
    return named(name) | {
        "step_ms": ms,
        "fastest_ms": ms * (1 - spread),
        "slowest_ms": ms * (1 + spread),
        "quartiles_ms": [ms * (1 - spread / 2), ms * (1 + spread / 2)],
        "peak_gib": peak,
    }


def failed(name: str, why: str = "out of memory") -> dict[str, Any]:
    """A row of a strategy that failed on some rank."""
    return named(name) | {"failed": why}


def named(name: str) -> dict[str, Any]:
    one = contender(name)
    return {"strategy": name, "label": one.label, "code": one.code, "is_torchs": one.is_torchs}


def test_the_line_names_what_to_paste_and_the_gain_over_both_of_torchs() -> None:
    rows = [row("full_shard", 907, 51.5), row("hybrid_shard", 660, 60), row("zeropp-alone", 343, 52.7)]
    made = recommend(rows)
    assert made.strategy == "zeropp-alone"
    assert made.line == "use Strategy.zeropp(gpus_per_node=1): 2.6x FULL_SHARD, 1.9x HSDP, +1.2 GiB"


def test_without_hsdp_and_on_cpus_the_line_leaves_them_out() -> None:
    made = recommend([row("full_shard", 300, None), row("zeropp", 200, None)])
    assert made.line == "use Strategy.zeropp(): 1.5x FULL_SHARD"


def test_a_gain_within_the_noise_is_none_and_the_line_says_by_how_much() -> None:
    made = recommend([row("full_shard", 100, spread=0.2), row("zeropp", 90, spread=0.2)])
    assert made.strategy == "full_shard"
    assert made.line == (
        "stay with FULL_SHARD: the best other, zeropp(), is 1.11x as fast, which is within the noise (FULL_SHARD's own "
        "steps differ by 40%)"
    )
    assert recommend([row("full_shard", 100), row("zeropp", 90)]).strategy == "zeropp"  # the same gain, without noise


def test_a_gain_of_a_hundredth_is_none_however_steady_the_steps() -> None:
    assert recommend([row("full_shard", 100, spread=0), row("zeropp", 99, spread=0)]).strategy == "full_shard"


def test_what_is_slower_is_no_reason_to_leave_full_shard() -> None:
    made = recommend([row("full_shard", 100), row("zeropp", 130), row("zeropp-delta", 120)])
    assert made.line == "stay with FULL_SHARD: the best other, zeropp(weights=Int4Delta()), is 1.20x slower"


def test_hsdp_is_recommended_where_nothing_beats_it() -> None:
    made = recommend([row("full_shard", 200), row("hybrid_shard", 100, 14.0), row("zeropp", 99)])
    assert made.strategy == "hybrid_shard"
    assert made.line == "use HSDP: 2.0x FULL_SHARD, +4.0 GiB"


def test_of_equals_the_first_is_taken_and_of_others_the_fastest() -> None:
    rows = [row("full_shard", 200), row("zeropp", 102), row("zeropp-delta", 100)]
    assert recommend(rows).strategy == "zeropp"
    rows[1] = row("zeropp", 110)
    assert recommend(rows).strategy == "zeropp-delta"


def test_noise_never_makes_it_take_what_is_much_slower() -> None:
    rows = [row("full_shard", 300), row("zeropp", 150, spread=0.5), row("zeropp-delta", 120, spread=0.5)]
    assert recommend(rows).strategy == "zeropp-delta"


def test_full_shard_that_runs_out_of_memory_has_no_ratio() -> None:
    rows = [failed("full_shard"), row("hybrid_shard", 210, 30), row("zeropp", 100, 20)]
    assert recommend(rows).line == "use Strategy.zeropp(): FULL_SHARD: out of memory, 2.1x HSDP"


def test_what_failed_on_some_rank_or_was_left_out_is_no_choice() -> None:
    rows = [
        row("full_shard", 200),
        failed("zeropp", "RuntimeError: on rank 1"),
        failed("hybrid_shard", "left out: ..."),
    ]
    assert recommend(rows).line == "stay with FULL_SHARD: nothing else could be measured"


def test_if_all_fail_it_says_why_and_chooses_nothing() -> None:
    made = recommend([failed("full_shard"), failed("zeropp", "not installed: peft")])
    assert made.strategy is None
    assert made.line == "nothing could be measured: FULL_SHARD: out of memory; zeropp(): not installed: peft"


def test_a_strategy_alone_has_no_one_to_compare_with() -> None:
    assert recommend([row("zeropp", 100)]).line == "use Strategy.zeropp(): 100 ms a step"


def test_faster_by_noise_is_not_clearly_faster() -> None:
    slow, fast = row("full_shard", 100, spread=0.1), row("zeropp", 92, spread=0.1)
    assert not is_clearly_faster(fast, slow)
    assert is_clearly_faster(row("zeropp", 80, spread=0.1), slow)
    assert not is_clearly_faster(slow, fast)
