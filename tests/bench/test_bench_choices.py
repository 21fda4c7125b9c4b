"""Strategies of a bench: which a run tries, which can't fit, and which its rows recommend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_zpp import NF4, Int4Delta, Int8, Strategy, plan
from fsdp_zpp.bench.contenders import NAMES, Links, Planner, candidates, contender, recommend
from fsdp_zpp.bench.results import Task
from fsdp_zpp.bench.run import named_contenders
from fsdp_zpp.planner.model_size import ModelSize, Unit, equal_units

CONFIG = SimpleNamespace()
FAST, PCIE, SOCKETS = 2000, 200, 20
BOX, TWO_NODES = Links(1, 2, None, FAST), Links(2, 4, SOCKETS, FAST)


def planner(links: Links, free: float | None = None, size: ModelSize | None = None, **work: Any) -> Planner:
    """The planner of a run of a model of 1.3 B parameters."""
    task = Task(CONFIG, links.nodes, links.gpus_per_node, **work)
    return Planner(size or equal_units(1.3e9), task, links, free)


# ---- what a run tries


def test_nodes_and_links_decide_what_is_tried() -> None:
    in_a_box = candidates(planner(BOX))
    assert in_a_box[0] == "full_shard"
    assert "hybrid_shard" not in in_a_box
    assert {"zeropp-alone", "zeropp-delta-alone", "zeropp-GGG-alone"} <= set(in_a_box)
    assert all(name.endswith("-alone") for name in in_a_box[1:])
    # Several nodes try their GPUs as nodes only where links inside are slow.
    on_nodes = candidates(planner(TWO_NODES))
    assert on_nodes[:4] == ["full_shard", "hybrid_shard", "zeropp", "zeropp-delta"]
    assert not [name for name in on_nodes if name.endswith("-alone")]
    assert "zeropp-alone" in candidates(planner(Links(2, 4, SOCKETS, PCIE)))
    # Those that the planner compares.
    assert set(on_nodes[4:]) == {"loco", "zeropp-GGG", "zeropp-NNG", "zeropp-III"}
    # Accumulation adds those that reduce between nodes once a step.
    assert {"zeropp-IIG", "zeropp-delta-IIG"} <= set(candidates(planner(TWO_NODES, micro_batches=4)))
    assert "zeropp-delta-IIG" not in on_nodes


def test_adapters_try_sharded_and_whole_bases() -> None:
    adapters: dict[str, Any] = {"size": ModelSize((Unit(10, 10**6, 4),)), "lora": 16}
    names = candidates(planner(BOX, **adapters))
    assert names[0] == "full_shard"
    assert {"once-zeropp", "once-zeropp-int4", "once-zeropp-alone", "once-zeropp-int4-alone", "mixzpp"} <= set(names)
    on_nodes = candidates(planner(TWO_NODES, **adapters))
    assert on_nodes[:3] == ["full_shard", "hybrid_shard", "once-zeropp"]
    assert not [name for name in on_nodes if name.endswith("-alone")]


def test_names_make_the_strategies_that_their_code_makes() -> None:
    known = {"Strategy": Strategy, "Int4Delta": Int4Delta, "Int8": Int8, "NF4": NF4}
    for name in ("zeropp", "zeropp-delta-IIG", "IIG", "zeropp-GGG-alone", "mixzpp-nf4", "loco"):
        one = contender(name)
        assert eval(one.code, known) == one.strategy
    assert all(contender(name).is_torchs or contender(name).strategy for name in NAMES)
    assert contender("zeropp-alone").strategy.gpus_per_node == 1
    once = contender("once-zeropp-nf4")
    assert once.base == NF4()
    assert once.code == "quantize_frozen_params(model, NF4(64)), then wrap the whole model once by Strategy.zeropp()"


def test_strategies_are_told_the_size_of_a_node_that_was_given() -> None:
    full, plain, alone = named_contenders("full_shard,zeropp,fsdp1:zeropp-alone", 4, lora=False)
    assert full.is_torchs
    assert (plain.strategy.gpus_per_node, alone.strategy.gpus_per_node) == (4, 1)
    assert (plain.fsdp2, alone.fsdp2) == (True, False)
    assert named_contenders("zeropp", None, lora=False)[0].strategy == Strategy.zeropp()
    with pytest.raises(ValueError, match=r"^'full_shard-alone' is not a strategy; allowed are full_shard, "):
        named_contenders("full_shard-alone", None, lora=False)
    with pytest.raises(ValueError, match=r"^--strategies mixzpp is for a frozen base, which --lora has"):
        named_contenders("zeropp,mixzpp", None, lora=False)


# ---- what fits


def test_what_cannot_fit_is_left_out_with_both_figures() -> None:
    made = planner(TWO_NODES, free=6.0)
    assert made.does_not_fit(contender("full_shard"), 0.0) == ""
    needed = made.states_gib(contender("NNN"))
    assert made.does_not_fit(contender("NNN"), 1.0) == f"left out: needs about {needed + 1:.1f} GiB, 6.0 are free"
    assert made.does_not_fit(contender("full_shard"), 6.0)  # activations count, too
    assert planner(TWO_NODES).does_not_fit(contender("NNN"), 1e9) == ""  # no limit is known on CPUs


def test_memory_is_the_planners() -> None:
    made = planner(TWO_NODES)
    layout = {"nodes": 2, "gpus_per_node": 4, "inter_gbps": 20, "intra_gbps": 2000, "presets": False}
    # The planner adds activations and a reserve, of 2 GiB each.
    by_levels = {one.levels: one.memory.total / 2**30 - 4 for one in plan(made.size, **layout).estimates}
    for name, levels in {"IIG": "IIG", "full_shard": "GGG", "hybrid_shard": "III"}.items():
        assert made.states_gib(contender(name)) == pytest.approx(by_levels[levels])
    assert made.states_gib(contender("zeropp-alone")) == made.states_gib(contender("zeropp").on_nodes_of(1))
    # Whole gradients of all but the last micro-batch, in bf16; the shard's in fp32 come after them.
    gradients = (2 - 4 / 8) * 1.3e9 / 2**30
    accumulating = planner(TWO_NODES, micro_batches=4).states_gib(contender("full_shard"))
    assert accumulating == pytest.approx(by_levels["GGG"] + gradients)


def test_a_base_takes_its_codes_once_whole_or_sharded() -> None:
    made = planner(Links(1, 4, None, FAST), size=ModelSize((Unit(10**4, 10**8, 10),)), lora=16)
    whole, sharded = (made.states_gib(contender(name)) for name in ("once-zeropp-alone", "once-zeropp"))
    codes = Int8().nbytes(10**9) / 2**30
    assert sharded == made.states_gib(contender("mixzpp"))
    # Three quarters of them are elsewhere, and two of ten units are in flight.
    assert whole - sharded == pytest.approx((0.75 - 0.2) * codes, rel=0.01)


def test_slow_links_split_the_machine_for_strategies_that_name_no_node_size() -> None:
    slow = planner(Links(1, 4, None, PCIE, are_slow=True))
    assert slow.states_gib(contender("zeropp")) == slow.states_gib(contender("zeropp-alone"))
    fast = planner(Links(1, 4, None, FAST))
    assert fast.states_gib(contender("zeropp")) != fast.states_gib(contender("zeropp-alone"))
    assert fast.states_gib(contender("hybrid_shard")) == fast.states_gib(contender("full_shard"))


# ---- what rows recommend


def row(name: str, ms: float, peak: float | None = 10.0, spread: float = 0.01) -> dict[str, Any]:
    """A row whose steps differ by ``spread`` of their median."""
    extremes = {"fastest_ms": ms * (1 - spread), "slowest_ms": ms * (1 + spread)}
    quartiles = [ms * (1 - spread / 2), ms * (1 + spread / 2)]
    return named(name, step_ms=ms, quartiles_ms=quartiles, peak_gib=peak, **extremes)


def named(name: str, **others: Any) -> dict[str, Any]:
    one = contender(name)
    return {"strategy": name, "label": one.label, "code": one.code, "is_torchs": one.is_torchs, **others}


def line(*rows: dict[str, Any]) -> str:
    return recommend(list(rows)).line


def chosen(*rows: dict[str, Any]) -> str | None:
    return recommend(list(rows)).strategy


def test_the_line_names_what_to_paste_and_the_gain_over_both_of_torchs() -> None:
    rows = row("full_shard", 907, 51.5), row("hybrid_shard", 660, 60), row("zeropp-alone", 343, 52.7)
    assert chosen(*rows) == "zeropp-alone"
    assert line(*rows) == "use Strategy.zeropp(gpus_per_node=1): 2.6x FULL_SHARD, 1.9x HSDP, +1.2 GiB"
    assert line(row("full_shard", 300, None), row("zeropp", 200, None)) == "use Strategy.zeropp(): 1.5x FULL_SHARD"
    assert line(row("zeropp", 100)) == "use Strategy.zeropp(): 100 ms a step"
    hsdp = row("full_shard", 200), row("hybrid_shard", 100, 14.0), row("zeropp", 99)
    assert line(*hsdp) == "use HSDP: 2.0x FULL_SHARD, +4.0 GiB"


def test_a_gain_within_the_noise_is_none_and_the_line_says_by_how_much() -> None:
    noisy = row("full_shard", 100, spread=0.2), row("zeropp", 90, spread=0.2)
    assert line(*noisy) == (
        "stay with FULL_SHARD: the best other, zeropp(), is 1.11x as fast, which is within the noise (FULL_SHARD's own "
        "steps differ by 40%)"
    )
    assert chosen(row("full_shard", 100), row("zeropp", 90)) == "zeropp"  # the same gain, without noise
    assert chosen(row("full_shard", 100, spread=0), row("zeropp", 99, spread=0)) == "full_shard"  # a hundredth
    slower = row("full_shard", 100), row("zeropp", 130), row("zeropp-delta", 120)
    assert line(*slower) == "stay with FULL_SHARD: the best other, zeropp(weights=Int4Delta()), is 1.20x slower"


def test_of_equals_the_first_is_taken_and_of_others_the_fastest() -> None:
    full, delta = row("full_shard", 200), row("zeropp-delta", 100)
    assert chosen(full, row("zeropp", 102), delta) == "zeropp"
    assert chosen(full, row("zeropp", 110), delta) == "zeropp-delta"
    # Noise never makes it take what is much slower.
    noisy = row("zeropp", 150, spread=0.5), row("zeropp-delta", 120, spread=0.5)
    assert chosen(row("full_shard", 300), *noisy) == "zeropp-delta"


def test_what_failed_is_named_and_no_choice() -> None:
    full = named("full_shard", failed="out of memory")
    assert line(full, row("hybrid_shard", 210, 30), row("zeropp", 100, 20)) == (
        "use Strategy.zeropp(): FULL_SHARD: out of memory, 2.1x HSDP"
    )
    others = named("zeropp", failed="not installed: peft"), named("hybrid_shard", failed="left out: ...")
    assert line(row("full_shard", 200), *others) == "stay with FULL_SHARD: nothing else could be measured"
    assert chosen(full, others[0]) is None
    assert line(full, others[0]) == (
        "nothing could be measured: FULL_SHARD: out of memory; zeropp(): not installed: peft"
    )
