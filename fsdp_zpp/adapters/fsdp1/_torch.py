"""Private names of torch's FullyShardedDataParallel: those of construction.

With the other ``_torch_*.py`` files of this folder, which hold those of flat parameters and of backwards, this is all
that the adapter touches of torch's internals, and these files do nothing else. ``_needed.py`` lists the names.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    _init_utils,
    _optim_utils,
    _runtime_utils as runtime_utils,
    _unshard_param_utils as unshard_param_utils,
    fully_sharded_data_parallel as _wrapper,
)
from torch.distributed.fsdp._common_utils import TrainingState, _no_dispatch_record_stream as no_dispatch_record_stream
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy, HandleTrainingState

from fsdp_zpp.adapters._torch_mesh import mesh_over

__all__ = [
    "FlatParamHandle",
    "HandleTrainingState",
    "TrainingState",
    "around_moves",
    "frozen_apart",
    "intercept_construction",
    "intercept_hook_registration",
    "load_optimizer_states_over",
    "no_dispatch_record_stream",
    "on_lazy_init",
    "process_group_of",
    "runtime_utils",
    "save_optimizer_states_in_any_group",
    "sharding_over",
    "summon_frozen_too",
    "unshard_param_utils",
]


@contextmanager
def sharding_over(
    module: FullyShardedDataParallel, strategy: Hashable, group: dist.ProcessGroup, *, sharded: bool
) -> Iterator[None]:
    """Let FSDP shard ``module`` over ``group``, or not at all, while it is constructed with ``strategy``.

    If ``group`` is only a part of the user's group, FSDP still broadcasts the initial module states over the user's
    group; everything else goes over ``group``.
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
                # Between several ranks a strategy reduces; a rank alone leaves its gradients to torch, as they are.
                state._gradient_predivide_factor, state._gradient_postdivide_factor = 1, 1
        return state

    def synchronize_all(module: nn.Module, params: list[nn.Parameter], process_group: dist.ProcessGroup) -> None:
        assert users_group is not None
        synchronize(module, params, users_group)

    def init_own_handle(state: FullyShardedDataParallel, *args: Any) -> None:
        # Not before: instances within are constructed with the same strategy, whose overrides may say otherwise.
        if state is module:
            strategies[strategy] = HandleShardingStrategy.FULL_SHARD if sharded else HandleShardingStrategy.NO_SHARD
        init_handle(state, *args)

    _init_utils._init_param_handle_from_params = init_own_handle
    _wrapper._init_process_group_state = init_shard_group
    _init_utils._sync_module_params_and_buffers = synchronize_all
    try:
        yield
    finally:
        _init_utils._init_param_handle_from_params = init_handle
        _wrapper._init_process_group_state = init_group
        _init_utils._sync_module_params_and_buffers = synchronize
    users_mesh = module._device_mesh
    if users_mesh is not None and group is not users_group:
        # Only now: the constructor takes a mesh other than its argument for a part of a larger one.
        module._device_mesh = mesh_over(group, users_mesh)
    if not sharded:
        module.sharding_strategy = ShardingStrategy.NO_SHARD  # which torch's state dicts ask for


@contextmanager
def frozen_apart(
    module: FullyShardedDataParallel, wrap: Callable[[set[nn.Parameter]], FullyShardedDataParallel]
) -> Iterator[None]:
    """Take frozen parameters out of ``module`` while it is constructed, if it has trainable ones, too.

    In one flat parameter, gradients of frozen parameters would be allocated and reduced.

    Args:
        module: An instance of FSDP.
        wrap: Wraps what ``module`` wraps, without the given parameters; returns the instance that goes between the two.
    """
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

    _init_utils._init_param_handle_from_params = init_handles
    try:
        yield
    finally:
        _init_utils._init_param_handle_from_params = init_handle
    if frozen_unit is not None:
        _TAKEN_OUT.add(frozen_unit)
        module._fsdp_wrapped_module = frozen_unit
        frozen_unit._ignored_modules = module._ignored_modules
        frozen_unit._ignored_buffer_names = module._ignored_buffer_names


_TAKEN_OUT: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()
"""The instances that :func:`frozen_apart` has made."""


def summon_frozen_too() -> None:
    """Let ``summon_full_params(recurse=False)`` of an instance also summon the frozen parameters taken out of it."""
    original: Any = _wrapper._unshard_params

    @contextmanager
    def unshard_params(module: nn.Module, recurse: bool, *args: object, **kwargs: object) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(original(module, recurse, *args, **kwargs))
            frozen_unit = getattr(module, "_fsdp_wrapped_module", None)
            if not recurse and frozen_unit in _TAKEN_OUT:
                stack.enter_context(original(frozen_unit, recurse, *args, **kwargs))
            yield

    _wrapper._unshard_params = unshard_params


def process_group_of(module: FullyShardedDataParallel) -> dist.ProcessGroup:
    """Return the group that ``module`` is sharded over."""
    group = module.process_group
    assert group is not None
    return group


def intercept_construction(
    around: Callable[[Callable[[], None], FullyShardedDataParallel, dict[str, Any]], None],
) -> None:
    """Let ``around(construct, module, arguments)`` run FSDP's constructor, for every instance from now on.

    ``construct()`` calls the constructor with ``arguments``, which ``around`` may change before.
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
    """Run ``before(model, state)`` before every ``register_comm_hook``; it returns instances' own states."""
    original = FullyShardedDataParallel.register_comm_hook

    @functools.wraps(original)
    def register_comm_hook(self: FullyShardedDataParallel, state: object, hook: Callable[..., object]) -> None:
        own_states = before(self, state)
        original(self, state, hook)
        for instance, own_state in own_states.items():
            instance._comm_hook_state = own_state

    FullyShardedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]


def on_lazy_init(callback: Callable[[nn.Module], None]) -> None:
    """Run ``callback(root)`` once for each root, when FSDP initializes it lazily."""
    original = runtime_utils._share_state_and_init_handle_attrs

    @functools.wraps(original)
    def share_state_and_init_handle_attrs(root_state: FullyShardedDataParallel, root_module: nn.Module) -> None:
        original(root_state, root_module)
        callback(root_module)

    runtime_utils._share_state_and_init_handle_attrs = share_state_and_init_handle_attrs


def around_moves(
    before: Callable[[FullyShardedDataParallel], None], after: Callable[[FullyShardedDataParallel], None]
) -> None:
    """Call ``before(instance)`` and ``after(instance)`` around each move or cast of an instance: ``to()``, ``half()``.

    All of these go through ``_apply``, module by module.
    """
    original = FullyShardedDataParallel._apply

    @functools.wraps(original)
    def _apply(self: FullyShardedDataParallel, *args: object, **kwargs: object) -> FullyShardedDataParallel:
        before(self)
        moved = original(self, *args, **kwargs)
        after(self)
        return moved

    FullyShardedDataParallel._apply = _apply  # type: ignore[method-assign,assignment]


def save_optimizer_states_in_any_group() -> None:
    """Make FSDP gather the keys of optimizer states where it would broadcast them from a rank outside of the group.

    FSDP broadcasts them from global rank 0, which only one node's group has if a model is sharded inside each node.
    """
    original: Any = _optim_utils._map_param_key_to_optim_keys

    @functools.wraps(original)
    def map_param_key_to_optim_keys(
        optim_state_dict: dict[str, object], group: dist.ProcessGroup | None, *args: object, merge_keys: bool = False
    ) -> object:
        elsewhere = group is not None and dist.get_process_group_ranks(group)[0] != 0
        return original(optim_state_dict, group, *args, merge_keys=merge_keys or elsewhere)

    _optim_utils._map_param_key_to_optim_keys = map_param_key_to_optim_keys  # type: ignore[assignment]


def load_optimizer_states_over(ranks_of: Callable[[nn.Module], dist.ProcessGroup | None]) -> None:
    """Make FSDP send optimizer states that rank 0 alone has loaded to ``ranks_of(model)``, unless that is None.

    FSDP itself sends them over the group that it shards over. If a model is sharded inside nodes, rank 0 is in the
    group of one node alone.
    """
    original = FullyShardedDataParallel._optim_state_dict_to_load_impl
    signature = inspect.signature(original)

    @functools.wraps(original)
    def optim_state_dict_to_load_impl(*args: object, **kwargs: object) -> dict[str, object]:
        bound = signature.bind(*args, **kwargs)
        ranks = ranks_of(bound.arguments["model"]) if bound.arguments.get("rank0_only") else None
        if ranks is not None:
            bound.arguments["group"] = ranks
        return original(*bound.args, **bound.kwargs)

    FullyShardedDataParallel._optim_state_dict_to_load_impl = staticmethod(optim_state_dict_to_load_impl)  # type: ignore[method-assign]
