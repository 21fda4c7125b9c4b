"""A frozen base: weights that are quantized once, and sharded outside of FSDP (MixZ++).

Quantized weights are not parameters: without gradients and optimizer state, they need no communication but a gather.
FSDP1 can't shard integers, and FSDP2 can only from torch 2.13 on. Either would gather the codes between nodes in every
step, although codes never change.
"""
