"""Fingerprints of weights, which tell whether two copies have the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as a value has."""


def fingerprint(shard: Tensor) -> str:
    """Return a hash of the values, in which -0 and 0 are equal. Waits for the device."""
    # torch's state dict functions run an optimizer step to create its states, which may turn -0 into 0.
    values = (shard.detach() + 0.0).cpu().reshape(-1).view(torch.uint8)
    return f"{shard.dtype} {hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()}"


def checksums(shards: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Return the dtype of each shard and a sum over the bits of its values, in which -0 and 0 are equal.

    Computed where the shards are, with memory for a few million values; the same on every device. Waits for the device
    once.
    """
    sums = [_checksum(shard) for shard in shards.values()]
    devices = {each.device for each in sums}
    totals = torch.stack(sums if len(devices) == 1 else [each.cpu() for each in sums]).tolist() if sums else []
    return {name: (str(shard.dtype), each) for (name, shard), each in zip(shards.items(), totals, strict=True)}


def _checksum(shard: Tensor) -> Tensor:
    total, start = torch.zeros((), dtype=torch.int64, device=shard.device), 0
    parts = [part.reshape(-1) for part in plain_parts(shard.detach())]
    # What fits into a CPU's cache, or keeps a GPU busy.
    size = min(1 << 16 if shard.device.type == "cpu" else 1 << 22, max(map(len, parts), default=1)) or 1
    # Odd factors, so that each bit counts.
    factors = 2 * torch.arange(size, device=shard.device) + 1
    for part in parts:
        for chunk in part.split(size):
            values = chunk + 0.0 if chunk.is_floating_point() and chunk.itemsize > 1 else chunk
            bits = values.view(BITS[chunk.itemsize])
            # Integer sums do not depend on the order in which a device adds.
            total += (bits * factors[: len(bits)]).sum() + 2 * start * bits.sum(dtype=torch.int64)
            start += len(bits)
    return total


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with values of their own in a tensor subclass; a plain tensor is its only part."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_parts(getattr(tensor, name))
