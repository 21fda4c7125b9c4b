"""How much each node's changes count in their mean."""

from __future__ import annotations

from collections.abc import Sequence


def relative_weights(trained: Sequence[int]) -> list[float]:
    """Return by how much to multiply each node's changes so that their mean is weighted: w * nodes / sum(w).

    Args:
        trained: What each node has trained, in tokens or steps. If none has trained anything, all count alike.
    """
    total = sum(trained)
    return [each * len(trained) / total if total else 1.0 for each in trained]
