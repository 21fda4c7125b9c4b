"""What computes on this machine."""

from __future__ import annotations

import torch


def accelerator() -> torch.device | None:
    """The kind of accelerator that this machine has; None if it computes on the CPU.

    A torch that was built for an accelerator often runs where there is none, and names it all the same if not asked to
    look.
    """
    return torch.accelerator.current_accelerator(check_available=True)
