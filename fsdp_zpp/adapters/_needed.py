"""Private names of torch that both adapters use, with which the table of each adapter begins."""

from fsdp_zpp.torch_internals import Needed

_MESH = "torch.distributed.device_mesh.DeviceMesh"

SHARED = (
    Needed("torch.Tensor", "_version", "noticing writes to shards"),
    Needed("torch.multiprocessing.reductions", "StorageWeakRef", "noticing that a shard was moved to other memory"),
    Needed("torch.UntypedStorage", "_cdata", "telling which memory a shard is in"),
    Needed("torch.utils._python_dispatch", "is_traceable_wrapper_subclass", "fingerprints of shards that are encoded"),
    Needed("torch.nn.Module", "_parameters", "registering parameters on their modules"),
    Needed(_MESH, "_get_root_mesh", "telling whether a mesh is a part of a larger one"),
    Needed(_MESH, "_flatten", "sharding over several dimensions of a mesh"),
    Needed(_MESH, "_unflatten _dim_group_names", "sharding over a part of the data-parallel ranks of a mesh"),
    Needed(_MESH, "_pg_registry", "the groups of a mesh in compiled functions", since=(2, 13)),
    Needed("torch._C", "_current_graph_task_id", "telling whether a backward runs"),
)
