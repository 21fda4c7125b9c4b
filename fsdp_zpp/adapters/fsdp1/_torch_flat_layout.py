"""Private names of torch's flat parameters: where the original parameters lie in them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp.collectives.exact_places import sent_exactly
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece


class FlatParameterLayout:
    """Where the parameters of an instance lie in its flat gradient.

    Args:
        instance: The instance, which has a flat parameter.
    """

    def __init__(self, instance: FullyShardedDataParallel) -> None:
        self._instance = instance
        self._whole: FlatLayout | None = None
        self._found: dict[tuple[int, tuple[bool, ...]], FlatLayout] = {}

    def whole(self, numel: int) -> FlatLayout:
        """The layout of all parameters in a tensor of ``numel`` values, padding included."""
        whole = self._whole
        if whole is None or whole.numel != numel:
            whole = self._whole = _layout(self._flat_param, numel, ())
        return whole

    def trained(self, numel: int) -> FlatLayout:
        """That of those that are trained; a flat gradient has frozen ones in it as well."""
        flags = tuple([parameter.requires_grad for parameter in self._flat_param._params or ()])
        found = self._found.get((numel, flags))
        if found is None:
            found = self._found[numel, flags] = _layout(self._flat_param, numel, flags)
        return found

    def around(self, shard: Tensor) -> tuple[FlatLayout, int]:
        """The layout of all parameters, and where this rank's shard begins in it."""
        handle: Any = self._instance._handle
        ranks, rank = (handle.world_size, handle.rank) if handle.uses_sharded_strategy else (1, 0)
        return self.whole(ranks * shard.numel()), rank * shard.numel()

    @property
    def _flat_param(self) -> Any:
        return self._instance._handle.flat_param  # type: ignore[union-attr]


def _layout(flat_param: Any, numel: int, trained: tuple[bool, ...]) -> FlatLayout:
    pieces: list[Piece] = []
    starts: list[int] = []
    small: list[tuple[int, int]] = []
    exact = sent_exactly(flat_param._shapes)
    start = order = 0
    for size, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True):
        if not is_padding:
            if not trained or trained[order]:
                pieces.append(Piece(order, flat_param._fqns[order], size))
                starts.append(start)
            if exact[order]:
                small.append((start, start + size))
            order += 1
        start += size
    return FlatLayout(tuple(pieces), tuple(starts), numel, tuple(small), is_fixed=True)
