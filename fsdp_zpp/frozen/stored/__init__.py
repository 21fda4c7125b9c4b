"""The formats in which checkpoints store quantized weights, and the search for such weights in a checkpoint.

``format.py`` defines what a format is and checks settings and headers; ``integers.py`` and ``floats.py`` have the
formats. They know nothing of files, modules or ranks. To add a format, subclass ``StoredFormat`` and add the
subclass to ``FORMATS``, with all settings that the format's library writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import floats, integers
from .floats import FourBit, Fp8, Mxfp4
from .format import REMEDY, Known, Settings, StoredFormat, StoredTensors, refuse_unknown, setting
from .integers import Awq, Gptq

# The known settings and the formats of each quant_method. Without a config, all formats are tried.
FORMATS: dict[str, tuple[Known, tuple[type[StoredFormat], ...]]] = {
    "fp8": (floats.FP8_SETTINGS, (Fp8,)),
    "fbgemm_fp8": (floats.FBGEMM_SETTINGS, (Fp8,)),
    "bitsandbytes": (floats.BITSANDBYTES_SETTINGS, (FourBit,)),
    "mxfp4": (floats.MXFP4_SETTINGS, (Mxfp4,)),
    "gptq": (integers.GPTQ_SETTINGS, (Gptq,)),
    "awq": (integers.AWQ_SETTINGS, (Awq,)),
    "compressed-tensors": (floats.COMPRESSED_SETTINGS, (Fp8,)),
}

# A tensor named ``<layer>.weight_<ending>`` holds the codes of ``<layer>.weight``, or helps to decode them.
_OF_CODES = ("scale", "scale_inv", "scale_2", "global_scale", "zero_point", "g_idx", "packed")


def read_config(source: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` of the ``config.json`` in a checkpoint's folder; empty if there is none."""
    path = source.parent / "config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON ({error}); {REMEDY}") from error
    if not isinstance(content, dict):
        return {}
    found = list(_configs(content))
    if not found:
        if (other := source.parent / "hf_quant_config.json").is_file():
            raise ValueError(
                f"{other} says that the checkpoint is quantized by ModelOpt; those that can be read are "
                f"{', '.join(FORMATS)}, and checkpoints in full precision"
            )
        return {}
    config = found[0]
    if any(other != config for other in found):
        raise ValueError(f"{path} has several quantization_config, which differ; give a checkpoint of one model")
    bits = config.get("load_in_4bit"), config.get("load_in_8bit")
    method = setting(config, "quant_method", str) or (None if bits == (None, None) else "bitsandbytes")
    if method not in FORMATS:
        raise ValueError(
            f"{path} says that the checkpoint is quantized by {method!r}; those that can be read are "
            f"{', '.join(FORMATS)}, and checkpoints in full precision"
        )
    return {**config, "quant_method": method}


def find_stored(tensors: StoredTensors, config: Settings) -> dict[str, StoredFormat]:
    """Return the weights that are stored quantized, by name; ``config`` is the result of :func:`read_config`."""
    if config:
        known, formats = FORMATS[config["quant_method"]]
        refuse_unknown(config["quant_method"], config, known)
    else:
        formats = tuple(dict.fromkeys(each for _, some in FORMATS.values() for each in some))
    found: dict[str, StoredFormat] = {}
    for key in tensors:
        for each in formats:
            if (weight := each.at(key, tensors, config)) is not None:
                found.setdefault(*weight)
                break
    _refuse_unread(tensors, found)
    return found


def _configs(content: Settings) -> Iterator[dict[str, Any]]:
    """Yield each ``quantization_config`` in ``config.json``; composite models nest it, e.g. in ``text_config``."""
    if own := setting(content, "quantization_config", dict):
        yield own
        return
    for value in content.values():
        if isinstance(value, dict):
            yield from _configs(value)


def _refuse_unread(tensors: StoredTensors, found: Mapping[str, StoredFormat]) -> None:
    """Raise ValueError if a weight has scales or codes that no format has read."""
    read = {key for stored in found.values() for key in stored.keys.values()}
    for key in tensors:
        weight = next((key.removesuffix(f"_{end}") for end in _OF_CODES if key.endswith(f".weight_{end}")), "")
        if weight and key not in read:
            raise ValueError(
                f"the checkpoint has {key}, by which {weight} is quantized in a way that can't be read; dequantize it "
                "with the library that wrote it, or give another checkpoint"
            )
