"""Private names of torch's flat parameters: what an instance of FullyShardedDataParallel has sharded of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter

from fsdp_zpp.runtime._torch_flat_parts import copy_replaced
from fsdp_zpp.runtime.sharded import Sharded

from ._torch_flat_layout import FlatParameterLayout, axes_of
from ._torch_handle import StrategyHandle


class ShardedInstance(Sharded):
    """An instance's own part of what FSDP has sharded: its flat parameter, or nothing if it has none.

    Args:
        instance: The instance.
        name: The unit's name.

    Attributes:
        layout: Where the original parameters lie in the flat one.
    """

    def __init__(self, instance: FullyShardedDataParallel, name: str = "unit") -> None:
        self._instance = instance
        self._name = name
        self.layout = FlatParameterLayout(instance)

    @property
    def name(self) -> str:
        """Return the unit's name in profiles, errors and log lines."""
        return self._name

    def rename(self, name: str) -> None:
        """Set the name, once the model and thus the path of the instance in it are known."""
        self._name = name

    @property
    def _flat_param(self) -> FlatParameter | None:
        handle = self._instance._handle
        return None if handle is None else handle.flat_param

    def numel(self) -> int:
        """Return the number of values of the parameters, without padding."""
        flat_param = self._flat_param
        return 0 if flat_param is None else sum(shape.numel() for shape in flat_param._shapes)

    def trained_numel(self) -> int:
        """Return the number of all values if any is trained, since torch reduces the gradient of a flat parameter."""
        return self.numel() if self.is_trained() else 0

    def compute_device(self) -> torch.device | None:
        """Return the device of the handle."""
        handle = self._instance._handle
        device: torch.device | None = None if handle is None else handle.device
        return device

    def wire_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes in which FSDP itself gathers the weights and reduces the gradients."""
        handle = self._instance._handle
        if handle is None:
            return super().wire_dtypes()
        weights = handle._fwd_bwd_param_dtype or handle._orig_param_dtype
        return weights, handle._reduce_dtype or weights

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters as an optimizer may hold them by now: original, or flat."""
        flat_param = self._flat_param
        return [] if flat_param is None else list(flat_param._params or (flat_param,))

    def other_axes(self) -> list[dist.ProcessGroup]:
        """Return the ranks over which another parallelism has sharded parameters, one group an axis."""
        flat_param = self._flat_param
        specs = [] if flat_param is None else flat_param._param_extensions
        return [group for spec in specs if spec is not None for group in spec.mesh.get_all_groups()]

    def is_trained(self) -> bool:
        """Return whether the flat parameter or an original one requires a gradient by now."""
        handle = self._instance._handle
        return handle is not None and StrategyHandle.is_trained(handle)

    def trained_names(self) -> list[str]:
        """Return the FQNs of the original parameters that require a gradient or have one."""
        flat_param = self._flat_param
        if flat_param is None:
            return []
        if not flat_param._params:
            return list(flat_param._fqns) if flat_param.requires_grad or flat_param.grad is not None else []
        pairs = zip(flat_param._fqns, flat_param._params, strict=True)
        return [name for name, parameter in pairs if parameter.requires_grad or parameter.grad is not None]

    def shards(self) -> list[Tensor]:
        """Return what this rank holds of the flat parameter."""
        flat_param = self._flat_param  # which is the shard itself until FSDP's lazy initialization
        return [] if flat_param is None else [getattr(flat_param, "_local_shard", flat_param)]

    def named_shards(self) -> dict[str, Tensor]:
        """Return what this rank holds of the original parameters, by FQN; a parameter may have nothing here."""
        if self._instance._handle is None:
            return {}
        copy_replaced(self._instance._handle)
        return self._parts_of(self.shards()[0].detach())

    def _parts_of(self, shard: Tensor) -> dict[str, Tensor]:
        layout, first = self.layout.around(shard)
        bounds = (
            (start - first, start - first + p.numel) for p, start in zip(layout.pieces, layout.starts, strict=True)
        )
        held = (shard.view(-1)[max(start, 0) : max(stop, 0)] for start, stop in bounds)
        return {piece.name: part for piece, part in zip(layout.pieces, held, strict=True)}

    def named_parts(self, parameter: nn.Parameter, of: Tensor) -> dict[str, Tensor]:
        """Return the parts of a tensor that lies as this rank's shard of a parameter, by FQN."""
        flat_param = self._flat_param
        if flat_param is None or not flat_param._params:
            return self._parts_of(of)
        pairs = zip(flat_param._fqns, flat_param._params, strict=True)
        return {name: of for name, original in pairs if original is parameter}

    def placements(self) -> dict[str, tuple[str, ...]]:
        """Return the mesh dimensions along which another parallelism shards each original parameter, by FQN."""
        flat_param = self._flat_param
        return {} if flat_param is None else dict(zip(flat_param._fqns, axes_of(flat_param), strict=True))

    def weights_changed(self, by_step: bool) -> None:
        """Drop what the handle keeps of the old weights, if a strategy has adopted it."""
        if isinstance(handle := self._instance._handle, StrategyHandle):
            handle.weights_changed(by_step)

    def drop_gradients(self) -> None:
        """Drop what the handle has accumulated, if a strategy has adopted it."""
        if isinstance(handle := self._instance._handle, StrategyHandle):
            handle.drop_gradients()
