"""What codecs do to weights and gradients, tensor parallelism, torch.compile, gradient scaling, recovery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.fully_sharded import STOCK, Case, full_weights, logits, make, shard, train
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard as torch_fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import Int4, Int8, Strategy
from fsdp_zpp.fsdp2 import fully_shard

TWO = {"gpus_per_node": 2}
BF16 = ("mp_policy", MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def weights_seen(case: Case) -> Tensor:
    """In a worker: one matrix as the forward sees it, whose values depend on whether it was encoded from 16 bits."""
    model = make(case, Strategy("IGG", weights=Int8(256), **TWO))
    seen = []
    model.blocks[0].up.register_forward_pre_hook(lambda module, args: seen.append(module.weight.detach().clone()))
    for _ in range(2):
        logits(model)
    assert torch.equal(seen[0], seen[1])
    return seen[0].cpu()


def test_weights_are_encoded_from_full_precision(pool: Callable[[int], Pool]) -> None:
    full, *_ = pool(4).run(weights_seen, Case())
    half, *others = pool(4).run(weights_seen, Case(shard=(BF16,)))
    assert all(torch.equal(half, other) for other in others)
    assert torch.equal(full.bfloat16(), half)
    exact = models.make_net().blocks[0].up.weight.detach().cpu()
    # The norm's ones are in the same block as a part of the matrix.
    assert 0 < (full - exact).abs().max() <= 0.5 / 127 * (1 + 1e-5)


def gradients(strategy: Strategy | None, case: Case) -> dict[str, Tensor]:
    """In a worker: full gradients of one backward."""
    model = make(case, strategy)
    models.loss_of(model, models.batch(0, 0)).backward()
    return {name: p.grad.full_tensor().float().cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("gpus_per_node", [1, 2, 4])
@pytest.mark.parametrize(("codec", "bound"), [(Int8(64), 0.02), (Int4(32), 0.3)], ids=["int8", "int4"])
def test_encoded_gradients(pool: Callable[[int], Pool], codec: Any, bound: float, gpus_per_node: int) -> None:
    strategy = Strategy("IGG", gradients=codec, gpus_per_node=gpus_per_node)
    ours, stock = pool(4).run(gradients, strategy, Case())[0], pool(4).run(gradients, STOCK, Case())[0]
    if gpus_per_node < 4:  # else only the finer codec inside of the node is at work
        assert models.distance(ours, stock) > 1e-4
    assert models.distance(ours, stock) <= bound


def overflow() -> list[bool]:
    """In a worker: a gradient scaler sees an overflow on one rank through the codecs, and steps are skipped."""
    policy = ("mp_policy", MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16))
    model = make(Case(shard=(policy,)), Strategy.zeropp(**TWO))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device=device_type(), init_scale=2.0**8)
    skipped = []
    for step in range(3):
        before = full_weights(model)
        loss = models.loss_of(model, models.batch(step, 0))
        loss = loss * (float("inf") if step == 1 and dist.get_rank() == 2 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(models.distance(full_weights(model), before) == 0)
    return skipped


def test_gradient_scaler(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(overflow) == [[False, True, False]] * 4


class TensorParallelBlock(nn.Module):
    """Two linears that tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def two_dimensions(strategy: Strategy | None, optimizer: str) -> dict[str, Tensor]:
    """In a worker: data parallel over nodes beside tensor parallel inside of them."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = nn.Sequential(TensorParallelBlock(), TensorParallelBlock()).to(models.device())
    for block in net:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        _shard_over(block, mesh["dp"], strategy)
    _shard_over(net, mesh["dp"], strategy)
    step = torch.optim.SGD(net.parameters(), lr=0.1, foreach=optimizer == "foreach")
    for i in range(3):
        torch.manual_seed(100 * i + mesh["dp"].get_local_rank())
        net(torch.randn(4, 12, device=models.device())).square().mean().backward()
        step.step()
        step.zero_grad()
    return full_weights(net)


def _shard_over(module: nn.Module, mesh: Any, strategy: Strategy | None) -> None:
    if strategy is None:
        torch_fully_shard(module, mesh=mesh)
    else:
        fully_shard(module, mesh=mesh, strategy=strategy)


@pytest.mark.parametrize("optimizer", ["foreach", "for each"])
def test_tensor_parallel_beside(pool: Callable[[int], Pool], optimizer: str) -> None:
    strategy = Strategy("IGG", gpus_per_node=1)
    ours, stock = pool(4).run(two_dimensions, strategy, optimizer), pool(4).run(two_dimensions, STOCK, optimizer)
    assert max(map(models.distance, ours, stock)) <= 1e-6


def recover() -> None:
    """In a worker: after an exception in the forward, reset_iter_state() and the next iteration."""
    case = Case(steps=1)
    model, other = make(case, Strategy("IGG", **TWO)), make(case, STOCK)

    def fail(module: nn.Module, args: Any) -> None:
        raise FloatingPointError

    handle = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(FloatingPointError):
        models.loss_of(model, models.batch(0, 0))
    handle.remove()
    model.reset_iter_state()
    for each in (model, other):
        train(each, case)
    assert models.distance(full_weights(model), full_weights(other)) <= 1e-6


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="new in torch 2.13")
def test_recovery(pool: Callable[[int], Pool]) -> None:
    pool(4).run(recover)


def compiled(strategy: Strategy | None) -> tuple[dict[str, Tensor], int]:
    """In a worker: every block compiled, then sharded; the weights, and how many graphs a block has."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    net = models.make_net()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    shard(net, strategy)
    train(net, Case(steps=3))
    return full_weights(net), counters["stats"]["unique_graphs"]


def test_compiled_blocks(pool: Callable[[int], Pool]) -> None:
    ours, stock = pool(4).run(compiled, Strategy("IGG", **TWO)), pool(4).run(compiled, STOCK)
    for (our_weights, our_graphs), (weights, graphs) in zip(ours, stock, strict=True):
        assert models.distance(our_weights, weights) <= 1e-6
        assert our_graphs == graphs


def final_loss(strategy: Strategy | None) -> float:
    """In a worker: the mean loss over all ranks after twenty steps."""
    model = make(Case(shard=(BF16,)), strategy)
    train(model, Case(steps=20))
    with torch.no_grad():
        loss = models.loss_of(model, models.batch(0, 0))
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def test_zeropp_trains(pool: Callable[[int], Pool]) -> None:
    ours, stock = pool(4).run(final_loss, Strategy.zeropp(**TWO))[0], pool(4).run(final_loss, STOCK)[0]
    assert ours == pytest.approx(stock, rel=0.01)


def offloaded() -> float:
    """In a worker: parameters that live on the CPU are encoded as others are."""
    strategy, weights = Strategy.zeropp(**TWO), []
    for arguments in ((), (("offload_policy", CPUOffloadPolicy(pin_memory=False)),)):
        case = Case(shard=arguments, clip=None)
        model = make(case, strategy)
        train(model, case)
        weights.append(full_weights(model))
    return models.distance(*weights)


def test_cpu_offload_with_codecs(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(offloaded) == [0.0] * 4


def self_encoding() -> None:
    """In a worker: a tensor that encodes itself for the all-gather can't be encoded once more."""
    model = make(Case(), Strategy.zeropp(**TWO))
    local = model.blocks[0].up.weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
    local.fsdp_post_all_gather = lambda outputs, metadata, dtype, *, out=None: (outputs[0], outputs)
    with pytest.raises(TypeError, match=r"blocks\.0\.up\.weight is a Tensor, which encodes itself"):
        logits(model)


def test_self_encoding_tensor(pool: Callable[[int], Pool]) -> None:
    pool(4).run(self_encoding)


def divided_by(factor: float, force_sum: bool, strategy: Strategy | None) -> dict[str, Tensor]:
    """In a worker: gradients under another divide factor than the world size."""
    model = make(Case(), strategy)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(force_sum)
    models.loss_of(model, models.batch(0, 0)).backward()
    return {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("force_sum", [True, False], ids=["sum", "premultiplied"])
@pytest.mark.parametrize("factor", [1.0, 4.0, 6.0])
def test_gradient_divide_factor(pool: Callable[[int], Pool], factor: float, force_sum: bool) -> None:
    """Gloo can't premultiply; torch's own are forced to sum, which is the same but for rounding."""
    ours = pool(4).run(divided_by, factor, force_sum, Strategy("IGG", **TWO))
    stock = pool(4).run(divided_by, factor, True, STOCK)
    assert max(map(models.distance, ours, stock)) <= 1e-6


def steps_in_backward(strategy: Strategy | None) -> dict[str, Tensor]:
    """In a worker: an optimizer for each parameter that steps as soon as its gradient is there."""
    model = make(Case(), strategy)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for i in range(3):
        models.loss_of(model, models.batch(i, 0)).backward()
    return full_weights(model)


def test_optimizer_in_backward(pool: Callable[[int], Pool]) -> None:
    ours, stock = pool(4).run(steps_in_backward, Strategy("IGG", **TWO)), pool(4).run(steps_in_backward, STOCK)
    assert max(map(models.distance, ours, stock)) <= 1e-6
