"""The reduction by itself, as a comm hook of stock strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import messages, models
from harness.adapter import STOCK, Case, Fsdp1
from harness.messages import Refusal, Reply, assert_refused, collected
from harness.pool import Pool
from harness.strategies import COARSE
from harness.training import load, save, train, trained_weights
from harness.wiretap import Sent, sent_in
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy

from fsdp_zpp import CodecState, Int4, Int8, LoCo, QuantizedReduceState, Strategy, quantized_reduce_hook

FSDP1 = Fsdp1()


def hooked(state: QuantizedReduceState, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> FSDP:
    """In a worker: a net under a stock strategy with the hook."""
    model = FSDP1.make(Case(), strategy)
    model.register_comm_hook(state, quantized_reduce_hook)
    return model


def first_backward(strategy: ShardingStrategy) -> tuple[float, Sent]:
    """In a worker: the distance of the gradient from one without the hook, and what the backward sends."""
    model, stock = hooked(QuantizedReduceState(Int8(32), gpus_per_node=2), strategy), FSDP1.make(Case(), STOCK)
    sent = sent_in(lambda: models.loss_of(model, models.batch(0, 0)).backward(), model, 2)
    models.loss_of(stock, models.batch(0, 0)).backward()
    return models.distance(*map(FSDP1.full_gradients, (model, stock))), sent


def test_gradients_under_stock_strategies_are_near_those_without_the_hook_and_are_counted(
    pool: Callable[[int], Pool],
) -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        for distance, (tap, own) in pool(4).run(first_backward, strategy):
            assert distance <= 0.03
            assert own["reduce"] == {hop: tap.total(hop, "all_to_all") for hop in ("inter", "intra")}
            assert own["reduce"]["inter"] > 0
            assert own["gather"] == {"inter": 0, "intra": 0}
            assert tap.total("inter", "reduce_scatter") == 0


def of_a_pair() -> QuantizedReduceState:
    """In a worker: a state made for two of the four ranks."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return QuantizedReduceState(Int4(128), gpus_per_node=1, process_group=pairs[dist.get_rank() // 2])


def on_a_strategy() -> None:
    """Register the hook where a strategy owns the reduction."""
    model = FSDP1.make(Case(), Strategy.zeropp(gpus_per_node=2))
    model.register_comm_hook(QuantizedReduceState(Int4(128), gpus_per_node=2), quantized_reduce_hook)


REFUSALS: dict[str, Refusal] = {
    "no codec": (lambda: QuantizedReduceState(4), TypeError, "codec must be a codec"),
    "state layout": (lambda: QuantizedReduceState(Int4(128), gpus_per_node=3), ValueError, "allowed are"),
    "without state": (
        lambda: quantized_reduce_hook(None, torch.ones(4), torch.ones(1)),
        TypeError,
        "needs a QuantizedReduceState",
    ),
    "on replicas": (
        lambda: quantized_reduce_hook(QuantizedReduceState(Int4(128), gpus_per_node=2), torch.ones(4)),
        ValueError,
        "NO_SHARD",
    ),
    "another group": (lambda: hooked(of_a_pair()), ValueError, "this model is sharded over [0, 1, 2, 3]"),
    "on a strategy": (on_a_strategy, AssertionError, "already registered"),
}


def attempts() -> dict[str, Reply]:
    """In a worker: how each call is refused."""
    return {name: messages.attempt(refusal) for name, refusal in REFUSALS.items()}


def test_a_hooks_bad_input_is_refused_on_every_rank(pool: Callable[[int], Pool]) -> None:
    replies = pool(4).run(attempts)
    for name, refusal in REFUSALS.items():
        assert_refused([of_rank[name] for of_rank in replies], refusal)


def wrapped_state() -> None:
    """In a worker: without the state itself, nothing tells units apart."""
    model = FSDP1.make(Case(), ShardingStrategy.FULL_SHARD)
    state = QuantizedReduceState(Int4(32), error_feedback=LoCo(), gpus_per_node=2)
    model.register_comm_hook(None, lambda _, gradient, out: quantized_reduce_hook(state, gradient, out))
    with pytest.raises(RuntimeError, match="was not passed to"):
        models.loss_of(model, models.batch(0, 0)).backward()


def test_a_hook_around_the_hook_is_refused(pool: Callable[[int], Pool]) -> None:
    pool(4).run(wrapped_state)


def logged(gpus_per_node: int) -> list[tuple[str, str]]:
    """In a worker: what the hook alone logs when it is registered."""
    with collected() as records:
        hooked(QuantizedReduceState(Int4(128), gpus_per_node=gpus_per_node))
    return records


def test_a_hook_logs_one_line_a_model(pool: Callable[[int], Pool]) -> None:
    [(level, line)] = pool(4).run(logged, 2)[0]
    assert level == "INFO"
    assert "hook on 2 nodes x 2, 3 units: gradients reduced as int8(128) on the intra-node hop" in line
    [(level, line)] = pool(4).run(logged, 4)[0]
    assert level == "WARNING"
    assert "NOT active: gradients reduced as int4(128) on the inter-node hop (one node" in line


def trained(feedback: LoCo | None, path: str) -> dict[str, Tensor]:
    """In a worker: weights trained with the hook; with feedback, also saved and resumed."""
    case = Case(steps=2, micro_batches=2)

    def start() -> tuple[FSDP, QuantizedReduceState, torch.optim.Optimizer]:
        state = QuantizedReduceState(Int4(32), error_feedback=feedback, gpus_per_node=2)
        model = hooked(state)
        return model, state, models.make_optimizer("sgd", model.parameters())

    model, state, optimizer = start()
    train(FSDP1, model, case, optimizer=optimizer)
    if feedback is not None:
        save(model, optimizer, CodecState(model), path)
        assert CodecState(model).state_dict().keys() > {"layout"}
        assert len(CodecState(model).state_dict()) == len(state.state_dict())
    expected = train(FSDP1, model, case, optimizer=optimizer, first_step=2)
    if feedback is not None:
        other, other_state, other_optimizer = start()
        train(FSDP1, other, case, optimizer=other_optimizer, first_step=50)
        load(other, other_optimizer, CodecState(other), path)
        with pytest.raises(ValueError, match="one for each model"):
            hooked(other_state)
        assert train(FSDP1, other, case, optimizer=other_optimizer, first_step=2) == expected
        assert models.distance(FSDP1.full_weights(other), FSDP1.full_weights(model)) == 0
    return FSDP1.full_weights(model)


def test_errors_of_a_hook_follow_steps_and_resume_exactly(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    """Each unit has its own errors, which follow steps and resume exactly; forgotten at each step, they are not there.

    A strategy whose gradients accumulate on the rank sees the same sum of micro-batches as the hook.
    """
    plain, reset, fed_back = (
        pool(4).run(trained, feedback, str(tmp_path / str(i)))[0]
        for i, feedback in enumerate([None, LoCo(hops="both", reset_every=1), LoCo(hops="both")])
    )
    assert models.distance(reset, plain) == 0
    assert models.distance(fed_back, plain) > 1e-4
    strategy = replace(COARSE, levels="GNG", error_feedback=LoCo(hops="both"))
    ours = pool(4).run(trained_weights, FSDP1, Case(steps=4, micro_batches=2), strategy)[0]
    assert models.distance(ours, fed_back) < 1e-5
