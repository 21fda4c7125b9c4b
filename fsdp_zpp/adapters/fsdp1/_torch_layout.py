"""Private names of torch's flat parameters: where the original parameters lie in them."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp.collectives.exact_places import sent_exactly
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece
from fsdp_zpp.torch_internals import Needed, check_needed

_FLAT = "torch.distributed.fsdp._flat_param.FlatParameter"
_NEEDED = (
    Needed("torch.distributed.fsdp._flat_param", "FlatParameter", "the layout of a flat gradient"),
    Needed("torch.distributed.fsdp.FullyShardedDataParallel", "_handle", "the same"),
    Needed("torch.distributed.fsdp._flat_param.FlatParamHandle", "flat_param", "the same"),
    Needed(_FLAT, "_fqns _params _shapes _numels_with_padding _is_padding_mask", "the same"),
)
check_needed("adapter for FullyShardedDataParallel", _NEEDED)


class TrainedLayout:
    """Where the trained parameters of an instance lie in its flat gradient, which has frozen ones in it as well.

    Args:
        instance: The instance, which has a flat parameter.
    """

    def __init__(self, instance: FullyShardedDataParallel) -> None:
        self._instance = instance
        self._found: dict[tuple[int, tuple[bool, ...]], FlatLayout] = {}

    def of(self, numel: int) -> FlatLayout:
        """The layout of a gradient of ``numel`` values, padding included."""
        flat_param: Any = self._instance._handle.flat_param  # type: ignore[union-attr]
        trained = tuple([parameter.requires_grad for parameter in flat_param._params or ()])
        found = self._found.get((numel, trained))
        if found is None:
            found = self._found[numel, trained] = _layout(flat_param, numel, trained)
        return found


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
