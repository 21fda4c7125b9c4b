"""Quantizing what fully_shard has sharded: the same model as if it had been quantized before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import llama, lora, models
from harness.adapter import STOCK, Case, Precision
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import Pool, device_type
from harness.refusals import Refusal, Reply, assert_refused, attempt as attempt_refusal
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_zpp import Int4, Int8, LoCo, Strategy, load_frozen_params, quantize_frozen_params, save_frozen_params

CODEC = Int8(64)
BF16 = Precision(torch.bfloat16, torch.float32)


def quantize(net: nn.Module, **options: Any) -> Any:
    """In a worker: quantize in blocks of 64 on nodes of two."""
    return quantize_frozen_params(net, CODEC, gpus_per_node=2, **options)


def three_steps(model: Any, adapter: Fsdp2) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: losses of three steps, and the detours' weights after them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for index in range(3):
        loss = models.loss_of(model, models.batch(index, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, lora.trainable(adapter.full_weights(model))


def trained_twice(adapter: Fsdp2, strategy: Any, case: Case, placement: str) -> bool:
    """In a worker: whether it comes to the same to quantize before and after."""
    before, after = lora.make_net(), lora.make_net()
    # Without mixed precision a weight's own dtype is what it passes for, so that must be said before wrapping.
    quantize(before, placement=placement, dtype=None if case.precision is None else case.precision.param)
    one = adapter.shard(before, case, strategy)
    other = adapter.shard(after, case, strategy)
    quantize(after, placement=placement)
    (losses, weights), (other_losses, other_weights) = three_steps(one, adapter), three_steps(other, adapter)
    assert losses[0] != losses[-1]
    assert weights.keys() == other_weights.keys() != set()
    return losses == other_losses and all(torch.equal(weights[name], other_weights[name]) for name in weights)


STRATEGIES = {
    "torch's": STOCK,
    "zeropp": Strategy.zeropp(gpus_per_node=2),
    "loco": Strategy.loco(gpus_per_node=2, error_feedback=LoCo(hops="both")),
    **{letters: Strategy(letters, gpus_per_node=2) for letters in ("GGG", "NNG", "III", "NNN")},
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("wrap_blocks", [True, False], ids=["by block", "once"])
def test_as_if_quantized_before(pool: Callable[[int], Pool], name: str, wrap_blocks: bool) -> None:
    case = Case(wrap_blocks=wrap_blocks)
    assert pool(4).run(trained_twice, Fsdp2(), STRATEGIES[name], case, "I") == [True] * 4


@pytest.mark.parametrize("placement", ["N", "G"])
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_other_placements_and_dtypes(pool: Callable[[int], Pool], placement: str, precision: Precision | None) -> None:
    case = Case(precision=precision)
    assert pool(4).run(trained_twice, Fsdp2(), STRATEGIES["zeropp"], case, placement) == [True] * 4


def left_with_fsdp() -> tuple[list[str], int, int, list[bool], bool]:
    """In a worker: what of a model FSDP still has; units before and after; which shards are alive; DTensors left."""
    adapter = Fsdp2()
    net = lora.make_net()
    net.head.requires_grad_(False)
    adapter.apply(net.head, STOCK)  # a unit of one weight
    adapter.apply(net.embedding, STOCK)
    model = adapter.shard(net, Case(), STOCK)
    groups = [len(groups_of(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    frozen = [
        m.weight for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding)) and not m.weight.requires_grad
    ]
    alive = [weakref.ref(weight) for weight in frozen if weight.numel() >= 4096]
    del frozen
    report = quantize(model)
    gc.collect()
    models.loss_of(model, models.batch(0, 0)).backward()
    after = [len(groups_of(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    names = [name for name, p in model.named_parameters() if p.dim() == 2 and not p.requires_grad]
    assert report.weights == len(alive) == 8
    dtensors = all(isinstance(p, DTensor) for p in model.parameters())
    return names, sum(groups), sum(after), [reference() is not None for reference in alive], dtensors


def groups_of(module: FSDPModule) -> list[Any]:
    """The parameter groups of a sharded module, on any torch."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in [state._fsdp_param_group] if g is not None]


def test_nothing_is_left(pool: Callable[[int], Pool]) -> None:
    for names, before, after, alive, dtensors in pool(4).run(left_with_fsdp):
        assert names == []
        assert after == before - 2
        assert alive == [False] * 8
        assert dtensors


def peft_after() -> bool:
    """In a worker: a PEFT model that torch's fully_shard has sharded, quantized to 4 bits, against one device."""
    codec = Int4(64)
    model = llama.shard(Fsdp2(), llama.adapt(llama.make_base(), {"default": "lora"}), STOCK)
    assert isinstance(model, PeftModel)
    quantize_frozen_params(model, codec, gpus_per_node=2)
    alone = llama.adapt(llama.rounded_base(codec), {"default": "lora"})
    return torch.equal(llama.logits_of(model), llama.logits_of(alone))


def test_peft(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(peft_after) == [True] * 4


# ---- errors


def sharded() -> Any:
    """In a worker: a frozen net with detours under torch's fully_shard."""
    return Fsdp2().shard(lora.make_net(), Case(), STOCK)


def tensor_parallel() -> Any:
    """In a worker: a frozen linear layer that is split inside of nodes and sharded over them."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(64, 64)).to(models.device()).requires_grad_(False)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    Fsdp2().apply(net, STOCK, mesh=mesh["dp"])
    return net


def flattened() -> Any:
    """In a worker: a frozen net with detours under FullyShardedDataParallel."""
    return Fsdp1().shard(lora.make_net(), Case(), Strategy(gpus_per_node=2))


MESSAGE = "is sharded by FSDP already; call quantize_frozen_params(model, Int8(block=64)) before you wrap"
REFUSALS: dict[str, Refusal] = {
    "flat parameters": (lambda: quantize(flattened()), ValueError, MESSAGE),
    "tensor parallel": (lambda: quantize(tensor_parallel()), ValueError, MESSAGE),
    "broadcast": (lambda: quantize(sharded(), sync_module_states=True), ValueError, MESSAGE),
    "checkpoint": (lambda: quantize(sharded(), checkpoint=lambda name: torch.zeros(1)), ValueError, MESSAGE),
}


def attempt(name: str) -> Reply:
    """In a worker: how one call is refused."""
    return attempt_refusal(REFUSALS[name])


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(pool: Callable[[int], Pool], name: str) -> None:
    assert_refused(pool(4).run(attempt, name), REFUSALS[name])


def refused_when_in_use(use: str, folder: str) -> bool:
    """In a worker: what has been gathered is not taken away, and files are for what is not sharded."""
    model = sharded()
    if use == "after a forward":
        models.loss_of(model, models.batch(0, 0))
        with pytest.raises(ValueError, match="is sharded by FSDP already"):
            quantize(model)
    elif use == "unsharded":
        model.unshard()
        with pytest.raises(ValueError, match="is sharded by FSDP already"):
            quantize(model)
    else:
        net = lora.make_net()
        quantize(net)
        save_frozen_params(net, folder)
        with pytest.raises(ValueError, match="call load_frozen_params before you wrap the model"):
            load_frozen_params(model, folder, gpus_per_node=2)
    return True


@pytest.mark.parametrize("use", ["after a forward", "unsharded", "files"])
def test_refused_when_in_use(pool: Callable[[int], Pool], use: str, tmp_path: Path) -> None:
    assert pool(4).run(refused_when_in_use, use, str(tmp_path)) == [True] * 4
