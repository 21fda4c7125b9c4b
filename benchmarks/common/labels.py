"""Labels on pages of results for the strategies that run.py knows by short names."""

from __future__ import annotations

import re

_WHOLE = {
    "full_shard": "FSDP FULL_SHARD",
    "fsdp2:full_shard": "FSDP2 FULL_SHARD",
    "hybrid_shard": "FSDP HYBRID_SHARD",
    "fsdp2:hybrid_shard": "FSDP2 HSDP",
    "megatron-hfsdp": "Megatron-FSDP HFSDP",
    "deepspeed-zeropp": "DeepSpeed ZeRO++",
    "deepspeed-zero3": "DeepSpeed ZeRO-3",
    "bitsandbytes": "bitsandbytes under FSDP2, NF4 base",
    "mixzpp": "FSDP mixzpp, each layer",
    "fsdp2:mixzpp": "FSDP2 mixzpp, each layer",
}
_PARTS = {
    "delta": "Int4Delta",
    "delta2": "Int2Delta",
    "int3": "Int3",
    "alone": "each GPU a node",
    "overlap": "overlap",
    "int8": "int8 errors",
    "both": "both hops",
}
_UNITS = {"fsdp2:ends-": "embedding and head apart", "fsdp2:pairs-": "two layers a unit"}
_BASES = {"int4": "int4 base", "nf4": "NF4 base", "": "int8 base"}


def label(name: str) -> str:
    """Return a page's label of a strategy.

    Args:
        name: Name of a result: one that run.py knows, and words after it that stay as they are.
    """
    if name.startswith(compiled := "layers compiled: "):
        return f"{label(name.removeprefix(compiled))}, compiled"
    for prefix, units in _UNITS.items():
        if name.startswith(prefix):
            return f"{label('fsdp2:' + name.removeprefix(prefix))}, {units}"
    short = re.match("[^ ,]+", name)[0]
    more = name.removeprefix(short)
    if short in _WHOLE:
        return _WHOLE[short] + more
    adapter, own = ("FSDP2" if short.startswith("fsdp2:") else "FSDP"), short.removeprefix("fsdp2:")
    if own.startswith("once-"):
        kind, _, base = own.removeprefix("once-").partition("-")
        return f"{adapter} {kind}, {_BASES[base]}{more}"
    kind, *parts = own.split("-")
    scopes = "".join(f" {part}" for part in parts if re.fullmatch("[NIG]{3}", part))
    every = "".join(f" every {part}" for part in parts if part.isdigit())
    return ", ".join([f"{adapter} {kind}{scopes}{every}", *(_PARTS[part] for part in parts if part in _PARTS)]) + more
