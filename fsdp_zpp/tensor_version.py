"""What tells whether a tensor still is what it was: its writes, as far as torch counts them, and its memory."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def version_of(tensor: Tensor) -> Hashable:
    """Changes with every write to ``tensor`` that torch can see from here, and when it is moved or replaced.

    Versions count from zero in each new tensor, and an allocator gives the same address again, so neither will do. A
    weak reference keeps the identity of the memory, but not the memory.
    """
    # A subclass may have no memory of its own.
    memory = StorageWeakRef(tensor.untyped_storage()) if type(tensor) is Tensor else id(tensor)
    return tensor._version, memory
