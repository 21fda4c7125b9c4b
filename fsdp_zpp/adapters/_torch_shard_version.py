"""Private names of torch: which writes to a shard torch counts, and whether it is still in the same memory.

torch counts writes to the parameters and to the shards themselves. It does not count those through ``p.data``, those of
fused optimizers, those of some ``torch._foreach_*`` on GPUs, and those of most ``torch._foreach_*`` to DTensors on
CPUs. With FSDP_ZPP_CHECK=1 a version is a fingerprint of what the shards hold instead, and so differs after any write.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_zpp.collectives.fingerprint import fingerprint

_version_of = attrgetter("_version")

CHECK = "FSDP_ZPP_CHECK"
"""The environment variable that has what gathers reuse compared with the shards; see the docs of secondary shards."""


class ShardVersion:
    """Versions of a unit's shards: any two are equal if nothing was written, moved or replaced in between.

    Each new tensor counts its writes from zero, and an allocator reuses addresses, so counts and addresses alone could
    agree by chance. Weak references to the storages keep their identities from reuse without keeping their memory.

    Attributes:
        of_contents: Whether versions are fingerprints of what the shards hold.
    """

    def __init__(self) -> None:
        self.of_contents = os.environ.get(CHECK, "") not in ("", "0")
        self._storages: list[int] = []
        self._references: list[StorageWeakRef] = []
        self._moves = 0

    def of(self, memory: Sequence[Tensor], counted: Sequence[Tensor]) -> Hashable:
        """Return the version of what a unit's shards hold now.

        Args:
            memory: The gathered tensors, except subclasses without a storage of their own.
            counted: These, and the tensors through which users and optimizers write to them.
        """
        if self.of_contents:
            # Of what is counted, DTensors hold what is in the memory; other subclasses are not in it.
            subclasses = (
                each for each in counted if not isinstance(each, DTensor) and is_traceable_wrapper_subclass(each)
            )
            return tuple(fingerprint(part) for each in (*memory, *subclasses) for part in _parts(each))
        storages = [tensor.untyped_storage()._cdata for tensor in memory]
        if storages != self._storages:
            self._storages, self._moves = storages, self._moves + 1
            self._references = [StorageWeakRef(tensor.untyped_storage()) for tensor in memory]
        return self._moves, *map(_version_of, counted)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor, or those that it wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))
