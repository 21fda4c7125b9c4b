"""What another quantizer has packed is never encoded as if its bytes were numbers; bases take over bitsandbytes'."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import bitsandbytes as bnb
import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter
from harness.covering import ADAPTERS, over_adapters, over_each, over_pairs
from harness.links import NONE, machine
from harness.messages import collected
from harness.pool import Pool, device_type
from packed_model import WIDTH, make, packed_linear, x
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from fsdp_zpp import NF4, Int8, Strategy, clip_grad_norm_, fully_shard, gathered_weights, quantize_frozen_params
from fsdp_zpp.adapters.fsdp2 import units, validation
from fsdp_zpp.frozen.modules import FrozenModule
from fsdp_zpp.runtime.unit import named_units

STRATEGIES = {
    **{scopes: Strategy(scopes, weights=Int8(64), gpus_per_node=2) for scopes in ("GGG", "IGG", "IIG", "NNG")},
    "III": Strategy("III", gpus_per_node=2),
    "zeropp": Strategy.zeropp(gpus_per_node=2),
    "mixzpp": Strategy.mixzpp(gpus_per_node=2),
    "as stored": Strategy.mixzpp(gpus_per_node=2, frozen="as stored"),
    "zeropp, one node": Strategy.zeropp(gpus_per_node=4),
    "stock": Strategy(gpus_per_node=4),
    "replicas": Strategy("NNN", gpus_per_node=2),
}


def copy_as_a_gpu(copies: Sequence[Tensor], sources: Sequence[Tensor], *args: Any) -> None:
    """Stand in for ``torch._foreach_copy_``, which on GPUs goes through fp32 and makes one NaN of all."""
    for copy, source in zip(copies, sources, strict=True):
        copy.copy_(source)
        if copy.is_floating_point():
            copy.masked_fill_(copy.isnan(), math.nan)


def output(adapter: Adapter, strategy: Any, parts: bool, flat: bool) -> tuple[Tensor, Tensor]:
    """In a worker: the output of a model with packed layers, and the unsharded one's, for two forwards.

    They are of so many rows that on GPUs, too, bitsandbytes decodes weights to bf16, as layers taken over do: for up to
    1536 rows it may multiply by packed ones in a kernel of its own, which rounds otherwise.
    """
    model, alone = make(), make()
    assert alone.first.weight.isnan().any()
    assert alone.second.weight.isnan().any()
    arguments: dict[str, Any] = {"use_orig_params": not flat}
    if adapter.torch_name == "fully_shard":  # one unit of which may store several dtypes
        arguments = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        model.trained.float()
    if flat:  # FSDP wants all of an instance trainable or none
        for each in (model, alone):
            each.requires_grad_(False)
    if parts:
        model.second = adapter.wrap(model.second, strategy, **arguments)
    sharded = adapter.wrap(model, strategy, **arguments)
    batch = x(rows=2048)
    with torch.no_grad(), mock.patch("torch._foreach_copy_", copy_as_a_gpu):
        # Twice: then from what is kept of the first.
        return torch.stack([sharded(batch) for _ in range(2)]).cpu(), torch.stack([alone(batch)] * 2).cpu()


@over_pairs(adapter=ADAPTERS, name=list(STRATEGIES), parts=[False, True], flat=[False, True])
def test_packed_weights_arrive_unchanged(
    pool: Callable[[int], Pool], adapter: Adapter, name: str, parts: bool, flat: bool
) -> None:
    for ours, expected in pool(4).run(output, adapter, STRATEGIES[name], parts, flat):
        # The plain layers' ones are exact in int8, and so are the packed bytes as they are.
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


class Adapted(nn.Module):
    """A packed layer with trained weights beside it, as LoRA has them."""

    def __init__(self, storage: torch.dtype, width: int) -> None:
        super().__init__()
        self.base = packed_linear(3, storage, width)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x).float() + self.up(self.down(x))


def losses_beside(
    storage: torch.dtype, width: int, strategy: Any, arguments: dict[str, Any]
) -> tuple[list[float], float]:
    """In a worker: losses of adapters beside packed layers, some in units of their own, and what all weights sum to."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(storage, width) for _ in range(3))).to(models.device())
    for module in (model[0].base, model[0], model[1], model):
        torch_fully_shard(module) if strategy is STOCK else fully_shard(module, strategy=strategy, **arguments)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = []
    for step in range(3):
        batch = torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(models.device())
        (loss := (model(batch) - 1).square().mean()).backward()
        clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if strategy is not STOCK:
        assert {name: value.dtype for name, value in gathered_weights(model)} == {
            n: v.dtype for n, v in weights.items()
        }
    return losses, sum(value.double().sum().item() for value in weights.values())


STORED = {
    **{scopes: (Strategy(scopes, gpus_per_node=2), {}) for scopes in ("GGG", "IGG", "IIG", "III", "NNG", "NNN")},
    "one node": (Strategy(gpus_per_node=4), {}),
    "one node, reshard 2": (Strategy(gpus_per_node=4), {"reshard_after_forward": 2}),
    "too small to take over": (Strategy("IGG", frozen="as stored", gpus_per_node=2), {}),
}


@pytest.mark.parametrize("width", [64, 48])  # the smaller has fewer values than a strategy takes over
@over_each(storage=[torch.uint8, torch.float32, torch.bfloat16], name=list(STORED))
def test_adapters_train_beside_packed_layers_of_any_storage(
    pool: Callable[[int], Pool], storage: torch.dtype, name: str, width: int
) -> None:
    strategy, arguments = STORED[name]
    width = width if strategy.frozen is None else 48
    stock = pool(4).run(losses_beside, storage, width, STOCK, {})
    ours = pool(4).run(losses_beside, storage, width, strategy, arguments)
    for (losses, weights), (expected, of_stock) in zip(ours, stock, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert weights == pytest.approx(of_stock, rel=1e-6)


def refused(adapter: Adapter, kind: str, torch_takes_them: bool) -> str:
    """In a worker: what an adapter says to integers that it can't shard."""
    model = nn.Sequential(packed_linear(1, torch.uint8))
    if kind == "8 bits":
        model[0] = layer = bnb.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(torch.ones(WIDTH, WIDTH), requires_grad=False, has_fp16_weights=False)
        layer.to(models.device())
    with mock.patch.object(validation, "_TAKES_INTEGERS", torch_takes_them), pytest.raises(TypeError) as caught:
        adapter.wrap(model, Strategy("IGG", gpus_per_node=2))
    return str(caught.value)


@over_adapters
@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_integers_that_can_not_be_sharded_are_refused_with_a_remedy(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str
) -> None:
    for text in pool(4).run(refused, adapter, kind, kind == "8 bits"):
        assert "pass frozen= to the strategy" in text
        assert ("bnb_4bit_quant_storage=torch.bfloat16" in text) == (kind == "4 bits")


def warned(storage: torch.dtype = torch.bfloat16, **arguments: Any) -> list[str]:
    """In a worker: what a stock strategy warns of if torch is to gather packed layers."""
    model = make(storage=storage)
    units._warn_of_packed_values.cache_clear()
    with collected() as records:
        for layer in model.children():
            fully_shard(layer, strategy=Strategy(gpus_per_node=4), **arguments)
    return [text for level, text in records if level == "WARNING"]


def warned_of_mesh() -> list[str]:
    """In a worker: likewise, over a mesh of two dimensions."""
    return warned(mesh=init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner")))


def warned_of_number_of_ranks() -> list[str]:
    """In a worker: likewise, if it is to gather over two ranks in the backward."""
    return warned(reshard_after_forward=2)


@pytest.mark.parametrize("function", [warned_of_mesh, warned_of_number_of_ranks])
def test_a_warning_says_that_torch_will_change_packed_values(
    pool: Callable[[int], Pool], function: Callable[[], list[str]]
) -> None:
    first, *others = pool(4).run(function)
    assert others == [[]] * 3
    (text,) = first
    assert text.startswith("fully_shard: packed values are gathered by torch")


def warned_of_bytes() -> list[str]:
    """In a worker: likewise, of packed values that don't read as numbers."""
    return warned(torch.uint8, reshard_after_forward=2)


def test_no_warning_comes_of_bytes_which_torch_leaves_alone(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(warned_of_bytes) == [[]] * 4


class Other(bnb.nn.Linear4bit):
    """A layer that may compute something else."""


def logged(adapter: Adapter, strategy: Any) -> list[tuple[str, str]]:
    """In a worker: what a model with packed layers of another class logs."""
    with collected() as records:
        model = make()
        model.first.__class__ = model.second.__class__ = Other
        model.second = adapter.wrap(model.second, strategy)
        model.trained = adapter.wrap(model.trained, strategy)
        adapter.wrap(model, strategy)(x())
    return records


@over_adapters
def test_the_log_says_which_units_are_gathered_as_they_are(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    first, *others = pool(4).run(logged, adapter, Strategy.zeropp(gpus_per_node=2))
    assert others == [[]] * 3
    [(level, line)] = first
    assert level == "INFO"
    assert "weights gathered as int8(256) (1 of 3 units, " in line
    assert "% of parameters); packed values gathered as they are, not as int8(256); " in line
    first = pool(4).run(logged, adapter, Strategy.mixzpp(gpus_per_node=2, frozen=Int8(64)))[0]
    assert [level for level, _ in first] == ["INFO", "INFO"]
    assert "packed already as Params4bit" in first[1][1]


def on_slow_links(adapter: Adapter) -> tuple[list[str], bool, list[tuple[str, str]]]:
    """In a worker: nodes of packed and of other units without NVLink, whether outputs are right, and the log."""
    model, alone = make(), make()
    with machine(NONE), collected() as records, torch.no_grad():
        model.first, model.second = (adapter.wrap(each, Strategy.zeropp()) for each in (model.first, model.second))
        model.trained = adapter.wrap(model.trained, Strategy.zeropp())
        sharded: Any = adapter.wrap(model, Strategy.zeropp())
        same = torch.equal(sharded(x()), alone(x()))
    nodes = {f"{'packed' * unit.packed} {unit.ranks.topology}" for unit in named_units(sharded)}
    return sorted(nodes), same, records


@over_adapters
def test_packed_weights_stay_sharded_over_a_host_without_nvlink(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    results = pool(4).run(on_slow_links, adapter)
    assert [each[:2] for each in results] == [([" 4 nodes x 1", "packed 1 node x 4"], True)] * 4
    lines = [line for _, line in results[0][2]]
    assert any(
        "on 1 node x 4, 2 of 4 units" in line and "for packed values stay sharded; pass" in line for line in lines
    )
    assert any("on 4 nodes x 1, 2 of 4 units" in line and "each counts as a node" in line for line in lines)


# ---- converted to NF4


def converted(adapter: Adapter, by_strategy: bool, block: int) -> tuple[list[str], list[Tensor]]:
    """In a worker: which layers are quantized anew, and the output before and after."""
    model, alone = make(blocksize=64), make(blocksize=64)
    codec = NF4(block)
    if not by_strategy:
        quantize_frozen_params(model, codec, min_numel=1, gpus_per_node=2)
    # A block of 64 and 64 x 64 values: the smallest weight that a strategy quantizes.
    sharded = adapter.wrap(model, Strategy.mixzpp(gpus_per_node=2, frozen=codec))
    with torch.no_grad():
        outputs = [sharded(x()).cpu(), alone(x()).cpu()]
    names = [name for name, layer in model.named_children() if isinstance(layer, FrozenModule)]
    names += [name for name in ("first", "second", "plain") if isinstance(getattr(model, name, None), FrozenModule)]
    return sorted(set(names)), outputs


@over_pairs(adapter=ADAPTERS, by_strategy=[False, True], block=[64, 128])
def test_nf4_takes_over_what_bitsandbytes_has_packed(
    pool: Callable[[int], Pool], adapter: Adapter, by_strategy: bool, block: int
) -> None:
    for names, (ours, expected) in pool(4).run(converted, adapter, by_strategy, block):
        assert {"first", "second"} <= set(names)
        similar = torch.cosine_similarity(ours.flatten().float(), expected.flatten().float(), 0)
        assert similar > 0.98


@pytest.mark.parametrize("options", [{}, {"compress_statistics": False}, {"quant_storage": torch.uint8}], ids=str)
def test_with_the_same_blocks_the_values_are_bitsandbytes_own(options: dict[str, Any]) -> None:
    layer = packed_linear(1, **options)
    state = layer.weight.quant_state
    before = bnb.functional.dequantize_4bit(layer.weight.data, state)
    report = quantize_frozen_params(layer, NF4(64), min_numel=1)
    assert (report.weights, report.parameters) == (1, WIDTH * WIDTH)
    assert isinstance(layer, nn.Linear)
    assert not isinstance(layer, bnb.nn.Linear4bit)
    assert torch.equal(layer.weight.dequantize(), before)


def test_an_adapter_on_a_packed_layer_works_on_after_the_conversion() -> None:
    model = nn.Sequential(packed_linear(1))
    model.is_loaded_in_4bit = True
    adapted = get_peft_model(model, LoraConfig(target_modules=["0"], r=4, init_lora_weights=False))
    expected = adapted(x())
    quantize_frozen_params(adapted, NF4(64), min_numel=1)
    torch.testing.assert_close(adapted(x()), expected, rtol=2e-2, atol=2e-2)
    adapted(x()).sum().backward()
    assert all(p.grad is not None for p in adapted.parameters())


def test_packed_layers_of_another_class_are_left_and_the_report_says_why() -> None:
    layer = packed_linear(1)
    layer.__class__ = Other
    report = quantize_frozen_params(layer, Int8(64), min_numel=1)
    assert report.weights == 0
    assert report.left == {"packed already as Params4bit": ("weight",)}


# ---- tensors that know how they are packed


class Halves(Tensor):
    """A stand-in for torchao's packed tensors: two bytes for each value, which encode themselves for FSDP2's gather."""

    packed: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor) -> Halves:
        """The bf16 values that ``packed`` [rows, 2 * columns] holds."""
        shape = (*packed.shape[:-1], packed.shape[-1] // 2)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=packed.device)
        made.packed = packed
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *unused: Any) -> Halves:
        return Halves(tensors["packed"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return Halves(func(args[0].packed, **{k: v for k, v in kwargs.items() if k != "dtype"}))
        if func is aten.split.Tensor:
            return [Halves(part) for part in func(args[0].packed, *args[1:])]
        if func is aten.slice.Tensor:
            return Halves(func(args[0].packed, *args[1:]))
        if func is aten.new_zeros.default:
            size = args[1]
            return Halves(args[0].packed.new_zeros((*size[:-1], 2 * size[-1])))
        if func is aten.copy_.default and isinstance(args[1], Halves):
            args[0].packed.copy_(args[1].packed)
            return args[0]
        if func in (aten.view.default, aten.as_strided.default):
            return Halves(args[0].packed)
        if func is aten.view.dtype:
            raise NotImplementedError("as in torchao, the bits of packed values are not to be had")
        args, kwargs = tree_map_only(Halves, Halves.unpacked, (args, kwargs))
        return func(*args, **kwargs)

    def unpacked(self) -> Tensor:
        """The values."""
        return self.packed.view(torch.bfloat16)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """The bytes."""
        return (self.packed,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        """All values."""
        if out is None:
            return Halves(outputs[0]), outputs
        return None


def self_packing(scopes: str) -> tuple[bool, list[tuple[str, str]]]:
    """In a worker: whether a layer whose weight packs itself gives the right output, and what is logged."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False).to(models.device(), torch.bfloat16)
    torch.manual_seed(3)
    values = torch.randn(WIDTH, WIDTH).bfloat16().to(models.device())
    layer.weight = nn.Parameter(Halves(values.view(torch.uint8)), requires_grad=False)
    model = nn.Sequential(layer)
    codec = None if scopes[2] == "I" else Int8(64)
    with collected() as records, torch.no_grad():
        fully_shard(model, strategy=Strategy(scopes, weights=codec, gpus_per_node=2))
        return torch.equal(model(x()), x() @ values.T), records


@pytest.mark.parametrize("scopes", ["GGG", "IGG", "NNG", "III"])
def test_a_tensor_that_packs_itself_is_gathered_as_it_is(pool: Callable[[int], Pool], scopes: str) -> None:
    for same, _ in pool(4).run(self_packing, scopes):
        assert same


# ---- tensor parallelism


def tensor_parallel(codec: Any) -> list[tuple[str, str]]:
    """In a worker: what a model logs whose frozen weights are split by tensor parallelism."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, 8, bias=False))
    net.to(models.device())[0].requires_grad_(False)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(use_local_output=True)})
    net[1] = nn.Linear(WIDTH, 8, bias=False).to(models.device())
    with pytest.raises(ValueError, match=r"0\.weight is sharded by another parallelism"):
        quantize_frozen_params(net, codec, process_group=mesh["dp"].get_group(), gpus_per_node=1)
    with collected() as records:
        fully_shard(net, strategy=Strategy.mixzpp(gpus_per_node=1, frozen=codec), mesh=mesh["dp"])
        net(torch.ones(2, WIDTH, device=models.device())).sum().backward()
    return records


def test_weights_split_by_tensor_parallelism_are_said_to_be(pool: Callable[[int], Pool]) -> None:
    first = pool(4).run(tensor_parallel, Int8(64))[0]
    [line] = [line for level, line in first if "frozen=" in line]
    assert line == (
        "Sequential: frozen=int8(64) is NOT active: no frozen weight can or should be quantized; frozen parameters "
        "that stay as they are: 1 sharded by another parallelism (0.weight, ...)"
    )
