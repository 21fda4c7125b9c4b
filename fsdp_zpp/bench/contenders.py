"""Contenders by name: torch's own strategies and those of fsdp_zpp, and the code that makes each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.blockwise import Int8
from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.codecs.names import codec_from_name
from fsdp_zpp.config.error_feedback import LoCo
from fsdp_zpp.config.levels import LEGAL_LEVELS
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.planner.paste import line_of
from fsdp_zpp.suggestions import did_you_mean

FULL_SHARD, HSDP = "full_shard", "hybrid_shard"
TORCHS = {FULL_SHARD: ShardingStrategy.FULL_SHARD, HSDP: ShardingStrategy.HYBRID_SHARD}
_TORCHS_LABELS = {FULL_SHARD: "FULL_SHARD", HSDP: "HSDP"}
BASES = {"int8": "int8:256", "int4": "int4:128", "nf4": "nf4:64"}
"""Codecs of a frozen base by the word for them in a contender's name."""


@dataclass(frozen=True)
class Contender:
    """A way to shard a model.

    Attributes:
        name: Its name in a result.
        preset: ``full_shard`` or ``hybrid_shard`` of torch; a class method of ``Strategy``; empty for ``Strategy``.
        arguments: The arguments of the latter two.
        fsdp2: Whether ``fully_shard`` shards it, or ``FullyShardedDataParallel``.
        base: Codec by which the frozen base is quantized before the model is wrapped, once, as one unit; None wraps
            each layer.
    """

    name: str
    preset: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fsdp2: bool = True
    base: Codec | None = None

    @property
    def is_torchs(self) -> bool:
        """Return whether the strategy is one of torch's own."""
        return self.preset in TORCHS

    @property
    def strategy(self) -> Any:
        """Return torch's ``ShardingStrategy``, or a ``Strategy``."""
        if self.is_torchs:
            return TORCHS[self.preset]
        make = getattr(Strategy, self.preset) if self.preset else Strategy
        return make(**self.arguments)

    @property
    def code(self) -> str:
        """Return the Python expression of the strategy, to paste; a word for torch's own."""
        if self.is_torchs:
            return _TORCHS_LABELS[self.preset]
        made = line_of(self.strategy, self.arguments.get("gpus_per_node")).partition("strategy = ")[2]
        if self.base is None:
            return made
        codec = repr(self.base).replace("block=", "")
        return f"quantize_frozen_params(model, {codec}), then wrap the whole model once by {made}"

    @property
    def label(self) -> str:
        """Return what a table or a chart calls it."""
        if self.base is None:
            own = self.code.removeprefix("Strategy.")
        else:
            made = self.code.rpartition(" by ")[2].removeprefix("Strategy.")
            own = f"{made} once, {self.base} base"
        return own if self.fsdp2 else f"{own}, FSDP1"

    def on_nodes_of(self, gpus_per_node: int) -> Contender:
        """Return the contender with this many GPUs counted as a node; torch's own have no such argument."""
        if self.is_torchs:
            return self
        return dataclasses.replace(self, arguments={**self.arguments, "gpus_per_node": gpus_per_node})


_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    FULL_SHARD: (FULL_SHARD, {}),
    HSDP: (HSDP, {}),
    **{levels: ("", {"levels": levels}) for levels in LEGAL_LEVELS},
    **{f"zeropp-{levels}": ("zeropp", {"levels": levels}) for levels in LEGAL_LEVELS},
    "zeropp": ("zeropp", {}),
    "zeropp-delta": ("zeropp", {"weights": Int4Delta()}),
    "zeropp-delta-IIG": ("zeropp", {"levels": "IIG", "weights": Int4Delta()}),
    "loco": ("loco", {}),
    "loco-int8": ("loco", {"error_feedback": LoCo(dtype=Int8(256))}),
    "loco-both": ("loco", {"error_feedback": LoCo(hops="both", dtype=Int8(256))}),
    **{f"diloco-{every}": ("diloco", {"every": every}) for every in (8, 64)},
    **{
        f"diloco-{every}-overlap": ("diloco", {"local_steps": LocalSteps(every, overlap=1, mix=0.5)})
        for every in (8, 64)
    },
    "mixzpp": ("mixzpp", {}),
}
_ON_A_BASE: dict[str, tuple[str, dict[str, Any]]] = {
    "once-NNN": ("", {"levels": "NNN"}),
    "once-zeropp": ("zeropp", {}),
}
NAMES_ON_NODES = (
    *_PRESETS,
    *_ON_A_BASE,
    *(f"{name}-{base}" for name in ("once-zeropp", "mixzpp") for base in ("int4", "nf4")),
)
ALONE = "-alone"
NAMES = (*NAMES_ON_NODES, *(f"{name}{ALONE}" for name in NAMES_ON_NODES if name not in TORCHS))
"""All names. ``once-...``: the model is wrapped once, not layer by layer, on a base that was quantized before, in int8,
or with ``-int4`` and ``-nf4`` in 4 bits. ``mixzpp`` wraps each layer. ``...-alone``: each GPU counts as a node, so that
it has a whole base."""


def contender(name: str, fsdp2: bool = True, called: str | None = None) -> Contender:
    """Return the contender of a name.

    Args:
        name: One of :data:`NAMES`.
        fsdp2: Whether ``fully_shard`` shards it, or ``FullyShardedDataParallel``.
        called: Its name in a result; by default, ``name``.

    Raises:
        ValueError: If there is none of this name.
        ModuleNotFoundError: If its codec needs a package that is not installed.
    """
    if name not in NAMES:
        hint = did_you_mean(name, NAMES, before="; ")
        raise ValueError(
            f"{name!r} is not a strategy; allowed are {', '.join(NAMES_ON_NODES)}, and those that are not torch's with "
            f"{ALONE} behind, each GPU a node{hint}"
        )
    found = _named(name.removesuffix(ALONE), fsdp2, called or name)
    return found.on_nodes_of(1) if name.endswith(ALONE) else found


def _named(name: str, fsdp2: bool, called: str) -> Contender:
    if name in _PRESETS:
        return Contender(called, *_PRESETS[name], fsdp2=fsdp2)
    if name in _ON_A_BASE:
        return Contender(called, *_ON_A_BASE[name], fsdp2=fsdp2, base=codec_from_name(BASES["int8"]))
    stem, _, base = name.rpartition("-")
    codec = codec_from_name(BASES[base])  # made only if asked for: NF4 needs bitsandbytes
    if stem in _ON_A_BASE:
        return Contender(called, *_ON_A_BASE[stem], fsdp2=fsdp2, base=codec)
    return Contender(called, stem, {"frozen": codec}, fsdp2=fsdp2)
