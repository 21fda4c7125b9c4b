"""Private names of torch: which writes to a shard torch counts, and whether it is still in the same memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter

from torch import Tensor

from fsdp_zpp.torch_internals import Needed, check_needed

_NEEDED = (
    Needed("torch.multiprocessing.reductions", "StorageWeakRef", "noticing that shards were moved"),
    Needed("torch.UntypedStorage", "_cdata", "the same"),
    Needed("torch.Tensor", "_version", "noticing writes to the shards"),
)
check_needed("adapters", _NEEDED)

from torch.multiprocessing.reductions import StorageWeakRef

_version_of = attrgetter("_version")


class ShardVersion:
    """Versions of a unit's shards: any two are equal if nothing was written, moved or replaced in between.

    Each new tensor counts its writes from zero, and an allocator reuses addresses, so counts and addresses alone could
    agree by chance. Weak references to the storages keep their identities from reuse without keeping their memory.
    """

    def __init__(self) -> None:
        self._storages: list[int] = []
        self._references: list[StorageWeakRef] = []
        self._moves = 0

    def of(self, memory: Sequence[Tensor], counted: Sequence[Tensor]) -> Hashable:
        """The version of what a unit's shards hold now.

        Args:
            memory: The tensors that are gathered, but for subclasses without a storage of their own.
            counted: These, and the tensors through which users and optimizers write to them.
        """
        storages = [tensor.untyped_storage()._cdata for tensor in memory]
        if storages != self._storages:
            self._storages, self._moves = storages, self._moves + 1
            self._references = [StorageWeakRef(tensor.untyped_storage()) for tensor in memory]
        return self._moves, *map(_version_of, counted)
