"""Counts the bytes of tensors that a block of code allocates and that are alive."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """A context that knows the bytes that operations in it have allocated for plain tensors: ``now``, and at ``peak``.

    Gloo's threads let go of a tensor shortly after the wait. They get ten seconds in all before ``bound`` is exceeded.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._patience = 10.0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs or {})
        for storage in _storages(result):
            if storage._cdata not in given | self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        while self.now + nbytes > self.bound and self._patience > 0:
            began = time.monotonic()
            os.sched_yield()
            self._patience -= time.monotonic() - began
        self._known.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [value for value in tree_iter(values) if type(value) in (Tensor, torch.nn.Parameter)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta"]
