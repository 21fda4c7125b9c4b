"""Stand-ins for modules of a sharded model: the same modules, with full tensors in place of shards.

PEFT merges adapters by methods of its layers, each kind of layer in its own way. They run on a stand-in as on a model
that is not sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from fsdp_zpp.frozen.modules import FrozenModule, plain_class
from fsdp_zpp.module_names import WRAPPERS

Values = Mapping[nn.Module, Mapping[str, Tensor]]
"""Full tensors by module and name."""


def stand_in(module: nn.Module, values: Values) -> nn.Module:
    """Return a copy of ``module`` and all below it whose parameters are ``values``, without what wraps modules.

    Everything else is the original's, but for lists and dicts, to which methods may add. Nothing communicates.
    """
    return _copy(module, values, {})


def _copy(module: nn.Module, values: Values, memo: dict[nn.Module, nn.Module]) -> nn.Module:
    wrapped = next((module._modules[name] for name in WRAPPERS if name in module._modules), None)
    if wrapped is not None:
        return _copy(wrapped, values, memo)
    if module in memo:
        return memo[module]
    cls = plain_class(module) if isinstance(module, FrozenModule) else type(module)
    copied: nn.Module = nn.Module.__new__(cls)
    memo[module] = copied
    full = values.get(module, {})
    for name, value in vars(module).items():
        if name not in full:  # modules show gathered tensors there
            vars(copied)[name] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
    copied._parameters.update({name: nn.Parameter(tensor, requires_grad=False) for name, tensor in full.items()})
    copied._modules.update(
        {name: _copy(child, values, memo) for name, child in module._modules.items() if child is not None}
    )
    return copied
