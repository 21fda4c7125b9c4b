"""The strategies of a plan: its codecs under other letters, and with local steps."""

from __future__ import annotations

import dataclasses

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.strategy import Strategy


def with_levels(codecs: Strategy, levels: str) -> Strategy:
    """Replace the letters of ``codecs``. Letters that keep no secondary shard send weights whole, not as deltas."""
    weights, keeps_secondary = codecs.weights, Strategy(levels).keeps_secondary
    if isinstance(weights, Int4Delta) and not keeps_secondary:
        weights = weights.whole
    return dataclasses.replace(codecs, levels=levels, weights=weights)


def with_local_steps(strategy: Strategy, local_steps: LocalSteps) -> Strategy:
    """Add local steps to ``strategy``, without codecs that have no effect with them; see :class:`Strategy`."""
    feedback = strategy.error_feedback
    if feedback is not None and (feedback.hops == "inter" or not isinstance(strategy.intra_gradients, Codec)):
        feedback = None
    alone = dataclasses.replace(strategy, gradients=None, error_feedback=feedback, local_steps=local_steps)
    return dataclasses.replace(strategy, local_steps=local_steps) if local_steps.has_synchronous_steps else alone
