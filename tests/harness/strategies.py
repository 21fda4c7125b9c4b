"""Strategies, codecs, clusters and sizes that several tests use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from torch import nn

from fsdp_zpp import Int4, Int4Delta, Int8, LoCo, Strategy, quantize_frozen_params
from fsdp_zpp.planner.model_size import Unit

# Error feedback on codecs so coarse that what it does shows within a few steps.
COARSE = Strategy("IGG", gradients=Int4(32), gpus_per_node=2)
INTER, BOTH = LoCo(), LoCo(hops="both", dtype=Int8(32))
FEEDBACKS = {"inter": INTER, "both in int8": BOTH}

# Codecs for the slow network, and those that are named for the hop inside a node.
PRESETS = {
    "zeropp": Strategy.zeropp(),
    "loco": Strategy.loco(),
    "loco both": Strategy.loco(error_feedback=LoCo(hops="both")),
    "delta": Strategy.zeropp(weights=Int4Delta()),
}
INSIDE = Strategy("GGG", gradients=Int4(32), intra_gradients=Int8(64))
INSIDE_WITH_FEEDBACK = replace(INSIDE, error_feedback=LoCo(hops="both"))

# PaRO's 14 strategies, written out: an oracle that shares no code with the rule.
FOURTEEN = "NNN NNI NII INI III NNG NIG NGG ING IIG IGG GNG GIG GGG".split()
CONSTANT_BETWEEN_NODES = "NNN NNI NII INI III NNG NIG ING IIG".split()

# PaRO's cluster (arXiv 2310.06003, section 4): 4 x 8 A100-80GB, 100 Gbit/s RoCE a node, 2400 Gbit/s NVLink, s = 10.
# Letters alone are compared, as PaRO does.
PARO = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400, "micro_batches": 10, "gpu_memory": 80}
PARO |= {"presets": False}
LLAMA_7B, LLAMA_65B = {"params": 7e9, "units": 32}, {"params": 65e9, "units": 80}
ENCODED = {"weights": Int8(256), "gradients": Int4(128)}
small_unit = st.builds(Unit, st.integers(0, 9999), st.integers(0, 9999), st.integers(1, 3), st.booleans())
sizes = st.lists(small_unit, min_size=1, max_size=3).map(tuple).filter(lambda us: any(u.trainable for u in us))

CODEC = Int8(64)


def quantize(net: nn.Module, **options: Any) -> Any:
    """In a worker: quantize in blocks of 64 on nodes of two."""
    return quantize_frozen_params(net, CODEC, gpus_per_node=2, **options)
