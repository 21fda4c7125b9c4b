"""The momentum of ``outer_momentum="auto"``, by a search that shares no formula with the library."""

from __future__ import annotations

TARGET, MOST = 1.4, 0.9


def fitting_by_search(lr: float, correlation: float, nesterov: bool) -> float:
    """The largest momentum up to 0.9 whose settled gain is at most 1.4, by bisection."""

    def gain(momentum: float) -> float:
        along = sum(momentum ** (k - 1) * abs(correlation) ** k for k in range(1, 400))
        return lr * (1 + momentum + momentum**2 * along if nesterov else 1 + momentum * along)

    low, high = 0.0, MOST
    if gain(high) <= TARGET:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) <= TARGET else (low, middle)
    return low


def correlation_by_search(momentum: float, along: float) -> float:
    """The correlation at which the momentum kept, along a change, would settle at ``along``, by bisection."""
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        settled = sum(momentum ** (k - 1) * middle**k for k in range(1, 400))
        low, high = (middle, high) if settled < along else (low, middle)
    return (low + high) / 2
