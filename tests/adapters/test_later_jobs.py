"""Jobs that a process runs in turn, as notebooks and tests do, each give what they give on their own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case, Fsdp1
from harness.covering import ADAPTERS
from harness.pool import Pools, device_type, start_method
from harness.training import train
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from fsdp_zpp import LocalSteps, Strategy, clip_grad_norm_, gathered_weights

CASE = Case(model=(("blocks", 1),), steps=2)


@dataclass(frozen=True)
class Job:
    world: int = 4
    gpus_per_node: int = 2
    is_turned: bool = False  # processes have ranks in reverse order, and make other groups before the model's
    backend: str = "gloo"


JOBS = (Job(), Job(2, 1, is_turned=True), Job(4, 1, backend="cpu:gloo"))


def strategies(gpus_per_node: int) -> dict[str, Strategy]:
    return {
        "loco": Strategy.loco(gpus_per_node=gpus_per_node),
        "local steps": Strategy("NNI", gpus_per_node=gpus_per_node, local_steps=LocalSteps(2)),
    }


def found_by_a_mesh(parameter: Any) -> dict[str, Any]:
    """Values that a user computes with a sharded parameter and its mesh."""
    mesh, placements = parameter.device_mesh, parameter.placements
    dist.all_reduce(total := torch.ones(1), group=mesh.get_group())
    ones = distribute_tensor(torch.ones(parameter.shape), mesh, placements)
    local = DTensor.from_local(parameter.to_local(), mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return {
        "full": parameter.full_tensor(),
        "replicated": parameter.redistribute(mesh, [Replicate()]).to_local(),
        "computed": ((2 * parameter + ones) * local).sum().full_tensor(),
        "from local": torch.linalg.vector_norm(local).full_tensor(),
        "norm": torch.linalg.vector_norm(parameter).full_tensor(),
        "members": total,
        "ranks": torch.tensor(dist.get_process_group_ranks(mesh.get_group())),
    }


def state_dicts(model: Any, optimizer: Any, full: bool) -> dict[str, Any]:
    """Whole values of a model's and an optimizer's state dicts, which are set again."""
    options = StateDictOptions(full_state_dict=full)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options)
    states = {f"{name}.{key}": v for name, state in of_optimizer["state"].items() for key, v in state.items()}
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in (of_model | states).items()}


def found_in_a_job(adapter: Adapter, gpus_per_node: int, kept: list[Any] | None = None) -> dict[str, Any]:
    """In a worker: what models under each strategy give; they live on in ``kept``."""
    found: dict[str, Any] = {}
    for name, strategy in strategies(gpus_per_node).items():
        is_fsdp1 = isinstance(adapter, Fsdp1)
        if is_fsdp1:  # its sharded state dicts are DTensors only with a mesh
            mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
            model = adapter.wrap(models.make_net(**dict(CASE.model)), strategy, device_mesh=mesh)
        else:
            model = adapter.make(CASE, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found[name] = {"losses": train(adapter, model, CASE, optimizer=optimizer)}
        for full in (True, False):
            found[name] |= {f"{full}, {key}": value for key, value in state_dicts(model, optimizer, full).items()}
        found[name] |= {f"gathered {key}": value.clone() for key, value in gathered_weights(model)}
        if not is_fsdp1:
            models.loss_of(model, models.batch(9, 0)).backward()
            found[name]["clipped"] = clip_grad_norm_(model.parameters(), 0.1)
            found[name] |= found_by_a_mesh(next(model.parameters()))
        if kept is not None:
            kept += [model, optimizer]
    return {name: {key: _plain(value) for key, value in of.items()} for name, of in found.items()}


def _plain(value: Any) -> Any:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.tolist() if isinstance(whole, Tensor) else whole


def in_turn(process: int, folder: str) -> None:
    """A process that takes part in all jobs that have a rank for it."""
    torch.set_num_threads(1)
    kept: list[Any] = []
    for number, job in enumerate(JOBS):
        rank = 3 - process if job.is_turned else process
        if rank >= job.world:
            continue
        os.environ |= {"LOCAL_WORLD_SIZE": str(job.gpus_per_node), "RANK": str(rank)}
        dist.init_process_group(
            job.backend, init_method=f"file://{folder}/store{number}", rank=rank, world_size=job.world
        )
        if job.is_turned:
            init_device_mesh(device_type(), (2, job.world // 2), mesh_dim_names=("outer", "inner"))
        kept = kept[len(kept) // 2 :]  # some outlive their job
        found = [found_in_a_job(adapter, job.gpus_per_node, kept) for adapter in ADAPTERS]
        torch.save(found, Path(folder, f"{number} {rank}"))
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.skipif(device_type() == "cuda", reason="processes are their ranks, also in smaller jobs")
def test_jobs_of_a_process_give_what_each_gives_alone(pool: Pools, tmp_path: Path) -> None:
    start_processes(in_turn, (str(tmp_path),), 4, start_method=start_method().get_start_method())
    for number, job in enumerate(JOBS):
        for i, adapter in enumerate(ADAPTERS):
            for rank, alone in enumerate(pool(job.world).run(found_in_a_job, adapter, job.gpus_per_node)):
                found = torch.load(tmp_path / f"{number} {rank}")[i]
                for name, expected in alone.items():
                    assert found[name] == expected, (number, adapter, rank, name)
