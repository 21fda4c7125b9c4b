"""The table of the private names of torch that collectives use.

``__init__.py`` imports this module first, and so nothing else of the folder is imported if torch lacks a name.
"""

from fsdp_zpp.torch_internals import Needed, check_needed

NEEDED = (
    Needed("torch.distributed.distributed_c10d", "_process_group_name", "naming groups alike on all members"),
    Needed("torch.distributed.tensor", "_redistribute", "redistributions that no mesh of an ended job plans"),
    Needed("torch.distributed.tensor.DTensor", "_op_dispatcher", "operations that return no mesh of an ended job"),
    Needed("torch.distributed.distributed_c10d", "_coalescing_manager", "all-gathers that start as one collective"),
    Needed("torch.autograd.profiler", "_is_profiler_enabled", "labels in profiles, only while one is recorded"),
    Needed("torch._C", "_current_graph_task_id", "telling whether a backward runs"),
    Needed("torch.autograd.Variable", "_execution_engine", "the end of a backward, while a model is monitored"),
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
)
check_needed("collectives", NEEDED)
