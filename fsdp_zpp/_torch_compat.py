"""The versions of torch that work, and the private names of torch that the package uses.

The package checks the version and the names before it imports anything else. Without this check, a torch that lacks a
name would let training start, then fail or silently compute something else.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

SUPPORTED = ((2, 11), (2, 15))
_MADE_BY = "_fsdp_zpp_made_by"


def major_minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version of torch, such as "2.13.0+cpu" or "2.15.0a0"."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


class Patch(NamedTuple):
    """A function of torch that an adapter replaces when the adapter is imported, for the rest of the process.

    Attributes:
        replaced: The function's full name.
        reason: The reason for the replacement; torch has no hook for it.
        make: Makes the replacement, which calls the original and does more, from the original.
    """

    replaced: str
    reason: str
    make: Callable[[Any], Callable[..., Any]]

    def apply(self) -> None:
        owner, _, name = self.replaced.rpartition(".")
        replace_function(_resolve(owner), name, self.make)


def replace_function(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a function of a module or class by ``make(function)``; do nothing if ``make`` made that function."""
    original = getattr(owner, name)
    if getattr(original, _MADE_BY, None) is make:
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MADE_BY, make)
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(replacement) if is_static else replacement)


class Needed(NamedTuple):
    """Names that a module or class, or its instances, must have in torch ``since`` to ``until``, both included."""

    owner: str
    names: str
    since: tuple[int, int] = SUPPORTED[0]
    until: tuple[int, int] = SUPPORTED[1]


def check_torch(needed: Iterable[Needed] | None = None, version: str = torch.__version__) -> None:
    """Raise RuntimeError unless torch ``version`` is supported and has the ``needed`` names, by default all."""
    (low, first), (high, last) = SUPPORTED
    works = f'torch {low}.{first} to {high}.{last} work: pip install "torch>={low}.{first},<{high}.{last + 1}"'
    if not SUPPORTED[0] <= major_minor(version) <= SUPPORTED[1]:
        raise RuntimeError(f"fsdp_zpp uses internals of torch, and this is torch {version}. {works}")
    rows = [row for row in (NEEDED if needed is None else needed) if row.since <= major_minor(version) <= row.until]
    missing = [f"  {row.owner}.{name}" for row in rows for name in missing_names(row)]
    if missing:
        text = "\n".join(missing)
        raise RuntimeError(f"fsdp_zpp uses internals of torch that this torch {version} lacks:\n{text}\n{works}")


def missing_names(row: Needed) -> Iterator[str]:
    owner = _resolve(row.owner)
    for name in row.names.split():
        if owner is None or not (hasattr(owner, name) or _sets_on_instances(owner, name)):
            yield name


def _resolve(path: str) -> types.ModuleType | type | None:
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:  # ``path`` is a class, or a module that this torch lacks
        return getattr(_resolve(module), name, None) if module else None


def _sets_on_instances(owner: types.ModuleType | type, name: str) -> bool:
    """Return whether ``owner`` or a base of it annotates ``name``, or has a function that sets it on some object."""
    # hasattr() of a class misses the attributes that __init__ sets, and this check has no instance.
    return any(
        name in inspect.get_annotations(each)
        or any(_sets(function.__code__, name) for function in _functions(vars(each).values()))
        for each in (inspect.getmro(owner) if inspect.isclass(owner) else (owner,))
    )


def _functions(values: Iterable[object]) -> Iterator[types.FunctionType]:
    for value in values:
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, types.FunctionType):
            # Decorators (torch.no_grad, say) hide the code that sets attributes.
            inner: object = inspect.unwrap(function)
            yield inner if isinstance(inner, types.FunctionType) else function


def _sets(code: types.CodeType, name: str) -> bool:
    """Return whether ``code`` contains ``something.name = ...``."""
    # Scan the bytes here, since dis.get_instructions would take seconds for all names.
    if name not in code.co_names:
        return False
    # Bytecode is pairs of operation and argument; EXTENDED_ARG holds the higher bytes of the next pair's argument.
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        if operation == dis.opmap["STORE_ATTR"] and code.co_names[argument] == name:
            return True
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
    return False


_FSDP = "torch.distributed.fsdp"
_SHARD = "torch.distributed.fsdp._fully_shard"

# A name is listed once for its owner, however many files of the package use it.
NEEDED = (
    Needed("torch", "_foreach_copy_"),
    Needed("torch._C", "DisableTorchFunctionSubclass _are_functorch_transforms_active _current_graph_task_id"),
    Needed("torch._functorch.utils", "unwrap_dead_wrappers"),
    Needed("torch._ops.OpOverload", "_schema"),
    Needed("torch.autograd.profiler", "_is_profiler_enabled"),
    Needed("torch.distributed.checkpoint.state_dict_loader", "_load_state_dict"),
    Needed("torch.distributed.device_mesh.DeviceMesh", "_dim_group_names _flatten _get_root_mesh _unflatten"),
    Needed("torch.distributed.device_mesh.DeviceMesh", "_pg_registry", since=(2, 13)),
    Needed(
        "torch.distributed.distributed_c10d", "_coalescing_manager _new_process_group_helper _process_group_name _world"
    ),
    Needed("torch.distributed.elastic.rendezvous.dynamic_rendezvous._BackendRendezvousStateHolder", "_cache_duration"),
    Needed(
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler",
        "_bootstrap_store_info _shared_tcp_store_server _state_holder _stop_heartbeats _this_node",
    ),
    Needed(f"{_FSDP}._common_utils", "TrainingState _is_fsdp_flattened _no_dispatch_record_stream clean_tensor_name"),
    Needed(f"{_FSDP}._flat_param", "FlatParamHandle HandleTrainingState"),
    Needed(
        f"{_FSDP}._flat_param.FlatParameter",
        "_fqns _full_param_padded _is_padding_mask _local_shard _numels_with_padding _param_extensions _param_infos "
        "_params _saved_grad_shard _shapes _shared_param_infos _shared_params _tensors _unpadded_unsharded_size",
    ),
    Needed(
        f"{_FSDP}._flat_param.FlatParamHandle",
        "_all_gather_flat_param _alloc_padded_unsharded_flat_param _device_handle _force_full_precision "
        "_free_low_precision_sharded_param _free_unsharded_flat_param _fsdp_extension _fully_sharded_module "
        "_get_padded_unsharded_flat_param _get_unflat_views _offload_params _orig_param_dtype "
        "_prefetched _reduce_dtype _reset_flat_param_grad_info_if_needed _reset_is_grad_none _setattr_param "
        "_setattr_tensor _skip_writeback_check _training_state _unsharded_flat_param_for_skipped_views "
        "_use_low_precision_shard _use_orig_params _use_sharded_flat_param _use_sharded_grad_views _use_sharded_views "
        "_use_unsharded_views _uses_param_mixed_precision _writeback_orig_params device flat_param flat_param_to "
        "needs_unshard pre_unshard prepare_gradient_for_backward process_group rank reshard unshard "
        "uses_sharded_strategy world_size",
    ),
    Needed(f"{_FSDP}._flat_param.HandleShardingStrategy", "FULL_SHARD NO_SHARD"),
    Needed(f"{_SHARD}._fsdp_api", "AllGather ReduceScatter"),
    Needed(f"{_SHARD}._fsdp_collectives", "_get_gradient_divide_factors _get_param_all_gather_inputs foreach_reduce"),
    Needed(
        f"{_SHARD}._fsdp_collectives.AllGatherResult",
        "_replace all_gather_event all_gather_input_split_sizes all_gather_output all_gather_work "
        "param_all_gather_input_dtypes param_all_gather_input_numels",
    ),
    Needed(f"{_SHARD}._fsdp_common", "_get_dim0_padded_size"),
    Needed(f"{_SHARD}._fsdp_common", "ShardPlacementResult", since=(2, 12)),
    Needed(f"{_SHARD}._fsdp_common", "_disable_functorch_if_active _dynamo_disable", since=(2, 13)),
    Needed(f"{_SHARD}._fsdp_common.FSDPMeshInfo", "mesh shard_process_group"),
    Needed(f"{_SHARD}._fsdp_common.FSDPMeshInfo", "dp_mesh_dims is_spmd_mesh spmd_mesh", since=(2, 12)),
    Needed(f"{_SHARD}._fsdp_common.TrainingState", "FORWARD IDLE POST_BACKWARD PRE_BACKWARD"),
    Needed(f"{_SHARD}._fsdp_init", "_get_mesh_info _init_default_mesh"),
    Needed(f"{_SHARD}._fsdp_param", "ShardedState"),
    Needed(f"{_SHARD}._fsdp_param.ExtensionsData", "all_gather_input_sizes all_gather_metadata"),
    Needed(
        f"{_SHARD}._fsdp_param.FSDPParam",
        "_extensions_data _get_grad_inner_tensor _module_info _orig_size _param_fqn _setattr_on_modules "
        "_sharded_local_tensor _sharded_param_data _unsharded_param all_gather_inputs all_gather_outputs "
        "free_unsharded_param fsdp_placement grad_offload_event is_dtensor orig_dtype param_dtype sharded_param "
        "sharded_state unsharded_accumulated_grad unsharded_grad_data unsharded_param",
    ),
    Needed(
        f"{_SHARD}._fsdp_param.FSDPParam",
        "accumulate_unsharded_grad_if_needed unsharded_accumulated_grad_data",
        until=(2, 14),
    ),
    Needed(f"{_SHARD}._fsdp_param.FSDPParam", "keep_unsharded_storage", since=(2, 15)),
    Needed(f"{_SHARD}._fsdp_param.ParamModuleInfo", "module param_name shared_modules shared_param_names"),
    Needed(f"{_SHARD}._fsdp_param_group", "AllGatherState RegisterPostBackwardFunction"),
    Needed(
        f"{_SHARD}._fsdp_param_group.FSDPCommContext",
        "all_gather_copy_in_stream all_gather_state all_gather_stream all_reduce_stream get_all_gather_streams "
        "reduce_scatter_stream",
    ),
    Needed(
        f"{_SHARD}._fsdp_param_group.FSDPParamGroup",
        "_all_gather_comm _all_gather_process_group _all_gather_result _all_reduce_hook _init_mp_dtypes _module_fqn "
        "_orig_dtype _prefetch_unshard _reduce_dtype _reduce_scatter_comm _reduce_scatter_process_group "
        "_register_post_backward_hook _reshard_after_forward _sharded_state _to_sharded _to_unsharded "
        "_training_state _with_fqn all_reduce_grads comm_ctx device device_handle force_sum_reduction_for_comms "
        "fsdp_params gradient_divide_factor is_sharded is_unsharded lazy_init mesh_info modules offload_policy "
        "post_backward post_forward pre_backward pre_forward reduce_grads reshard unshard unshard_in_backward "
        "use_training_state wait_for_unshard",
    ),
    Needed(f"{_SHARD}._fsdp_param_group.FSDPParamGroup", "_set_separate_reduce_scatter_group", since=(2, 13)),
    Needed(f"{_SHARD}._fsdp_state.FSDPState", "_modules _pre_backward _root_post_backward_final_callback _state_ctx"),
    Needed(f"{_SHARD}._fsdp_state.FSDPState", "_fsdp_param_group", until=(2, 11)),
    Needed(f"{_SHARD}._fsdp_state.FSDPState", "_fsdp_param_groups", since=(2, 12)),
    Needed(f"{_SHARD}._fsdp_state.FSDPState", "_reset_iter_state", since=(2, 13)),
    Needed(f"{_SHARD}._fsdp_state.FSDPState", "finalize_backward", since=(2, 15)),
    Needed(f"{_SHARD}._fsdp_state.FSDPStateContext", "all_states post_optim_event"),
    Needed(f"{_SHARD}._fsdp_state.FSDPStateContext", "manual_backward_finalization_active", since=(2, 15)),
    Needed(f"{_SHARD}._fully_shard.fully_shard", "state"),
    Needed(
        f"{_FSDP}._init_utils", "SHARDING_STRATEGY_MAP _init_param_handle_from_params _sync_module_params_and_buffers"
    ),
    Needed(f"{_FSDP}._optim_utils", "_map_param_key_to_optim_keys"),
    Needed(
        f"{_FSDP}._runtime_utils",
        "_accumulate_sharded_grad _catch_all_reshard _get_orig_buffer_dtypes _get_reduce_scatter_tensors "
        "_has_optim_in_backward _offload_grad _post_backward_callback_queued _post_backward_called "
        "_post_backward_final_callback _post_backward_hook _post_backward_stream _post_backward_use_sharded_grad_views "
        "_post_reduce_grad_callback _reduce_grad_no_shard _share_state_and_init_handle_attrs",
    ),
    Needed(f"{_FSDP}._unshard_param_utils", "_writeback_to_local_shard"),
    Needed(f"{_FSDP}.FSDPModule", "_apply _get_fsdp_state"),
    Needed(f"{_FSDP}.fully_sharded_data_parallel", "_init_process_group_state _unshard_params sharding_strategy"),
    Needed(
        f"{_FSDP}.FullyShardedDataParallel",
        "_apply _comm_hook _comm_hook_state _device_handle _device_mesh _flat_param _fsdp_wrapped_module "
        "_gradient_postdivide_factor _gradient_predivide_factor _handle _ignored_buffer_names _ignored_modules "
        "_ignored_params _is_root _optim_state_dict_to_load_impl _sync_gradients process_group rank register_comm_hook "
        "training_state world_size",
    ),
    Needed("torch.distributed.tensor", "_redistribute"),
    Needed("torch.distributed.tensor._dtensor_spec.DTensorSpec", "mesh placements shape stride"),
    Needed("torch.distributed.tensor.DTensor", "_local_tensor _op_dispatcher"),
    Needed("torch.multiprocessing.reductions", "StorageWeakRef"),
    Needed("torch.nn.Module", "_parameters"),
    Needed("torch.nn.modules.module", "_global_parameter_registration_hooks"),
    Needed("torch.Tensor", "_make_wrapper_subclass _post_accumulate_grad_hooks _version"),
    Needed("torch.UntypedStorage", "_cdata"),
    Needed("torch.utils._pytree", "tree_map_only"),
)
