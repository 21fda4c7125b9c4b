"""Lists the private names of torch that the runtime uses, and checks that torch has them.

``__init__.py`` imports this module first, and so nothing else of the folder is imported if torch lacks a name.
"""

from fsdp_zpp.torch_internals import Needed, check_needed

_FSDP = "torch.distributed.fsdp"
_INSTANCE = f"{_FSDP}.FullyShardedDataParallel"
_FLAT = f"{_FSDP}._flat_param.FlatParameter"
_HANDLE = f"{_FSDP}._flat_param.FlatParamHandle"

NEEDED = (
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
)
check_needed("runtime", NEEDED)
