"""Strategies of torch's FSDPs by name: torch's own and those of fsdp_zpp."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import NF4, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.config.levels import LEGAL_LEVELS

STRATEGIES: dict[str, Any] = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    **{levels: Strategy(levels) for levels in LEGAL_LEVELS},
    **{f"zeropp-{levels}": Strategy.zeropp(levels=levels) for levels in LEGAL_LEVELS},
    "zeropp": Strategy.zeropp(),
    "zeropp-delta": Strategy.zeropp(weights=Int4Delta()),
    "zeropp-delta-IIG": Strategy.zeropp(levels="IIG", weights=Int4Delta()),
    "zeropp-alone": Strategy.zeropp(gpus_per_node=1),
    "zeropp-delta-alone": Strategy.zeropp(weights=Int4Delta(), gpus_per_node=1),
    "loco": Strategy.loco(),
    "loco-int8": Strategy.loco(error_feedback=LoCo(dtype=Int8(256))),
    "loco-both": Strategy.loco(error_feedback=LoCo(hops="both", dtype=Int8(256))),
    **{f"diloco-{every}": Strategy.diloco(every) for every in (8, 64)},
    **{
        f"diloco-{every}-overlap": Strategy.diloco(local_steps=LocalSteps(every, overlap=1, mix=0.5))
        for every in (8, 64)
    },
    "mixzpp": Strategy.mixzpp(),
    "once-NNN": Strategy("NNN"),
    **{f"once-zeropp{base}": Strategy.zeropp() for base in ("", "-int4", "-nf4")},
}
"""For FullyShardedDataParallel, and with ``fsdp2:`` before the name for fully_shard.

``...-alone``: each GPU counts as a node, wherever it is.

``once-...``: the model is wrapped once, not layer by layer, on a base in int8, or with ``-int4`` and ``-nf4`` in 4
bits; all adapters are one unit.
"""


def base_codec(name: str) -> Codec | None:
    """Return the codec by which a contender's frozen base is quantized before it is wrapped, if it is."""
    if not name.removeprefix("fsdp2:").startswith("once-"):
        return None
    kind = name.rpartition("-")[2]
    if kind == "nf4":
        return NF4(64)  # made only if asked for: it needs bitsandbytes
    return Int4(128) if kind == "int4" else Int8(256)
