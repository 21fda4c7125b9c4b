"""Private names of torch's fully_shard: whether a parameter is trained, sharded or as modules show it."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def is_trained(param: FSDPParam) -> bool:
    """Whether a parameter requires a gradient: sharded, or as modules showed it when it was unsharded last.

    ``requires_grad_`` on a module reaches what the module shows at that moment. A root that a forward left unsharded
    then trains though its sharded parameters don't require a gradient: PEFT switches adapters off and on that way.
    """
    if param.sharded_param.requires_grad:
        return True
    unsharded = getattr(param, "_unsharded_param", None)  # there is none before the first gather
    return unsharded is not None and unsharded.requires_grad


def shows_trained(param: FSDPParam) -> bool:
    """Whether a parameter requires a gradient as modules show it now, which the next forward goes by."""
    shown: nn.Parameter = getattr(param._module_info.module, param._module_info.param_name)
    return shown.requires_grad
