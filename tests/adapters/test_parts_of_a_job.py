"""Models on disjoint halves of a job, or on the second half alone, do all that a model on a job of its own does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import llama, lora, models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import over_adapters
from harness.fsdp1 import Fsdp1
from harness.pool import Pool, device_type
from peft import PeftModel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_zpp import (
    CodecState,
    Int4,
    Int8,
    LocalSteps,
    QuantizedReduceState,
    Strategy,
    agreed_weights,
    dequantize_frozen_params,
    exchange_weights,
    invalidate,
    load_frozen_params,
    quantize_frozen_params,
    quantized_reduce_hook,
    save_adapter,
    save_frozen_params,
    traffic,
)

Group = dist.ProcessGroup | None


def digest(tensors: dict[str, Tensor]) -> str:
    """A text that differs if any bit does."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained(adapter: Adapter, model: Any, group: Group, steps: int = 3) -> list[float]:
    """Train on batches that depend on the rank in the group."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(steps):
        loss = models.loss_of(model, models.batch(step, 0, dist.get_rank(group)))
        loss.backward()
        adapter.clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def where(adapter: Adapter, group: Group) -> dict[str, Any]:
    """The arguments by which an adapter is told of a group."""
    if group is None:
        return {}
    if isinstance(adapter, Fsdp1):
        return {"process_group": group}
    return {"mesh": DeviceMesh.from_group(group, device_type())}


def strategies(adapter: Adapter, seed: int, group: Group, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, strategy in {
        "plain": Strategy(gpus_per_node=2),
        "as launched": Strategy(),
        "zeropp": Strategy.zeropp(gpus_per_node=1),
        "loco": Strategy.loco(gpus_per_node=1),
        "within nodes": Strategy("IIG", gpus_per_node=2),
        "replicas": Strategy("NNN", gpus_per_node=1),
    }.items():
        model = adapter.shard(models.make_net(seed), Case(), strategy, group)
        found[name] = [trained(adapter, model, group), digest(adapter.full_weights(model)), traffic(model)]
        state = CodecState(model)
        state.load_state_dict(state.state_dict())
        invalidate(model)
        found[f"{name}, resumed"] = trained(adapter, model, group)
    return found


def local_steps(adapter: Adapter, seed: int, group: Group, folder: Path) -> dict[str, Any]:
    model = adapter.shard(
        models.make_net(seed), Case(), Strategy.diloco(gpus_per_node=1, local_steps=LocalSteps(2)), group
    )
    losses = trained(adapter, model, group)
    with agreed_weights(model):
        agreed = digest(adapter.full_weights(model))
    exchange_weights(model)
    return {"losses": losses, "agreed": agreed, "exchanged": digest(adapter.full_weights(model))}


def frozen_base(adapter: Adapter, seed: int, group: Group, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    net = lora.make_net(seed)
    found["report"] = str(quantize_frozen_params(net, Int8(64), process_group=group))
    model = adapter.shard(net, Case(), Strategy("IGG"), group)
    found["trained"] = trained(adapter, model, group)
    save_frozen_params(model, folder / "base", max_file_size="20KB")
    found["files"] = len(list((folder / "base").iterdir()))
    other = lora.make_net(seed)
    load_frozen_params(other, folder / "base", process_group=group)
    found["loaded"] = dequantize_frozen_params(other), digest(other.state_dict())
    model = adapter.shard(lora.make_net(seed), Case(), Strategy.mixzpp(gpus_per_node=1), group)
    found["by strategy"] = trained(adapter, model, group)
    save_frozen_params(model, folder / "base")
    found["files, replaced"] = len(list((folder / "base").iterdir()))
    net = lora.make_net(seed)
    net.head = adapter.wrap(net.head, STOCK, **where(adapter, group))
    found["wrapped in part"] = str(quantize_frozen_params(net, Int8(64), ignored_params=list(net.head.parameters())))
    return found


def peft_adapter(adapter: Adapter, seed: int, group: Group, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, strategy in {"quantized": Strategy.mixzpp(gpus_per_node=1), "stock": STOCK}.items():
        model = llama.adapt(llama.make_base(), {"default": "lora"})
        model = llama.shard(adapter, model, strategy, **where(adapter, group))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1 * (seed + 1))
        llama.loss_of(model, llama.tokens(0, dist.get_rank(group))).backward()
        optimizer.step()
        save_adapter(model, folder / name)
        loaded = PeftModel.from_pretrained(llama.make_base(), folder / name)
        found[name] = digest({key: value for key, value in loaded.state_dict().items() if "lora" in key})
    return found


def comm_hook(adapter: Adapter, seed: int, group: Group, folder: Path) -> dict[str, Any]:
    if not isinstance(adapter, Fsdp1):
        return {}
    model = adapter.shard(models.make_net(seed), Case(), STOCK, group)
    state = QuantizedReduceState(Int4(128), gpus_per_node=1, process_group=group)
    model.register_comm_hook(state, quantized_reduce_hook)
    return {"losses": trained(adapter, model, group), "traffic": traffic(model)}


COMMUNICATORS = (strategies, local_steps, frozen_base, peft_adapter, comm_hook)


def on_half(adapter: Adapter, part: str, halves: tuple[int, ...], folder: str) -> dict[str, Any]:
    """In a worker of a job of two halves: what a model gives on each of ``halves``; it has the half's seed."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    if half not in halves:
        return {}
    return globals()[part](adapter, half, groups[half], Path(folder, str(half)))


def on_its_own(adapter: Adapter, part: str, seed: int, folder: str) -> dict[str, Any]:
    """In a worker: the same, in a job of its own."""
    return globals()[part](adapter, seed, None, Path(folder))


@pytest.mark.parametrize("part", [part.__name__ for part in COMMUNICATORS])
@over_adapters
def test_models_on_halves_of_a_job_do_what_they_do_alone(
    pool: Callable[[int], Pool], adapter: Adapter, part: str, tmp_path: Path
) -> None:
    own = [pool(2).run(on_its_own, adapter, part, seed, str(tmp_path / f"own{seed}")) for seed in range(2)]
    assert pool(4).run(on_half, adapter, part, (0, 1), str(tmp_path / "both")) == own[0] + own[1]
    assert pool(4).run(on_half, adapter, part, (1,), str(tmp_path / "second")) == [{}, {}, *own[1]]
