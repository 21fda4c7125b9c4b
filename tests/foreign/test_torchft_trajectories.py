"""Local steps replay the trajectories that torchft's own tests of its streaming DiLoCo are held to.

The numbers are those of github.com/meta-pytorch/torchft at commit 7eb7087885f7ffaf51148a9df3289d73b8709fbd, in its
test_fixtures, three of DiLoCoMockedUpdateTest.test_diloco_mocked_updates_0 to 5: two replicas of two fragments of one
weight each, an inner step of -2, an outer learning rate of 2, and each fragment exchanged every six steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_each
from harness.pool import Pool
from torch import Tensor, nn

from fsdp_zpp import LocalSteps, Strategy, agreed_weights

OWN = [1.0 - 2 * step for step in range(16)]
"""Where a weight goes that takes over nothing."""


@dataclass(frozen=True)
class Trajectory:
    """The contents of a fixture."""

    delay: int  # steps from sending a fragment to taking over what came of it
    alpha: float  # share of a replica's own weights in those that it goes on with
    layers: tuple[list[float], list[float]]  # both weights before each of 16 steps
    agreed: dict[int, tuple[float, float]]  # both agreed weights before some steps


TRAJECTORIES = {
    "all of the agreed weights": Trajectory(
        0,
        0.0,
        (
            [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
            [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        ),
        {0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-35, -23), 12: (-35, -47)},
    ),
    "half of them, a step late": Trajectory(
        1,
        0.5,
        (
            [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
            [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        ),
        {0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-25, -19), 12: (-25, -31)},
    ),
    "none of them, a step late": Trajectory(
        1, 1.0, (OWN, OWN), {0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-23, -19), 12: (-23, -23)}
    ),
}


class Layer(nn.Module):
    """One weight, whose gradient is ``slope``; notes what it is in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.slope = 2.0
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.item())
        return x + self.slope * self.weight.sum()


def replayed(adapter: Adapter, trajectory: Trajectory) -> tuple[list[list[float]], dict[int, tuple[float, float]]]:
    """In a worker: both weights before each step, and the agreed ones before some."""
    # torchft sends a fragment so many steps before its time, ours receives it so many steps after it: a step more that
    # changes nothing shifts one onto the other.
    mean = {"outer_momentum": 0.0, "codec": None}
    local_steps = LocalSteps(6, outer_lr=2.0, **mean, overlap=trajectory.delay, mix=1 - trajectory.alpha)
    strategy = Strategy("III", local_steps=local_steps, gpus_per_node=1)
    layers = [Layer(), Layer()]
    net: Any = nn.Sequential(*(adapter.wrap(layer, strategy) for layer in layers))
    model = adapter.wrap(net, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    agreed = {}
    for step in range(-trajectory.delay, 16):
        for layer in layers:
            layer.slope = 2.0 if step >= 0 else 0.0
        loss = model(torch.zeros(1))
        if step in trajectory.agreed:
            with agreed_weights(model):
                values = [value.item() for value in adapter.full_weights(model).values()]
            agreed[step] = (values[0], values[1])
        loss.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [layer.seen[trajectory.delay :] for layer in layers], agreed


@over_each(rest=False, adapter=ADAPTERS, trajectory=TRAJECTORIES)
def test_trajectories_of_torchft(pool: Callable[[int], Pool], adapter: Adapter, trajectory: Trajectory) -> None:
    for layers, agreed in pool(2).run(replayed, adapter, trajectory):
        assert layers == [list(each) for each in trajectory.layers]
        assert agreed == trajectory.agreed
