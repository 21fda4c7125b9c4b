"""A strategy's gather and reduction, where torch calls them: as its AllGather, ReduceScatter and all-reduce hook."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from fsdp_zpp.collectives.flat_layout import NO_PARAMETERS, FlatLayout
from fsdp_zpp.collectives.hops import PendingReduction
from fsdp_zpp.collectives.streams import keep_until_read
from fsdp_zpp.collectives.weight_gather import WeightGather
from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch import AllGather, FSDPParamGroup, ReduceScatter
from ._torch_gradients import divided_by


@dataclass(eq=False, repr=False)
class StrategyAllGather(AllGather):
    """Gathers in two hops what torch has put together of a group's weights.

    Args:
        gather: The two hops.
        version: Returns the version of the shards, if something of a gather is used in later ones.
    """

    gather: WeightGather
    version: Callable[[], Hashable] | None

    allocate = staticmethod(torch.empty)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor``; ``input_tensor`` is this rank's part of it."""
        self.gather(input_tensor, output_tensor, None if self.version is None else self.version())


@dataclass(eq=False, repr=False)
class StrategyReduceScatter(ReduceScatter):
    """Reduces a group's gradient of a step.

    With two hops it makes the first, and torch's all-reduce hook, :meth:`finish`, makes the second, which therefore
    runs in the stream of the all-reduce.

    Args:
        unit: Its unit.
        group: The group.

    Attributes:
        layout: Where parameters lie in the gradient that torch is about to reduce.
        idle: The names of parameters that this rank has not used.
        hook: A user's all-reduce hook, which :meth:`finish` runs afterwards.
        pending: What :meth:`finish` has to finish, if anything.
    """

    unit: StrategyUnit
    group: FSDPParamGroup
    layout: FlatLayout = NO_PARAMETERS
    idle: Collection[str] = ()
    hook: Callable[[Tensor], None] | None = None
    pending: PendingReduction | None = None

    allocate = staticmethod(torch.empty)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` into ``output_tensor`` by ``op``."""
        reduce, world = self.unit.reductions.current, self.unit.reductions.mesh.topology.world
        assert reduce is not None, "one rank is not sharded over"
        # torch asks for the average, unless there is a risk of overflow or a divide factor was set.
        factor = _factor_of(op, group.size(), world, self.group.gradient_divide_factor)
        # What torch has divided this gradient by, accumulated ones are still to be divided by.
        divisor = divided_by(self.group, input_tensor.dtype) if reduce.accumulated.sums is not None else 1.0
        pending = reduce.start(input_tensor, output_tensor, factor, self.layout, divisor, self.idle)
        if reduce.has_two_hops:
            self.pending = pending
        else:
            pending.finish()

    def finish(self, gradient: Tensor) -> None:
        """Complete ``gradient`` in place."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.finish()
        if gradient.is_cuda:
            # torch frees the gradient in the stream of the reduce-scatter, which is not the one that reads it now.
            keep_until_read(gradient)
        if self.hook is not None:
            self.hook(gradient)


@dataclass(eq=False, repr=False)
class StrategyAllReduce:
    """Reduces a group's gradient where torch shards over one rank and so has nothing to scatter: its all-reduce hook.

    Args:
        unit: Its unit.
        group: The group.

    Attributes:
        layout: Where parameters lie in the gradient that torch is about to reduce.
        idle: The names of parameters that this rank has not used.
    """

    unit: StrategyUnit
    group: FSDPParamGroup
    layout: FlatLayout = NO_PARAMETERS
    idle: Collection[str] = ()

    def __call__(self, gradient: Tensor) -> None:
        """Reduce ``gradient`` in place."""
        reduce = self.unit.reductions.current
        if reduce is None:  # a node of one rank that trains on its own
            return
        factor = 1.0
        if (divide_factor := self.group.gradient_divide_factor) is not None:
            # The sum over all ranks is to be divided by it, once; torch has done that, and with nothing to scatter
            # does it once more where it divides around sums.
            around_sum = self.group.force_sum_reduction_for_comms or gradient.dtype == torch.float16
            factor = self.unit.reductions.mesh.topology.world * (divide_factor if around_sum else 1.0)
        divisor = divided_by(self.group, gradient.dtype) if reduce.accumulated.sums is not None else 1.0
        reduce.start(gradient, gradient, factor, self.layout, divisor, self.idle).finish()
        # As in StrategyReduceScatter.finish: torch frees it in the stream of the reduce-scatter.
        keep_until_read(gradient)


def _factor_of(op: ReduceOp | ReduceOp.RedOpType, sharded_over: int, world: int, divide_factor: float | None) -> float:
    """Return what a reduction of torch's multiplies the mean by.

    Args:
        op: The reduction.
        sharded_over: The ranks that torch knows of.
        world: All ranks, their replicas too.
        divide_factor: The divisor of the sum that a user has set in torch, if any.

    Raises:
        ValueError: If it is not a kind of sum.
    """
    summed = sharded_over if divide_factor is None else world
    if op == ReduceOp.AVG:
        return summed / sharded_over
    if op == ReduceOp.SUM:
        return float(summed)
    if op == ReduceOp.PREMUL_SUM:
        return float(summed * op.__getstate__()[1])  # type: ignore[index]  # the factor, which has no accessor
    raise ValueError(f"a Strategy reduces gradients by sum or average, not by {op}")
