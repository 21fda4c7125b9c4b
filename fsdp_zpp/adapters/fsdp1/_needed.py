"""Table of the private names of torch that the adapter to FullyShardedDataParallel uses.

``__init__.py`` imports this module first, and so nothing else of the folder is imported if torch lacks a name.
"""

from fsdp_zpp.adapters._needed import SHARED
from fsdp_zpp.torch_internals import Needed, check_needed, check_torch_version

_FSDP = "torch.distributed.fsdp"
_INIT = f"{_FSDP}._init_utils"
_RUNTIME = f"{_FSDP}._runtime_utils"
_WRAPPER = f"{_FSDP}.fully_sharded_data_parallel"
_INSTANCE = f"{_FSDP}.FullyShardedDataParallel"
_HANDLE = f"{_FSDP}._flat_param.FlatParamHandle"
_FLAT = f"{_FSDP}._flat_param.FlatParameter"

NEEDED = (
    *SHARED,
    # ---- construction
    Needed(_INIT, "SHARDING_STRATEGY_MAP", "taking a Strategy as sharding_strategy"),
    Needed(f"{_FSDP}._flat_param.HandleShardingStrategy", "FULL_SHARD NO_SHARD", "sharding as a strategy says"),
    Needed(_WRAPPER, "_init_process_group_state", "sharding over the ranks of a strategy"),
    Needed(_INSTANCE, "process_group rank world_size _device_mesh", "the ranks that an instance is sharded over"),
    Needed(_INSTANCE, "_gradient_predivide_factor _gradient_postdivide_factor", "what torch divides gradients by"),
    Needed(_WRAPPER, "sharding_strategy", "state dicts of what is not sharded"),
    Needed(_INIT, "_sync_module_params_and_buffers", "broadcasting initial weights to all ranks"),
    Needed(_INIT, "_init_param_handle_from_params", "flattening frozen parameters apart from those that are trained"),
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
    Needed(_HANDLE, "_unsharded_flat_param_for_skipped_views", "gathered weights that modules show after a reshard"),
    Needed(_FLAT, "_tensors", "the views that modules show in a forward"),
    Needed("torch.nn.modules.module", "_global_parameter_registration_hooks", "hooks on registering a parameter"),
    Needed(_HANDLE, "_fsdp_extension", "leaving DTensors of tensor parallelism to torch"),
    # ---- moves of a model and writes to its weights
    Needed(_INSTANCE, "_apply", "hearing of moves and casts of a model"),
    Needed(_HANDLE, "flat_param_to _reset_flat_param_grad_info_if_needed", "moving a shard with its model"),
    Needed(_HANDLE, "_writeback_orig_params _skip_writeback_check", "parameters that were given other values"),
    Needed(f"{_FSDP}._unshard_param_utils", "_writeback_to_local_shard", "hearing of writes to summoned parameters"),
    # ---- gradients
    Needed(_INSTANCE, "register_comm_hook _comm_hook _comm_hook_state", "reducing gradients by communication hooks"),
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
    Needed(f"{_FSDP}._optim_utils", "_map_param_key_to_optim_keys", "optimizer states of what is sharded in a node"),
    Needed(_INSTANCE, "_optim_state_dict_to_load_impl", "loading optimizer states from rank 0 alone"),
)
check_torch_version("FullyShardedDataParallel")
check_needed("adapter for FullyShardedDataParallel", NEEDED)
