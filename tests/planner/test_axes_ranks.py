"""Where the ranks of each axis lie."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

import pytest
from hypothesis import example, given, settings, strategies as st

from fsdp_zpp.config.topology import Topology
from fsdp_zpp.planner.axes import Axes
from fsdp_zpp.planner.config import Cluster

GBPS = {"inter_gbps": 100, "intra_gbps": 2400}


def groups_of(axes: Axes, world: int) -> dict[str, list[list[int]]]:
    """All groups of ranks along each axis, by going through the ranks."""
    stage, found = world // axes.pp, defaultdict(lambda: defaultdict(list))
    data = stage // (axes.tp * axes.cp)
    for rank, (pp, dp, cp, tp) in enumerate(product(*map(range, (axes.pp, data, axes.cp, axes.tp)))):
        ep, shard = (dp * axes.cp * axes.tp + cp * axes.tp + tp) % axes.ep, rank % stage // axes.ep
        found["dense"][pp, tp].append(rank)
        found["experts"][(pp, tp) if axes.ep == 1 else (pp, ep)].append(rank)
        found["tp"][pp, dp, cp].append(rank)
        found["cp"][pp, dp, tp].append(rank)
        found["ep"][pp, shard].append(rank)
        found["pp"][dp, cp, tp].append(rank)
    return {axis: list(groups.values()) for axis, groups in found.items()}


degree = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(deadline=None, max_examples=300)
@given(nodes=st.integers(1, 6), gpus=st.sampled_from([1, 2, 3, 4, 6, 8]), tp=degree, pp=degree, cp=degree, ep=degree)
@example(nodes=4, gpus=8, tp=2, pp=2, cp=2, ep=8)
@example(nodes=6, gpus=8, tp=8, pp=3, cp=1, ep=4)
def test_ranks_lie_where_going_through_them_finds_them(
    nodes: int, gpus: int, tp: int, pp: int, cp: int, ep: int
) -> None:
    axes, cluster = Axes(tp, pp, cp, ep), Cluster(nodes, gpus, **GBPS)
    world = nodes * gpus
    if world % (tp * pp * cp) or (world // pp) % ep:
        with pytest.raises(ValueError, match="does not divide the"):
            axes.check(cluster)
        return
    shares = {
        axis: {count for group in groups for count in Counter(rank // gpus for rank in group).values()}
        for axis, groups in groups_of(axes, world).items()
    }
    if any(len(counts) > 1 for counts in shares.values()):
        with pytest.raises(ValueError, match="do not lie on nodes of"):
            axes.check(cluster)
        return
    axes.check(cluster)
    found = {"dense": axes.dense_ranks(cluster), "experts": axes.expert_ranks(cluster), **axes.others(cluster)}
    for axis, ranks in found.items():
        (share,) = shares[axis]
        assert ranks.topology(cluster) == Topology(len(groups_of(axes, world)[axis][0]), share), axis
