"""Private names of torch's fully_shard: how a parameter group is gathered, unsharded and resharded.

[Note: Kept weights]
Parameter scope N keeps what was gathered until the weights change, and that is all that it keeps: whenever torch would
reshard, modules show the sharded parameters again. Optimizers that are made then, ``requires_grad_``, writes and state
dicts reach what they would reach under torch's own strategies. Only the memory stays. The next unshard has modules show
it again instead of gathering.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllGatherState, FSDPParamGroup
from torch.profiler import record_function

from fsdp_zpp.adapters._torch_shard_version import ShardVersion
from fsdp_zpp.collectives.flat_layout import FlatLayout
from fsdp_zpp.collectives.hops import profiled
from fsdp_zpp.collectives.secondary_shard import SecondaryShard, ShardValues

from ._torch_plan import GatherPlan, free_unsharded, show_shards
from ._torch_reduction import ReducingGroup
from ._torch_trained import is_trained
from ._torch_transforms import without_dynamo, without_functorch


class ShardGather(AllGather):
    """An all-gather of the shards as they are, which needs no copy of them in the dtype to compute in."""

    @abstractmethod
    def from_shards(self, output_tensor: Tensor) -> None:
        """Fill ``output_tensor``, of that dtype, in which every rank has equally many values."""

    @property
    @abstractmethod
    def encodes(self) -> bool:
        """Whether it encodes what it gathers."""

    @abstractmethod
    def check(self) -> None:
        """Raise if it can't gather what only torch can put together, like a parameter that encodes itself."""


class GatheringGroup(ReducingGroup):
    """A parameter group whose weights a strategy gathers.

    Attributes:
        staleness_guard: Asked before weights are used that stay unsharded from one micro-batch to the next; None if
            they don't stay.
    """

    staleness_guard: SecondaryShard | None
    _plan: GatherPlan | None
    _version: ShardVersion
    _is_kept: bool
    _puts_back: bool

    def adopt(self) -> None:
        """Initialize the attributes of this class."""
        super().adopt()
        self.staleness_guard, self._plan, self._version = None, None, ShardVersion()
        self._is_kept = self._puts_back = False

    pre_backward = without_dynamo(FSDPParamGroup.pre_backward)

    @without_functorch
    def unshard(self, async_op: bool = False) -> None:
        if self._all_gather_result is not None:
            return
        if self.is_unsharded:
            if self.staleness_guard is not None:
                self.staleness_guard.check_version(self.shard_version())
            return
        asked_for = self.unshard_in_backward or self._training_state != TrainingState.PRE_BACKWARD
        if asked_for and self._has_fresh():
            self._puts_back = True
            return
        if not asked_for or self._all_gather_process_group.size() == 1:
            super().unshard(async_op)
            return
        self._was_gathered = True  # on all ranks, if on one
        gather = self._all_gather_comm
        if not isinstance(gather, ShardGather):
            super().unshard(async_op)
        elif self.plan.by_torch:
            gather.check()
            super().unshard(async_op)
        else:
            self._all_gather_result = self._gathered(gather, self.plan, async_op)

    def check_gather(self) -> None:
        """Before the first gather, raise what it would raise.

        Raises:
            TypeError: If a strategy can't gather what only torch can put together.
        """
        if isinstance(self._all_gather_comm, ShardGather) and self.plan.by_torch:
            self._all_gather_comm.check()

    def _gathered(self, gather: ShardGather, plan: GatherPlan, async_op: bool) -> AllGatherResult:
        """As torch's ``foreach_all_gather``, without the two copies of the shards that it makes for a collective."""
        _, stream = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        with self._labelled("FSDP::all_gather"), self.device_handle.stream(stream):
            out = torch.empty(plan.numel, dtype=plan.dtype, device=self.device)
            gather.from_shards(out)
            event = stream.record_event()
        return AllGatherResult(out, event, **plan.result)

    @without_functorch
    def wait_for_unshard(self) -> None:
        """As torch's; from the second time on without looking up anew what does not change."""
        result, plan = self._all_gather_result, self._plan
        if result is None:
            if self._puts_back:
                self._is_kept = self._puts_back = False
                self._to_unsharded()
            return
        ours = result.all_gather_work is None and isinstance(self._all_gather_comm, ShardGather)
        if plan is None or not plan.swaps or not ours:
            if ours and plan is not None and not plan.by_torch and plan.mixed:
                self.device_handle.current_stream().wait_event(result.all_gather_event)
                as_bytes = plan.as_torch_gathers(result.all_gather_output)
                self._all_gather_result = result._replace(all_gather_output=as_bytes)
            super().wait_for_unshard()
            if plan is not None and not plan.swaps:
                plan.prepare_swaps(self)
            return
        in_forward = self._training_state == TrainingState.FORWARD
        if in_forward and (previous := self.comm_ctx.all_gather_state) is not None:
            self._gather_after(previous.event)
            self.comm_ctx.all_gather_state = None
        with self._labelled("FSDP::all_gather_copy_out"):
            self.device_handle.current_stream().wait_event(result.all_gather_event)
            plan.fill(result.all_gather_output)
        self._to_unsharded()
        copied = self.device_handle.Event()
        copied.record()
        # A forward keeps what was gathered until its next gather, which need not wait for the copy then.
        if in_forward:
            self.comm_ctx.all_gather_state = AllGatherState(result, copied)
        else:
            self._gather_after(copied)
        self._all_gather_result = None

    def _gather_after(self, event: Any) -> None:
        """Have the streams in which weights are gathered wait for ``event``."""
        context = self.comm_ctx
        if hasattr(context, "all_gather_stream"):  # there is none before lazy initialization
            context.all_gather_copy_in_stream.wait_event(event)
            context.all_gather_stream.wait_event(event)

    def _to_unsharded(self) -> None:
        if self._plan is None or not self._plan.swaps or self.is_unsharded:
            super()._to_unsharded()
        else:
            self._plan.unshard()
            self._sharded_state = ShardedState.UNSHARDED

    def _to_sharded(self) -> None:
        if self._plan is None or not self._plan.swaps or self.is_sharded:
            super()._to_sharded()
        else:
            self._plan.reshard()
            self._sharded_state = ShardedState.SHARDED

    def _labelled(self, phase: str) -> AbstractContextManager[Any]:
        return record_function(self._with_fqn(phase)) if profiled() else nullcontext()

    @property
    def plan(self) -> GatherPlan:
        """What its gathers have in common."""
        if self._plan is None:
            gather = self._all_gather_comm
            self._plan = GatherPlan(self, isinstance(gather, ShardGather) and gather.encodes)
        return self._plan

    # ---- weights that are kept, see [Note: Kept weights]

    def reshard(self) -> None:
        if self.staleness_guard is None:
            super().reshard()
        elif self._training_state == TrainingState.IDLE:  # a user asks for it
            super().reshard()
            self.drop_kept()
        elif self.is_unsharded and (self._training_state != TrainingState.FORWARD or self._reshard_after_forward):
            if self._plan is not None and self._plan.swaps:
                self._plan.show_shards()
            else:
                show_shards(self.fsdp_params)
            self._sharded_state = ShardedState.SHARDED
            self._is_kept = self._was_gathered = True

    def _has_fresh(self) -> bool:
        """Whether weights are kept that have not changed; the same on all ranks.

        Raises:
            StaleSecondaryError: If they have changed without an event.
        """
        if not self._is_kept:
            return False
        assert self.staleness_guard is not None
        if self.staleness_guard.stale:
            self.drop_kept()
            return False
        self.staleness_guard.check_version(self.shard_version())
        return True

    def drop_kept(self) -> None:
        """Free what is kept while modules show shards."""
        if self._is_kept:
            free_unsharded(self.fsdp_params)
            self._is_kept = self._puts_back = self._was_gathered = False

    def end_backward(self, synchronized: bool) -> None:
        super().end_backward(synchronized)
        # Ranks that use it need not gather it, so it is of every micro-batch on all ranks, used or not.
        self._was_gathered = self._is_kept

    # ---- as a ShardSource, which is asked before torch's gather

    def can_be_read(self) -> bool:
        """False in a backward, where an optimizer may outdate what is prefetched, and for what torch puts together."""
        return torch._C._current_graph_task_id() == -1 and not self.plan.by_torch

    def prepare_read(self) -> int:
        """This rank's number of values; there is nothing to write back, for parameters are views of the shard."""
        return self.plan.shard_numel

    def read(self) -> ShardValues:
        """The flat, padded shards of all parameters, in the order in which the group gathers them."""
        plan = self.plan
        shards = [param._sharded_param_data for param in self.fsdp_params]
        if shards[0].device != self.device:
            shards = [shard.to(self.device, non_blocking=True) for shard in shards]
        if plan.cast_before_joining:
            shards = [shard.to(plan.dtype) for shard in shards]
        return ShardValues(shards, plan.shard_numel, self.shard_version(), self.is_trained())

    def layout(self, numel: int) -> FlatLayout:
        """Where parameters lie in each rank's part of what is gathered."""
        return self.plan.layout

    def shard_version(self) -> Hashable:
        """A value that changes with every write to the shards that torch counts, and when they are moved."""
        return self._version.of(self.plan.memory, self.plan.counted)

    def is_trained(self) -> bool:
        """Whether any parameter requires a gradient, sharded or as modules show it."""
        return any(map(is_trained, self.fsdp_params))

    # ---- when weights change

    def weights_changed(self, by_step: bool) -> None:
        """Drop what does not hold any more.

        Args:
            by_step: Whether a step has changed the weights, and so nothing but their values.
        """
        self.drop_unsharded()
        if not by_step:
            self._plan = None

    def drop_unsharded(self) -> None:
        """Between forwards, have the next one gather anew what FSDP still keeps unsharded."""
        if self._training_state == TrainingState.IDLE:
            self.drop_kept()
            self.wait_for_unshard()
            self._to_sharded()
