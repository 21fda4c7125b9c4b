"""A receiver holds what its trainer takes it to hold, bit for bit, and that stays near the trainer's weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from fsdp_zpp import DeltaReceiver, OutOfSyncError, SyncToken, WeightUpdate
from fsdp_zpp.codecs.weight_changes import CHUNK

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


@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_are_added_as_the_format_says_and_stay_within_half_a_step(dtype: torch.dtype, block: int) -> None:
    weights, generator = start(dtype)
    token, receiver = SyncToken(block=block), DeltaReceiver()
    for step in range(12):
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


def test_receiver_and_trainer_hold_the_same_bits_for_a_hundred_updates() -> None:
    weights, generator = start(torch.bfloat16)
    token, receiver, in_place = SyncToken(), DeltaReceiver(), DeltaReceiver()
    engine = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    late = SyncToken()
    for _ in range(100):
        updates = send(token, weights)
        loaded = dict(receiver.updated(updates))
        for update in updates:
            assert in_place.apply(update, into=engine[update.name]) is engine[update.name]
        assert all(same_bits(loaded[name], engine[name]) for name in loaded)
        weights = walk(weights, generator)
    # What the token takes receivers to hold: the next change is made against it.
    again = {update.name: update for update in send(token, receiver.tensors)}
    assert not again
    assert all(same_bits(engine[name], receiver.tensors[name]) for name in weights)
    assert {update.kind for update in send(late, weights)} == {"whole"}


def test_changes_take_27_hundredths_of_bf16() -> None:
    weights = {"matrix": torch.randn(512, 300).bfloat16(), "norm": torch.randn(300).bfloat16()}
    token = SyncToken()
    send(token, weights)
    updates = send(token, walk(weights, torch.Generator().manual_seed(1)))
    assert {update.kind for update in updates} == {"delta"}
    assert sum(update.nbytes for update in updates) <= 0.27 * sum(weight.nbytes for weight in weights.values())


def test_what_has_not_changed_is_not_sent() -> None:
    frozen, trained = torch.randn(64, 64), torch.randn(64, 64)
    token = SyncToken()
    codes = torch.arange(9, dtype=torch.uint8)
    send(token, {"frozen": frozen, "trained": trained, "codes": codes})
    assert [u.name for u in send(token, {"frozen": frozen, "trained": trained + 1e-3, "codes": codes})] == ["trained"]
    assert [u.kind for u in send(token, {"codes": codes.flip(0)})] == ["whole"]


def test_passes_without_a_step_between_come_nearer() -> None:
    weights, generator = start(torch.float32)
    token, receiver = SyncToken(), DeltaReceiver()
    for _ in receiver.updated(send(token, weights)):
        pass
    weights = walk(weights, generator)
    errors = []
    for _ in range(12):
        for _ in receiver.updated(send(token, weights)):
            pass
        errors.append(max((receiver.tensors[n] - w).abs().max().item() for n, w in weights.items() if w.numel()))
    assert all(later <= earlier / 7 or later == 0 for earlier, later in pairwise(errors[:4]))
    assert errors[-1] == 0
    assert send(token, weights) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_arrives_and_goes_again(dtype: torch.dtype, value: float) -> None:
    weights, generator = start(dtype)
    token, receiver = SyncToken(), DeltaReceiver()
    dict(receiver.updated(send(token, weights)))
    broken = walk(weights, generator)
    broken["odd"][5, 5] = value
    kinds = {update.name: update.kind for update in receive_all(receiver, send(token, broken))}
    assert kinds["odd"] == "whole"
    assert kinds["more"] == "delta"
    assert same_bits(receiver.tensors["odd"], broken["odd"])
    healed = walk(weights, generator)
    receive_all(receiver, send(token, healed))
    assert same_bits(receiver.tensors["odd"], healed["odd"])
    assert {u.name: u.kind for u in send(token, walk(healed, generator))}["odd"] == "delta"


def receive_all(receiver: DeltaReceiver, updates: list[WeightUpdate]) -> list[WeightUpdate]:
    for update in updates:
        receiver.apply(update)
    return updates


def test_a_late_receiver_is_told_to_ask_for_everything() -> None:
    weights, generator = start(torch.float32)
    token, receiver = SyncToken(), DeltaReceiver()
    send(token, weights)
    updates = [u for u in send(token, walk(weights, generator)) if u.kind == "delta"]
    with pytest.raises(OutOfSyncError, match="has no version of it: it joined late"):
        receiver.apply(updates[0])
    token.reset()
    receive_all(receiver, send(token, weights))
    assert all(same_bits(receiver.tensors[name], weight) for name, weight in weights.items())


def test_a_missed_update_is_noticed_and_changes_nothing() -> None:
    weights, generator = start(torch.float32)
    token, receiver = SyncToken(), DeltaReceiver()
    receive_all(receiver, send(token, weights))
    missed = walk(weights, generator)
    send(token, missed)
    held = {name: tensor.clone() for name, tensor in receiver.tensors.items()}
    update = next(u for u in send(token, walk(missed, generator)) if u.kind == "delta")
    with pytest.raises(OutOfSyncError, match=r"version 3 of odd changes version 2, but this receiver has version 1"):
        receiver.apply(update)
    assert all(same_bits(receiver.tensors[name], tensor) for name, tensor in held.items())


def test_another_tokens_changes_are_refused_even_if_versions_agree() -> None:
    weights, generator = start(torch.float32)
    first, second, receiver = SyncToken(), SyncToken(), DeltaReceiver()
    receive_all(receiver, send(first, weights))
    send(second, weights)
    update = next(u for u in send(second, walk(weights, generator)) if u.kind == "delta")
    with pytest.raises(OutOfSyncError, match="by another token"):
        receiver.apply(update)


def test_an_update_that_arrives_twice_is_applied_once() -> None:
    weights, generator = start(torch.float32)
    token, receiver = SyncToken(), DeltaReceiver()
    receive_all(receiver, send(token, weights))
    updates = send(token, walk(weights, generator))
    receive_all(receiver, updates)
    held = {name: tensor.clone() for name, tensor in receiver.tensors.items()}
    receive_all(receiver, updates)
    assert receiver.version == 2
    assert all(same_bits(receiver.tensors[name], tensor) for name, tensor in held.items())


def test_a_pass_that_was_left_early_makes_the_next_send_everything() -> None:
    weights, generator = start(torch.float32)
    token = SyncToken()
    send(token, weights)
    for _ in token.updates(walk(weights, generator).items(), None):
        break
    assert {u.kind for u in send(token, weights)} == {"whole"}
    assert token.version == 1


def test_headers_and_data_travel_apart() -> None:
    weights, generator = start(torch.bfloat16)
    token, receiver = SyncToken(), DeltaReceiver()
    for current in (weights, walk(weights, generator)):
        for update in send(token, current):
            announced = json.loads(update.header)
            data = torch.empty(announced["data_shape"], dtype=getattr(torch, announced["data_dtype"]))
            data.copy_(update.data)
            receiver.apply(WeightUpdate.from_header(update.header, data))
    assert receiver.version == 2


def test_tied_tensors_are_packed() -> None:
    weight = torch.randn(40, 40)
    token, receiver = SyncToken(), DeltaReceiver()
    for current in (weight, weight + 1e-3):
        receive_all(receiver, send(token, {"embedding": current, "head": current}))
        assert same_bits(receiver.tensors["embedding"], receiver.tensors["head"])
        assert receiver.tensors["embedding"].data_ptr() != receiver.tensors["head"].data_ptr()


def test_a_tensor_that_has_another_dtype_or_shape_now_is_sent_whole() -> None:
    token, receiver = SyncToken(), DeltaReceiver()
    for weight in (torch.randn(40, 40), torch.randn(40, 40).bfloat16(), torch.randn(40, 41).bfloat16()):
        update = receive_all(receiver, send(token, {"w": weight}))[0]
        assert update.kind == "whole"
        assert same_bits(receiver.tensors["w"], weight)


def test_what_is_no_update_is_refused() -> None:
    with pytest.raises(ValueError, match="are no packed weight updates"):
        WeightUpdate.unpack(b"nonsense")
    with pytest.raises(ValueError, match="a safetensors file, but no packed weight updates"):
        WeightUpdate.unpack(save({"weight": torch.zeros(2)}))
    update = send(SyncToken(), {"w": torch.zeros(3, 3)})[0]
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is no header of a weight update"):
        WeightUpdate.from_header("model.norm.weight", update.data)
    with pytest.raises(ValueError, match="is no header of a weight update"):
        WeightUpdate.from_header('{"name": "w"}', update.data)
    with pytest.raises(ValueError, match=r"the whole update of w has data of dtype torch\.float32 and shape"):
        WeightUpdate.from_header(update.header, update.data[:2])
    with pytest.raises(ValueError, match=r"the whole update of w has data of dtype torch\.uint8"):
        WeightUpdate.from_header(update.header, update.data.byte())


def test_a_tensor_that_is_not_alike_is_refused() -> None:
    update = send(SyncToken(), {"w": torch.zeros(4, 3)})[0]
    for into in (torch.zeros(4, 3).bfloat16(), torch.zeros(3, 4), torch.zeros(3, 4).t()):
        with pytest.raises(ValueError, match="let the receiver hold a copy"):
            DeltaReceiver().apply(update, into=into)
