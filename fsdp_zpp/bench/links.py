"""The links of the running job: measured several times, to know how far to trust them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from fsdp_zpp.collectives.links import find_links
from fsdp_zpp.planner.bandwidth import Bandwidth, measure_bandwidth, world

_ROUNDS = 3
_MIB = {"cuda": 128, "cpu": 8}
_NOISY = 0.2
"""Spread of the rounds, as a share of their median, from which links count as noisy."""


@dataclass(frozen=True)
class Link:
    """The speed of a hop.

    Attributes:
        gbps: Gbit/s, the median of the rounds.
        lowest: Gbit/s of the slowest round.
        highest: Gbit/s of the fastest.
    """

    gbps: float
    lowest: float
    highest: float

    @property
    def spread(self) -> float:
        """Return the range of the rounds as a share of their median."""
        return (self.highest - self.lowest) / self.gbps

    def __str__(self) -> str:
        return f"{self.gbps:,.4g} Gbit/s ({self.lowest:,.4g} to {self.highest:,.4g})"


@dataclass(frozen=True)
class Links:
    """Both hops, and the layout that they were measured on.

    Attributes:
        nodes: Number of nodes.
        gpus_per_node: Ranks of each.
        inter: A whole node to the others; None if there is one node.
        intra: A rank to the others of its node; None if a node has one rank.
        are_slow: Whether the machine says that it has no NVLink, so that strategies may split it, as in training.
    """

    nodes: int
    gpus_per_node: int
    inter: Link | None
    intra: Link | None
    are_slow: bool = False

    def layout_of(self, gpus_per_node: int | None) -> Links:
        """Return the links with another number of ranks counted as a node, as far as these tell.

        If ranks of one node count as nodes, what they send each other goes over the links that are inside the node.
        """
        if gpus_per_node is None or gpus_per_node == self.gpus_per_node:
            return self
        between = self.inter or self.intra
        inside = self.intra if gpus_per_node > 1 else None
        return Links(self.nodes * self.gpus_per_node // gpus_per_node, gpus_per_node, between, inside)

    def lines(self) -> list[str]:
        """Return lines for the report, with a warning where links are noisy."""
        named = {"between nodes, a whole node": self.inter, "inside a node, a rank": self.intra}
        lines = [f"{self.nodes} x {self.gpus_per_node} ranks"]
        for where, link in named.items():
            if link is None:
                continue
            lines.append(f"{where}: {link}")
            if link.spread > _NOISY:
                lines.append(
                    f"warning: that link is noisy ({link.spread:.0%} between rounds): somebody else uses it, or it "
                    "varies; measure again, with more --steps"
                )
        return lines


def measure_links(gpus_per_node: int | None, device: str) -> Links:
    """Measure both hops in a few rounds. Collective.

    Args:
        gpus_per_node: Ranks of a node; None takes it from the machine.
        device: ``cuda`` or ``cpu``.

    Raises:
        ValueError: If the layout is not possible.
    """
    rounds = [measure_bandwidth(world(), gpus_per_node, _MIB[device]) for _ in range(_ROUNDS)]
    found = find_links(world())
    return Links(
        rounds[0].nodes,
        rounds[0].gpus_per_node,
        _link(rounds, "inter_gbps"),
        _link(rounds, "intra_gbps"),
        are_slow=found is not None and found.are_slow,
    )


def _link(rounds: list[Bandwidth], name: str) -> Link | None:
    gbps = [getattr(one, name) for one in rounds]
    return None if gbps[0] is None else Link(median(gbps), min(gbps), max(gbps))
