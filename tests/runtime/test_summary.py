"""Summary of a strategy: what of it is active on a layout, and what is not and why.

adapters/test_training_laws.py has the line that a model logs of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness import models
from harness.adapter import STOCK, Adapter
from harness.covering import over_adapters
from harness.messages import collected
from harness.pool import Pool
from harness.strategies import BOTH, COARSE, INSIDE_WITH_FEEDBACK

from fsdp_zpp import Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.runtime.summary import Coverage, StrategySummary, summarize

ONE, ALONE = Topology(4, 4), Topology(1, 1)
DELTA = Strategy("IGG", weights=Int4Delta(64, whole=Int8(64)), gpus_per_node=2)


def on(topology: Topology, strategy: Strategy, error_nbytes: int = 0) -> StrategySummary:
    return summarize(strategy, strategy.resolve(topology), error_nbytes)


def test_a_summary_names_what_is_inactive_and_why() -> None:
    zeropp = Strategy.zeropp()
    two_nodes = on(Topology(4, 2), zeropp)
    assert len(two_nodes.active) == 4
    assert not two_nodes.inactive
    assert str(on(ONE, zeropp)) == (
        "weights gathered in full precision; gradients reduced in full precision; "
        "NOT active: weights gathered as int8(256), gradients reduced as int4(128) "
        "(one node: no gain on fast links; on slow ones, say gpus_per_node=1); "
        "secondary shard of the weights kept in each node (one node: no inter-node hop)"
    )
    # A codec that was derived is not missed without its hop; one that was asked for is.
    assert not on(Topology(4, 1), zeropp).inactive
    assert "no intra-node hop" in str(on(Topology(4, 1), Strategy.zeropp(intra_gradients=Int8(128))))
    (alone,) = on(Topology(1, 1), zeropp).inactive
    assert alone.endswith("gradients reduced as int4(128) on the inter-node hop (one rank: nothing is sent)")
    assert on(Topology(4, 2), Strategy()).active == (
        "weights gathered in full precision",
        "gradients reduced in full precision",
    )


def test_error_feedback_is_active_on_each_hop_by_itself() -> None:
    inside = on(ONE, INSIDE_WITH_FEEDBACK, 1024)
    assert "gradients reduced as int8(64) on the intra-node hop" in inside.active
    assert (
        "error feedback on the intra-node hop (beta 0.8, reset every 1024 steps, kept in fp32; 1 KiB a rank)"
        in inside.active
    )
    assert "error feedback on the inter-node hop (one node: no inter-node hop)" in inside.inactive
    assert on(ONE, Strategy("GGG", intra_gradients=Int8(64))).inactive == ()
    assert all("one rank: nothing is sent" in text for text in on(ALONE, Strategy.loco()).inactive)
    both = on(Topology(4, 2), replace(COARSE, error_feedback=BOTH), 1536)
    assert (
        "error feedback on both hops (beta 0.8, reset every 1024 steps, kept in int8(32); 1.5 KiB a rank)"
        in both.active
    )


def test_weights_as_differences_are_named_with_both_codecs() -> None:
    across, on_one_node = (on(topology, DELTA) for topology in (Topology(4, 2), ONE))
    assert "weights gathered as int8(64), changes as int4(64)" in across.active
    assert across.inactive == ()
    assert on_one_node.inactive[0].startswith("weights gathered as int8(64), changes as int4(64) (one node: no gain")


def partly(adapter: Adapter) -> list[tuple[str, str]]:
    """In a worker: what a model logs of which only the root has a strategy, the blocks being torch's own."""
    with collected() as records:
        net = models.make_net()
        for i, block in enumerate(net.blocks):
            net.blocks[i] = adapter.wrap(block, STOCK)
        adapter.wrap(net, Strategy.zeropp(gpus_per_node=2))(models.batch(0, 0) % 61)
    return records


@over_adapters
def test_the_line_says_which_share_of_a_model_has_the_strategy(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    net = models.Net()
    numel = sum(p.numel() for p in net.parameters())
    own = numel - sum(p.numel() for p in net.blocks.parameters())
    [(level, line)] = pool(4).run(partly, adapter)[0]
    assert level == "INFO"
    share = f"1 of 4 units, {100 * own / numel:.0f} % of parameters"
    assert line.startswith(f"Net: IGG on 2 nodes x 2, {share}: weights gathered as int8(256); ")


def test_a_share_is_not_rounded_to_all_or_nothing() -> None:
    assert str(Coverage(4, 10, 4, 10)) == "4 units"
    assert str(Coverage(1, 0, 1, 0)) == "1 unit"
    assert str(Coverage(1, 18, 5, 100)) == "1 of 5 units, 18 % of parameters"
    assert str(Coverage(1, 1, 5, 1000)) == "1 of 5 units, under 1 % of parameters"
    assert str(Coverage(4, 999, 5, 1000)) == "4 of 5 units, over 99 % of parameters"
    assert str(Coverage(1, 0, 5, 1000)) == "1 of 5 units, 0 % of parameters"


def test_reductions_of_synchronous_and_of_local_steps_are_told_apart() -> None:
    strategy = Strategy("III", gradients=Int4(128), error_feedback=LoCo(), local_steps=LocalSteps(8, start=100))
    found = summarize(strategy, strategy.resolve(Topology(4, 2)))
    assert not found.inactive
    assert found.active[1:5] == (
        "gradients reduced as int8(128) on the intra-node hop in synchronous steps",
        "gradients reduced as int4(128) on the inter-node hop in synchronous steps",
        "gradients reduced in full precision in local steps",
        f"local steps, weights exchanged between nodes {strategy.local_steps}",
    )
    assert found.active[5].startswith("error feedback on the inter-node hop")
    assert "local steps, weights" in str(summarize(strategy, strategy.resolve(Topology(4, 4))).inactive)
    one_gpu_nodes = summarize(strategy, strategy.resolve(Topology(4, 1)))
    assert not any(text.endswith("in local steps") for text in one_gpu_nodes.active)
