"""The private names of torch's fully_shard by which parameters are taken out of it, beside those in _torch.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ._torch import FSDPParam, FSDPParamGroup, FSDPState, groups_of, state_of

OnRelease = Callable[[tuple[nn.Module, ...], bool], None]


class ShardedParameter:
    """One parameter as it is registered on modules, and how it is taken from the groups; see frozen/sharded_params.py.

    Args:
        parameter: The parameter.
        on_release: Called with the modules of each group that it has been taken from, and whether that is empty now.
    """

    def __init__(self, parameter: nn.Parameter, on_release: OnRelease) -> None:
        self._parameter, self._on_release = parameter, on_release
        self.members: list[tuple[FSDPState, FSDPParamGroup, FSDPParam]] = []  # several if it was tied after sharding

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The mixed precision's ``param_dtype``."""
        return self.members[0][2].mp_policy.param_dtype

    @property
    def kind(self) -> type:
        """The class of its shard."""
        local: Any = self._parameter
        return type(local._local_tensor if isinstance(local, DTensor) else local.data)

    @property
    def can_release(self) -> bool:
        """Whether it is sharded, by nothing else than this, in a model that torch has not initialized lazily yet."""
        return isinstance(self._parameter, DTensor) and all(
            group.is_sharded and group._all_gather_result is None and state._is_root is None and not param.is_dtensor
            for state, group, param in self.members
        )

    def whole(self) -> Tensor:
        """All of its values, on the device that computes. Collective."""
        parameter: Any = self._parameter.detach().to(self.members[0][1].device)  # from where it is offloaded to
        return parameter.full_tensor()

    def release(self) -> None:
        """Take it out of its groups; a group without parameters goes as well."""
        for state, group, param in self.members:
            group.fsdp_params.remove(param)
            param._post_load_hook_handle.remove()  # it would look for the parameter on its module
            if not group.fsdp_params:
                _remove_group(state, group)
            self._on_release(group.modules, not group.fsdp_params)


def _remove_group(state: Any, group: FSDPParamGroup) -> None:
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups.remove(group)
    else:
        state._fsdp_param_group = None


def sharded_parameters(model: nn.Module, on_release: OnRelease) -> dict[int, ShardedParameter]:
    """What has sharded the parameters below ``model``, by the ``id`` that they are registered with, gathered or not."""
    found: dict[int, ShardedParameter] = {}
    sharded = [state_of(module) for module in model.modules() if isinstance(module, FSDPModule)]
    for state in dict.fromkeys(state for state in sharded if state is not None):  # replicate() has states elsewhere
        for group in groups_of(state):
            for param in group.fsdp_params:
                info = param._module_info
                parameter = info.module._parameters.get(info.param_name)
                if parameter is not None:
                    owner = found.setdefault(id(parameter), ShardedParameter(parameter, on_release))
                    owner.members.append((state, group, param))
    return found
