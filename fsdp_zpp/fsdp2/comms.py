"""A strategy's gather and reduction as torch's AllGather and ReduceScatter interfaces."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..gradient_reduce import GradientReduce
from ..weight_gather import WeightGather
from . import _torch


class _PlainAllocation:
    """Buffers from torch's allocator."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class StrategyAllGather(_PlainAllocation, _torch.AllGather):
    """Gathers a group's weights in two hops, in the dtype to compute in.

    Args:
        gather: The two hops, without a codec.
        group: Whose weights they are.
    """

    def __init__(self, gather: WeightGather, group: _torch.StrategyGroup) -> None:
        self._gather = gather
        self._group = group

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor``; ``input_tensor`` is this rank's part of it."""
        self._gather(input_tensor, output_tensor, self._version())

    def _version(self) -> Hashable:
        reused = self._gather.keep_secondary or self._group.kept is not None
        return self._group.shard_version() if reused else None


class EncodedAllGather(StrategyAllGather, _torch.ShardGather):
    """Gathers a group's weights in two hops, encoded from their full-precision shards.

    Args:
        gather: The two hops, with a codec.
        group: Whose weights they are.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """As :meth:`from_shards`."""
        self.from_shards(output_tensor, input_tensor.numel())

    def from_shards(self, output_tensor: Tensor, numel: int) -> None:
        """Fill ``output_tensor``, in which every rank has ``numel`` values.

        Raises:
            TypeError: If the parameters are to be computed in several dtypes.
        """
        if output_tensor.dtype == torch.uint8:
            raise TypeError(
                f"the parameters of {self._group.name} have several dtypes, which fully_shard gathers as bytes; "
                f"they can't be encoded as {self._gather.codec}: give them one dtype, or "
                "MixedPrecisionPolicy(param_dtype=...) without param_dtype_override_fn, or shard them with weights=None"
            )
        # A secondary shard that is kept makes the values irrelevant, so they need not be collected.
        kept = self._gather.secondary_nbytes > 0
        shard = output_tensor[:numel] if kept else self._group.full_precision_shard(output_tensor.device)
        self._gather(shard, output_tensor, self._version())


def all_gather_of(gather: WeightGather, group: _torch.StrategyGroup) -> _torch.AllGather:
    """What gathers the weights of ``group`` by ``gather``."""
    return (StrategyAllGather if gather.codec is None else EncodedAllGather)(gather, group)


class StrategyReduceScatter(_PlainAllocation, _torch.ReduceScatter):
    """Reduces a group's gradients of a step.

    Attributes:
        finish: Does what :class:`StrategyAllReduceAfter` is to do; None if there is nothing left.

    Args:
        reduce: The hops.
        group: Whose gradients they are.
        world: The number of all ranks, replicas too.
    """

    def __init__(self, reduce: GradientReduce, group: _torch.StrategyGroup, world: int) -> None:
        self._reduce = reduce
        self._group = group
        self._world = world
        self.finish: Callable[[], None] | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce ``input_tensor`` into ``output_tensor`` by ``op``."""
        # torch asks for the average, unless there is a risk of overflow or a divide factor was set.
        divide_factor = self._group.gradient_divide_factor
        factor = _torch.factor_of(op, dist.get_world_size(group), self._world, divide_factor)
        finish = self._reduce.start(input_tensor, output_tensor, factor, self._group.layout())
        if self._reduce.has_two_hops:
            self.finish = finish
        else:
            finish()


class StrategyAllReduceAfter:
    """The hop between nodes after a reduce-scatter inside of them, as torch's all-reduce hook: it has its own stream.

    See [Note: Two hops at once] in gradient_reduce.py.

    Args:
        reduce_scatter: Begins the reduction.

    Attributes:
        then: A user's hook, which runs afterwards.
    """

    def __init__(self, reduce_scatter: StrategyReduceScatter) -> None:
        self._reduce_scatter = reduce_scatter
        self.then: Callable[[Tensor], None] | None = None

    def __call__(self, gradient: Tensor) -> None:
        """Complete ``gradient`` in place."""
        finish, self._reduce_scatter.finish = self._reduce_scatter.finish, None
        if finish is not None:
            finish()
        _freed_elsewhere(gradient)
        if self.then is not None:
            self.then(gradient)


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
        self._reduce.start(gradient, gradient, factor, self._group.layout())()
        _freed_elsewhere(gradient)


def _freed_elsewhere(gradient: Tensor) -> None:
    """torch frees the gradient in the stream of the reduce-scatter, which is not the one that reads it now."""
    if gradient.is_cuda:
        gradient.record_stream(torch.cuda.current_stream(gradient.device))
