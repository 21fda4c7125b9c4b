"""Strategies and clusters that several tests use."""

from __future__ import annotations

from dataclasses import replace

from fsdp_zpp import Int2Delta, Int4, Int4Delta, Int8, LoCo, Strategy

# Error feedback on codecs so coarse that what it does shows within a few steps.
COARSE = Strategy("IGG", gradients=Int4(32), gpus_per_node=2)
INTER, BOTH = LoCo(), LoCo(hops="both", dtype=Int8(32))

# Codecs for the slow network, and those that are named for the hop inside a node.
PRESETS = {
    "zeropp": Strategy.zeropp(),
    "loco": Strategy.loco(),
    "loco both": Strategy.loco(error_feedback=LoCo(hops="both")),
    "delta": Strategy.zeropp(weights=Int4Delta()),
    "delta2": Strategy.zeropp(weights=Int2Delta()),
}
INSIDE = Strategy("GGG", gradients=Int4(32), intra_gradients=Int8(64))
INSIDE_WITH_FEEDBACK = replace(INSIDE, error_feedback=LoCo(hops="both"))

# PaRO's 14 strategies, written out: an oracle that shares no code with the rule.
FOURTEEN = "NNN NNI NII INI III NNG NIG NGG ING IIG IGG GNG GIG GGG".split()

# PaRO's cluster (arXiv 2310.06003, section 4): 4 x 8 A100-80GB, 100 Gbit/s RoCE a node, 2400 Gbit/s NVLink, s = 10.
# Letters alone are compared, as PaRO does.
PARO = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400, "micro_batches": 10, "gpu_memory": 80}
PARO |= {"presets": False}
