"""What elastic nodes tell each other before an exchange, and which of them that makes current.

[Note: Who is current]
Each exchange that members commit to is counted. A node that was lost, or stopped, lacks some of them, and so does a new
one, which has none. So where nodes meet, those with the most exchanges, and of these with the most steps, are current;
all others take over from the first of them: the agreed weights, the states of optimizers, and the step. What they had
trained is not used: they have changed nothing since the agreed weights, and count nothing in the next exchange.

Nodes whose signs of life are late may be taken for lost while they train on. If all nodes of a round are, by nodes that
wait to join, these begin from what they hold: a fork. The round that they meet for closes the one before, so that both
never commit side by side ([Note: One round at a time] in decisions.py). But they may come to count as many exchanges as
had been made, with other weights; so the round of the last exchange is compared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .outer_watch import Products


@dataclass(frozen=True)
class Request:
    """Exchange that a node is about to make.

    Attributes:
        step: The step that it follows.
        fragments: Which fragments, by their places among all of the model's.
        settles: Whether these are all, after which nodes hold the same.
    """

    step: int
    fragments: tuple[int, ...]
    settles: bool = False


@dataclass(frozen=True)
class Header:
    """What nodes tell each other before an exchange.

    Attributes:
        model: What must be the same on all nodes.
        committed: Exchanges that this node has committed to.
        made: Steps that it has made.
        round: The round in which it has made the last exchange.
        start: The checksums of the weights that it has started from, if it has committed to none; else None.
        round_is_over: Whether it has seen that nodes have to meet again, such as for one that waits to join.
        request: What it is about to exchange; None if it has come to join.
        changed: For each parameter, by fragment, whether it was trained since its last exchange.
        trained: For each fragment, how much was trained since its last exchange: steps, or tokens.
        counts_tokens: Whether these are tokens.
        products: For each fragment, this node's part of what the next outer step is fitted to.
    """

    model: str
    committed: int
    made: int
    round: int
    start: object
    round_is_over: bool
    request: Request | None
    changed: tuple[tuple[bool, ...], ...]
    trained: tuple[int, ...]
    counts_tokens: bool
    products: tuple[Products, ...]

    @property
    def knows(self) -> tuple[int, int, int]:
        """Return what is largest for a node that is current."""
        return self.committed, self.made, self.round


def check_alike(headers: Sequence[Header], model: str) -> None:
    """Raise on every node unless all have the same model and count the same.

    Args:
        headers: Those of all members, by node.
        model: The model's name in errors.

    Raises:
        ValueError: If nodes have different models, or some count tokens and others steps.
    """
    for node, header in enumerate(headers):
        if header.model != headers[0].model:
            raise ValueError(
                f"{model}: nodes were given different models or local steps: {headers[0].model} on node 0, "
                f"{header.model} on node {node}; give all of them the same"
            )
    counts = {header.counts_tokens: node for node, header in enumerate(headers) if any(header.trained)}
    if len(counts) > 1:
        raise ValueError(
            f"{model}: node {counts[True]} counts tokens, but node {counts[False]} does not: call "
            "count_tokens on all nodes or on none"
        )


def current_nodes(headers: Sequence[Header]) -> list[int]:
    """Return the nodes that are current; see [Note: Who is current]. Those that start alike are."""
    most = max(header.knows for header in headers)
    nodes = [node for node, header in enumerate(headers) if header.knows == most]
    return [node for node in nodes if headers[node].start == headers[nodes[0]].start]
