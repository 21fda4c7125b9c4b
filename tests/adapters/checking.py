"""Runs a part of a test under FSDP_ZPP_CHECK=1, for models that are made in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_zpp.adapters._torch_shard_version import CHECK


@contextmanager
def checked_weights(on: bool = True) -> Iterator[None]:
    """Have models that are made in the context compare what gathers reuse with the shards, or not."""
    before = os.environ.pop(CHECK, None)
    if on:
        os.environ[CHECK] = "1"
    try:
        yield
    finally:
        os.environ.pop(CHECK, None)
        if before is not None:
            os.environ[CHECK] = before
