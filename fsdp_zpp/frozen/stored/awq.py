"""Decodes weights of AWQ checkpoints in the ``gemm`` version, as autoawq and gptqmodel write them.

A linear layer of ``in`` inputs and ``out`` outputs is stored transposed, in 4 bits. Words hold eight neighbouring
outputs, in the order of :data:`.packed_codes.AWQ_ORDER`:

- ``qweight``, int32 [in, out / 8];
- ``qzeros``, int32 [groups, out / 8];
- ``scales``, float [groups, out]. Groups are equally many neighbouring inputs.
"""

from __future__ import annotations

from torch import Tensor

from .packed_codes import scale_codes, unpack_awq_codes


def decode_awq(qweight: Tensor, qzeros: Tensor | None, scales: Tensor) -> Tensor:
    """Decode some of the outputs of a weight, or of each weight of a stack.

    Args:
        qweight: int32 [..., in, rows / 8].
        qzeros: int32 [..., groups, rows / 8]; None for files without zero points: all are 0, as autoawq has it.
        scales: Floats, [..., groups, rows].

    Returns:
        The values, [..., rows, in], in the dtype of ``scales``.
    """
    zeros = 0 if qzeros is None else unpack_awq_codes(qzeros).mT
    return scale_codes(unpack_awq_codes(qweight).mT, zeros, scales.mT, None)
