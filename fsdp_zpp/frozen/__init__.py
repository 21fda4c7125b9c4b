"""A frozen base that is quantized once, sharded, and owned outside of either FSDP (MixZ++).

Frozen weights have no gradient and no optimizer state; all they need is a gather. FSDP1 does not shard integers, FSDP2
does so only from torch 2.13 on, and neither knows that codes that never change need to cross nodes only once. So
quantized weights are not parameters:

- What a base is: ``selection.py`` chooses the weights, ``packed_linear.py`` takes over those that other
  libraries have packed, ``stored/`` has the formats of these and of quantized checkpoints, ``finite.py`` refuses
  infinite ones, ``encoding.py`` quantizes them, ``placement.py`` says which rank holds which chunk, ``weight.py`` is
  one weight, ``unit.py`` the weights that are gathered together, ``base.py`` all those of a model,
  ``double_buffer.py`` decides when they are gathered.
- How modules compute with it: ``modules.py`` replaces parameters, ``functional.py`` has linear layer and embedding,
  ``_tensor.py`` the tensor that stands for a weight, ``_torch_replacing.py`` has torch refuse to compute a frozen
  weight from others.
- Under FSDP: ``from_strategy.py`` quantizes what a strategy with ``frozen=`` wraps, ``resharding.py`` moves a base to
  the strategy's nodes, ``_torch_sharded.py`` finds what is sharded already, ``full_tensors.py`` gathers it.
- Calls: ``quantize.py`` has the public functions that change a model in memory; ``report.py`` is the log line.
- ``files/``: checkpoints, and the files of a quantized base. ``hugging_face/``: PEFT, transformers.

``_needed.py`` lists the private names of torch that all of these use.
"""

from . import _needed  # noqa: F401  (it checks what the rest imports)
