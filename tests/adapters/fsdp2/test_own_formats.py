"""Weights that encode themselves for the all-gather: their bytes go through both hops, into the secondary shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK
from harness.covering import SCOPES
from harness.fsdp2 import Fsdp2
from harness.links import NONE, machine
from harness.messages import collected
from harness.pool import Pool
from harness.strategies import FOURTEEN
from harness.training import load, mean_loss, save, train
from harness.wiretap import Wiretap, sent_in
from own_formats import CASE, FORMATS, NBYTES, RowScaled, make
from torch import Tensor

from fsdp_zpp import CodecState, Int4Delta, Int8, LocalSteps, LoCo, Strategy, exchange_weights, invalidate, monitor
from fsdp_zpp.runtime.unit import named_units

ADAPTER = Fsdp2()
over_formats = pytest.mark.parametrize("kind", FORMATS)
ACCUMULATING = replace(CASE, micro_batches=2)


def trained(kind: str, strategy: Any, case: Any = ACCUMULATING) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: losses of steps, the second after an evaluation, and the weights after them."""
    model = make(kind, strategy, case)
    losses = train(ADAPTER, model, replace(case, steps=1))
    # torchao's own tensors can't be used in inference mode after a training.
    with torch.inference_mode() if kind == "rows" else torch.no_grad():
        losses.append(models.loss_of(model, models.batch(9, 0)).item())
    losses += train(ADAPTER, model, replace(case, steps=2), first_step=1)
    return losses, ADAPTER.full_weights(model)


# The stand-in by default in all scopes, but for one rank alone, where torch takes the first of several tensors only.
FORMATS_AND_SCOPES = [
    pytest.param(
        *each.values,
        scopes,
        id=f"{each.id}-{scopes}",
        marks=[*each.marks, *([] if each.id == "rows" or scopes in SCOPES else [pytest.mark.slow])],
    )
    for each in FORMATS
    for scopes in FOURTEEN
    if (each.id, scopes) != ("rows", "NNN")
]


@pytest.mark.parametrize(("kind", "scopes"), FORMATS_AND_SCOPES)
def test_training_equals_stock_bit_by_bit(pool: Callable[[int], Pool], kind: str, scopes: str) -> None:
    stock = pool(4).once(trained, kind, STOCK)
    ours = pool(4).run(trained, kind, Strategy(scopes, gpus_per_node=2))
    for (losses, weights), (expected, others) in zip(ours, stock, strict=True):
        assert losses == expected
        assert all(torch.equal(weights[name], others[name]) for name in others)


# ---- bytes


def sent_in_a_step(kind: str, strategy: Any) -> tuple[Wiretap, Any, int]:
    """In a worker: what a warm step sends, by the wiretap and by traffic(), and how often a shard was encoded.

    With traffic's figures is the monitor's of what FULL_SHARD would send between nodes.
    """
    model = make(kind, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(ADAPTER, model, replace(CASE, steps=1), optimizer=optimizer)
    before = RowScaled.encoded
    step = partial(train, ADAPTER, model, replace(CASE, steps=1), optimizer=optimizer, first_step=1)
    if strategy is STOCK:
        tap, counted = sent_in(step, model, 2, counts=False)
    else:
        with monitor(model) as watch:
            tap, counted = sent_in(step, model, 2)
            counted["full shard"] = watch.step().get("inter/full_shard_bytes")
    return tap, counted, RowScaled.encoded - before


OTHERS = 2 * 3 * (2 * 32 + 48) + 2 * 2 * 32 * 64
"""Bytes of norms, biases, embedding and head, in bf16."""
BLOCKS = 2 * 3 * (2 * 32 + 48)


@over_formats
def test_bytes_are_its_own(pool: Callable[[int], Pool], kind: str) -> None:
    stock = pool(4).run(sent_in_a_step, kind, STOCK)
    # Blocks are gathered twice, the root once; to the one other node.
    flat = (2 * (NBYTES[kind] + BLOCKS) + OTHERS - BLOCKS) // 4
    once = (NBYTES[kind] + OTHERS) // 4
    for scopes, expected in (("GGG", flat), ("IGG", once), ("IIG", once), ("NNG", once), ("III", 0)):
        ours = pool(4).run(sent_in_a_step, kind, Strategy(scopes, gpus_per_node=2))
        for (tap, counted, _), (stock_tap, _, _) in zip(ours, stock, strict=True):
            assert counted["gather"]["inter"] == expected
            assert stock_tap.total("inter", "all_gather") == flat
            assert counted["full shard"] == stock_tap.total("inter")
            if scopes != "III":  # whose reduced gradients are gathered, too
                assert tap.total("inter", "all_gather") == expected
                assert tap.total("intra", "all_gather") == counted["gather"]["intra"]


def test_a_kept_secondary_shard_is_not_encoded_again(pool: Callable[[int], Pool]) -> None:
    """Six weights, in the forward and again in the backward unless something of the first gather is kept."""
    for scopes, times in (("GGG", 12), ("IGG", 6), ("NNG", 6), ("III", 12), ("NII", 6)):
        for _, _, encoded in pool(4).run(sent_in_a_step, "rows", Strategy(scopes, gpus_per_node=2)):
            assert encoded == times


def test_units_are_sent_ahead_of_their_use(pool: Callable[[int], Pool]) -> None:
    """A small model goes in one chunk, before the first hop inside a node."""
    for tap, _, _ in pool(4).run(sent_in_a_step, "rows", Strategy("IGG", gpus_per_node=2)):
        gathers = [hop for collective, hop in tap.order if collective == "all_gather"]
        assert gathers.count("inter") == 1
        assert gathers[0] == "inter"


# ---- what changes weights, and what does not


def evaluated_after_changes(strategy: Any) -> list[float]:
    """In a worker: losses after each of the ways to change weights."""
    model, other = make("rows", strategy), make("rows", strategy)
    train(ADAPTER, other, replace(CASE, steps=2))
    losses = [mean_loss(model, 0)]
    ADAPTER.load_from(other, model, "sharded")
    losses.append(mean_loss(model, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    if strategy is not STOCK:
        invalidate(model)
    else:
        model.reshard()
    return [*losses, mean_loss(model, 0)]


@pytest.mark.parametrize("scopes", ["IGG", "NNG", "III", "GGG"])
def test_changes_outdate_them(pool: Callable[[int], Pool], scopes: str) -> None:
    ours = pool(4).run(evaluated_after_changes, Strategy(scopes, gpus_per_node=2))
    assert ours == pool(4).once(evaluated_after_changes, STOCK)
    assert len(set(ours[0])) == 3


# ---- with codecs


WITH_CODECS = {
    "zeropp": Strategy.zeropp(gpus_per_node=2),
    "Int4Delta": Strategy.zeropp(weights=Int4Delta(), gpus_per_node=2),
    "LoCo": Strategy("IIG", weights=Int8(64), gradients=Int8(64), error_feedback=LoCo(), gpus_per_node=2),
}


def logged(kind: str, strategy: Any) -> tuple[list[tuple[str, str]], list[float]]:
    """In a worker: what is logged in a training, and its losses."""
    with collected() as records:
        model = make(kind, strategy)
        losses = train(ADAPTER, model, replace(ACCUMULATING, steps=4))
    return records, losses


@pytest.mark.parametrize("name", WITH_CODECS)
@over_formats
def test_codecs_leave_them_alone_and_the_log_says_so(pool: Callable[[int], Pool], kind: str, name: str) -> None:
    strategy = WITH_CODECS[name]
    first, *others = pool(4).run(logged, kind, strategy)
    assert [records for records, _ in others] == [[]] * 3
    [(level, line)] = first[0]
    assert level == "INFO"
    assert f"weights gathered as {strategy.weights} (1 of 4 units, " in line
    assert f"weights that encode themselves gathered in their own bytes, not as {strategy.weights} (3 of 4 uni" in line
    stock = pool(4).once(logged, kind, STOCK)
    for (_, losses), (_, expected) in zip([first, *others], stock, strict=True):
        assert losses[0] == pytest.approx(expected[0], rel=1e-2)
        assert losses == pytest.approx(expected, rel=5e-2)


def test_without_a_codec_the_log_says_so_too(pool: Callable[[int], Pool]) -> None:
    ((_, line),), _ = pool(4).run(logged, "rows", Strategy("IGG", gpus_per_node=2))[0]
    assert "weights gathered in full precision; weights that encode themselves gathered in their own bytes (3" in line


def on_slow_links() -> set[str]:
    """In a worker: the nodes of a model on a machine without NVLink."""
    with machine(NONE):
        model = make("rows", Strategy.zeropp())
        train(ADAPTER, model, replace(CASE, steps=1))
        return {str(unit.ranks.topology) for unit in named_units(model)}


def test_they_are_trained_weights_and_so_each_rank_without_nvlink_is_a_node(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(on_slow_links) == [{"4 nodes x 1"}] * 4


# ---- checkpoints


def resumed(kind: str, strategy: Any, path: str, fresh: bool) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: two steps, saved; two more, by the same model or by one that goes on from there."""
    case = replace(CASE, steps=2, optimizer="adamw")
    model = make(kind, strategy, case)
    optimizer = models.make_optimizer("adamw", model.parameters())
    train(ADAPTER, model, case, optimizer=optimizer)
    save(model, optimizer, CodecState(model), path)
    if fresh:
        model = make(kind, strategy, case)
        optimizer = models.make_optimizer("adamw", model.parameters())
        load(model, optimizer, CodecState(model), path)
    losses = train(ADAPTER, model, case, optimizer=optimizer, first_step=2)
    return losses, ADAPTER.full_weights(model)


@pytest.mark.parametrize("name", ["zeropp", "LoCo"])
@over_formats
def test_a_resumed_training_equals_one_that_went_on(
    pool: Callable[[int], Pool], kind: str, name: str, tmp_path: Any
) -> None:
    runs = [pool(4).run(resumed, kind, WITH_CODECS[name], str(tmp_path / f"{fresh}"), fresh) for fresh in (False, True)]
    for (losses, weights), (expected, others) in zip(*runs, strict=True):
        assert losses == expected
        assert all(torch.equal(weights[name], others[name]) for name in others)


# ---- local steps


def local(kind: str) -> list[float]:
    """In a worker: how far weights are from those of all other ranks after an exchange."""
    model = make(kind, Strategy("III", gpus_per_node=2, local_steps=LocalSteps(2, spread=False)))
    train(ADAPTER, model, replace(CASE, steps=4))
    exchange_weights(model)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ADAPTER.full_weights(model))
    return [models.distance(gathered[0], each) for each in gathered]


@over_formats
def test_nodes_that_train_on_their_own_exchange_them(pool: Callable[[int], Pool], kind: str) -> None:
    for distances in pool(4).run(local, kind):
        assert distances == [0.0] * 4


# ---- encoded after sharding


def patched_late(strategy: Any) -> tuple[list[float], list[tuple[str, str]]]:
    """In a worker: losses of a model whose sharded tensors are taught to encode themselves, which torch allows."""
    model = ADAPTER.make(CASE, strategy)
    for block in model.blocks:
        for local in (block.up.weight._local_tensor, block.down.weight._local_tensor):
            local.fsdp_pre_all_gather = encoder_of(local)
            local.fsdp_post_all_gather = decode
    with collected() as records:
        return train(ADAPTER, model, CASE), records


def encoder_of(local: Tensor) -> Any:
    """Make the function that encodes a shard."""

    def encode(mesh: Any) -> Any:
        return (local.to(torch.float8_e5m2),), None

    return encode


def decode(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    """Make an unsharded parameter of what was gathered."""
    values = outputs[0].to(dtype)
    if out is None:
        return values, (values,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(values)
    return None


@pytest.mark.parametrize("codec", [Int8(64), None], ids=str)
@pytest.mark.parametrize("gpus_per_node", [2, 4])
def test_they_may_come_to_encode_themselves_after_sharding(
    pool: Callable[[int], Pool], codec: Any, gpus_per_node: int
) -> None:
    strategy = Strategy("NGG", weights=codec, gpus_per_node=gpus_per_node)
    ours = pool(4).run(patched_late, strategy)
    for (losses, _), (expected, _) in zip(ours, pool(4).once(patched_late, STOCK), strict=True):
        assert losses == pytest.approx(expected, rel=1e-2 if codec else 0)
    assert "encode themselves" in ours[0][1][0][1]
