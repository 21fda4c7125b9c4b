"""A frozen base that is quantized once, sharded, and owned outside of either FSDP (MixZ++).

Frozen weights have no gradient and no optimizer state; all they need is a gather. FSDP1 does not shard integers, FSDP2
does so only from torch 2.13 on, and neither knows that codes that never change need to cross nodes only once. So
quantized weights are not parameters:

- What a base is: ``selection.py`` chooses the weights, ``packed_linear.py`` unpacks those of bitsandbytes,
  ``encoding.py`` quantizes them, ``placement.py`` says which rank holds which chunk, ``weight.py`` is one weight,
  ``unit.py`` the weights that are gathered together, ``base.py`` makes the units of a model, ``double_buffer.py``
  decides when they are gathered.
- How modules compute with it: ``modules.py`` replaces parameters, ``functional.py`` has linear layer and embedding,
  ``_tensor.py`` the tensor that stands for a weight, ``_hugging_face.py`` adapts PEFT and transformers,
  ``_torch_replacing.py`` has torch refuse to compute a frozen weight from others. ``_needed.py`` lists the
  private names of torch that these use.
- Under FSDP: ``from_strategy.py`` quantizes what a strategy with ``frozen=`` wraps, ``resharding.py`` moves a base to
  the strategy's nodes, ``sharded_params.py`` takes parameters back from FSDP.
- Calls and files: ``quantize.py``, ``saving.py``, ``loading.py`` and ``peft_saving.py`` have the public functions,
  ``file_format.py`` defines the files of a quantized base. ``source.py`` reads a checkpoint, ``tensor_files.py``
  safetensors, ``expert_stacks.py`` the experts in them. ``model_tensors.py`` names a model's tensors,
  ``full_tensors.py`` gathers them, ``completeness.py`` checks that files have them all. ``report.py`` is the log line.
"""

from . import _needed  # noqa: F401  (it checks what the rest imports)
