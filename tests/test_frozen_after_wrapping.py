"""Quantizing what is sharded already: the same model as if it had been quantized before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import llama, lora, models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.adapters import ADAPTERS, over_adapters
from harness.covering import over_pairs
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pairs import Pair, apart, flat
from harness.pool import Pool, device_type
from harness.refusals import Refusal, Reply, assert_refused, attempt as attempt_refusal
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from fsdp_zpp import (
    CodecState,
    Int4,
    Int8,
    LoCo,
    Strategy,
    fully_shard as zeropp_shard,
    load_frozen_params,
    quantize_frozen_params,
    save_frozen_params,
)
from fsdp_zpp.fsdp1 import _torch_flat
from fsdp_zpp.fsdp2._torch import groups_of, state_of

CODEC = Int8(64)
BF16 = Precision(torch.bfloat16, torch.float32)


def quantize(net: nn.Module, **options: Any) -> Any:
    """In a worker: quantize in blocks of 64 on nodes of two."""
    return quantize_frozen_params(net, CODEC, gpus_per_node=2, **options)


def three_steps(model: Any, adapter: Adapter) -> tuple[list[float], dict[str, Tensor]]:
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


def trained_twice(adapter: Adapter, strategy: Any, case: Case, placement: str) -> bool:
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


@over_pairs(adapter=ADAPTERS, name=list(STRATEGIES), wrap_blocks={"by block": True, "once": False})
def test_as_if_quantized_before(pool: Callable[[int], Pool], adapter: Adapter, name: str, wrap_blocks: bool) -> None:
    case = Case(wrap_blocks=wrap_blocks)
    assert pool(4).run(trained_twice, adapter, STRATEGIES[name], case, "I") == [True] * 4


@over_pairs(adapter=ADAPTERS, placement=["N", "G"], precision={"fp32": None, "bf16": BF16})
def test_other_placements_and_dtypes(
    pool: Callable[[int], Pool], adapter: Adapter, placement: str, precision: Precision | None
) -> None:
    case = Case(precision=precision)
    assert pool(4).run(trained_twice, adapter, STRATEGIES["zeropp"], case, placement) == [True] * 4


def frozen_matrices(model: nn.Module) -> list[nn.Parameter]:
    """In a worker: the weights of a model that are frozen, be they sharded or not."""
    weights = [module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    return [weight for weight in weights if not weight.requires_grad]


def left_with_fsdp() -> tuple[list[str], int, int, list[bool], bool]:
    """In a worker: what of a model FSDP still has; units before and after; which shards are alive; DTensors left."""
    adapter = Fsdp2()
    net = lora.make_net()
    net.head.requires_grad_(False)
    adapter.apply(net.head, STOCK)  # a unit of one weight
    adapter.apply(net.embedding, STOCK)
    model = adapter.shard(net, Case(), STOCK)
    groups = [len(groups_of(state_of(module))) for module in model.modules() if isinstance(module, FSDPModule)]
    alive = [weakref.ref(weight) for weight in frozen_matrices(model) if weight.numel() >= 4096]
    report = quantize(model)
    gc.collect()
    models.loss_of(model, models.batch(0, 0)).backward()
    after = [len(groups_of(state_of(module))) for module in model.modules() if isinstance(module, FSDPModule)]
    names = [name for name, p in model.named_parameters() if p.dim() == 2 and not p.requires_grad]
    assert report.weights == len(alive) == 8
    dtensors = all(isinstance(p, DTensor) for p in model.parameters())
    return names, sum(groups), sum(after), [reference() is not None for reference in alive], dtensors


def test_nothing_is_left(pool: Callable[[int], Pool]) -> None:
    for names, before, after, alive, dtensors in pool(4).run(left_with_fsdp):
        assert names == []
        assert after == before - 2
        assert alive == [False] * 8
        assert dtensors


def holders_of(weight: Tensor | None) -> str:
    """What keeps a weight alive, if it is: nothing that Python knows of means torch's C++."""
    if weight is None:
        return ""
    return f"{tuple(weight.shape)} held by {[type(each).__name__ for each in gc.get_referrers(weight)]}"


def left_flattened() -> tuple[list[str], int, int, list[str]]:
    """In a worker: frozen matrices that FSDP1 still has; values in its flat parameters; as expected; what is alive."""
    adapter = Fsdp1()
    net = lora.make_net()
    expected = sum(p.numel() for p in net.parameters() if p.requires_grad or p.dim() == 1)
    model = adapter.shard(net, Case(), Strategy(gpus_per_node=2))
    alive = [weakref.ref(weight) for weight in frozen_matrices(model)]
    report = quantize(model)
    assert report.weights == len(alive) == 8
    assert report.model == "Net"
    assert report.left == {"1-D": report.left["1-D"]}
    assert not any("_fsdp" in name for name in report.left["1-D"])
    models.loss_of(model, models.batch(0, 0)).backward()
    gc.collect()
    full = adapter.full_weights(model)
    matrices = [name for name in full.keys() - lora.trainable(full).keys() if full[name].dim() == 2]
    values = sum(weight.numel() for weight in full.values())
    return matrices, values, expected, [holders_of(reference()) for reference in alive]


def test_nothing_is_left_flattened(pool: Callable[[int], Pool]) -> None:
    for matrices, values, expected, alive in pool(4).run(left_flattened):
        assert matrices == []
        assert values == expected
        assert [holders for holders in alive if holders] == []


@dataclass(frozen=True)
class Watching(Int8):
    """Notes, whenever it encodes, the bytes that some parameters take."""

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        storages = [parameter.untyped_storage() for parameter in WATCHED]
        NOTED.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        return super().encode(values, rows, cols)


WATCHED: list[nn.Parameter] = []
NOTED: list[int] = []


def bytes_meanwhile(strategy: Any) -> tuple[int, int]:
    """In a worker: the most that frozen matrices take while they are quantized, and what their shards and a unit do."""
    net = lora.make_net(blocks=6)
    block = sum(p.nbytes for p in net.blocks[0].parameters() if not p.requires_grad)
    rest = net.embedding.weight.nbytes + net.head.weight.nbytes
    model = Fsdp1().shard(net, Case(), strategy)
    WATCHED[:] = frozen_matrices(model)
    NOTED.clear()
    assert quantize_frozen_params(model, Watching(64), gpus_per_node=2).weights == len(WATCHED) == len(NOTED) == 14
    return max(NOTED), (6 * block + rest) // 4 + max(block, rest)


@pytest.mark.parametrize("name", ["torch's", "zeropp"])
def test_one_unit_at_a_time_is_whole(pool: Callable[[int], Pool], name: str) -> None:
    for most, allowed in pool(4).run(bytes_meanwhile, STRATEGIES[name]):
        assert most <= 1.1 * allowed


def unknown_instances() -> bool:
    """In a worker: instances that were made before the package was imported are found, or what they hold is refused."""
    for net_is_wrapper in (True, False):
        net = lora.make_net()
        model = Fsdp1().shard(net, Case(wrap_blocks=False), STOCK)
        _torch_flat._INSTANCES.clear()
        if net_is_wrapper:
            assert quantize(model).weights == 8
        else:
            with pytest.raises(ValueError, match="is sharded by FSDP already"):
                quantize(net)
    return True


def test_unknown_instances(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(unknown_instances) == [True] * 4


def given_other_values() -> bool:
    """In a worker: what a parameter was given after it was sharded stays."""
    model = Fsdp1().shard(lora.make_net(), Case(), Strategy(gpus_per_node=2))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.ones_like(parameter)
    quantize(model)
    return all(bool((weight == 1).all()) for weight in lora.trainable(Fsdp1().full_weights(model)).values())


def test_other_values(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(given_other_values) == [True] * 4


def with_an_optimizer(adapter: Adapter) -> bool:
    """In a worker: an optimizer that was made before the base was quantized trains the same parameters."""
    model = adapter.shard(lora.make_net(), Case(), Strategy(gpus_per_node=2))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    quantize(model)
    before = {name: weight.clone() for name, weight in adapter.full_weights(model).items()}
    models.loss_of(model, models.batch(0, 0)).backward()
    optimizer.step()
    after = adapter.full_weights(model)
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    return moved == set(lora.trainable(after)) != set()


@over_adapters
def test_an_optimizer_made_before(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(with_an_optimizer, adapter) == [True] * 4


def peft_after(adapter: Adapter) -> bool:
    """In a worker: a PEFT model that torch's FSDP has sharded, quantized to 4 bits, against one device."""
    codec = Int4(64)
    model = llama.shard(adapter, llama.adapt(llama.make_base(), {"default": "lora"}), STOCK)
    quantize_frozen_params(model, codec, gpus_per_node=2)
    alone = llama.adapt(llama.rounded_base(codec), {"default": "lora"})
    return torch.equal(llama.logits_of(model), llama.logits_of(alone))


@over_adapters
def test_peft(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(peft_after, adapter) == [True] * 4


# ---- what stays as it is


class SelfEncoding(Tensor):
    """A tensor that decides itself what is gathered of it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> SelfEncoding:
        """A stand-in for ``inner``."""
        outer = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(SelfEncoding, lambda outer: outer.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, SelfEncoding, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Its values, as they are."""
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        """All values, as they came."""
        return outputs[0], outputs


def left_alone() -> tuple[list[str], list[str], list[str]]:
    """In a worker: what is chosen of models with layers that are not to be taken, by a strategy, and of a subclass."""
    mixed = Pair()
    fully_shard(mixed.first)
    zeropp_shard(mixed, strategy=Strategy("GGG", frozen=CODEC, gpus_per_node=2))
    replicated = Pair()
    replicate(replicated.first)
    report = quantize(replicated.second)
    odd = Pair()
    odd.first.weight = nn.Parameter(SelfEncoding(odd.first.weight.detach()), requires_grad=False)
    apart(odd)
    quantize(odd)

    def frozen(pair: Pair) -> list[str]:
        return [name for name, layer in pair.named_children() if "Frozen" in type(layer).__name__]

    assert report.weights == 1
    return frozen(mixed), frozen(replicated), frozen(odd)


def test_left_alone(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(left_alone) == [(["second"], ["second"], ["second"])] * 4


def names_in_checkpoints(quantize_first: bool) -> list[str]:
    """In a worker: of which units errors are saved."""
    pair, strategy = Pair(), Strategy.loco(gpus_per_node=2)
    if quantize_first:
        quantize(pair)
    for module in (pair.first, pair.second, pair):
        zeropp_shard(module, strategy=strategy)
    if not quantize_first:
        quantize(pair)
    pair(torch.ones(2, 64, device=models.device())).sum().backward()
    return list(CodecState(pair).state_dict())


def test_the_same_checkpoints(pool: Callable[[int], Pool]) -> None:
    first = pool(4).run(names_in_checkpoints, True)
    assert first == pool(4).run(names_in_checkpoints, False)
    assert first[0] != []


# ---- errors


def sharded() -> Any:
    """In a worker: a frozen net with detours under torch's fully_shard."""
    return Fsdp2().shard(lora.make_net(), Case(), STOCK)


def tensor_parallel() -> Any:
    """In a worker: a frozen linear layer that is split inside of nodes and sharded over them."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(64, 64)).to(models.device()).requires_grad_(False)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    return Fsdp2().apply(net, STOCK, mesh=mesh["dp"])


def flattened(part: bool, **options: Any) -> Any:
    """In a worker: a pair of layers under FullyShardedDataParallel, or one of them alone."""
    pair = Pair()
    whole = flat(pair, **options)
    return pair.first if part else whole


MESSAGE = "is sharded by FSDP already; call quantize_frozen_params(model, Int8(block=64)) before you wrap"
WEIGHT = f"weight {MESSAGE}"
REFUSALS: dict[str, Refusal] = {
    "flat parameters": (lambda: quantize(flattened(False, use_orig_params=False)), ValueError, f"first.{WEIGHT}"),
    "a flat parameter": (lambda: quantize(flattened(True, use_orig_params=False)), ValueError, WEIGHT),
    "flattened, broadcast": (lambda: quantize(flattened(False), sync_module_states=True), ValueError, MESSAGE),
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


def refused_after_a_forward() -> bool:
    """In a worker: FSDP1 has handed out its flat parameters by then."""
    model = Fsdp1().shard(lora.make_net(), Case(), STOCK)
    models.loss_of(model, models.batch(0, 0))
    with pytest.raises(ValueError, match="is sharded by FSDP already"):
        quantize(model)
    return True


def test_refused_after_a_forward(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(refused_after_a_forward) == [True] * 4


def refused_when_in_use(use: str, folder: str) -> bool:
    """In a worker: what has been gathered is not taken away, and files are for what is not sharded."""
    model = sharded()
    if use == "after a forward":
        models.loss_of(model, models.batch(0, 0))
        with pytest.raises(ValueError, match="is sharded by FSDP already"):
            quantize(model)
    elif use.startswith("unsharded"):
        handle = model.unshard(async_op=use == "unsharded in the background")
        with pytest.raises(ValueError, match="is sharded by FSDP already"):
            quantize(model)
        if handle is not None:
            handle.wait()
    else:
        net = lora.make_net()
        quantize(net)
        save_frozen_params(net, folder)
        with pytest.raises(ValueError, match="call load_frozen_params before you wrap the model"):
            load_frozen_params(model, folder, gpus_per_node=2)
    return True


@pytest.mark.parametrize("use", ["after a forward", "unsharded", "unsharded in the background", "files"])
def test_refused_when_in_use(pool: Callable[[int], Pool], use: str, tmp_path: Path) -> None:
    assert pool(4).run(refused_when_in_use, use, str(tmp_path)) == [True] * 4
