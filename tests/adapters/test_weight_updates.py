"""Receivers of ``gathered_weights(model, since=token)`` follow a training, bit for bit and near its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import WITH_FLAT, over_adapters, over_each
from harness.pool import Pool
from harness.training import train
from torch import Tensor

from fsdp_zpp import DeltaReceiver, Int4Delta, Strategy, SyncToken, WeightUpdate, gathered_weights

STRATEGY = Strategy.zeropp(gpus_per_node=2, weights=Int4Delta())
MODEL = Case(model=(("width", 66), ("hidden", 91), ("vocabulary", 71), ("blocks", 2)), frozen=True, steps=1)


def sent(model: Any, token: SyncToken, dtype: torch.dtype | None) -> list[WeightUpdate]:
    """A pass, as bytes carry it."""
    return WeightUpdate.unpack(WeightUpdate.pack(u for _, u in gathered_weights(model, since=token, dtype=dtype)))


def as_sent(model: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in gathered_weights(model, dtype=dtype)}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash over all bits."""
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def held_by_sender(token: SyncToken) -> dict[str, Tensor]:
    """What all ranks' tokens together take receivers to hold."""
    # Private: only the token has it, and nothing else shows that both sides decode alike.
    parts: list[dict[str, tuple[int, Tensor]]] = [{}] * dist.get_world_size()
    own = {name: (held.values.start, held.base.cpu()) for name, held in token._sent.items()}
    dist.all_gather_object(parts, own)
    runs = {
        name: sorted((part[name] for part in parts if part[name][1].numel()), key=lambda run: run[0]) for name in own
    }
    return {name: torch.cat([values for _, values in of_name]) for name, of_name in runs.items()}


def check_errors(before: Mapping[str, Tensor], update: WeightUpdate, now: Tensor, truth: Tensor) -> None:
    """Compare a tensor with the model's: it differs by half a step of its block's changes, and by rounding."""
    if update.kind == "whole":
        assert torch.equal(now, truth)
        return
    error, change = (now.float() - truth.float()).abs(), (truth.float() - before[update.name].float()).abs().view(-1)
    half_steps = torch.cat([part.max().expand(len(part)) / 14 for part in change.split(update.block)])
    # Once to the dtype; a scale has 16 bits, and is raised by 2**-22 of it.
    rounding = torch.finfo(now.dtype).eps * now.float().abs().view(-1) / 2 * 1.01 + change * 2**-15
    assert (error.view(-1) <= half_steps * (1 + 1e-6) + rounding).all(), update.name


def followed(adapter: Adapter, dtype: torch.dtype | None) -> tuple[list[str], float]:
    """In a worker: digests of what a receiver holds between steps, and the bytes of an update against bf16's."""
    model, alone = (adapter.make(MODEL, STRATEGY) for _ in range(2))
    token, receiver = SyncToken(), DeltaReceiver()
    digests = []
    for step in range(5):
        held = {name: tensor.clone() for name, tensor in receiver.tensors.items()}
        arrived = sent(model, token, dtype)
        for _ in receiver.updated(arrived):
            pass
        truth, senders = as_sent(model, dtype), held_by_sender(token)
        assert receiver.tensors.keys() == truth.keys()
        for update in arrived:
            check_errors(held, update, receiver.tensors[update.name], truth[update.name])
        digests.append(digest(receiver.tensors))
        assert digest({name: senders[name] for name in truth}) == digests[-1]
        for each in (model, alone):
            train(adapter, each, MODEL, first_step=step)
    assert models.distance(adapter.full_weights(model), adapter.full_weights(alone)) == 0, "updates change the training"
    trained = {update.name for update in arrived}
    assert not any(name.startswith("blocks.0.") or name.endswith("shift") for name in trained), "that is not trained"
    in_bf16 = 2 * sum(receiver.tensors[name].numel() for name in trained)
    return digests, sum(update.nbytes for update in arrived) / in_bf16


@over_each(adapter=WITH_FLAT, dtype={"bf16": torch.bfloat16, "fp32": None})
def test_receivers_hold_what_senders_do_after_each_step(
    pool: Callable[[int], Pool], adapter: Adapter, dtype: torch.dtype | None
) -> None:
    results = pool(4).run(followed, adapter, dtype)
    assert all(result == results[0] for result in results)
    digests, share = results[0]
    assert len(set(digests)) == 5  # each update has moved the weights
    assert share <= 0.27


def given_to_one_rank(adapter: Adapter) -> list[str]:
    """In a worker: the kinds of updates that two passes for one rank hand out here."""
    model = adapter.make(MODEL, STRATEGY)
    token = SyncToken()
    kinds = set()
    for step in range(2):
        for _, update in gathered_weights(model, since=token, rank=2):
            kinds.add("none" if update is None else update.kind)
        train(adapter, model, MODEL, first_step=step)
    return sorted(kinds)


@over_adapters
def test_one_rank_can_have_the_updates(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(given_to_one_rank, adapter) == [["none"], ["none"], ["delta", "whole"], ["none"]]


def with_a_wrong_token(adapter: Adapter) -> None:
    model = adapter.make(MODEL, STRATEGY)
    wrong: Any = "yesterday"
    with pytest.raises(TypeError, match="since must be a SyncToken, which notes what receivers hold, or None, got"):
        gathered_weights(model, since=wrong if dist.get_rank() == 1 else SyncToken())
    with pytest.raises(ValueError, match="called gathered_weights with other arguments or another model than rank 0"):
        gathered_weights(model, since=None if dist.get_rank() else SyncToken())


@over_adapters
def test_what_is_no_token_is_refused_on_every_rank(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(with_a_wrong_token, adapter)
