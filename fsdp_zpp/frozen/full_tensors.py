"""Full tensors of a sharded model, gathered on its first rank for files that other programs read."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from fsdp_zpp.runtime.gather_in_turn import GatherInTurn
from fsdp_zpp.runtime.tensors_of_model import TensorOfModel, in_units


def on_first_rank(
    tensors: Iterable[TensorOfModel], group: dist.ProcessGroup | None, *, all_names: bool = False
) -> dict[str, Tensor]:
    """Copy tensors to the CPU of the first rank of ``group``; other ranks get nothing. Collective.

    Args:
        tensors: The tensors, the same on all ranks.
        group: The ranks of the model.
        all_names: Whether tied tensors are there by all of their names, each with a copy of its own, as in torch's full
            state dicts; or by the first name alone.
    """
    first = None if group is None else dist.get_global_rank(group, 0)
    copies: dict[str, Tensor] = {}
    for tensor, value in GatherInTurn(in_units(tensors), to=first):
        for name in tensor.names if all_names else tensor.names[:1]:
            if value is not None:
                copies[name] = value.to("cpu", copy=name != tensor.names[0])
    return copies
