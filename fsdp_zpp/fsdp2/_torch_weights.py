"""Weights of a parameter group, gathered by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    AllGatherResult,
    _get_gradient_divide_factors,
    _get_param_all_gather_inputs,
    foreach_reduce_scatter_copy_in,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import _get_dim0_padded_size
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, RegisterPostBackwardFunction
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from fsdp_zpp.comm.agreement import plain_parts
from fsdp_zpp.comm.flat_layout import NO_PARAMETERS, FlatLayout, Piece, sent_exactly, sharded_along
from fsdp_zpp.comm.gradient_reduce import PendingReduction, StepReductions
from fsdp_zpp.comm.hops import keep_until_read
from fsdp_zpp.comm.weight_gather import SecondaryShard, ShardValues, ShardVersion
from fsdp_zpp.runtime.unit import StrategyUnit

# ---- states and groups

state_of: Callable[[nn.Module], FSDPState] = fully_shard.state  # type: ignore[attr-defined]


def is_managed(module: nn.Module) -> bool:
    """Return whether fully_shard has sharded the parameters of ``module``, in a call on it or on a parent."""
    return bool(vars(module).get("_is_fsdp_managed_module", False))


def groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    # torch 2.12 allows for several groups a module; before, there was one or none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def init_groups_lazily(root: nn.Module) -> None:
    """Repeat the lazy initialization of a model's parameter groups; torch allows it once the root is initialized."""
    for state in state_of(root)._state_ctx.all_states:
        for group in groups_of(state):
            group.lazy_init()


def numel_of(group: FSDPParamGroup) -> int:
    return sum(param.sharded_param.numel() for param in group.fsdp_params)


def names_in(group: FSDPParamGroup) -> dict[FSDPParam, str]:
    # FQNs are known only from lazy initialization on, and a checkpoint may be loaded before that.
    paths: dict[nn.Module, str] = {}
    for index, module in enumerate(group.modules):
        for path, part in module.named_modules(prefix=str(index)):
            paths.setdefault(part, path)
    infos = [(param, param._module_info) for param in group.fsdp_params]
    return {param: f"{paths[info.module]}.{info.param_name}" for param, info in infos}


def groups_below(root: nn.Module) -> list[FSDPParamGroup]:
    """Return the parameter groups under ``root``, outermost first. A group shared by a list of modules appears once."""
    states = [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(group for state in states for group in groups_of(state)))


def after_moves(callback: Callable[[nn.Module], None], original: Any) -> Callable[..., FSDPModule]:
    """Run ``callback(module)`` after each move or cast of a sharded module's parameters: ``to()``, ``half()``."""

    # All moves go through _apply, module by module.
    def _apply(self: FSDPModule, *args: object, **kwargs: object) -> FSDPModule:
        groups = groups_of(self._get_fsdp_state())
        before = [(p, dict(vars(p))) for group in groups for p in (param.sharded_param for param in group.fsdp_params)]
        moved: FSDPModule = original(self, *args, **kwargs)
        for parameter, attributes in before:  # torch swaps in new DTensors without the attributes
            marks = {name: value for name, value in attributes.items() if name.startswith("_fsdp_zpp")}
            vars(parameter).update(marks)
        callback(cast(nn.Module, self))
        return moved

    return _apply


# ---- transforms

# From torch 2.13 on, torch disables functorch's transforms while it communicates.
without_functorch: Any = getattr(_fsdp_common, "_disable_functorch_if_active", lambda method: method)


class RegisterPostBackward(RegisterPostBackwardFunction):
    """torch's function that calls ``post_backward``, applied without a look at its own signature each time."""

    @classmethod
    def apply(cls, *args: object) -> Any:
        parent: Any = super() if torch._C._are_functorch_transforms_active() else super(Function, cls)
        return parent.apply(*unwrap_dead_wrappers(args))


# ---- gradients


def has_gradient(param: FSDPParam) -> bool:
    """Return whether ``param`` has an unsharded gradient, new or accumulated. Call it only after an unshard."""
    return param._unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None


def take_gradient(param: FSDPParam) -> Tensor | None:
    """Remove and return the unsharded gradient of the last backward; if there is none, the accumulated one."""
    gradient: Tensor | None = None
    if param.unsharded_param.grad is not None:
        gradient, param.unsharded_param.grad = param.unsharded_grad_data, None
    elif param.unsharded_accumulated_grad is not None:
        gradient, param.unsharded_accumulated_grad = param.unsharded_accumulated_grad_data, None
    return gradient


def divided_by(group: FSDPParamGroup, dtype: torch.dtype) -> float:
    """Return the divisor that torch has applied to a gradient before its reduction, as in fp16; 1 if none."""
    ranks, factor = group._reduce_scatter_process_group, group.gradient_divide_factor
    before, *_ = _get_gradient_divide_factors(
        ranks, None, dtype, group.device.type, factor, group.force_sum_reduction_for_comms
    )
    # Over one rank torch scatters nothing, but divides by the whole factor.
    instead = factor if factor is not None and ranks.size() == 1 else 1.0
    return float(before or 1) * instead


def flatten_gradients(group: FSDPParamGroup, params: Sequence[FSDPParam], gradients: Sequence[Tensor | None]) -> Tensor:
    """Return unsharded gradients in one flat tensor [world * numel], chunk i for rank i; None stands for zeros.

    Layout and dtype are those of torch's reduction, and ``params`` must be in the order of that reduction.
    """
    world = group._reduce_scatter_process_group.size()
    dtype = _gradient_dtype(group, params)
    parts: list[Tensor] = []
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is None:
            gradient = param._get_grad_inner_tensor(torch.zeros_like(param.unsharded_param, dtype=dtype))
        if param.fsdp_placement.dim != 0 and world > 1:
            # The copy below cuts along dimension 0, so move shards along another dimension there.
            gradient = torch.cat(gradient.chunk(world, dim=param.fsdp_placement.dim), dim=0)
        parts.append(gradient.to(dtype))
    numel = sum(_get_dim0_padded_size(part.size(), world).numel() for part in parts)
    flat = torch.empty(numel, dtype=dtype, device=group.device)
    foreach_reduce_scatter_copy_in(parts, flat, world)
    return flat


def _gradient_dtype(group: FSDPParamGroup, params: Sequence[FSDPParam]) -> torch.dtype:
    """Return the dtype in which torch reduces; the same on all ranks, whichever gradients they have."""
    if group._reduce_dtype is not None:
        return group._reduce_dtype
    # From torch 2.14 on, gradients may have another dtype than the unsharded parameters.
    dtypes = [getattr(param, "unsharded_grad_dtype", None) or param.unsharded_param.dtype for param in params]
    return reduce(torch.promote_types, dtypes)


# ---- gather inputs
#
# [Note: Own bytes]
# A tensor subclass may encode itself for the all-gather: ``fsdp_pre_all_gather`` returns tensors and metadata, and
# ``fsdp_post_all_gather`` makes the unsharded parameter from all ranks' tensors. Float8 training in torchao does: it
# casts to 8 bits before the gather. These bytes are encoded already, and go through both hops and into the
# secondary shard as they are. The group's other parameters are sent along in their compute dtype. A gather that
# reuses a secondary shard does not call ``fsdp_pre_all_gather``, so the metadata of the last call is kept.
#
# Some subclasses, such as torchao's MXFP8 weights, send their values in the compute dtype instead of bytes of their
# own. A codec encodes these values like any others.


Result = Callable[[Tensor, Any], AllGatherResult]
"""Makes torch's result of a gather from its output and an event."""


def gather_result(dtypes: list[list[torch.dtype]], numels: list[list[int]], sizes: list[int]) -> Result:
    return partial(
        AllGatherResult,
        all_gather_work=None,
        param_all_gather_input_dtypes=dtypes,
        param_all_gather_input_numels=numels,
        all_gather_input_split_sizes=sizes,
    )


def encodes_itself(param: FSDPParam) -> bool:
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def has_own_bytes(params: Sequence[FSDPParam]) -> bool:
    """Return whether a parameter encodes itself as bytes of its own. Collective if ``fsdp_pre_all_gather`` is."""
    # A list, so that ``any`` does not stop at the first True: all ranks must enter the same collectives.
    return any([not _sends_values(param) for param in params if encodes_itself(param)])  # noqa: C419


@torch.no_grad()
def _sends_values(param: FSDPParam) -> bool:
    first, *others = param.all_gather_inputs
    dtype = param.param_dtype or param.orig_dtype
    # Accept the numel with padding and without it: only some ranks have padding.
    numels = param._sharded_local_tensor.numel(), param._sharded_param_data.numel()
    return not others and first.dtype == dtype and first.numel() in numels


# ---- plan


class GatherPlan:
    """Plan of all gathers of a group, valid until parameters are moved, cast or replaced.

    Attributes:
        mixed: Whether parameters have several compute dtypes.
        joins: Whether ranks gather torch's all-gather inputs, joined, instead of the shards: if a parameter encodes
            itself, or if there is no codec and dtypes are mixed. See [Note: Own bytes].
        dtype: The dtype of the gathered tensor; uint8 for joined inputs without a codec.
        shard_numel, numel: Elements that a rank sends and receives; with ``joins``, 0 before :meth:`join_inputs`.
        memory: The gathered shards, except tensor subclasses, which may have no storage.
        counted: The tensors whose version counters count writes: the parameters and their shards.
        swaps: A :class:`Swap` of each parameter, from the first unshard on; empty if some parameter is not plain.
    """

    def __init__(self, group: FSDPParamGroup, encodes: bool) -> None:
        self._params = params = group.fsdp_params
        shards = [param._sharded_param_data for param in params]
        dtypes = [param.param_dtype or shard.dtype for param, shard in zip(params, shards, strict=True)]
        numels = [shard.numel() for shard in shards]
        self._world = group._all_gather_process_group.size()
        self.mixed = any(dtype != dtypes[0] for dtype in dtypes)
        self.dtype = reduce(torch.promote_types, dtypes)
        self.joins = any(map(encodes_itself, params)) or (self.mixed and not encodes)
        if self.joins and not encodes:
            self.dtype = torch.uint8
        self.layout = layout_of(group, params, range(len(params)))
        self.memory = [shard for shard in shards if type(shard) is Tensor]
        self.counted = [each for p in params for each in (p.sharded_param, p._sharded_local_tensor)] + shards
        sizes = [n * dtype.itemsize for n, dtype in zip(numels, dtypes, strict=True)] if self.mixed else numels
        self.shard_numel = 0 if self.joins else sum(numels)
        self.numel = self.shard_numel * self._world
        self.result = gather_result([[dtype] for dtype in dtypes], [[numel] for numel in numels], sizes)
        # Joining shards of several dtypes would promote them, which could change packed bytes.
        self.cast_before_joining = not encodes and any(shard.dtype != shards[0].dtype for shard in shards)
        self._numels, self._dtypes = numels, dtypes
        self.swaps: list[Swap] = []
        self._views: list[Tensor] = []
        self._extensions: list[tuple[FSDPParam, Any, Sequence[torch.Size]]] = []  # with the metadata of the last inputs

    @torch.no_grad()
    def join_inputs(self) -> Tensor:
        """Return the current all-gather input, flat [shard_numel]; collective if ``fsdp_pre_all_gather`` is."""
        params, as_bytes = self._params, self.dtype == torch.uint8
        # Autograd may save these tensors and metadata later, and can't save inference tensors.
        with torch.inference_mode(False):
            by_param = _get_param_all_gather_inputs(params)
            flat = [each.view(-1) for inputs in by_param for each in inputs]
            joined = torch.cat([each.view(torch.uint8) if as_bytes else each.to(self.dtype) for each in flat])
        self.result = gather_result(
            [[each.dtype for each in inputs] for inputs in by_param],
            [[each.numel() for each in inputs] for inputs in by_param],
            [each.nbytes if self.mixed or as_bytes else each.numel() for each in flat],
        )
        extensions = ((param, param._extensions_data) for param in params if encodes_itself(param))
        self._extensions = [(p, data.all_gather_metadata, data.all_gather_input_sizes) for p, data in extensions]
        self.shard_numel = joined.numel()
        self.numel = self.shard_numel * self._world
        return joined

    def tell_torch(self) -> None:
        """Give torch the metadata of the last inputs, since torch clears it after each unshard."""
        for param, metadata, sizes in self._extensions:
            param._extensions_data.all_gather_metadata = metadata
            param._extensions_data.all_gather_input_sizes = sizes

    def prepare_swaps(self, group: FSDPParamGroup) -> None:
        """After torch's first unshard of a group, make its swaps if all its parameters are plain."""
        params = group.fsdp_params
        if self.joins or self._world == 1 or torch.is_inference_mode_enabled() or not all(map(_is_plain, params)):
            return
        self.swaps = [Swap.of(param) for param in params]
        self._views = [_beside(param.all_gather_outputs[0], self._world) for param in params]

    @torch.no_grad()
    def fill(self, gathered: Tensor) -> None:
        """Copy the gathered output, flat [numel], into the unsharded parameters' memory."""
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
        """Return the gathered output, flat [numel], cast to each parameter's dtype, as the bytes that torch expects."""
        parts = gathered.view(self._world, -1).split(self._numels, dim=1)
        cast = (part.to(dtype).contiguous() for part, dtype in zip(parts, self._dtypes, strict=True))
        return torch.cat([part.view(torch.uint8) for part in cast], dim=1).view(-1)

    def unshard(self) -> None:
        for param, unsharded, sites, _, _ in self.swaps:
            sharded = param.sharded_param
            if sharded.requires_grad != unsharded.requires_grad:
                unsharded.requires_grad_(sharded.requires_grad)
            for module, name in sites:
                module._parameters[name] = unsharded
            param.sharded_state = ShardedState.UNSHARDED

    def reshard(self) -> None:
        """Have modules show the sharded parameters, and free the memory of the unsharded ones."""
        self.show_shards()
        for param, _, _, storage, _ in self.swaps:
            if not getattr(param, "keep_unsharded_storage", False):  # from torch 2.15 on
                storage.resize_(0)

    def show_shards(self) -> None:
        """Have modules show the sharded parameters, and keep the memory of the unsharded ones."""
        for param, _, sites, _, _ in self.swaps:
            for module, name in sites:
                module._parameters[name] = param.sharded_param
            param.sharded_state = ShardedState.SHARDED


class Swap(NamedTuple):
    """A parameter and its ``sites``: each module that has it, with the parameter's name in that module.

    ``storage`` is that of the unsharded parameter, and has ``nbytes`` bytes while the parameter is unsharded.
    """

    param: FSDPParam
    unsharded: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    storage: torch.UntypedStorage
    nbytes: int

    @classmethod
    def of(cls, param: FSDPParam) -> Swap:
        info, output = param._module_info, param.all_gather_outputs[0]
        sites = (info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)
        return cls(param, param._unsharded_param, sites, output.untyped_storage(), output.nbytes)


def show_shards(params: Sequence[FSDPParam]) -> None:
    """Show the sharded parameters as torch's ``to_sharded`` does, but keep the memory of the unsharded ones."""
    for param in params:
        param._setattr_on_modules(param.sharded_param)
        param.sharded_state = ShardedState.SHARDED


def _beside(output: Tensor, world: int) -> Tensor:
    """Return a [world, numel] tensor in the memory of ``output``, with a version counter of its own."""
    # Autograd has saved the unsharded parameters, so a write that restores their values must not count as a change.
    numel = output.numel() // world
    return output.new_empty(0).set_(output.untyped_storage(), 0, (world, numel), (numel, 1))


def _is_plain(param: FSDPParam) -> bool:
    info = param._module_info
    return (
        hasattr(param, "_unsharded_param")
        and not param.is_dtensor  # under another parallelism
        and param.fsdp_placement.dim == 0
        and len(param.all_gather_outputs) == 1
        and not param.all_gather_outputs[0].is_inference()
        and all(type(module).__setattr__ is nn.Module.__setattr__ for module in (info.module, *info.shared_modules))
    )


# ---- flat layout
#
# Small parameters come last: in front of a large one, they would shift it, and a block could span two large ones. Large
# ones are sorted by the axes along which another parallelism shards them. See the notes in flat_layout.py.


def order_parameters(group: FSDPParamGroup) -> None:
    params = group.fsdp_params
    axes = axes_of(params)
    exact = sent_exactly([param._orig_size for param in params])
    keys = [(is_exact, len(along), along) for is_exact, along in zip(exact, axes, strict=True)]
    group.fsdp_params = [params[place] for place in sorted(range(len(params)), key=keys.__getitem__)]


def layout_of(group: FSDPParamGroup, params: Sequence[FSDPParam], places: Sequence[int]) -> FlatLayout:
    """Return the layout of a rank's part of a flat tensor of ``params``; ``places`` are their indices in the group."""
    pieces = [
        Piece(place, param._param_fqn or "", param._sharded_param_data.numel())
        for place, param in zip(places, params, strict=True)
    ]
    # Keys are parameters, since FQNs are not known before the first forward.
    exact = dict(zip(group.fsdp_params, sent_exactly([p._orig_size for p in group.fsdp_params]), strict=True))
    return FlatLayout.dense(pieces, [exact[param] for param in params], axes_of(params))


def axes_of(params: Iterable[FSDPParam]) -> list[tuple[str, ...]]:
    sharded = [param.sharded_param for param in params]
    return sharded_along((tensor.device_mesh, tensor.placements) for tensor in sharded if isinstance(tensor, DTensor))


# ---- comms


class StrategyAllGather(AllGather):
    """Tells torch and users that a strategy gathers; it is never called, since :class:`StrategyGroup` gathers."""

    allocate = staticmethod(torch.empty)

    def __call__(self, *unused: object) -> None:
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class GroupReduction:
    """Reduces a group's gradient of a step, in ``layout``; ``idle`` has the parameters that this rank has not used."""

    reductions: StepReductions
    group: FSDPParamGroup
    layout: FlatLayout = NO_PARAMETERS
    idle: Collection[str] = ()


@dataclass(eq=False, repr=False)
class StrategyReduceScatter(GroupReduction, ReduceScatter):
    """Reduces a group's gradient of a step.

    If there are two hops, a call makes only the first. :meth:`finish`, torch's all-reduce hook, makes the second in the
    all-reduce stream, and then calls the user's own ``hook``.
    """

    hook: Callable[[Tensor], None] | None = None
    pending: PendingReduction | None = None

    allocate = staticmethod(torch.empty)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        reduce, world = self.reductions.current, self.reductions.mesh.topology.world
        assert reduce is not None, "one rank is not sharded over"
        # torch asks for the average, unless there is a risk of overflow or a divide factor was set.
        factor = _factor_of(op, group.size(), world, self.group.gradient_divide_factor)
        # Accumulated gradients still need the division that torch has applied to this gradient.
        divisor = divided_by(self.group, input_tensor.dtype) if reduce.accumulated.sums is not None else 1.0
        finish = reduce.start(input_tensor, output_tensor, factor, self.layout, divisor, self.idle)
        if reduce.has_two_hops:
            self.pending = finish
        else:
            finish()

    def finish(self, gradient: Tensor) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()
        if gradient.is_cuda:
            # torch frees the gradient in the reduce-scatter stream, but the current stream reads it.
            keep_until_read(gradient)
        if self.hook is not None:
            self.hook(gradient)


class StrategyAllReduce(GroupReduction):
    """The all-reduce hook that reduces a group's gradient where torch shards over one rank and scatters nothing."""

    def __call__(self, gradient: Tensor) -> None:
        reduce = self.reductions.current
        if reduce is None:  # local steps in a node of one rank
            return
        factor = 1.0
        if (divide_factor := self.group.gradient_divide_factor) is not None:
            # The result is the sum over all ranks, divided by this factor once. Over one rank, torch has divided by it
            # once already. With fp16 or forced sums, it divides once more, partly or wholly after this hook.
            around_sum = self.group.force_sum_reduction_for_comms or gradient.dtype == torch.float16
            factor = self.reductions.mesh.topology.world * (divide_factor if around_sum else 1.0)
        divisor = divided_by(self.group, gradient.dtype) if reduce.accumulated.sums is not None else 1.0
        finish = reduce.start(gradient, gradient, factor, self.layout, divisor, self.idle)
        finish()
        # torch frees the gradient in the reduce-scatter stream, as in StrategyReduceScatter.finish.
        keep_until_read(gradient)


def _factor_of(op: ReduceOp | ReduceOp.RedOpType, sharded_over: int, world: int, divide_factor: float | None) -> float:
    """Return torch's reduction as a multiple of the mean; raise a ValueError if ``op`` is neither a sum nor a mean.

    torch counts only the ``sharded_over`` ranks, without replicas. A user's ``divide_factor`` divides the whole sum.
    """
    summed = sharded_over if divide_factor is None else world
    if op == ReduceOp.AVG:
        return summed / sharded_over
    if op == ReduceOp.SUM:
        return float(summed)
    if op == ReduceOp.PREMUL_SUM:
        return float(summed * op.__getstate__()[1])  # type: ignore[index]  # the factor, which has no accessor
    raise ValueError(f"a Strategy reduces gradients by sum or average, not by {op}")


# ---- weights
#
# [Note: Kept weights]
# Under parameter scope N, a reshard makes modules show the sharded parameters, but keeps the gathered memory until the
# weights change. So new optimizers, ``requires_grad_``, writes and state dicts see the same tensors as with torch's
# own strategies. The next unshard makes modules show the kept memory again instead of gathering.


class GroupWeights:
    """A parameter group's weights: the values to gather and put in the secondary shard, and the memory that it keeps.

    Attributes:
        reuses: Whether gathers reuse the result of an earlier one.
        staleness_guard: The secondary shard, which knows whether kept weights are stale; None if the strategy does not
            keep weights unsharded from one micro-batch to the next.
        is_kept: Whether the memory of unsharded weights is kept while modules show shards.
        puts_back: Whether the unshard in progress shows the kept memory again, instead of gathering.
        was_gathered: Whether ranks have gathered the group for the current micro-batch; the same on all ranks.
    """

    def __init__(self, group: FSDPParamGroup, unit: StrategyUnit) -> None:
        self._group = group
        self._version = ShardVersion()
        self.is_kept = self.puts_back = self.was_gathered = False
        self.follow(unit)

    def follow(self, unit: StrategyUnit) -> None:
        """Use the unit's gather from now on, or torch's if the unit has none."""
        self.gather = gather = unit.gather
        self.plan: GatherPlan | None = None
        self.comm: StrategyAllGather | None = None
        self.staleness_guard: SecondaryShard | None = None
        self.reuses = unit.keeps_weights
        if gather is not None:
            gather.secondary.source = self
            self.staleness_guard = gather.secondary if unit.keep_unsharded else None
            self.comm = StrategyAllGather()

    def make_plan(self) -> GatherPlan:
        self.plan = GatherPlan(self._group, self.is_encoded)
        return self.plan

    @property
    def is_encoded(self) -> bool:
        gather = self.gather
        return gather is not None and gather.secondary.codec is not None and self._group._all_gather_comm is self.comm

    # ---- weights that are kept, see [Note: Kept weights]

    def is_fresh(self) -> bool:
        """Return whether the kept weights are fresh, and drop them if they are stale; the same on all ranks.

        Raises:
            StaleSecondaryError: If the weights have changed without an event.
        """
        assert self.staleness_guard is not None
        if self.staleness_guard.stale:
            self.drop_kept()
            return False
        self.staleness_guard.check_version(self.shard_version())
        return True

    def drop_kept(self) -> None:
        if self.is_kept:
            for param in self._group.fsdp_params:
                if not getattr(param, "keep_unsharded_storage", False):  # from torch 2.15 on
                    param.free_unsharded_param()
            self.is_kept = self.puts_back = self.was_gathered = False

    # ---- methods of ShardSource, which are called before torch's gather

    def can_be_read(self) -> bool:
        if torch._C._current_graph_task_id() != -1:  # an optimizer in the backward may make a prefetch stale
            return False
        plan, group = self.plan or self.make_plan(), self._group
        # Joined inputs must have a known size, and must not replace the metadata that a gather in flight still needs.
        return not plan.joins or (plan.numel > 0 and group.is_sharded and group._all_gather_result is None)

    def prepare_read(self) -> int:
        # Nothing is written back, since parameters are views of the shard.
        return (self.plan or self.make_plan()).shard_numel

    def read(self) -> ShardValues:
        """Return the flat, padded shards of all parameters, in the order in which the group gathers them."""
        plan, device = self.plan or self.make_plan(), self._group.device
        params = self._group.fsdp_params
        shards = [plan.join_inputs()] if plan.joins else [param._sharded_param_data for param in params]
        if shards[0].device != device:
            shards = [shard.to(device, non_blocking=True) for shard in shards]
        if plan.cast_before_joining:
            shards = [shard.to(plan.dtype) for shard in shards]
        trained = any(map(requires_gradient, params))
        return ShardValues(shards, plan.shard_numel, self._version.of(plan.memory, plan.counted), trained)

    def compares_contents(self) -> bool:
        return self._version.of_contents

    def keeps_gathered(self) -> bool:
        return self.staleness_guard is not None and (self.is_kept or self._group.is_unsharded)

    def layout(self, numel: int) -> FlatLayout:
        return (self.plan or self.make_plan()).layout

    def shard_version(self) -> Hashable:
        plan = self.plan or self.make_plan()
        return self._version.of(plan.memory, plan.counted)

    def share_version_counters(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
    ) -> None:
        """Make writes to the values in a state dict of ``module`` count as writes to the shards. A state dict hook."""
        # torch detaches parameters in DTensor's dispatch, below autograd. So the local tensors of the values share the
        # memory of the shards, but not their version counters.
        for param in self._group.fsdp_params:
            info, local = param._module_info, param._sharded_local_tensor
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            for owner, name in ((info.module, info.param_name), *shared):
                value = state_dict.get(prefix + name) if owner is module else None
                # Another hook may have replaced the value.
                if isinstance(value, DTensor) and _memory(value._local_tensor) == _memory(local):
                    value._local_tensor = local

    def is_trained(self) -> bool:
        return any(map(requires_gradient, self._group.fsdp_params))


def _memory(tensor: Tensor) -> list[tuple[Hashable, ...]]:
    parts = plain_parts(tensor)
    return [(part.untyped_storage()._cdata, part.storage_offset(), part.shape) for part in parts]


def requires_gradient(param: FSDPParam) -> bool:
    """Return whether a parameter requires a gradient, in its sharded form or in its last unsharded one."""
    # ``requires_grad_`` on a module changes the tensors that the module shows at that moment. If a forward has left a
    # root unsharded, these are only the unsharded ones. PEFT switches adapters by ``requires_grad_``.
    if param.sharded_param.requires_grad:
        return True
    unsharded = getattr(param, "_unsharded_param", None)  # there is none before the first gather
    return unsharded is not None and unsharded.requires_grad
