"""Which strategies a run tries, what they are, and which it leaves out because they can't fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_zpp import NF4, Int4Delta, Int8, Strategy
from fsdp_zpp.bench.arguments import named_contenders
from fsdp_zpp.bench.candidates import candidates
from fsdp_zpp.bench.contenders import NAMES, contender
from fsdp_zpp.bench.fitting import Planner
from fsdp_zpp.bench.links import Link, Links
from fsdp_zpp.bench.task import Task
from fsdp_zpp.planner.model_size import ModelSize, Unit, equal_units

CONFIG = SimpleNamespace()
FAST, PCIE, SOCKETS = Link(2000, 1990, 2010), Link(200, 199, 201), Link(20, 19, 21)


def planner(links: Links, free: float | None = None, size: ModelSize | None = None, **work: Any) -> Planner:
    """The planner of a run of a model of 1.3 B parameters."""
    task = Task(CONFIG, links.nodes, links.gpus_per_node, **work)
    return Planner(size or equal_units(1.3e9), task, links, free)


def test_one_node_tries_its_gpus_as_nodes() -> None:
    names = candidates(planner(Links(1, 2, None, FAST)), None)
    assert names[0] == "full_shard"
    assert "hybrid_shard" not in names
    assert {"zeropp-alone", "zeropp-delta-alone", "zeropp-GGG-alone"} <= set(names)
    assert all(name.endswith("-alone") for name in names[1:])


def test_several_nodes_try_hsdp_and_their_gpus_as_nodes_only_where_links_inside_are_slow() -> None:
    fast = candidates(planner(Links(2, 4, SOCKETS, FAST)), None)
    assert fast[:4] == ["full_shard", "hybrid_shard", "zeropp", "zeropp-delta"]
    assert not [name for name in fast if name.endswith("-alone")]
    assert "zeropp-alone" in candidates(planner(Links(2, 4, SOCKETS, PCIE)), None)


def test_accumulation_adds_those_that_reduce_between_nodes_once_a_step() -> None:
    links = Links(2, 4, SOCKETS, FAST)
    assert {"zeropp-IIG", "zeropp-delta-IIG"} <= set(candidates(planner(links, micro_batches=4), None))
    assert "zeropp-delta-IIG" not in candidates(planner(links), None)


def test_the_planners_first_are_tried_once_whatever_their_letters() -> None:
    """On nodes of one, I is N: five letters of zeropp are two."""
    links = Links(2, 1, SOCKETS, None)
    names = candidates(planner(links), None)
    found = [contender(name) for name in names if name.startswith("zeropp-") and len(name) == len("zeropp-IGG")]
    topology = planner(links).best(1)[0].topology
    scopes = [one.strategy.resolve(topology).scopes for one in found]
    assert len(scopes) == len(set(scopes)) >= 2


def test_adapters_try_sharded_and_whole_bases() -> None:
    links, size = Links(1, 2, None, FAST), ModelSize((Unit(10, 10**6, 4),))
    names = candidates(planner(links, size=size, lora=16), None)
    assert names[0] == "full_shard"
    assert {"once-zeropp", "once-zeropp-int4", "once-zeropp-alone", "once-zeropp-int4-alone", "mixzpp"} <= set(names)
    of_one = ["full_shard", "once-zeropp-nf4", "once-zeropp-nf4-alone", "mixzpp-nf4"]
    assert candidates(planner(links, size=size, lora=16), "nf4") == of_one
    on_nodes = candidates(planner(Links(2, 4, SOCKETS, FAST), size=size, lora=16), "int8")
    assert on_nodes == ["full_shard", "hybrid_shard", "once-zeropp", "mixzpp"]


def test_names_make_the_strategies_that_their_code_makes() -> None:
    known = {"Strategy": Strategy, "Int4Delta": Int4Delta, "Int8": Int8, "NF4": NF4}
    for name in ("zeropp", "zeropp-delta-IIG", "IIG", "zeropp-GGG-alone", "mixzpp-nf4", "loco"):
        one = contender(name)
        assert eval(one.code, known) == one.strategy
    assert contender("zeropp-alone").strategy.gpus_per_node == 1
    assert contender("once-zeropp-nf4").base == NF4()
    assert contender("once-zeropp").code == (
        "quantize_frozen_params(model, Int8(256)), then wrap the whole model once by Strategy.zeropp()"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_of_a_strategy(name: str) -> None:
    one = contender(name)
    assert one.is_torchs or isinstance(one.strategy, Strategy)
    assert one.label


def test_strategies_are_told_the_size_of_a_node_that_was_given() -> None:
    full, plain, alone = named_contenders("full_shard,zeropp,fsdp1:zeropp-alone", 4, lora=False)
    assert full.is_torchs
    assert (plain.strategy.gpus_per_node, alone.strategy.gpus_per_node) == (4, 1)
    assert (plain.fsdp2, alone.fsdp2) == (True, False)
    assert named_contenders("zeropp", None, lora=False)[0].strategy == Strategy.zeropp()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("zeroqq", "'zeroqq' is not a strategy; allowed are full_shard, "),
        ("full_shard-alone", "'full_shard-alone' is not a strategy"),
        ("zeropp,mixzpp", "--strategies mixzpp is for a frozen base, which --lora has"),
        ("once-zeropp", "--strategies once-zeropp is for a frozen base"),
    ],
)
def test_names_that_make_no_strategy_are_refused(names: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        named_contenders(names, None, lora=False)


def test_what_cannot_fit_is_left_out_with_both_figures() -> None:
    links = Links(2, 4, SOCKETS, FAST)
    made = planner(links, free=6.0)
    assert made.does_not_fit(contender("full_shard"), 0.0) == ""
    needed = made.states_gib(contender("NNN"))
    assert needed is not None
    assert made.does_not_fit(contender("NNN"), 1.0) == f"left out: needs about {needed + 1:.1f} GiB, 6.0 are free"
    assert made.does_not_fit(contender("full_shard"), 6.0)  # activations count, too
    assert planner(links).does_not_fit(contender("NNN"), 1e9) == ""  # no limit is known on CPUs


def test_memory_is_the_planners() -> None:
    links = Links(2, 4, SOCKETS, FAST)
    made = planner(links)
    # The planner adds activations and a reserve, of 2 GiB each.
    by_levels = {one.levels: one.memory.total / 2**30 - 4 for one in made.best(4)}
    assert made.states_gib(contender("IIG")) == pytest.approx(by_levels["IIG"])
    assert made.states_gib(contender("full_shard")) == pytest.approx(by_levels["GGG"])
    assert made.states_gib(contender("hybrid_shard")) == pytest.approx(by_levels["III"])
    alone = made.states_gib(contender("zeropp-alone"))
    assert alone == made.states_gib(contender("zeropp").on_nodes_of(1))
    # Whole gradients of all but the last micro-batch, in bf16; the shard's in fp32 come after them.
    accumulating = planner(links, micro_batches=4)
    gradients = (2 - 4 / 8) * 1.3e9 / 2**30
    assert accumulating.states_gib(contender("full_shard")) == pytest.approx(by_levels["GGG"] + gradients)
    assert made.states_gib(contender("diloco-8")) is None


def test_a_base_takes_its_codes_once_whole_or_sharded() -> None:
    links, size = Links(1, 4, None, FAST), ModelSize((Unit(10**4, 10**8, 10),))
    made = planner(links, size=size, lora=16)
    whole, sharded = made.states_gib(contender("once-zeropp-alone")), made.states_gib(contender("once-zeropp"))
    assert whole is not None
    assert sharded is not None
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


def test_bytes_of_torchs_strategies_are_planned_by_hop() -> None:
    made = planner(Links(2, 4, SOCKETS, FAST), micro_batches=2)
    full, hsdp = (made.sent(contender(name))["sent_mib_a_step"] for name in ("full_shard", "hybrid_shard"))
    assert full["inter"] > hsdp["inter"] > 0


def test_links_of_nodes_of_one_are_those_inside_the_node() -> None:
    one = Links(1, 4, None, PCIE)
    assert one.layout_of(1) == Links(4, 1, PCIE, None)
    assert one.layout_of(None) is one
    assert Links(2, 4, SOCKETS, FAST).layout_of(1) == Links(8, 1, SOCKETS, None)


def test_noisy_links_have_a_warning() -> None:
    assert len(Links(1, 4, None, PCIE).lines()) == 2
    noisy = Links(1, 4, None, Link(200, 120, 210)).lines()
    assert noisy[1] == "inside a node, a rank: 200 Gbit/s (120 to 210)"
    assert noisy[2].startswith("warning: that link is noisy (45% between rounds)")
