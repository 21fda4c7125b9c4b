"""What the examples' trainers have in common: buckets of updates, and refusals that every rank hears of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import requests
import torch.distributed as dist

from fsdp_zpp import SyncToken, WeightUpdate

BUCKET = 256 * 2**20
"""Bytes of a bucket."""


def buckets(updates: Iterable[tuple[str, WeightUpdate]], nbytes: int = BUCKET) -> Iterator[list[WeightUpdate]]:
    """Yield lists of updates, of at most ``nbytes`` together or of one larger update."""
    bucket: list[WeightUpdate] = []
    size = 0
    for _, update in updates:
        if bucket and size + update.nbytes > nbytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(update)
        size += update.nbytes
    if bucket:
        yield bucket


class EngineCalls:
    """Calls of an engine by rank 0 in the course of a pass, which every rank iterates to its end.

    After the first call that fails, no more are made; the other ranks would hang if rank 0 raised before the end.
    """

    def __init__(self) -> None:
        self._refusal: str | None = None

    def __call__(self, call: Callable[..., object], *arguments: object) -> None:
        """Call the engine, if this is rank 0 and nothing has failed."""
        if dist.get_rank() or self._refusal is not None:
            return
        try:
            call(*arguments)
        except requests.RequestException as error:
            self._refusal = f"{error} {'' if error.response is None else error.response.text}"

    def finish(self, token: SyncToken | None = None) -> None:
        """Raise on every rank if a call has failed; the next pass with ``token`` then sends whole tensors."""
        refusals = [self._refusal]
        dist.broadcast_object_list(refusals, src=0)
        if refusals[0] is not None:
            if token is not None:
                token.reset()
            raise RuntimeError(f"the engine did not take the weights: {refusals[0]}")
