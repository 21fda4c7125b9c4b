"""Private names of torch's fully_shard: the weights of a parameter group, as they are read, gathered and kept.

[Note: Kept weights]
Parameter scope N keeps what was gathered until the weights change, and that is all that it keeps: whenever torch would
reshard, modules show the sharded parameters again. Optimizers that are made then, ``requires_grad_``, writes and state
dicts reach what they would reach under torch's own strategies. Only the memory stays. The next unshard has modules show
it again instead of gathering.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from fsdp_zpp.adapters._torch_shard_version import ShardVersion
from fsdp_zpp.collectives.fingerprint import plain_parts
from fsdp_zpp.collectives.flat_layout import FlatLayout
from fsdp_zpp.collectives.secondary_shard import SecondaryShard, ShardValues
from fsdp_zpp.collectives.weight_gather import WeightGather

from ._torch_plan import GatherPlan, free_unsharded
from .comms import StrategyAllGather


class GroupWeights:
    """A parameter group's weights: what its gathers have in common, what they read, and what stays of them.

    It is the source of the group's secondary shard, which may be read before torch asks for the gather.

    Args:
        group: The group.
        gather: Gathers its weights; None where torch does.
        keeps_unsharded: Whether what was gathered stays until the weights change.

    Attributes:
        gather: As given.
        comm: What torch would call to gather; None where torch's own collective is to.
        plan: What gathers have in common; None before :meth:`make_plan`.
        reuses: Whether something of one gather is used in later ones.
        staleness_guard: The secondary shard that tells whether weights that stay unsharded from one micro-batch to the
            next are stale; None if they don't stay.
        is_kept: Whether the memory of unsharded weights is kept while modules show shards.
        puts_back: Whether torch is about to show that memory again, in place of a gather.
        was_gathered: Whether ranks have gathered the group for the micro-batch; the same on all of them.
    """

    def __init__(self, group: FSDPParamGroup, gather: WeightGather | None, *, keeps_unsharded: bool) -> None:
        self._group = group
        self._version = ShardVersion()
        self.is_kept = self.puts_back = self.was_gathered = False
        self.set_gather(gather, keeps_unsharded=keeps_unsharded)

    def set_gather(self, gather: WeightGather | None, *, keeps_unsharded: bool) -> None:
        """Gather by ``gather`` from now on, as the first gather does; the arguments are the constructor's."""
        self.gather = gather
        self.plan: GatherPlan | None = None
        self.comm: StrategyAllGather | None = None
        self.staleness_guard: SecondaryShard | None = None
        self.reuses = False
        if gather is not None:
            gather.secondary.source = self
            self.reuses = gather.secondary.keep or keeps_unsharded
            self.staleness_guard = gather.secondary if keeps_unsharded else None
            self.comm = StrategyAllGather(gather, self.shard_version if self.reuses else None)

    def make_plan(self) -> GatherPlan:
        """Make the plan of the group's gathers, and return it."""
        self.plan = GatherPlan(self._group, self.is_encoded)
        return self.plan

    @property
    def is_encoded(self) -> bool:
        """Return whether a codec encodes what is gathered."""
        gather = self.gather
        return gather is not None and gather.secondary.codec is not None and self._group._all_gather_comm is self.comm

    # ---- weights that are kept, see [Note: Kept weights]

    def is_fresh(self) -> bool:
        """Return whether the weights that are kept have not changed, and drop them if they have; the same on all ranks.

        Raises:
            StaleSecondaryError: If they have changed without an event.
        """
        assert self.staleness_guard is not None
        if self.staleness_guard.stale:
            self.drop_kept()
            return False
        self.staleness_guard.check_version(self.shard_version())
        return True

    def drop_kept(self) -> None:
        """Free what is kept while modules show shards."""
        if self.is_kept:
            free_unsharded(self._group.fsdp_params)
            self.is_kept = self.puts_back = self.was_gathered = False

    # ---- as a ShardSource, which is asked before torch's gather

    def can_be_read(self) -> bool:
        """Return whether the shards may be read: not in a backward, nor if it is not known yet how much there is."""
        if torch._C._current_graph_task_id() != -1:  # an optimizer in the backward may outdate what is prefetched
            return False
        plan, group = self.plan or self.make_plan(), self._group
        # Of what is gathered already, torch still needs the metadata.
        return plan.inputs is None or (plan.numel > 0 and group.is_sharded and group._all_gather_result is None)

    def prepare_read(self) -> int:
        """Return this rank's number of values; nothing is written back, for parameters are views of the shard."""
        return (self.plan or self.make_plan()).shard_numel

    def read(self) -> ShardValues:
        """Return the flat, padded shards of all parameters, in the order in which the group gathers them."""
        plan, device = self.plan or self.make_plan(), self._group.device
        params = self._group.fsdp_params
        if plan.inputs is not None:
            joined = plan.put_together(plan.inputs)
            return ShardValues([joined], plan.shard_numel, self.shard_version(), self.is_trained())
        shards = [param._sharded_param_data for param in params]
        if shards[0].device != device:
            shards = [shard.to(device, non_blocking=True) for shard in shards]
        if plan.cast_before_joining:
            shards = [shard.to(plan.dtype) for shard in shards]
        trained = any(map(_requires_gradient, params))
        return ShardValues(shards, plan.shard_numel, self._version.of(plan.memory, plan.counted), trained)

    def compares_contents(self) -> bool:
        """Return whether versions of the shards are fingerprints, as FSDP_ZPP_CHECK asks for."""
        return self._version.of_contents

    def keeps_gathered(self) -> bool:
        """Return whether unsharded weights are kept, to be reused if they have not changed."""
        return self.staleness_guard is not None and (self.is_kept or self._group.is_unsharded)

    def layout(self, numel: int) -> FlatLayout:
        """Return where parameters lie in each rank's part of what is gathered."""
        return (self.plan or self.make_plan()).layout

    def shard_version(self) -> Hashable:
        """Return a value that changes with every write to the shards that torch counts, and when they are moved."""
        plan = self.plan or self.make_plan()
        return self._version.of(plan.memory, plan.counted)

    def share_version_counters(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
    ) -> None:
        """Make writes to the values in a state dict of ``module`` count as writes to the shards. A state dict hook.

        torch detaches parameters in DTensor's dispatch, below autograd, so the local tensors of the values are in the
        memory of the shards but count writes of their own.
        """
        for param in self._group.fsdp_params:
            info, local = param._module_info, param._sharded_local_tensor
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            for owner, name in ((info.module, info.param_name), *shared):
                value = state_dict.get(prefix + name) if owner is module else None
                # Other hooks may have put something else there.
                if isinstance(value, DTensor) and _memory(value._local_tensor) == _memory(local):
                    value._local_tensor = local

    def is_trained(self) -> bool:
        """Return whether any parameter requires a gradient, sharded or as modules show it."""
        return any(map(_requires_gradient, self._group.fsdp_params))

    def trained_numel(self) -> int:
        """Return the number of values of the parameters that require a gradient, on all ranks together."""
        return sum(param.sharded_param.numel() for param in self._group.fsdp_params if _requires_gradient(param))


def _memory(tensor: Tensor) -> list[tuple[Hashable, ...]]:
    """Return the memory of a tensor, or of each tensor that it wraps."""
    parts = plain_parts(tensor)
    return [(part.untyped_storage()._cdata, part.storage_offset(), part.shape) for part in parts]


def _requires_gradient(param: FSDPParam) -> bool:
    """Return whether a parameter requires a gradient: sharded, or as modules showed it when it was unsharded last.

    ``requires_grad_`` on a module reaches what the module shows at that moment. A root that a forward left unsharded
    then trains though its sharded parameters don't require a gradient: PEFT switches adapters off and on that way.
    """
    if param.sharded_param.requires_grad:
        return True
    unsharded = getattr(param, "_unsharded_param", None)  # there is none before the first gather
    return unsharded is not None and unsharded.requires_grad
