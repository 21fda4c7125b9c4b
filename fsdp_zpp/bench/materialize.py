"""Random values for a model that has none, module by module, so that no rank ever holds more than a unit of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def materialize(module: nn.Module, base: Any, device: torch.device) -> nn.Module:
    """Give values to the parameters and buffers that have none, the same on every rank that has the same seed.

    Args:
        module: The model, or a part of it.
        base: The transformers model that it is or belongs to, which knows how its buffers are computed.
        device: The device that they are made on.

    Returns:
        ``module``.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # parameters that are tied stay so
    for inner in module.modules():
        if any(buffer is not None and buffer.is_meta for buffer in inner._buffers.values()):
            _make_buffers(inner, base, device)
        for name, parameter in list(inner._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                values = torch.empty_like(parameter, device=device)
                nn.init.ones_(values) if parameter.ndim == 1 else nn.init.normal_(values, std=0.02)
                made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            inner._parameters[name] = made[parameter]
    return module


def _make_buffers(module: Any, base: Any, device: torch.device) -> None:
    """Compute the buffers of one module, which the meta device has skipped."""
    if "inv_freq" in module._buffers:
        module.__init__(module.config)
        module.to(device)
        return
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.zeros_like(buffer, device=device)
    with torch.no_grad():
        base._init_weights(module)
