"""What ranks send together is what one process would send, and none of them sends it if they disagree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import Pool
from torch import Tensor

from fsdp_zpp import SyncToken, WeightUpdate
from fsdp_zpp.codecs.weight_changes import CHUNK

SHAPES = {"bias": (5,), "scalar": (), "empty": (0,), "odd": (129, 257), "large": (11 * CHUNK + 3,), "chunk": (CHUNK,)}


def weights_of(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights after a few steps, the same on all ranks; one of them is never trained."""
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for _ in range(step):
        start = {name: weight + 1e-3 * torch.randn(weight.shape, generator=generator) for name, weight in start.items()}
    trained = {name: weight.to(device(), dtype) for name, weight in start.items()}
    return {"frozen": torch.ones(40, 40, device=device()), **trained}


def sent(token: SyncToken, step: int, dtype: torch.dtype, group: dist.ProcessGroup | None) -> list[WeightUpdate]:
    return [update for _, update in token.updates(iter(weights_of(step, dtype).items()), group)]


def compared_with_one_process(dtype: torch.dtype) -> int:
    """In a worker: whether ranks together send the bytes that one of them alone would; the bytes this rank keeps."""
    together, alone = SyncToken(), SyncToken()
    for step in range(4):
        ours, expected = sent(together, step, dtype, dist.group.WORLD), sent(alone, step, dtype, None)
        assert [(u.name, u.kind, u.version, u.since) for u in ours] == [
            (u.name, u.kind, u.version, u.since) for u in expected
        ]
        assert step == 0 or "frozen" not in {u.name for u in ours}
        for mine, other in zip(ours, expected, strict=True):
            assert torch.equal(mine.data.reshape(-1).view(torch.uint8), other.data.reshape(-1).view(torch.uint8))
    return together.nbytes


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_do_not_depend_on_the_number_of_ranks(
    pool: Callable[[int], Pool], dtype: torch.dtype, world: int
) -> None:
    kept = pool(world).run(compared_with_one_process, dtype)
    total = sum(weight.nbytes for weight in weights_of(0, dtype).values())
    assert sum(kept) == total  # each value's copy is on one rank
    assert max(kept) <= total / world + 3 * CHUNK * dtype.itemsize


def after_one_rank_does(what: str) -> list[str]:
    """In a worker: the kinds of updates of a pass, after one rank has done something that the others have not."""
    token = SyncToken()
    sent(token, 0, torch.float32, dist.group.WORLD)
    if dist.get_rank() == 1:
        if what == "resets":
            token.reset()
        elif what == "comes with a new token":
            token = SyncToken()
    if what == "fails at the end":  # all took part in all collectives, but one did not see the iterator end
        updates = token.updates(weights_of(1, torch.float32).items(), dist.group.WORLD)
        for _ in range(len(SHAPES) - 1):  # the empty one has not changed
            last = next(updates)
        if dist.get_rank() == 1:
            updates.close()
        else:
            assert next(updates, None) is None
        assert last[0] == "chunk"
    return [update.kind for update in sent(token, 2, torch.float32, dist.group.WORLD)]


@pytest.mark.parametrize("what", ["resets", "comes with a new token", "fails at the end"])
def test_all_ranks_send_everything_if_one_must(pool: Callable[[int], Pool], what: str) -> None:
    assert pool(4).run(after_one_rank_does, what) == [["whole"] * (len(SHAPES) + 1)] * 4


def disagree() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"block: 256 on ranks 0, 2-3, 64 on rank 1"):
        sent(SyncToken(block=64 if rank == 1 else 256), 0, torch.float32, dist.group.WORLD)
    tokens = [SyncToken(), SyncToken()]
    for token in tokens:
        sent(token, 0, torch.float32, dist.group.WORLD)
    with pytest.raises(ValueError, match=r"ranks were given different arguments: stream"):
        sent(tokens[rank // 2], 1, torch.float32, dist.group.WORLD)


def test_ranks_that_pass_different_tokens_raise_together(pool: Callable[[int], Pool]) -> None:
    pool(4).run(disagree)


@pytest.mark.parametrize("block", [16, 100, 8192])
def test_a_block_that_no_codec_has_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match=f"block is {block}"):
        SyncToken(block=block)


def bytes_of_small_tensors() -> int:
    """In a worker: the bytes that this rank keeps of eight tensors of a chunk each."""
    token = SyncToken()
    weights = ((str(number), torch.zeros(CHUNK, device=device())) for number in range(8))
    assert len(list(token.updates(weights, dist.group.WORLD))) == 8
    return token.nbytes


def test_small_tensors_are_spread_over_ranks(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(bytes_of_small_tensors) == [2 * 4 * CHUNK] * 4
