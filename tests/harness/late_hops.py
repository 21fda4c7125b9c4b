"""Hops that take long on a GPU, so that a stream which reads what they make, and does not wait, reads wrong values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fsdp_zpp.collectives.hops import Hop

CYCLES = 20_000_000
"""Of a GPU, for each hop: about a hundredth of a second, in which the host starts what follows."""


@contextmanager
def late_hops(*levels: str) -> Iterator[None]:
    """In a worker: hops of these levels, ``"inter"`` or ``"intra"``, take long. On a CPU, nothing is different."""
    exchange = Hop._exchange

    def late(self: Hop, collective: Callable[..., Any], received: Tensor, sent: Tensor) -> None:
        if sent.is_cuda and self.level in levels:
            torch.cuda._sleep(CYCLES)
        exchange(self, collective, received, sent)

    with patch.object(Hop, "_exchange", late):
        yield
