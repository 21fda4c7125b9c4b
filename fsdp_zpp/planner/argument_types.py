"""How values on the planner's command line are parsed."""

from __future__ import annotations

import argparse
from typing import Literal

import torch

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.names import codec_from_name
from fsdp_zpp.config.error_feedback import LoCo
from fsdp_zpp.suggestions import did_you_mean

from .config import DTYPES


def codec(text: str) -> Codec | None:
    """Parse a codec: ``none``, or the name of a codec, with a block (``int8:256``) or without.

    Raises:
        argparse.ArgumentTypeError: If ``text`` is not a codec.
    """
    try:
        return codec_from_name(text)
    except (ValueError, ModuleNotFoundError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def feedback(text: str) -> LoCo | None:
    """Parse error feedback: ``none``, ``inter`` or ``both``, the latter two with a codec of the errors or without.

    Raises:
        argparse.ArgumentTypeError: If ``text`` is not error feedback.
    """
    if text == "none":
        return None
    hops, _, errors = text.partition(":")
    try:
        return LoCo(hops=hops, dtype=codec(errors or "none"))  # type: ignore[arg-type]  # LoCo checks both
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def codec_or_auto(text: str) -> Codec | Literal["auto"] | None:
    """Parse a codec like :func:`codec`, or ``auto``."""
    return "auto" if text == "auto" else codec(text)


def dtype(text: str) -> torch.dtype:
    """Parse the short name of a dtype.

    Raises:
        argparse.ArgumentTypeError: If strategies do not take the dtype.
    """
    if text not in DTYPES:
        hint = did_you_mean(text, DTYPES, before="; ")
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype; allowed are {', '.join(DTYPES)}{hint}")
    return DTYPES[text]


_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def count(text: str) -> float:
    """Parse a number of parameters, such as ``8e9`` or ``8B``.

    Raises:
        argparse.ArgumentTypeError: If ``text`` is none.
    """
    factor = _SUFFIXES.get(text[-1:].lower(), 1.0)
    try:
        return float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid float value: {text!r}; a number of parameters is written 8e9, or 8B with a suffix K, M, B or T"
        ) from None


def trainable_count(text: str, params: int) -> float:
    """Parse a number of parameters, or a share of ``params`` such as ``0.3%``, which is rounded to at least 1.

    Raises:
        ValueError: If ``text`` is neither.
    """
    number, percent, rest = text.partition("%")
    try:
        value = float(number) if percent else count(number)
    except (ValueError, argparse.ArgumentTypeError):
        value = None
    if value is None or rest or (percent and not 0 < value <= 100):
        raise ValueError(f"--trainable must be a number of parameters or a share above 0% and up to 100%, got {text!r}")
    if percent:
        return max(1, round(params * value / 100))
    # A fraction is most likely a share without its percent sign.
    if value < 1:
        raise ValueError(f"--trainable is a number of parameters, got {text!r}; a share has a percent sign, 0.3%")
    return value
