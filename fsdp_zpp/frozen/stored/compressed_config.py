"""What the configuration of compressed-tensors says of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .headers import refuse_setting
from .settings import setting

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
    sparsity = setting(config, "sparsity_config", dict) or {}
    for settings in (config, sparsity, *_groups(config)):
        format = setting(settings, "format", str)
        if format is not None and format not in _FORMATS:
            refuse_setting("compressed-tensors", "format", format, ", ".join(_FORMATS[:-2]))


def may_be_symmetric(config: Mapping[str, Any]) -> bool:
    """Return whether some weights may be symmetric, and so have no zero points."""
    groups = _groups(config)
    return not groups or any(setting(_weights(group), "symmetric", bool) is not False for group in groups)


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = setting(config, "config_groups", dict) or {}
    # One that has the name of a scheme may list targets alone.
    return [{} if isinstance(groups[name], list) else setting(groups, name, dict) or {} for name in groups]


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return setting(group, "weights", dict) or {}
