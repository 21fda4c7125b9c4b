"""Private names of torch's flat parameters: where the original parameters lie in them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter

from fsdp_zpp.adapters._torch_mesh import sharded_along
from fsdp_zpp.collectives.exact_places import sent_exactly
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece, boundaries_between, keep_recent


class FlatParameterLayout:
    """Tells where the parameters of an instance lie in its flat gradient.

    Args:
        instance: The instance, which has a flat parameter.
    """

    def __init__(self, instance: FullyShardedDataParallel) -> None:
        self._instance = instance
        self._whole: FlatLayout | None = None
        self._of_trained: dict[tuple[int, tuple[bool, ...]], FlatLayout] = {}  # the last few

    def whole(self, numel: int) -> FlatLayout:
        """Return the layout of all parameters in a tensor of ``numel`` values, padding included."""
        whole = self._whole
        if whole is None or whole.numel != numel:
            whole = self._whole = _layout(self._flat_param, numel, ())
        return whole

    def trained(self, numel: int) -> FlatLayout:
        """Return the layout of the trained parameters alone; a flat gradient has the frozen ones in it as well."""
        flags = tuple([parameter.requires_grad for parameter in self._flat_param._params or ()])
        layout = self._of_trained.get((numel, flags))
        if layout is None:
            layout = keep_recent(self._of_trained, (numel, flags), _layout(self._flat_param, numel, flags))
        return layout

    def around(self, shard: Tensor) -> tuple[FlatLayout, int]:
        """Return the layout of all parameters, and where this rank's shard begins in it."""
        handle = self._instance._handle
        assert handle is not None
        ranks, rank = (handle.world_size, handle.rank) if handle.uses_sharded_strategy else (1, 0)
        return self.whole(ranks * shard.numel()), rank * shard.numel()

    @property
    def _flat_param(self) -> FlatParameter:
        assert self._instance._handle is not None
        return self._instance._handle.flat_param


def axes_of(flat_param: FlatParameter) -> list[tuple[str, ...]]:
    """Return the mesh dimensions along which another parallelism shards each original parameter."""
    specs = flat_param._param_extensions
    return [() if spec is None else sharded_along(spec.mesh, spec.placements) for spec in specs]


def _layout(flat_param: FlatParameter, numel: int, trained: tuple[bool, ...]) -> FlatLayout:
    pieces: list[Piece] = []
    starts: list[int] = []
    small: list[tuple[int, int]] = []
    placed: list[tuple[int, tuple[str, ...]]] = []
    axes = axes_of(flat_param)
    exact = sent_exactly(flat_param._shapes)
    start = order = 0
    for size, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True):
        if not is_padding:
            if not trained or trained[order]:
                pieces.append(Piece(order, flat_param._fqns[order], size))
                starts.append(start)
            if exact[order]:
                small.append((start, start + size))
            else:
                placed.append((start, axes[order]))
            order += 1
        start += size
    boundaries = boundaries_between(placed)
    return FlatLayout(tuple(pieces), tuple(starts), numel, tuple(small), is_fixed=True, boundaries=boundaries)
