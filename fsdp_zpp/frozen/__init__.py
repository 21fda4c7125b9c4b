"""A frozen base that is quantized once, sharded, and owned outside of either FSDP (MixZ++).

Frozen weights have no gradient and no optimizer state; all they need is a gather. FSDP1 does not shard integers, FSDP2
does so only from torch 2.13 on, and neither knows that codes that never change need to cross nodes only once. So
quantized weights are not parameters.
"""
