"""Weight updates: a receiver holds what its trainer takes it to hold, bit for bit, near the trainer's weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import Pools
from safetensors.torch import save
from torch import Tensor

from fsdp_zpp import DeltaReceiver, OutOfSyncError, SyncToken, WeightUpdate
from fsdp_zpp.codecs import CHUNK

SHAPES = {"tiny": (7,), "scalar": (), "empty": (0, 3), "odd": (131, 257), "chunk": (CHUNK,), "more": (2, CHUNK + 1)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def walk(weights: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The weights after a step that changes them a little, and some values not at all."""

    def moved(weight: Tensor) -> Tensor:
        change = 1e-3 * torch.randn(weight.shape, generator=generator)
        change[torch.rand(weight.shape, generator=generator) < 0.5] = 0
        return (weight.float() + change).to(weight.dtype)

    return {name: moved(weight) for name, weight in weights.items()}


def start(dtype: torch.dtype) -> tuple[dict[str, Tensor], torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}, generator


def send(token: SyncToken, weights: Mapping[str, Tensor]) -> list[WeightUpdate]:
    """A pass of one process, as it arrives elsewhere."""
    return WeightUpdate.unpack(WeightUpdate.pack(update for _, update in token.updates(weights.items(), None)))


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def receive(receiver: DeltaReceiver, updates: list[WeightUpdate]) -> list[WeightUpdate]:
    for update in updates:
        receiver.apply(update)
    return updates


class InSync:
    """A token and a receiver that have all weights, and weights that have changed since."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.weights, self.generator = start(dtype)
        self.token, self.receiver = SyncToken(), DeltaReceiver()
        receive(self.receiver, send(self.token, self.weights))
        self.changed = walk(self.weights, self.generator)


def change_in(updates: list[WeightUpdate]) -> WeightUpdate:
    return next(update for update in updates if update.kind == "delta")


def by_definition(base: Tensor, payload: Tensor, block: int) -> Tensor:
    """``base`` and the changes in ``payload``, decoded value by value as the format is defined."""
    values = base.float().numpy().reshape(-1).copy()
    row = memoryview(payload.numpy().tobytes())
    for first in range(0, values.size, CHUNK):
        chunk = values[first : first + CHUNK]
        code_bytes, blocks = math.ceil(chunk.size / 2), math.ceil(chunk.size / block)
        codes_end = math.ceil(code_bytes / 16) * 16
        codes = np.frombuffer(row[:code_bytes], dtype=np.uint8)
        nibbles = np.stack([codes & 15, codes >> 4], 1).reshape(-1)[: chunk.size].astype(np.int8)
        scales = np.frombuffer(row[codes_end : codes_end + 4 * blocks], dtype=np.float32)
        signed = np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.float32)
        chunk += signed * np.repeat(scales, block)[: chunk.size]
        row = row[codes_end + math.ceil(blocks / 4) * 16 :]
    assert len(row) == 0
    return torch.from_numpy(values).view(base.shape).to(base.dtype)


@pytest.mark.parametrize(("dtype", "block"), list(zip(DTYPES, (32, 256, 32), strict=True)), ids=str)
def test_changes_are_added_as_the_format_says_and_stay_within_half_a_step(dtype: torch.dtype, block: int) -> None:
    weights, generator = start(dtype)
    token, receiver = SyncToken(block=block), DeltaReceiver()
    for step in range(4):
        held = {name: tensor.clone() for name, tensor in receiver.tensors.items()}
        updates = send(token, weights)
        for update in updates:
            now = receiver.apply(update)
            weight = weights[update.name]
            if update.kind == "whole":
                assert step == 0 or update.name in ("tiny", "scalar", "empty")
                assert same_bits(now, weight)
                continue
            assert same_bits(now, by_definition(held[update.name], update.data, block))
            change = (weight.float() - held[update.name].float()).reshape(-1)
            steps = torch.cat([part.abs().max().expand(len(part)) / 7 for part in change.split(block)])
            # A scale exceeds absmax / 7 by at most 2**-22 of it, and the sum is rounded once, to half of dtype's eps.
            bound = 0.5 * steps * (1 + 1e-6) + 0.5 * torch.finfo(dtype).eps * now.float().abs().reshape(-1) * 1.01
            error = (now.float() - weight.float()).abs().reshape(-1)
            # The largest change of a block is decoded with a relative error below 2**-15: scales have 16 bits.
            assert (error <= bound + change.abs() * 2**-15).all(), update.name
        weights = walk(weights, generator)


def test_receivers_and_trainer_hold_the_same_bits_however_updates_arrive() -> None:
    weights, generator = start(torch.bfloat16)
    token, receiver, in_place = SyncToken(), DeltaReceiver(), DeltaReceiver()
    weights["tied"] = weights["odd"]
    engine = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for number in range(20):
        updates = send(token, weights)
        loaded = dict(receiver.updated(updates))
        receive(receiver, updates)  # again, which changes nothing
        for update in updates:  # headers and data apart
            announced = json.loads(update.header)
            data = torch.empty(announced["data_shape"], dtype=getattr(torch, announced["data_dtype"]))
            apart = WeightUpdate.from_header(update.header, data.copy_(update.data))
            assert in_place.apply(apart, into=engine[update.name]) is engine[update.name]
        assert receiver.version == in_place.version == number + 1
        assert all(same_bits(loaded[name], engine[name]) for name in loaded)
        weights = walk(weights, generator)
        weights["tied"] = weights["odd"]
    # The token takes receivers to hold these: the next change is made against them.
    assert send(token, receiver.tensors) == []
    assert all(same_bits(engine[name], receiver.tensors[name]) for name in engine)
    assert receiver.tensors["tied"].data_ptr() != receiver.tensors["odd"].data_ptr()


def test_what_has_changed_alone_is_sent_in_27_hundredths_of_bf16() -> None:
    trained = torch.randn(512, 300).bfloat16()
    others = {"frozen": torch.randn(64, 64), "codes": torch.arange(9, dtype=torch.uint8)}
    token = SyncToken()
    send(token, {"trained": trained, **others})
    (update,) = send(token, walk({"trained": trained}, torch.Generator().manual_seed(1)) | others)
    assert (update.name, update.kind) == ("trained", "delta")
    assert update.nbytes <= 0.27 * trained.nbytes
    assert [u.kind for u in send(token, {"codes": others["codes"].flip(0)})] == ["whole"]


def test_passes_without_a_step_between_come_nearer() -> None:
    both = InSync()
    errors = []
    for _ in range(12):
        receive(both.receiver, send(both.token, both.changed))
        held = both.receiver.tensors
        errors.append(max((held[n] - w).abs().max().item() for n, w in both.changed.items() if w.numel()))
    assert all(later <= earlier / 7 or later == 0 for earlier, later in pairwise(errors[:4]))
    assert errors[-1] == 0
    assert send(both.token, both.changed) == []


@pytest.mark.parametrize(("dtype", "value"), list(zip(DTYPES, (math.nan, math.inf, -math.inf), strict=True)), ids=str)
def test_what_is_not_finite_arrives_and_goes_again(dtype: torch.dtype, value: float) -> None:
    both = InSync(dtype)
    both.changed["odd"][5, 5] = value
    kinds = {update.name: update.kind for update in receive(both.receiver, send(both.token, both.changed))}
    assert (kinds["odd"], kinds["more"]) == ("whole", "delta")
    assert same_bits(both.receiver.tensors["odd"], both.changed["odd"])
    healed = walk(both.weights, both.generator)
    receive(both.receiver, send(both.token, healed))
    assert same_bits(both.receiver.tensors["odd"], healed["odd"])
    assert {u.name: u.kind for u in send(both.token, walk(healed, both.generator))}["odd"] == "delta"


def test_what_a_receiver_has_no_version_for_is_noticed_and_changes_nothing() -> None:
    both, other = InSync(), SyncToken()
    held = {name: tensor.clone() for name, tensor in both.receiver.tensors.items()}
    of_late = change_in(send(both.token, both.changed))
    missed = change_in(send(both.token, walk(both.changed, both.generator)))
    send(other, both.weights)
    of_other = change_in(send(other, both.changed))  # even if versions agree
    said = "version 3 of odd changes version 2, but this receiver has version 1"
    late = DeltaReceiver()
    for receiver, update, message in (
        (both.receiver, missed, said),
        (both.receiver, of_other, "by another token"),
        (late, of_late, "has no version of it: it joined late"),
    ):
        with pytest.raises(OutOfSyncError, match=message):
            receiver.apply(update)
    assert all(same_bits(both.receiver.tensors[name], tensor) for name, tensor in held.items())
    both.token.reset()
    receive(late, send(both.token, both.weights))
    assert all(same_bits(late.tensors[name], weight) for name, weight in both.weights.items())


def test_a_pass_that_was_left_early_makes_the_next_send_everything() -> None:
    weights, generator = start(torch.float32)
    token = SyncToken()
    send(token, weights)
    for _ in token.updates(walk(weights, generator).items(), None):
        break
    assert {u.kind for u in send(token, weights)} == {"whole"}
    assert token.version == 1


def test_a_tensor_that_has_another_dtype_or_shape_now_is_sent_whole() -> None:
    token, receiver = SyncToken(), DeltaReceiver()
    for weight in (torch.randn(40, 40), torch.randn(40, 40).bfloat16(), torch.randn(40, 41).bfloat16()):
        update = receive(receiver, send(token, {"w": weight}))[0]
        assert update.kind == "whole"
        assert same_bits(receiver.tensors["w"], weight)


def test_what_is_no_update_and_tensors_and_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="are no packed weight updates"):
        WeightUpdate.unpack(b"nonsense")
    with pytest.raises(ValueError, match="a safetensors file, but no packed weight updates"):
        WeightUpdate.unpack(save({"weight": torch.zeros(2)}))
    update = send(SyncToken(), {"w": torch.zeros(4, 3)})[0]
    for header in ("model.norm.weight", '{"name": "w"}'):
        with pytest.raises(ValueError, match=f"'{header}' is no header of a weight update"):
            WeightUpdate.from_header(header, update.data)
    for data in (update.data[:2], update.data.byte()):
        with pytest.raises(ValueError, match=f"the whole update of w has data of dtype {data.dtype} and shape"):
            WeightUpdate.from_header(update.header, data)
    for into in (torch.zeros(4, 3).bfloat16(), torch.zeros(3, 4), torch.zeros(3, 4).t()):
        with pytest.raises(ValueError, match="let the receiver hold a copy"):
            DeltaReceiver().apply(update, into=into)
    for block in (16, 100, 8192):
        with pytest.raises(ValueError, match=f"block is {block}"):
            SyncToken(block=block)


# ---- ranks send together what one process would send, and none of them sends it if they disagree


def weights_of(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights after a few steps, the same on all ranks; one of them is never trained."""
    weights, generator = start(torch.float32)
    for _ in range(step):
        weights = walk(weights, generator)
    trained = {name: weight.to(device(), dtype) for name, weight in weights.items()}
    return {"frozen": torch.ones(40, 40, device=device()), **trained}


def sent(token: SyncToken, step: int, dtype: torch.dtype, group: dist.ProcessGroup | None) -> list[WeightUpdate]:
    return [update for _, update in token.updates(iter(weights_of(step, dtype).items()), group)]


def compared_with_one_process(dtype: torch.dtype) -> int:
    """In a worker: whether ranks together send the bytes that one of them alone would; the bytes this rank keeps."""
    together, alone = SyncToken(), SyncToken()
    for step in range(4):
        ours, expected = sent(together, step, dtype, dist.group.WORLD), sent(alone, step, dtype, None)
        assert step == 0 or "frozen" not in {u.name for u in ours}
        for mine, other in zip(ours, expected, strict=True):
            of_both = [(u.name, u.kind, u.version, u.since) for u in (mine, other)]
            assert of_both[0] == of_both[1]
            assert same_bits(mine.data, other.data)
    return together.nbytes


@pytest.mark.parametrize(("world", "dtype"), [(3, torch.bfloat16), (4, torch.float32)], ids=str)
def test_updates_do_not_depend_on_the_number_of_ranks(pool: Pools, dtype: torch.dtype, world: int) -> None:
    kept = pool(world).run(compared_with_one_process, dtype)
    total = sum(weight.nbytes for weight in weights_of(0, dtype).values())
    assert sum(kept) == total  # each value's copy is on one rank
    assert max(kept) <= total / world + 3 * CHUNK * dtype.itemsize


def disagree() -> tuple[list[list[str]], int]:
    """In a worker: kinds after one rank has done something alone, and the bytes that it keeps of small tensors."""
    rank, kinds = dist.get_rank(), []
    for does in ("resets", "fails at the end"):
        token = SyncToken()
        sent(token, 0, torch.float32, dist.group.WORLD)
        if does == "resets" and rank == 1:
            token.reset()
        elif does == "fails at the end":  # all took part in all collectives, but one did not see the iterator end
            updates = token.updates(weights_of(1, torch.float32).items(), dist.group.WORLD)
            for _ in range(len(SHAPES) - 1):  # the empty one has not changed
                last = next(updates)
            assert last[0] == "more"
            updates.close() if rank == 1 else list(updates)
        kinds.append([update.kind for update in sent(token, 2, torch.float32, dist.group.WORLD)])
    with pytest.raises(ValueError, match=r"block: 256 on ranks 0, 2-3, 64 on rank 1"):
        sent(SyncToken(block=64 if rank == 1 else 256), 0, torch.float32, dist.group.WORLD)
    tokens = [SyncToken(), SyncToken()]
    for token in tokens:
        sent(token, 0, torch.float32, dist.group.WORLD)
    with pytest.raises(ValueError, match=r"ranks were given different arguments: stream"):
        sent(tokens[rank // 2], 1, torch.float32, dist.group.WORLD)
    token = SyncToken()
    weights = ((str(number), torch.zeros(CHUNK, device=device())) for number in range(8))
    assert len(list(token.updates(weights, dist.group.WORLD))) == 8
    return kinds, token.nbytes


def test_ranks_that_disagree_raise_or_send_everything_together(pool: Pools) -> None:
    for kinds, nbytes in pool(4).run(disagree):
        assert kinds == [["whole"] * (len(SHAPES) + 1)] * 2
        assert nbytes == 2 * 4 * CHUNK  # of eight tensors of a chunk each: spread over ranks
