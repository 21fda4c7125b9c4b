"""Detects that a tensor was written to, as far as torch counts writes, or moved to other memory."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def version_of(tensor: Tensor) -> Hashable:
    """A value that changes with every write to ``tensor`` that torch counts, and when it is moved or replaced.

    Neither ``_version`` nor the address is enough: each new tensor counts from zero, and an allocator reuses addresses.
    A weak reference to the storage identifies it without keeping it alive.
    """
    # A tensor subclass may have no storage of its own.
    memory = StorageWeakRef(tensor.untyped_storage()) if type(tensor) is Tensor else id(tensor)
    return tensor._version, memory
