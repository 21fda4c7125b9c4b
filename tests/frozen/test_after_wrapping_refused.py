"""What quantizing a sharded model leaves to FSDP, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import lora, models
from harness.adapter import STOCK, Case
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.messages import Refusal, Reply, assert_refused, attempt as attempt_refusal
from harness.pool import Pool, device_type
from harness.strategies import CODEC, quantize
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only
from ways_to_shard import PartlyFrozen, apart, flat

from fsdp_zpp import Strategy, fully_shard as zeropp_shard, load_frozen_params, save_frozen_params
from fsdp_zpp.adapters.fsdp1 import _torch_flat


def unknown_instances() -> bool:
    """In a worker: instances that were made before the package was imported are found, or what they hold is refused."""
    for net_is_wrapper in (True, False):
        net = lora.make_net()
        model = Fsdp1().shard(net, Case(wrap_blocks=False), STOCK)
        # Instances are noted as they are made, by what the import patches; forgetting them stands for a later import.
        _torch_flat._INSTANCES.clear()
        if net_is_wrapper:
            assert quantize(model).weights == 8
        else:
            with pytest.raises(ValueError, match="is sharded by FSDP already"):
                quantize(net)
    return True


def test_instances_made_before_the_package_was_imported_are_found_or_refused(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(unknown_instances) == [True] * 4


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
    mixed = PartlyFrozen()
    fully_shard(mixed.first)
    zeropp_shard(mixed, strategy=Strategy("GGG", frozen=CODEC, gpus_per_node=2))
    replicated = PartlyFrozen()
    replicate(replicated.first)
    report = quantize(replicated.second)
    odd = PartlyFrozen()
    odd.first.weight = nn.Parameter(SelfEncoding(odd.first.weight.detach()), requires_grad=False)
    apart(odd)
    quantize(odd)

    def frozen(net: PartlyFrozen) -> list[str]:
        return [name for name, layer in net.named_children() if "Frozen" in type(layer).__name__]

    assert report.weights == 1
    return frozen(mixed), frozen(replicated), frozen(odd)


def test_weights_that_fsdp_must_keep_are_left_to_it(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(left_alone) == [(["second"], ["second"], ["second"])] * 4


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
    """In a worker: a net under FullyShardedDataParallel, or one of its frozen layers alone."""
    net = PartlyFrozen()
    whole = flat(net, **options)
    return net.first if part else whole


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
def test_what_can_not_be_taken_from_fsdp_is_refused(pool: Callable[[int], Pool], name: str) -> None:
    assert_refused(pool(4).run(attempt, name), REFUSALS[name])


def refused_after_a_forward() -> bool:
    """In a worker: FSDP1 has handed out its flat parameters by then."""
    model = Fsdp1().shard(lora.make_net(), Case(), STOCK)
    models.loss_of(model, models.batch(0, 0))
    with pytest.raises(ValueError, match="is sharded by FSDP already"):
        quantize(model)
    return True


def test_quantizing_after_a_forward_under_fsdp1_is_refused(pool: Callable[[int], Pool]) -> None:
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
def test_what_is_gathered_is_refused_and_files_come_before_wrapping(
    pool: Callable[[int], Pool], use: str, tmp_path: Path
) -> None:
    assert pool(4).run(refused_when_in_use, use, str(tmp_path)) == [True] * 4
