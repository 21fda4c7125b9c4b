"""Places a frozen weight: into how many chunks it is cut, and which of them this rank holds.

The flat values of a weight are cut into as many chunks as there are ranks that share it: one under the scope ``N``, one
for each rank of a node under ``I``, one for each rank under ``G``. A chunk is a whole number of the codec's blocks, so
the blocks are the same however many chunks there are, and the decoded values do not depend on the number of ranks.
Under ``G``, rank (node, local) holds chunk ``local * nodes + node``: the inter-node hop of a gather then leaves
neighbouring chunks on a rank and the intra-node hop all of them in order, so nothing needs to be transposed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.collectives.mesh import ProcessMesh, as_launched, process_mesh
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime.unit import unit_of

SCOPES = ("N", "I", "G")


@dataclass(frozen=True)
class Placement:
    """A scope on a mesh. See the top of this file.

    Args:
        scope: ``N`` replicated on every rank, ``I`` sharded inside a node, ``G`` sharded over all ranks.
        mesh: The ranks.
        by_name: Whether the user gave the node size; see the top of resharding.py.

    Raises:
        ValueError: If the scope is not one of these.
    """

    scope: str
    mesh: ProcessMesh
    # Not compared: weights that lie on the same ranks are gathered together, whoever chose the ranks.
    by_name: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            scopes = ", ".join(SCOPES)
            raise ValueError(f"the placement of a frozen base must be one of the scopes {scopes}, got {self.scope!r}")

    @property
    def chunks(self) -> int:
        """Return the number of chunks that a weight is cut into."""
        return self.mesh.topology.shard_count(self.scope)

    @property
    def own_chunk(self) -> int:
        """Return the chunk that this rank holds."""
        node, local = divmod(self.mesh.rank, self.mesh.topology.gpus_per_node)
        return {"N": 0, "I": local, "G": local * self.mesh.topology.nodes + node}[self.scope]

    @property
    def replicas(self) -> str:
        """Return the scope for :func:`check_replicas`: ``I`` if nodes hold the same, ``N`` if all ranks do, else ``G``.

        It may differ from the placement's scope: on nodes of one GPU, scope ``I`` puts the same on all ranks.
        """
        topology = self.mesh.topology
        if self.scope == "I" and topology.gpus_per_node == 1:
            return "N"
        return "G" if topology.world == 1 or (self.scope == "I" and topology.nodes == 1) else self.scope

    def chunk_numel(self, numel: int, codec: Codec) -> int:
        """Return how many of ``numel`` values are in a chunk; the last chunks may lie partly or wholly past the end."""
        block = block_of(codec)
        return -(-numel // (self.chunks * block)) * block


def block_of(codec: Codec) -> int:
    """Return how many values must stay in one chunk: 16 for codecs without blocks, which keeps payloads aligned."""
    return int(getattr(codec, "block", 16))


def place_base(model: nn.Module, scope: str, group: dist.ProcessGroup | None, gpus_per_node: int | None) -> Placement:
    """Return the placement on ``group``, or on this process alone if there is none. Collective over ``group``.

    Args:
        model: The model. Strategies that wrap parts of it give the node size if the user does not.
        scope: The scope.
        group: The data-parallel ranks.
        gpus_per_node: The node size that the user gave.

    Raises:
        ValueError: If the scope is unknown, ``group`` can't be laid out on nodes of that size, or strategies differ.
    """
    if group is None:
        return Placement(scope, ProcessMesh(Topology(1, 1), 0, None, None))
    if gpus_per_node is None and (mesh := _wrapping_mesh(model, group)) is not None:
        return Placement(scope, mesh)
    return Placement(scope, process_mesh(group, gpus_per_node), by_name=gpus_per_node is not None)


def _wrapping_mesh(model: nn.Module, group: dist.ProcessGroup) -> ProcessMesh | None:
    """Return the mesh on ``group`` of the strategies that wrap parts of ``model``; None if there are none.

    Raises:
        ValueError: If their node sizes differ.
    """
    units = (unit for unit in map(unit_of, model.modules()) if unit is not None and unit.ranks.group is group)
    meshes = {as_launched(unit.ranks) for unit in units}
    if len(meshes) > 1:
        raise ValueError(
            f"the strategies that wrap parts of this {model_name(model)} have different node sizes "
            f"({', '.join(sorted(str(mesh.topology) for mesh in meshes))}); pass gpus_per_node= to choose that of the "
            "frozen base"
        )
    return next(iter(meshes), None)
