"""Size of the outer step of local steps, and the momentum that gives it a size.

Let g be the mean change of the nodes' weights, m the momentum kept before this exchange, and r = <m, g> / <g, g>. Along
g, SGD with momentum mu makes a step of lr * (1 + mu * r) times g, and with Nesterov's of lr * (1 + mu + mu^2 * r): its
aligned gain. If changes that are k exchanges apart correlate by rho^k, r settles at rho / (1 - mu * rho), and the gain
at lr / (1 - mu * rho), or lr * (1 + mu / (1 - mu * rho)). Where all changes are alike (rho = 1) that is about the
lr / (1 - mu) by which arXiv 2509.10439 has momentum act.

[Note: Automatic momentum]
``outer_momentum="auto"`` is the largest momentum whose settled gain is at most ``TARGET_GAIN``. It takes rho from the
exchange before, so that the host knows it: to sum r over all ranks within an exchange would make a communicator of the
training wait for the slow network. A negative rho counts as a positive one: changes that point against each other show
an overshoot, so their small gain is no reason for more momentum. Until two changes could be compared, rho is 1.
"""

from __future__ import annotations

TARGET_GAIN = 1.4
"""Gain at which ``"auto"`` aims, in units of the mean change. Of the lr / (1 - mu) that were measured in short runs,
1.0 to 7, it gave the lowest loss; docs/results/loss.md."""
MOST_MOMENTUM = 0.9
"""Largest momentum that ``"auto"`` chooses, that of DiLoCo (arXiv 2311.08105)."""


def aligned_gain(lr: float, momentum: float, alignment: float, *, nesterov: bool) -> float:
    """Return the size of an outer step along the mean change, in units of that.

    Args:
        lr: The outer learning rate.
        momentum: The momentum mu of this step.
        alignment: r, as at the top of this file.
        nesterov: Whether the momentum is Nesterov's.
    """
    return lr * (1 + momentum + momentum**2 * alignment if nesterov else 1 + momentum * alignment)


def correlation_of_changes(momentum: float, alignment: float) -> float:
    """Return rho, in [-1, 1], at which r would settle where it is now; arguments are those of :func:`aligned_gain`."""
    ahead = 1 + momentum * alignment
    return max(-1.0, min(alignment / ahead, 1.0)) if ahead > 0 else -1.0


def fitting_momentum(lr: float, correlation: float, *, nesterov: bool) -> float:
    """Return the momentum of ``outer_momentum="auto"``. See [Note: Automatic momentum].

    Args:
        lr: The outer learning rate, below ``TARGET_GAIN``.
        correlation: rho.
        nesterov: Whether the momentum is Nesterov's.
    """
    rho = abs(correlation)
    if nesterov:
        room = TARGET_GAIN / lr - 1
        return min(MOST_MOMENTUM, room / (1 + room * rho))
    room = 1 - lr / TARGET_GAIN
    return min(MOST_MOMENTUM, room / rho) if rho > 0 else MOST_MOMENTUM
