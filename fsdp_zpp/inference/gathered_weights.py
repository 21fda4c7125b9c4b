"""Hands out the weights of a sharded model in full, tensor by tensor: ``gathered_weights``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.collectives.agreement import agree
from fsdp_zpp.frozen.decoded import decoded_weights_of
from fsdp_zpp.runtime.gather_in_turn import GatherInTurn
from fsdp_zpp.runtime.model_ranks import ranks_of
from fsdp_zpp.runtime.packed_weights import holds_packed_values
from fsdp_zpp.runtime.tensors_of_model import TensorOfModel, in_units, tensors_of
from fsdp_zpp.runtime.validation import DTYPES, check_module

from .adapter_names import active_adapter_tensors
from .merged_names import merged_tensors
from .sync_token import SyncToken, check_token, updates_since
from .weight_update import WeightUpdate


@overload
def gathered_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    adapters_only: bool = False,
    merged: bool = False,
    rank: None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]: ...


@overload
def gathered_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    adapters_only: bool = False,
    merged: bool = False,
    rank: int,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor | None]]: ...


@overload
def gathered_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    adapters_only: bool = False,
    merged: bool = False,
    since: SyncToken,
    rank: None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, WeightUpdate]]: ...


@overload
def gathered_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    adapters_only: bool = False,
    merged: bool = False,
    since: SyncToken,
    rank: int,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, WeightUpdate | None]]: ...


def gathered_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    adapters_only: bool = False,
    merged: bool = False,
    since: SyncToken | None = None,
    rank: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor | None]] | Iterator[tuple[str, WeightUpdate | None]]:
    """Return an iterator over the names and full tensors of a model, for an inference engine. Collective.

    By default these are the tensors of the full state dict, bit for bit, and by the same names: in full precision,
    whatever the forward computes in; tied ones by each of their names; weights of a quantized base decoded, by the
    names that they had. What modules have there as ``_extra_state`` is left out. They are yours: nothing else refers to
    them.

    They are gathered a few at a time, the next ones while you use the current one. Together with the current one they
    take at most the memory of the largest unit, or of two tensors if that is more; what you keep comes on top, and with
    ``merged``, the copies that PEFT makes of one weight.

    All ranks must iterate to the end, or leave at the same tensor. Don't change the model meanwhile. With local steps
    a node hands out its own weights, as its state dicts do; iterate within :func:`agreed_weights` for the agreed ones.

    Args:
        model: A model, sharded by either FSDP or not.
        dtype: Cast floating-point tensors to it: fp32, bf16 or fp16. Shards are cast before they are sent if that makes
            them smaller. Default: each in its own.
        adapters_only: Hand out only the active PEFT adapter, by the names in the files that ``save_adapter`` writes.
        merged: Hand out the base model with the active PEFT adapters merged into it, by the names that it has without
            PEFT.
        since: Hand out a :class:`WeightUpdate` for each tensor that has changed since the last call with this token,
            instead of the tensor, for a :class:`DeltaReceiver`: its changes in 4 bits, or at the first call all of it.
        rank: The global rank that gets the tensors; the others take part and get None in their place. Default: all get
            them.
        process_group: The ranks of the model. Default: those that it is sharded over, or all ranks if it is not
            sharded.

    Returns:
        An iterator of names and tensors, or updates, in the same order on all ranks.

    Raises:
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If an argument is out of range, on any rank, or ranks pass different ones; every rank raises.
        ImportError: If ``adapters_only`` or ``merged`` is given and peft is not installed.

    Examples:
        >>> for name, tensor in gathered_weights(model, dtype=torch.bfloat16):
        ...     engine.load_weights([(name, tensor)])
    """
    group = ranks_of(model, process_group)

    def check() -> list[TensorOfModel]:
        check_module(model)
        _check_arguments(dtype, adapters_only, merged, rank, group)
        check_token(since)
        if adapters_only:
            return active_adapter_tensors(model)
        tensors = tensors_of(model, decoded_weights_of)
        if merged or dtype is not None:
            _refuse_packed(tensors)
        if merged:
            tensors = merged_tensors(model, tensors)
        return tensors

    def summary(tensors: Sequence[TensorOfModel]) -> str:
        listed = [(tensor.names, tuple(tensor.full.shape), tensor.full.stored) for tensor in tensors]
        return repr((dtype, adapters_only, merged, since is not None, rank, listed))

    differs = "called gathered_weights with other arguments or another model than"
    tensors = agree(group, check, summary, differs, call="gathered_weights")
    if since is None:
        return _named(GatherInTurn(in_units(tensors), dtype, rank))
    return updates_since(since, _named(GatherInTurn(in_units(tensors), dtype)), group, rank)


def _named(turn: GatherInTurn[TensorOfModel]) -> Iterator[tuple[str, Tensor | None]]:
    with closing(iter(turn)) as gathered:
        for tensor, value in gathered:
            for name in tensor.names:
                yield name, value
            del value


def _refuse_packed(tensors: Sequence[TensorOfModel]) -> None:
    """Raise if parameters hold bytes that another quantizer has packed: neither casts nor merges understand them."""
    for tensor in tensors:
        for module, name in tensor.sites:
            parameter = module._parameters.get(name)
            by_bitsandbytes = any(cls.__module__.partition(".")[0] == "bitsandbytes" for cls in type(module).__mro__)
            if by_bitsandbytes or (parameter is not None and holds_packed_values(parameter)):
                raise ValueError(
                    f"{tensor.names[0]} is packed by another quantizer, so it can be handed out as it is stored, but "
                    "neither cast nor merged; quantize the base by quantize_frozen_params(model, NF4()) instead"
                )


def _check_arguments(
    dtype: object, adapters_only: object, merged: object, rank: object, group: dist.ProcessGroup | None
) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, or None, got {dtype!r}")
    for name, value in (("adapters_only", adapters_only), ("merged", merged)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")
    if adapters_only and merged:
        raise ValueError("adapters_only=True leaves out the base that merged=True would merge adapters into; pass one")
    if rank is None:
        return
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank must be a rank of the model, or None for all, got {rank!r}")
    if rank not in ranks:
        raise ValueError(f"rank must be a rank of the model: one of {ranks}, got {rank}")
