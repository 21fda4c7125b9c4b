"""What the configuration of compressed-tensors says of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .headers import refuse_setting

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "dense",
    "mixed-precision",  # each group of layers has a format of its own
)


def refuse_other_formats(config: Mapping[str, Any]) -> None:
    """Raise if some weights are in a format of compressed-tensors that can't be read.

    Raises:
        ValueError: It names the format.
    """
    if config.get("quant_method") != "compressed-tensors":
        return
    sparsity = config.get("sparsity_config") or {}
    stated = [config.get("format"), sparsity.get("format"), *(group.get("format") for group in _groups(config))]
    for format in stated:
        if format is not None and format not in _FORMATS:
            refuse_setting("compressed-tensors", "format", format, ", ".join(_FORMATS[:-2]))


def may_be_symmetric(config: Mapping[str, Any]) -> bool:
    """Return whether some weights may be symmetric, and so have no zero points."""
    stated = [(group.get("weights") or {}).get("symmetric", True) for group in _groups(config)]
    return any(stated) or not stated


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((config.get("config_groups") or {}).values())
