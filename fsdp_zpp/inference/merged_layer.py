"""A layer with adapters, gathered as a whole and merged by PEFT's own method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_zpp.collectives._torch_coalescing import AllGathers
from fsdp_zpp.runtime.full_tensors import FullTensor, Pending, gets
from fsdp_zpp.runtime.tensors_of_model import TensorOfModel

from .stand_in import Values, stand_in


class MergedLayer:
    """A layer of PEFT's, whose adapters are merged into its base once for all of its parameters.

    Args:
        layer: The layer, which wraps a base layer.
        inputs: Its parameters: those of the base, and those of active adapters.
    """

    def __init__(self, layer: nn.Module, inputs: Sequence[TensorOfModel]) -> None:
        self._layer, self._inputs = layer, inputs
        self._pending: list[Pending] = []
        self._merged: dict[str, Tensor] = {}
        self.is_started = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of its parameters. What PEFT allocates while it merges them comes on top."""
        return sum(tensor.full.peak_nbytes(None) for tensor in self._inputs)

    def start(self, to: int | None, gathers: AllGathers) -> list[Pending]:
        """Start to gather its parameters, each in its own dtype, unless that is done; return what is pending."""
        if not self.is_started:
            self.is_started = True
            self._pending = [tensor.full.start(None, to, gathers) for tensor in self._inputs]
        return self._pending

    def take(self, name: str, to: int | None) -> Tensor | None:
        """Return a merged parameter by its name in the base layer; None if this rank gets nothing."""
        if self._pending:
            values: dict[nn.Module, dict[str, Tensor]] = {}
            for tensor, pending in zip(self._inputs, self._pending, strict=True):
                full = pending.wait()
                if full is not None:
                    for module, own_name in tensor.sites:
                        values.setdefault(module, {})[own_name] = full
            self._pending = []
            if gets(to):
                self._merged = _merge(self._layer, values)
        return self._merged.pop(name, None)


@torch.no_grad()
def _merge(layer: nn.Module, values: Values) -> dict[str, Tensor]:
    """Return the parameters of a layer's base with the active adapters merged into them."""
    copied: Any = stand_in(layer, values)
    # As PEFT's merge_and_unload: some layers have a method of their own for it.
    if hasattr(copied, "unload_and_optionally_merge_module"):
        base = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        copied.merge()
        base = copied.get_base_layer()
    return {name: parameter.detach() for name, parameter in base.named_parameters()}


class MergedParameter(FullTensor):
    """A parameter of a base layer with adapters merged into it.

    Args:
        layer: The layer.
        name: Its name in the base layer.
        base: The parameter without adapters.
    """

    def __init__(self, layer: MergedLayer, name: str, base: FullTensor) -> None:
        self._layer, self._name = layer, name
        self.shape, self.stored = base.shape, base.stored

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
        # Of several parameters of a layer, each counts all of it: whichever is first gathers all.
        return self._layer.nbytes + self.nbytes(dtype) * (self.as_delivered(dtype) != self.stored)

    def start(self, dtype: torch.dtype | None, to: int | None, gathers: AllGathers) -> Pending:
        pending = Pending(self, dtype, to)
        if not self._layer.is_started:
            pending.works = [work for each in self._layer.start(to, gathers) for work in each.works]
        return pending

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        merged = self._layer.take(self._name, to)
        return None if merged is None else merged.to(self.as_delivered(dtype))
