"""Every private name of torch's FullyShardedDataParallel that the adapter touches, and nothing else.

Checked on torch 2.11 to 2.13. A torch that lacks one of the names fails here, at import, with a clear error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

try:
    from torch.distributed.fsdp import _init_utils, _runtime_utils, _unshard_param_utils
    from torch.distributed.fsdp._common_utils import _no_dispatch_record_stream
    from torch.distributed.fsdp._flat_param import (
        FlatParamHandle,
        HandleShardingStrategy,
        HandleTrainingState,
    )

    _PATCHED = (
        _init_utils.SHARDING_STRATEGY_MAP,
        _runtime_utils._share_state_and_init_handle_attrs,
        _runtime_utils._post_backward_final_callback,
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


class StrategyHandle(FlatParamHandle):
    """A flat parameter's handle that gathers through a strategy.

    Made by :func:`use_gather` from the handle that torch built. Whatever asks for full precision (state dicts,
    ``summon_full_params``, evaluation under FSDP_USE_FULL_PREC_IN_EVAL) is left to torch's own gather.
    """

    _gather: Gather
    _gather_is_lossy: bool
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

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        super().reshard(free_unsharded_flat_param)
        if self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS:
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
        # The strategy encodes the full-precision shard itself, so there is no 16-bit copy of it to be made.
        if self._offload_params:
            self.flat_param.data = self.flat_param._local_shard.to(self.device, non_blocking=True)

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        if self._wants_full_precision():
            return super()._all_gather_flat_param(padded_unsharded_flat_param)
        shard = self.flat_param.data
        self._gather(shard, padded_unsharded_flat_param, self._shard_version())
        self._holds_decoded_weights = True
        if self._offload_params:
            _no_dispatch_record_stream(shard, self._device_handle.current_stream())
        return padded_unsharded_flat_param

    def drop_unsharded(self) -> None:
        """Between forwards, have the next one gather anew what FSDP still keeps unsharded, which is the root."""
        flat_param = self.flat_param
        initialized = hasattr(flat_param, "_full_param_padded")
        if initialized and self._training_state == HandleTrainingState.IDLE:
            self._free_unsharded_flat_param()

    def zero_padding(self) -> None:
        """FSDP fills the gaps that align parameters with 42s, which would ruin the scale of the blocks they are in."""
        flat_param = self.flat_param
        start, end = -self.rank * flat_param.numel(), 0
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


def use_gather(
    module: FullyShardedDataParallel, gather: Gather, lossy: bool, written_back: Callable[[], None]
) -> Callable[[], None]:
    """Have ``module``'s flat parameter, if it has one, gathered by ``gather``.

    Args:
        module: An instance of FSDP.
        gather: Gathers the weights.
        lossy: Whether what it gathers differs from the weights.
        written_back: Called after summoned or loaded parameters were written to the shard.

    Returns:
        What to call when the weights have changed.
    """
    handle: Any = module._handle
    if handle is None:
        return lambda: None
    handle.__class__ = StrategyHandle
    handle._gather, handle._gather_is_lossy, handle._holds_decoded_weights = gather, lossy, False
    handle._written_back, handle._version_at_summon = written_back, None
    handle.zero_padding()
    return handle.drop_unsharded


def use_reduce(module: FullyShardedDataParallel, reduce: Callable[[Tensor, Tensor], None]) -> None:
    """Have ``module``'s gradient reduced by ``reduce(gradient, out)``, as if it was registered as a comm hook."""

    def strategy_hook(state: None, gradient: Tensor, out: Tensor) -> None:
        reduce(gradient, out)

    # register_comm_hook() would do, but may be called on a root only, and settles who is the root.
    module._comm_hook, module._comm_hook_state = strategy_hook, None


def treat_as_full_shard(strategy: Hashable) -> None:
    """Make FSDP take ``strategy`` as a sharding strategy that shards like FULL_SHARD."""
    strategies: dict[Any, HandleShardingStrategy] = _init_utils.SHARDING_STRATEGY_MAP
    strategies[strategy] = HandleShardingStrategy.FULL_SHARD


def process_group_of(module: FullyShardedDataParallel) -> dist.ProcessGroup:
    """The group that ``module`` is sharded over."""
    group = module.process_group
    assert group is not None
    return group


def parameters_of(module: FullyShardedDataParallel) -> Iterator[nn.Parameter]:
    """The parameters of ``module``'s own unit as an optimizer may hold them: flat, and original."""
    if module._handle is not None:
        flat_param = module._handle.flat_param
        yield from (flat_param, *(flat_param._params or ()))


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
    before: Callable[[FullyShardedDataParallel, object], None],
) -> None:
    """Have ``before(model, state)`` run before every ``register_comm_hook``."""
    original = FullyShardedDataParallel.register_comm_hook

    @functools.wraps(original)
    def register_comm_hook(self: FullyShardedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        before(self, state)
        original(self, state, hook)

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
        original(state, module)
        if state._sync_gradients:
            callback(module)

    _runtime_utils._post_backward_final_callback = post_backward_final_callback


def announce_writebacks() -> None:
    """Have ``written_back()`` of :func:`use_gather` called after each of FSDP's writebacks."""
    original = _unshard_param_utils._writeback_to_local_shard

    @functools.wraps(original)
    def writeback_to_local_shard(handle: FlatParamHandle, writeback_grad: bool) -> None:
        original(handle, writeback_grad)
        if isinstance(handle, StrategyHandle):
            handle._written_back()

    _unshard_param_utils._writeback_to_local_shard = writeback_to_local_shard
