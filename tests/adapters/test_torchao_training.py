"""torchao's low-precision training: what its layers compute with and send is what they do under torch's own FSDP."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, over_each
from harness.fsdp2 import Fsdp2
from harness.messages import collected
from harness.pool import Pool
from harness.training import train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional as F

from fsdp_zpp import Int8, Strategy, gathered_weights

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")

# Widths that float8 and MXFP8 can block; see own_formats.py for the precision.
SIZES = (("width", 32), ("hidden", 64), ("vocabulary", 64), ("blocks", 2))
CASE = Case(model=SIZES, precision=Precision(torch.bfloat16, torch.float32), clip=None, micro_batches=2)
HPZ = Strategy("IGG", gpus_per_node=2)
WITH_CODEC = Strategy("IGG", weights=Int8(64), gpus_per_node=2)


def in_blocks(module: nn.Module, name: str) -> bool:
    """Whether a module is a linear layer of a block."""
    return isinstance(module, nn.Linear) and "blocks" in name


def float8(net: nn.Module, own_gather: bool = False) -> None:
    """Convert to torchao's Float8Linear."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=own_gather, emulate=True)
    convert_to_float8_training(net, config=config, module_filter_fn=in_blocks)


def own_gather(net: nn.Module) -> None:
    """Convert to Float8Linear whose weights are cast before the gather."""
    float8(net, own_gather=True)


def mxfp8_layers(net: nn.Module) -> None:
    """Replace linear layers by torchao's MXFP8Linear."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common import KernelPreference

    for block in net.blocks:
        for name in ("up", "down"):
            layer = getattr(block, name)
            new = MXFP8Linear(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                kernel_preference=KernelPreference.EMULATED,
            )
            new.load_state_dict(layer.state_dict())
            setattr(block, name, new)


def mxfp8_weights(net: nn.Module) -> None:
    """Let weights compute in MXFP8, as torchao's quantize_ does for training."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    quantize_(net, config, filter_fn=in_blocks)


def nvfp4_layers(net: nn.Module) -> None:
    """Replace linear layers by torchao's NVFP4Linear, whose kernels need a GPU; see :func:`without_kernels`."""
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear

    for block in net.blocks:
        for name in ("up", "down"):
            layer = getattr(block, name)
            setattr(block, name, NVFP4Linear.from_linear(layer))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
    """Stand for NVFP4's products, whose kernels no CPU has; the layer is torchao's, with its parameters and buffers."""
    assert how["sr_seed"].dtype == torch.int64
    return F.linear(x, weight, bias)


def int8_products(net: nn.Module) -> None:
    """Let weights be quantized for int8 products."""
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    quantize_(net, int8_mixed_precision_training(), filter_fn=in_blocks)


def int8_weights(net: nn.Module) -> None:
    """Keep weights in int8, which optimizers write to by stochastic rounding."""
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(net, int8_weight_only_quantized_training(), filter_fn=in_blocks)


def skip_if_refused(convert: Callable[[Any], None]) -> None:
    """Skip the test if torchao does not convert layers for this torch."""
    try:
        convert(models.make_net(**dict(CASE.model)))
    except AssertionError as error:
        pytest.skip(f"torchao: {error}")


FORMATS: dict[str, Callable[[Any], None]] = {
    "float8": float8,
    "mxfp8 layers": mxfp8_layers,
    "mxfp8 weights": mxfp8_weights,
    "int8 products": int8_products,
    "nvfp4 layers": nvfp4_layers,
}


def make(adapter: Adapter, convert: Callable[[Any], None], strategy: Any, case: Case = CASE) -> Any:
    """In a worker: a sharded net of converted layers."""
    net = models.make_net(**dict(case.model))
    torch.manual_seed(0)
    convert(net)
    return adapter.shard(net.to(models.device()), case, strategy)


Trained = tuple[list[float], dict[str, Tensor], list[tuple[str, str]]]


def trained(adapter: Adapter, name: str, strategy: Any) -> Trained:
    """In a worker: losses, weights and the log of a training, in batches that MXFP8 can block."""
    from torchao.prototype.moe_training.nvfp4_training import nvfp4_training

    losses = []
    with collected() as records, mock.patch.object(nvfp4_training, "nvfp4_linear", product):
        model = make(adapter, FORMATS[name], strategy)
        optimizer = models.make_optimizer("sgd", model.parameters())
        for step in range(3):
            tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
            loss = models.loss_of(model, tokens.to(models.device()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, adapter.full_weights(model), records


@over_each(
    2, adapter=ADAPTERS, name=["float8", "mxfp8 layers", "nvfp4 layers"], strategy={"hpz": HPZ, "codec": WITH_CODEC}
)
def test_layers_of_plain_parameters_train_as_any_others(
    pool: Callable[[int], Pool], adapter: Adapter, name: str, strategy: Strategy
) -> None:
    check_like_stock(pool(4), adapter, name, strategy)


@pytest.mark.parametrize("strategy", [HPZ, WITH_CODEC, replace(HPZ, levels="NNG")], ids=["hpz", "codec", "NNG"])
@pytest.mark.parametrize("name", ["mxfp8 weights", "int8 products"])
def test_weights_that_are_only_cast_for_the_gather_are_encoded_as_any_others(
    pool: Callable[[int], Pool], name: str, strategy: Strategy
) -> None:
    """They have an all-gather format of their own, but that is their values in the dtype to compute in."""
    skip_if_refused(FORMATS[name])
    check_like_stock(pool(4), Fsdp2(), name, strategy)


def trained_in_int8(strategy: Any) -> tuple[list[float], list[Tensor], str]:
    """In a worker: losses, this rank's shards in full precision, and what is logged."""
    with collected() as records:
        model = make(Fsdp2(), int8_weights, strategy)
        torch.manual_seed(dist.get_rank())  # of stochastic rounding
        # On GPUs optimizers step many weights at a time by default, which torchao's weights can't.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        losses = train(Fsdp2(), model, CASE, optimizer=optimizer)
    shards = [parameter.to_local().detach() for parameter in model.parameters()]
    return losses, [shard if type(shard) is Tensor else shard.dequantize() for shard in shards], str(records)


@pytest.mark.parametrize("strategy", [HPZ, WITH_CODEC, replace(HPZ, levels="NNG")], ids=["hpz", "codec", "NNG"])
def test_weights_that_are_kept_in_int8_go_as_they_are(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    ours, stock = (pool(4).run(trained_in_int8, each) for each in (strategy, STOCK))
    for (losses, shards, _), (expected, exact, _) in zip(ours, stock, strict=True):
        if strategy.weights is None:  # others encode embedding and head
            assert losses == expected
            assert all(map(torch.equal, shards, exact))
        assert losses == pytest.approx(expected, rel=5e-2)
    assert "weights that encode themselves gathered in their own bytes" in ours[0][2]


def check_like_stock(pool: Pool, adapter: Adapter, name: str, strategy: Strategy) -> None:
    """Compare with stock: exactly without a codec for weights, and in the first loss with one, which all units have."""
    ours, stock = (pool.run(trained, adapter, name, each) for each in (strategy, STOCK))
    for (losses, weights, _), (expected, exact, _) in zip(ours, stock, strict=True):
        if strategy.weights is None:
            assert losses == expected
            assert all(torch.equal(weights[key], exact[key]) for key in exact)
        else:
            assert losses != expected
            assert losses == pytest.approx(expected, rel=5e-2)
    [(_, line)] = ours[0][2]
    assert "themselves" not in line
    assert f"weights gathered {'in full precision' if strategy.weights is None else 'as int8(64);'}" in line


def handed_out(convert: Callable[[Any], None]) -> None:
    """In a worker: full weights of a model whose shards are torchao's tensors."""
    model = make(Fsdp2(), convert, HPZ)
    models.loss_of(model, torch.zeros(2, 17, dtype=torch.long, device=models.device())).backward()
    weights = dict(gathered_weights(model))
    expected = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert weights.keys() == expected.keys()
    assert all(type(weight) is Tensor and torch.equal(weight, expected[name]) for name, weight in weights.items())


@pytest.mark.parametrize("convert", [own_gather, mxfp8_weights, int8_products])
def test_full_weights_are_plain_tensors(pool: Callable[[int], Pool], convert: Callable[[Any], None]) -> None:
    skip_if_refused(convert)
    pool(4).run(handed_out, convert)


# ---- float8 weights that are cast before the gather


def with_precomputed_scales(strategy: Any, precomputes: bool) -> tuple[list[float], int]:
    """In a worker: losses, and how often scales were computed in steps after the first."""
    from torchao.float8 import fsdp_utils, precompute_float8_dynamic_scale_for_fsdp

    adapter = Fsdp2()
    model = make(adapter, own_gather, strategy)
    optimizer = models.make_optimizer("adamw", model.parameters())

    def precompute(step: int, optimizer: Any) -> None:
        if precomputes:
            precompute_float8_dynamic_scale_for_fsdp(model)

    losses = train(adapter, model, replace(CASE, steps=1), precompute, optimizer)
    with mock.patch.object(
        fsdp_utils, "hp_tensor_to_float8_dynamic", wraps=fsdp_utils.hp_tensor_to_float8_dynamic
    ) as dynamic:
        losses += train(adapter, model, replace(CASE, steps=3), precompute, optimizer, first_step=1)
    return losses, dynamic.call_count


@pytest.mark.parametrize("strategy", [HPZ, Strategy("IIG", gpus_per_node=2), Strategy("NNG", gpus_per_node=2)], ids=str)
def test_scales_may_be_computed_after_the_step(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    stock = pool(4).run(with_precomputed_scales, STOCK, True)
    # Four weights in three steps, once each.
    for precomputes, computed in ((True, 0), (False, 12)):
        for (losses, calls), (expected, _) in zip(
            pool(4).run(with_precomputed_scales, strategy, precomputes), stock, strict=True
        ):
            assert losses == expected
            assert calls == computed


def compiled(adapter: Adapter, strategy: Any) -> list[float]:
    """In a worker: losses of a model whose blocks are compiled."""
    torch._dynamo.reset()
    net = models.make_net(**dict(SIZES))
    own_gather(net)
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return train(adapter, adapter.shard(net, CASE, strategy), CASE)


def test_compiled_layers_train_as_stock(pool: Callable[[int], Pool]) -> None:
    ours, stock = (pool(4).run(compiled, Fsdp2(), strategy) for strategy in (HPZ, STOCK))
    assert ours == stock
