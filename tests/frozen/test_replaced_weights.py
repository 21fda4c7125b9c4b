"""Replacements of a quantized weight are honoured or refused; none does nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import moe
import pytest
import torch
from harness import llama, lora, models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_each
from harness.pool import Pools
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from fsdp_zpp import Int8, Strategy, dequantize_frozen_params, quantize_frozen_params

CODEC = Int8(64)
TARGETS = ["q_proj.weight", "down_proj.weight", "embed_tokens.weight"]


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of one batch, the same on every rank."""
    llama.loss_of(model, llama.tokens(0, 0)).backward()
    return lora.gradients_of(model)


def adapted_parameters(adapter: Adapter, first: bool, dtype: torch.dtype) -> None:
    base, alone = (
        llama.make_base(dtype).requires_grad_(False),
        moe.adapt(llama.rounded_base(CODEC, dtype), "v_proj", TARGETS),
    )
    if first:
        quantize_frozen_params(base, CODEC, gpus_per_node=2)
    model = moe.adapt(base, "v_proj", TARGETS)
    if not first:
        quantize_frozen_params(model, CODEC, gpus_per_node=2)
    model = llama.shard(adapter, model, Strategy("IGG", gpus_per_node=2))
    assert torch.equal(llama.logits_of(model), llama.logits_of(alone))
    with llama.peft_of(model).disable_adapter(), alone.disable_adapter():
        assert torch.equal(llama.logits_of(model), without := llama.logits_of(alone))
    assert not torch.equal(without, llama.logits_of(alone))
    gradients(model)
    # The mean of four equal gradients, rounded to bf16 once more.
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert models.distance(adapter.full_gradients(model), gradients(alone)) <= bound


@over_each(adapter=ADAPTERS, case={"fp32": (False, torch.float32), "bf16, quantized first": (True, torch.bfloat16)})
def test_adapters_of_parameters_act_on_quantized_layers(
    pool: Pools, adapter: Adapter, case: tuple[bool, torch.dtype]
) -> None:
    pool(4).run(adapted_parameters, adapter, *case)


def test_a_layer_computes_with_a_replaced_weight_in_the_dtype_of_its_input() -> None:
    config = LoraConfig(target_modules=[], target_parameters=["0.weight"])
    model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    quantize_frozen_params(model, CODEC, min_numel=1)
    x = torch.randn(2, 64)
    assert model(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Experts(nn.Module):
    """A stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[1]


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(64, 64), lambda: torch.ones(2, 64)),
    "embedding": (lambda: nn.Embedding(64, 64), lambda: torch.arange(4)),
    "experts": (Experts, lambda: torch.ones(2, 64)),
}
over_modules = pytest.mark.parametrize("kind", MODULES)


def frozen_module(kind: str) -> nn.Module:
    """A module with a frozen weight, not quantized yet."""
    torch.manual_seed(0)
    return MODULES[kind][0]().requires_grad_(False)


def pre_hook(module: nn.Module) -> None:
    def double(module: nn.Module, inputs: Any) -> None:
        module.weight = nn.Parameter(2 * module.weight, requires_grad=False)

    module.register_forward_pre_hook(double)


COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "parametrize": lambda module: parametrize.register_parametrization(module, "weight", Doubled()),
    "weight norm": parametrizations.weight_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "set in a hook": pre_hook,
    "deleted": lambda module: delattr(module, "weight"),
    "called with another": lambda module: torch.func.functional_call(
        module, {"weight": torch.zeros_like(module.weight)}, torch.ones(2, 64)
    ),
}


BY_TORCH = ("parametrize", "weight norm", "pruned")


@pytest.mark.parametrize("way", COMPUTED)
@over_modules
def test_what_computes_a_quantized_weight_from_others_is_refused(kind: str, way: str) -> None:
    module = frozen_module(kind)
    quantize_frozen_params(module, CODEC, min_numel=1)
    expected = module(MODULES[kind][1]())

    def replace_and_compute() -> None:
        COMPUTED[way](module)
        module(MODULES[kind][1]())

    # torch's own functions find no parameter of that name.
    said = "weight" if way in BY_TORCH else r"weight is frozen and quantized, so .*dequantize_frozen_params"
    with pytest.raises((KeyError, ValueError) if way in BY_TORCH else RuntimeError, match=said):
        replace_and_compute()
    if way != "set in a hook":
        assert torch.equal(module(MODULES[kind][1]()), expected)


@pytest.mark.parametrize("way", BY_TORCH)
@over_modules
def test_a_weight_that_is_computed_from_others_before_is_right_afterwards(kind: str, way: str) -> None:
    module, plain = frozen_module(kind), frozen_module(kind)
    COMPUTED[way](module)
    COMPUTED[way](plain)
    quantize_frozen_params(module.requires_grad_(False), Int8(64), min_numel=1)
    x = MODULES[kind][1]()
    torch.testing.assert_close(module(x), plain(x), rtol=0.02, atol=0.2)  # of sums of 64 values quantized to 8 bits


@over_modules
def test_a_tensor_put_in_place_of_a_quantized_weight_is_used(kind: str) -> None:
    other = 0.5 * frozen_module(kind).weight
    plain = frozen_module(kind)
    plain.weight.data.copy_(other)
    x = MODULES[kind][1]()
    module = frozen_module(kind)
    quantize_frozen_params(module, CODEC, min_numel=1)
    for place, value in ((vars(module), other), (module._parameters, nn.Parameter(other))):
        before = module(x)
        place["weight"] = value
        assert torch.equal(module(x), plain(x))
        assert not torch.equal(before, plain(x))
        del place["weight"]
        assert torch.equal(module(x), before)


def test_other_weights_of_a_quantized_layer_may_be_computed_from_others() -> None:
    layer = frozen_module("linear")
    quantize_frozen_params(layer, CODEC, min_numel=1)
    x = torch.ones(2, 64)
    before = layer(x)
    parametrize.register_parametrization(layer, "bias", Doubled())
    torch.testing.assert_close(layer(x) - before, layer.parametrizations.bias.original.expand(2, 64))
    for use in (copy.deepcopy, dequantize_frozen_params):
        with pytest.raises(RuntimeError, match=r"bias of a .*FrozenLinear .* is parametrized"):
            use(layer)
