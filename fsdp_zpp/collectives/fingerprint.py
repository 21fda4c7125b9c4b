"""A fingerprint of weights, by which a copy of them is told to be of the same values."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import Tensor

CHECK = "FSDP_ZPP_CHECK"
"""The environment variable that has what gathers reuse compared with the shards; see the docs of secondary shards."""


def fingerprint(shard: Tensor) -> str:
    """A hash of the values, in which -0 and 0 are equal. Waits for the device."""
    # torch's state dict functions run an optimizer step to create its states, which may turn -0 into 0.
    values = (shard.detach() + 0.0).cpu().contiguous().view(torch.uint8)
    return f"{shard.dtype} {hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()}"


def check_is_on() -> bool:
    """Whether the user has asked for what gathers reuse to be compared with the shards, by :data:`CHECK`."""
    return os.environ.get(CHECK, "") not in ("", "0")
