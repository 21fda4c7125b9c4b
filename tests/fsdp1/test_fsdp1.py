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
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType

from fsdp_zpp import Strategy
from fsdp_zpp.comm.weight_gather import StaleSecondaryError

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


def give_and_take(model: FSDP) -> None:
    """Parameters of which this rank has nothing are given something, and have nothing again after a step."""
    absent = [parameter for parameter in model.parameters() if not parameter.numel()]
    for parameter in absent:
        parameter.data = parameter.new_ones(5)
    train(FSDP1, model, Case(steps=1, clip=None), first_step=1)
    assert not any(parameter.numel() for parameter in absent)


def look_in_inference_mode(model: FSDP) -> None:
    """Parameters become trainable again after a state dict was taken in inference mode."""
    with torch.inference_mode():
        model.state_dict()
    train(FSDP1, model, Case(steps=1, clip=None), first_step=1)
    for parameter in model.parameters():
        parameter.requires_grad_(False).requires_grad_(True)


def distance_after(event: Callable[[FSDP], None]) -> float:
    """In a worker: how far weights are, after an event and a step, from those without the event."""
    case = Case(steps=1, clip=None)
    model, undisturbed = (FSDP1.make(case, HPZ) for _ in range(2))
    for each in (model, undisturbed):
        train(FSDP1, each, case)
    event(model)
    train(FSDP1, undisturbed, case, first_step=1)
    return models.distance(FSDP1.full_weights(model), FSDP1.full_weights(undisturbed))


def test_what_happens_to_parameters_between_steps_leaves_nothing(pool: Callable[[int], Pool]) -> None:
    for event in (give_and_take, look_in_inference_mode):
        assert pool(4).run(distance_after, event) == [0] * 4


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


def looked_at_after_a_write() -> None:
    """In a worker: parameters are replaced unannounced, which FSDP itself sees later, and then looked at, or not."""
    for look in (lambda model: None, summoned, FSDP.state_dict):
        model = FSDP1.make(Case(), HPZ)
        logits(model)
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5
        look(model)
        with pytest.raises(StaleSecondaryError):
            logits(model)


def test_summoning_or_saving_does_not_hide_an_unannounced_write(pool: Callable[[int], Pool]) -> None:
    pool(4).run(looked_at_after_a_write)


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


def third_letters_mixed() -> None:
    net = models.make_net()
    net.blocks[0] = FSDP(net.blocks[0], sharding_strategy=Strategy("III", **TWO), device_id=models.device())
    model = FSDP(net, sharding_strategy=Strategy("GGG", **TWO), device_id=models.device())
    models.loss_of(model, models.batch(0, 0))


def local_state_dict() -> None:
    """Take one that torch fails to make on some ranks."""
    model = FLAT.make(Case(), Strategy("NII", **TWO))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.state_dict()


REFUSALS: dict[str, Refusal] = {
    "HYBRID_SHARD's groups": (pair_of_groups, ValueError, "pair of groups"),
    "a string": (name_of_a_strategy, TypeError, "must be a Strategy such as Strategy.zeropp()"),
    "other scopes of optimizers": (third_letters_mixed, ValueError, "blocks.0 is sharded inside nodes"),
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
