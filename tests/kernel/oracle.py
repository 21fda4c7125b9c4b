"""Payload format once more, one value at a time and sharing no code with the package: what the tests compare to."""

import math
import struct
from collections.abc import Sequence

import numpy as np

f32 = np.float32


def _pad16(row: bytearray) -> None:
    row.extend(bytes(-len(row) % 16))


def truncated(value: np.float32) -> np.float32:
    """Truncate to 16 significant bits."""
    mantissa, exponent = math.frexp(float(value))
    return f32(math.ldexp(math.floor(mantissa * 2**16), exponent - 16))


def _encode_block(values: Sequence[np.float32], qmax: int) -> tuple[list[int], np.float32]:
    absmax = f32(0)
    for value in values:
        absmax = max(absmax, f32(np.inf) if np.isnan(value) else abs(value))
    if absmax == 0 or np.isinf(absmax):
        return [0] * len(values), absmax
    scale = truncated(max(absmax * f32((1 + 2.0**-22) / qmax), f32(2.0**-126)))
    inverse = f32(1) / scale
    return [int(np.clip(np.rint(value * inverse), -qmax, qmax)) for value in values], scale


def encode(values: Sequence[np.float32], bits: int, block: int) -> bytes:
    """Return the payload of one chunk."""
    codes: list[int] = []
    scales: list[np.float32] = []
    for start in range(0, len(values), block):
        block_codes, scale = _encode_block(values[start : start + block], {4: 7, 8: 127}[bits])
        codes += block_codes
        scales.append(scale)
    row = bytearray()
    if bits == 8:
        for code in codes:
            row += struct.pack("b", code)
    else:
        codes += [0] * (len(codes) % 2)
        for low, high in zip(codes[0::2], codes[1::2], strict=True):
            row.append((low & 0xF) | (high & 0xF) << 4)
    _pad16(row)
    for scale in scales:
        row += struct.pack("<f", scale)
    _pad16(row)
    return bytes(row)


def decode(row: bytes, numel: int, bits: int, block: int) -> list[np.float32]:
    """Return the values of one payload row."""
    nbytes = numel if bits == 8 else (numel + 1) // 2
    scales_at = (nbytes + 15) // 16 * 16
    values = []
    for i in range(numel):
        if bits == 8:
            code = row[i] - 256 * (row[i] > 127)
        else:
            nibble = row[i // 2] >> 4 * (i % 2) & 0xF
            code = nibble - 16 * (nibble > 7)
        (scale,) = struct.unpack_from("<f", row, scales_at + 4 * (i // block))
        values.append(f32(code) * f32(scale))
    return values


def decode_sum(rows: Sequence[bytes], numel: int, bits: int, block: int, scale: float) -> list[np.float32]:
    """Return ``scale`` times the sum of the peers' rows, in their order."""
    total = decode(rows[0], numel, bits, block)
    for row in rows[1:]:
        total = [a + b for a, b in zip(total, decode(row, numel, bits, block), strict=True)]
    return [f32(scale) * value for value in total]


def transposed(rows: int, cols: int) -> list[int]:
    """Return where chunks of a row-major grid go: chunk i of it to place ``transposed(rows, cols)[i]``."""
    return [col * rows + row for row in range(rows) for col in range(cols)]
