"""The Muon of docs/concepts/scopes.md, taken from there: what is measured is what users copy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_PAGE = Path(__file__).parents[2] / "docs/concepts/scopes.md"


def whole_muon(matrices: Iterable[nn.Parameter], **arguments: Any) -> torch.optim.Optimizer:
    """Make the guide's ``WholeMuon``.

    Args:
        matrices: Parameters of two dimensions that ``fully_shard`` shards.
        **arguments: Its learning rate and the like.
    """
    before, start, after = _PAGE.read_text().partition("class WholeMuon")
    code = before.rpartition("```python\n")[2] + start + after.partition("\nstrategy = ")[0]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, str(_PAGE), "exec"), names)
    optimizer: torch.optim.Optimizer = names["WholeMuon"](matrices, **arguments)
    return optimizer
