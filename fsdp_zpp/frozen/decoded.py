"""A frozen weight as a tensor of the model that can be had in full: its codes are gathered and decoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_zpp.collectives.devices import collective_device
from fsdp_zpp.runtime.full_tensors import FullTensor, gets

from .modules import frozen_weights_of
from .weight import FrozenWeight


@dataclass(frozen=True)
class DecodedWeight(FullTensor):
    """The values of a frozen weight, decoded directly in the dtype that is asked for."""

    weight: FrozenWeight

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Return the weight's shape."""
        return self.weight.shape

    @property
    def stored(self) -> torch.dtype:  # type: ignore[override]
        """Return the dtype that the weight shows."""
        return self.weight.dtype

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        weight, device = self.weight, self.weight.device
        group = weight.placement.mesh.group
        if device.type == "cpu" and group is not None:  # as long as no forward has moved the codes
            device = collective_device(group)
        if not gets(to):
            weight.holder.gathered_payload(weight, device)  # collective
            return None
        return weight.dense(self.as_delivered(dtype), device)


def decoded_weights_of(module: nn.Module) -> dict[str, DecodedWeight]:
    """Return the frozen weights of a module itself, by their names in it."""
    return {name: DecodedWeight(weight) for name, weight in frozen_weights_of(module).items()}
