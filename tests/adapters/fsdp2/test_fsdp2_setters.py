"""FSDPModule's own methods and policies work with a strategy, too; some are newer than torch 2.11."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Case
from harness.covering import SCOPES
from harness.fsdp2 import Fsdp2
from harness.pool import Pool, device_type
from harness.training import train
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fsdp_zpp import LocalSteps, Strategy, fully_shard, invalidate, traffic

PLAIN = [Strategy(scopes, gpus_per_node=2) for scopes in SCOPES]
ZEROPP, LOCO = Strategy.zeropp(gpus_per_node=2), Strategy.loco(gpus_per_node=2)


def needs(method: str) -> pytest.MarkDecorator:
    """Skips where torch has no such method of modules."""
    return pytest.mark.skipif(not hasattr(FSDPModule, method), reason=f"this torch has no {method}")


def backwards(model: Any, step: int, synced: tuple[bool, ...], skipped: tuple[int | None, ...]) -> None:
    """One step's micro-batches; each may leave out a block."""
    for i, (sync, skip) in enumerate(zip(synced, skipped, strict=True)):
        model.set_requires_gradient_sync(sync)
        model.set_is_last_backward(sync)
        model.skipped = skip
        models.loss_of(model, models.batch(step, i)).backward()
    model.skipped = None


def two_steps(
    strategy: Strategy | None, last_synced: bool = True, finalize: Callable[[Any], None] | None = None
) -> list[dict[str, Tensor]]:
    """In a worker: the gradients of two steps, and the weights after them.

    Args:
        strategy: How the model is sharded.
        last_synced: Whether the last backward of a step synchronizes gradients.
        finalize: Ends each step; None if its last backward does.
    """
    adapter = Fsdp2()
    model: Any = adapter.make(Case(model=(("unused", True),)), strategy)
    if finalize is not None:
        model.set_manual_backward_finalization(True)
    optimizer = models.make_optimizer("sgd", model.parameters())
    steps = []
    for step in range(2):
        backwards(model, step, (False, last_synced), (1, 2))
        if finalize is not None:
            model.set_requires_gradient_sync(True)
            finalize(model)
        steps.append(adapter.full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*steps, adapter.full_weights(model)]


def manual_finalization(last_synced: bool, async_op: bool) -> None:
    """In a worker: over all strategies."""

    def finalize(model: Any) -> None:
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()

    stock = two_steps(STOCK)
    for strategy in (STOCK, *PLAIN):
        assert max(map(models.distance, two_steps(strategy, last_synced, finalize), stock)) <= 1e-6, strategy
    for strategy in (ZEROPP, LOCO):
        ours, as_ever = two_steps(strategy, last_synced, finalize), two_steps(strategy)
        assert max(map(models.distance, ours, as_ever)) == 0, strategy


@needs("set_manual_backward_finalization")
@pytest.mark.parametrize("async_op", [False, True], ids=["wait", "handle"])
@pytest.mark.parametrize("last_synced", [True, False], ids=["last synchronized", "none synchronized"])
def test_a_step_may_be_ended_by_finalize_backward(
    pool: Callable[[int], Pool], last_synced: bool, async_op: bool
) -> None:
    pool(4).run(manual_finalization, last_synced, async_op)


def storages(strategy: Strategy | None, keep: bool) -> tuple[set[int], set[int], dict[str, Tensor]]:
    """In a worker: where a block's weight lies unsharded, how large that is after each backward, and weights."""
    adapter = Fsdp2()
    model: Any = adapter.make(Case(), strategy)
    model.set_keep_unsharded_storage(keep)
    optimizer = models.make_optimizer("sgd", model.parameters())
    seen: list[Tensor] = []
    model.blocks[1].up.register_forward_pre_hook(lambda module, args: seen.append(module.weight.detach()))
    sizes = set()
    for step in range(3):
        models.loss_of(model, models.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.add(seen[-1].untyped_storage().size())
    return {weight.data_ptr() for weight in seen}, sizes, adapter.full_weights(model)


def kept_storages() -> None:
    """In a worker: over all strategies."""
    _, stock_sizes, stock_weights = storages(STOCK, keep=True)
    assert 0 not in stock_sizes
    for strategy in PLAIN:
        pointers, sizes, weights = storages(strategy, keep=True)
        assert len(pointers) == 1, strategy
        assert 0 not in sizes, strategy
        assert models.distance(weights, stock_weights) <= 1e-6, strategy
        assert storages(strategy, keep=False)[1] == {0}, strategy


@needs("set_keep_unsharded_storage")
def test_unsharded_storage_is_kept(pool: Callable[[int], Pool]) -> None:
    pool(4).run(kept_storages)


def separate_group() -> None:
    """In a worker: it would be made and not be used."""
    model: Any = Fsdp2().make(Case(), ZEROPP)
    with pytest.raises(NotImplementedError, match=r"set_separate_reduce_scatter_group\(True\) applies to torch's own"):
        model.set_separate_reduce_scatter_group(True)
    model.set_separate_reduce_scatter_group(False)


@needs("set_separate_reduce_scatter_group")
def test_a_separate_group_for_torchs_reduce_scatter_is_refused(pool: Callable[[int], Pool]) -> None:
    pool(4).run(separate_group)


def recovered(strategy: Strategy) -> dict[str, Tensor]:
    """In a worker: gradients of a step after one whose second micro-batch has failed."""
    adapter = Fsdp2()
    model: Any = adapter.make(Case(), strategy)
    backwards(model, 0, (False,), (None,))

    def fail(module: nn.Module, gradients: Any) -> None:
        raise FloatingPointError

    handle = model.blocks[1].register_full_backward_pre_hook(fail)
    with pytest.raises(FloatingPointError):
        backwards(model, 0, (False,), (None,))
    handle.remove()
    model.reset_iter_state()
    backwards(model, 1, (False, True), (1, 2))
    return adapter.full_gradients(model)


def recoveries() -> None:
    """In a worker: over strategies without codecs, against a model that nothing has failed in."""
    adapter = Fsdp2()
    fresh: Any = adapter.make(Case(), STOCK)
    backwards(fresh, 1, (False, True), (1, 2))
    for strategy in PLAIN:
        assert models.distance(recovered(strategy), adapter.full_gradients(fresh)) <= 1e-6, strategy


@needs("reset_iter_state")
def test_reset_drops_gradients_of_earlier_micro_batches(pool: Callable[[int], Pool]) -> None:
    pool(4).run(recoveries)


class Affine(nn.Module):
    """A matrix that computes in bf16 and a vector that does in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(7, 10))
        self.vector = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        assert (self.matrix.dtype, self.vector.dtype) == (torch.bfloat16, torch.float32)
        return x + (x @ self.matrix.float()).sum() * self.vector


def overridden(strategy: Strategy | None) -> list[dict[str, Tensor]]:
    """In a worker: the gradients of two steps of two micro-batches."""
    options: dict[str, Any] = {"param_dtype_override_fn": lambda p: torch.float32 if p.ndim == 1 else None}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False, **options)
    adapter = Fsdp2()
    torch.manual_seed(0)
    net: Any = nn.Sequential(Affine(), Affine()).to(models.device())
    for layer in net:
        adapter.apply(layer, strategy, mp_policy=policy)
    adapter.apply(net, strategy, mp_policy=policy)
    steps = []
    for step in range(2):
        for micro_batch in range(2):
            net.set_requires_gradient_sync(micro_batch == 1)
            net(models.batch(step, micro_batch)[:, :7].float() / 256).square().mean().backward()
        steps.append(adapter.full_gradients(net))
        net.zero_grad()
    return steps


def overrides() -> None:
    """In a worker: over strategies without codecs."""
    stock = overridden(STOCK)
    for strategy in PLAIN:
        assert max(map(models.distance, overridden(strategy), stock)) <= 1e-6, strategy


@pytest.mark.skipif(
    not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"), reason="this torch has no param_dtype_override_fn"
)
def test_overridden_dtypes_of_parameters_train_as_stock(pool: Callable[[int], Pool]) -> None:
    pool(4).run(overrides)


def override_of_frozen() -> None:
    """In a worker: a frozen base has one dtype."""
    policy = SimpleNamespace(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p: None)
    with pytest.raises(ValueError, match="mp_policy has a param_dtype_override_fn"):
        fully_shard(models.make_net(frozen=True), strategy=Strategy.mixzpp(gpus_per_node=2), mp_policy=policy)


def test_overridden_dtypes_of_a_frozen_base_are_refused(pool: Callable[[int], Pool]) -> None:
    pool(4).run(override_of_frozen)


class ByAllReduce(Fsdp2):
    """Says by set_requires_all_reduce, as with torch's HSDP, that more micro-batches follow."""

    @contextmanager
    def micro_batch(self, model: Any, last: bool, synced: bool) -> Iterator[None]:
        model.set_requires_all_reduce(last or synced)
        model.set_is_last_backward(last)
        yield


def accumulated(
    adapter: Fsdp2, strategy: Strategy, synced: bool = False
) -> tuple[dict[str, Tensor], dict[str, dict[str, int]]]:
    """In a worker: the weights after two steps of three micro-batches, and what was sent."""
    case = Case(steps=2, micro_batches=3, synced=synced)
    model = adapter.make(case, strategy)
    train(adapter, model, case)
    return adapter.full_weights(model), traffic(model)


@pytest.mark.parametrize("scopes", SCOPES)
def test_all_reduce_setter_defers_what_gradient_scopes_n_and_i_accumulate(
    pool: Callable[[int], Pool], scopes: str
) -> None:
    strategy = Strategy(scopes, gpus_per_node=2)
    setter = pool(4).run(accumulated, ByAllReduce(), strategy)
    # Where gradients are accumulated over all ranks, no hop is left to defer: each micro-batch is synchronized.
    expected = pool(4).run(accumulated, Fsdp2(), strategy, scopes[1] == "G")
    for (weights, sent), (expected_weights, expected_sent) in zip(setter, expected, strict=True):
        assert sent == expected_sent
        assert models.distance(weights, expected_weights) == 0


# ---- the event that a forward waits for


def waits_for_an_event(change: str) -> bool:
    """In a worker: whether the forward after a step, and a change, waits for an event of that step."""
    local_steps = LocalSteps(1) if change == "an exchange" else None
    model: Any = Fsdp2().make(Case(), Strategy("III", local_steps=local_steps, gpus_per_node=2))
    train(Fsdp2(), model, Case(steps=2))
    streams, event = getattr(torch, device_type()).Stream, object()
    wait_event, waited = streams.wait_event, []

    def note(self: Any, other: object) -> None:
        waited.append(other is event)
        if other is not event:
            wait_event(self, other)

    model.set_post_optim_event(event)
    if change == "invalidate":
        invalidate(model)
    elif change == "a state dict":
        model.load_state_dict(model.state_dict())
    with mock.patch.object(streams, "wait_event", note):
        models.loss_of(model, models.batch(2, 0))
    return any(waited)


@pytest.mark.parametrize("change", ["none", "invalidate", "a state dict", "an exchange"])
def test_a_forward_waits_for_changes_after_the_event_of_a_step(pool: Callable[[int], Pool], change: str) -> None:
    """The event is of before the change, so that gathers which wait for it alone could come before it."""
    assert pool(4).run(waits_for_an_event, change) == [change == "none"] * 4
