"""NF4's table of levels is on a device as soon as a base is, so that no forward waits for its copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import lora, models
from harness.pool import Pool

from fsdp_zpp import NF4, Int8, quantize_frozen_params
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.frozen.base import FrozenBase
from fsdp_zpp.kernels.nf4 import LEVELS, levels_on


def copies_of_levels(codec: Codec) -> tuple[int, int]:
    """In a worker: how many tables of levels there are after a base is prepared, and after a step."""
    levels_on.cache_clear()
    net = lora.make_net(width=256, hidden=688, vocabulary=512)
    quantize_frozen_params(net, codec)
    for base in FrozenBase.below(net):
        base.prepare()
    prepared = levels_on.cache_info().misses
    models.loss_of(net, models.batch(0, 0)).backward()
    return prepared, levels_on.cache_info().misses


@pytest.mark.parametrize("codec", [NF4(64), NF4(128), Int8(64)], ids=str)
def test_a_base_that_is_prepared_has_the_levels_on_its_device(pool: Callable[[int], Pool], codec: Codec) -> None:
    expected = int(isinstance(codec, NF4))
    assert pool(2).run(copies_of_levels, codec) == [(expected, expected)] * 2


def test_levels_are_those_of_the_paper_whatever_mode_asks_first() -> None:
    levels_on.cache_clear()
    with torch.inference_mode():
        levels = levels_on(torch.device("cpu"))
    assert not levels.is_inference()
    torch.testing.assert_close(levels, torch.tensor(LEVELS), rtol=0, atol=0)
