"""The flat parameter of a unit, gathered and reduced by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    _runtime_utils as runtime,
)
from torch.distributed.fsdp._common_utils import _no_dispatch_record_stream as no_dispatch_record_stream
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleTrainingState

from fsdp_zpp._torch_compat import replace_function
from fsdp_zpp.comm.agreement import all_reduce_flags
from fsdp_zpp.comm.flat_layout import FlatLayout, Sharded
from fsdp_zpp.comm.gradient_reduce import StepWatch
from fsdp_zpp.comm.weight_gather import ShardValues, ShardVersion
from fsdp_zpp.runtime._torch_flat_parts import copy_replaced, copy_replaced_shards
from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch_flat_parameter import (
    FlatParameterLayout,
    HandleGradients,
    ParameterViews,
    axes_of,
    set_parameter,
    set_tensor,
)

# ---- handle


class StrategyHandle(FlatParamHandle):
    """A flat parameter's handle that gathers and reduces through a strategy.

    :func:`adopt_handle` makes it from the handle that torch built. It overrides torch's methods that gather, reshard
    and show parameters, and the unit's secondary shard reads the shard through it. torch itself gathers in full
    precision: for state dicts, ``summon_full_params``, and evaluation under FSDP_USE_FULL_PREC_IN_EVAL.

    ``written_back()`` is called after parameters are written back to the shard, or moved.
    """

    written_back: Callable[[], None]
    _version_at_summon: Hashable
    _has_optim_in_backward: bool

    def adopt(self, instance: FullyShardedDataParallel, unit: StrategyUnit, layout: FlatParameterLayout) -> None:
        """Set the attributes of this class, in place of a constructor; arguments as in :func:`adopt_handle`."""
        self.parameter_layout = layout
        self._zero_padding()
        self._gather, self._keeps_unsharded = unit.gather, unit.keep_unsharded
        self._gather_is_lossy = unit.gather is not None and unit.gather.secondary.codec is not None
        self._holds_decoded_weights, self._version_at_summon = False, None
        self._version = ShardVersion()
        self.gradients = HandleGradients(instance, self, layout, unit.reductions, unit.keep_unsharded)
        self.views = ParameterViews(self)
        if self.views.are_direct:
            self._setattr_tensor, self._setattr_param = set_tensor, set_parameter
        self.written_back = unit.invalidate

    def _zero_padding(self) -> None:
        # FSDP fills the alignment gaps between parameters with 42, which would ruin the scale of the blocks there.
        shard = self.flat_param.data
        layout, first = self.parameter_layout.around(shard)
        for start, stop in layout.gaps:
            if stop > first:
                shard[max(start - first, 0) : stop - first].zero_()

    def _wants_full_precision(self) -> bool:
        summoned = self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS
        return summoned or self._force_full_precision

    def pre_unshard(self) -> bool:
        unsharding = super().pre_unshard()
        # Read the version after super(), which copies replaced parameters to the shard and so changes the version.
        if self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS:
            self._version_at_summon = self.shard_version()
        return unsharding

    def unshard(self) -> None:
        if self._keeps_unsharded and not self._wants_full_precision() and self.keeps_gathered():
            assert self._gather is not None
            self._gather.secondary.check_version(self.shard_version())
        super().unshard()

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        summoned = self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS
        # Parameter scope N keeps gathered weights until they change; weights_changed() frees them then.
        super().reshard(free_unsharded_flat_param and (summoned or not self._keeps_unsharded))
        if summoned and self._gather is not None:
            # Edits of summoned parameters change the version, but only a writeback brings them to the shard.
            self._gather.secondary.rebase_version(self._version_at_summon, self.shard_version())

    def needs_unshard(self) -> bool:
        # FSDP keeps the root unsharded after a forward. summon_full_params would take these decoded weights for the
        # full-precision ones, and even write them back.
        if (
            self._holds_decoded_weights
            and self._gather_is_lossy
            and self._wants_full_precision()
            and not self._uses_param_mixed_precision  # with it, full-precision weights have their own buffer
        ):
            if self._prefetched:
                self._leave_prefetched()
            self._free_unsharded_flat_param()
            self._holds_decoded_weights = False
        return super().needs_unshard()

    def _use_low_precision_shard(self) -> None:
        if self._gather is None:
            super()._use_low_precision_shard()
        # The strategy encodes the full-precision shard itself, and needs no 16-bit copy of it.
        else:
            self.flat_param.data = self.flat_param._local_shard.to(self.device, non_blocking=True)

    def _free_low_precision_sharded_param(self) -> None:
        if self._gather is None:
            super()._free_low_precision_sharded_param()

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        self.gradients.was_gathered = True
        if self._gather is None or self._wants_full_precision():
            self._holds_decoded_weights = False
            return super()._all_gather_flat_param(padded_unsharded_flat_param)
        shard = self.flat_param.data
        if shard.dtype != (dtype := self.flat_param._local_shard.dtype):
            raise ValueError(
                f"the parameters of {type(self._fully_sharded_module).__name__} were cast from {dtype} to "
                f"{shard.dtype} after their first forward, which FullyShardedDataParallel can't gather; cast a model "
                "before its first forward, or pass mixed_precision=MixedPrecision(param_dtype=...) instead"
            )
        self._gather(shard, padded_unsharded_flat_param, self.shard_version())
        self._holds_decoded_weights = True
        if self._offload_params:  # ``shard``, a copy, is freed on return, but the encoding may still read it
            no_dispatch_record_stream(shard, self._device_handle.current_stream())
        return padded_unsharded_flat_param

    # ---- what modules show in place of parameters

    def _use_sharded_views(self) -> None:
        if not self.views.show_shard():
            super()._use_sharded_views()
            self.views.keep()
            return
        self._unsharded_flat_param_for_skipped_views = None
        tensors = self.flat_param._tensors
        if self._training_state == HandleTrainingState.BACKWARD_POST and tensors is not None:
            tensors[:] = [None] * len(tensors)

    def _writeback_orig_params(self) -> bool:
        return not self.views.are_written_back() and super()._writeback_orig_params()

    def _use_unsharded_views(self, as_params: bool) -> None:
        if as_params:
            self.views.drop()  # parameters become views of the gathered weights
        elif self._training_state == HandleTrainingState.BACKWARD_PRE and self.views.show_forward_views():
            return
        super()._use_unsharded_views(as_params)
        current = self.gradients.reductions.current
        if not as_params and current is not None and current.errors is not None:
            self.gradients.watch_use()

    # ---- the memory of gathered weights

    def _alloc_padded_unsharded_flat_param(self) -> Tensor:
        unsharded = self._get_padded_unsharded_flat_param()
        unsharded.untyped_storage().resize_(unsharded.numel() * unsharded.itemsize)
        return unsharded

    def _free_unsharded_flat_param(self) -> None:
        unsharded = self._get_padded_unsharded_flat_param()
        storage = unsharded.untyped_storage()
        if storage.size():
            no_dispatch_record_stream(unsharded, self._device_handle.current_stream())
            storage.resize_(0)

    # ---- when weights change

    def weights_changed(self, by_step: bool) -> None:
        # Free stale weights: FSDP leaves the root gathered, and also units that a forward prefetches but does not run.
        initialized = hasattr(self.flat_param, "_full_param_padded")
        # A prefetched unit is IDLE, too. If an optimizer steps in a backward, the backward is about to use the unit.
        is_in_use = self._prefetched and torch._C._current_graph_task_id() != -1
        if initialized and self._training_state == HandleTrainingState.IDLE and not is_in_use:
            if self._prefetched:
                self._leave_prefetched()
            self._free_unsharded_flat_param()

    def _leave_prefetched(self) -> None:
        self._use_sharded_flat_param()
        self._prefetched = False

    def drop_gradients(self) -> None:
        """Drop the sum of reduced gradients, which FSDP hides from optimizers until the last micro-batch."""
        if hasattr(self.flat_param, "_saved_grad_shard"):
            del self.flat_param._saved_grad_shard
        if torch._C._current_graph_task_id() == -1:  # in a backward, an optimizer clears only its own gradients
            self.gradients.used.clear()

    def drop_cleared_gradients(self) -> None:
        """Drop the flat gradient if all original gradients are None: a move would take it along."""
        self._reset_flat_param_grad_info_if_needed()

    # ---- ShardSource: reads of the shard before FSDP gathers

    def can_be_read(self) -> bool:
        return torch._C._current_graph_task_id() == -1  # an optimizer in a backward may write to the shard

    def prepare_read(self) -> int:
        copy_replaced_shards(self)
        return self.flat_param._local_shard.numel()

    def read(self) -> ShardValues:
        shard, trained = self.flat_param._local_shard.to(self.device, non_blocking=True), self.is_trained()
        return ShardValues([shard], shard.numel(), self.shard_version(), trained)

    def compares_contents(self) -> bool:
        return self._version.of_contents

    def keeps_gathered(self) -> bool:
        return self._keeps_unsharded and self._holds_decoded_weights and not self.needs_unshard()

    def layout(self, numel: int) -> FlatLayout:
        return self.parameter_layout.whole(numel)

    def is_trained(self: FlatParamHandle) -> bool:
        """Return whether the flat or an original parameter requires a gradient; ``self`` may be torch's own handle."""
        flat_param = self.flat_param
        return flat_param.requires_grad or any(p.requires_grad for p in flat_param._params or ())

    def shard_version(self) -> Hashable:
        flat_param = self.flat_param
        shard = flat_param._local_shard
        return self._version.of((shard,), (shard, flat_param, *(flat_param._params or ())))

    def flat_param_to(self, *args: object, **kwargs: object) -> None:
        super().flat_param_to(*args, **kwargs)
        # If FSDP does not offload parameters, only a user moves an idle unit.
        if self._training_state == HandleTrainingState.IDLE and not self._offload_params:
            self.moved()

    def moved(self) -> None:
        """Handle a move or cast of the flat parameter by a user."""
        self.views.drop()
        flat_param = self.flat_param
        shard = getattr(flat_param, "_local_shard", None)  # there is none until FSDP's lazy initialization
        # After the next forward, FSDP uses ``_local_shard`` again, so it must be the new memory, to which users write.
        # If the dtype has changed, the next gather raises an error.
        same_kind = shard is not None and (flat_param.dtype, flat_param.size()) == (shard.dtype, shard.size())
        if same_kind and not self._offload_params:
            flat_param._local_shard = flat_param.data
        self.written_back()


# ---- sharded


class ShardedHandle(Sharded):
    def __init__(self, handle: FlatParamHandle) -> None:
        self.handle, self.layout = handle, FlatParameterLayout(handle)

    def numel(self) -> int:
        return sum(shape.numel() for shape in self.handle.flat_param._shapes)

    def parameters(self) -> list[nn.Parameter]:
        flat_param = self.handle.flat_param
        return list(flat_param._params or (flat_param,))

    def model_parallel_groups(self) -> list[dist.ProcessGroup]:
        specs = self.handle.flat_param._param_extensions
        return [group for spec in specs if spec is not None for group in spec.mesh.get_all_groups()]

    def is_trained(self) -> bool:
        return StrategyHandle.is_trained(self.handle)

    def trained_names(self) -> list[str]:
        flat_param = self.handle.flat_param
        if not flat_param._params:
            return list(flat_param._fqns) if flat_param.requires_grad or flat_param.grad is not None else []
        pairs = zip(flat_param._fqns, flat_param._params, strict=True)
        return [name for name, parameter in pairs if parameter.requires_grad or parameter.grad is not None]

    def shards(self) -> list[Tensor]:
        flat_param = self.handle.flat_param  # the shard itself until FSDP's lazy initialization
        return [getattr(flat_param, "_local_shard", flat_param)]

    def named_shards(self) -> dict[str, Tensor]:
        copy_replaced(self.handle)
        return self._parts_of(self.shards()[0].detach())

    def _parts_of(self, shard: Tensor) -> dict[str, Tensor]:
        layout, first = self.layout.around(shard)
        bounds = (
            (start - first, start - first + p.numel) for p, start in zip(layout.pieces, layout.starts, strict=True)
        )
        held = (shard.view(-1)[max(start, 0) : max(stop, 0)] for start, stop in bounds)
        return {piece.name: part for piece, part in zip(layout.pieces, held, strict=True)}

    def named_parts(self, parameter: nn.Parameter, of: Tensor) -> dict[str, Tensor]:
        flat_param = self.handle.flat_param
        if not flat_param._params:
            return self._parts_of(of)
        pairs = zip(flat_param._fqns, flat_param._params, strict=True)
        return {name: of for name, original in pairs if original is parameter}

    def placements(self) -> dict[str, tuple[str, ...]]:
        flat_param = self.handle.flat_param
        return dict(zip(flat_param._fqns, axes_of(flat_param), strict=True))

    def weights_changed(self, by_step: bool) -> None:
        if isinstance(self.handle, StrategyHandle):
            self.handle.weights_changed(by_step)

    def drop_gradients(self) -> None:
        if isinstance(self.handle, StrategyHandle):
            self.handle.drop_gradients()


def sharded_of(instance: FullyShardedDataParallel) -> Sharded:
    """Return the parameters that an instance has flattened, perhaps none."""
    return Sharded() if instance._handle is None else ShardedHandle(instance._handle)


# ---- adoption


def adopt_handle(instance: FullyShardedDataParallel, unit: StrategyUnit) -> None:
    """Have torch gather and reduce the flat parameter of ``instance``, if it has one, through ``unit``."""
    unit.sharded = sharded = sharded_of(instance)
    if not isinstance(sharded, ShardedHandle):
        return
    handle: Any = sharded.handle
    handle.__class__ = StrategyHandle
    handle.adopt(instance, unit, sharded.layout)
    if unit.gather is not None:
        unit.gather.secondary.source = handle
    if unit.reductions.all:
        # register_comm_hook() accepts only a root, and would make this instance a root.
        instance._comm_hook, instance._comm_hook_state = HandleGradients.reduce, handle.gradients


def flattened_sites(instance: FullyShardedDataParallel) -> set[tuple[nn.Module, str]]:
    """Return, for each parameter that ``instance`` has flattened, its module and its name in that module."""
    handle = instance._handle
    return set() if handle is None else {(info.module, info.param_name) for info in handle.flat_param._param_infos}


def has_shards(instance: FullyShardedDataParallel, module: nn.Module) -> bool:
    """Return whether saving ``module``, inside ``instance``, would lose values or the names that PEFT looks for."""
    if hasattr(module, "peft_config"):  # FSDP's wrappers change the names even without shards
        return True
    handles = [each._handle for each in FullyShardedDataParallel.fsdp_modules(instance) if each._handle is not None]
    return any(
        handle.uses_sharded_strategy and handle._training_state != HandleTrainingState.SUMMON_FULL_PARAMS
        for handle in handles
    )


def handle_of(instance: FullyShardedDataParallel) -> StrategyHandle | None:
    handle = instance._handle
    return handle if isinstance(handle, StrategyHandle) else None


def disable_prefetch_unless_sharded(root: nn.Module) -> None:
    """Turn off prefetching in forwards if a unit is not sharded."""
    # If a unit without shards is prefetched but does not run, FSDP hides its gradients.
    instances: list[Any] = FullyShardedDataParallel.fsdp_modules(root)
    handles = [handle for each in instances if (handle := handle_of(each)) is not None]
    if not all(handle.uses_sharded_strategy for handle in handles):
        for each in instances:
            each.forward_prefetch = False


def announce_writebacks(original: Any) -> Callable[..., None]:
    def writeback_to_local_shard(handle: FlatParamHandle, writeback_grad: bool) -> None:
        original(handle, writeback_grad)
        if isinstance(handle, StrategyHandle):
            handle.written_back()

    return writeback_to_local_shard


# ---- backward

_WATCH = "_fsdp_zpp_backward_watch"
_end_backward = runtime._post_backward_final_callback


class HandleBackwardWatch(StepWatch):
    def __init__(self, root: nn.Module, on_backward_end: Callable[[bool], None]) -> None:
        self._instances = FullyShardedDataParallel.fsdp_modules(root)
        self._handles = [each._handle for each in self._instances if isinstance(each._handle, StrategyHandle)]
        super().__init__([handle.gradients for handle in self._handles], on_backward_end)
        if any(handle._offload_params for handle in self._handles):
            # Only if needed: it adds a call to the backward of each unit.
            replace_function(runtime, "_post_reduce_grad_callback", step_on_arrival)

    def reduce_in_two_streams(self) -> None:
        """Have every other unit reduce in a second stream, concurrently with inter-node hops in the first."""
        two_hops = [each.gradients for each in self._handles if each.gradients.reductions.have_two_hops]
        if len(two_hops) > 1:
            second = two_hops[0].instance._device_handle.Stream()
            for gradients in two_hops[1::2]:
                gradients.instance._post_backward_stream = second

    def begin_forward(self, root: FullyShardedDataParallel, *unused: object) -> None:
        """Before a forward of the model, clean up after a backward that an exception has cut short."""
        # torch would take this forward for a recomputation in the failed backward, and would run no hooks at the end of
        # the next backward. Gradients stay until the user clears them, as in torch.
        began = getattr(root, "_post_backward_callback_queued", False)  # unset until a forward with gradients
        if not began or torch._C._current_graph_task_id() != -1:
            return
        self.arriving.drop()
        self.abandon()
        with ExitStack() as stack:
            for instance in self._instances:  # so that torch leaves gradients as they are
                stack.enter_context(patch.multiple(instance, _sync_gradients=False))
            _end_backward(root, root)
        for handle in self._handles:
            handle.gradients.end_backward(synchronized=True)

    def reduce_rest(self, root: FullyShardedDataParallel) -> None:
        """Reduce the remaining gradients at the end of a backward, before FSDP gives gradients to optimizers."""
        if root._sync_gradients:
            used_elsewhere = self._drop_unused()
            for handle in self._handles:
                gradients = handle.gradients
                if gradients.took_part or gradients.is_unreduced:
                    gradients.reduce_accumulated(handle in used_elsewhere)
            # torch has the current stream wait only for the root's stream, but units may reduce in a second one.
            current = root._device_handle.current_stream()
            for stream in {instance._post_backward_stream for instance in self._instances}:
                current.wait_stream(stream)
            return
        self.reduce_remaining()
        for handle in self._handles:
            handle.gradients.took_part |= handle.gradients.is_of_micro_batch
            # torch sets the gradients of parameters in this mask to None, and resets the mask only in reductions. So a
            # parameter unfrozen since the last reduction, or cleared alone, would lose its new gradient.
            if not handle.uses_sharded_strategy and handle._training_state == HandleTrainingState.BACKWARD_POST:
                handle._reset_is_grad_none()

    def _drop_unused(self) -> set[StrategyHandle]:
        """Drop the gradients of units that micro-batches have gathered but no rank has used. Collective.

        Returns the units that only other ranks have used in the step.
        """
        used_elsewhere: set[StrategyHandle] = set()
        gathered = [handle for handle in self._handles if handle.gradients.took_part]
        if not gathered:
            return used_elsewhere
        asked = [(handle, handle.gradients.reductions.mesh, [handle.gradients.is_used]) for handle in gathered]
        for handle, used_by_any in all_reduce_flags(asked):
            if handle.gradients.is_used:
                continue
            if all(used_by_any()):
                used_elsewhere.add(handle)
            else:
                handle.gradients.drop_unused()
        return used_elsewhere

    def end(self, synchronized: bool) -> None:
        for handle in self._handles:
            # FSDP does not reshard a unit without shards, so modules would keep views in place of frozen parameters.
            # Skip a unit whose modules show parameters: a replaced parameter may hold values not yet in the shard.
            if not handle.uses_sharded_strategy and handle.views.are_shown:
                handle.reshard(False)
            handle.gradients.end_backward(synchronized)
        if synchronized:
            self.restart()
        self.on_backward_end(synchronized)


def watch_backwards(root: nn.Module, on_backward_end: Callable[[bool], None]) -> HandleBackwardWatch:
    """Watch the backwards of a model, and set the order in which its units reduce."""
    watch = HandleBackwardWatch(root, on_backward_end)
    setattr(root, _WATCH, watch)
    root.register_forward_pre_hook(torch.compiler.disable(watch.begin_forward), prepend=True)
    return watch


def hear_of_backwards(original: Any) -> Callable[..., None]:
    def post_backward_final_callback(state: FullyShardedDataParallel, module: nn.Module) -> None:
        watch: HandleBackwardWatch | None = vars(module).get(_WATCH)
        if watch is None:
            original(state, module)
            return
        watch.reduce_rest(state)
        if watch.arriving.waiting:
            watch.arriving.step_all()
        original(state, module)
        watch.end(state._sync_gradients)

    return post_backward_final_callback


def reduce_in_every_backward(hook: Any) -> Callable[..., None]:
    """Have units with a strategy reduce in every backward, even inside no_sync, if their scopes require it."""

    def post_backward_hook(state: FullyShardedDataParallel, handle: FlatParamHandle, *args: object) -> None:
        if not isinstance(handle, StrategyHandle):
            hook(state, handle, *args)
            return
        gradients, has_gradient = handle.gradients, handle.flat_param.grad is not None
        gradients.is_used |= has_gradient
        if not handle.uses_sharded_strategy:
            # FSDP accumulates unreduced gradients, and does not reduce them if the last micro-batch skips the unit.
            gradients.is_unreduced = not state._sync_gradients
        if state._sync_gradients:
            if has_gradient:
                gradients.watch.synchronized.append(gradients)
            hook(state, handle, *args)
            return
        hook(state, handle, *args)  # FSDP leaves the gradient unsharded
        if gradients.reduces_early and handle.flat_param.grad is not None:
            gradients.micro_batch_ended()

    return post_backward_hook


# ---- offload
#
# For an offloaded unit with an optimizer in the backward, torch has the CPU wait for the copy of the gradient and then
# step. Here, the backward goes on, and the optimizer steps once the copy has arrived: see comm/gradient_reduce.py.


def step_on_arrival(original: Any) -> Callable[..., None]:
    def post_reduce_grad_callback(
        state: FullyShardedDataParallel, handle: FlatParamHandle, grad_to_offload: Tensor
    ) -> None:
        waits = isinstance(handle, StrategyHandle) and handle._offload_params and handle._has_optim_in_backward
        # A comment in torch says that results are wrong without the wait if gradients are not sharded.
        if not waits or not handle.uses_sharded_strategy:
            original(state, handle, grad_to_offload)
            return
        assert isinstance(handle, StrategyHandle)
        handle._has_optim_in_backward = False  # torch waits only if this is set
        try:
            runtime._offload_grad(state, handle, grad_to_offload)
        finally:
            handle._has_optim_in_backward = True
        event = state._device_handle.current_stream().record_event() if handle.device.type != "cpu" else None
        step = partial(runtime._post_backward_use_sharded_grad_views, handle)
        handle.gradients.watch.arriving.step_on_arrival(event, step)

    return post_reduce_grad_callback
