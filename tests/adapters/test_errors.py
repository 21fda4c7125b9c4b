"""Each mistake is an error on every rank, before anything is sent, that says what is wrong; the ranks go on afterwards.

A rank that leaves is an error on the others. Nodes that are at different places are each told where the others are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import llama, lora, messages, models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2
from harness.covering import ADAPTERS, WITH_FLAT, over_adapters, over_each
from harness.local_nodes import ONE_BLOCK
from harness.messages import Reply
from harness.pool import Pool, Pools, device_type, shared_folder
from harness.training import train
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

import fsdp_zpp
from fsdp_zpp import (
    CodecState,
    Int4,
    Int8,
    LocalSteps,
    LoCo,
    QuantizedReduceState,
    Strategy,
    exchange_weights,
    fully_shard,
    gathered_weights,
    invalidate,
    quantize_frozen_params,
    quantized_reduce_hook,
    save_frozen_params,
    traffic,
)
from fsdp_zpp.frozen._torch_modules import frozen_sites
from fsdp_zpp.planner.cluster import measure_bandwidth, world

TWO = Strategy("IGG", gpus_per_node=2)
ALONE = ("first", "last")
WHO: dict[str, Callable[[int, int], bool]] = {
    "all": lambda rank, world: True,
    "first": lambda rank, world: rank == 0,
    "last": lambda rank, world: rank == world - 1,
    "second half": lambda rank, world: 2 * rank >= world,
}


class Mistake(NamedTuple):
    """A mistake in a call."""

    make: Callable[[bool], object]  # makes the call, wrongly if the argument is true
    said: tuple[str, ...] | str  # parts of what is said
    error: type[Exception] | None = ValueError  # that every rank raises; for None, its kind may differ between ranks
    by: tuple[str, ...] = ("all",)  # who makes it, in turn: all ranks, or one of them


def replies_to(mistake: Mistake) -> dict[str, Reply]:
    """In a worker: what is raised, by who made the mistake."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        who: messages.attempt((lambda who=who: mistake.make(WHO[who](rank, world)), Exception, ""))
        for who in mistake.by
    }


def assert_refused(mistake: Mistake, by_rank: list[dict[str, Reply]]) -> None:
    """Every rank has raised as it should, before anything was sent."""
    for who in mistake.by:
        replies = [replies[who] for replies in by_rank]
        for kind, text, sent in replies:
            for part in [mistake.said] if isinstance(mistake.said, str) else mistake.said:
                # On GPUs the links decide of nodes as launched, and errors tell them from those that were given.
                assert part in text or part in text.replace(" (as launched)", ""), (who, text)
            assert kind == mistake.error.__name__ if mistake.error else kind != "no error"
            assert sent == 0
        if who == "last" and mistake.error:
            assert len(set(replies)) == 1


# ---- where modules are wrapped


def sharing_a_weight() -> models.Net:
    net = models.make_net()
    net.blocks[1].down.weight = net.blocks[0].down.weight
    return net


def sharing_a_module_with_the_root() -> models.Net:
    net = models.make_net()
    net.head = nn.Sequential(nn.Linear(22, 37), net.blocks[1].down)
    return net


def with_integers() -> nn.Module:
    net = models.make_net()
    net.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    return net


def with_nan() -> nn.Module:
    net = lora.make_base()
    net.blocks[1].up.weight[3, 5] = torch.nan
    return net


def shared_in(adapter: Adapter) -> dict[str, Mistake]:
    """Parameters of two units."""
    remedy = "fully_shard([a, b]" if isinstance(adapter, Fsdp2) else "wrap the module around both as one unit"

    def sharded(net: Callable[[], models.Net], scopes: str, name: str) -> Mistake:
        strategy = Strategy(scopes, gpus_per_node=2)
        said = ("it is shared by two units", name, remedy)
        return Mistake(lambda wrong: adapter.shard(net(), Case(), strategy), said)

    return {
        "weight of siblings": sharded(sharing_a_weight, "III", "down.weight"),
        "module of the root": sharded(
            sharing_a_module_with_the_root, "NNG", "head.1.weight was sharded before, as down.weight of another Block"
        ),
    }


def mistakes_in_wrapping(adapter: Adapter) -> dict[str, Mistake]:
    """Mistakes in a call, which all ranks make, or one of them alone."""

    def sharded(
        strategy: Any = TWO, net: Callable[[], Any] = models.make_net, **arguments: Any
    ) -> Callable[[bool], object]:
        return lambda wrong: (
            adapter.wrap(net(), strategy, **arguments) if wrong else adapter.wrap(models.make_net(), TWO)
        )

    def on_mesh(strategy: Strategy, *names: str) -> Callable[[bool], object]:
        def make(wrong: bool) -> None:
            mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=names or None)
            adapter.wrap(models.make_net(), strategy, **{adapter.mesh_argument: mesh})

        return make

    hsdp, zeropp = ("replicate", "shard"), Strategy.zeropp
    offload = (
        {"cpu_offload": CPUOffload(True)} if isinstance(adapter, Fsdp1) else {"offload_policy": CPUOffloadPolicy()}
    )
    found = {
        "indivisible": Mistake(sharded(Strategy(gpus_per_node=3)), "allowed are [1, 2, 4]"),
        "the class": Mistake(sharded(Strategy), "did you mean Strategy()", TypeError),
        "integers": Mistake(sharded(net=with_integers), "codes is torch.int8", TypeError),
        "traffic of what": Mistake(lambda wrong: traffic(models.make_net()), "no part of this Net"),
        "invalidate what": Mistake(lambda wrong: invalidate(models.make_net()), "no part of this Net"),
        "the strategy's nodes": Mistake(on_mesh(zeropp(gpus_per_node=4), *hsdp), "leave one out: pass the 1-D mesh"),
        "launched nodes": Mistake(on_mesh(zeropp(), *hsdp), "4 of its ranks run on each node; pass gpus_per_node=2"),
        "all ranks": Mistake(on_mesh(Strategy(gpus_per_node=2), *hsdp), "use Strategy('III') for HSDP"),
        "no names": Mistake(on_mesh(zeropp(gpus_per_node=2)), "with names, got 2 dimensions (2, 2)"),
        "a name, alone": Mistake(sharded("zeropp"), "zeropp", None, ALONE),
        "no module, alone": Mistake(sharded(net=lambda: 3), "do not make the same calls", None, ALONE),
        "doubles, alone": Mistake(sharded(net=lambda: models.make_net().double()), "torch.float64 ", None, ALONE),
        "a shared weight, alone": Mistake(
            lambda wrong: adapter.shard((sharing_a_weight if wrong else models.make_net)(), Case(), TWO),
            "ranks were given different arguments: ",
            by=("last",),
        ),
    }
    if device_type() == "cpu":  # an accelerator can be offloaded from
        found["offload, alone"] = Mistake(sharded(**offload), "needs an accelerator", None, ALONE)
    if isinstance(adapter, Fsdp1):  # fully_shard makes a group for each
        overridden = Strategy.zeropp(overrides={"LayerNorm": Strategy("GGG")}, gpus_per_node=2)
        found["strategies in one"] = Mistake(sharded(overridden), "wrap the modules that overrides name by themselves")
    return found


# ---- where ranks are told different things


def launched_otherwise(adapter: Adapter, differs: bool) -> None:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "4" if differs else "2"}):
        adapter.wrap(models.make_net(), Strategy("IGG"))


def measured_on(nodes: str) -> None:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": nodes}):
        measure_bandwidth(world())


def sharded_on_spmd_mesh(nodes: str) -> None:
    mesh = init_device_mesh(device_type(), (4, 1), mesh_dim_names=("dp", "tp"))
    dims = fsdp.DataParallelMeshDims(shard="dp")
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": nodes}):
        fully_shard(models.make_net(), strategy=Strategy.zeropp(), mesh=mesh, dp_mesh_dims=dims)


def no_root(adapter: Adapter, differs: bool) -> None:
    net = models.make_net()
    for i, block in enumerate(net.blocks):
        net.blocks[i] = adapter.wrap(block, TWO)
    net = net if differs else adapter.wrap(net, TWO)
    models.loss_of(net, models.batch(0, 0))


def other_order(adapter: Adapter, differs: bool) -> None:
    """Each call is the same, but for the block that it is made of."""
    net = models.make_net()
    for i, scopes in zip((1, 0) if differs else (0, 1), ("IGG", "GGG"), strict=True):
        net.blocks[i] = adapter.wrap(net.blocks[i], Strategy(scopes, gpus_per_node=2))
    net = adapter.wrap(net, TWO)
    models.loss_of(net, models.batch(0, 0))


def frozen_otherwise(adapter: Adapter, differs: bool) -> None:
    net = lora.make_net()
    net.head.requires_grad_(differs)
    quantize_frozen_params(net, gpus_per_node=2)


def gathered_otherwise(adapter: Adapter, differs: bool) -> None:
    """The base is the same, but what is wrapped as one is gathered as one."""
    inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    net = nn.Sequential(inner, nn.Linear(64, 2)).to(models.device())
    quantize_frozen_params(net, gpus_per_node=2)
    if not differs:
        net[0] = adapter.wrap(net[0], STOCK)
    next(module for _, module, *_ in frozen_sites(net)).weight + 0


def hooked_otherwise(adapter: Adapter, differs: bool) -> None:
    net = models.make_net()
    if not differs:
        net.blocks[0] = Fsdp1().wrap(net.blocks[0], STOCK)
    state = QuantizedReduceState(Int4(128), gpus_per_node=2)
    Fsdp1().wrap(net, STOCK).register_comm_hook(state, quantized_reduce_hook)


def differences(adapter: Adapter) -> dict[str, Mistake]:
    """The difference in what the last rank is told or does."""

    def given(call: Callable[[Any], object], usual: Any, other: Any, said: str) -> Mistake:
        return Mistake(lambda differs: call(other if differs else usual), said, by=("last",))

    def done(call: Callable[[Adapter, bool], object], said: str) -> Mistake:
        return Mistake(lambda differs: call(adapter, differs), said, by=("last",))

    def wrapped(strategy: Strategy) -> None:
        adapter.wrap(models.make_net(), strategy)

    def precision(dtype: torch.dtype) -> dict[str, Any]:
        if isinstance(adapter, Fsdp1):
            return {"mixed_precision": MixedPrecision(param_dtype=dtype)}
        return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}

    def net(arguments: Any) -> None:
        adapter.wrap(models.make_net(**arguments), TWO)

    def on_two_axes(differs: bool) -> None:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        strategy = Strategy("GGG" if differs else "IGG", gpus_per_node=1)
        adapter.wrap(models.make_net(), strategy, **{adapter.mesh_argument: mesh["dp"]})

    def base(arguments: Any) -> None:
        quantize_frozen_params(lora.make_net(), **arguments)

    def uneven(call: Callable[[str], None]) -> Mistake:
        """The layout is possible on the others; on the last rank, whose nodes are of three, it is not."""
        said = "the ranks [0, 1, 2, 3] are not spread over nodes of 3"
        return Mistake(lambda differs: call("3" if differs else "2"), said, None, by=("last",))

    nodes = "gpus_per_node: 2 on ranks 0-2, {} on rank 3"
    takes_dims = isinstance(adapter, Fsdp2) and hasattr(fsdp, "DataParallelMeshDims")
    on_spmd_mesh = {"launcher, SPMD mesh": uneven(sharded_on_spmd_mesh)} if takes_dims else {}
    return on_spmd_mesh | {
        "scopes": given(wrapped, TWO, Strategy("GGG", gpus_per_node=2), "levels: IGG on ranks 0-2, GGG on rank 3"),
        "impossible node size": given(wrapped, TWO, Strategy("IGG", gpus_per_node=3), nodes.format(3)),
        "launcher, measured": uneven(measured_on),
        "launcher": done(launched_otherwise, nodes.format(4)),
        "precision": given(
            lambda dtype: adapter.wrap(models.make_net(), TWO, **precision(dtype)),
            torch.bfloat16,
            torch.float16,
            "torch.float16",
        ),
        "frozen": given(net, {}, {"frozen": True}, " frozen on rank 3"),
        "no root": done(no_root, "the first forward of Block on rank 3"),
        "order of units": done(other_order, "blocks.0: Strategy(levels='IGG'"),
        "codec of the base": given(base, {"codec": Int8(256)}, {"codec": Int4(128)}, "codec: Int8(block=256) on ranks"),
        "nodes of the base": given(
            base, {}, {"gpus_per_node": 2}, "gpus_per_node: 4 (as launched) on ranks 0-2, 2 on rank 3"
        ),
        "what is in the base": done(frozen_otherwise, "weight head.weight: torch.float32"),
        "units of the base": done(gathered_otherwise, "the first use of the frozen base of"),
        "codec of a hook": given(
            lambda codec: QuantizedReduceState(codec, gpus_per_node=2),
            Int4(128),
            Int4(64),
            "codec: Int4(block=128) on ranks 0-2, Int4(block=64) on rank 3",
        ),
        "units under a hook": done(hooked_otherwise, "missing on rank 3"),
        "beside tensor parallelism": Mistake(
            on_two_axes, ("levels: IGG on rank ", ", GGG on rank "), None, ("second half",)
        ),
    }


def mistakes_of(adapter: Adapter) -> dict[str, Mistake]:
    if adapter not in ADAPTERS:
        return shared_in(adapter)
    return mistakes_in_wrapping(adapter) | shared_in(adapter) | differences(adapter)


def replies_to_all(adapter: Adapter) -> dict[str, dict[str, Reply]]:
    """In a worker: what each mistake raises; a training after them ends, since no rank waits for another."""
    replies = {name: replies_to(mistake) for name, mistake in mistakes_of(adapter).items()}
    train(adapter, adapter.make(Case(), TWO), Case(steps=1))
    return replies


@pytest.mark.parametrize(
    ("adapter", "name"), [(adapter, name) for adapter in WITH_FLAT for name in mistakes_of(adapter)], ids=str
)
def test_a_mistake_is_refused_on_every_rank_before_anything_is_sent(pool: Pools, adapter: Adapter, name: str) -> None:
    replies = pool(4).once(replies_to_all, adapter)
    assert_refused(mistakes_of(adapter)[name], [of_rank[name] for of_rank in replies])


# ---- arguments of functions, which one rank alone is given wrong

NOT_COLLECTIVE = {
    *("NF4", "Codec", "Int3", "Int4", "Int4Delta", "Int2Delta", "Int8", "LoCo", "LocalSteps", "Strategy"),
    *("Elastic", "count_tokens", "end_training", "members"),
    *("CodecState", "agreed_weights", "clip_grad_norm_", "invalidate", "plan", "quantized_reduce_hook", "traffic"),
}
"""The public names that ranks may use one by one, or that communicate in training alone."""


def quantized() -> nn.Module:
    net = lora.make_base()
    quantize_frozen_params(net, lora.CODEC, gpus_per_node=2)
    return net


def local() -> nn.Module:
    net: nn.Module = ADAPTERS[1].wrap(models.make_net(), Strategy.diloco(gpus_per_node=1))
    models.loss_of(net, models.batch(0, 0))
    return net


def adapted() -> nn.Module:
    return llama.adapt(llama.make_base(), {"default": "lora"})


def no_module() -> int:
    return 3


# Arguments that are right, ``model`` as a function that makes it.
GOOD: dict[str, dict[str, Any]] = {
    "quantize_frozen_params": {"model": lora.make_base, "gpus_per_node": 2},
    "dequantize_frozen_params": {"model": quantized},
    "save_frozen_params": {"model": quantized, "path": "saved"},
    "load_frozen_params": {"model": lora.make_base, "path": "base", "gpus_per_node": 2},
    "save_adapter": {"model": adapted, "path": "saved"},
    "gathered_weights": {"model": adapted},
    "exchange_weights": {"model": local},
    "QuantizedReduceState": {"codec": Int8(64), "gpus_per_node": 1},
}
# Functions with an argument that is not, and a part of what is said.
BAD: list[tuple[str, str, Any, str]] = [
    ("quantize_frozen_params", "model", no_module, "model must be an nn.Module"),
    ("quantize_frozen_params", "model", with_nan, "blocks.1.up.weight has values that are NaN or infinite"),
    ("quantize_frozen_params", "codec", "int8", "codec must be a codec such as"),
    ("quantize_frozen_params", "placement", "X", "X on rank"),
    ("quantize_frozen_params", "gpus_per_node", 3, "gpus_per_node: "),
    ("quantize_frozen_params", "checkpoint", 3, "from a checkpoint: "),
    ("quantize_frozen_params", "ignored_params", 3, "not iterable"),
    ("dequantize_frozen_params", "model", no_module, "model must be an nn.Module"),
    ("dequantize_frozen_params", "model", lora.make_base, "other quantized weights than rank"),
    ("save_frozen_params", "model", lora.make_base, "nothing of this Net is quantized"),
    ("save_frozen_params", "path", None, "path must be a folder"),
    ("save_frozen_params", "max_file_size", "5 apples", "must be a positive number of bytes, got"),
    ("load_frozen_params", "model", no_module, "model must be an nn.Module"),
    ("load_frozen_params", "path", None, "path must be a folder"),
    ("load_frozen_params", "path", "missing", "which save_frozen_params writes"),
    ("save_adapter", "model", lora.make_base, "there is no PeftModel in this Net"),
    ("save_adapter", "path", None, "path must be a folder"),
    ("save_adapter", "adapters", "default", "adapters must be a list of names such as ['default'], got 'default'"),
    ("save_adapter", "adapters", ["missing"], "there is no adapter ['missing'] in this model"),
    ("gathered_weights", "model", no_module, "model must be an nn.Module"),
    ("gathered_weights", "model", lora.make_base, "with other arguments or another model than rank"),
    ("gathered_weights", "dtype", torch.int8, "dtype must be one of"),
    ("gathered_weights", "adapters_only", "default", "adapters_only must be a bool"),
    ("gathered_weights", "adapters_only", True, "called gathered_weights with other arguments"),
    ("gathered_weights", "merged", 1, "merged must be a bool"),
    ("gathered_weights", "rank", 2, "rank must be a rank of the model: one of [0, 1], got 2"),
    ("exchange_weights", "model", models.make_net, "no part of this Net"),
    ("QuantizedReduceState", "codec", 3, "codec must be"),
    ("QuantizedReduceState", "intra_codec", 3, "intra_codec must be"),
    ("QuantizedReduceState", "error_feedback", 3, "error_feedback must be"),
]


def replies_of(function: str) -> dict[int, dict[str, Reply]]:
    """In a worker: what each bad argument raises; nothing is written, and the same model then takes good ones."""
    good = {name: value() if name == "model" else value for name, value in GOOD[function].items()}

    def call(**wrong: Any) -> None:
        arguments = good | wrong
        if isinstance(arguments.get("path"), str):
            arguments["path"] = Path(folder, arguments["path"])
        result = getattr(fsdp_zpp, function)(**arguments)
        if isinstance(result, Iterator):
            list(result)

    def given(argument: str, value: Any, said: str) -> Mistake:
        changed = {argument: value() if argument == "model" else value}
        return Mistake(lambda wrong: call(**changed if wrong else {}), said, None, ALONE)

    with shared_folder() as folder:
        if function == "load_frozen_params":
            save_frozen_params(quantized(), Path(folder, "base"))
        replies = {i: replies_to(given(*row[1:])) for i, row in enumerate(BAD) if row[0] == function}
        assert not Path(folder, "saved").exists()
        call()
    return replies


@pytest.mark.parametrize("row", [pytest.param(i, id="-".join(bad[:2])) for i, bad in enumerate(BAD)])
def test_a_bad_argument_on_one_rank_raises_on_all(pool: Pools, row: int) -> None:
    function, _, _, said = BAD[row]
    replies = pool(2).once(replies_of, function)
    assert_refused(Mistake(bool, said, None, ALONE), [of_rank[row] for of_rank in replies])


def test_all_public_names_are_here() -> None:
    assert set(fsdp_zpp.__all__) == NOT_COLLECTIVE | set(GOOD) | {"fully_shard"}


# ---- what goes wrong later


def retried(adapter: Adapter) -> tuple[list[str], float]:
    """In a worker: what first forwards raise while a node holds other weights; how far a training, once it holds the
    same, is from one that has never failed."""
    case = Case(steps=2, micro_batches=2, clip=None)
    model, never_failed = (adapter.make(case, Strategy("III", gpus_per_node=2)) for _ in range(2))
    changed = adapter.local(next(p for p in model.parameters() if adapter.local(p).numel())).detach()
    right = changed.clone()
    changed.add_(dist.get_rank() // 2)
    texts = []
    for _ in range(3):
        with pytest.raises(ValueError, match="different weights") as caught:
            models.loss_of(model, models.batch(0, 0)).backward()
        texts.append(str(caught.value))
    changed.copy_(right)
    for each in (model, never_failed):
        train(adapter, each, case)
    return texts, models.distance(adapter.full_weights(model), adapter.full_weights(never_failed))


@over_adapters
def test_a_retry_raises_the_same_until_the_cause_is_mended(pool: Pools, adapter: Adapter) -> None:
    results = pool(4).run(retried, adapter)
    assert results == [([results[0][0][0]] * 3, 0.0)] * 4


def without_the_last() -> list[str]:
    """In a worker: what is raised where the last rank leaves a gather half-way, and a step out."""
    case, is_last = Case(model=(("blocks", 1),), steps=1, clip=None), dist.get_rank() == dist.get_world_size() - 1

    def gather(adapter: Adapter, model: Any) -> None:
        weights = gathered_weights(model)
        next(weights)
        if not is_last:
            list(weights)

    def step(adapter: Adapter, model: Any) -> None:
        if not is_last:
            train(adapter, model, case)

    # All of them first: the last rank does not wait for the others any more.
    groups = [dist.new_group(timeout=timedelta(seconds=4)) for _ in ADAPTERS]
    trained = [
        each.make(case, Strategy.zeropp(gpus_per_node=2), group) for each, group in zip(ADAPTERS, groups, strict=True)
    ]
    for adapter, model in zip(ADAPTERS, trained, strict=True):
        train(adapter, model, case)
    acts = zip((gather, step), ADAPTERS, trained, strict=True)
    return [messages.attempt((partial(act, adapter, model), RuntimeError, ""))[0] for act, adapter, model in acts]


@pytest.mark.skipif(device_type() == "cuda", reason="NCCL's watchdog ends the process instead of raising")
def test_a_rank_that_leaves_is_an_error_on_the_others_within_the_timeout() -> None:
    pool = Pool(4)
    try:
        assert pool.run(without_the_last) == [["RuntimeError"] * 2] * 3 + [["no error"] * 2]
    finally:
        pool.stop(kill=True)


# ---- nodes that train on their own


@dataclass
class LocalNode:
    """A training on this node, whose last step may still have to be made."""

    adapter: Adapter
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def forward(self) -> None:
        models.loss_of(self.model, models.batch(9, 0)).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def exchange(self) -> None:
        exchange_weights(self.model)

    def gather(self) -> None:
        dict(gathered_weights(self.model))

    def wrap(self) -> None:
        self.adapter.wrap(models.make_net(), TWO)

    def load_codec_state(self) -> None:
        codecs = CodecState(self.model, self.optimizer)
        codecs.load_state_dict(codecs.state_dict())

    def load_weights(self) -> None:
        self.adapter.load_from(self.model, self.model, self.adapter.state_dict_kinds[0])


Places = dict[str, tuple[str, str]]
PLACES: Places = {
    "exchange": ("step exchange", "in exchange_weights"),
    "gather": ("gather", "gathered_weights"),
    "wrap": ("wrap", "FullyShardedDataParallel(Net)|fully_shard(Net)"),
    "codec state": ("step load_codec_state forward", "the first use of codec state that was loaded"),
}
"""Actions of a node after the backward of a second step, each with the words of its error."""
APART: Places = {"weights": ("step load_weights forward", "at the first use of weights that were loaded")}
STEP_3 = "before the forward of step 3"
PHASES: dict[str, tuple[dict[str, Any], Places]] = {
    "an exchange": (
        {"every": 2, "spread": False, "overlap": 1, "error_feedback": LoCo(), "codec": Int4(32)},
        PLACES | APART | {"forward": ("step forward", STEP_3)},
    ),
    "the start": (
        {"every": 2, "start": 2},
        PLACES
        | {"forward": ("step forward", f"{STEP_3}, where local steps begin")}
        | {"no step": ("forward", "before the forward of step 2")},
    ),
}
"""Local steps, and the places where nodes may be under them."""


def met(adapter: Adapter, levels: str, gpus_per_node: int, phase: str) -> list[tuple[str, str, str]]:
    """In a worker: the errors where the last node is at one place and the others at another, each place in turn."""
    config, places = PHASES[phase]
    strategy = Strategy(levels, local_steps=LocalSteps(**config), gpus_per_node=gpus_per_node)
    is_last, found = dist.get_rank() >= dist.get_world_size() - gpus_per_node, []
    for pair in pairwise([*places, next(iter(places))]):
        if places[pair[0]][1] == places[pair[1]][1]:
            continue
        model = adapter.make(ONE_BLOCK, strategy)
        node = LocalNode(adapter, model, models.make_optimizer("adamw", model.parameters()))
        train(adapter, model, replace(ONE_BLOCK, steps=1), optimizer=node.optimizer)
        node.forward()
        acts = [getattr(node, act) for act in places[pair[is_last]][0].split()]
        kind, text, _ = messages.attempt((lambda acts=acts: [act() for act in acts], ValueError, ""))
        found.append((*pair, f"{kind}: {text}"))
    return found


@over_each(rest=False, adapter=ADAPTERS, layout=[("III", 1), ("INI", 2), ("NNI", 2)], phase=list(PHASES))
def test_nodes_at_different_places_are_told_where_each_of_them_is(
    pool: Pools, adapter: Adapter, layout: tuple[str, int], phase: str
) -> None:
    for found in pool(2 * layout[1]).run(met, adapter, *layout, phase):
        assert len(found) > 3
        for *pair, text in found:
            assert text.startswith("ValueError: "), (pair, text)
            for place in pair:
                assert any(each in text for each in PHASES[phase][1][place][1].split("|")), (pair, text)
