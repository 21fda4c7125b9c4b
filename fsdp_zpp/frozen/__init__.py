"""A frozen base: weights that are quantized once, and sharded outside of FSDP (MixZ++).

Quantized weights are not parameters. They have no gradient and no optimizer state, so they need only a gather. FSDP1
can't shard integers, FSDP2 can from torch 2.13 on, and both would gather the codes between nodes in every step, though
codes never change.
"""
