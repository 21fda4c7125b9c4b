"""From ``FullyShardedDataParallel(..., sharding_strategy=strategy)`` to units that gather and reduce."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from fsdp_zpp.adapters.comm_hook import QuantizedReduceState
from fsdp_zpp.adapters.hsdp_mesh import read_2d_mesh
from fsdp_zpp.collectives.agreement import check_agreement, shard_signature
from fsdp_zpp.collectives.mesh import own_rank
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.from_strategy import log_frozen, prepare_frozen, quantize_for
from fsdp_zpp.frozen.hugging_face.patches import guard_sharded
from fsdp_zpp.frozen.resharding import follow_strategy
from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime._torch_checkpoint_load import hear_of_loads
from fsdp_zpp.runtime._torch_flat_parts import copy_replaced
from fsdp_zpp.runtime.lifecycle import LifecycleHooks
from fsdp_zpp.runtime.model_setup import repeated_if_failed, set_up_model
from fsdp_zpp.runtime.packed_weights import packed_sites
from fsdp_zpp.runtime.sharded import Sharded
from fsdp_zpp.runtime.summary import log_reduction
from fsdp_zpp.runtime.unit import Loaded, StrategyUnit, attach, unit_of
from fsdp_zpp.torch_internals import Patch, apply_patches

from . import _torch, _torch_adoption, _torch_backward, _torch_step_gradients
from ._torch_compile import refuse_whole_graphs
from ._torch_sharded import ShardedInstance
from .validation import (
    UNITS,
    check_arguments,
    check_one_group,
    check_overrides,
    group_of,
    hold_flattened,
    ignored_parameters,
    refuse_local_state_dict,
)


class CommHookUnit:
    """An FSDP instance of a stock strategy with a :class:`QuantizedReduceState`, which counts its traffic."""

    def __init__(self, state: QuantizedReduceState, sharded: ShardedInstance) -> None:
        self.traffic = state.traffic
        self.errors, self.ranks = state.errors, state.mesh
        self.sharded: Sharded = sharded
        self.loads = 0
        self.loaded_state: Loaded | None = None
        hear_of_loads(self)

    def invalidate(self, *, by_step: bool = False) -> None:
        """Do nothing, for stock FSDP keeps no secondary shard."""

    def full_shard_units(self, is_outermost: bool) -> None:
        """Return None, for torch gathers the weights."""

    def compute_device(self) -> torch.device | None:
        """Return the device that gradients are reduced on."""
        return self.sharded.compute_device()

    def weights_loaded(self) -> None:
        """Handle weights that were loaded: from a state dict, or in place from a checkpoint."""
        self.loads += 1

    def drop_gradients(self) -> None:
        """Do nothing, for stock FSDP has gradients in ``.grad`` alone."""

    @property
    def keeps_weights(self) -> bool:
        """Return False, for stock FSDP keeps no weights."""
        return False


def _construct(construct: Callable[[], None], module: FullyShardedDataParallel, arguments: dict[str, Any]) -> None:
    strategy = arguments["sharding_strategy"]
    if strategy is None or isinstance(strategy, ShardingStrategy):
        construct()
        return
    mesh = arguments["device_mesh"]
    if isinstance(strategy, Strategy) and isinstance(mesh, DeviceMesh) and (read := read_2d_mesh(strategy, mesh)):
        strategy, arguments["device_mesh"] = read
        arguments["sharding_strategy"] = strategy
    group = group_of(arguments)
    if group is None and isinstance(strategy, Strategy):
        construct()  # to raise FSDP's own error
        return
    own, layout = check_arguments(strategy, group, arguments)
    unit = StrategyUnit(own, layout.mesh())
    unit.patterns = tuple(dict(strategy.overrides))
    mixed_precision = arguments["mixed_precision"]
    unit.left_unquantized = quantize_for(
        own,
        arguments["module"],
        unit.ranks,
        ignored=ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"]),
        device=arguments["device_id"],
        dtype=None if mixed_precision is None else mixed_precision.param_dtype,
        broadcast=group if arguments["sync_module_states"] else None,
    )

    def wrap_frozen(others: set[nn.Parameter]) -> FullyShardedDataParallel:
        # The instance around it does these. FSDP takes ignored modules or ignored states; ``others`` has both.
        done_outside = {"auto_wrap_policy": None, "param_init_fn": None, "sync_module_states": False}
        given = {name: value for name, value in arguments.items() if name != "self"}
        return FullyShardedDataParallel(**given | done_outside | {"ignored_modules": None, "ignored_states": others})

    hop = unit.mesh.intra if unit.scopes.optimizer == "I" else unit.mesh.group
    shard_group = own_rank() if hop is None else hop
    # Before the parameters are flattened.
    packed, sites = packed_sites(arguments["module"]), UNITS.sites([arguments["module"]])
    with ExitStack() as stack:
        stack.enter_context(_torch.sharding_over(module, strategy, shard_group, sharded=unit.scopes.optimizer != "N"))
        stack.enter_context(warnings.catch_warnings())
        if shard_group is not group and shard_group.size() == 1:  # as it is to be
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
        if arguments["use_orig_params"]:  # without, FSDP refuses to mix them
            stack.enter_context(_torch.frozen_apart(module, wrap_frozen))
            warnings.filterwarnings("ignore", ".*both parameters with requires_grad=True and False")
        try:
            construct()
        except ValueError as error:
            if (seen_from := vars(error).get("seen_from")) is not None:
                raise seen_from(arguments["module"]) from None
            raise
    hold_flattened(module, arguments, sites)
    if packed and packed & _torch_adoption.flattened_sites(module):
        unit.leave_weights_uncoded()
    if strategy.overrides:
        check_overrides(module.module, own, strategy, _torch_adoption.flattened_sites(module))
    unit.sharded = sharded = ShardedInstance(module)
    handle = _torch_adoption.adopt_handle(module, unit, sharded.layout)
    if unit.gather is not None:
        unit.gather.secondary.source = handle
    # A full or sharded state dict is loaded through a writeback; a local one is written to the shard directly.
    module.register_load_state_dict_post_hook(lambda module, incompatible_keys: unit.weights_loaded())
    if unit.scopes.optimizer == "I":
        module.register_state_dict_pre_hook(refuse_local_state_dict)
    attach(module, unit)
    refuse_whole_graphs(module)
    guard_sharded(module.module, functools.partial(_torch_adoption.has_shards, module))


def _all_ranks_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that hold ``model``, if it is sharded inside nodes, as all or none of its units are."""
    units = (unit_of(module) for module in model.modules())
    inside = (unit for unit in units if isinstance(unit, StrategyUnit) and unit.scopes.optimizer == "I")
    return next((unit.ranks.group for unit in inside), None)


def _on_lazy_init(root: nn.Module) -> None:
    """Start to watch the model under ``root``, and prepare its reductions."""
    with repeated_if_failed(root, _on_lazy_init):
        _set_up(root)


def _set_up(root: nn.Module) -> None:
    units, others = [], []
    for path, module in root.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            if isinstance(unit := unit_of(module), StrategyUnit):
                assert isinstance(unit.sharded, ShardedInstance)
                unit.sharded.rename(_name_of(path))
                units.append(unit)
            else:
                others.append(ShardedInstance(module).numel())
    check_one_group(units)
    if units:
        name = model_name(root)
        prepare_frozen(root)
        hooks = set_up_model(root, name, units, [numel for numel in others if numel])
        log_frozen(root, name, units)
        _torch_backward.watch_backwards(root, hooks.backward_ended).reduce_in_two_streams()
        _torch_adoption.prefetch_shards_alone(root)


def _before_move(instance: FullyShardedDataParallel) -> None:
    # All at once, since torch takes original parameters out of all units within an instance before it moves the first.
    for each in FullyShardedDataParallel.fsdp_modules(instance):
        if (handle := _torch_adoption.handle_of(each)) is not None:
            handle.drop_cleared_gradients()
            copy_replaced(handle)


def _after_move(instance: FullyShardedDataParallel) -> None:
    if (handle := _torch_adoption.handle_of(instance)) is not None:
        handle.moved()


def _name_of(path: str) -> str:
    """Return a unit's name: the path to what it wraps; ``frozen of <path>`` for the instance of a frozen part."""
    name = path.replace("_fsdp_wrapped_module.", "")
    owner = name.removesuffix("_fsdp_wrapped_module").rstrip(".")
    return f"frozen of {owner or 'root'}" if name.endswith("_fsdp_wrapped_module") else name or "root"


def _adopt_hook_state(model: FullyShardedDataParallel, state: object) -> dict[FullyShardedDataParallel, object]:
    """Check that ``state`` reduces over the model's group, log which parts of it are active, and count its traffic.

    Returns:
        A state for each instance.
    """
    if not isinstance(state, QuantizedReduceState):
        return {}
    instances = {path: m for path, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)}
    expected = dist.get_process_group_ranks(state.process_group)
    for instance in instances.values():
        ranks = dist.get_process_group_ranks(_torch.process_group_of(instance))
        if ranks != expected:
            raise ValueError(
                f"the QuantizedReduceState was made for the ranks {expected}, but this model is sharded over {ranks}; "
                "make the state with process_group= the model's group"
            )
    sharded = [ShardedInstance(instance, _name_of(path)) for path, instance in instances.items()]
    sizes = {each.name: shard_signature(each.shards()) for each in sharded}
    facts = {"codecs": state.codecs, "gpus_per_node": state.mesh.topology.gpus_per_node}
    call = f"register_comm_hook of {model_name(model)}"
    check_agreement(state.process_group, call, facts | {"error_feedback": state.error_feedback} | sizes)
    follow_strategy(model, state.mesh)
    states: dict[FullyShardedDataParallel, object] = {}
    hooked: list[CommHookUnit] = []
    error_nbytes = 0
    for instance, each in zip(instances.values(), sharded, strict=True):
        own = states[instance] = state.of_unit(each.name, each.layout.trained)
        hooked.append(unit := CommHookUnit(own, each))
        if unit_of(instance) is None:
            attach(instance, unit)
            instance.register_load_state_dict_post_hook(lambda module, keys, unit=unit: unit.weights_loaded())
        error_nbytes += sum(own.error_nbytes(shard.numel()) for shard in each.shards())
    log_reduction(state.codecs, state.error_feedback, state.mesh, model_name(model), len(instances), error_nbytes)
    if error_nbytes:
        _torch_backward.watch_backwards(model, LifecycleHooks(hooked).backward_ended)
    return states


PATCHES = (
    Patch(
        "FullyShardedDataParallel.__init__",
        "a Strategy is taken for a sharding_strategy",
        lambda: _torch.intercept_construction(_construct),
    ),
    Patch(
        "FullyShardedDataParallel.register_comm_hook",
        "each unit gets a QuantizedReduceState of its own",
        lambda: _torch.intercept_hook_registration(_adopt_hook_state),
    ),
    Patch(
        "_runtime_utils._share_state_and_init_handle_attrs",
        "the root becomes known, and with it all units of the model and the order in which they reduce",
        lambda: _torch.on_lazy_init(_on_lazy_init),
    ),
    Patch(
        "_runtime_utils._post_backward_hook",
        "micro-batches that are not the last reduce as far as the gradient scope says",
        _torch_backward.reduce_in_every_backward,
    ),
    Patch(
        "_runtime_utils._get_reduce_scatter_tensors",
        "torch makes a view for every rank to find the size of a shard",
        _torch_step_gradients.shard_gradients_in_constant_time,
    ),
    Patch(
        "_runtime_utils._post_backward_final_callback",
        "a backward ends: if it synchronizes gradients, weights will change",
        _torch_backward.hear_of_backwards,
    ),
    Patch(
        "_unshard_param_utils._writeback_to_local_shard",
        "weights change by summon_full_params(writeback=True) and load_state_dict",
        _torch_adoption.announce_writebacks,
    ),
    Patch(
        "FullyShardedDataParallel._apply",
        "a move or cast of the model reaches the shard, and what was gathered of it is stale",
        lambda: _torch.around_moves(_before_move, _after_move),
    ),
    Patch(
        "fully_sharded_data_parallel._unshard_params",
        "summon_full_params(recurse=False) summons frozen parameters that are kept apart, too",
        _torch.summon_frozen_too,
    ),
    Patch(
        "_optim_utils._map_param_key_to_optim_keys",
        "torch broadcasts keys of optimizer states from global rank 0, which a node's group may not have",
        _torch.save_optimizer_states_in_any_group,
    ),
    Patch(
        "FullyShardedDataParallel._optim_state_dict_to_load_impl",
        "torch sends optimizer states that rank 0 alone has loaded over a group that may not have it",
        lambda: _torch.load_optimizer_states_over(_all_ranks_of),
    ),
)
"""All that is replaced in torch; it changes nothing for models of torch's own strategies.

Besides, handles of flat parameters that a strategy shards become :class:`_torch_handle.StrategyHandle`, and the first
model that is offloaded has _torch_offload.py replace ``_runtime_utils._post_reduce_grad_callback``.
"""


def install() -> None:
    """Make FullyShardedDataParallel understand strategies."""
    apply_patches(PATCHES)
