"""A strategy's gather and reduction as torch's AllGather and ReduceScatter interfaces."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.streams import keep_until_read
from fsdp_zpp.collectives.weight_gather import WeightGather

from . import _torch


class _PlainAllocation:
    """Buffers from torch's allocator."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class StrategyAllGather(_PlainAllocation, _torch.ShardGather):
    """Gathers a group's weights in two hops.

    Args:
        gather: The two hops.
        group: Whose weights they are.
    """

    def __init__(self, gather: WeightGather, group: _torch.StrategyGroup) -> None:
        self._gather = gather
        self._group = group

    def from_shards(self, output_tensor: Tensor) -> None:
        """Fill ``output_tensor``, in which every rank has equally many values."""
        self._gather(None, output_tensor, self._version())

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` with what torch has put together; ``input_tensor`` is this rank's part of it."""
        self._gather(input_tensor, output_tensor, self._version())

    @property
    def encodes(self) -> bool:
        """Whether it encodes what it gathers."""
        return self._gather.secondary.codec is not None

    def check(self) -> None:
        """Raise if what torch alone can put together is to be encoded.

        Raises:
            TypeError: If a parameter encodes itself.
        """
        param = self._group.plan.self_encoding
        if self.encodes and param is not None:
            raise TypeError(
                f"parameter {param._param_fqn} is a {type(param._sharded_local_tensor).__name__}, which encodes "
                "itself for the all-gather (fsdp_pre_all_gather); shard it with weights=None"
            )

    def _version(self) -> Hashable:
        reused = self._gather.secondary.keep or self._group.staleness_guard is not None
        return self._group.shard_version() if reused else None


class StrategyReduceScatter(_PlainAllocation, _torch.ReduceScatter):
    """Reduces a group's gradients of a step.

    Args:
        reduce: The hops.
        group: Whose gradients they are. If it has a ``completion``, that is left the second hop.
        world: The number of all ranks, replicas too.
    """

    def __init__(self, reduce: GradientReduce, group: _torch.StrategyGroup, world: int) -> None:
        self._reduce = reduce
        self._group = group
        self._world = world

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce ``input_tensor`` into ``output_tensor`` by ``op``."""
        # torch asks for the average, unless there is a risk of overflow or a divide factor was set.
        divide_factor = self._group.gradient_divide_factor
        factor = _factor_of(op, group.size(), self._world, divide_factor)
        divided_by = _divided_by(self._reduce, self._group, input_tensor)
        pending = self._reduce.start(input_tensor, output_tensor, factor, self._group.step_layout, divided_by)
        if self._group.completion is None:
            pending.finish()
        else:
            self._group.completion.pending = pending


class StrategyAllReduce:
    """Reduces a group's gradients where torch shards over one rank and so has nothing to scatter: its all-reduce hook.

    Args:
        reduce: The hops.
        group: Whose gradients they are.
        world: The number of ranks.
    """

    def __init__(self, reduce: GradientReduce, group: _torch.StrategyGroup, world: int) -> None:
        self._reduce = reduce
        self._group = group
        self._world = world

    def __call__(self, gradient: Tensor) -> None:
        """Reduce ``gradient`` in place."""
        factor = 1.0
        if (divide_factor := self._group.gradient_divide_factor) is not None:
            # The sum over all ranks is to be divided by it, once; torch has done that, and with nothing to scatter
            # does it once more where it divides around sums.
            around_sum = self._group.force_sum_reduction_for_comms or gradient.dtype == torch.float16
            factor = self._world * (divide_factor if around_sum else 1.0)
        divided_by = _divided_by(self._reduce, self._group, gradient)
        self._reduce.start(gradient, gradient, factor, self._group.step_layout, divided_by).finish()
        # As in FinishReduction: torch frees it in the stream of the reduce-scatter.
        keep_until_read(gradient)


def _divided_by(reduce: GradientReduce, group: _torch.StrategyGroup, gradient: Tensor) -> float:
    """What torch has divided ``gradient`` by and accumulated gradients are still to be divided by."""
    return _torch.divided_by(group, gradient.dtype) if reduce.accumulated.sums is not None else 1.0


def _factor_of(op: Any, sharded_over: int, world: int, divide_factor: float | None) -> float:
    """What a reduction of torch's multiplies the mean by.

    Args:
        op: The reduction.
        sharded_over: The ranks that torch knows of.
        world: All ranks, their replicas too.
        divide_factor: What a user told torch to divide the sum by, if anything.

    Raises:
        ValueError: If it is not a kind of sum.
    """
    summed = sharded_over if divide_factor is None else world
    if op == dist.ReduceOp.AVG:
        return summed / sharded_over
    if op == dist.ReduceOp.SUM:
        return float(summed)
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(summed * op.__getstate__()[1])  # the factor, for which ReduceOp has no accessor
    raise ValueError(f"a Strategy reduces gradients by sum or average, not by {op}")
