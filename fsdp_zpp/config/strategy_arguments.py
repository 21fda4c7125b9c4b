"""The arguments of a strategy as a dict: what presets override, and what configuration files are read as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from fsdp_zpp.codecs.as_stored import FrozenName
from fsdp_zpp.codecs.base import Codec

from .error_feedback import LoCo
from .local_steps import LocalSteps


class StrategyArguments(TypedDict, total=False):
    """Keyword arguments of ``Strategy``, which describes them; each may be missing."""

    levels: str
    weights: Codec | None
    gradients: Codec | None
    intra_gradients: Codec | Literal["auto"] | None
    error_feedback: LoCo | None
    frozen: Codec | FrozenName | None
    local_steps: LocalSteps | None
    gpus_per_node: int | None
    overrides: Mapping[str, Any] | tuple[tuple[str, Any], ...]
