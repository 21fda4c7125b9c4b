"""A frozen base that is saved, and calls that files make fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import frozen_files as files, models
from torch import nn

from fsdp_zpp import load_frozen_params, quantize_frozen_params, save_frozen_params


def save(folder: Path, **arguments: Any) -> Path:
    """A saved base."""
    base = files.make_base(**arguments)
    quantize_frozen_params(base, files.CODEC)
    save_frozen_params(base, folder)
    return folder


def refused(net: nn.Module, load: Callable[[nn.Module], Any], *messages: str) -> None:
    """Assert that a call is refused, names all of ``messages``, and leaves the net alone."""
    before = files.snapshot(net)
    with pytest.raises(ValueError, match=re.escape(messages[0])) as error:
        load(net)
    for message in messages:
        assert message in str(error.value)
    assert files.snapshot(net) == before


def loading(folder: Path) -> Callable[[nn.Module], Any]:
    return lambda net: load_frozen_params(net, folder)


def quantizing(checkpoint: Any) -> Callable[[nn.Module], Any]:
    return lambda net: quantize_frozen_params(net, files.CODEC, checkpoint=checkpoint)


EITHER = pytest.mark.parametrize("make", [files.make_base, files.make_empty], ids=["with values", "on meta"])
Make = Callable[..., models.Net]
