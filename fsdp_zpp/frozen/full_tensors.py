"""Full tensors of a sharded model, gathered on its first rank for files that other programs read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.runtime.full_tensors import FullTensor
from fsdp_zpp.runtime.gather_in_turn import GatherInTurn
from fsdp_zpp.runtime.tensors_of_model import TensorOfModel, in_units, tensors_of


def full_parameters(
    model: nn.Module, wanted: Callable[[str, FullTensor], bool], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Copy the parameters that are ``wanted`` to the CPU, by their FQNs without wrappers. Collective.

    Not those that are quantized. Ranks other than the first get nothing.

    Args:
        model: The model, sharded or not.
        wanted: Whether to copy a parameter, by its FQN and the parameter.
        group: The ranks of the model.
    """
    return on_first_rank((t for t in tensors_of(model) if not t.is_buffer and wanted(t.names[0], t.full)), group)


def full_buffers(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Copy the persistent buffers to the CPU, by their FQNs without wrappers. Collective.

    Ranks other than the first get nothing.
    """
    return on_first_rank((tensor for tensor in tensors_of(model) if tensor.is_buffer), group)


def on_first_rank(tensors: Iterable[TensorOfModel], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Copy tensors to the CPU of the first rank of ``group``, by the first of their names. Collective."""
    first = None if group is None else dist.get_global_rank(group, 0)
    full = GatherInTurn(in_units(tensors), to=first)
    return {tensor.names[0]: value.cpu() for tensor, value in full if value is not None}
