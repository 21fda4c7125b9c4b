"""Private names of FSDP1: its instances, the layout of a flat parameter, and the gradient of a step."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    _init_utils,
    _runtime_utils as runtime,
    fully_sharded_data_parallel as _wrapper,
)
from torch.distributed.fsdp._common_utils import TrainingState, _no_dispatch_record_stream as no_dispatch_record_stream
from torch.distributed.fsdp._flat_param import (
    FlatParameter,
    FlatParamHandle,
    HandleShardingStrategy,
    HandleTrainingState,
)
from torch.nn.modules import module as torch_module

from fsdp_zpp.comm.flat_layout import FlatLayout, Piece, boundaries_between, keep_recent, sent_exactly, sharded_along
from fsdp_zpp.comm.gradient_reduce import StepGradients, StepReductions
from fsdp_zpp.runtime._torch_rank_layout import mesh_over

# ---- construction
#
# The adapter uses internals of torch only in this file and ``_torch_handle.py``; ``_torch_compat.py`` lists them.


@contextmanager
def sharding_over(
    module: FullyShardedDataParallel, strategy: Hashable, group: dist.ProcessGroup, *, sharded: bool
) -> Iterator[None]:
    """While FSDP constructs ``module`` with ``strategy``, have it shard over ``group`` if ``sharded``, else not at all.

    If ``group`` is only a part of the user's group, FSDP still broadcasts the initial module states over the user's
    group. All other communication goes over ``group``.
    """
    strategies: dict[Any, HandleShardingStrategy] = _init_utils.SHARDING_STRATEGY_MAP
    init_handle = _init_utils._init_param_handle_from_params
    init_group = _wrapper._init_process_group_state
    synchronize = _init_utils._sync_module_params_and_buffers
    users_group: dist.ProcessGroup | None = None

    def init_shard_group(state: FullyShardedDataParallel, *args: object) -> FullyShardedDataParallel:
        init_group(state, *args)
        if state is module:
            nonlocal users_group
            users_group = state.process_group
            if group is not users_group:
                state.process_group, state.rank, state.world_size = group, group.rank(), group.size()
                # A strategy reduces without these factors. On a rank that is alone, torch must not divide by them.
                state._gradient_predivide_factor, state._gradient_postdivide_factor = 1, 1
        return state

    def synchronize_all(module: nn.Module, params: list[nn.Parameter], process_group: dist.ProcessGroup) -> None:
        assert users_group is not None
        synchronize(module, params, users_group)

    def init_own_handle(state: FullyShardedDataParallel, *args: Any) -> None:
        # Set the entry only now: FSDP has made nested instances under the same key, maybe sharded in another way.
        if state is module:
            strategies[strategy] = HandleShardingStrategy.FULL_SHARD if sharded else HandleShardingStrategy.NO_SHARD
        init_handle(state, *args)

    with (
        patch.multiple(_init_utils, _init_param_handle_from_params=init_own_handle),
        patch.multiple(_init_utils, _sync_module_params_and_buffers=synchronize_all),
        patch.multiple(_wrapper, _init_process_group_state=init_shard_group),
    ):
        yield
    users_mesh = module._device_mesh
    if users_mesh is not None and group is not users_group:
        # Set it after construction: FSDP's constructor mistakes any mesh but its argument for part of a larger one.
        module._device_mesh = mesh_over(group, users_mesh)
    if not sharded:
        module.sharding_strategy = ShardingStrategy.NO_SHARD  # torch's state dicts read this


@contextmanager
def frozen_apart(
    module: FullyShardedDataParallel, wrap: Callable[[set[nn.Parameter]], FullyShardedDataParallel]
) -> Iterator[None]:
    """While FSDP constructs ``module``, move its frozen parameters to an inner instance if it also has trainable ones.

    ``wrap(ignored)`` makes the inner instance, around the wrapped module, with all parameters but the ignored ones.
    """
    # If frozen and trainable parameters shared a flat parameter, FSDP would allocate and reduce gradients for both.
    init_handle = _init_utils._init_param_handle_from_params
    frozen_unit: FullyShardedDataParallel | None = None

    def init_handles(
        state: FullyShardedDataParallel, params: list[nn.Parameter], fully_sharded_module: nn.Module
    ) -> None:
        nonlocal frozen_unit
        trainable = [p for p in params if p.requires_grad]
        if state is module and 0 < len(trainable) < len(params):
            frozen_unit = wrap(set(trainable) | state._ignored_params)
            params = trainable
        init_handle(state, params, fully_sharded_module)

    with patch.multiple(_init_utils, _init_param_handle_from_params=init_handles):
        yield
    if frozen_unit is not None:
        _TAKEN_OUT.add(frozen_unit)
        module._fsdp_wrapped_module = frozen_unit
        frozen_unit._ignored_modules = module._ignored_modules
        frozen_unit._ignored_buffer_names = module._ignored_buffer_names


_TAKEN_OUT: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()
"""The inner instances that :func:`frozen_apart` has made."""


def summon_frozen_too(original: Any) -> Callable[..., Any]:
    """Have ``summon_full_params(recurse=False)`` also summon the frozen parameters in the inner instance."""

    @contextmanager
    def unshard_params(module: nn.Module, recurse: bool, *args: object, **kwargs: object) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(original(module, recurse, *args, **kwargs))
            frozen_unit = getattr(module, "_fsdp_wrapped_module", None)
            if not recurse and frozen_unit in _TAKEN_OUT:
                stack.enter_context(original(frozen_unit, recurse, *args, **kwargs))
            yield

    return unshard_params


def intercept_construction(
    around: Callable[[Callable[[], None], FullyShardedDataParallel, dict[str, Any]], None], original: Any
) -> Callable[..., None]:
    """Return a function that calls ``around(construct, module, arguments)`` in place of FSDP's constructor.

    ``construct()`` runs FSDP's constructor with ``arguments``. ``around`` may change the arguments first.
    """
    signature = inspect.signature(original)

    def init(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            original(self, *args, **kwargs)  # to raise its own error
            return
        bound.apply_defaults()
        around(lambda: original(*bound.args, **bound.kwargs), self, bound.arguments)

    return init


def intercept_hook_registration(
    before: Callable[[FullyShardedDataParallel, object], dict[FullyShardedDataParallel, object]], original: Any
) -> Callable[..., None]:
    """Call ``before(model, state)`` before each ``register_comm_hook``; then give instances the states it returns."""

    def register_comm_hook(self: FullyShardedDataParallel, state: object, hook: Callable[..., object]) -> None:
        own_states = before(self, state)
        original(self, state, hook)
        for instance, own_state in own_states.items():
            instance._comm_hook_state = own_state

    return register_comm_hook


def on_lazy_init(callback: Callable[[nn.Module], None], original: Any) -> Callable[..., None]:
    """Run ``callback(root)`` once for each root, during FSDP's lazy initialization of the root."""

    def share_state_and_init_handle_attrs(root_state: FullyShardedDataParallel, root_module: nn.Module) -> None:
        original(root_state, root_module)
        callback(root_module)

    return share_state_and_init_handle_attrs


def around_moves(
    before: Callable[[FullyShardedDataParallel], None], after: Callable[[FullyShardedDataParallel], None], original: Any
) -> Callable[..., FullyShardedDataParallel]:
    """Call ``before(instance)`` and ``after(instance)`` around each move or cast, such as ``to()`` or ``half()``."""

    # All moves and casts go through _apply, module by module.
    def _apply(self: FullyShardedDataParallel, *args: object, **kwargs: object) -> FullyShardedDataParallel:
        before(self)
        moved: FullyShardedDataParallel = original(self, *args, **kwargs)
        after(self)
        return moved

    return _apply


def save_optimizer_states_in_any_group(original: Any) -> Callable[..., object]:
    """Have FSDP gather the keys of optimizer states in groups without global rank 0."""

    # FSDP broadcasts the keys from global rank 0. If a model is sharded inside nodes, only one node has this rank.
    def map_param_key_to_optim_keys(
        optim_state_dict: dict[str, object], group: dist.ProcessGroup | None, *args: object, merge_keys: bool = False
    ) -> object:
        elsewhere = group is not None and dist.get_process_group_ranks(group)[0] != 0
        return original(optim_state_dict, group, *args, merge_keys=merge_keys or elsewhere)

    return map_param_key_to_optim_keys


def load_optimizer_states_over(
    ranks_of: Callable[[nn.Module], dist.ProcessGroup | None], original: Any
) -> Callable[..., object]:
    """If only rank 0 loads optimizer states, have FSDP send them over ``ranks_of(model)``; None keeps FSDP's group."""
    # FSDP sends them over the group of the shards. If a model is sharded inside nodes, this group is one node.
    signature = inspect.signature(original)

    def optim_state_dict_to_load_impl(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        ranks = ranks_of(bound.arguments["model"]) if bound.arguments.get("rank0_only") else None
        if ranks is not None:
            bound.arguments["group"] = ranks
        return original(*bound.args, **bound.kwargs)

    return optim_state_dict_to_load_impl


# ---- compile

_REASON = (
    "torch.compile can't compile a whole FullyShardedDataParallel with a Strategy: its graphs do not see where weights "
    "are gathered; compile each layer before you wrap the model, layer.compile(), and pass use_orig_params=True, or "
    "use fully_shard"
)


def refuse_whole_graphs(instance: FullyShardedDataParallel) -> None:
    """Make the forward of ``instance`` raise if torch.compile traces it and the instance is a root."""
    own = weakref.ref(instance)

    def is_inner() -> bool:
        itself = own()
        return itself is not None and itself._is_root is False  # _is_root is None until FSDP's lazy initialization

    # If traced code raised, Dynamo would run its frame again without a graph. So Dynamo must not trace this function.
    # With fullgraph=True, Dynamo itself raises an error with the reason.
    @torch.compiler.disable(reason=_REASON)
    def refuse(unused: Tensor) -> None:
        if not is_inner():
            raise RuntimeError(_REASON)

    def before_forward(*unused: object) -> None:
        # Dynamo skips frames that touch an instance with a flat parameter, and frames without tensors. So in a trace,
        # this function makes a tensor, and leaves the instance to refuse().
        if torch.compiler.is_compiling():
            refuse(torch.empty(0))
        elif is_inner():
            handle.remove()

    handle = instance.register_forward_pre_hook(before_forward)


# ---- flat layout


class FlatParameterLayout:
    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self._whole: FlatLayout | None = None
        self._of_trained: dict[tuple[int, tuple[bool, ...]], FlatLayout] = {}  # the last few

    def whole(self, numel: int) -> FlatLayout:
        """Return the layout of all parameters in a tensor of ``numel`` values, padding included."""
        whole = self._whole
        if whole is None or whole.numel != numel:
            whole = self._whole = _layout(self._handle.flat_param, numel, ())
        return whole

    def trained(self, numel: int) -> FlatLayout:
        """Return the layout of the trained parameters in a tensor of ``numel`` values; frozen ones are gaps in it."""
        flags = tuple([parameter.requires_grad for parameter in self._handle.flat_param._params or ()])
        layout = self._of_trained.get((numel, flags))
        if layout is None:
            layout = keep_recent(self._of_trained, (numel, flags), _layout(self._handle.flat_param, numel, flags))
        return layout

    def around(self, shard: Tensor) -> tuple[FlatLayout, int]:
        """Return the layout of all parameters, and the offset of this rank's shard in it."""
        handle = self._handle
        ranks, rank = (handle.world_size, handle.rank) if handle.uses_sharded_strategy else (1, 0)
        return self.whole(ranks * shard.numel()), rank * shard.numel()


def axes_of(flat_param: FlatParameter) -> list[tuple[str, ...]]:
    """Return the mesh dimensions along which another parallelism shards each original parameter."""
    specs = flat_param._param_extensions
    return sharded_along(None if spec is None else (spec.mesh, spec.placements) for spec in specs)


def _layout(flat_param: FlatParameter, numel: int, trained: tuple[bool, ...]) -> FlatLayout:
    pieces: list[Piece] = []
    starts: list[int] = []
    small: list[tuple[int, int]] = []
    placed: list[tuple[int, tuple[str, ...]]] = []
    axes = axes_of(flat_param)
    exact = sent_exactly(flat_param._shapes)
    start = order = 0
    for size, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True):
        if not is_padding:
            if not trained or trained[order]:
                pieces.append(Piece(order, flat_param._fqns[order], size))
                starts.append(start)
            if exact[order]:
                small.append((start, start + size))
            else:
                placed.append((start, axes[order]))
            order += 1
        start += size
    boundaries = boundaries_between(placed)
    return FlatLayout(tuple(pieces), tuple(starts), numel, tuple(small), is_fixed=True, boundaries=boundaries)


# ---- views
#
# At each unshard and reshard, four times a step, torch makes new views of a unit's parameters. This takes a fifth of
# FSDP's time in Python, and the new views nearly always equal the old ones. Here, views of the shard are made once, and
# views of gathered weights once a forward. Modules switch between these until the parameters are moved or replaced.


class ShardViews(NamedTuple):
    """The views of a unit's shard that torch has made for its parameters; those with no part on this rank are empty."""

    sites: list[tuple[nn.Module, str]]
    parameters: list[nn.Parameter]
    memory: list[int]
    """Addresses of the shard and parameters. Views keep memory alive, so equal addresses mean the same memory."""
    shapes: list[torch.Size]


class ParameterViews:
    """Makes modules *show* views, as attributes in place of a unit's parameters, in fewer steps than torch.

    ``are_direct`` says that writing to the dictionaries of modules does all that ``setattr`` would do.
    """

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self._of_shard: ShardViews | None = None
        self.are_direct = _can_set_directly(handle)

    def drop(self) -> None:
        """Drop the views after parameters or the shard were moved or replaced; torch then makes new ones."""
        self._of_shard = None

    # ---- while the unit is sharded, parameters are views of the shard

    # Checks over all parameters use lists, since a generator's frame costs more than most checks.

    def _hold(self, views: ShardViews) -> bool:
        shapes = [parameter.shape for parameter in views.parameters]
        return shapes == views.shapes and self._memory(views.parameters) == views.memory

    def _memory(self, parameters: list[nn.Parameter]) -> list[int]:
        return [each.data_ptr() for each in (self._handle.flat_param, *parameters)]

    def show_shard(self) -> bool:
        """Have modules show the cached views of the shard if they are valid; return whether they do."""
        views = self._of_shard
        if views is None or not self._hold(views):
            return False
        for (module, name), parameter in zip(views.sites, views.parameters, strict=True):
            set_parameter(module, name, parameter)
        return True

    def keep(self) -> None:
        """Cache the sharded views that torch just created."""
        handle, flat_param = self._handle, self._handle.flat_param
        may_last = (
            self.are_direct
            and handle.uses_sharded_strategy
            and not handle._skip_writeback_check
            and not flat_param._shared_param_infos
            and not torch.is_inference_mode_enabled()  # inference tensors can't be trained
        )
        self.drop()
        if may_last:
            parameters = list(flat_param._params or ())
            sites = [(module, name) for name, module, _ in flat_param._param_infos]
            shapes = [parameter.shape for parameter in parameters]
            self._of_shard = ShardViews(sites, parameters, self._memory(parameters), shapes)

    def are_written_back(self) -> bool:
        """Return whether no writeback is due: parameters still are views of the shard, and have no gradients."""
        flat_param, views = self._handle.flat_param, self._of_shard
        if views is None or flat_param.data_ptr() != views.memory[0]:
            return False
        shown = [module._parameters.get(name) for module, name in views.sites]
        if not (self._hold(views) and all(map(operator.is_, shown, views.parameters))):
            self.drop()  # before torch's writeback, which may raise
            return False
        gradients = [parameter.grad for parameter in (flat_param, *views.parameters)]
        return all(map(operator.is_, gradients, repeat(None)))

    # ---- while the unit is unsharded, modules show views of the gathered memory

    def show_forward_views(self) -> bool:
        """Have modules show the views that the forward saved, if they are valid; return whether they do."""
        # The views stay valid unless a user replaces parameters: torch frees the gathered memory after the forward, and
        # allocates it again under the same tensors.
        flat_param = self._handle.flat_param
        if not self.are_direct or not self._handle._use_orig_params or flat_param._shared_param_infos:
            return False
        views = flat_param._tensors or []
        memory = {0 if view is None else view.untyped_storage().data_ptr() for view in views}
        if memory != {flat_param.untyped_storage().data_ptr()}:
            return False
        for (name, module, _), view in zip(flat_param._param_infos, views, strict=True):
            assert view is not None
            set_tensor(module, name, view)
        return True

    @property
    def are_shown(self) -> bool:
        """Return whether modules show views of the flat parameter in place of the parameters."""
        flat_param = self._handle.flat_param
        if not self._handle._use_orig_params:
            return True
        shown = (getattr(module, name, None) for name, module, _ in flat_param._param_infos)
        return any(now is not p for now, p in zip(shown, flat_param._params or (), strict=True))


def _can_set_directly(handle: FlatParamHandle) -> bool:
    """Return whether :func:`set_tensor` and :func:`set_parameter` do all that ``setattr`` would do on the modules."""
    flat_param = handle.flat_param
    kinds = {type(info.module) for info in flat_param._param_infos}
    kinds |= {type(info.module) for info in flat_param._shared_param_infos}
    torch_does = os.environ.get("FSDP_USE_UNSAFE_SETATTR") == "1"  # bypasses setattr, too
    return (
        handle._fsdp_extension is None
        and not torch_does
        and all(
            getattr(kind, method) is getattr(nn.Module, method)
            for kind in kinds
            for method in ("__setattr__", "__delattr__", "register_parameter")
        )
    )


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    module._parameters.pop(name, None)
    module.__dict__[name] = tensor


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module.__dict__.pop(name, None)
    module._parameters.pop(name, None)  # so that the new one goes last, as with setattr
    if torch_module._global_parameter_registration_hooks:
        module.register_parameter(name, parameter)
    else:
        module._parameters[name] = parameter


# ---- step gradients


@dataclass(eq=False, repr=False)
class HandleGradients(StepGradients):
    """Accumulates and reduces the gradient of a flat parameter over the micro-batches of a step.

    Attributes:
        was_gathered: True if ranks have gathered the weights for this micro-batch.
        took_part: True if ranks have gathered the weights for an earlier micro-batch of the step.
        is_used: True if this rank has used the unit in the step.
        is_unreduced: True if a unit without shards has accumulated gradients that are not reduced yet.
        used: The indices of original parameters that this rank has used in the step; empty without error feedback.
    """

    instance: FullyShardedDataParallel
    handle: FlatParamHandle
    layout: FlatParameterLayout
    reductions: StepReductions
    keeps_unsharded: bool
    was_gathered: bool = False
    took_part: bool = False
    is_used: bool = False
    is_unreduced: bool = False
    used: set[int] = field(default_factory=set)

    @property
    def reduces_early(self) -> bool:
        # Without shards, FSDP accumulates in the unsharded gradient that the optimizer will see.
        return self.handle.uses_sharded_strategy and self.reductions.current is not None

    @property
    def is_of_micro_batch(self) -> bool:
        """Return whether ranks have gathered the weights for this micro-batch, used or not; equal on all ranks."""
        is_gathered = self.was_gathered or (self.keeps_unsharded and not FlatParamHandle.needs_unshard(self.handle))
        return is_gathered and self.reduces_early and self.handle.flat_param.requires_grad

    @property
    def takes_part(self) -> bool:
        current = self.reductions.current
        return current is not None and current.communicates_early and self.is_of_micro_batch

    @property
    def _dtype(self) -> torch.dtype:
        handle = self.handle
        dtype = handle._orig_param_dtype if handle._force_full_precision else handle._reduce_dtype
        assert dtype is not None
        return dtype

    # ---- which parameters are used

    def watch_use(self) -> None:
        """Record which of the views that modules show now get a gradient in the next backward."""
        # A flat gradient does not show this: it has zeros for an unused parameter.
        flat_param = self.handle.flat_param
        name, module, _ = flat_param._param_infos[0]
        node = getattr(module, name).grad_fn
        if node is None:  # frozen
            return
        # One split of the flat parameter makes all views; its autograd node is the last before AccumulateGrad.
        while (before := node.next_functions[0][0]).next_functions:
            node = before
        # This object refers to the views, and they to the node, so the node must not refer to this object.
        node.register_prehook(functools.partial(_note_use, self.used, flat_param._is_padding_mask))

    # ---- before the last micro-batch

    def reduce_micro_batch(self) -> None:
        assert self.reductions.current is not None
        instance, flat_param = self.instance, self.handle.flat_param
        self._keep_reduced_gradient()
        unsharded, flat_param.grad = flat_param.grad, None
        # FSDP would take gradients that stay here for the user's, and copy them without waiting for the reduction.
        # Optimizers that step in the backward must not see them either.
        for param in (*(flat_param._params or ()), *(flat_param._shared_params or ())):
            param.grad = None
        self.took_part = True
        # Set this even without a gradient: at the end of the step, torch gives optimizers the sum only if it is set.
        self._set_post_backward_called(True)
        stream = instance._post_backward_stream
        stream.wait_stream(instance._device_handle.current_stream())
        with instance._device_handle.stream(stream):
            if unsharded is None:
                gradient = self._zeros()
            else:
                no_dispatch_record_stream(unsharded.data, stream)
                gradient = unsharded.data.to(self._dtype)
            gradient, _ = runtime._get_reduce_scatter_tensors(instance, gradient)
            finish = self.reductions.current.accumulate(gradient, self._layout_in(gradient))
            finish()

    def _keep_reduced_gradient(self) -> None:
        """Have FSDP keep the reduced gradient of an earlier backward of the step, and add to it."""
        # If the unit is not idle, FSDP has done this before the unit's backward in this micro-batch.
        if self.handle._training_state == HandleTrainingState.IDLE:
            self.handle.prepare_gradient_for_backward()

    def _zeros(self) -> Tensor:
        handle = self.handle
        return torch.zeros(handle.flat_param._unpadded_unsharded_size, dtype=self._dtype, device=handle.device)

    # ---- the last micro-batch

    def reduce(self, gradient: Tensor, out: Tensor | None = None) -> None:
        """Reduce the sum of ``gradient`` and the accumulated gradients; write this rank's part of the mean to ``out``.

        FSDP calls this as a communication hook. It passes no ``out`` for a unit without shards: the mean then replaces
        ``gradient``.
        """
        if self.reductions.current is None:
            assert out is None, "one rank is not sharded over"
            return  # a node of one rank that trains on its own
        out_or_gradient = gradient if out is None else out
        layout, idle = self._layout_in(gradient), []
        if self.reductions.current.errors is not None:
            idle = [piece.name for piece in layout.pieces if piece.order not in self.used]
        finish = self.reductions.current.start(gradient, out_or_gradient, 1.0, layout, idle=idle)
        finish()
        if out is None:
            # FSDP adds the next gradient to this tensor, and the sum is encoded. An overflow makes whole blocks NaN,
            # gaps included, and zero_grad(set_to_none=False) would leave the NaN in the gaps.
            for start, stop in self.layout.trained(gradient.shape[0]).gaps:
                gradient[start:stop].zero_()

    def _layout_in(self, gradient: Tensor) -> FlatLayout:
        # Only error feedback depends on which parameters are frozen.
        knows_frozen = self.reductions.current is not None and self.reductions.current.errors is not None
        return (self.layout.trained if knows_frozen else self.layout.whole)(gradient.shape[0])

    def reduce_accumulated(self, used_elsewhere: bool) -> None:
        """Reduce gradients of earlier micro-batches, if the unit took no part in the last one.

        ``used_elsewhere`` says that only other ranks have used the unit in the step.
        """
        if self.reductions.current is None:
            return
        instance, handle = self.instance, self.handle
        is_unreduced, self.is_unreduced = self.is_unreduced and handle.flat_param.grad is not None, False
        has_accumulated = self.reductions.current.accumulated.sums is not None or used_elsewhere
        if not is_unreduced and not has_accumulated:
            return
        self._enter_post_backward()
        instance._post_backward_stream.wait_stream(instance._device_handle.current_stream())
        with instance._device_handle.stream(instance._post_backward_stream):
            if is_unreduced:
                runtime._reduce_grad_no_shard(instance, handle)
            if has_accumulated:
                gradient, shard = runtime._get_reduce_scatter_tensors(instance, self._zeros())
                self.reduce(gradient, shard)
                shard = runtime._accumulate_sharded_grad(instance, handle, shard)
                runtime._post_reduce_grad_callback(instance, handle, shard)

    def _enter_post_backward(self) -> None:
        """Put a unit without a backward in this micro-batch into the state in which FSDP reduces."""
        # A unit that ran but got no gradient may still be unsharded.
        runtime._catch_all_reshard(self.instance)
        self._keep_reduced_gradient()
        # Pretend that a backward ran; FSDP's final callback resets these three.
        self.instance.training_state = TrainingState.FORWARD_BACKWARD
        self.handle._training_state = HandleTrainingState.BACKWARD_POST
        self._set_post_backward_called(True)

    def _set_post_backward_called(self, called: bool) -> None:
        self.handle.flat_param._post_backward_called = called  # type: ignore[attr-defined]  # undeclared in torch, too

    def drop_unused(self) -> None:
        """Drop the gradient of a unit that micro-batches have gathered but no rank has used in the step."""
        if self.reductions.current is None:
            return
        self.reductions.current.accumulated.drop()
        handle, flat_param = self.handle, self.handle.flat_param
        # Keep the reduced gradient of an earlier backward of the step: FSDP drops it if this flag is not set.
        has_gradient = hasattr(flat_param, "_saved_grad_shard")
        self._set_post_backward_called(has_gradient)
        if has_gradient and handle._use_orig_params:
            runtime._catch_all_reshard(self.instance)
            handle._use_sharded_grad_views()

    # ---- the end of a backward

    def end_backward(self, synchronized: bool) -> None:
        self.was_gathered = False
        if synchronized:
            self.took_part = self.is_used = False
            self.used.clear()


def _note_use(used: set[int], is_padding: Sequence[bool], gradients: tuple[Tensor | None, ...]) -> None:
    of_parameters = compress(gradients, map(operator.not_, is_padding))
    used.update(place for place, gradient in enumerate(of_parameters) if gradient is not None)


def shard_gradients_in_constant_time(original: Any) -> Callable[..., Any]:
    """Compute the size of a gradient's shard directly, where torch makes a view for every rank to find the size."""

    # On a thousand ranks, making the views takes longer than the rest of a unit's backward.
    def get_reduce_scatter_tensors(state: FullyShardedDataParallel, unsharded_grad: Tensor) -> Any:
        if not isinstance(state._comm_hook_state, HandleGradients):
            return original(state, unsharded_grad)
        numel = unsharded_grad.numel()
        of_shard = -(-numel // state.world_size)
        padding = of_shard * state.world_size - numel
        padded = F.pad(unsharded_grad, [0, padding]) if padding else unsharded_grad
        return padded, unsharded_grad.new_empty(of_shard)

    return get_reduce_scatter_tensors
