"""A job that needs nothing but what the package declares: every public name, and a save and a load under both FSDPs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

import fsdp_zpp
from fsdp_zpp import CodecState, Int8, Strategy

STRATEGY = Strategy.loco(gpus_per_node=1)


def make(adapter: str) -> nn.Module:
    """Return a small sharded model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if adapter == "fully_shard":
        return fsdp_zpp.fully_shard(model, strategy=STRATEGY)
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "sharding_strategy": STRATEGY}
    return FullyShardedDataParallel(model, use_orig_params=True, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """Train one step; return its loss."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * seed + dist.get_rank()))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def check_resuming(adapter: str, folder: Path) -> None:
    """Fail unless a training goes on from its checkpoint, codec state included, as if it had not stopped."""
    losses = []
    for resumes in (False, True):
        model = make(adapter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if not resumes:
            [step(model, optimizer, seed) for seed in range(3)]
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "codecs": CodecState(model)}
        (dcp.load if resumes else dcp.save)(state, checkpoint_id=folder)
        if resumes:
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        losses.append([step(model, optimizer, seed) for seed in range(3, 5)])
    assert losses[0] == losses[1], losses


def check_base(folder: Path) -> None:
    """Fail unless a frozen base comes back from its files."""
    base = nn.Linear(64, 64).requires_grad_(False)
    fsdp_zpp.quantize_frozen_params(base, Int8(64))
    fsdp_zpp.save_frozen_params(base, folder)
    with torch.device("meta"):
        loaded = nn.Linear(64, 64).requires_grad_(False)
    fsdp_zpp.load_frozen_params(loaded, folder)
    assert torch.equal(loaded(torch.ones(1, 64)), base(torch.ones(1, 64)))


def check_disagreement() -> None:
    """Fail unless ranks that were given different strategies are told so."""
    strategy = (Strategy.zeropp, Strategy.zero3)[dist.get_rank()](gpus_per_node=1)
    message = ""
    try:
        fsdp_zpp.fully_shard(nn.Linear(64, 64), strategy=strategy)
    except ValueError as error:
        message = str(error)
    assert "levels: IGG on rank 0, GGG on rank 1" in message, message


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for name in fsdp_zpp.__all__:
        getattr(fsdp_zpp, name)
    for adapter in ("FullyShardedDataParallel", "fully_shard"):
        check_resuming(adapter, folder / adapter)
    check_base(folder / "base")
    check_disagreement()
    if dist.get_rank() == 0:
        print(Path(fsdp_zpp.__file__).parent, flush=True)
    dist.destroy_process_group()
    # FSDP, stock too, keeps the default group alive, and with it gloo's threads: one that lets go of a tensor while
    # Python shuts down ends the process with "terminate called without an active exception".
    os._exit(0)
