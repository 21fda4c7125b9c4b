"""A frozen base that is quantized once, sharded, and owned outside of either FSDP (MixZ++).

[Note: Why outside of FSDP]
Frozen weights have no gradient and no optimizer state, only a gather. FSDP1 takes no integers, FSDP2 takes them on
torch 2.13 alone, and neither knows that codes need no second trip between nodes. So these weights are no parameters:
``selection.py`` says which they are, ``placement.py`` where their chunks are, ``weight.py`` what one weight is,
``unit.py`` what is gathered together and ``residency.py`` when; ``tensor.py``, ``linear.py`` and ``module.py`` are how
modules compute with them; ``_peft.py`` and ``save_pretrained.py`` are what PEFT and transformers have to know of them.
"""
