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


def moved(adapter: Adapter, model: Any, step: int) -> None:
    """Change each rank's shards a little, as an optimizer does."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    for parameter in model.parameters():
        if parameter.requires_grad:
            shard = adapter.local(parameter.data)
            shard.add_(1e-3 * torch.randn(shard.shape, generator=generator).to(shard.device))


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


def followed(adapter: Adapter, dtype: torch.dtype | None, updates: int, checked: int) -> tuple[list[str], float]:
    """In a worker: digests of what a receiver holds after each update, and the mean bytes of one against bf16's.

    Args:
        adapter: The adapter.
        dtype: The dtype of what is sent.
        updates: Number of updates.
        checked: After every so many of them, it is compared with the model and with what the sender holds.
    """
    model = adapter.make(MODEL, STRATEGY)
    token, receiver = SyncToken(), DeltaReceiver()
    digests, nbytes, trained = [], 0, set()
    for step in range(updates):
        if step:
            moved(adapter, model, step)
        held = {name: tensor.clone() for name, tensor in receiver.tensors.items()}
        arrived = sent(model, token, dtype)
        for _ in receiver.updated(arrived):
            pass
        if step % checked == 0:
            truth = as_sent(model, dtype)
            assert receiver.tensors.keys() == truth.keys()
            for update in arrived:
                check_errors(held, update, receiver.tensors[update.name], truth[update.name])
            senders = held_by_sender(token)
            assert digest({name: senders[name] for name in truth}) == digest(receiver.tensors)
        if step:
            nbytes += sum(update.nbytes for update in arrived)
            trained |= {update.name for update in arrived}
        digests.append(digest(receiver.tensors))
    assert not any(name.startswith("blocks.0.") or name.endswith("shift") for name in trained), "that is not trained"
    in_bf16 = 2 * sum(tensor.numel() for name, tensor in receiver.tensors.items() if name in trained)
    return digests, nbytes / (updates - 1) / in_bf16


@over_each(adapter=WITH_FLAT, dtype={"bf16": torch.bfloat16, "fp32": None})
def test_receivers_hold_what_senders_do_after_a_hundred_updates(
    pool: Callable[[int], Pool], adapter: Adapter, dtype: torch.dtype | None
) -> None:
    results = pool(4).run(followed, adapter, dtype, 101, 25)
    assert all(result == results[0] for result in results)
    digests, share = results[0]
    assert len(set(digests)) == 101  # each update has moved the weights
    assert share <= 0.27


def trained_beside(adapter: Adapter) -> None:
    """In a worker: updates between steps of a training, of which they change nothing."""
    model, alone = (adapter.make(MODEL, STRATEGY) for _ in range(2))
    token, receiver = SyncToken(), DeltaReceiver()
    for step in range(3):
        for update in sent(model, token, torch.bfloat16):
            held = {update.name: receiver.tensors[update.name].clone()} if step else {}
            check_errors(held, update, receiver.apply(update), as_sent(model, torch.bfloat16)[update.name])
        for each in (model, alone):
            train(adapter, each, MODEL, first_step=step)
    assert models.distance(adapter.full_weights(model), adapter.full_weights(alone)) == 0


@over_adapters
def test_updates_follow_a_training(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(trained_beside, adapter)


def given_to_one_rank(adapter: Adapter) -> list[str]:
    """In a worker: the kinds of updates that two passes for one rank hand out here."""
    model = adapter.make(MODEL, STRATEGY)
    token = SyncToken()
    kinds = set()
    for step in range(2):
        for _, update in gathered_weights(model, since=token, rank=2):
            kinds.add("none" if update is None else update.kind)
        moved(adapter, model, step)
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
