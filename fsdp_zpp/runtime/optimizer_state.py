"""An optimizer's state of this rank, in checkpoints of nodes that train on their own.

torch's checkpoints keep one copy of what replicas hold. Nodes that train on their own are no replicas, so each rank
saves its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .fragment import Fragment


class OptimizerState:
    """What this rank holds of an optimizer's state.

    Args:
        optimizer: The optimizer.
        fragment: A fragment of its model; restoring it restores this state.
    """

    def __init__(self, optimizer: Optimizer, fragment: Fragment) -> None:
        self._optimizer, self._fragment = optimizer, fragment
        self._loaded: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Its state by parameter, in the optimizer's order."""
        if self._loaded is not None:
            return {"state": self._loaded}
        states = (self._optimizer.state.get(parameter, {}) for parameter in self._parameters())
        return {"state": [{name: _saved(value) for name, value in state.items()} for state in states]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, from the next forward on.

        Raises:
            ValueError: If it was saved for another number of parameters.
        """
        parameters = list(self._parameters())
        if len(parameters) != len(state["state"]):
            raise ValueError(
                f"the saved optimizer state has {len(state['state'])} parameters, but this optimizer has "
                f"{len(parameters)}"
            )
        self._loaded = state["state"]
        self._fragment.after_restore.append(self._restore)

    def reset(self) -> None:
        """Drop the loaded state; that of torch's own checkpoint stands."""
        self._loaded = None

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def _restore(self) -> None:
        if self._loaded is None:
            return
        for parameter, saved in zip(self._parameters(), self._loaded, strict=True):
            state = self._optimizer.state[parameter]
            for name, value in saved.items():
                state[name] = _restored(value, state.get(name), parameter)
        self._loaded = None


def _saved(value: Any) -> Any:
    """A copy on the CPU."""
    if not isinstance(value, Tensor):
        return value
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().to("cpu", copy=True)


def _restored(saved: Any, present: Any, parameter: nn.Parameter) -> Any:
    """``saved`` in the form that the optimizer uses, such as a DTensor."""
    if not isinstance(saved, Tensor):
        return saved
    if isinstance(present, Tensor):
        local = present.to_local() if isinstance(present, DTensor) else present
        if local.shape == saved.shape and local.dtype == saved.dtype:
            local.copy_(saved)
            return present
    if isinstance(parameter, DTensor) and saved.shape == parameter.to_local().shape:
        shard = saved.to(parameter.device)
        return DTensor.from_local(
            shard, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    # Step counters are on the CPU, unless the optimizer is fused or capturable.
    return saved.to(parameter.device) if saved.ndim else saved
