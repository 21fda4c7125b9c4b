"""Ranks that share a node, the links among them, and torch's meshes of them."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init

from fsdp_zpp.comm.agreement import agree, from_each_rank
from fsdp_zpp.comm.mesh import (
    ProcessMesh,
    described,
    mesh_on,
    name_by_axes,
    named_ranks,
    tells_node_size,
    topology_of,
    twin_of,
)
from fsdp_zpp.strategy.error_feedback import Topology
from fsdp_zpp.strategy.strategy import Strategy

# ---- NVML: which GPUs of this machine NVLink joins
#
# It sees all GPUs of the machine. CUDA sees those that CUDA_VISIBLE_DEVICES leaves to a process, often just one.

logger = logging.getLogger("fsdp_zpp")


@dataclass(frozen=True)
class GpuReport:
    """Report of a rank on the GPUs of its machine, by their UUIDs.

    NVLink joins some to ``gpu``, directly or through switches, and others are known to be apart. NCCL may have been
    told to use no peer-to-peer access, and so no NVLink.
    """

    gpu: str | None  # the whole GPU, for an instance of MIG
    joined: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    disabled: bool = False


def nvlink_peers(uuid: str) -> GpuReport | None:
    """Return the GPUs that NVLink joins to the one with this UUID, which lacks "GPU-" or "MIG-"; None if unknown."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        logger.warning("which GPUs NVLink joins is not known without pynvml: run pip install nvidia-ml-py")
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return _peers(nvml, uuid)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _peers(nvml: Any, uuid: str) -> GpuReport:
    own = _whole_gpu(nvml, uuid)
    gpu = nvml.nvmlDeviceGetUUID(own)
    joined: set[str] = set()
    apart: set[str] = set()
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            peer = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetUUID(peer)
            status = nvml.nvmlDeviceGetP2PStatus(own, peer, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except nvml.NVMLError:  # a GPU that has failed, or the GPU itself
            continue
        if status == nvml.NVML_P2P_STATUS_OK:
            joined.add(name)
        elif status != nvml.NVML_P2P_STATUS_UNKNOWN:  # all others deny it, each with a reason
            apart.add(name)
    return GpuReport(gpu, frozenset(joined - {gpu}), frozenset(apart - {gpu}))


def _whole_gpu(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))


# ---- links: which ranks of a group share fast ones
#
# Fast are NVLink, directly or through switches, and what ranks on one GPU share. All else is slow: peer-to-peer access
# over PCIe, copies through the host's memory, and NVLink that NCCL was told not to use. Each rank asks NVML about its
# own GPU; ranks exchange what they have found, once a group, so that all of them conclude the same. Where a link is not
# known (on CPUs, or between other accelerators than NVIDIA's), nothing is concluded.


@dataclass(frozen=True)
class Links:
    """Fast links among the ranks of a group."""

    launched: Topology
    sets: tuple[tuple[int, ...], ...]  # of joined ranks, in order; none spans two launched nodes
    shares_gpus: bool = False
    disabled: bool = False

    @property
    def node_size(self) -> int | None:
        """Return the number of consecutive ranks in each set; None if sets are unequal or in another order."""
        size = len(self.sets[0])
        consecutive = all(ranks == tuple(range(ranks[0], ranks[0] + size)) for ranks in self.sets)
        return size if consecutive else None

    @property
    def are_slow(self) -> bool:
        """Return whether a launched node has ranks without fast links to each other."""
        return len(self.sets) > self.launched.nodes

    def __str__(self) -> str:
        what = "ranks" if self.shares_gpus else "GPUs"
        ranks = f"{self.launched.gpus_per_node} {what}{' a node' * (self.launched.nodes > 1)}"
        fast = "fast links" if self.shares_gpus else "NVLink"
        if not self.are_slow:
            return f"{ranks} with {fast}"
        if len(self.sets) == self.launched.world:
            return f"{ranks} without {'peer-to-peer access (NCCL_P2P_DISABLE)' if self.disabled else fast}"
        if self.node_size is not None:
            return f"{ranks} with {fast} in sets of {self.node_size}"
        joined = ", ".join(named_ranks(list(ranks)) for ranks in self.sets if len(ranks) > 1)
        return f"{ranks} with {fast} among {joined} alone"


# None for groups of which nothing is known.
_links: WeakKeyDictionary[dist.ProcessGroup, Links | None] = WeakKeyDictionary()


def find_links(group: dist.ProcessGroup, device: torch.device | None = None) -> Links | None:
    """Return the links of ``group``, or None if they are unknown. Collective at the first call for a group."""
    if group not in _links:
        _links[group] = _exchanged(group, device) if may_be_known(group) else None
    return _links[group]


def known_links(group: dist.ProcessGroup | None) -> Links | None:
    """Return the result of :func:`find_links`, without communication; None also if it was never called."""
    return None if group is None else _links.get(group)


def links_from(reports: Sequence[GpuReport], launched: Topology) -> Links | None:
    """Return the fast links that the reports of all ranks, in their order, show; None if they are unknown."""
    sets: list[tuple[int, ...]] = []
    for ranks in launched.intra_partition():
        found = _joined_sets({rank: reports[rank] for rank in ranks})
        if found is None:
            return None
        sets += found
    gpus_of_nodes = ([reports[rank].gpu for rank in ranks] for ranks in launched.intra_partition())
    shares_gpus = any(len({*gpus}) < len(gpus) for gpus in gpus_of_nodes)
    return Links(launched, tuple(sets), shares_gpus, any(report.disabled for report in reports))


def _joined_sets(reports: dict[int, GpuReport]) -> list[tuple[int, ...]] | None:
    # Links through others count, since NCCL's rings go where links are: many pairs of eight V100s have no link.
    sets: list[set[int]] = []
    for rank, report in reports.items():
        near = [part for part in sets if any(_are_joined(report, reports[other]) for other in part)]
        sets = [part for part in sets if part not in near] + [{rank}.union(*near)]
    for part in sets:
        others = [reports[rank] for rank in reports.keys() - part]
        if not all(_are_known_apart(reports[rank], other) for rank in part for other in others):
            return None
    return sorted(tuple(sorted(part)) for part in sets)


def _are_joined(one: GpuReport, other: GpuReport) -> bool:
    if one.gpu is None or other.gpu is None:
        return False
    if one.gpu == other.gpu:
        return True
    return not (one.disabled or other.disabled) and one.gpu in other.joined and other.gpu in one.joined


def _are_known_apart(one: GpuReport, other: GpuReport) -> bool:
    if one.gpu is None or other.gpu is None:
        return False
    return one.disabled or other.disabled or one.gpu in other.apart or other.gpu in one.apart


def may_be_known(group: dist.ProcessGroup) -> bool:
    """Return whether :func:`find_links` asks ranks about GPUs; the same on all ranks, whatever each has."""
    return dist.get_world_size(group) > 1 and "nccl" in dist.get_backend_config(group)


def _exchanged(group: dist.ProcessGroup, device: torch.device | None) -> Links | None:
    try:
        report = own_report(group, device)
    except Exception as error:  # of any kind: the other ranks would hang in the exchange
        logger.debug("links of this rank's GPU are not known: %s: %s", type(error).__name__, error)
        report = GpuReport(None)
    reports = from_each_rank(report, group, device)
    try:
        launched = topology_of(group)
    except ValueError:  # the launcher does not say what shares a machine; whoever needs nodes raises it
        return None
    return links_from(reports, launched)


def own_report(group: dist.ProcessGroup, device: torch.device | None) -> GpuReport:
    if not torch.cuda.is_available():
        return GpuReport(None)
    given = (device, getattr(group, "bound_device_id", None), torch.device("cuda", torch.cuda.current_device()))
    own = next(each.index for each in given if each is not None and each.type == "cuda" and each.index is not None)
    uuid = str(torch.cuda.get_device_properties(own).uuid)
    report = nvlink_peers(uuid) or _peers_without_access(uuid, own)
    return replace(report, disabled=_p2p_is_disabled())


def _peers_without_access(uuid: str, own: int) -> GpuReport:
    """Return the visible GPUs that this one can't access; all others may have any link."""
    others = (index for index in range(torch.cuda.device_count()) if index != own)
    apart = (index for index in others if not torch.cuda.can_device_access_peer(own, index))
    uuids = frozenset(str(torch.cuda.get_device_properties(index).uuid) for index in apart)
    return GpuReport(uuid, frozenset(), uuids)


def _p2p_is_disabled() -> bool:
    return os.environ.get("NCCL_P2P_DISABLE", "0") != "0" or os.environ.get("NCCL_P2P_LEVEL") in ("LOC", "0")


# ---- layout of a strategy's ranks on nodes


@dataclass(frozen=True)
class RankLayout:
    """Ranks that a call shards over, and their nodes; for ``by_links`` see [Note: Links] in strategy.py.

    ``stock`` says that fully_shard leaves everything to torch, since the strategy asks for torch's own FULL_SHARD.
    """

    group: dist.ProcessGroup
    topology: Topology
    stock: bool
    by_links: bool = False

    @classmethod
    def of(cls, strategy: Strategy, group: dist.ProcessGroup) -> RankLayout:
        """Return the layout of ``group``, without communication, or raise the errors of :func:`topology_of`."""
        # Links count if find_links has found them before.
        topology = topology_of(group, node_size(strategy, group))
        if strategy.gpus_per_node is None and strategy.follows_links:
            joined = joined_by_links(group)
            if joined is not None:
                return cls(group, joined, stock=False, by_links=True)
        return cls(group, topology, stock=topology.nodes == 1 and strategy.is_plain)

    def mesh(self) -> ProcessMesh:
        return mesh_on(self.group, self.topology, by_links=self.by_links)


def joined_by_links(group: dist.ProcessGroup) -> Topology | None:
    """Return the nodes of ``group`` whose ranks share fast links; None if these are the launched ones, or unknown."""
    links = known_links(group)
    if links is None or links.node_size is None or links.launched.nodes > 1 or not links.are_slow:
        return None
    return Topology(links.launched.world, links.node_size)


def node_size(strategy: Strategy, group: dist.ProcessGroup) -> int | None:
    """Return ``gpus_per_node`` for ``group``; None leaves it to the launcher."""
    # A plain strategy does the same on any layout, so it must not fail if nothing tells the layout. All ranks then
    # count as one node, and torch's own collectives do the work.
    if strategy.gpus_per_node is None and strategy.is_plain and not tells_node_size():
        return dist.get_world_size(group)
    return strategy.gpus_per_node


def node_size_fact(given: int | None, group: dist.ProcessGroup) -> object:
    """Return the ``gpus_per_node`` that ranks must agree on, before links are asked: only ranks without one ask."""
    if given is not None:
        return given
    # Compare the resolved size: ranks that leave it to the launcher may have been launched differently.
    launched = launched_node_size(group)
    return f"{launched} (as launched)" if isinstance(launched, int) and may_be_known(group) else launched


def launched_node_size(group: dist.ProcessGroup) -> object:
    """Return ``gpus_per_node`` as launched, or the launcher's variables as text if they give no layout."""
    try:
        return topology_of(group).gpus_per_node
    except ValueError:  # which must raise on all ranks, not on some: the caller compares the text between them
        return described()


# ---- the parts of a device mesh that a strategy shards over


def flattened(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh over ``dims`` of ``mesh``. Collective over the root mesh at the first call for these."""
    part = mesh if dims == mesh.mesh_dim_names else mesh[dims]
    return part if part.ndim == 1 else part._flatten()


def is_part(mesh: DeviceMesh) -> bool:
    """Return whether ``mesh`` is a part of a larger one, which other parallelisms may shard over."""
    return mesh._get_root_mesh() is not mesh


def name_ranks(group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """Have errors name the ranks of ``group``, a group of ``mesh``, by their coordinates, if there are several axes."""
    root = mesh._get_root_mesh()
    if root.ndim > 1 and root.mesh_dim_names is not None:
        name_by_axes(group, root.mesh_dim_names, root.mesh)


def mesh_over(group: dist.ProcessGroup, mesh: DeviceMesh) -> DeviceMesh:
    """Make the 1-D mesh over ``group``, consecutive ranks of the 1-D ``mesh``, as a dimension of the same root mesh."""
    # torch joins a parameter's data-parallel mesh with another parallelism's only if both are parts of one mesh.
    return _part_of(mesh, group) if is_part(mesh) else DeviceMesh.from_group(group, mesh.device_type)


def _part_of(mesh: DeviceMesh, group: dist.ProcessGroup) -> DeviceMesh:
    size = dist.get_world_size(group)
    # Drop the groups of its dimension: from them, torch would make new ones over all ranks of the larger mesh, and a
    # stage of a pipeline can't have other stages take part in that.
    bare: Any = copy.copy(mesh)
    del bare._dim_group_names
    (name,) = mesh.mesh_dim_names or ()
    parts = bare._unflatten(0, (mesh.size() // size, size), (f"{name}_parts", f"{name}_part"))
    parts._dim_group_names = [mesh.get_group().group_name, group.group_name]
    registry = getattr(mesh._get_root_mesh(), "_pg_registry", None)  # from torch 2.13 on, for compiled functions
    if registry is not None:
        registry[group.group_name] = group
    part: DeviceMesh = parts[f"{name}_part"]
    return part


# ---- meshes of single parameters, of which torch makes a parameter group each

_RESULT: Any = getattr(_fsdp_common, "ShardPlacementResult", None)  # from torch 2.12 on
MeshInfo = _fsdp_common.FSDPMeshInfo
_mesh_info: Any = _fsdp_init._get_mesh_info
_init_default_mesh: Any = _fsdp_init._init_default_mesh


def takes_mesh_per_parameter() -> bool:
    """Return whether this torch can shard parameters of one module over different meshes."""
    return _RESULT is not None


def placement_and_mesh(result: object) -> tuple[object, MeshInfo | None]:
    """Return the placement and the mesh, or None, that a ``shard_placement_fn`` has returned."""
    if _RESULT is not None and isinstance(result, _RESULT):
        return result.placement, result.mesh_info
    return result, None


def arguments_of(info: MeshInfo) -> dict[str, Any]:
    """Return the arguments ``mesh`` and ``dp_mesh_dims`` of ``fully_shard`` for a parameter's mesh."""
    if info.is_spmd_mesh:
        return {"mesh": info.spmd_mesh, "dp_mesh_dims": info.dp_mesh_dims}
    return {"mesh": info.mesh, "dp_mesh_dims": None}


def info_on_spmd_mesh(ranks: DeviceMesh, mesh: DeviceMesh, replicate: Sequence[str], dims: Any) -> MeshInfo:
    """Return the mesh info of parameters that are sharded over ``ranks``, with replicas along ``replicate``.

    Their DTensors stay on the whole SPMD mesh, and torch leaves gradients along data-parallel dimensions to the caller.
    """
    shard = tuple(name for name in dims.shard_names if name not in replicate)
    own = replace(dims, shard=shard or None, replicate=tuple(replicate) or None)
    make: Any = MeshInfo  # whose constructor takes these from torch 2.12 on
    info: MeshInfo = make(ranks, shard_mesh_dim=0, dp_mesh_dims=own, spmd_mesh=mesh)
    return info


def mesh_infos(calls: Iterable[tuple[Mapping[str, Any], MeshInfo | None]]) -> list[MeshInfo]:
    """Return the mesh info for each set of arguments of ``fully_shard``: torch's, or the given one. Collective."""
    # torch identifies the parameter groups of a module by the process groups of their meshes, so no two have the same.
    infos: list[MeshInfo] = []
    used: set[dist.ProcessGroup] = set()
    for arguments, given in calls:
        mesh, dims = arguments["mesh"], arguments.get("dp_mesh_dims")
        info = given or _mesh_info(_init_default_mesh() if mesh is None else mesh, *(() if dims is None else (dims,)))
        # The mesh stays the same, or torch would not clip all gradients together.
        while info.shard_process_group in used:
            info.shard_process_group = twin_of(info.shard_process_group)
        used.add(info.shard_process_group)
        infos.append(info)
    return infos


def placing(
    infos: Sequence[MeshInfo], placements: Sequence[Mapping[nn.Parameter, object]]
) -> Callable[[nn.Parameter], object]:
    results: dict[nn.Parameter, object] = {}
    for info, placed in zip(infos, placements, strict=True):
        results |= {parameter: _RESULT(placement, info) for parameter, placement in placed.items()}
    return results.__getitem__


# ---- the mesh that ``fully_shard`` is given


@dataclass(frozen=True)
class DataParallelMesh:
    """Ranks over which a strategy shards, and the strategy on them."""

    strategy: Strategy  # with the node size of a mesh of several dimensions; any other object stays as given
    mesh: DeviceMesh | None  # of one dimension; None for all ranks; or as given, if everything is left to torch
    group: dist.ProcessGroup
    # With a mesh of several dimensions that is left to torch, ranks can't compare their arguments: torch communicates.
    compared: bool


def read_mesh(strategy: Strategy, arguments: dict[str, Any]) -> DataParallelMesh:
    """Read ``mesh`` and ``dp_mesh_dims`` of a call of ``fully_shard``, and replace them by what torch shards over."""
    mesh, dims = arguments["mesh"], arguments.get("dp_mesh_dims")
    if isinstance(mesh, DeviceMesh) and isinstance(strategy, Strategy):
        if dims is not None:
            strategy, mesh = _read_spmd_mesh(strategy, mesh, dims, arguments)
        elif (read := read_2d_mesh(strategy, mesh)) is not None:
            strategy, mesh = read
            arguments["mesh"] = mesh
    if mesh is None and not dist.is_initialized():
        dist.init_process_group()  # as torch would have done
    has_one_dimension = mesh is None or getattr(mesh, "ndim", None) == 1
    group = mesh.get_group() if mesh is not None and has_one_dimension else dist.group.WORLD
    assert group is not None
    if isinstance(mesh, DeviceMesh) and has_one_dimension:
        name_ranks(group, mesh)
    return DataParallelMesh(strategy, mesh, group, has_one_dimension)


def _read_spmd_mesh(
    strategy: Strategy, mesh: DeviceMesh, dims: Any, arguments: dict[str, Any]
) -> tuple[Strategy, DeviceMesh]:
    names = data_parallel_names(mesh, dims)
    if dims.replicate_names and dims.shard_names:
        read = read_hsdp_mesh(strategy, mesh, dims.replicate_names, dims.shard_names)
    else:
        read = strategy, flattened(mesh, names)
    if read is None or RankLayout.of(read[0], read[1].get_group()).stock:
        return strategy, mesh
    arguments["dp_mesh_dims"] = replace(dims, shard=names, replicate=None)
    return read


def names_of_node(mesh: DeviceMesh, names: tuple[str, ...], gpus_per_node: int) -> tuple[str, ...] | None:
    """Return the last of the dimensions ``names`` of an SPMD mesh, which span a node; None if nodes end within one."""
    dims = mesh.mesh_dim_names or ()
    for first in range(len(names), -1, -1):
        if math.prod(mesh.size(dims.index(name)) for name in names[first:]) == gpus_per_node:
            return names[first:]
    return None


def data_parallel_names(mesh: DeviceMesh, dims: Any) -> tuple[str, ...]:
    """Return the data-parallel dimensions of an SPMD mesh, in its order; ``dims`` is torch's DataParallelMeshDims."""
    given = {*dims.replicate_names, *dims.shard_names}
    return tuple(name for name in mesh.mesh_dim_names or () if name in given)


# ---- HSDP meshes, read as nodes x ranks of a node
#
# torch replicates along the first dimension of a 2-D mesh and shards along the second. A strategy shards over all of
# its ranks, as far as its scopes say, and takes the second dimension for a node.


def read_2d_mesh(strategy: Strategy, mesh: DeviceMesh) -> tuple[Strategy, DeviceMesh] | None:
    """Read a mesh of two named dimensions by :func:`read_hsdp_mesh`, as nodes x ranks; None if ``mesh`` is another."""
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        return None
    nodes, ranks = mesh.mesh_dim_names
    return read_hsdp_mesh(strategy, mesh, (nodes,), (ranks,))


def read_hsdp_mesh(
    strategy: Strategy, mesh: DeviceMesh, replicate: tuple[str, ...], shard: tuple[str, ...]
) -> tuple[Strategy, DeviceMesh] | None:
    """Read the data-parallel dimensions of ``mesh`` as nodes x ranks of a node. Collective over ``mesh``.

    Returns the strategy with the size of these nodes, and the 1-D mesh of all data-parallel ranks; None for FULL_SHARD
    on one node, so that all may be left to torch.

    Raises:
        ValueError: If the strategy is FULL_SHARD on several nodes; if its nodes, or torchrun's by default, have another
            size; or if ranks differ in that.
    """
    names = mesh.mesh_dim_names or ()
    ranks = flattened(mesh, tuple(name for name in names if name in (*replicate, *shard)))
    group = ranks.get_group()
    name_ranks(group, mesh)
    if not is_part(mesh) and len(names) == len(replicate) + len(shard):
        ranks = DeviceMesh.from_group(group, mesh.device_type)  # there is no other parallelism
    node_size = agree(
        group,
        partial(_node_size, strategy, mesh, shard, group),
        summary=str,
        difference="read another size of nodes from the mesh than",
    )
    return None if node_size is None else (replace(strategy, gpus_per_node=node_size), ranks)


def _node_size(strategy: Strategy, mesh: DeviceMesh, shard: tuple[str, ...], group: dist.ProcessGroup) -> int | None:
    names = mesh.mesh_dim_names or ()
    if strategy.is_plain:
        if RankLayout.of(strategy, group).stock:
            return None
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {names}, as HSDP takes it, but {strategy.levels!r} shards over all "
            "ranks; use Strategy('III') for HSDP, or pass the 1-D mesh of all ranks to shard over"
        )
    size = math.prod(mesh.size(names.index(name)) for name in shard)
    shape = dict(zip(names, mesh.shape, strict=True))
    if strategy.gpus_per_node is not None and strategy.gpus_per_node != size:
        raise ValueError(
            f"mesh {shape} has nodes of {size} ranks, along {' and '.join(shard)}, but the strategy has "
            f"gpus_per_node={strategy.gpus_per_node}; leave one out: pass the 1-D mesh of all data-parallel ranks, or "
            "no gpus_per_node"
        )
    launched = launched_node_size(group)
    if strategy.gpus_per_node is None and isinstance(launched, int) and launched != size:
        raise ValueError(
            f"mesh {shape} has nodes of {size} ranks, along {' and '.join(shard)}, but {launched} of its ranks run on "
            f"each node; pass gpus_per_node={size} to the strategy as well if that is meant, or the 1-D mesh of all "
            "data-parallel ranks"
        )
    return size
