"""Lists the private names of torch that a frozen base uses, and checks that torch has them.

``__init__.py`` imports this module first, and so nothing else of the folder is imported if torch lacks a name.
"""

from fsdp_zpp.torch_internals import Needed, check_needed

NEEDED = (
    Needed("torch.Tensor", "_make_wrapper_subclass", "a tensor that stands for a quantized weight"),
    Needed("torch._C", "DisableTorchFunctionSubclass", "calling functions of torch with a quantized weight"),
    Needed("torch._ops.OpOverload", "_schema", "refusing operations that write to a quantized weight"),
    Needed("torch.utils._pytree", "tree_map_only", "dequantizing the arguments of an operation"),
    Needed("torch.nn.utils.parametrize", "register_parametrization", "refusing to parametrize a quantized weight"),
    Needed("torch.distributed.fsdp._common_utils", "_is_fsdp_flattened", "noticing parameters that FSDP has flattened"),
    Needed("torch.distributed.fsdp.FullyShardedDataParallel", "_flat_param", "the flat parameter of an instance"),
    Needed(
        "torch.distributed.fsdp.FlatParameter",
        "_params _param_infos _shared_param_infos _shapes",
        "what a flat parameter holds",
    ),
    Needed("torch.nn.Module", "_parameters", "the parameters that modules show"),
    Needed("torch.nn.utils.prune.BasePruningMethod", "apply", "refusing to prune a quantized weight"),
)
check_needed("frozen base", NEEDED)
