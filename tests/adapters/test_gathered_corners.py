"""``gathered_weights`` where it may be called: amid accumulation, twice at once, compiled, with tokens of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import SCOPES, WITH_FLAT, over_adapters, over_each
from harness.pool import Pool, device_type
from harness.training import train
from test_gathered_weights import assert_same, full_state
from torch import Tensor, nn

from fsdp_zpp import DeltaReceiver, Int8, Strategy, SyncToken, gathered_weights, quantize_frozen_params

ZEROPP = Strategy.zeropp(gpus_per_node=2)


def amid_accumulation(adapter: Adapter, scopes: str) -> float:
    """In a worker: the distance from a training without it, and at each moment what it hands out."""
    case, trained = Case(micro_batches=3, steps=2), []
    for asked in (False, True):
        model = adapter.make(case, Strategy(scopes, gpus_per_node=2))
        optimizer = models.make_optimizer("sgd", model.parameters())
        for step in range(2):
            for micro_batch in range(3):
                with adapter.micro_batch(model, micro_batch == 2, False):
                    loss = models.loss_of(model, models.batch(step, micro_batch))
                    if asked and micro_batch == 0:
                        dict(gathered_weights(model))  # between a forward and its backward
                    loss.backward()
                if asked:
                    weights = dict(gathered_weights(model))
            if asked:
                assert_same(weights, full_state(model))
            optimizer.step()
            optimizer.zero_grad()
        trained.append(adapter.full_weights(model))
    return models.distance(*trained)


@over_each(adapter=WITH_FLAT, scopes=SCOPES)
def test_accumulated_gradients_stay(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    assert pool(4).run(amid_accumulation, adapter, scopes) == [0.0] * 4


def two_at_once(adapter: Adapter) -> None:
    """In a worker: two iterators in turn, of which one is left half-way."""
    model = adapter.make(Case(), ZEROPP)
    train(adapter, model, Case(steps=1))
    expected = full_state(model)
    one, other = gathered_weights(model), gathered_weights(model, dtype=torch.bfloat16)
    first: dict[str, Tensor] = {}
    for count, (name, weight) in enumerate(one):
        first[name] = weight
        if count < 4:
            name, weight = next(other)
            assert torch.equal(weight, expected[name].to(weight.device, torch.bfloat16))
    assert_same(first, expected)
    other.close()  # type: ignore[attr-defined]  # it is a generator
    assert_same(dict(gathered_weights(model)), expected)


@over_adapters
def test_two_iterators_may_run_at_once(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(two_at_once, adapter)


class WithExtraState(nn.Linear):
    """A layer that has an object for state dicts."""

    def get_extra_state(self) -> Any:
        return {"scale": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def with_extra_state(adapter: Adapter) -> None:
    """In a worker: what modules have for state dicts beside tensors."""
    net: Any = models.make_net()
    net.blocks[1].up = WithExtraState(22, 37).to(models.device())
    model = adapter.shard(net, Case(), ZEROPP)
    state = full_state(model)
    [extra] = [name for name, value in state.items() if not isinstance(value, Tensor)]
    assert extra == "blocks.1.up._extra_state"
    assert_same(dict(gathered_weights(model)), {name: value for name, value in state.items() if name != extra})


@over_adapters
def test_extra_state_is_left_out(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(with_extra_state, adapter)


def compiled(adapter: Adapter) -> None:
    """In a worker: blocks compiled in place, or the whole model."""
    torch._dynamo.reset()
    net = models.make_net()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    model = adapter.shard(net, Case(), ZEROPP)
    models.loss_of(model, models.batch(0, 0)).backward()
    assert_same(dict(gathered_weights(model)), full_state(model))
    wrapped = torch.compile(model, backend="aot_eager")
    assert_same(dict(gathered_weights(wrapped)), dict(gathered_weights(model)))


@over_adapters
def test_compiled_models_are_handed_out_by_their_own_names(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(compiled, adapter)


def with_another_models_token(adapter: Adapter) -> None:
    """In a worker: a token goes on with a model of other shapes and names, then with the first one again."""
    small, large = (adapter.make(Case(model=(("blocks", blocks), ("width", 8 * blocks))), ZEROPP) for blocks in (2, 3))
    token, receiver = SyncToken(), DeltaReceiver()
    for model in (small, large, small):
        for name, weight in receiver.updated(update for _, update in gathered_weights(model, since=token)):
            assert weight.shape == dict(receiver.tensors)[name].shape
        for name, weight in gathered_weights(model):
            assert receiver.tensors[name].shape == weight.shape
            assert torch.allclose(receiver.tensors[name], weight, atol=1.0), name
    assert token.version == 3


@over_adapters
def test_a_token_of_another_model_sends_what_differs(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(with_another_models_token, adapter)


def with_an_older_token(adapter: Adapter) -> None:
    """In a worker: a copy of a token from before the last pass, on one rank."""
    model = adapter.make(Case(), ZEROPP)
    token = SyncToken()
    list(gathered_weights(model, since=token))
    older = copy.deepcopy(token)
    list(gathered_weights(model, since=token))
    with pytest.raises(ValueError, match="ranks were given different arguments: version"):
        list(gathered_weights(model, since=older if dist.get_rank() == 2 else token))
    assert list(gathered_weights(model, since=token)) == []  # nothing was sent, so the token is as it was


@over_adapters
def test_an_older_token_on_one_rank_is_refused_on_all(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(with_an_older_token, adapter)


def left_by_one(adapter: Adapter) -> str:
    """In a worker: one rank leaves half-way, and does not come back."""
    model = adapter.make(Case(), ZEROPP, dist.new_group(timeout=timedelta(seconds=5)))
    weights = gathered_weights(model)
    next(weights)
    if dist.get_rank() == 1:
        return "left"
    with pytest.raises(RuntimeError):
        for _ in weights:
            pass
    return "raised"


@pytest.mark.skipif(device_type() == "cuda", reason="NCCL's watchdog ends the process instead of raising")
@over_adapters
def test_a_rank_that_leaves_alone_is_an_error_on_the_others_within_the_timeout(adapter: Adapter) -> None:
    pool = Pool(4)
    assert pool.run(left_by_one, adapter) == ["raised", "left", "raised", "raised"]
    pool.stop(kill=True)


def frozen_base(adapter: Adapter) -> None:
    """In a worker: a quantized base with ties, cast."""
    net: Any = models.make_net(tied=True, width=64, hidden=96)
    net.requires_grad_(False)
    for block in net.blocks:
        block.norm.requires_grad_(True)
    quantize_frozen_params(net, Int8(64), placement="G", gpus_per_node=2)
    model = adapter.shard(net, Case(), ZEROPP)
    exact, cast = dict(gathered_weights(model)), dict(gathered_weights(model, dtype=torch.bfloat16))
    assert torch.equal(exact["head.weight"], exact["embedding.weight"])
    assert_same(cast, {name: value.bfloat16() for name, value in exact.items()})


@over_adapters
def test_a_quantized_base_is_cast_from_its_decoded_values(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(frozen_base, adapter)
