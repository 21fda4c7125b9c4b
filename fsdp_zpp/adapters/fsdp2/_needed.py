"""Table of the private names of torch that the adapter to fully_shard uses.

``__init__.py`` imports this module first, and so nothing else of the folder is imported if torch lacks a name.
"""

from fsdp_zpp.adapters._needed import SHARED
from fsdp_zpp.torch_internals import Needed, check_needed, check_torch_version

_MODULE = "torch.distributed.fsdp.FSDPModule"
_FSDP = "torch.distributed.fsdp._fully_shard"
_COLLECTIVES = f"{_FSDP}._fsdp_collectives"
_COMMON = f"{_FSDP}._fsdp_common"
_GROUP = f"{_FSDP}._fsdp_param_group.FSDPParamGroup"
_CONTEXT = f"{_FSDP}._fsdp_param_group.FSDPCommContext"
_PARAM = f"{_FSDP}._fsdp_param.FSDPParam"
_STATE = f"{_FSDP}._fsdp_state.FSDPState"

NEEDED = (
    *SHARED,
    # ---- the parts of a model
    Needed(f"{_FSDP}._fully_shard.fully_shard", "state", "the state of a module that is being sharded"),
    Needed(_MODULE, "_get_fsdp_state", "the state of a sharded module"),
    Needed(_STATE, "_fsdp_param_group", "the parameter group of a module", until=(2, 11)),
    Needed(_STATE, "_fsdp_param_groups", "the parameter groups of a module", since=(2, 12)),
    Needed(_STATE, "_state_ctx _modules", "the modules of a model"),
    Needed(f"{_FSDP}._fsdp_state.FSDPStateContext", "all_states", "the sharded modules of a model"),
    Needed(f"{_FSDP}._fsdp_state.FSDPStateContext", "post_optim_event", "gathering weights after changes"),
    Needed(_GROUP, "modules fsdp_params _module_fqn", "what a parameter group consists of"),
    Needed(_GROUP, "lazy_init", "learning which module is the root"),
    Needed(_GROUP, "_training_state", "telling which phase a group is in"),
    Needed(f"{_COMMON}.TrainingState", "IDLE FORWARD PRE_BACKWARD POST_BACKWARD", "the phases of a group in training"),
    Needed(_GROUP, "device device_handle comm_ctx", "the device and the streams of a group"),
    Needed("torch.autograd.profiler", "_is_profiler_enabled", "labels in profiles, only while one is recorded"),
    # ---- meshes of single parameters
    Needed(_GROUP, "mesh_info", "telling the groups of a module apart"),
    Needed(f"{_COMMON}.FSDPMeshInfo", "mesh shard_process_group", "the mesh of a parameter"),
    Needed(
        f"{_COMMON}.FSDPMeshInfo", "is_spmd_mesh spmd_mesh dp_mesh_dims", "an SPMD mesh of a parameter", since=(2, 12)
    ),
    Needed(_COMMON, "ShardPlacementResult", "a mesh for a parameter", since=(2, 12)),
    Needed(f"{_FSDP}._fsdp_init", "_get_mesh_info _init_default_mesh", "making the mesh of a parameter"),
    # ---- parameters and their shards
    Needed(_PARAM, "sharded_param _sharded_param_data _sharded_local_tensor", "the shard of a parameter"),
    Needed(_PARAM, "_param_fqn _orig_size fsdp_placement", "the name and the shape of a parameter"),
    Needed(_PARAM, "_module_info", "the modules that a parameter is registered on"),
    Needed(
        f"{_FSDP}._fsdp_param.ParamModuleInfo",
        "module param_name shared_modules shared_param_names",
        "the names that a parameter has on its modules",
    ),
    Needed(_MODULE, "_apply", "hearing of moves and casts of a model"),
    # ---- gathering weights
    Needed(f"{_FSDP}._fsdp_api", "AllGather ReduceScatter", "communication by a strategy"),
    Needed(_GROUP, "unshard wait_for_unshard unshard_in_backward pre_backward", "gathering weights by a strategy"),
    Needed(_GROUP, "is_unsharded is_sharded _all_gather_result", "telling whether weights are gathered"),
    Needed(_GROUP, "_all_gather_process_group _all_gather_comm", "the ranks to gather from"),
    Needed(_GROUP, "_with_fqn", "naming gathers in profiles"),
    Needed(f"{_FSDP}._fsdp_param_group", "AllGatherState", "keeping gathered weights until the next gather"),
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
        f"{_FSDP}._fsdp_param.ExtensionsData",
        "all_gather_metadata all_gather_input_sizes",
        "keeping that metadata beside a secondary shard",
    ),
    Needed("torch", "_foreach_copy_", "copying gathered weights of several dtypes"),
    # ---- unsharding and resharding
    Needed(_GROUP, "reshard _reshard_after_forward _to_sharded _to_unsharded", "keeping and dropping gathered weights"),
    Needed(_GROUP, "_sharded_state", "telling whether modules show gathered weights"),
    Needed(f"{_FSDP}._fsdp_param", "ShardedState", "the states of a parameter"),
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
        f"{_FSDP}._fsdp_state.FSDPStateContext",
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
)
check_torch_version("fully_shard")
check_needed("adapter for fully_shard", NEEDED)
