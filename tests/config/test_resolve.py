"""Layouts, and a strategy resolved on one: on one node, codecs for the slow network are off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.strategies import INSIDE, INSIDE_WITH_FEEDBACK, PRESETS

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo, Strategy
from fsdp_zpp.config.topology import Topology

ONE = Topology(4, 4)


@pytest.mark.parametrize(("world", "gpus"), [(4, 3), (6, 4), (2, 4), (4, 0)])
def test_gpus_per_node_must_divide_the_world(world: int, gpus: int) -> None:
    with pytest.raises(ValueError, match=f"a world of {world} and gpus_per_node={gpus}; allowed are"):
        Topology(world, gpus)


def test_hops_join_the_ranks_of_a_node_and_those_of_one_local_index() -> None:
    topology = Topology(6, 2)
    assert topology.intra_partition() == [[0, 1], [2, 3], [4, 5]]
    assert topology.inter_partition() == [[0, 2, 4], [1, 3, 5]]


def test_on_one_node_only_codecs_named_for_it_are_active() -> None:
    for strategy in PRESETS.values():
        resolved = strategy.resolve(ONE)
        assert (resolved.weights, resolved.gradient_codecs, resolved.error_feedback) == (None, (None, None), None)
        assert "".join(resolved.scopes) == "GGG"
        for topology in (Topology(4, 2), Topology(4, 1)):
            resolved = strategy.resolve(topology)
            assert resolved.weights == strategy.weights
            assert resolved.gradient_codecs == strategy.gradient_codecs
            assert resolved.error_feedback == strategy.error_feedback
    assert Strategy.mixzpp().resolve(ONE).frozen == Int8(256)
    for feedback in (INSIDE_WITH_FEEDBACK.error_feedback, None):
        resolved = replace(INSIDE_WITH_FEEDBACK, error_feedback=feedback).resolve(ONE)
        assert resolved.gradient_codecs == (INSIDE_WITH_FEEDBACK.gradient_codecs[0], None)
        assert resolved.error_feedback == feedback
    assert replace(INSIDE, error_feedback=LoCo()).resolve(ONE).error_feedback is None


@pytest.mark.parametrize("levels", ["III", "INI", "NNN"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_on_its_own_a_node_has_neither_codecs_nor_errors_of_the_other_hop(levels: str, gpus: int) -> None:
    alone = Strategy(levels, local_steps=LocalSteps()).resolve(Topology(4, gpus)).within_node()
    for feedback in (None, LoCo(), LoCo(hops="both")):
        strategy = Strategy(levels, gradients=Int4(), error_feedback=feedback, local_steps=LocalSteps(start=8))
        assert replace(strategy.resolve(Topology(4, gpus)).within_node()) == alone
        named = replace(strategy, intra_gradients=Int8(32)).resolve(Topology(4, gpus)).within_node()
        assert named.gradient_codecs == (Int8(32), None)
        assert named.error_feedback == (feedback if feedback is not None and feedback.hops == "both" else None)
