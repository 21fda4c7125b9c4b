"""Writes to weights do what a table here says; FSDP_ZPP_CHECK=1 notices all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.adapter import Adapter, Case, Fsdp1, Fsdp2
from harness.covering import ADAPTERS, over_each
from harness.local_nodes import this_node
from harness.pool import Pools, device_type, shared_folder
from harness.training import logits, train
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_zpp import Int8, Strategy, invalidate
from fsdp_zpp.comm.weight_gather import CHECK, StaleSecondaryError
from fsdp_zpp.runtime.unit import StrategyUnit, named_units


@contextmanager
def checked_weights(on: bool = True) -> Iterator[None]:
    """Have models that are made in the context compare what gathers reuse with the shards, or not."""
    with patch.dict(os.environ):
        os.environ.pop(CHECK, None)
        if on:
            os.environ[CHECK] = "1"
        yield


STRATEGIES = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in ("IGG", "IIG", "NGG", "NNG", "NII")} | {
    "zeropp": Strategy.zeropp(gpus_per_node=2),
    "encoded NGG": Strategy("NGG", weights=Int8(64), gpus_per_node=2),
}


def written(adapter: Adapter, strategy: Strategy, ranks: list[int], announce: bool) -> str:
    """In a worker: the error of a forward after some ranks wrote to blocks, in a way that torch does not count."""
    with checked_weights():
        model = adapter.make(Case(), strategy)
    before = logits(model)
    if dist.get_rank() in ranks:
        for block in getattr(model, "module", model).blocks[1:]:
            for p in block.parameters():
                p.data.mul_(0.5)
    if announce:
        invalidate(model)
    try:
        return "ignored" if torch.equal(logits(model), before) else "used"
    except StaleSecondaryError as error:
        return str(error)


@over_each(rest=False, adapter=ADAPTERS, strategy=STRATEGIES, ranks={"one": [2], "a node": [0, 1], "all": [0, 1, 2, 3]})
def test_every_rank_raises_if_any_has_written(
    pool: Pools, adapter: Adapter, strategy: Strategy, ranks: list[int]
) -> None:
    found = pool(4).run(written, adapter, strategy, ranks, False)
    # Under the optimizer scope I, each node gathers by itself.
    gathering = {rank // 2 * 2 + i for rank in ranks for i in range(2)} if strategy.levels[2] == "I" else set(range(4))
    assert {rank for rank in range(4) if "the weights of blocks.1 were changed" in found[rank]} == gathering
    announced = pool(4).run(written, adapter, strategy, ranks, True)
    assert announced == ["used" if rank in gathering else "ignored" for rank in range(4)]


def checked_training(adapter: Adapter, strategy: Strategy) -> bool:
    """In a worker: whether training under the check goes as without."""
    weights = []
    for on in (True, False):
        with checked_weights(on):
            model = adapter.make(Case(), strategy)
        case = Case(steps=2, micro_batches=2, optimizer="adamw-fused")
        train(adapter, model, case, after_step=lambda step, optimizer, model=model: logits(model))
        adapter.load_from(model, model, adapter.state_dict_kinds[0])
        logits(model)
        weights.append(adapter.full_weights(model))
    return all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


@over_each(rest=False, adapter=ADAPTERS, strategy={name: STRATEGIES[name] for name in ("encoded NGG", "zeropp")})
def test_training_is_the_same(pool: Pools, adapter: Adapter, strategy: Strategy) -> None:
    assert pool(4).run(checked_training, adapter, strategy) == [True] * 4


# ---- the table of writes

Way = Callable[[Any], object]
"""Writes to a model, in a worker."""


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values(model: Any) -> list[Any]:
    """Values that both functions return for parameters, in turns."""
    named = [model.state_dict(), get_model_state_dict(model)]
    names = [name for name in named[0] if not name.endswith("shift")]  # which are buffers
    return [named[i % 2][name] for i, name in enumerate(names)]


def local_values(model: Any) -> list[Tensor]:
    """The tensors of a LOCAL_STATE_DICT that this rank holds."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        sharded = [value for value in model.state_dict().values() if isinstance(value, ShardedTensor)]
    return [shard.tensor for value in sharded for shard in value.local_shards()]


def halve(tensors: list[Any]) -> None:
    for tensor in tensors:
        tensor.mul_(0.5)


def halve_all(tensors: list[Any]) -> None:
    torch._foreach_mul_([tensor for tensor in tensors if local(tensor).numel()], 0.5)


def interpolate(tensors: list[Any]) -> None:
    held = [tensor for tensor in tensors if local(tensor).numel()]
    torch._foreach_lerp_(held, [torch.zeros_like(tensor) for tensor in held], 0.5)


def load_checkpoint(model: Any, loads: Callable[[dict[str, Any], str], None]) -> None:
    """Load other weights in place, in one of the ways of torch."""
    state = get_model_state_dict(model)
    halves = {name: value * 0.5 if isinstance(value, DTensor) else value for name, value in state.items()}
    with shared_folder() as folder:
        dcp.save(halves, checkpoint_id=folder)
        loads(state, folder)


def another() -> Any:
    return Fsdp2().make(Case(model=(("blocks", 1),)), STRATEGIES["IGG"])


def load_by_node(state: dict[str, Any], folder: str) -> None:
    with this_node(1) as node:
        dcp.load(state, checkpoint_id=folder, process_group=node)


def restored_optimizer(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())


def replace(model: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def replace_by_vector(model: Any) -> None:
    parameters = list(model.parameters())
    numel = sum(p.numel() for p in parameters)
    torch.nn.utils.vector_to_parameters(torch.zeros(numel, device=parameters[0].device), parameters)


def parameters(model: Any) -> list[Any]:
    return list(model.parameters())


def fused(model: Any) -> None:
    """By the kernel itself, so that there is no step."""
    held = [local(p).detach() for p in model.parameters() if local(p).numel()]
    state: list[list[Tensor]] = [[torch.zeros_like(p) for p in held] for _ in range(2)]
    steps = [torch.tensor(1.0, device=p.device) for p in held]
    how = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    torch._fused_adamw_(held, [torch.ones_like(p) for p in held], *state, [], steps, lr=0.5, **how)


ROWS: dict[str, list[Way]] = {
    "`model.load_state_dict()`, `set_model_state_dict`": [
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: set_model_state_dict(model, get_model_state_dict(model)),
    ],
    "`dcp.load(get_model_state_dict(model))`, on all ranks": [
        partial(load_checkpoint, loads=lambda state, folder: dcp.load(state, checkpoint_id=folder)),
    ],
    "`dcp.load(get_model_state_dict(another))`, on all ranks": [
        lambda model: load_checkpoint(another(), lambda state, folder: dcp.load(state, checkpoint_id=folder)),
    ],
    "`dcp.load` with `no_dist=True`, or on some ranks": [
        partial(load_checkpoint, loads=lambda state, folder: dcp.load(state, checkpoint_id=folder, no_dist=True)),
        partial(load_checkpoint, loads=load_by_node),
    ],
    "`optimizer.load_state_dict()`": [restored_optimizer],
    "`p.mul_()`, and to `p.to_local()`": [
        lambda model: halve(parameters(model)),
        lambda model: halve([local(p) for p in parameters(model)]),
    ],
    "`torch._foreach_mul_` on `p.to_local()`": [lambda model: halve_all([local(p) for p in parameters(model)])],
    "on CPUs: `torch._foreach_mul_`, `torch._foreach_lerp_` on parameters": [
        lambda model: halve_all(parameters(model)),
        lambda model: interpolate(parameters(model)),
    ],
    "on GPUs: `torch._foreach_mul_` on parameters": [lambda model: halve_all(parameters(model))],
    "on GPUs: `torch._foreach_lerp_` on parameters or `p.to_local()`": [
        lambda model: interpolate(parameters(model)),
        lambda model: interpolate([local(p) for p in parameters(model)]),
    ],
    "`p.data.mul_()`": [lambda model: halve([p.data for p in parameters(model)])],
    "`p.data.to_local().mul_()`": [lambda model: halve([local(p.data) for p in parameters(model)])],
    "`p.detach().to_local().mul_()`": [lambda model: halve([local(p.detach()) for p in parameters(model)])],
    "`p.data = other`, `torch.nn.utils.vector_to_parameters`": [replace, replace_by_vector],
    "fused kernels (`torch._fused_adamw_`)": [fused],
    "`value.mul_()`, and to `value.to_local()`": [
        lambda model: halve(values(model)),
        lambda model: halve([local(value) for value in values(model)]),
    ],
    "`value.data.to_local().mul_()`, values of `state_dict(keep_vars=True)`": [
        lambda model: halve([local(value.data) for value in values(model)]),
        lambda model: halve([local(value) for value in model.state_dict(keep_vars=True).values()]),
    ],
    "`torch._foreach_mul_` on `value.to_local()`": [lambda model: halve_all([local(value) for value in values(model)])],
    "on CPUs: `torch._foreach_mul_` on values": [lambda model: halve_all(values(model)[1::2])],
    "on GPUs: `torch._foreach_mul_` on values": [lambda model: halve_all(values(model)[1::2])],
    "`value.data.mul_()`, `value.detach().to_local().mul_()`": [
        lambda model: halve([value.data for value in values(model)]),
        lambda model: halve([local(value.detach()) for value in values(model)]),
    ],
    "values of a `LOCAL_STATE_DICT`": [lambda model: halve(local_values(model))],
}


def outcome(adapter: Adapter, row: str, way: Way, strategy: Strategy, checked: bool) -> str:
    """In a worker: the effect of a write, in the words of the table."""
    with checked_weights(checked):
        # torch has no local state dicts on a mesh.
        model = (Fsdp1() if "LOCAL" in row else adapter).make(Case(model=(("blocks", 1),)), strategy)
    logits(model)
    adapter.before_load(model)
    units = [unit for unit in named_units(model) if isinstance(unit, StrategyUnit) and unit.gather is not None]
    before = [shard.clone() for unit in units for shard in unit.sharded.shards()]
    with torch.no_grad():
        way(model)
    written = not all(map(torch.equal, before, (shard for unit in units for shard in unit.sharded.shards())))
    shards = [unit.gather.secondary for unit in units if unit.gather is not None]
    if all(each.stale for each in shards):
        return "event"
    if any(each.is_outdated for each in shards):
        return "counted"
    return "**not counted**" if written else "no write"


def outcomes(adapter: Adapter, strategy: Strategy, column: int, checked: bool) -> dict[str, list[str]]:
    """In a worker: the effect of each way of each row that a column says something of."""
    rows = [row for row in HERE if LINES[row][column]]
    return {row: [outcome(adapter, row, way, strategy, checked) for way in ROWS[row]] for row in rows}


TABLE = """
| Write | `FullyShardedDataParallel` | `fully_shard` |
|---|---|---|
| `model.load_state_dict()`, `set_model_state_dict` | event | event |
| `dcp.load(get_model_state_dict(model))`, on all ranks | no write | event |
| `dcp.load(get_model_state_dict(another))`, on all ranks | no write | no write |
| `dcp.load` with `no_dist=True`, or on some ranks | no write | counted |
| `optimizer.load_state_dict()` | no write | no write |
| `p.mul_()`, and to `p.to_local()` | counted | counted |
| `torch._foreach_mul_` on `p.to_local()` | counted | counted |
| on CPUs: `torch._foreach_mul_`, `torch._foreach_lerp_` on parameters | counted | **not counted** |
| on GPUs: `torch._foreach_mul_` on parameters | counted | counted |
| on GPUs: `torch._foreach_lerp_` on parameters or `p.to_local()` | **not counted** | **not counted** |
| `p.data.mul_()` | **not counted** | **not counted** |
| `p.data.to_local().mul_()` | **not counted** | counted |
| `p.detach().to_local().mul_()` | counted | **not counted** |
| `p.data = other`, `torch.nn.utils.vector_to_parameters` | counted | no write |
| fused kernels (`torch._fused_adamw_`) | **not counted** | **not counted** |
| `value.mul_()`, and to `value.to_local()` | no write | counted |
| `value.data.to_local().mul_()`, values of `state_dict(keep_vars=True)` | no write | counted |
| `torch._foreach_mul_` on `value.to_local()` | no write | counted |
| on CPUs: `torch._foreach_mul_` on values | no write | **not counted** |
| on GPUs: `torch._foreach_mul_` on values | no write | counted |
| `value.data.mul_()`, `value.detach().to_local().mul_()` | no write | **not counted** |
| values of a `LOCAL_STATE_DICT` | counted | |
"""
"""The effects of writes. In it, ``p`` is a parameter of the model and ``value`` one of ``model.state_dict()`` or
``get_model_state_dict(model)``. An *event* makes the secondary shard stale. A write that is *counted* raises unless
``invalidate`` is called. *No write* means that the weights stay as they are, as with torch's own strategies: under
``FullyShardedDataParallel``, full and sharded state dicts are copies.
"""
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.split("\n")[3:-1]]
LINES = {row[0]: row[1:] for row in CELLS}
ELSEWHERE = "on CPUs" if device_type() == "cuda" else "on GPUs"
HERE = [name for name in ROWS if not name.startswith(ELSEWHERE)]
COLUMNS: dict[str, tuple[Adapter, int]] = {"fsdp1": (Fsdp1(mesh=True), 0), "fsdp2": (Fsdp2(), 1)}


def test_the_table_has_the_rows_that_are_measured() -> None:
    assert LINES.keys() == ROWS.keys()


@over_each(
    rest=False,
    use={f"{name}-{'checked' * on}": (*COLUMNS[name], on) for on in (False, True) for name in COLUMNS},
    strategy={"IGG": Strategy("IGG", gpus_per_node=1), "zeropp": Strategy.zeropp(gpus_per_node=1)},
)
def test_what_comes_of_a_write_is_in_the_table(pool: Pools, use: tuple[Adapter, int, bool], strategy: Strategy) -> None:
    """Under the check, every write is noticed."""
    adapter, index, checked = use
    said = {
        row: LINES[row][index].replace("**not counted**", "counted" if checked else "**not counted**") for row in HERE
    }
    expected = {row: [said[row]] * len(ROWS[row]) for row in HERE if said[row]}
    assert pool(2).run(outcomes, adapter, strategy, index, checked) == [expected] * 2
