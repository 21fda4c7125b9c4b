"""Layers that another quantizer has packed: never encoded as if bytes were numbers; bases take over bitsandbytes'."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
from harness import lora, models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.links import NONE, machine
from harness.messages import collected
from harness.pool import Pools, device_type
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard as torch_fully_shard

from fsdp_zpp import NF4, Int8, Strategy, clip_grad_norm_, fully_shard, gathered_weights, quantize_frozen_params
from fsdp_zpp._torch_compat import major_minor
from fsdp_zpp.codecs import Codec
from fsdp_zpp.frozen._torch_modules import FrozenModule, frozen_sites
from fsdp_zpp.runtime.unit import named_units

WIDTH = 64


def packed_linear(seed: int, storage: torch.dtype = torch.bfloat16, width: int = WIDTH, **options: Any) -> nn.Module:
    """A linear layer of QLoRA's."""
    torch.manual_seed(seed)
    values = torch.randn(width, width).bfloat16().to(models.device()) / 8
    arguments: dict[str, Any] = {"quant_type": "nf4", "quant_storage": storage, "blocksize": 64} | options
    layer = bnb.nn.Linear4bit(width, width, False, torch.bfloat16, quant_type="nf4", quant_storage=storage)
    layer.weight = bnb.nn.Params4bit(values, requires_grad=False, module=layer, **arguments)
    layer.weight = layer.weight._quantize(models.device())
    return layer.to(models.device())


class Packed(nn.Module):
    """Two packed layers, then a plain frozen one, and a trainable one."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = packed_linear(6, storage), packed_linear(2, storage)
        self.plain = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.ones_(self.plain.weight)
        nn.init.ones_(self.trained.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.second(self.first(x)) + self.plain(x))


def make(storage: torch.dtype = torch.bfloat16) -> Packed:
    return Packed(storage).to(models.device(), torch.bfloat16)


def x(rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16().to(models.device())


# ---- gathered as they are

STRATEGIES = {
    **{scopes: Strategy(scopes, weights=Int8(64), gpus_per_node=2) for scopes in ("GGG", "IIG", "NNG")},
    "zeropp": Strategy.zeropp(gpus_per_node=2),
    "mixzpp": Strategy.mixzpp(gpus_per_node=2),
    "as stored": Strategy.mixzpp(gpus_per_node=2, frozen="as stored"),
    "zeropp, one node": Strategy.zeropp(gpus_per_node=4),
    "stock": Strategy(gpus_per_node=4),
}


def copy_as_a_gpu(copies: Sequence[Tensor], sources: Sequence[Tensor], *args: Any) -> None:
    """Stand in for ``torch._foreach_copy_``, which on GPUs goes through fp32 and makes one NaN of all."""
    for copy, source in zip(copies, sources, strict=True):
        copy.copy_(source)
        if copy.is_floating_point():
            copy.masked_fill_(copy.isnan(), math.nan)


def arrives(adapter: Adapter, strategy: Any, parts: bool, flat: bool) -> None:
    """In a worker: the output of a model with packed layers is the unsharded one's, for two forwards.

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
        for _ in range(2):  # the second from what is kept of the first
            # The plain layers' ones are exact in int8, and so are the packed bytes as they are.
            assert torch.equal(sharded(batch), alone(batch))


@over_each(rest=False, adapter=ADAPTERS, name=list(STRATEGIES), how=["whole", "parts", "flat parts"])
def test_packed_weights_arrive_unchanged(pool: Pools, adapter: Adapter, name: str, how: str) -> None:
    pool(4).run(arrives, adapter, STRATEGIES[name], "parts" in how, "flat" in how)


class Adapted(nn.Module):
    """A packed layer with trained weights beside it, as LoRA has them."""

    def __init__(self, storage: torch.dtype, width: int) -> None:
        super().__init__()
        self.base = packed_linear(3, storage, width)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x).float() + self.up(self.down(x))


def losses_beside(storage: torch.dtype, width: int, arguments: dict[str, Any]) -> tuple[list[float], float]:
    """In a worker: losses of adapters beside packed layers, some in units of their own, and what all weights sum to."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(storage, width) for _ in range(2))).to(models.device())
    for module in (model[0].base, model[0], model):
        fully_shard(module, **arguments) if arguments else torch_fully_shard(module)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = []
    for step in range(2):
        batch = torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(models.device())
        (loss := (model(batch) - 1).square().mean()).backward()
        clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if arguments:
        dtypes = {name: value.dtype for name, value in weights.items()}
        assert {name: value.dtype for name, value in gathered_weights(model)} == dtypes
    return losses, sum(value.double().sum().item() for value in weights.values())


SHARDING = importlib.import_module("fsdp_zpp.fsdp2.fully_shard")  # which an attribute hides, the function
takes_integers = pytest.mark.skipif(
    major_minor(torch.__version__) < (2, 13), reason="torch's fully_shard takes integers since 2.13"
)
IGG, NNN = Strategy("IGG", gpus_per_node=2), Strategy("NNN", gpus_per_node=2)
AS_STORED = Strategy("IGG", frozen="as stored", gpus_per_node=2)
BESIDE = [
    pytest.param(torch.uint8, 64, {"strategy": IGG}, marks=takes_integers, id="IGG"),
    pytest.param(torch.float32, 48, {"strategy": NNN}, id="NNN"),
    pytest.param(
        torch.bfloat16, 64, {"strategy": Strategy(gpus_per_node=4), "reshard_after_forward": 2}, id="reshard 2"
    ),
    # So small that the strategy does not take them over.
    pytest.param(torch.uint8, 48, {"strategy": AS_STORED}, marks=takes_integers, id="as stored"),
]


@pytest.mark.parametrize(("storage", "width", "arguments"), BESIDE)
def test_adapters_train_beside_packed_layers_of_any_storage(
    pool: Pools, storage: torch.dtype, width: int, arguments: dict[str, Any]
) -> None:
    stock = pool(4).run(losses_beside, storage, width, {})
    ours = pool(4).run(losses_beside, storage, width, arguments)
    for (losses, weights), (expected, of_stock) in zip(ours, stock, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert weights == pytest.approx(of_stock, rel=1e-6)


def all_warnings() -> list[list[str]]:
    """In a worker: warnings if torch gathers packed layers, over a mesh of two dimensions or two ranks, and bytes."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
    over_two: dict[str, Any] = {"reshard_after_forward": 2}
    texts = []
    for storage, arguments in ((torch.bfloat16, {"mesh": mesh}), (torch.bfloat16, over_two), (torch.uint8, over_two)):
        SHARDING._warn_of_packed_values.cache_clear()
        with collected() as records:
            for layer in make(storage).children():
                fully_shard(layer, strategy=Strategy(gpus_per_node=4), **arguments)
        texts.append([text for level, text in records if level == "WARNING"])
    return texts


@takes_integers
def test_a_warning_says_that_torch_will_change_packed_values_but_for_bytes(pool: Pools) -> None:
    first, *others = pool(4).run(all_warnings)
    assert others == [[[], [], []]] * 3
    assert [len(texts) for texts in first] == [1, 1, 0]
    assert all(text.startswith("fully_shard: packed values are gathered by torch") for text, *_ in first[:2])


class Other(bnb.nn.Linear4bit):
    """A layer that may compute something else."""


def wrapped(adapter: Adapter, strategy: Strategy, *units: str) -> Any:
    """In a worker: a model with packed layers that no strategy takes over, of which some layers are units."""
    model = make()
    model.first.__class__ = model.second.__class__ = Other
    for name in units:
        setattr(model, name, adapter.wrap(getattr(model, name), strategy))
    return adapter.wrap(model, strategy)


def logged(adapter: Adapter, strategy: Strategy) -> list[tuple[str, str]]:
    with collected() as records:
        wrapped(adapter, strategy, "second", "trained")(x())
    return records


def on_slow_links(adapter: Adapter) -> list[tuple[str, str]]:
    """In a worker: what it logs without NVLink, where packed weights stay sharded over a host and others don't."""
    with machine(NONE), collected() as records, torch.no_grad():
        sharded = wrapped(adapter, Strategy.zeropp(), "first", "second", "trained")
        assert torch.equal(sharded(x()), make()(x()))
    nodes = {(unit.packed, str(unit.ranks.topology)) for unit in named_units(sharded)}
    assert nodes == {(False, "4 nodes x 1"), (True, "1 node x 4")}
    return records


def refuses_integers(adapter: Adapter) -> None:
    """In a worker: 4 and 8 bits in integers that an adapter can't shard; strategies take 4 bits over."""
    eight = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False).requires_grad_(False)
    eight.weight = eight.weight._quantize(models.device())
    in_4_bits = "bnb_4bit_quant_storage=torch.bfloat16; or pass frozen= to the strategy"
    zeropp, mixzpp = Strategy("IGG", gpus_per_node=2), Strategy.mixzpp(gpus_per_node=2)
    for layer, torch_takes_them, strategy, remedy in (
        (packed_linear(1, torch.uint8), False, zeropp, in_4_bits),
        (eight, True, zeropp, "load the base in 4 bits, or in bf16"),
        (eight, True, mixzpp, "load the base in 4 bits, or in bf16"),
    ):
        said = pytest.raises(TypeError, match=re.escape(remedy))
        with mock.patch.object(SHARDING, "_TAKES_INTEGERS", torch_takes_them), said:
            adapter.wrap(nn.Sequential(layer), strategy)


def said(adapter: Adapter) -> list[list[tuple[str, str]]]:
    refuses_integers(adapter)
    strategies = Strategy.zeropp(gpus_per_node=2), Strategy.mixzpp(gpus_per_node=2, frozen=Int8(64))
    return [*(logged(adapter, strategy) for strategy in strategies), on_slow_links(adapter)]


@over_adapters
def test_it_is_said_that_packed_values_are_gathered_as_they_are_or_can_not_be(pool: Pools, adapter: Adapter) -> None:
    (first, by_frozen, slow), *others = pool(4).run(said, adapter)
    assert all(of_rank[:2] == [[], []] for of_rank in others)
    [(level, line)] = first
    assert level == "INFO"
    assert "weights gathered as int8(256) (1 of 3 units, " in line
    assert "% of parameters); packed values gathered as they are, not as int8(256); " in line
    assert [level for level, _ in by_frozen] == ["INFO", "INFO"]
    assert "packed already as Params4bit" in by_frozen[1][1]
    of_slow = "\n".join(text for _, text in slow)
    assert re.search("on 1 node x 4, 2 of.*for packed values stay sharded; pass", of_slow)
    assert re.search("on 4 nodes x 1, 2 of.*each counts as a node", of_slow)


# ---- taken over


def four_bits(seed: int = 3, **options: Any) -> tuple[nn.Module, Tensor]:
    layer = packed_linear(seed, **options)
    state = layer.weight.quant_state
    state.dtype = torch.float32
    return layer, bnb.functional.dequantize_4bit(layer.weight.data, state)


LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "nf4": lambda: four_bits(compress_statistics=False),
    "nf4, nested": four_bits,
    "nf4 in bytes": lambda: four_bits(storage=torch.uint8),
    # No larger blocks: bitsandbytes' kernel for CPUs takes the wrong scales where a row ends within a block.
    "nf4 in other blocks": lambda: four_bits(blocksize=32),
    "fp4": lambda: four_bits(quant_type="fp4"),
}


@pytest.mark.parametrize("codec", ["as stored", Int8(64), NF4(64)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_taken_over_with_its_owners_values(name: str, codec: Codec | str) -> None:
    layer, expected = LAYERS[name]()
    bias = None if layer.bias is None else layer.bias.float()
    report = quantize_frozen_params(layer, codec, min_numel=1, dtype=torch.float32)
    assert (report.weights, report.parameters) == (1, expected.numel())
    assert type(layer).__name__ == "FrozenLinear"
    assert isinstance(layer, FrozenModule)
    if isinstance(codec, Codec):
        parameter = nn.Parameter(expected.clone(), requires_grad=False)
        lora.round_weight(parameter, codec)
        expected = parameter.data
    assert torch.equal(layer.weight.dequantize(), expected)
    x = torch.randn(3, expected.shape[1], device=models.device())
    assert torch.equal(layer(x), nn.functional.linear(x, expected, bias))
    assert set(dict(layer.named_parameters())) <= {"bias"}


def test_packed_layers_stay_as_stored_and_plain_ones_are_encoded_by_default_or_left() -> None:
    model = nn.Sequential(four_bits(quant_type="fp4")[0], nn.Linear(WIDTH, WIDTH).requires_grad_(False)).to(
        models.device()
    )
    report = quantize_frozen_params(model, "as stored")
    assert (report.weights, report.left["not stored quantized"]) == (1, ("1.weight",))
    assert ": frozen base as stored, " in str(report)
    (packed, expected), plain = four_bits(quant_type="fp4"), model[1]
    report = quantize_frozen_params(model := nn.Sequential(packed, plain), dtype=torch.float32)
    assert (report.weights, report.stored) == (2, 1)
    assert ": frozen base as int8(256), but 1 of 2 weights as stored, " in str(report)
    assert torch.equal(model[0].weight.dequantize(), expected)
    assert model[1].weight.frozen.codec == Int8(256)
    layer = packed_linear(1)
    layer.__class__ = Other
    report = quantize_frozen_params(layer, Int8(64), min_numel=1)
    assert (report.weights, report.left) == (0, {"packed already as Params4bit": ("weight",)})


def under_strategies(adapter: Adapter) -> list[str]:
    """In a worker: packed layers under MixZ++, which keeps them as stored, and with a codec; what the first logs."""
    alone = make()
    with collected() as records, torch.no_grad():
        sharded = adapter.wrap(make(), Strategy.mixzpp(gpus_per_node=2))
        sharded(x())
    weights = [weight for *_, weight in frozen_sites(sharded)]
    assert [str(weight.codec) for weight in weights] == ["nf4(64)", "nf4(64)", "int8(256)"]
    assert weights[0].local_nbytes == WIDTH * WIDTH // 2 * (1 / 2 + 4 / 64)  # a rank of two has half
    sharded = adapter.wrap(make(), Strategy.mixzpp(gpus_per_node=2, frozen=NF4(64)))
    with torch.no_grad():
        ours, expected = (each(x()).flatten().float() for each in (sharded, alone))
    assert {weight.codec for *_, weight in frozen_sites(sharded)} == {NF4(64)}
    assert torch.cosine_similarity(ours, expected, 0) > 0.98
    return [line for _, line in records]


@over_adapters
def test_strategies_keep_packed_layers_unless_a_codec_is_named(pool: Pools, adapter: Adapter) -> None:
    lines = pool(4).run(under_strategies, adapter)[0]
    assert any("frozen base as int8(256), but 2 of 3 weights as stored, sharded inside" in line for line in lines)


def test_an_adapter_on_a_packed_layer_works_on() -> None:
    model: Any = nn.Sequential(packed_linear(1))
    model.is_loaded_in_4bit = True
    adapted = get_peft_model(model, LoraConfig(target_modules=["0"], r=4, init_lora_weights=False))
    batch = x()
    before = adapted(batch)
    quantize_frozen_params(adapted, NF4(64), min_numel=1)
    torch.testing.assert_close(adapted(batch), before, rtol=2e-2, atol=2e-2)  # bitsandbytes rounds to bf16
    adapted(batch).sum().backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


def takes_the_first_ranks() -> None:
    options: dict[str, Any] = {"min_numel": 1, "gpus_per_node": 1, "sync_module_states": True, "dtype": torch.float32}
    for codec in ("as stored", Int8(64)):
        layer, _ = four_bits(seed=dist.get_rank())
        quantize_frozen_params(layer, codec, **options)
        bound = 0.0 if codec == "as stored" else 0.1
        torch.testing.assert_close(layer.weight.dequantize(), four_bits(seed=0)[1], rtol=0, atol=bound)


def test_the_first_ranks_codes_are_broadcast(pool: Pools) -> None:
    pool(2).run(takes_the_first_ranks)
