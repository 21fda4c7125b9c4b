"""Mixed precision, fp16 with a gradient scaler, evaluation, and what codecs do to weights and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.models import Case
from harness.pool import Pool
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy

from fsdp_zpp import Int4, Int8, QuantizedReduceState, Strategy, quantized_reduce_hook

ORIG = ("use_orig_params", True)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STOCK = ShardingStrategy.FULL_SHARD


def mixed(param: torch.dtype, reduce: torch.dtype | None = None, **others: Any) -> Case:
    """One step of plain SGD in mixed precision."""
    policy = MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=param, **others)
    return Case(fsdp=(ORIG, ("mixed_precision", policy)), steps=1, clip=None)


def one_step(case: Case, strategy: Any, hook: QuantizedReduceState | None = None) -> dict[str, torch.Tensor]:
    """In a worker: full-precision gradients of one backward, as the change of the weights by SGD."""
    model = models.wrap(case, strategy)
    if hook is not None:
        model.register_comm_hook(hook, quantized_reduce_hook)
    before = models.full_weights(model)
    losses = models.train(model, case, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    return {name: before[name] - after for name, after in models.full_weights(model).items()}


def gradient_distances(case: Case, strategy: Strategy, exact: Case) -> tuple[float, float]:
    """In a worker: the distances of the gradients of ours and of stock from stock that reduces in fp32."""
    reference = one_step(exact, STOCK)
    return models.distance(one_step(case, strategy), reference), models.distance(one_step(case, STOCK), reference)


@pytest.mark.parametrize("levels", ["GGG", "IGG"])
@pytest.mark.parametrize(
    ("param", "reduce", "others"),
    [
        (BF16, FP32, {}),
        (BF16, BF16, {}),
        (BF16, None, {}),
        (FP16, FP32, {}),
        (FP16, None, {}),
        (FP32, BF16, {}),
        (BF16, FP32, {"cast_forward_inputs": True}),
    ],
    ids=["bf16-fp32", "bf16-bf16", "bf16", "fp16-fp32", "fp16", "fp32-bf16", "cast inputs"],
)
def test_mixed_precision(pool: Callable[[int], Pool], param: Any, reduce: Any, others: Any, levels: str) -> None:
    """In fp32 sums differ in order only. In 16 bits ours round once a hop and stock at every rank: a few times both."""
    case, exact = mixed(param, reduce, **others), mixed(param, FP32, **others)
    for ours, stock in pool(4).run(gradient_distances, case, Strategy(levels, gpus_per_node=2), exact):
        assert ours <= max(1e-6, 1.5 * stock)


def gradient_dtypes(case: Case, strategy: Any) -> set[torch.dtype]:
    """In a worker: dtypes of the gradients after a backward."""
    model = models.wrap(case, strategy)
    models.loss_of(model, models.batch(0, 0)).backward()
    return {p.grad.dtype for p in model.parameters() if p.grad is not None and p.grad.numel()}


@pytest.mark.parametrize("keep", [True, False])
def test_keep_low_precision_grads(pool: Callable[[int], Pool], keep: bool) -> None:
    case = mixed(BF16, BF16, keep_low_precision_grads=keep)
    for strategy in (Strategy.zeropp(gpus_per_node=2), STOCK):
        assert set().union(*pool(4).run(gradient_dtypes, case, strategy)) == {BF16 if keep else FP32}


@pytest.mark.parametrize("policy", [None, MixedPrecision(BF16, BF16, BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("strategy", "bound"),
    [
        (Strategy("GGG", gradients=Int8(64)), 0.02),
        (Strategy("IGG", gradients=Int4(32)), 0.2),
        (Strategy("GGG", gradients=Int4(32), intra_gradients=None), 0.2),
        (Strategy("GGG", weights=Int8(64)), 0.05),
    ],
    ids=["int8 gradients", "int4 gradients", "int4 between only", "int8 weights"],
)
def test_codecs_keep_the_gradient(pool: Callable[[int], Pool], strategy: Strategy, bound: float, policy: Any) -> None:
    """A wrong mean, order or dtype would be off by far more than quantization noise."""
    case = Case(fsdp=(ORIG, ("mixed_precision", policy)), steps=1, clip=None)
    for layout in (1, 2, 4):
        assert max(pool(4).run(total_distance, case, replace(strategy, gpus_per_node=layout))) <= bound


def total_distance(case: Case, strategy: Any) -> float:
    """In a worker: distance of the whole gradient from stock."""
    ours, theirs = one_step(case, strategy), one_step(case, STOCK)
    error = sum((ours[name] - theirs[name]).square().sum() for name in theirs)
    return (error / sum(g.square().sum() for g in theirs.values())).sqrt().item()


def hooked_distance(strategy: ShardingStrategy) -> float:
    """In a worker: a stock strategy with the hook against one without."""
    case = Case(steps=1, clip=None)
    ours = one_step(case, strategy, QuantizedReduceState(Int8(32), gpus_per_node=2))
    return models.distance(ours, one_step(case, STOCK))


@pytest.mark.parametrize("strategy", [STOCK, ShardingStrategy.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_hook_on_stock_strategies(pool: Callable[[int], Pool], strategy: ShardingStrategy) -> None:
    assert max(pool(4).run(hooked_distance, strategy)) <= 0.03


def unsharded_weights(case: Case, strategy: Strategy) -> dict[str, Any]:
    """In a worker: the weights that a block computes with in forward, evaluation and recomputation, and the truth."""
    model = models.wrap(case, strategy)
    seen: list[torch.Tensor] = []
    block = next(module for module in model.modules() if isinstance(module, models.Block))
    block.register_forward_pre_hook(lambda module, args: seen.append(module.up.weight.detach().float().cpu().clone()))
    models.loss_of(model, models.batch(0, 0)).backward()
    model.eval()
    with torch.no_grad():
        models.loss_of(model, models.batch(0, 0))
    return {
        "seen": [w.numpy() for w in seen],
        "truth": models.make_net().blocks[0].up.weight.detach().cpu().numpy(),
    }


@pytest.mark.parametrize(
    "strategy", [Strategy.zeropp(gpus_per_node=2), Strategy("GGG", weights=Int4(32), gpus_per_node=1)]
)
@pytest.mark.parametrize("policy", [None, MixedPrecision(BF16, BF16, BF16)], ids=["fp32", "bf16"])
def test_all_ranks_compute_with_the_same_weights(pool: Callable[[int], Pool], strategy: Strategy, policy: Any) -> None:
    case = Case(fsdp=(ORIG, ("mixed_precision", policy)), checkpointing="outside no_reentrant")
    results = pool(4).run(unsharded_weights, case, strategy)
    reference = results[0]["seen"][0]
    assert all(len(result["seen"]) == 3 for result in results)
    assert all((w == reference).all() for result in results for w in result["seen"])
    # A block of the layer norm's ones reaches into the matrix behind it, so steps are at most as large as theirs.
    step = 1 / (127 if isinstance(strategy.weights, Int8) else 7)
    error = abs(reference - results[0]["truth"]).max()
    assert 0 < error <= step / 2 + 2**-9


def scaled(strategy: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """In a worker: fp16 with a sharded gradient scaler."""
    policy = MixedPrecision(FP16, FP16, FP16)
    case = Case(fsdp=(ORIG, ("mixed_precision", policy)), steps=3, scaler=True)
    model = models.wrap(case, strategy)
    return models.train(model, case), models.full_weights(model)


def test_gradient_scaler(pool: Callable[[int], Pool]) -> None:
    stock = pool(4).run(scaled, STOCK)
    for (losses, weights), (stock_losses, stock_weights) in zip(
        pool(4).run(scaled, Strategy("IGG", gpus_per_node=2)), stock, strict=True
    ):
        assert losses == pytest.approx(stock_losses, rel=2**-10)  # stock sums in fp16
        assert models.distance(weights, stock_weights) <= 2**-7
    for (losses, _), (stock_losses, _) in zip(
        pool(4).run(scaled, Strategy.zeropp(gpus_per_node=2)), stock, strict=True
    ):
        assert losses == pytest.approx(stock_losses, rel=0.01)


def overflow(strategy: Strategy, bad: float) -> tuple[bool, float]:
    """In a worker: one rank's gradient overflows in one element; returns if weights changed, and the new scale."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    policy = MixedPrecision(FP16, FP16, FP16)
    model = models.wrap(Case(fsdp=(ORIG, ("mixed_precision", policy))), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    scaler = ShardedGradScaler(device=models.device().type, init_scale=2.0**10)
    before = models.full_weights(model)
    if dist.get_rank() == 1:

        def poison(grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            grad.flatten()[0] = bad
            return grad

        block = next(module for module in model.modules() if isinstance(module, models.Block))
        block.register_forward_hook(lambda module, args, out: out.register_hook(poison) and None)
    scaler.scale(models.loss_of(model, models.batch(0, 0))).backward()
    scaler.step(optimizer)
    scaler.update()
    return models.distance(models.full_weights(model), before) > 0, scaler.get_scale()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
def test_overflow_skips_the_step_on_every_rank(pool: Callable[[int], Pool], bad: float) -> None:
    for changed, scale in pool(4).run(overflow, Strategy.zeropp(gpus_per_node=2), bad):
        assert not changed
        assert scale == 2.0**9


def evaluated(strategy: Any) -> float:
    """In a worker: the loss of an evaluation between two steps, averaged over ranks."""
    case = Case(steps=2)
    model = models.wrap(case, strategy)
    models.train(model, case)
    model.eval()
    with torch.no_grad():
        loss = models.loss_of(model, models.batch(70, 0))
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def test_evaluation(pool: Callable[[int], Pool]) -> None:
    expected = pool(4).run(evaluated, STOCK)[0]
    assert pool(4).run(evaluated, Strategy("IGG", gpus_per_node=2)) == pytest.approx([expected] * 4, rel=1e-6)
    assert pool(4).run(evaluated, Strategy.zeropp(gpus_per_node=2)) == pytest.approx([expected] * 4, rel=0.01)


def summoned_in_world_one(case: Case) -> float:
    """In a worker: a group of this rank alone trains like a plain module."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = models.wrap(case, Strategy.zeropp(), process_group=groups[dist.get_rank()])
    models.train(model, case)
    stock = models.wrap(case, STOCK, process_group=groups[dist.get_rank()])
    models.train(stock, case)
    with FSDP.summon_full_params(model):
        pass
    return models.distance(models.full_weights(model), models.full_weights(stock))


def test_world_of_one(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(summoned_in_world_one, Case(steps=2)) == [0, 0]
