"""What of a strategy is at work on a given layout of ranks.

[Note: One node]
Codecs trade computation for bytes on the slow network between nodes. On one node there is none: encoding takes longer
than its fast links take for the bytes it saves. So what was asked for the slow network is left off there: the codecs
of weights and gradients, and what "auto" makes of the latter inside a node. Torch's own collectives then do what the
letters leave for them. A codec that was asked for the hop inside a node by name stays, as does error feedback on it.

Links inside a node may be slow, too (PCIe). ``gpus_per_node=1`` says so: every hop is then one between nodes.
"""

from __future__ import annotations

import dataclasses

from .strategy import Strategy
from .topology import Topology


def at_work(strategy: Strategy, topology: Topology) -> Strategy:
    """``strategy`` without what does nothing on ``topology``; see [Note: One node]. Its letters are left as they are.

    Args:
        strategy: What was asked for.
        topology: The ranks. A single one sends nothing, whatever the codecs.
    """
    if topology.nodes > 1 or topology.world == 1:
        return strategy
    inside = dataclasses.replace(strategy, weights=None, gradients=None, error_feedback=None)
    feedback = strategy.error_feedback
    if feedback is None or feedback.hops == "inter" or inside.gradient_codecs[0] is None:
        return inside
    return dataclasses.replace(inside, error_feedback=feedback)
