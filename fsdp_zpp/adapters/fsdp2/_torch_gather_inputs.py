"""Private names of torch's fully_shard: what it would put together of a group's shards for its all-gather.

[Note: Own bytes]
A tensor subclass may decide itself what is gathered of it: ``fsdp_pre_all_gather`` returns tensors and metadata, and
``fsdp_post_all_gather`` makes the unsharded parameter of all ranks' tensors. So does float8 training in torchao: it
casts to 8 bits before the gather. Such bytes are a codec of their own, which go through both hops and into the
secondary shard as they are. The other parameters of the group go beside them, in the dtype to compute in. A secondary
shard that is reused brings no call of ``fsdp_pre_all_gather``, so the metadata of the last one is kept beside it.

Some subclasses send no bytes of their own but their values in the dtype to compute in, as torchao's MXFP8 weights do.
A codec encodes these as it does any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_param_all_gather_inputs
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


class GatherResult(TypedDict):
    """Fields of torch's ``AllGatherResult`` besides the output and its event."""

    all_gather_work: None
    param_all_gather_input_dtypes: list[list[torch.dtype]]
    param_all_gather_input_numels: list[list[int]]
    all_gather_input_split_sizes: list[int]


def gather_result(dtypes: list[list[torch.dtype]], numels: list[list[int]], sizes: list[int]) -> GatherResult:
    """Return the dtypes and numbers of elements of each parameter's tensors, and the sizes of all of them."""
    return {
        "all_gather_work": None,
        "param_all_gather_input_dtypes": dtypes,
        "param_all_gather_input_numels": numels,
        "all_gather_input_split_sizes": sizes,
    }


class _Extension(NamedTuple):
    """What a parameter that encodes itself has told torch beside its tensors: metadata, and their shapes."""

    param: FSDPParam
    metadata: Any
    sizes: Sequence[torch.Size]


class GatherInputs:
    """A rank's part of a gather as torch would put it together. See [Note: Own bytes].

    Args:
        group: The group, initialized lazily.
        dtype: The dtype of the values that a codec encodes; uint8 for bytes that none does.
        mixed: Whether torch is given values of several dtypes, which it takes as bytes.
    """

    def __init__(self, group: FSDPParamGroup, dtype: torch.dtype, mixed: bool) -> None:
        self._group, self._dtype, self._as_bytes = group, dtype, dtype == torch.uint8
        self._in_bytes = mixed or self._as_bytes
        self._extensions: list[_Extension] = []

    @torch.no_grad()
    def put_together(self) -> tuple[Tensor, GatherResult]:
        """Return what is to be gathered of the shards as they are now, flat, and what torch needs to know of it.

        The number of elements is the same each time. It is collective if a parameter's own encoding is.
        """
        params = self._group.fsdp_params
        # What an evaluation has encoded, metadata above all, may be saved for a backward later.
        with torch.inference_mode(False):
            by_param = _get_param_all_gather_inputs(params)
            flat = [each.view(-1) for inputs in by_param for each in inputs]
            joined = torch.cat([each.view(torch.uint8) if self._as_bytes else each.to(self._dtype) for each in flat])
        result = gather_result(
            [[each.dtype for each in inputs] for inputs in by_param],
            [[each.numel() for each in inputs] for inputs in by_param],
            [each.nbytes if self._in_bytes else each.numel() for each in flat],
        )
        extensions = ((param, param._extensions_data) for param in params if encodes_itself(param))
        self._extensions = [
            _Extension(param, data.all_gather_metadata, data.all_gather_input_sizes) for param, data in extensions
        ]
        return joined, result

    def tell_torch(self) -> None:
        """Give torch the metadata of what was put together last, which it forgets whenever it has unsharded."""
        for param, metadata, sizes in self._extensions:
            param._extensions_data.all_gather_metadata = metadata
            param._extensions_data.all_gather_input_sizes = sizes


def encodes_itself(param: FSDPParam) -> bool:
    """Return whether a parameter decides itself what is gathered of it."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def has_own_bytes(params: Sequence[FSDPParam]) -> bool:
    """Return whether any sharded parameter encodes itself as anything but its values in the dtype to compute in.

    It is collective if a parameter's own encoding is.
    """
    # Of all of them, however early one decides it, so that ranks enter the same collectives.
    return any([not _sends_values(param) for param in params if encodes_itself(param)])  # noqa: C419


@torch.no_grad()
def _sends_values(param: FSDPParam) -> bool:
    first, *others = param.all_gather_inputs
    dtype = param.param_dtype or param.orig_dtype
    # With or without padding, which not all ranks have.
    numels = param._sharded_local_tensor.numel(), param._sharded_param_data.numel()
    return not others and first.dtype == dtype and first.numel() in numels
