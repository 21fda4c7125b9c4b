"""Decodes weights of compressed-tensors' format ``pack-quantized``: int4 and int8, such as Kimi's experts.

With f = 32 / bits codes in a word, codes that are signed but packed plus 2^(bits - 1):

- ``weight_packed``, int32 [out, in / f]: a word holds neighbouring inputs;
- ``weight_scale``, float [out, groups], [out, 1], or [1] for the whole weight;
- ``weight_zero_point``, only if the weight is asymmetric: int32 [out / f, groups]: a word holds neighbouring outputs;
- ``weight_g_idx``, only if groups are in the order of activations: the group of each input, or -1;
- ``weight_shape``: out and in.
"""

from __future__ import annotations

from torch import Tensor

from .packed_codes import scale_codes, unpack_codes


def decode_packed_integers(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_of: Tensor | None, bits: int, columns: int
) -> Tensor:
    """Decode rows of a weight, or of each weight of a stack.

    Args:
        packed: int32 [..., rows, columns / f].
        scale: Floats, [..., rows, groups].
        zero_point: int32 [..., rows / f, groups]; None if all are 0.
        group_of: Integers, [..., columns]. None: groups are equally many neighbouring columns.
        bits: 4 or 8.
        columns: The number of columns, which need not fill the last word.

    Returns:
        The values, [..., rows, columns], in the dtype of ``scale``.
    """
    codes = unpack_codes(packed, bits)[..., :columns]
    rows = packed.shape[-2]
    # Both are packed plus 2^(bits - 1), which the difference does not have.
    zeros = 2 ** (bits - 1) if zero_point is None else unpack_codes(zero_point.mT, bits)[..., :rows].mT
    return scale_codes(codes, zeros, scale, group_of)
