"""All-gathers that start together, beside torch's own, one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import Pool
from torch import Tensor

from fsdp_zpp.collectives._torch_coalescing import AllGathers

WORLD = 4
SHAPES = {
    (3, 5): torch.float32,
    (1,): torch.bfloat16,
    (7, 2, 2): torch.int8,
    (0, 4): torch.float32,
    (2**12,): torch.float16,
    (2, 3): torch.float32,
}


def own_part(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(-9, 9, shape, dtype=torch.int8).to(device(), dtype)


def gathered_one_by_one(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts)


def gather_over_two_groups() -> None:
    torch.manual_seed(dist.get_rank())
    everyone, pair = dist.group.WORLD, dist.new_subgroups(2)[0]
    assert everyone is not None
    gathers, added = AllGathers(), []
    for shape, dtype in SHAPES.items():
        for group in (everyone, pair):
            own = own_part(shape, dtype)
            out = own.new_empty(shape[0] * group.size(), *shape[1:])
            added.append((gathers.add(out, own, group), out, own, group))
    gathers.start()
    for started, out, own, group in added:
        started.wait()
        started.wait()  # several tensors share what they wait for
        assert torch.equal(out, gathered_one_by_one(own, group))


def wait_too_early() -> None:
    gathers = AllGathers()
    assert dist.group.WORLD is not None
    added = gathers.add(torch.empty(WORLD, device=device()), torch.ones(1, device=device()), dist.group.WORLD)
    with pytest.raises(AssertionError, match="before they start"):
        added.wait()


@pytest.mark.parametrize("work", [gather_over_two_groups, wait_too_early])
def test_all_gathers_that_start_together(pool: Callable[[int], Pool], work: Callable[[], None]) -> None:
    pool(WORLD).run(work)
