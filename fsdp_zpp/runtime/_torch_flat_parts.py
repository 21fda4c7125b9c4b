"""Private names of torch, for loads of checkpoints and for flat parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened, clean_tensor_name
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle
from torch.distributed.fsdp._runtime_utils import _get_orig_buffer_dtypes
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp_zpp._torch_compat import replace_function
from fsdp_zpp.comm.agreement import plain_parts
from fsdp_zpp.comm.flat_layout import Sharded
from fsdp_zpp.comm.mesh import ProcessMesh

# ---- weights that ``dcp.load`` has written in place
#
# A state dict of ``fully_shard`` has the shards themselves, so a load writes to the weights, even if nobody sets the
# loaded state dict on the model. torch has no hook for that. All its public load functions call one private
# function, which they look up in their module's globals at each call. So replacing it there also catches calls by code
# that imported a public function earlier.


class Listener(Protocol):
    """A unit whose weights a load may have written."""

    sharded: Sharded

    @property
    def ranks(self) -> ProcessMesh: ...

    def weights_loaded(self) -> None: ...


_listeners: WeakSet[Listener] = WeakSet()


def hear_of_loads(unit: Listener) -> None:
    """Call ``unit.weights_loaded()`` after each load into its weights by all of its ranks, while the unit exists."""
    # All ranks decide alike: they load the same keys, and even the shard of a rank that holds no values has a storage.
    if not _listeners:
        replace_function(state_dict_loader, "_load_state_dict", _intercept_loads)
    _listeners.add(unit)


def _intercept_loads(original: Any) -> Callable[..., None]:
    signature = inspect.signature(original)

    def load(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        into = _storages(tree_leaves(given["state_dict"]))
        try:
            original(*args, **kwargs)
        finally:  # a load that fails may have written, too
            _tell(into, given.get("process_group"), alone=bool(given.get("no_dist")))

    return load


def _storages(values: Iterable[object]) -> set[int]:
    """Return the identities of the storages of tensors, and of the shards of tensors."""
    shards = ([each.tensor for each in v.local_shards()] if isinstance(v, ShardedTensor) else [v] for v in values)
    parts = (part for shard in chain(*shards) if isinstance(shard, Tensor) for part in plain_parts(shard))
    # A DTensor's mesh counts as one of its parts.
    return {part.untyped_storage()._cdata for part in parts if isinstance(part, Tensor) and not part.is_sparse}


def _tell(into: set[int], group: dist.ProcessGroup | None, *, alone: bool) -> None:
    """Tell the units that have one of these storages of a load by this rank ``alone``, or by those of ``group``."""
    if not dist.is_initialized() or dist.get_rank(group) < 0:
        return
    loading = frozenset([dist.get_rank()] if alone else dist.get_process_group_ranks(group))
    # Only loads by all ranks of a unit count: ranks that disagree on what is stale would enter different collectives.
    for unit in list(_listeners):
        own = (*unit.sharded.shards(), *unit.sharded.parameters())
        if unit.ranks.is_within(loading) and not into.isdisjoint(_storages(own)):
            unit.weights_loaded()


# ---- original parameters as parts of flat parameters, under torch's own strategies, too

Site = tuple[nn.Module, str]
"""A module, and the name of a parameter on it."""


@dataclass(frozen=True, eq=False)
class FlatPart:
    """One original parameter: its place in a flat parameter, and the modules on which it is registered."""

    sites: tuple[Site, ...]
    start: int
    shape: torch.Size  # of the local tensor, if another parallelism also shards the parameter
    shard: Tensor  # this rank's shard of the flat parameter, in full precision
    requires_grad: bool
    device: torch.device  # of the gathered parameter, even if shards are offloaded
    group: dist.ProcessGroup | None  # of ranks that each hold a shard; None if this rank holds all
    dtensor_spec: Any  # the DTensorSpec of a parameter that another parallelism shards, too; None for others

    @property
    def full_shape(self) -> torch.Size:
        return self.shape if self.dtensor_spec is None else torch.Size(self.dtensor_spec.shape)

    def full_tensor_of(self, part: Tensor) -> Tensor:
        """Return the full parameter for ``part``. Collective over the ranks of another parallelism that shards it."""
        spec = self.dtensor_spec
        if spec is None:
            return part
        sharded = DTensor.from_local(
            part, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
        return sharded.full_tensor()


def flat_parts(model: nn.Module) -> Iterator[FlatPart]:
    """Yield the parts of all flat parameters below ``model``; first copy values set by ``p.data = ...`` to shards."""
    for instance in _instances(model):
        handle = instance._handle
        if handle is None:
            continue
        copy_replaced(handle)
        flat_param = handle.flat_param
        sites = [[(info.module, info.param_name)] for info in flat_param._param_infos]
        places = {site: place for place, [site] in enumerate(sites)}
        for info in flat_param._shared_param_infos:
            sites[places[info.prim_module, info.prim_param_name]].append((info.module, info.param_name))
        # There is no _local_shard until FSDP's lazy initialization; the flat parameter is the shard then.
        shard = getattr(flat_param, "_local_shard", flat_param).detach()
        group = handle.process_group if handle.uses_sharded_strategy else None
        start = place = 0
        for size, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True):
            if not is_padding:
                yield FlatPart(
                    tuple(sites[place]),
                    start,
                    shape=flat_param._shapes[place],
                    shard=shard,
                    requires_grad=(flat_param._params[place] if flat_param._params else flat_param).requires_grad,
                    device=handle.device,
                    group=group,
                    dtensor_spec=flat_param._param_extensions[place],
                )
                place += 1
            start += size


def _instances(model: nn.Module) -> Iterator[FullyShardedDataParallel]:
    # torch's fsdp_modules() takes four times as long: it also looks up the states of modules that are not wrapped.
    return (module for module in model.modules() if isinstance(module, FullyShardedDataParallel))


def original_dtypes(model: nn.Module) -> dict[Tensor, torch.dtype]:
    """Return the dtypes that buffers had before mixed precision; state dicts have buffers in these dtypes."""
    dtypes = {}
    for instance in _instances(model):
        if instance.mixed_precision.buffer_dtype is None:
            continue
        for name, buffer in instance.named_buffers():
            if (clean := clean_tensor_name(name)) not in instance._ignored_buffer_names:
                [dtypes[buffer]] = _get_orig_buffer_dtypes(instance, [clean])
    return dtypes


# ---- original parameters that were given other memory, by ``p.data = ...``


def copy_replaced(handle: FlatParamHandle) -> None:
    """Write the values of replaced parameters to the shard; before FSDP's lazy initialization, do nothing."""
    # FSDP does this before it gathers. Other code must call this before it reads the shard or makes parameters views of
    # it again.
    flat_param = handle.flat_param
    shows_parameters = all(hasattr(module, name) for name, module, _ in flat_param._param_infos)
    if not hasattr(flat_param, "_local_shard") or not shows_parameters:
        return
    if handle.uses_sharded_strategy:
        copy_replaced_shards(handle)
    elif flat_param._params:
        _copy_unsharded(handle)


def copy_replaced_shards(handle: FlatParamHandle) -> None:
    """Write the values of replaced parameters to the shard of a sharded ``handle``, as FSDP does."""
    # A writeback during a backward would look for gradients in the wrong place.
    may_differ = (
        torch._C._current_graph_task_id() == -1 and handle._use_orig_params and not handle._skip_writeback_check
    )
    if may_differ and handle._writeback_orig_params():
        handle._use_sharded_views()  # or FSDP would write back again, which counts as a change of weights


@torch.no_grad()
def _copy_unsharded(handle: FlatParamHandle) -> None:
    """Write the values of replaced parameters to the shard of an unsharded ``handle``, as FSDP does."""
    # Leave gradients alone: FSDP's own method would take accumulated gradients for ones that the user has just set.
    flat_param = handle.flat_param
    own = {tensor.untyped_storage().data_ptr() for tensor in (flat_param, flat_param._local_shard)}
    views = handle._get_unflat_views(flat_param._local_shard)
    for (name, module, _), view in zip(flat_param._param_infos, views, strict=True):
        shown = getattr(module, name, None)
        if isinstance(shown, nn.Parameter) and shown.untyped_storage().data_ptr() not in own:
            view.copy_(shown)
            shown.data = view


def is_flattened(parameter: Tensor) -> bool:
    """Return whether ``parameter`` is a flat parameter, or ``FullyShardedDataParallel`` has flattened it into one."""
    return isinstance(parameter, FlatParameter) or _is_fsdp_flattened(parameter)


def is_in_flat_parameter(parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` is an original parameter within a flat one, under any strategy."""
    return _is_fsdp_flattened(parameter) and not isinstance(parameter, FlatParameter)
