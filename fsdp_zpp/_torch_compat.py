"""The versions of torch that work, and the private names of torch that each folder uses.

A folder's names are checked before anything else of it is imported. Otherwise, with a torch that lacks a name, training
would fail halfway or silently compute something else.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

SUPPORTED = ((2, 11), (2, 15))


def check_torch_version(adapter: str, version: str | None = None) -> None:
    """Raise RuntimeError unless ``adapter`` supports this ``version`` of torch, by default the running one."""
    version = torch.__version__ if version is None else version
    if not SUPPORTED[0] <= major_minor(version) <= SUPPORTED[1]:
        raise RuntimeError(
            f"fsdp_zpp's adapter for {adapter} uses internals of torch, and this is torch {version}. "
            f"{supported_versions()}"
        )


def major_minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version of torch."""
    # Local versions ("2.13.0+cpu") and pre-releases ("2.15.0a0") differ only after these.
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def supported_versions() -> str:
    """Return the supported versions and the command that installs one, for error messages."""
    (low, first), (high, last) = SUPPORTED
    return f'torch {low}.{first} to {high}.{last} work: pip install "torch>={low}.{first},<{high}.{last + 1}"'


_STORE_ATTR = dis.opmap["STORE_ATTR"]


class Patch(NamedTuple):
    """A part of torch that an adapter replaces, for good, when the adapter is imported.

    Attributes:
        replaced: Its full name without ``torch.distributed.fsdp.``.
        reason: The need of the adapter for which torch has no hook.
        apply: Replaces it with a function that calls the original and does more.
        since: The first version of torch in which it is replaced.
        until: The last one.
    """

    replaced: str
    reason: str
    apply: Callable[[], None]
    since: tuple[int, int] = SUPPORTED[0]
    until: tuple[int, int] = SUPPORTED[1]


def apply_patches(patches: Iterable[Patch]) -> None:
    """Apply the patches that are meant for the running torch."""
    version = major_minor(torch.__version__)
    for patch in patches:
        if patch.since <= version <= patch.until:
            patch.apply()


class Needed(NamedTuple):
    """Names of torch that one purpose needs.

    Attributes:
        owner: The full name of the module or class that has the names.
        names: The names, separated by spaces: attributes of ``owner``, or attributes that it sets on its instances.
        purpose: The purpose, as the error tells users.
        since: The first version of torch in which they are needed.
        until: The last one.
    """

    owner: str
    names: str
    purpose: str
    since: tuple[int, int] = SUPPORTED[0]
    until: tuple[int, int] = SUPPORTED[1]


def check_needed(user: str, table: Sequence[Needed], version: str | None = None) -> None:
    """Raise RuntimeError unless torch has all names of a table; the error lists the missing ones and their purposes.

    ``user`` is the part that needs them, for the error. ``version`` selects rows, by default that of the running torch.
    """
    version = torch.__version__ if version is None else version
    rows = [row for row in table if row.since <= major_minor(version) <= row.until]
    missing = [f"  {row.owner}.{name} ({row.purpose})" for row in rows for name in _missing(row)]
    if missing:
        raise RuntimeError(
            f"fsdp_zpp's {user} uses internals of torch that this torch {version} lacks:\n"
            + "\n".join(missing)
            + f"\n{supported_versions()}"
        )


def _missing(row: Needed) -> Iterator[str]:
    owner = _resolve(row.owner)
    for name in row.names.split():
        if owner is None or not (hasattr(owner, name) or _sets_on_instances(owner, name)):
            yield name


def _resolve(path: str) -> types.ModuleType | type | None:
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:  # a class, then, or a module that this torch lacks
        return getattr(_resolve(module), name, None) if module else None


def _sets_on_instances(owner: types.ModuleType | type, name: str) -> bool:
    """Return whether a class declares or sets an attribute on its instances, or a function of a module sets it."""
    # Attributes that __init__ sets exist on instances alone, and there is no instance to look at when this is imported.
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
    # dis could tell, too, but takes seconds for all tables.
    if name not in code.co_names:
        return False
    # Bytecode is pairs of operation and argument; EXTENDED_ARG holds the higher bytes of the next pair's argument.
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        if operation == _STORE_ATTR and code.co_names[argument] == name:
            return True
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
    return False


# ---- the names

_MESH = "torch.distributed.device_mesh.DeviceMesh"
_FSDP = "torch.distributed.fsdp"
_INIT = f"{_FSDP}._init_utils"
_RUNTIME = f"{_FSDP}._runtime_utils"
_WRAPPER = f"{_FSDP}.fully_sharded_data_parallel"
_INSTANCE = f"{_FSDP}.FullyShardedDataParallel"
_HANDLE = f"{_FSDP}._flat_param.FlatParamHandle"
_FLAT = f"{_FSDP}._flat_param.FlatParameter"
_FSDP_MODULE = "torch.distributed.fsdp.FSDPModule"
_SHARD = "torch.distributed.fsdp._fully_shard"
_COLLECTIVES = f"{_SHARD}._fsdp_collectives"
_COMMON = f"{_SHARD}._fsdp_common"
_GROUP = f"{_SHARD}._fsdp_param_group.FSDPParamGroup"
_CONTEXT = f"{_SHARD}._fsdp_param_group.FSDPCommContext"
_PARAM = f"{_SHARD}._fsdp_param.FSDPParam"
_STATE = f"{_SHARD}._fsdp_state.FSDPState"

# Names that both adapters use.
_BOTH = (
    Needed("torch.nn.Module", "_parameters", "registering parameters on their modules"),
    Needed("torch._C", "_current_graph_task_id", "telling whether a backward runs"),
)

# The names that each folder uses.
NEEDED: dict[str, tuple[Needed, ...]] = {
    "comm": (
        Needed("torch.distributed.distributed_c10d", "_process_group_name", "naming groups alike on all members"),
        Needed("torch.distributed.tensor", "_redistribute", "redistributions that no mesh of an ended job plans"),
        Needed("torch.distributed.tensor.DTensor", "_op_dispatcher", "operations that return no mesh of an ended job"),
        Needed("torch.distributed.distributed_c10d", "_coalescing_manager", "all-gathers that start as one collective"),
        Needed("torch.autograd.profiler", "_is_profiler_enabled", "labels in profiles, only while one is recorded"),
        Needed("torch._C", "_current_graph_task_id", "telling whether a backward runs"),
        Needed("torch.autograd.Variable", "_execution_engine", "the end of a backward, while a model is monitored"),
        Needed("torch.Tensor", "_version", "noticing writes to shards"),
        Needed("torch.multiprocessing.reductions", "StorageWeakRef", "noticing that a shard was moved to other memory"),
        Needed("torch.UntypedStorage", "_cdata", "telling which memory a shard is in"),
    ),
    "local_steps": (
        Needed("torch.distributed.distributed_c10d", "_new_process_group_helper _world", "groups of elastic nodes"),
        Needed(
            "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler",
            "_shared_tcp_store_server _bootstrap_store_info _state_holder _this_node _stop_heartbeats",
            "the rendezvous of elastic nodes",
        ),
        Needed(
            "torch.distributed.elastic.rendezvous.dynamic_rendezvous._BackendRendezvousStateHolder",
            "_cache_duration",
            "a state of the rendezvous that is never a second old",
        ),
    ),
    "runtime": (
        Needed(f"{_FSDP}._flat_param", "FlatParamHandle", "the flat parameter of an instance"),
        Needed(_INSTANCE, "_handle", "the flat parameters of a model"),
        Needed(f"{_FSDP}._runtime_utils", "_get_orig_buffer_dtypes", "the dtypes of buffers without mixed precision"),
        Needed(f"{_FSDP}._common_utils", "clean_tensor_name", "the names of those buffers"),
        Needed(_INSTANCE, "_ignored_buffer_names", "buffers that mixed precision leaves alone"),
        Needed(_HANDLE, "flat_param process_group uses_sharded_strategy device", "where a flat parameter is sharded"),
        Needed(_HANDLE, "_use_orig_params _skip_writeback_check", "parameters that were given other values"),
        Needed(_HANDLE, "_writeback_orig_params _use_sharded_views", "copying those values to the shard"),
        Needed(_HANDLE, "_get_unflat_views", "views of a flat parameter, one for each original parameter"),
        Needed(_FLAT, "_local_shard", "the shard of a flat parameter"),
        Needed(_FLAT, "_params _param_infos _shared_param_infos", "the original parameters"),
        Needed(_FLAT, "_shapes _numels_with_padding _is_padding_mask", "where they lie in a flat parameter"),
        Needed(_FLAT, "_param_extensions", "which parameters another parallelism shards"),
        Needed(
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "mesh placements shape stride",
            "how another parallelism shards a parameter",
        ),
        Needed(
            "torch.distributed.checkpoint.state_dict_loader",
            "_load_state_dict",
            "hearing of weights that a checkpoint is loaded into",
        ),
        Needed("torch._C", "_current_graph_task_id", "telling whether a backward runs"),
        Needed(f"{_COMMON}.FSDPMeshInfo", "mesh shard_process_group", "the mesh of a parameter"),
        Needed(
            f"{_COMMON}.FSDPMeshInfo",
            "is_spmd_mesh spmd_mesh dp_mesh_dims",
            "an SPMD mesh of a parameter",
            since=(2, 12),
        ),
        Needed(_COMMON, "ShardPlacementResult", "a mesh for a parameter", since=(2, 12)),
        Needed(f"{_SHARD}._fsdp_init", "_get_mesh_info _init_default_mesh", "making the mesh of a parameter"),
        Needed(_MESH, "_get_root_mesh", "telling whether a mesh is a part of a larger one"),
        Needed(_MESH, "_flatten", "sharding over several dimensions of a mesh"),
        Needed(_MESH, "_unflatten _dim_group_names", "sharding over a part of the data-parallel ranks of a mesh"),
        Needed(_MESH, "_pg_registry", "the groups of a mesh in compiled functions", since=(2, 13)),
    ),
    "frozen": (
        Needed("torch.Tensor", "_make_wrapper_subclass", "a tensor that stands for a quantized weight"),
        Needed("torch._C", "DisableTorchFunctionSubclass", "calling functions of torch with a quantized weight"),
        Needed("torch._ops.OpOverload", "_schema", "refusing operations that write to a quantized weight"),
        Needed("torch.utils._pytree", "tree_map_only", "dequantizing the arguments of an operation"),
        Needed("torch.nn.utils.parametrize", "register_parametrization", "refusing to parametrize a quantized weight"),
        Needed(
            "torch.distributed.fsdp._common_utils", "_is_fsdp_flattened", "noticing parameters that FSDP has flattened"
        ),
        Needed("torch.distributed.fsdp.FullyShardedDataParallel", "_flat_param", "the flat parameter of an instance"),
        Needed(
            "torch.distributed.fsdp.FlatParameter",
            "_params _param_infos _shared_param_infos _shapes",
            "what a flat parameter holds",
        ),
        Needed("torch.nn.Module", "_parameters", "the parameters that modules show"),
        Needed("torch.nn.utils.prune.BasePruningMethod", "apply", "refusing to prune a quantized weight"),
    ),
    "fsdp1": (
        *_BOTH,
        # ---- construction
        Needed(_INIT, "SHARDING_STRATEGY_MAP", "taking a Strategy as sharding_strategy"),
        Needed(f"{_FSDP}._flat_param.HandleShardingStrategy", "FULL_SHARD NO_SHARD", "sharding as a strategy says"),
        Needed(_WRAPPER, "_init_process_group_state", "sharding over the ranks of a strategy"),
        Needed(_INSTANCE, "process_group rank world_size _device_mesh", "the ranks that an instance is sharded over"),
        Needed(_INSTANCE, "_gradient_predivide_factor _gradient_postdivide_factor", "what torch divides gradients by"),
        Needed(_WRAPPER, "sharding_strategy", "state dicts of what is not sharded"),
        Needed(_INIT, "_sync_module_params_and_buffers", "broadcasting initial weights to all ranks"),
        Needed(
            _INIT, "_init_param_handle_from_params", "flattening frozen parameters apart from those that are trained"
        ),
        Needed(
            _INSTANCE,
            "_fsdp_wrapped_module _ignored_params _ignored_modules _ignored_buffer_names",
            "wrapping frozen parameters apart",
        ),
        Needed(_WRAPPER, "_unshard_params", "summoning frozen parameters that are wrapped apart"),
        Needed(_RUNTIME, "_share_state_and_init_handle_attrs", "learning which instance is the root"),
        Needed(_INSTANCE, "_handle", "the units of a model"),
        # ---- the parameters of a unit
        Needed(f"{_FSDP}._flat_param", "FlatParamHandle", "the flat parameter of a unit"),
        Needed(_HANDLE, "flat_param rank world_size uses_sharded_strategy", "the shard of a unit"),
        Needed(_FLAT, "_local_shard _full_param_padded", "the memory of a shard and of gathered weights"),
        Needed(_FLAT, "_params _shared_params _param_infos _shared_param_infos", "the original parameters"),
        Needed(_FLAT, "_fqns _shapes _numels_with_padding _is_padding_mask", "where parameters lie in a flat one"),
        Needed(
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "mesh placements",
            "how another parallelism shards a parameter",
        ),
        Needed(_FLAT, "_param_extensions", "telling which parameters another parallelism shards"),
        Needed(_HANDLE, "_use_orig_params", "telling whether modules show the original parameters"),
        Needed(_HANDLE, "_fully_sharded_module", "naming the module of a unit in errors"),
        Needed(_HANDLE, "_orig_param_dtype", "the dtype of the original parameters"),
        Needed(f"{_FSDP}._common_utils", "_is_fsdp_flattened", "telling whether another unit has a parameter"),
        # ---- gathering weights
        Needed(_HANDLE, "pre_unshard unshard needs_unshard _all_gather_flat_param", "gathering weights by a strategy"),
        Needed(
            _HANDLE,
            "_use_low_precision_shard _free_low_precision_sharded_param",
            "encoding the full-precision shard",
        ),
        Needed(_HANDLE, "_force_full_precision _uses_param_mixed_precision", "gathering weights in full precision"),
        Needed(_HANDLE, "reshard _use_sharded_flat_param _prefetched", "keeping and dropping gathered weights"),
        Needed(
            _HANDLE,
            "_alloc_padded_unsharded_flat_param _get_padded_unsharded_flat_param _free_unsharded_flat_param",
            "the memory to gather into",
        ),
        Needed(_HANDLE, "_offload_params device", "gathering shards that are offloaded to the CPU"),
        Needed(_HANDLE, "_device_handle", "the stream to gather in"),
        Needed(f"{_FSDP}._common_utils", "_no_dispatch_record_stream", "keeping memory until a stream has read it"),
        Needed(f"{_FSDP}._flat_param", "HandleTrainingState", "the phases of a unit in training"),
        Needed(_HANDLE, "_training_state", "telling which phase a unit is in"),
        # ---- what modules show in place of parameters
        Needed(_HANDLE, "_use_sharded_views _use_unsharded_views", "showing views of flat parameters"),
        Needed(_HANDLE, "_setattr_tensor _setattr_param", "setting views on modules"),
        Needed(
            _HANDLE, "_unsharded_flat_param_for_skipped_views", "gathered weights that modules show after a reshard"
        ),
        Needed(_FLAT, "_tensors", "the views that modules show in a forward"),
        Needed("torch.nn.modules.module", "_global_parameter_registration_hooks", "hooks on registering a parameter"),
        Needed(_HANDLE, "_fsdp_extension", "leaving DTensors of tensor parallelism to torch"),
        # ---- moves of a model and writes to its weights
        Needed(_INSTANCE, "_apply", "hearing of moves and casts of a model"),
        Needed(_HANDLE, "flat_param_to _reset_flat_param_grad_info_if_needed", "moving a shard with its model"),
        Needed(_HANDLE, "_writeback_orig_params _skip_writeback_check", "parameters that were given other values"),
        Needed(
            f"{_FSDP}._unshard_param_utils", "_writeback_to_local_shard", "hearing of writes to summoned parameters"
        ),
        # ---- gradients
        Needed(
            _INSTANCE, "register_comm_hook _comm_hook _comm_hook_state", "reducing gradients by communication hooks"
        ),
        Needed(_RUNTIME, "_post_backward_hook _post_backward_final_callback", "reducing when a backward ends"),
        Needed(_RUNTIME, "_post_backward_callback_queued", "telling whether an exception has ended a backward"),
        Needed(_RUNTIME, "_get_reduce_scatter_tensors", "the size of a gradient's shard"),
        Needed(_RUNTIME, "_reduce_grad_no_shard", "reducing gradients that are not sharded"),
        Needed(_RUNTIME, "_accumulate_sharded_grad _post_reduce_grad_callback", "adding to accumulated gradients"),
        Needed(
            _RUNTIME,
            "_offload_grad _post_backward_use_sharded_grad_views _has_optim_in_backward",
            "optimizers in the backward that step on offloaded parameters",
        ),
        Needed(_RUNTIME, "_post_backward_stream", "the stream to reduce in"),
        Needed(_RUNTIME, "_catch_all_reshard", "resharding units that ran without a backward"),
        Needed(_RUNTIME, "_post_backward_called", "telling torch that a unit has had its backward"),
        Needed(f"{_FSDP}._common_utils", "TrainingState", "the phases of an instance in training"),
        Needed(_INSTANCE, "training_state", "telling which phase an instance is in"),
        Needed(_INSTANCE, "_sync_gradients", "telling whether no_sync is on"),
        Needed(_INSTANCE, "_device_handle", "reducing in two streams"),
        Needed(_HANDLE, "_fwd_bwd_param_dtype", "the dtype that weights are gathered in"),
        Needed(_HANDLE, "_reduce_dtype", "the dtype that gradients are reduced in"),
        Needed(_HANDLE, "prepare_gradient_for_backward", "adding to gradients of earlier backwards"),
        Needed(_HANDLE, "_use_sharded_grad_views _reset_is_grad_none", "showing the gradients of original parameters"),
        Needed(_FLAT, "_saved_grad_shard _unpadded_unsharded_size", "the accumulated gradient of a unit"),
        # ---- torch.compile
        Needed(_INSTANCE, "_is_root", "telling that a whole model is compiled"),
        # ---- state of optimizers
        Needed(
            f"{_FSDP}._optim_utils", "_map_param_key_to_optim_keys", "optimizer states of what is sharded in a node"
        ),
        Needed(_INSTANCE, "_optim_state_dict_to_load_impl", "loading optimizer states from rank 0 alone"),
    ),
    "fsdp2": (
        *_BOTH,
        # ---- the parts of a model
        Needed(f"{_SHARD}._fully_shard.fully_shard", "state", "the state of a module that is being sharded"),
        Needed(_FSDP_MODULE, "_get_fsdp_state", "the state of a sharded module"),
        Needed(_STATE, "_fsdp_param_group", "the parameter group of a module", until=(2, 11)),
        Needed(_STATE, "_fsdp_param_groups", "the parameter groups of a module", since=(2, 12)),
        Needed(_STATE, "_state_ctx _modules", "the modules of a model"),
        Needed(f"{_SHARD}._fsdp_state.FSDPStateContext", "all_states", "the sharded modules of a model"),
        Needed(f"{_SHARD}._fsdp_state.FSDPStateContext", "post_optim_event", "gathering weights after changes"),
        Needed(_GROUP, "modules fsdp_params _module_fqn", "what a parameter group consists of"),
        Needed(_GROUP, "lazy_init", "learning which module is the root"),
        Needed(_GROUP, "_training_state", "telling which phase a group is in"),
        Needed(
            f"{_COMMON}.TrainingState", "IDLE FORWARD PRE_BACKWARD POST_BACKWARD", "the phases of a group in training"
        ),
        Needed(_GROUP, "device device_handle comm_ctx", "the device and the streams of a group"),
        Needed("torch.autograd.profiler", "_is_profiler_enabled", "labels in profiles, only while one is recorded"),
        # ---- meshes of single parameters
        Needed(_GROUP, "mesh_info", "telling the groups of a module apart"),
        # ---- parameters and their shards
        Needed(_PARAM, "sharded_param _sharded_param_data _sharded_local_tensor", "the shard of a parameter"),
        Needed(_PARAM, "_param_fqn _orig_size fsdp_placement", "the name and the shape of a parameter"),
        Needed(_PARAM, "_module_info", "the modules that a parameter is registered on"),
        Needed(
            f"{_SHARD}._fsdp_param.ParamModuleInfo",
            "module param_name shared_modules shared_param_names",
            "the names that a parameter has on its modules",
        ),
        Needed(_FSDP_MODULE, "_apply", "hearing of moves and casts of a model"),
        # ---- gathering weights
        Needed(f"{_SHARD}._fsdp_api", "AllGather ReduceScatter", "communication by a strategy"),
        Needed(_GROUP, "unshard wait_for_unshard unshard_in_backward pre_backward", "gathering weights by a strategy"),
        Needed(_GROUP, "is_unsharded is_sharded _all_gather_result", "telling whether weights are gathered"),
        Needed(_GROUP, "_all_gather_process_group _all_gather_comm", "the ranks to gather from"),
        Needed(_GROUP, "_with_fqn", "naming gathers in profiles"),
        Needed(f"{_SHARD}._fsdp_param_group", "AllGatherState", "keeping gathered weights until the next gather"),
        Needed(
            _CONTEXT,
            "get_all_gather_streams all_gather_copy_in_stream all_gather_stream all_gather_state",
            "the streams to gather in",
        ),
        Needed(
            f"{_COLLECTIVES}.AllGatherResult",
            "_replace all_gather_output all_gather_event all_gather_work param_all_gather_input_dtypes "
            "param_all_gather_input_numels all_gather_input_split_sizes",
            "handing over gathered weights",
        ),
        Needed(_PARAM, "param_dtype", "the dtype to gather in"),
        Needed(
            _COLLECTIVES,
            "_get_param_all_gather_inputs",
            "what is gathered of weights that encode themselves or are of several dtypes",
        ),
        Needed(_PARAM, "all_gather_inputs orig_dtype", "telling whether weights that encode themselves send values"),
        Needed(_PARAM, "_extensions_data", "the metadata of weights that encode themselves"),
        Needed(
            f"{_SHARD}._fsdp_param.ExtensionsData",
            "all_gather_metadata all_gather_input_sizes",
            "keeping that metadata beside a secondary shard",
        ),
        Needed("torch", "_foreach_copy_", "copying gathered weights of several dtypes"),
        # ---- unsharding and resharding
        Needed(
            _GROUP, "reshard _reshard_after_forward _to_sharded _to_unsharded", "keeping and dropping gathered weights"
        ),
        Needed(_GROUP, "_sharded_state", "telling whether modules show gathered weights"),
        Needed(f"{_SHARD}._fsdp_param", "ShardedState", "the states of a parameter"),
        Needed(_PARAM, "sharded_state _setattr_on_modules", "showing a shard or gathered weights"),
        Needed(_PARAM, "free_unsharded_param", "freeing the memory of gathered weights"),
        Needed(_PARAM, "all_gather_outputs _unsharded_param unsharded_param", "the memory of gathered weights"),
        Needed(_PARAM, "keep_unsharded_storage", "gathered weights whose memory a user keeps", since=(2, 15)),
        Needed(_PARAM, "is_dtensor", "parameters that tensor parallelism has sharded"),
        # ---- the end of a backward
        Needed(_STATE, "_pre_backward", "the beginning of a backward"),
        Needed(_STATE, "_root_post_backward_final_callback", "the end of a backward"),
        Needed(_STATE, "finalize_backward", "the end of a step by a user's call", since=(2, 15)),
        Needed(
            f"{_SHARD}._fsdp_state.FSDPStateContext",
            "manual_backward_finalization_active",
            "telling whether a user ends steps",
            since=(2, 15),
        ),
        Needed(_STATE, "_reset_iter_state", "recovery from an exception", since=(2, 13)),
        Needed(_GROUP, "use_training_state", "sparing weights that a user keeps unsharded"),
        # ---- reducing gradients
        Needed(_GROUP, "post_backward reduce_grads all_reduce_grads", "reducing in every micro-batch"),
        Needed(_GROUP, "_reduce_scatter_process_group", "the ranks to reduce over"),
        Needed(_GROUP, "_all_reduce_hook _reduce_scatter_comm", "reducing by a strategy"),
        Needed(_GROUP, "_set_separate_reduce_scatter_group", "refusing a second group to reduce in", since=(2, 13)),
        Needed(_CONTEXT, "reduce_scatter_stream all_reduce_stream", "the streams to reduce in"),
        Needed(_GROUP, "gradient_divide_factor force_sum_reduction_for_comms", "what a user has gradients divided by"),
        Needed(_COLLECTIVES, "_get_gradient_divide_factors", "what torch has divided gradients by"),
        Needed(_GROUP, "_reduce_dtype _orig_dtype _init_mp_dtypes", "the dtype that gradients are reduced in"),
        Needed(_COLLECTIVES, "foreach_reduce_scatter_copy_in", "the flat gradient of a group"),
        Needed(_COMMON, "_get_dim0_padded_size", "the size of a flat gradient"),
        Needed(_PARAM, "_get_grad_inner_tensor unsharded_grad_data", "the gradient of a parameter"),
        Needed(_PARAM, "unsharded_accumulated_grad", "accumulated gradients"),
        Needed(_PARAM, "unsharded_accumulated_grad_data", "the values of accumulated gradients", until=(2, 14)),
        Needed(_PARAM, "accumulate_unsharded_grad_if_needed", "adding to accumulated gradients", until=(2, 14)),
        Needed("torch.Tensor", "_post_accumulate_grad_hooks", "optimizers in the backward"),
        Needed("torch.distributed.tensor.DTensor", "_local_tensor", "telling whether torch has added to a gradient"),
        Needed(_GROUP, "offload_policy", "telling whether parameters are offloaded"),
        Needed(_PARAM, "grad_offload_event", "waiting for gradients that are copied to the CPU"),
        # ---- torch.compile and functorch
        Needed(_COMMON, "_disable_functorch_if_active", "communicating under functorch", since=(2, 13)),
        Needed(_COMMON, "_dynamo_disable", "hooks that torch.compile leaves out", since=(2, 13)),
    ),
}


# The folders as errors name them, where that is not their name.
_USERS = {
    "comm": "collectives",
    "local_steps": "local steps",
    "frozen": "frozen base",
    "fsdp1": "adapter for FullyShardedDataParallel",
    "fsdp2": "adapter for fully_shard",
}


def check_folder(folder: str) -> None:
    """Raise unless torch has the names that a folder uses; see :func:`check_needed`."""
    check_needed(_USERS.get(folder, folder), NEEDED[folder])
