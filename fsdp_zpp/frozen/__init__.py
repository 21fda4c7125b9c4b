"""A frozen base that is quantized once, sharded, and owned outside of either FSDP (MixZ++).

[Note: Why outside of FSDP]
Frozen weights have no gradient and no optimizer state, only a gather. FSDP1 takes no integers, FSDP2 takes them on
torch 2.13 alone, and neither knows that codes need no second trip between nodes. So these weights are no parameters:
``selection.py`` says which they are, ``placement.py`` where their chunks are, ``weight.py`` what one weight is,
``unit.py`` what is gathered together and ``residency.py`` when; ``tensor.py``, ``linear.py`` and ``module.py`` are how
modules compute with them; ``_peft.py`` and ``save_pretrained.py`` adapt PEFT and transformers to them.

Files: ``tensor_files.py`` reads safetensors, ``expert_stacks.py`` the experts in them, ``source.py`` takes weights from
a checkpoint, ``file_format.py`` defines the files of a quantized base, ``saving.py`` and ``loading.py`` write and read
it. ``model_tensors.py`` knows the names of a model's tensors in files, ``coverage.py`` checks that files have them all,
and ``outcome.py`` raises on all ranks what one of them finds wrong.
"""
