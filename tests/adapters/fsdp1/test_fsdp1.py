"""Features that FullyShardedDataParallel alone has: as under stock FULL_SHARD, to rounding, and what it refuses.

adapters/test_training_laws.py trains with its other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import messages, models
from harness.adapter import STOCK, Case, Fsdp1
from harness.covering import over_each
from harness.messages import Refusal, Reply, assert_refused
from harness.pool import Pool, device_type
from harness.training import logits, train
from harness.wiretap import wiretap
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    StateDictType,
)

from fsdp_zpp import Strategy
from fsdp_zpp.collectives.secondary_shard import StaleSecondaryError

FSDP1, FLAT = Fsdp1(), Fsdp1(use_orig_params=False)
TWO: Any = {"gpus_per_node": 2}
HPZ, ZEROPP = Strategy("IGG", **TWO), Strategy.zeropp(**TWO)
FP32, BF16 = torch.float32, torch.bfloat16


def other_values(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """The same parameter has other memory."""
    parameter.data = parameter.data * 0.5


def other_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Another parameter stands in its place."""
    setattr(module, name, nn.Parameter(parameter.detach() * 0.5))


def other_shape(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """The same values have another shape."""
    parameter.data = parameter.data[None]


def masked_in_forwards(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """From now on, each forward computes with other values, which nobody is told of."""

    def mask(module: nn.Module, inputs: Any) -> None:
        weights = getattr(module, name)
        weights.data = weights.data * 0.5

    if not module._forward_pre_hooks:
        module.register_forward_pre_hook(mask)


def trained_with_replaced(replace: Callable[..., None], strategy: Any) -> dict[str, Tensor]:
    """In a worker: the weights of a model whose parameters were replaced between steps."""
    case = Case(steps=1, clip=None)
    model = FSDP1.make(case, strategy)
    for step in range(2):
        train(FSDP1, model, case, first_step=step)
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                replace(module, name, parameter)
    train(FSDP1, model, case, first_step=2)
    return FSDP1.full_weights(model)


@over_each(rest=False, replace=[other_values, other_parameter, other_shape, masked_in_forwards], scopes=["IGG", "III"])
def test_parameters_replaced_between_steps_are_trained_on(
    pool: Callable[[int], Pool], replace: Callable[..., None], scopes: str
) -> None:
    ours = pool(4).run(trained_with_replaced, replace, Strategy(scopes, **TWO))
    assert max(map(models.distance, ours, pool(4).once(trained_with_replaced, replace, STOCK))) <= 1e-6


def give_and_take(model: FSDP) -> list[int]:
    """The sizes, after a step, of parameters of which this rank has nothing and which were given something."""
    absent = [parameter for parameter in model.parameters() if not parameter.numel()]
    for parameter in absent:
        parameter.data = parameter.new_ones(5)
    train(FSDP1, model, Case(steps=1, clip=None), first_step=1)
    return [parameter.numel() for parameter in absent]


def look_in_inference_mode(model: FSDP) -> list[int]:
    """Parameters become trainable again after a state dict was taken in inference mode."""
    with torch.inference_mode():
        model.state_dict()
    train(FSDP1, model, Case(steps=1, clip=None), first_step=1)
    for parameter in model.parameters():
        parameter.requires_grad_(False).requires_grad_(True)
    return []


def refused_on_the_way(model: FSDP) -> list[int]:
    """Training goes on after a parameter of the wrong shape was refused, and taken back."""
    for instance in FSDP.fsdp_modules(model):
        handle: Any = instance._handle  # the next forward would ask it, on all ranks, of which some do not refuse
        module, name = handle.flat_param._param_infos[0].module, handle.flat_param._param_infos[0].param_name
        right = getattr(module, name)
        setattr(module, name, nn.Parameter(torch.ones(3, device=right.device)))
        if right.numel():
            with pytest.raises(RuntimeError, match="Cannot writeback"):
                handle._writeback_orig_params()
        setattr(module, name, right)
    train(FSDP1, model, Case(steps=1, clip=None), first_step=1)
    return []


def after_events() -> list[tuple[list[int], float]]:
    """In a worker: what each event between steps gives, and how far the weights are from those without it."""
    case, found = Case(steps=1, clip=None), []
    for event in (give_and_take, look_in_inference_mode, refused_on_the_way):
        model, undisturbed = (FSDP1.make(case, HPZ) for _ in range(2))
        for each in (model, undisturbed):
            train(FSDP1, each, case)
        sizes = event(model)
        train(FSDP1, undisturbed, case, first_step=1)
        found.append((sizes, models.distance(FSDP1.full_weights(model), FSDP1.full_weights(undisturbed))))
    return found


def test_what_happens_to_parameters_between_steps_leaves_nothing(pool: Callable[[int], Pool]) -> None:
    for found in pool(4).run(after_events):
        for sizes, distance in found:
            assert not any(sizes)
            assert distance == 0


def low_precision_gradients(keeps: bool, strategy: Strategy | None) -> tuple[set[torch.dtype], dict[str, Tensor]]:
    """In a worker: dtypes of gradients of a backward in bf16, which may stay in it, and the gradients."""
    policy = MixedPrecision(BF16, BF16 if keeps else FP32, BF16, keeps, cast_forward_inputs=True)
    adapter = Fsdp1(arguments=(("mixed_precision", policy),))
    model = adapter.make(Case(), strategy)
    models.loss_of(model, models.batch(0, 0)).backward()
    dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None and p.grad.numel()}
    return dtypes, {} if keeps else adapter.full_gradients(model)


@over_each(rest=False, keeps=[True, False], strategy=[HPZ, Strategy("NNN", **TWO)])
def test_gradients_of_inputs_that_are_cast_and_those_kept_in_low_precision_are_as_under_stock(
    pool: Callable[[int], Pool], keeps: bool, strategy: Strategy
) -> None:
    ours, stock = (pool(4).once(low_precision_gradients, keeps, each) for each in (strategy, STOCK))
    for (dtypes, gradients), (expected_dtypes, expected) in zip(ours, stock, strict=True):
        assert dtypes == expected_dtypes == {BF16 if keeps else FP32}
        assert keeps or models.distance(gradients, expected) <= 1e-6


def synchronized(scopes: str) -> float:
    """In a worker: the distance of weights that only rank 0 had, from rank 0's."""
    adapter = Fsdp1(arguments=(("sync_module_states", True),))
    strategy = Strategy(scopes, **TWO)
    net = models.make_net(seed=dist.get_rank())
    weights = adapter.full_weights(adapter.shard(net, Case(), strategy))
    return models.distance(weights, {name: p.detach().cpu() for name, p in models.make_net().named_parameters()})


@pytest.mark.skipif(device_type() == "cpu", reason="torch synchronizes module states on accelerators only")
@pytest.mark.parametrize("scopes", ["NNN", "III"])
def test_module_states_are_synchronized_over_all_nodes(pool: Callable[[int], Pool], scopes: str) -> None:
    assert pool(4).run(synchronized, scopes) == [0] * 4


# ---- summon_full_params


def writeback(adapter: Fsdp1, strategy: Strategy) -> None:
    """In a worker: what is written in summon_full_params is what the next forward computes with."""
    used, fresh, stock = (adapter.make(Case(), s) for s in (strategy, strategy, STOCK))
    before = logits(used)  # so that there is a secondary shard to become stale
    for model in (used, fresh, stock):
        with torch.no_grad(), FSDP.summon_full_params(model):
            model.head.weight.mul_(3)
            model.blocks[1].up.bias.fill_(0.5)
    assert models.distance(adapter.full_weights(used), adapter.full_weights(stock)) == 0
    after = logits(used)
    assert torch.equal(after, logits(fresh))
    assert not torch.equal(after, before)
    if strategy.weights is None:
        assert torch.equal(after, logits(stock))


@over_each(rest=False, adapter=[FSDP1, FLAT], strategy={"hpZ": HPZ, "zeropp": ZEROPP})
def test_the_next_forward_sees_what_summon_full_params_wrote(
    pool: Callable[[int], Pool], adapter: Fsdp1, strategy: Strategy
) -> None:
    pool(4).run(writeback, adapter, strategy)


def edit_without_writeback() -> None:
    """In a worker: edits of summoned parameters that are not written back are no change."""
    model = FSDP1.make(Case(), HPZ)
    tokens = models.batch(0, 0, rank=0)
    before = models.loss_of(model, tokens).item()
    for rank0_only in (True, False):
        with torch.no_grad(), FSDP.summon_full_params(model, writeback=False, rank0_only=rank0_only):
            if not rank0_only or dist.get_rank() == 0:
                model.blocks[0].up.weight.mul_(2)
        with wiretap(2) as tap:
            assert models.loss_of(model, tokens).item() == before
        assert tap.total("inter", "all_gather") == 0


def test_edits_without_writeback_are_discarded(pool: Callable[[int], Pool]) -> None:
    pool(4).run(edit_without_writeback)


def summoned(model: FSDP) -> None:
    """Summoned, and nothing written."""
    with FSDP.summon_full_params(model, writeback=False):
        pass


def written_then(look: Callable[[FSDP], object]) -> str:
    """In a worker: what a forward says after parameters were replaced unannounced, which FSDP itself sees later."""
    model = FSDP1.make(Case(), HPZ)
    logits(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    look(model)
    try:
        logits(model)
    except StaleSecondaryError:
        return "raises"
    return "old weights"


def all_written_then() -> list[str]:
    """In a worker: the same for a model that nothing looks at, and by each way to look at it."""
    return [written_then(look) for look in (lambda model: None, summoned, lambda model: model.state_dict())]


def test_summoning_or_saving_does_not_hide_an_unannounced_write(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(all_written_then) == [["raises"] * 3] * 4


def summon_alone() -> float:
    """In a worker: in a group of this rank alone, the distance that a summon moves the weights by."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = FSDP1.make(Case(), Strategy.zeropp(), groups[dist.get_rank()])
    train(FSDP1, model, Case(steps=2))
    before = FSDP1.full_weights(model)
    with FSDP.summon_full_params(model):
        pass
    return models.distance(FSDP1.full_weights(model), before)


def test_summoning_in_a_world_of_one_changes_nothing(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(summon_alone) == [0, 0]


# ---- states of optimizers


def resume(kind: StateDictType) -> None:
    """In a worker: training resumed from model and optimizer state equals the uninterrupted run, bit for bit."""
    case = Case(optimizer="adamw", steps=2)
    full = kind is StateDictType.FULL_STATE_DICT
    everywhere = (kind, None, FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)) if full else (kind,)
    straight = FSDP1.make(case, ZEROPP)
    optimizer = models.make_optimizer(case.optimizer, straight.parameters())
    train(FSDP1, straight, case, optimizer=optimizer)
    with FSDP.state_dict_type(straight, *everywhere):
        model_state = {name: value.clone() for name, value in straight.state_dict().items()}
        optimizer_state = FSDP.optim_state_dict(straight, optimizer)
    expected = train(FSDP1, straight, case, optimizer=optimizer, first_step=case.steps)

    resumed = FSDP1.make(case, ZEROPP)
    fresh = models.make_optimizer(case.optimizer, resumed.parameters())
    with FSDP.state_dict_type(resumed, *everywhere):
        resumed.load_state_dict(model_state)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(resumed, fresh, optimizer_state))
    assert train(FSDP1, resumed, case, optimizer=fresh, first_step=case.steps) == expected
    assert models.distance(FSDP1.full_weights(resumed), FSDP1.full_weights(straight)) == 0


@pytest.mark.parametrize(
    "kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT], ids=lambda kind: kind.name
)
def test_resume_is_exact(pool: Callable[[int], Pool], kind: StateDictType) -> None:
    pool(4).run(resume, kind)


# ---- offloading by hand


def offloaded_by_hand() -> tuple[bool, bool]:
    """In a worker: flat parameters moved by their handles, as some trainers for reinforcement learning do it.

    Returns:
        Whether the weights are used that were there after that, once as they were, once changed meanwhile.
    """
    model = FSDP1.make(Case(), HPZ)
    found = [logits(model)]
    for factor in (1.0, 1.5):
        for module in FSDP.fsdp_modules(model):
            flat: Any = module._handle.flat_param  # torch's own, which those trainers reach for
            module._handle.flat_param_to(dtype=torch.float64)  # stands for the CPU
            flat.data.mul_(factor)
            module._handle.flat_param_to(dtype=torch.float32)
            flat._local_shard = flat.data
        found.append(logits(model))
    return torch.equal(found[0], found[1]), not torch.equal(found[1], found[2])


def test_weights_moved_by_their_handles_are_the_ones_that_are_used(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(offloaded_by_hand) == [(True, True)] * 4


# ---- bad input


def pair_of_groups() -> None:
    groups = dist.new_group([0, 1]), dist.new_group([2, 3])
    FSDP(models.make_net(), process_group=groups, sharding_strategy=HPZ)


def name_of_a_strategy() -> None:
    FSDP(models.make_net(), sharding_strategy="IGG", device_id=models.device())  # type: ignore[arg-type]


def local_state_dict() -> None:
    """Take one that torch fails to make on some ranks."""
    model = FLAT.make(Case(), Strategy("NII", **TWO))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.state_dict()


REFUSALS: dict[str, Refusal] = {
    "HYBRID_SHARD's groups": (pair_of_groups, ValueError, "pair of groups"),
    "a string": (name_of_a_strategy, TypeError, "must be a Strategy such as Strategy.zeropp()"),
    "a local state dict": (local_state_dict, ValueError, "use SHARDED_STATE_DICT or FULL_STATE_DICT"),
}


if device_type() == "cpu":
    offloading = Fsdp1(arguments=(("cpu_offload", CPUOffload(offload_params=True)),))
    REFUSALS["offloading on a CPU"] = (lambda: offloading.make(Case(), HPZ), ValueError, "needs an accelerator")


def attempts() -> dict[str, Reply]:
    """In a worker: how each call is refused."""
    return {name: messages.attempt(refusal) for name, refusal in REFUSALS.items()}


def test_bad_input_is_refused_on_every_rank(pool: Callable[[int], Pool]) -> None:
    replies = pool(4).run(attempts)
    for name, refusal in REFUSALS.items():
        assert_refused([of_rank[name] for of_rank in replies], refusal)


def third_letters_mixed() -> None:
    """In a worker: the first forward of a block that is sharded inside of nodes, the rest otherwise."""
    net = models.make_net()
    net.blocks[0] = FSDP(net.blocks[0], sharding_strategy=Strategy("III", **TWO), device_id=models.device())
    model = FSDP(net, sharding_strategy=Strategy("GGG", **TWO), device_id=models.device())
    with pytest.raises(ValueError, match=r"blocks\.0 is sharded inside nodes"):
        models.loss_of(model, models.batch(0, 0))


def test_all_units_must_shard_over_one_group(pool: Callable[[int], Pool]) -> None:
    pool(4).run(third_letters_mixed)
