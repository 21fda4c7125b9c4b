"""Private names of torch's fully_shard: what all gathers of a parameter group have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ._torch_flat_layout import layout_of
from ._torch_gather_inputs import GatherInputs, encodes_itself, gather_result


class GatherPlan:
    """Holds what all gathers of a group have in common, until parameters are moved, cast or replaced.

    Args:
        group: The group, initialized lazily.
        encodes: Whether a codec encodes what is gathered.

    Attributes:
        mixed: Whether parameters are computed with in several dtypes.
        inputs: Puts together what is gathered, if a parameter encodes itself or, without a codec, dtypes are mixed;
            else None, and it is the shards themselves.
        dtype: The dtype in which parameters are gathered; if theirs differ, one that can hold the values of all, and
            uint8 if ``inputs`` are bytes.
        shard_numel: The number of elements that a rank contributes to a gather; with ``inputs``, 0 until they were put
            together, and the same ever after.
        numel: The number of elements that a gather leaves on a rank.
        result: What an ``AllGatherResult`` tells besides the output and its event.
        layout: Where parameters lie in a rank's part of a gather.
        memory: The gathered shards, except tensor subclasses, which may have no storage.
        counted: The tensors whose writes torch counts: the parameters and their shards.
        cast_before_joining: Whether each shard is to be cast to ``dtype`` before it is joined with others.
        swaps: The swaps of all parameters, once :meth:`fill`, :meth:`unshard` and :meth:`reshard` do what torch would
            do for each; else empty.
    """

    def __init__(self, group: FSDPParamGroup, encodes: bool) -> None:
        params = group.fsdp_params
        shards = [param._sharded_param_data for param in params]
        dtypes = [param.param_dtype or shard.dtype for param, shard in zip(params, shards, strict=True)]
        numels = [shard.numel() for shard in shards]
        self._world = group._all_gather_process_group.size()
        self.mixed = any(dtype != dtypes[0] for dtype in dtypes)
        self.dtype = reduce(torch.promote_types, dtypes)
        self.inputs: GatherInputs | None = None
        if any(map(encodes_itself, params)) or (self.mixed and not encodes):
            self.dtype = self.dtype if encodes else torch.uint8
            self.inputs = GatherInputs(group, self.dtype, self.mixed)
        self.layout = layout_of(group, params, range(len(params)))
        self.memory = [shard for shard in shards if type(shard) is Tensor]
        self.counted = [each for p in params for each in (p.sharded_param, p._sharded_local_tensor)] + shards
        sizes = [n * dtype.itemsize for n, dtype in zip(numels, dtypes, strict=True)] if self.mixed else numels
        self.shard_numel = sum(numels) if self.inputs is None else 0
        self.numel = self.shard_numel * self._world
        self.result = gather_result([[dtype] for dtype in dtypes], [[numel] for numel in numels], sizes)
        # Joined as they are, shards of several dtypes would be promoted, and packed bytes would not survive that.
        self.cast_before_joining = not encodes and any(shard.dtype != shards[0].dtype for shard in shards)
        self._numels, self._dtypes = numels, dtypes
        self.swaps: list[Swap] = []
        self._views: list[Tensor] = []

    def put_together(self, inputs: GatherInputs) -> Tensor:
        """Return what ``inputs`` put together of the shards as they are now, flat [shard_numel]."""
        joined, self.result = inputs.put_together()
        self.shard_numel = joined.numel()
        self.numel = self.shard_numel * self._world
        return joined

    def prepare_swaps(self, group: FSDPParamGroup) -> None:
        """Prepare to unshard a group in fewer steps, if its parameters are plain and torch has unsharded it once."""
        params = group.fsdp_params
        if self.inputs is not None or self._world == 1 or torch.is_inference_mode_enabled():
            return
        if not all(map(_is_plain, params)):
            return
        self.swaps = [Swap.of(param) for param in params]
        self._views = [_beside(param.all_gather_outputs[0], self._world) for param in params]

    @torch.no_grad()
    def fill(self, gathered: Tensor) -> None:
        """Copy what was gathered, flat [numel], into the unsharded parameters' memory."""
        for swap in self.swaps:
            if swap.storage.size() != swap.nbytes:
                swap.storage.resize_(swap.nbytes)
        rows = gathered.view(self._world, -1)
        if self.mixed:
            torch._foreach_copy_(self._views, rows.split(self._numels, dim=1))
        else:
            torch.split_with_sizes_copy(rows, self._numels, dim=1, out=self._views)

    @torch.no_grad()
    def as_torch_gathers(self, gathered: Tensor) -> Tensor:
        """Return what was gathered, flat [numel], as torch takes it: as bytes, if parameters have several dtypes."""
        if not self.mixed:
            return gathered
        parts = gathered.view(self._world, -1).split(self._numels, dim=1)
        cast = (part.to(dtype).contiguous() for part, dtype in zip(parts, self._dtypes, strict=True))
        return torch.cat([part.view(torch.uint8) for part in cast], dim=1).view(-1)

    def unshard(self) -> None:
        """Let modules show the unsharded parameters."""
        for param, unsharded, sites, _, _ in self.swaps:
            sharded = param.sharded_param
            if sharded.requires_grad != unsharded.requires_grad:
                unsharded.requires_grad_(sharded.requires_grad)
            for module, name in sites:
                module._parameters[name] = unsharded
            param.sharded_state = ShardedState.UNSHARDED

    def reshard(self) -> None:
        """Let modules show the sharded parameters, and free the others' memory."""
        self.show_shards()
        for param, _, _, storage, _ in self.swaps:
            if not getattr(param, "keep_unsharded_storage", False):  # from torch 2.15 on
                storage.resize_(0)

    def show_shards(self) -> None:
        """Let modules show the sharded parameters; the others' memory stays."""
        for param, _, sites, _, _ in self.swaps:
            for module, name in sites:
                module._parameters[name] = param.sharded_param
            param.sharded_state = ShardedState.SHARDED


class Swap(NamedTuple):
    """A parameter in place of which modules show the sharded or the unsharded one.

    Attributes:
        param: torch's record of it.
        unsharded: The unsharded parameter.
        sites: The modules, and its name in each.
        storage: The unsharded parameter's storage.
        nbytes: The storage's size while the parameter is unsharded.
    """

    param: FSDPParam
    unsharded: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    storage: torch.UntypedStorage
    nbytes: int

    @classmethod
    def of(cls, param: FSDPParam) -> Swap:
        """Return the swap of a parameter that torch has unsharded before."""
        info, output = param._module_info, param.all_gather_outputs[0]
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        sites = ((info.module, info.param_name), *shared)
        return cls(param, param._unsharded_param, sites, output.untyped_storage(), output.nbytes)


def show_shards(params: Sequence[FSDPParam]) -> None:
    """Show shards as torch's ``to_sharded`` does, but leave the memory of unsharded parameters."""
    for param in params:
        param._setattr_on_modules(param.sharded_param)
        param.sharded_state = ShardedState.SHARDED


def free_unsharded(params: Sequence[FSDPParam]) -> None:
    """Free the memory of unsharded parameters that modules don't show, unless torch is to keep it."""
    for param in params:
        if not getattr(param, "keep_unsharded_storage", False):  # from torch 2.15 on
            param.free_unsharded_param()


def _beside(output: Tensor, world: int) -> Tensor:
    """Return ``output`` as [world, numel], with a count of writes of its own.

    Autograd has saved the unsharded parameters; it must not take a write that restores their values for a change.
    """
    numel = output.numel() // world
    return output.new_empty(0).set_(output.untyped_storage(), 0, (world, numel), (numel, 1))


def _is_plain(param: FSDPParam) -> bool:
    """Return whether a parameter is unsharded by a copy and a swap alone."""
    info = param._module_info
    return (
        hasattr(param, "_unsharded_param")
        and not param.is_dtensor  # of tensor parallelism
        and param.fsdp_placement.dim == 0
        and len(param.all_gather_outputs) == 1
        and not param.all_gather_outputs[0].is_inference()
        and all(type(module).__setattr__ is nn.Module.__setattr__ for module in (info.module, *info.shared_modules))
    )
