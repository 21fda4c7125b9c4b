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

from .fragment import Fragment, ParameterState


class OptimizerState:
    """An optimizer's state on this rank.

    Args:
        optimizer: The optimizer.
        fragment: A fragment of its model; restoring it restores this state.
    """

    def __init__(self, optimizer: Optimizer, fragment: Fragment) -> None:
        self._optimizer, self._fragment = optimizer, fragment

    def state_dict(self) -> dict[str, list[ParameterState]]:
        """Return the state by parameter, in the optimizer's order."""
        if id(self._optimizer) in self._fragment.pending:
            return {"state": self._fragment.pending[id(self._optimizer)][0]}
        states = (self._optimizer.state.get(parameter, {}) for parameter in self._parameters())
        return {"state": [{name: _saved(value) for name, value in state.items()} for state in states]}

    def load_state_dict(self, state: dict[str, list[ParameterState]]) -> None:
        """Continue with what :meth:`state_dict` returned, from the next forward on.

        Raises:
            ValueError: If it was saved for another number of parameters.
        """
        self.check(state["state"])
        # On the fragment, from which it is saved again, by an object like this one, if no forward comes before.
        self._fragment.pending[id(self._optimizer)] = (state["state"], self.restore)

    def check(self, saved_states: list[ParameterState]) -> None:
        """Raise unless there is one state for each parameter.

        Raises:
            ValueError: If they are of another number of parameters.
        """
        parameters = len(list(self._parameters()))
        if parameters != len(saved_states):
            raise ValueError(
                f"the saved optimizer state has {len(saved_states)} parameters, but this optimizer has {parameters}"
            )

    def reset(self) -> None:
        """Drop the loaded state; that of torch's own checkpoint stands."""
        self._fragment.pending.pop(id(self._optimizer), None)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def restore(self, saved_states: list[ParameterState]) -> None:
        """Continue with states by parameter, in the optimizer's order, at once."""
        states = iter(saved_states)
        for group in self._optimizer.param_groups:
            # torch counts the steps of these where it computes, and those of others on the CPU.
            counts_on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter, saved in zip(group["params"], states, strict=False):
                state = self._optimizer.state[parameter]
                present = dict(state)
                state.clear()
                for name, value in saved.items():
                    state[name] = restored(value, present.get(name), parameter, counts_on_device)


def local_state(value: Any) -> Any:
    """Return what this rank holds of a state or a parameter."""
    return value.to_local() if isinstance(value, DTensor) else value


def _saved(value: object) -> object:
    """Return a copy on the CPU."""
    return local_state(value).detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def restored(saved: object, present: object, parameter: nn.Parameter, counts_on_device: bool) -> object:
    """Return ``saved`` in the form that the optimizer uses, such as a DTensor."""
    if not isinstance(saved, Tensor):
        return saved
    if isinstance(present, Tensor):
        local = local_state(present)
        if local.shape == saved.shape and local.dtype == saved.dtype:
            local.copy_(saved)
            return present
    if isinstance(parameter, DTensor) and saved.shape == parameter.to_local().shape:
        shard = saved.to(parameter.device)
        return DTensor.from_local(
            shard, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    return saved.to(parameter.device) if saved.ndim or counts_on_device else saved
