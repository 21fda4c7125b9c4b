"""Checkpoints that are stored quantized, in every format: kept as stored or encoded anew, bases are what they hold."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moe
import packed_codes_by_hand as by_hand
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from bitsandbytes import functional
from harness import llama, lora, models
from harness.adapter import Adapter
from harness.covering import ADAPTERS
from harness.live_bytes import LiveBytes
from harness.lora import refused
from harness.pool import Pools
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config, LlamaConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from fsdp_zpp import (
    NF4,
    Int8,
    Strategy,
    dequantize_frozen_params,
    gathered_weights,
    plan,
    quantize_frozen_params,
    save_adapter,
    save_frozen_params,
)
from fsdp_zpp.codecs import Codec
from fsdp_zpp.frozen._torch_modules import frozen_sites
from fsdp_zpp.frozen.base_files import check_base, describe_base

AS_STORED = "as stored"
FILE = "model.safetensors"
CPU = torch.device("cpu")
LORA = {"default": "lora"}
Tensors = dict[str, Tensor]

# ---- checkpoints that the library makes which owns the format

SIZES = llama.CONFIG | {"hidden_size": 128, "intermediate_size": 256}
"""Weights of one and of several of fp8's blocks."""


def _plain(folder: Path) -> Path:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    return folder


def _bitsandbytes(folder: Path, **options: Any) -> None:
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(_plain(folder / "plain"), quantization_config=config, device_map="cpu")
    model.save_pretrained(folder)
    _write_values(folder)


def _fp8(folder: Path, **options: Any) -> None:
    """All matrices of the layers in fp8, by transformers' own operation."""
    source, config = _plain(folder / "plain"), FineGrainedFP8Config(**options)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
    tensors: Tensors = {}
    for key, value in load_file(source / FILE).items():
        tensors |= quantize.convert({key: value}) if ".layers." in key and value.dim() == 2 else {key: value}
    content = json.loads((source / "config.json").read_text()) | {"quantization_config": config.to_dict()}
    (folder / "config.json").write_text(json.dumps(content, default=str))
    save_file(tensors, folder / FILE, {"format": "pt"})
    _write_values(folder)


def _write_values(folder: Path) -> None:
    """Write what a checkpoint's owner decodes it to, in fp32, by the names before it was quantized."""
    tensors, values = load_file(folder / FILE), {}
    for key, value in tensors.items():
        if f"{key}_scale_inv" in tensors:
            values[key] = Fp8Dequantize(None)._dequantize_one(value, tensors[f"{key}_scale_inv"], torch.float32)
        elif f"{key}.absmax" in tensors:
            parts = {name: part for name, part in tensors.items() if name.startswith(f"{key}.")}
            state = functional.QuantState.from_dict(parts, CPU)
            state.dtype = torch.float32
            values[key] = functional.dequantize_4bit(value, state)
        elif not key.endswith("_scale_inv") and ".weight." not in key:
            values[key] = value.float()
    (folder / "values").mkdir(exist_ok=True)
    save_file(values, folder / "values" / FILE, {"format": "pt"})


_nf4 = partial(_bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4")
OWNERS: dict[str, Callable[[Path], None]] = {
    "nf4": _nf4,
    "nf4, nested": partial(_nf4, bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage="bfloat16"),
    "fp4": partial(_bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "fp8": _fp8,
    "fp8, ue8m0": partial(_fp8, scale_fmt="ue8m0"),
    "fp8, other blocks": partial(_fp8, weight_block_size=(64, 128)),
}

# ---- checkpoints of codes that are written by hand, of models with and without experts


def _group(inputs: int) -> int:
    return 32 if inputs % 32 == 0 else inputs


_ROWS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_COMPRESSED = {
    **{"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp.gate$"], "format": "float-quantized"},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _ROWS}},
    "quantization_status": "compressed",
}
_GPTQ = {"quant_method": "gptq", "group_size": 32, "checkpoint_format": "gptq"}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int, int], by_hand.Stored]]] = {
    "gptq4": (_GPTQ | {"bits": 4, "sym": False}, lambda o, i, s: by_hand.gptq(o, i, s, group=_group(i))),
    "gptq4 in order of activations": (
        _GPTQ | {"bits": 4, "sym": True, "desc_act": True},
        lambda o, i, s: by_hand.gptq(o, i, s, group=_group(i), sym=True, act=True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda o, i, s: by_hand.awq(o, i, s, group=_group(i)),
    ),
    "fp8 by rows": (_COMPRESSED, by_hand.fp8_rows),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}, by_hand.fp8),
    "mxfp4": ({"quant_method": "mxfp4"}, by_hand.gptq),  # of gpt-oss's stacks alone
}
"""For each format its ``quantization_config``, and what writes a matrix, by a seed."""


def _by_hand(folder: Path, kind: str, format: str, **options: Any) -> None:
    """Quantize what checkpoints of this format have quantized; random codes, which need no quantizer."""
    base = llama.make_base() if kind == "llama" else moe.make_base(kind, **options)
    config, write = FORMATS[format]
    stored: Tensors = {}
    values: Tensors = {}

    def add(module: str, weight: Tensor, seed: int) -> Tensor:
        parts, decoded = write(*weight.shape, seed)
        stored.update({f"{module}.{end}": part for end, part in parts.items()})
        return decoded.to(weight.dtype)

    experts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for seed, (name, tensor) in enumerate(base.state_dict().items()):
        linear = name.endswith("_proj.weight") or name.endswith("_mqa.weight") or re.search("_[ab]_proj", name)
        if tensor.dim() == 3 and format == "mxfp4":
            parts, decoded = by_hand.mxfp4(tensor.shape[0], tensor.shape[2], tensor.shape[1], 10 * seed)
            stored |= {f"{name}_{end}": part for end, part in parts.items()}
            values[name] = decoded.to(tensor.dtype)
        elif tensor.dim() == 3 and kind != "gpt_oss":
            prefix, stack = name.rsplit(".", 1)
            matrices: list[Tensor] = []
            for expert in range(len(tensor)):
                parts_of_it = tensor[expert].chunk(len(experts[stack]))
                for part, matrix in zip(experts[stack], parts_of_it, strict=True):
                    matrices.append(add(f"{prefix}.{expert}.{part}", matrix, 1000 * seed + len(matrices)))
            values[name] = torch.cat(matrices).view_as(tensor)
        elif linear and tensor.dim() == 2 and format != "mxfp4":
            values[name] = add(name.removesuffix(".weight"), tensor, 10 * seed)
        else:
            stored[name] = values[name] = tensor.clone()
    (folder / "values").mkdir()
    for path, tensors in ((folder, stored), (folder / "values", values)):
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path / FILE, {"format": "pt"})
    content = base.config.to_dict() | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(content, default=str))


BY_HAND = {
    f"{kind} {format}": partial(_by_hand, kind=kind, format=format)
    for kind, formats in {
        "llama": ("gptq4 in order of activations",),
        "qwen3": ("gptq4", "awq", "fp8 by rows"),
        "deepseek": ("fp8",),
        "gpt_oss": ("mxfp4",),
    }.items()
    for format in formats
}
CHECKPOINTS = OWNERS | BY_HAND
ANEW: dict[str, Codec] = dict(zip(CHECKPOINTS, itertools.cycle([Int8(64), NF4(64)]), strict=False))
Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A function that returns a checkpoint by name, which is made once."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("stored")
            CHECKPOINTS[name](folders[name])
        return folders[name]

    return make


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Made:
    """A function that returns a copy to change of a checkpoint."""
    numbers = itertools.count()
    return lambda name: shutil.copytree(made(name), tmp_path / str(next(numbers)))


# ---- models of a checkpoint


def _constructed(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    if moe.layers_of(model):
        model.set_experts_implementation("grouped_mm")
    return model.requires_grad_(False)


def empty(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    with init_empty_weights():
        return _constructed(folder, dtype)


def dequantized(folder: Path, codec: Codec | None = None) -> Any:
    """The oracle: the model of the values that the checkpoint stands for, as a codec leaves them if there is one."""
    model = _constructed(folder)
    model.load_state_dict(load_file(folder / "values" / FILE))
    model.to(models.device())
    for parameter in moe.chosen(model).values() if codec is not None else ():
        lora.round_weight(parameter, codec)
    return model


def owners_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model as transformers loads it on a CPU, with the library that owns the format."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    how: dict[str, Any] = {"dtype": dtype, "device_map": "cpu", "output_loading_info": True}
    kinds = {"mxfp4": transformers.Mxfp4Config, "fp8": FineGrainedFP8Config}
    if config["quant_method"] == "compressed-tensors":
        own = {key: value for key, value in config.items() if key != "quant_method"}
        how["quantization_config"] = transformers.CompressedTensorsConfig(**own, dequantize=True)
    elif config["quant_method"] in kinds:  # with kernels for GPUs alone
        how["quantization_config"] = kinds[config["quant_method"]](dequantize=True)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, **how)
    assert not loading["missing_keys"]
    return model


def adapt(model: Any) -> PeftModel:
    """Add an adapter to the attention, and to the experts if there are any."""
    return moe.adapt(model) if moe.layers_of(model) else llama.adapt(model, LORA)


def shard(adapter: Adapter, model: Any, strategy: Strategy) -> Any:
    return (moe if moe.layers_of(model) else llama).shard(adapter, model, strategy)


# ---- on one device: the contract of a format


def quantized_names(folder: Path, model: nn.Module) -> set[str]:
    """Parameters that a checkpoint stores quantized and that are large enough to stay so."""
    keys = load_file(folder / FILE).keys()

    def has_parts(name: str) -> bool:
        module = name.removesuffix(".weight")
        return any(key.startswith(f"{module}.") and key not in (name, f"{module}.bias") for key in keys)

    large = {name for name, p in model.named_parameters() if p.dim() > 1 and p.numel() >= 4096}
    return {name for name in large if name not in keys or has_parts(name)}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_codes_that_are_kept_decode_as_their_owner_decodes_them(
    made: Made, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = made(name)
    model, exact = empty(folder), dequantized(folder)
    report = quantize_frozen_params(model, AS_STORED, checkpoint=folder)
    kept = {f"{path}.{weight}" for path, _, weight, _ in frozen_sites(model)}
    assert kept == quantized_names(folder, exact)
    assert "no place for" not in caplog.text  # all that was stored is part of some weight
    parts = [part for key, part in load_file(folder / FILE).items() if key not in exact.state_dict() or key in kept]
    assert report.bytes_after <= 1.15 * sum(part.nbytes for part in parts)  # as on disk
    assert torch.equal(llama.logits_of(model), llama.logits_of(exact))
    for stack, values in moe.chosen(exact).items():
        if values.dim() == 3:  # one matrix of which decodes alone, as experts that are not grouped have it
            assert torch.equal(model.get_parameter(stack)[3].dequantize(), values[3])
    if moe.layers_of(model):
        for each in (model, exact):
            each.set_experts_implementation("eager")
        assert torch.equal(llama.logits_of(model), llama.logits_of(exact))
    dequantize_frozen_params(model)
    expected = exact.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_codec_encodes_what_the_owner_decodes_but_for_what_is_trained(made: Made, name: str) -> None:
    folder, codec = made(name), ANEW[name]
    model, exact, rounded = empty(folder), dequantized(folder), dequantized(folder, codec=codec)
    key = "model.layers.1.self_attn.o_proj.weight"
    assert model.get_parameter(key).requires_grad_().is_meta
    quantize_frozen_params(model, codec, checkpoint=folder)
    assert model.get_parameter(key).requires_grad
    assert torch.equal(model.get_parameter(key).detach(), exact.get_parameter(key))
    rounded.get_parameter(key).data.copy_(exact.get_parameter(key))
    assert torch.equal(llama.logits_of(model), llama.logits_of(rounded))


READ_BY_TRANSFORMERS = (
    "qwen3 fp8 by rows",
    *("deepseek fp8", "gpt_oss mxfp4"),
)


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_weights_equal_those_that_transformers_dequantizes(made: Made, name: str) -> None:
    folder = made(name)
    expected = owners_model(folder).state_dict()
    for smallest in (1, 10**9):
        ours = empty(folder, torch.bfloat16)
        # Weights that are not kept, or encoded, are decoded all the same.
        quantize_frozen_params(ours, AS_STORED if smallest == 1 else Int8(64), checkpoint=folder, min_numel=smallest)
        assert bool(dequantize_frozen_params(ours)) == (smallest == 1)
        weights = ours.state_dict()
        # transformers 5.17 leaves the scales that compressed-tensors has used beside the weights.
        assert {name for name in expected if not name.rpartition(".")[2].startswith("weight_")} == set(weights)
        for key, value in weights.items():
            # Routers stay in fp32.
            assert torch.equal(value.bfloat16(), expected[key].to(models.device(), torch.bfloat16)), key


def test_a_base_that_is_kept_is_told_from_another_and_not_saved_again(copied: Made, tmp_path: Path) -> None:
    folder = copied("fp4")
    first, other = empty(folder), empty(folder)
    quantize_frozen_params(first, AS_STORED, checkpoint=folder)
    described = describe_base(first)
    check_base(first, described, "here")
    change(folder, replaced(f"{KEY}.absmax", lambda scales: scales * 2))
    quantize_frozen_params(other, AS_STORED, checkpoint=folder)
    with pytest.raises(ValueError, match=r"1 of the 14 quantized weights of this LlamaForCausalLM differ"):
        check_base(other, described, "here")
    with pytest.raises(ValueError, match=r"is kept as stored, bitsandbytes fp4 in blocks of 64, and its codes are in"):
        save_frozen_params(first, tmp_path / "saved")


def test_the_name_stands_for_a_codec_of_frozen_weights_alone() -> None:
    strategy = Strategy.from_dict({"preset": "zeropp", "frozen": AS_STORED})
    assert strategy == Strategy.zeropp(frozen=AS_STORED)
    assert strategy.to_dict()["frozen"] == AS_STORED
    with pytest.raises(ValueError, match="which is for frozen weights alone"):
        Strategy.from_dict({"weights": AS_STORED})
    with pytest.raises(ValueError, match="encodes no values itself; name a codec with as many bits"):
        plan(7e9, nodes=1, gpus_per_node=8, intra_gbps=2400, trainable=10**7, frozen=strategy.frozen)  # type: ignore[arg-type]


# ---- stacks of experts that can't be kept


def test_matrices_that_end_within_a_block_can_only_be_encoded_anew(tmp_path: Path) -> None:
    _by_hand(tmp_path, "qwen3", "fp8", moe_intermediate_size=48)
    said = "can't stay as stored: a matrix of shape"
    refused(empty(tmp_path), reading(tmp_path, AS_STORED), "the stack model.layers.0.mlp.experts.", said)
    model = empty(tmp_path)
    quantize_frozen_params(model, Int8(64), checkpoint=tmp_path)
    assert torch.equal(llama.logits_of(model), llama.logits_of(dequantized(tmp_path, codec=Int8(64))))


def test_stacks_of_experts_in_different_orders_can_only_be_encoded_anew(tmp_path: Path) -> None:
    _by_hand(tmp_path, "qwen3", "gptq4 in order of activations")
    said = "different formats; give a codec in place of 'as stored'"
    refused(empty(tmp_path), reading(tmp_path, AS_STORED), "experts", said)
    # By default, they alone are encoded anew, beside what is in full precision.
    model, exact = empty(tmp_path), dequantized(tmp_path)
    report = quantize_frozen_params(model, checkpoint=tmp_path)
    weights = {f"{path}.{name}": weight for path, _, name, weight in frozen_sites(model)}
    encoded = {name for name, weight in weights.items() if weight.codec == Int8(256)}
    # The inputs of the down projections are of one group.
    assert {name.rpartition(".")[2] for name in encoded} == {"gate_up_proj", "weight"}
    assert (report.weights, report.stored) == (10, 6)
    for name in encoded:
        lora.round_weight(exact.get_parameter(name), Int8(256))
    assert torch.equal(llama.logits_of(model), llama.logits_of(exact))


# ---- broken checkpoints: an error that names the tensor, and the model stays as it was

LAYER = "model.layers.1.mlp.down_proj."
KEY = f"{LAYER}weight"
STATE = f"{KEY}.quant_state.bitsandbytes__nf4"
EITHER = (AS_STORED, Int8(64))
Change = Callable[[Tensors], Any]


def reading(folder: Path, codec: Any) -> Callable[[Any], Any]:
    return lambda net: quantize_frozen_params(net, codec, checkpoint=folder)


def change(folder: Path, act: Change) -> None:
    tensors = {key: value.clone() for key, value in load_file(folder / FILE).items()}
    act(tensors)
    save_file(tensors, folder / FILE, {"format": "pt"})


def dropped(key: str) -> Change:
    return lambda tensors: tensors.pop(key)


def replaced(key: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({key: make(tensors[key]).contiguous()})


def halved(tensors: Tensors) -> None:
    replaced(KEY, lambda w: w[:, :128])(tensors)
    replaced(f"{KEY}_scale_inv", lambda s: s[:, :1])(tensors)


def in_state(**changes: Any) -> Change:
    def edit(state: Tensor) -> Tensor:
        content = json.loads(bytes(state.tolist())) | changes
        return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)

    return replaced(STATE, edit)


BROKEN: dict[str, list[tuple[Change, str]]] = {
    "fp8": [
        (dropped(f"{KEY}_scale_inv"), f"needs {KEY}_scale_inv, which is missing"),
        (replaced(f"{KEY}_scale_inv", lambda s: s.new_ones(3, 2)), f"{KEY}_scale_inv as a"),
        (replaced(f"{KEY}_scale_inv", Tensor.long), "needs fp32, bf16, fp16 or e8m0"),
        (replaced(f"{KEY}_scale_inv", lambda s: s * torch.nan), "NaN or infinite"),
        (replaced(KEY, lambda w: w[:, :128]), "a scale for each 128 x 128 of (128, 128)"),
        (halved, "(128, 256) in the model and (128, 128) in"),
    ],
    "nf4": [
        (dropped(f"{KEY}.absmax"), f"no {KEY}.absmax, though it has other tensors"),
        (dropped(STATE), f"{STATE} or ...fp4, which is missing"),
        (replaced(f"{KEY}.quant_map", torch.zeros_like), "needs the values of nf4"),
        (replaced(STATE, lambda s: s[:-4]), f"{STATE} describes no weight"),
        (in_state(quant_type="fp4"), "{'quant_type': 'fp4'}, which are not known of nf4"),
        (replaced(f"{KEY}.absmax", lambda s: s[:-1]), "shape (511,), but its weight needs shape (512,)"),
        (replaced(KEY, lambda w: w[:-1]), "needs 32768 codes in 16384 elements"),
        (replaced(f"{KEY}.absmax", lambda s: s * torch.inf), "NaN or infinite"),
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_do_not_fit_are_named(copied: Made, name: str) -> None:
    folder = copied(name)
    right = (folder / FILE).read_bytes()
    for act, message in BROKEN[name]:
        (folder / FILE).write_bytes(right)
        change(folder, act)
        for codec in EITHER:
            refused(empty(folder), reading(folder, codec), message)
    (folder / FILE).write_bytes(right[:-100])
    for codec in EITHER:
        refused(empty(folder), reading(folder, codec), f"{folder / FILE} is not a complete safetensors file")


def test_settings_of_another_kind_are_named(copied: Made) -> None:
    folder = copied("fp8")
    model, path = empty(folder), folder / "config.json"
    for config, message in (
        ({"quant_method": "of tomorrow"}, "quantized by 'of tomorrow'; those that can be read are fp8, "),
        ({"quant_method": ["fp8"]}, "quant_method ['fp8'], and a string belongs"),
        ({"quant_method": "fp8", "weight_block_size": [32]}, "weight_block_size [32], and two sizes belong"),
        ({"quant_method": "fp8", "weight_block_size": "x"}, "weight_block_size 'x', and a list belongs"),
        (["fp8"], "quantization_config ['fp8'], and a mapping belongs"),
    ):
        path.write_text(json.dumps({"quantization_config": config}))
        refused(model, reading(folder, AS_STORED), message)
    path.write_text("{")
    refused(model, reading(folder, AS_STORED), f"{path} can't be read as JSON")


def test_a_configuration_is_found_where_its_library_writes_it(copied: Made) -> None:
    folder = copied("fp8, other blocks")
    path = folder / "config.json"
    content = json.loads(path.read_text())
    config = content.pop("quantization_config")
    model, nothing = empty(folder), "nothing says which values share one of the scales of"
    places = [{"quantization_config": config}, {"a": {"quantization_config": config}}]
    for place in places:
        path.write_text(json.dumps(content | place))
        assert quantize_frozen_params(empty(folder), AS_STORED, checkpoint=folder).weights == 14
    other = {"b": {"quantization_config": config | {"weight_block_size": [64, 64]}}}
    path.write_text(json.dumps(content | places[1] | other))
    refused(model, reading(folder, AS_STORED), f"{path} has several quantization_config, which differ")
    path.write_text(json.dumps(content))
    refused(model, reading(folder, AS_STORED), nothing)
    (folder / "hf_quant_config.json").write_text("{}")
    refused(model, reading(folder, AS_STORED), "says that the checkpoint is quantized by ModelOpt; those that can be")


def test_without_a_configuration_names_and_dtypes_tell(copied: Made) -> None:
    for name in ("nf4, nested", "fp4"):
        folder = copied(name)
        model = empty(folder)
        (folder / "config.json").unlink()
        assert quantize_frozen_params(model, AS_STORED, checkpoint=folder).weights == 14


def on_one_rank(good: Path, bad: Path, other: Path) -> None:
    for folder, said in ((bad, f"{KEY}_scale_inv, which is missing"), (other, "read different files from")):
        refused(empty(good), reading(folder if dist.get_rank() == 1 else good, AS_STORED), said)


def test_what_one_rank_can_not_read_is_an_error_on_all(pool: Pools, copied: Made) -> None:
    good, bad, other = copied("fp8"), copied("fp8"), copied("fp8, other blocks")
    change(bad, dropped(f"{KEY}_scale_inv"))
    pool(2).run(on_one_rank, good, bad, other)


# ---- sharded


def trained(adapter: Adapter, folder: Path, scope: str, path: str) -> Tensor:
    base = empty(folder)
    quantize_frozen_params(base, AS_STORED, checkpoint=folder, gpus_per_node=2)
    model = shard(adapter, adapt(base), Strategy(f"{scope}GG", gpus_per_node=2))
    alone = adapt(dequantized(folder))
    assert torch.equal(llama.logits_of(model), llama.logits_of(alone))
    trainable = ([p for p in each.parameters() if p.requires_grad] for each in (model, alone))
    optimizers = [torch.optim.SGD(parameters, lr=0.05) for parameters in trainable]
    moe.backward(model, alone=False)
    expected = moe.backward(alone, alone=True)
    assert models.distance(adapter.full_gradients(model), expected) <= 1e-5  # sums over ranks in another order
    for optimizer in optimizers:
        optimizer.step()
    logits = llama.logits_of(model)
    assert models.distance({"logits": logits}, {"logits": llama.logits_of(alone)}) <= 1e-5
    save_adapter(model, path)
    loaded = PeftModel.from_pretrained(dequantized(folder), path).to(models.device())
    assert torch.equal(llama.logits_of(loaded), logits)
    merged, expected = dict(gathered_weights(model, merged=True)), loaded.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[key], value) for key, value in expected.items())
    return logits


TRAINED = [
    ("nf4, nested", "I", ADAPTERS[0]),
    ("deepseek fp8", "G", ADAPTERS[1]),
    ("gpt_oss mxfp4", "I", ADAPTERS[1]),
    ("fp4", "G", ADAPTERS[0]),
]


@pytest.mark.parametrize(("name", "scope", "adapter"), TRAINED, ids=str)
def test_lora_trains_and_merges_and_its_adapter_loads_beside_the_checkpoint(
    pool: Pools, made: Made, name: str, scope: str, adapter: Adapter, tmp_path: Path
) -> None:
    folder = made(name)
    ours = pool(4).run(trained, adapter, folder, scope, str(tmp_path))[0]
    exact = name in ("gpt_oss mxfp4", "deepseek fp8")
    # transformers 5.17 leaves experts in bf16, whatever it is asked for.
    base = owners_model(folder, torch.float32).to(torch.float32) if exact else owners_model(folder)
    theirs = llama.logits_of(PeftModel.from_pretrained(base, tmp_path), on=CPU)
    if exact:
        assert torch.equal(theirs, ours)
    else:  # in bf16
        assert models.distance({"logits": theirs.float()}, {"logits": ours}) < 0.03


LAYERS, WIDTH = 32, 256


def memory_of_reading(folder: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))
    with LiveBytes(math.inf) as live:
        report = quantize_frozen_params(model.requires_grad_(False), AS_STORED, checkpoint=folder, gpus_per_node=4)
    assert 4 * report.bytes_after >= LAYERS * WIDTH**2 / 2  # each has its quarter of at least four bits a value
    assert report.bytes_after <= live.peak <= report.bytes_after + 2 * 2 * WIDTH**2  # two tensors in bf16


@pytest.mark.parametrize("format", ["gptq4 in order of activations", "fp8"])
def test_a_rank_that_reads_needs_memory_for_its_shard_and_two_tensors(pool: Pools, tmp_path: Path, format: str) -> None:
    config, write = FORMATS[format]
    tensors = {f"{layer}.{end}": part for layer in range(LAYERS) for end, part in write(WIDTH, WIDTH, layer)[0].items()}
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    pool(4).run(memory_of_reading, tmp_path)
