"""Strategies of torch's FSDPs by name, torch's own and ours."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import NF4, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.config.strategy import LEGAL_LEVELS

INT_RESHARD = "int_reshard"
ADAPTERS_ONLY = ("NNN", "NNG", "III", "IIG", "IGG", "GGG")
STRATEGIES: dict[str, Any] = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    **{levels: Strategy(levels) for levels in LEGAL_LEVELS},
    **{f"zeropp-{levels}": Strategy.zeropp(levels=levels) for levels in LEGAL_LEVELS},
    "qwZ": Strategy("GGG", weights=Int8(256)),
    "qgZ": Strategy("GGG", gradients=Int4(128)),
    "zeropp": Strategy.zeropp(),
    "zeropp-delta": Strategy.zeropp(weights=Int4Delta()),
    "zeropp-delta-IIG": Strategy.zeropp(levels="IIG", weights=Int4Delta()),
    "loco": Strategy.loco(),
    "loco-delta": Strategy.loco(weights=Int4Delta()),
    "loco-int8": Strategy.loco(error_feedback=LoCo(dtype=Int8(256))),
    "loco-both": Strategy.loco(error_feedback=LoCo(hops="both", dtype=Int8(256))),
    **{f"diloco-{every}": Strategy.diloco(every) for every in (8, 64)},
    **{
        f"diloco-{every}-overlap": Strategy.diloco(local_steps=LocalSteps(every, overlap=1, mix=0.5))
        for every in (8, 64)
    },
    "zeropp-full-inside": Strategy.zeropp(intra_gradients=None),
    "zeropp-int4-inside": Strategy.zeropp(intra_gradients=Int4(128)),
    "mixzpp": Strategy.mixzpp(),
    "mixzpp-int4": Strategy.mixzpp(frozen=Int4(128)),
    **{f"{base}-{levels}": Strategy(levels) for base in ("frozen", "once") for levels in ADAPTERS_ONLY},
    **{f"once-zeropp{base}": Strategy.zeropp() for base in ("", "-int4", "-nf4")},
}
"""For FullyShardedDataParallel, and with ``fsdp2:`` before the name for fully_shard.

``frozen-...``: the base in int8, sharded inside nodes; adapters by these letters, in full precision. ``once-...``: the
same, with the model wrapped once, not layer by layer, so that all adapters are one unit; ``-int4`` and ``-nf4`` have
the base in 4 bits.
"""


def base_codec(name: str) -> Codec | None:
    """What the frozen base of a contender is quantized with before it is wrapped, if it is."""
    if not name.removeprefix("fsdp2:").startswith(("frozen-", "once-")):
        return None
    kind = name.rpartition("-")[2]
    if kind == "nf4":
        return NF4(64)  # made only if asked for: it needs bitsandbytes
    return Int4(128) if kind == "int4" else Int8(256)
