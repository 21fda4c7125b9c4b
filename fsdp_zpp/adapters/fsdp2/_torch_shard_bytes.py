"""Private names of torch's fully_shard: shards of a parameter group as the bytes that torch would gather.

[Note: Own bytes]
A tensor subclass may decide itself what is gathered of it: ``fsdp_pre_all_gather`` returns tensors and metadata, and
``fsdp_post_all_gather`` makes the unsharded parameter of all ranks' tensors. So does float8 training in torchao: it
casts to 8 bits before the gather. Such bytes are a codec of their own, which go through both hops and into the
secondary shard as they are. The other parameters of the group go beside them, in the dtype to compute in. A secondary
shard that is reused brings no call of ``fsdp_pre_all_gather``, so the metadata of the last one is kept beside it.
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


class _Extension(NamedTuple):
    """What a parameter that encodes itself has told torch beside its tensors: metadata, and their shapes."""

    param: FSDPParam
    metadata: Any
    sizes: Sequence[torch.Size]


class ShardBytes:
    """A rank's shards of a group as torch would gather them, in one tensor of bytes. See [Note: Own bytes].

    Args:
        group: The group, initialized lazily.

    Attributes:
        nbytes: Their number; 0 before the first :meth:`encode`, and the same at every call.
        result: What an ``AllGatherResult`` tells besides the output and its event; None before that.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self._extensions: list[_Extension] = []
        self.nbytes = 0
        self.result: GatherResult | None = None

    @torch.no_grad()
    def encode(self) -> Tensor:
        """Return the shards as they are now, uint8 [nbytes]. Collective if a parameter's own encoding is."""
        params = self._group.fsdp_params
        # What an evaluation has encoded, metadata above all, may be saved for a backward later.
        with torch.inference_mode(False):
            inputs = _get_param_all_gather_inputs(params)
            payload = torch.cat([each.view(-1).view(torch.uint8) for of_param in inputs for each in of_param])
        self.nbytes = payload.numel()
        self.result = {
            "all_gather_work": None,
            "param_all_gather_input_dtypes": [[each.dtype for each in of_param] for of_param in inputs],
            "param_all_gather_input_numels": [[each.numel() for each in of_param] for of_param in inputs],
            "all_gather_input_split_sizes": [each.nbytes for of_param in inputs for each in of_param],
        }
        extensions = ((param, param._extensions_data) for param in params if encodes_itself(param))
        self._extensions = [
            _Extension(param, data.all_gather_metadata, data.all_gather_input_sizes) for param, data in extensions
        ]
        return payload

    def hand_over(self) -> None:
        """Tell torch the metadata of the last :meth:`encode`, which it forgets whenever it has unsharded."""
        for param, metadata, sizes in self._extensions:
            param._extensions_data.all_gather_metadata = metadata
            param._extensions_data.all_gather_input_sizes = sizes


def encodes_itself(param: FSDPParam) -> bool:
    """Return whether a parameter decides itself what is gathered of it."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
