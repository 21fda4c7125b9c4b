"""Arguments of fully_shard alone and methods of its modules, with a strategy; some are newer than torch 2.11."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness import messages, models
from harness.adapter import FULL, STOCK, Case, Fsdp2
from harness.messages import Refusal, Reply, assert_refused
from harness.pool import Pool, device_type
from harness.training import logits, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard as torch_fully_shard

from fsdp_zpp import LocalSteps, Strategy, fully_shard, invalidate, traffic

FSDP2 = Fsdp2()
TWO: dict[str, Any] = {"gpus_per_node": 2}
PLAIN = [Strategy(scopes, **TWO) for scopes in ("IGG", "III", "NNG")]
FLAT, HPZ, ZEROPP, LOCO = Strategy(**TWO), Strategy("IGG", **TWO), Strategy.zeropp(**TWO), Strategy.loco(**TWO)

over_scopes = pytest.mark.parametrize("scopes", ["IGG", "III", "NNG"])


def needs(method: str) -> pytest.MarkDecorator:
    """Skips where torch has no such method of modules."""
    return pytest.mark.skipif(not hasattr(FSDPModule, method), reason=f"this torch has no {method}")


# ---- the end of a backward


def two_steps(
    strategy: Strategy | None, last_synced: bool = True, finalize: Callable[[Any], None] | None = None
) -> list[dict[str, Tensor]]:
    """In a worker: the gradients of two steps, and the weights after them; ``finalize`` ends steps, or a backward."""
    model: Any = FSDP2.make(Case(model=(("unused", True),)), strategy)
    if finalize is not None:
        model.set_manual_backward_finalization(True)
    optimizer = models.make_optimizer("sgd", model.parameters())
    steps = []
    for step in range(2):
        for micro_batch, synced in enumerate((False, last_synced)):
            model.set_requires_gradient_sync(synced)
            model.set_is_last_backward(synced)
            model.skipped = micro_batch  # a block that is left out
            models.loss_of(model, models.batch(step, micro_batch)).backward()
        model.skipped = None
        if finalize is not None:
            model.set_requires_gradient_sync(True)
            finalize(model)
        steps.append(FSDP2.full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*steps, FSDP2.full_weights(model)]


def manual_finalization(last_synced: bool) -> None:
    """In a worker: over all strategies, by a handle if the last backward was not synchronized."""

    def finalize(model: Any) -> None:
        handle = model.finalize_backward(async_op=not last_synced)
        if not last_synced:
            handle.wait()

    stock = two_steps(STOCK)
    for strategy in (STOCK, *PLAIN):
        assert max(map(models.distance, two_steps(strategy, last_synced, finalize), stock)) <= 1e-6, strategy
    for strategy in (ZEROPP, LOCO):
        ours, as_ever = two_steps(strategy, last_synced, finalize), two_steps(strategy)
        assert max(map(models.distance, ours, as_ever)) == 0, strategy


@needs("set_manual_backward_finalization")
@pytest.mark.parametrize("last_synced", [True, False])
def test_a_step_may_be_ended_by_finalize_backward(pool: Callable[[int], Pool], last_synced: bool) -> None:
    pool(4).run(manual_finalization, last_synced)


def fail(module: nn.Module, values: Any) -> None:
    raise FloatingPointError


def after_failures(strategy: Strategy | None) -> dict[str, Tensor]:
    """In a worker: gradients of a step; before it, second micro-batches fail unless the strategy is stock."""
    model: Any = FSDP2.make(Case(), strategy)
    for where in ("forward", "full_backward") if strategy is not STOCK else ():
        with FSDP2.micro_batch(model, False, False):
            models.loss_of(model, models.batch(0, 0)).backward()
            handle = getattr(model.blocks[1], f"register_{where}_pre_hook")(fail)
            with pytest.raises(FloatingPointError):
                models.loss_of(model, models.batch(0, 1)).backward()
        handle.remove()
        model.reset_iter_state()
    for micro_batch, last in enumerate((False, True)):
        with FSDP2.micro_batch(model, last, False):
            models.loss_of(model, models.batch(1, micro_batch)).backward()
    return FSDP2.full_gradients(model)


@needs("reset_iter_state")
@over_scopes
def test_reset_iter_state_recovers_from_an_exception(pool: Callable[[int], Pool], scopes: str) -> None:
    ours, stock = pool(4).run(after_failures, Strategy(scopes, **TWO)), pool(4).once(after_failures, STOCK)
    assert max(map(models.distance, ours, stock)) <= 1e-6


# ---- reductions


def doubled_by_a_hook() -> None:
    """In a worker: gradients of a model whose all-reduce hook doubles them, and of one without."""
    for strategy in (HPZ, ZEROPP, Strategy("III", **TWO)):
        plain, hooked = (FSDP2.make(Case(), strategy) for _ in range(2))
        for module in hooked.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda gradient: gradient.mul_(2))
        for model in (plain, hooked):
            models.loss_of(model, models.batch(0, 0)).backward()
        doubled = FSDP2.full_gradients(hooked)
        for name, gradient in FSDP2.full_gradients(plain).items():
            assert torch.equal(2 * gradient, doubled[name]), strategy


def test_a_users_all_reduce_hook_sees_the_reduced_gradient(pool: Callable[[int], Pool]) -> None:
    pool(4).run(doubled_by_a_hook)


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
    """In a worker: the weights after two steps of two micro-batches, and what was sent."""
    case = Case(steps=2, micro_batches=2, synced=synced)
    model = adapter.make(case, strategy)
    train(adapter, model, case)
    return adapter.full_weights(model), traffic(model)


@over_scopes
def test_all_reduce_setter_defers_what_gradient_scopes_n_and_i_accumulate(
    pool: Callable[[int], Pool], scopes: str
) -> None:
    strategy = Strategy(scopes, **TWO)
    setter = pool(4).run(accumulated, ByAllReduce(), strategy)
    # Where gradients are accumulated over all ranks, no hop is left to defer: each micro-batch is synchronized.
    expected = pool(4).run(accumulated, FSDP2, strategy, scopes[1] == "G")
    for (weights, sent), (expected_weights, expected_sent) in zip(setter, expected, strict=True):
        assert sent == expected_sent
        assert models.distance(weights, expected_weights) == 0


# ---- unsharded weights


def storages(strategy: Strategy | None, keep: bool) -> tuple[set[int], set[int], dict[str, Tensor]]:
    """In a worker: where a block's weight lies unsharded, how large that is after each backward, and weights."""
    model: Any = FSDP2.make(Case(), strategy)
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
    return {weight.data_ptr() for weight in seen}, sizes, FSDP2.full_weights(model)


def kept_storages() -> None:
    """In a worker: over all strategies."""
    _, stock_sizes, stock_weights = storages(STOCK, keep=True)
    assert 0 not in stock_sizes
    for strategy in PLAIN:
        pointers, sizes, weights = storages(strategy, keep=True)
        assert len(pointers) == 1, strategy
        assert 0 not in sizes, strategy
        assert models.distance(weights, stock_weights) <= 1e-6, strategy
    assert storages(HPZ, keep=False)[1] == {0}


@needs("set_keep_unsharded_storage")
def test_unsharded_storage_is_kept(pool: Callable[[int], Pool]) -> None:
    pool(4).run(kept_storages)


CHANGES: dict[str, Callable[[Any], object]] = {
    "none": lambda model: None,
    "invalidate": invalidate,
    "a state dict": lambda model: model.load_state_dict(model.state_dict()),
    "an exchange": lambda model: None,
}


def waits_for_an_event(change: str) -> bool:
    """In a worker: whether the forward after a step, and a change, waits for an event of that step."""
    local_steps = LocalSteps(1) if change == "an exchange" else None
    model: Any = FSDP2.make(Case(), Strategy("III", local_steps=local_steps, **TWO))
    train(FSDP2, model, Case(steps=2))
    streams, event = getattr(torch, device_type()).Stream, object()
    wait_event, waited = streams.wait_event, []

    def note(self: Any, other: object) -> None:
        waited.append(other is event)
        if other is not event:
            wait_event(self, other)

    model.set_post_optim_event(event)
    CHANGES[change](model)
    with mock.patch.object(streams, "wait_event", note):
        models.loss_of(model, models.batch(2, 0))
    return any(waited)


@pytest.mark.parametrize("change", CHANGES)
def test_a_forward_waits_for_changes_after_the_event_of_a_step(pool: Callable[[int], Pool], change: str) -> None:
    """The event is of before the change, so that gathers which wait for it alone could come before it."""
    assert pool(4).run(waits_for_an_event, change) == [change == "none"] * 4


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
    torch.manual_seed(0)
    net: Any = nn.Sequential(Affine(), Affine()).to(models.device())
    for module in (*net, net):
        FSDP2.apply(module, strategy, mp_policy=policy)
    steps = []
    for step in range(2):
        for micro_batch in range(2):
            net.set_requires_gradient_sync(micro_batch == 1)
            net(models.batch(step, micro_batch)[:, :7].float() / 256).square().mean().backward()
        steps.append(FSDP2.full_gradients(net))
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


# ---- parameters that are given later, and a strategy on a part of a model


def meta_init() -> None:
    """In a worker: a model that is built on the meta device, materialized sharded, then loaded."""
    full = models.make_net()
    with torch.device("meta"):
        net = models.Net()
    FSDP2.shard(net, Case(), ZEROPP)
    net.to_empty(device=models.device())
    for block in net.blocks:
        block.shift.fill_(0.1)
    set_model_state_dict(net, full.state_dict(), options=FULL)
    reference = FSDP2.make(Case(), ZEROPP)
    for model in (net, reference):
        train(FSDP2, model, Case(steps=2))
    assert models.distance(FSDP2.full_weights(net), FSDP2.full_weights(reference)) == 0


def test_a_model_materialized_after_sharding_trains_as_one_that_had_values(pool: Callable[[int], Pool]) -> None:
    pool(4).run(meta_init)


def reshard(model: Any) -> None:
    """Have a model show its sharded parameters: a forward leaves some unsharded, its root at least."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def assign(model: Any, source: Any) -> None:
    """Give ``model`` the parameters of another one's state dict."""
    reshard(model)
    model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)


def trained_after_assignment(strategy: Strategy | None, dropped: bool) -> dict[str, Tensor]:
    """In a worker: weights after steps with assigned parameters, and logits after one that no backward announces.

    Before each step there may be gradients that ``zero_grad`` drops.
    """
    model, source = FSDP2.make(Case(), strategy), FSDP2.make(Case(), strategy)
    train(FSDP2, model, Case(steps=1))
    train(FSDP2, source, Case(steps=1), first_step=9)
    assign(model, source)
    optimizer = models.make_optimizer("sgd", model.parameters())
    for step in range(2):
        if dropped:
            with FSDP2.micro_batch(model, False, False):
                (1000 * models.loss_of(model, models.batch(step, 5))).backward()
            optimizer.zero_grad()
        train(FSDP2, model, Case(steps=1, micro_batches=2, clip=None), optimizer=optimizer, first_step=step)
    logits(model)
    reshard(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {"logits": logits(model), **FSDP2.full_weights(model)}


@over_scopes
def test_training_assigned_parameters_equals_stock(pool: Callable[[int], Pool], scopes: str) -> None:
    """FullyShardedDataParallel, stock too, ignores what is assigned; fully_shard's own zero_grad drops nothing."""
    ours = pool(4).run(trained_after_assignment, Strategy(scopes, **TWO), True)
    assert max(map(models.distance, ours, pool(4).once(trained_after_assignment, STOCK, False))) <= 1e-6


def mixed_with_stock() -> float:
    """In a worker: only the blocks have a strategy, and the root is torch's own."""
    mixed = models.make_net()
    for block in mixed.blocks:
        FSDP2.apply(block, HPZ)
    FSDP2.shard(mixed, Case(wrap_blocks=False), STOCK)
    weights = []
    for model in (mixed, FSDP2.make(Case(), STOCK)):
        train(FSDP2, model, Case(steps=2), optimizer=models.PlainSgd(model))
        weights.append(FSDP2.full_weights(model))
    return models.distance(*weights)


def test_a_model_sharded_in_part_by_a_strategy_equals_stock_also_under_an_optimizer_unknown_to_torch(
    pool: Callable[[int], Pool],
) -> None:
    assert max(pool(4).run(mixed_with_stock)) <= 1e-6


# ---- where nothing tells the nodes, a plain strategy is torch's own


def trained(shard: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    """In a worker: the local shards after two steps."""
    net = models.make_net()
    for module in (*net.blocks, net):
        shard(module, **arguments)
    optimizer = models.make_optimizer("sgd", net.parameters())
    for step in range(2):
        models.loss_of(net, models.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if shard is not torch_fully_shard:
        assert traffic(net) == {kind: {"inter": 0, "intra": 0} for kind in ("gather", "reduce")}
    return [p.to_local().clone() for p in net.parameters()]


def equal_to_torchs() -> None:
    """In a worker: ours gives torch's weights bit for bit, with any of torch's arguments."""
    for arguments in ({"reshard_after_forward": 2}, {"mesh": _mesh("r", "s")}):
        with mock.patch.dict(os.environ):
            del os.environ["LOCAL_WORLD_SIZE"]
            ours = trained(functools.partial(fully_shard, strategy=Strategy("GGG")), arguments)
        assert all(map(torch.equal, ours, trained(torch_fully_shard, arguments))), arguments


def test_a_plain_strategy_trains_as_torchs_own_bit_for_bit(pool: Callable[[int], Pool]) -> None:
    pool(4).run(equal_to_torchs)


# ---- bad input


def _mesh(*names: str) -> Any:
    return init_device_mesh(device_type(), (2,) * len(names), mesh_dim_names=names)


def _of_a_net(strategy: Any = FLAT, **arguments: Any) -> Callable[[], Any]:
    return lambda: fully_shard(models.make_net(), strategy=strategy, **arguments)


def _model_first(levels: str) -> None:
    net, strategy = models.make_net(), Strategy(levels, **TWO)
    fully_shard(net, strategy=strategy)
    fully_shard(net.blocks[0], strategy=strategy)


def _override_of_frozen() -> None:
    policy: Any = SimpleNamespace(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p: None)
    fully_shard(models.make_net(frozen=True), strategy=Strategy.mixzpp(**TWO), mp_policy=policy)


def _separate_group() -> None:
    model = FSDP2.make(Case(), ZEROPP)
    model.set_separate_reduce_scatter_group(False)
    model.set_separate_reduce_scatter_group(True)


REFUSALS: dict[str, Refusal] = {
    "no strategy": (_of_a_net("IGG"), TypeError, "strategy must be a Strategy"),
    "reshard to a few": (_of_a_net(reshard_after_forward=2), ValueError, "use Strategy('IGG'"),
    "reshard what is kept": (
        _of_a_net(Strategy("NNG", **TWO), reshard_after_forward=True),
        ValueError,
        "reshard_after_forward=True contradicts 'NNG'",
    ),
    "dimensions of a mesh": (lambda: _of_a_net(mesh=_mesh("dp", "tp"))(), ValueError, "use Strategy('III') for HSDP"),
    "a place of no kind": (_of_a_net(shard_placement_fn=lambda p: "elsewhere"), ValueError, "a Shard or None"),
    "the model before its layers": (lambda: _model_first("GGG"), ValueError, "shard layers before the model"),
    "the same inside nodes": (lambda: _model_first("III"), ValueError, "norm.weight is sharded already"),
    "dtypes of a frozen base": (_override_of_frozen, ValueError, "mp_policy has a param_dtype_override_fn"),
}
if device_type() == "cpu":  # where torch would only say that memory can't be pinned
    pinned = _of_a_net(offload_policy=CPUOffloadPolicy())
    REFUSALS["pinned memory without an accelerator"] = (pinned, ValueError, "pin_memory=False")
if hasattr(FSDPModule, "set_separate_reduce_scatter_group"):  # it would be made and not be used
    REFUSALS["a separate group"] = (
        _separate_group,
        NotImplementedError,
        "set_separate_reduce_scatter_group(True) applies to torch's own",
    )


def attempts() -> dict[str, Reply]:
    """In a worker: how each call is refused."""
    return {name: messages.attempt(refusal) for name, refusal in REFUSALS.items()}


def test_bad_input_to_fully_shard_is_refused_on_every_rank(pool: Callable[[int], Pool]) -> None:
    replies = pool(4).run(attempts)
    for name, refusal in REFUSALS.items():
        assert_refused([of_rank[name] for of_rank in replies], refusal)
