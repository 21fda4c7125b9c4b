"""Every private name of torch's FullyShardedDataParallel that the adapter touches, and nothing else.

Checked on torch 2.11 to 2.13. A torch that lacks one of the names fails here, at import, with a clear error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

try:
    from torch.distributed.fsdp import (
        _init_utils,
        _runtime_utils,
        _unshard_param_utils,
        fully_sharded_data_parallel as _wrapper,
    )
    from torch.distributed.fsdp._common_utils import TrainingState, _no_dispatch_record_stream
    from torch.distributed.fsdp._flat_param import (
        FlatParamHandle,
        HandleShardingStrategy,
        HandleTrainingState,
    )

    _PATCHED = (
        _init_utils.SHARDING_STRATEGY_MAP,
        _init_utils._init_param_handle_from_params,
        _init_utils._sync_module_params_and_buffers,
        _wrapper._init_process_group_state,
        _runtime_utils._share_state_and_init_handle_attrs,
        _runtime_utils._accumulate_sharded_grad,
        _runtime_utils._get_reduce_scatter_tensors,
        _runtime_utils._post_backward_final_callback,
        _runtime_utils._post_backward_hook,
        _runtime_utils._post_reduce_grad_callback,
        _runtime_utils._reduce_grad,
        _runtime_utils._reduce_grad_no_shard,
        _unshard_param_utils._writeback_to_local_shard,
        FlatParamHandle._all_gather_flat_param,
        FlatParamHandle._use_low_precision_shard,
        FlatParamHandle._force_full_precision,
    )
except (ImportError, AttributeError) as error:
    raise RuntimeError(
        f"fsdp_zpp's adapter for FullyShardedDataParallel does not fit torch {torch.__version__}: {error}"
    ) from error


class Gather(Protocol):
    """Fills the unsharded flat parameter from the full-precision shards."""

    def __call__(self, shard: Tensor, out: Tensor, version: Hashable) -> None: ...

    def same_weights(self, before: Hashable, after: Hashable) -> None: ...

    def check_unchanged(self, version: Hashable) -> None: ...


class Reduce(Protocol):
    """Fills the sharded gradient from the unsharded ones, of one micro-batch or several."""

    @property
    def accumulates(self) -> bool: ...

    @property
    def waiting(self) -> bool: ...

    def __call__(self, gradient: Tensor, out: Tensor) -> None: ...

    def accumulate(self, gradient: Tensor) -> None: ...


class StrategyHandle(FlatParamHandle):
    """A flat parameter's handle that gathers and reduces through a strategy.

    Made by :func:`adopt_handle` from the handle that torch built. Whatever asks for full precision (state dicts,
    ``summon_full_params``, evaluation under FSDP_USE_FULL_PREC_IN_EVAL) is left to torch's own gather.
    """

    _gather: Gather | None
    _gather_is_lossy: bool
    _keep_unsharded: bool
    _reduce: Reduce | None
    _more_micro_batches: bool
    _unreduced: bool
    _hides_gradients: bool
    _has_optim_in_backward: bool
    _holds_decoded_weights: bool
    _written_back: Callable[[], None]
    _version_at_summon: Hashable

    def _wants_full_precision(self) -> bool:
        summoned = self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS
        return summoned or self._force_full_precision

    def pre_unshard(self) -> bool:
        if self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS:
            self._version_at_summon = self._shard_version()
        return super().pre_unshard()

    def unshard(self) -> None:
        if self._keep_unsharded and self._holds_decoded_weights and not self._wants_full_precision():
            assert self._gather is not None
            if not self.needs_unshard():
                self._gather.check_unchanged(self._shard_version())
        super().unshard()

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        summoned = self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS
        super().reshard(free_unsharded_flat_param and (summoned or not self._keep_unsharded))
        if summoned and self._gather is not None:
            # Edits of summoned parameters count as writes to them, but are not of the shard unless written back.
            self._gather.same_weights(self._version_at_summon, self._shard_version())

    def needs_unshard(self) -> bool:
        # FSDP keeps the root unsharded from forward to backward, and after a forward without backward. A summon
        # in between would take those decoded weights for the true ones, and even write them back.
        if (
            self._holds_decoded_weights
            and self._gather_is_lossy
            and self._wants_full_precision()
            and not self._uses_param_mixed_precision  # else full precision has a buffer of its own
        ):
            self._free_unsharded_flat_param()
            self._holds_decoded_weights = False
        return super().needs_unshard()

    def _use_low_precision_shard(self) -> None:
        if self._gather is None:
            super()._use_low_precision_shard()
        # The strategy encodes the full-precision shard itself, so there is no 16-bit copy of it to be made.
        elif self._offload_params:
            self.flat_param.data = self.flat_param._local_shard.to(self.device, non_blocking=True)

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        if self._gather is None or self._wants_full_precision():
            self._holds_decoded_weights = False
            return super()._all_gather_flat_param(padded_unsharded_flat_param)
        shard = self.flat_param.data
        self._gather(shard, padded_unsharded_flat_param, self._shard_version())
        self._holds_decoded_weights = True
        if self._offload_params:
            _no_dispatch_record_stream(shard, self._device_handle.current_stream())
        return padded_unsharded_flat_param

    @property
    def reduces_now(self) -> bool:
        """Whether a micro-batch that is not the last reduces, as far as the gradient letter says."""
        # Without shards, FSDP accumulates in the unsharded gradient, which is what the optimizer will see. And an
        # optimizer in the backward would step with what is reduced.
        waits = self._reduce is not None and self._reduce.accumulates
        return self.uses_sharded_strategy and (waits or not self._has_optim_in_backward)

    def drop_unsharded(self) -> None:
        """Between forwards, have the next one gather anew what FSDP still keeps unsharded, which is the root."""
        flat_param = self.flat_param
        initialized = hasattr(flat_param, "_full_param_padded")
        # What is prefetched counts as idle, but a backward that runs (with optimizers in it) is about to use it.
        if initialized and self._training_state == HandleTrainingState.IDLE and not self._prefetched:
            self._free_unsharded_flat_param()

    def _use_sharded_grad_views(self) -> None:
        # Before the last micro-batch the sum of reduced gradients stays with FSDP. Shown as gradients of the original
        # parameters, FSDP would take it for a user's, and copy it in a stream that does not wait for the reduction.
        self._hides_gradients = self._more_micro_batches
        if not self._hides_gradients:
            super()._use_sharded_grad_views()
            return
        for param in (*(self.flat_param._params or ()), *(self.flat_param._shared_params or ())):
            param.grad = None

    def forget_gradients(self) -> None:
        """Drop the sum of reduced gradients that optimizers do not see before the last micro-batch."""
        if hasattr(self.flat_param, "_saved_grad_shard"):
            del self.flat_param._saved_grad_shard

    def zero_padding(self) -> None:
        """FSDP fills the gaps that align parameters with 42s, which would ruin the scale of the blocks they are in."""
        flat_param = self.flat_param
        start, end = -self.rank * flat_param.numel() if self.uses_sharded_strategy else 0, 0
        for numel, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True):
            end = start + numel
            if is_padding and end > 0:
                flat_param.data[max(start, 0) : end].zero_()
            start = end

    def _shard_version(self) -> Hashable:
        """Changes with every write to the shard that torch can see from here."""
        flat_param = self.flat_param
        tensors = (flat_param, flat_param._local_shard, *(flat_param._params or ()))
        return tuple(tensor._version for tensor in tensors)


def adopt_handle(
    module: FullyShardedDataParallel,
    gather: Gather | None,
    lossy: bool,
    keep_unsharded: bool,
    reduce: Reduce | None,
    written_back: Callable[[], None],
) -> StrategyHandle | None:
    """Have ``module``'s flat parameter, if it has one, gathered by ``gather`` and its gradient reduced by ``reduce``.

    Args:
        module: An instance of FSDP.
        gather: Gathers the weights; None leaves it to torch.
        lossy: Whether what it gathers differs from the weights.
        keep_unsharded: Whether what it gathered is kept until the weights change.
        reduce: Reduces the gradients; None leaves it to torch.
        written_back: Called after summoned or loaded parameters were written to the shard.

    Returns:
        The flat parameter's handle.
    """
    if reduce is not None:

        def strategy_hook(state: None, gradient: Tensor, out: Tensor | None = None) -> None:
            reduce(gradient, gradient if out is None else out)

        # register_comm_hook() would do, but may be called on a root only, and settles who is the root.
        module._comm_hook, module._comm_hook_state = strategy_hook, None
    if module._handle is None:
        return None
    handle: Any = module._handle
    handle.__class__ = StrategyHandle
    handle._gather, handle._gather_is_lossy, handle._keep_unsharded = gather, lossy, keep_unsharded
    handle._reduce, handle._more_micro_batches, handle._unreduced = reduce, False, False
    handle._hides_gradients = False
    handle._written_back, handle._version_at_summon, handle._holds_decoded_weights = written_back, None, False
    handle.zero_padding()
    return handle


@contextmanager
def sharding_over(
    module: FullyShardedDataParallel, strategy: Hashable, shard_group: dist.ProcessGroup | None
) -> Iterator[None]:
    """While ``module`` is constructed with ``strategy``, have it sharded over ``shard_group``, or not at all for None.

    A group that is only a part of the one the user gave does for all but synchronizing the states of the modules.
    """
    strategies: dict[Any, HandleShardingStrategy] = _init_utils.SHARDING_STRATEGY_MAP
    sharded = shard_group is not None
    strategies[strategy] = HandleShardingStrategy.FULL_SHARD if sharded else HandleShardingStrategy.NO_SHARD
    init_group: Any = _wrapper._init_process_group_state
    synchronize: Any = _init_utils._sync_module_params_and_buffers
    users_group: Any = None

    def init_shard_group(state: Any, *args: Any) -> Any:
        init_group(state, *args)
        if state is module:
            nonlocal users_group
            users_group = state.process_group
            if shard_group is not None and shard_group is not users_group:
                state.process_group, state.rank = shard_group, shard_group.rank()
                state.world_size = shard_group.size()
        return state

    def synchronize_all(module: nn.Module, params: list[nn.Parameter], process_group: dist.ProcessGroup) -> None:
        synchronize(module, params, users_group)

    _wrapper._init_process_group_state = init_shard_group
    _init_utils._sync_module_params_and_buffers = synchronize_all
    try:
        yield
    finally:
        _wrapper._init_process_group_state = init_group
        _init_utils._sync_module_params_and_buffers = synchronize
    users_mesh = module._device_mesh
    if users_mesh is not None and shard_group is not None and shard_group is not users_group:
        # Only now: the constructor takes a mesh other than its argument for a part of a larger one.
        module._device_mesh = DeviceMesh.from_group(shard_group, users_mesh.device_type)
    if not sharded:
        module.sharding_strategy = ShardingStrategy.NO_SHARD  # which torch's state dicts ask for


@contextmanager
def frozen_apart(
    module: FullyShardedDataParallel, wrap: Callable[[set[nn.Parameter]], FullyShardedDataParallel]
) -> Iterator[None]:
    """While ``module`` is constructed, have the frozen parameters that it shares with trainable ones taken out of it.

    In one flat parameter, gradients of frozen parameters would be allocated and reduced.

    Args:
        module: An instance of FSDP.
        wrap: Wraps what ``module`` wraps, but for some parameters, to stand between the two.
    """
    init_handle: Any = _init_utils._init_param_handle_from_params
    frozen_unit: FullyShardedDataParallel | None = None

    def init_handles(state: Any, params: list[nn.Parameter], fully_sharded_module: nn.Module) -> None:
        nonlocal frozen_unit
        trainable = [p for p in params if p.requires_grad]
        if state is module and 0 < len(trainable) < len(params):
            frozen_unit = wrap(set(trainable) | state._ignored_params)
            params = trainable
        init_handle(state, params, fully_sharded_module)

    _init_utils._init_param_handle_from_params = init_handles
    try:
        yield
    finally:
        _init_utils._init_param_handle_from_params = init_handle
    if frozen_unit is not None:
        module._fsdp_wrapped_module = frozen_unit
        frozen_unit._ignored_modules = module._ignored_modules
        frozen_unit._ignored_buffer_names = module._ignored_buffer_names


def process_group_of(module: FullyShardedDataParallel) -> dist.ProcessGroup:
    """The group that ``module`` is sharded over."""
    group = module.process_group
    assert group is not None
    return group


def parameters_of(module: FullyShardedDataParallel) -> Iterator[nn.Parameter]:
    """The parameters of ``module``'s own unit as an optimizer may hold them: original, or flat."""
    if module._handle is not None:
        yield from module._handle.flat_param._params or (module._handle.flat_param,)


def shard_of(module: FullyShardedDataParallel) -> list[Tensor]:
    """What this rank holds of ``module``'s own unit, if it has one."""
    handle = module._handle  # whose flat parameter is the shard itself until FSDP's lazy initialization
    return [] if handle is None else [getattr(handle.flat_param, "_local_shard", handle.flat_param)]


def intercept_construction(
    around: Callable[[Callable[[], None], FullyShardedDataParallel, dict[str, Any]], None],
) -> None:
    """Have ``around(construct, module, arguments)`` run FSDP's constructor, for every instance from now on.

    ``construct()`` calls it with ``arguments``, as they are by then.
    """
    original = FullyShardedDataParallel.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            original(self, *args, **kwargs)  # to raise its own error
            return
        bound.apply_defaults()
        around(lambda: original(*bound.args, **bound.kwargs), self, bound.arguments)

    FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]


def intercept_hook_registration(
    before: Callable[[FullyShardedDataParallel, object], dict[FullyShardedDataParallel, object]],
) -> None:
    """Have ``before(model, state)`` run before every ``register_comm_hook``; it returns instances' own states."""
    original = FullyShardedDataParallel.register_comm_hook

    @functools.wraps(original)
    def register_comm_hook(self: FullyShardedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        own_states = before(self, state)
        original(self, state, hook)
        for instance, own_state in own_states.items():
            instance._comm_hook_state = own_state

    FullyShardedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]


def after_root_is_known(callback: Callable[[nn.Module], None]) -> None:
    """Have ``callback(root)`` run once for each root, when FSDP initializes it lazily."""
    original = _runtime_utils._share_state_and_init_handle_attrs

    @functools.wraps(original)
    def share_state_and_init_handle_attrs(root_state: Any, root_module: nn.Module) -> None:
        original(root_state, root_module)
        callback(root_module)

    _runtime_utils._share_state_and_init_handle_attrs = share_state_and_init_handle_attrs


def after_synchronizing_backward(callback: Callable[[nn.Module], None]) -> None:
    """Have ``callback(root)`` run at the end of every backward that is not inside of no_sync."""
    original = _runtime_utils._post_backward_final_callback

    @functools.wraps(original)
    def post_backward_final_callback(state: Any, module: nn.Module) -> None:
        if state._sync_gradients:
            _reduce_what_waits(state)
        original(state, module)
        for each in state._all_fsdp_states:
            handle = each._handle
            if not isinstance(handle, StrategyHandle):
                continue
            # FSDP takes an unsharded flat parameter for resharded, and leaves the parameters of frozen ones as views.
            if not handle.uses_sharded_strategy:
                handle.reshard(False)
            # The last micro-batch may have left out a unit that earlier ones have used.
            if handle._hides_gradients and state._sync_gradients:
                handle._use_sharded_grad_views()
        if state._sync_gradients:
            callback(module)

    _runtime_utils._post_backward_final_callback = post_backward_final_callback


def reduce_in_every_backward() -> None:
    """Have handles of strategies hand over their gradients in every backward, inside of no_sync too.

    What becomes of them there is said in [Note: What a micro-batch reduces] in gradient_reduce.py.
    """
    hook, reduce_grad = _runtime_utils._post_backward_hook, _runtime_utils._reduce_grad

    @functools.wraps(hook)
    def post_backward_hook(state: Any, handle: FlatParamHandle, *args: Any) -> None:
        if isinstance(handle, StrategyHandle) and handle.reduces_now and not state._sync_gradients:
            state._sync_gradients = handle._more_micro_batches = True
            try:
                hook(state, handle, *args)
            finally:
                state._sync_gradients = handle._more_micro_batches = False
            return
        if isinstance(handle, StrategyHandle) and not handle.uses_sharded_strategy:
            handle._unreduced = not state._sync_gradients
        hook(state, handle, *args)

    @functools.wraps(reduce_grad)
    def reduce_or_accumulate(state: Any, handle: FlatParamHandle) -> None:
        if (
            isinstance(handle, StrategyHandle)
            and handle._more_micro_batches
            and handle._reduce is not None
            and handle._reduce.accumulates
        ):
            flat_param: Any = handle.flat_param
            gradient, flat_param.grad = flat_param.grad.data, None
            handle._reduce.accumulate(_runtime_utils._get_reduce_scatter_tensors(state, gradient)[0])
        else:
            reduce_grad(state, handle)

    _runtime_utils._post_backward_hook = post_backward_hook
    _runtime_utils._reduce_grad = reduce_or_accumulate


def _reduce_what_waits(root_state: Any) -> None:
    """Reduce gradients of earlier micro-batches for units that took no part in the last one."""
    for state in root_state._all_fsdp_states:
        handle = state._handle
        if not isinstance(handle, StrategyHandle) or handle._reduce is None:
            continue
        flat_param: Any = handle.flat_param
        unreduced, handle._unreduced = handle._unreduced and flat_param.grad is not None, False
        if not unreduced and not handle._reduce.waiting:
            continue
        # As after a backward of its own, until FSDP's callback.
        state.training_state = TrainingState.FORWARD_BACKWARD
        handle._training_state = HandleTrainingState.BACKWARD_POST
        state._post_backward_stream.wait_stream(state._device_handle.current_stream())
        with state._device_handle.stream(state._post_backward_stream):
            if unreduced:
                _runtime_utils._reduce_grad_no_shard(state, handle)
            if handle._reduce.waiting:
                size, dtype = flat_param._unpadded_unsharded_size, handle._reduce_dtype
                nothing = torch.zeros(size, dtype=dtype, device=handle.device)
                gradient, shard = _runtime_utils._get_reduce_scatter_tensors(state, nothing)
                handle._reduce(gradient, shard)
                shard = _runtime_utils._accumulate_sharded_grad(state, handle, shard)
                _runtime_utils._post_reduce_grad_callback(state, handle, shard)


def after_zero_grad(callback: Callable[[nn.Module], None]) -> None:
    """Have ``callback(model)`` run after every ``model.zero_grad()`` of an instance of FSDP."""

    @functools.wraps(nn.Module.zero_grad)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        nn.Module.zero_grad(self, set_to_none)
        callback(self)

    FullyShardedDataParallel.zero_grad = zero_grad  # type: ignore[method-assign]


def announce_writebacks() -> None:
    """Have ``written_back()`` of :func:`use_gather` called after each of FSDP's writebacks."""
    original = _unshard_param_utils._writeback_to_local_shard

    @functools.wraps(original)
    def writeback_to_local_shard(handle: FlatParamHandle, writeback_grad: bool) -> None:
        original(handle, writeback_grad)
        if isinstance(handle, StrategyHandle):
            handle._written_back()

    _unshard_param_utils._writeback_to_local_shard = writeback_to_local_shard
