"""Finds the weights of a checkpoint that are stored quantized: by ``config.json``, else by names and dtypes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .awq import Awq
from .bitsandbytes import FourBit, Int8Rows
from .format import REMEDY, StoredFormat, StoredTensors
from .fp8 import Fp8
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .nvfp4 import Nvfp4
from .packed_integers import PackedIntegers
from .plain_integers import PlainIntegers
from .settings import setting

FORMATS: dict[str, tuple[type[StoredFormat], ...]] = {
    "fp8": (Fp8,),
    "bitsandbytes": (FourBit, Int8Rows),
    "mxfp4": (Mxfp4,),
    "gptq": (Gptq,),
    "awq": (Awq,),
    "compressed-tensors": (PackedIntegers, PlainIntegers, Nvfp4, Fp8),
}
"""The formats of each ``quant_method``. Those of all are looked for where nothing names one."""


def read_config(source: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` of the ``config.json`` beside a checkpoint's file; empty if there is none.

    Raises:
        ValueError: If that file is broken, has something else there, or names a method that is unknown.
    """
    path = source.parent / "config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON ({error}); {REMEDY}") from error
    if not isinstance(content, dict):
        return {}
    config = setting(content, "quantization_config", dict)
    # Models of several parts have the configuration of their language model in another mapping.
    if config is None and isinstance(content.get("text_config"), dict):
        config = setting(content["text_config"], "quantization_config", dict)
    if config is None:
        return {}
    method = setting(config, "quant_method", str) or ("bitsandbytes" if "load_in_4bit" in config else None)
    if method not in FORMATS:
        raise ValueError(
            f"{path} says that the checkpoint is quantized by {method!r}; those that can be read are "
            f"{', '.join(FORMATS)}, and checkpoints in full precision"
        )
    return {**config, "quant_method": method}


def find_stored(tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
    """Return the weights that are stored quantized, by name.

    Args:
        tensors: The tensors of a checkpoint.
        config: What :func:`read_config` returned.

    Raises:
        ValueError: If one is incomplete, or its tensors don't fit each other.
    """
    formats = FORMATS[config["quant_method"]] if config else [each for some in FORMATS.values() for each in some]
    found: dict[str, StoredFormat] = {}
    for each in formats:
        found |= {key: stored for key, stored in each.find(tensors, config).items() if key not in found}
    return found
