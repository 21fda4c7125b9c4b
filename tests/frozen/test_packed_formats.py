"""Decoders of packed formats give what was packed, as the libraries that own the formats do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import packed_codes_by_hand as by_hand
import pytest
import torch
import transformers
from bitsandbytes import functional
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fsdp_zpp.comm.mesh import ProcessMesh
from fsdp_zpp.frozen.stored import find_stored
from fsdp_zpp.frozen.stored.floats import FourBit, Fp8, Mxfp4
from fsdp_zpp.frozen.stored.format import TensorHeader, stored_in
from fsdp_zpp.frozen.stored.integers import Awq, Gptq
from fsdp_zpp.frozen.weight import FrozenWeight, Placement
from fsdp_zpp.strategy.error_feedback import Topology

GPTQ = [
    {"bits": bits, "sym": sym, "act": act, "v2": v2}
    for bits in (4, 8)
    for sym, act, v2 in ((True, False, False), (False, True, False), (False, False, True))
]


# ---- formats


class Tensors(dict[str, Tensor]):
    """The tensors of a checkpoint, in memory."""

    def header(self, key: str) -> TensorHeader:
        return TensorHeader(tuple(self[key].shape), self[key].dtype)

    def read(self, key: str) -> Tensor:
        return self[key]


def _four_bits(out: int, inputs: int, seed: int = 0) -> by_hand.Stored:
    """As bitsandbytes writes nf4, with scales that are quantized, too."""
    weight = torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    parts = {"weight": codes} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    # Flat, since bitsandbytes 0.50.2 decodes matrices on the CPU as if no block spanned two rows.
    state.shape = torch.Size((1, weight.numel()))
    return parts, functional.dequantize_4bit(codes, state).view_as(weight)


def _gptq_config(options: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "gptq", "checkpoint_format": "gptq_v2" if options["v2"] else "gptq"}


_BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
FORMATS: dict[str, Any] = {
    **{f"gptq {options}": (Gptq, by_hand.gptq(48, 128, **options), "", _gptq_config(options)) for options in GPTQ},
    "awq": (Awq, by_hand.awq(48, 128), "", {"quant_method": "awq", "version": "GEMM"}),
    "mxfp4": (Mxfp4, by_hand.mxfp4(3, 48, 64), "experts_", {}),
    "fp8, no whole blocks": (Fp8, by_hand.fp8(44, 70), "", _BLOCKS),
    "fp8 by rows": (Fp8, by_hand.fp8_rows(44, 70), "", {"quant_method": "fbgemm_fp8"}),
    "4 bits of bitsandbytes": (FourBit, _four_bits(48, 72), "", {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_chunks_of_a_format_decode_alone(name: str, tmp_path: Path) -> None:
    kind, (parts, values), prefix, config = FORMATS[name]
    tensors = Tensors({(prefix or "layer.") + key: part for key, part in parts.items()})
    [(found, stored)] = find_stored(tensors, config).items()
    assert found == (prefix.removesuffix("_") or "layer.weight")
    assert isinstance(stored, kind)
    assert stored.shape == values.shape
    save_file(tensors, tmp_path / "a.safetensors")
    flat, row, middle = values.flatten().float(), values[0].numel(), values.numel() // 2
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        for read in (tensors.__getitem__, file.get_slice):
            weight = stored_in(stored, {role: read(key) for role, key in stored.keys.items()})
            for first, last in ((0, len(values)), (0, 1), (1, 3), (len(values) - 1, len(values)), (3, 3)):
                assert torch.equal(weight.values(first * row, last * row), flat[first * row : last * row])
            assert torch.equal(weight.values(middle - 3, middle + 5), flat[middle - 3 : middle + 5])  # within rows
            whole = weight.records(0, stored.num_groups)
            for cut in range(1, stored.num_groups):
                assert torch.equal(torch.cat([weight.records(0, cut), weight.records(cut, stored.num_groups)]), whole)
    for ranks in (1, 3):
        mesh = ProcessMesh(Topology(ranks, ranks), 0, None, None)
        places = [Placement("I", replace(mesh, rank=rank)) for rank in range(ranks)]
        chunks = [FrozenWeight("a", stored.shape, torch.float32, stored.codec, place) for place in places]
        out = torch.empty(ranks * chunks[0].chunk_numel)
        stored.codec.decode_rows(torch.stack([chunk.keep(weight, torch.device("cpu")) for chunk in chunks]), out)
        assert torch.equal(out[: values.numel()], flat)


_NEED_NOT_BE_THERE = {
    *("qweight", "blocks", "weight"),  # by which formats find their weights
    "g_idx",  # which not all weights have
}


# Files of the other formats are written by their own libraries, and broken where these write them.
@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name][0] not in (Fp8, FourBit)])
def test_what_does_not_fit_is_refused(name: str) -> None:
    _, (parts, _), prefix, config = FORMATS[name]
    prefix = prefix or "layer."
    for key, part in parts.items():
        changes = [] if key in _NEED_NOT_BE_THERE else [{}]
        changes += [{prefix + key: part[:-1]}, {prefix + key: part.double()}]
        others = {prefix + other: value for other, value in parts.items() if other != key}
        for change in changes:
            with pytest.raises(ValueError, match=f"{prefix}.*(give a complete checkpoint|or give another checkpoint)"):
                find_stored(Tensors(others | change), config)


# ---- what the configuration says, read as its owner reads it

SIDES = st.integers(1, 70)
SCALES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The owners have faults of their own, in corners that no checkpoint has: the same examples each time.
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


def read(tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    in_json = json.loads(json.dumps(config, default=str))
    [stored] = find_stored(Tensors(tensors), in_json).values()
    parts = {role: tensors[key] for role, key in stored.keys.items()}
    return stored_in(stored, parts).values(0, stored.shape.numel()).view(stored.shape)


def written_by(scheme: QuantizationScheme, format: str) -> dict[str, Any]:
    """The configuration that compressed-tensors writes."""
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=format, quantization_status="compressed")
    return {"version": "0.20.0", "sparsity_config": {}, "transform_config": {}, **config.model_dump()}


def read_by_owner(parts: dict[str, Tensor], scheme: QuantizationScheme, format: str) -> Tensor:
    weight: Tensor = BaseCompressor.get_value_from_registry(format).decompress(parts, scheme)["weight"]
    return weight


def random_bytes(*shape: int, seed: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def random_scales(*shape: int, seed: int) -> Tensor:
    """Scales of all sizes, 0 among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, shape, generator=generator) * 2.0 ** torch.randint(-9, 9, shape, generator=generator)


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether both are equal bit for bit, or NaN in the same places."""
    numbers = ~one.isnan()
    same = torch.equal(numbers, ~other.isnan()) and torch.equal(one[numbers], other[numbers])
    return same and one.dtype == other.dtype


@st.composite
def scales_of(draw: st.DrawFn, *kinds: str) -> tuple[dict[str, Any], tuple[int, int], tuple[int, ...]]:
    """The settings of scales, the shape of a weight, and that of its scales."""
    kind, rows, columns = draw(st.sampled_from(kinds)), draw(SIDES), draw(SIDES)
    if kind == "block":
        height, width = draw(SIDES), draw(SIDES)
        grid = -(-rows // height), -(-columns // width)
        return {"strategy": kind, "block_structure": [height, width]}, (rows, columns), grid
    return {"strategy": kind}, (rows, columns), (1,) if kind == "tensor" else (rows, 1)


@PROPERTY
@given(scales_of("tensor", "channel", "block"), st.sampled_from(list(SCALES)), st.integers(0, 99))
def test_fp8_is_read_as_compressed_tensors_reads_it(stated: Any, dtype: str, seed: int) -> None:
    arguments, shape, scale_shape = stated
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, type="float", **arguments))
    codes, scales = random_bytes(*shape, seed=seed), random_scales(*scale_shape, seed=seed).to(SCALES[dtype])
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    ours = read({f"a.{name}": part for name, part in parts.items()}, written_by(scheme, "float-quantized"))
    assert equal(ours.to(scales.dtype), read_by_owner(parts, scheme, "float-quantized"))


METHODS: list[tuple[str, str, dict[str, Any]]] = [
    ("FineGrainedFP8Config", "fp8", {}),
    ("FbgemmFp8Config", "fbgemm_fp8", {}),
    ("BitsAndBytesConfig", "bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    ("GPTQConfig", "gptq", {"bits": 4, "tokenizer": "a", "dataset": ["b"], "desc_act": True}),
    ("AwqConfig", "awq", {"modules_to_not_convert": ["lm_head"]}),
    ("Mxfp4Config", "mxfp4", {"modules_to_not_convert": ["lm_head"]}),
]
UNKNOWN = {"rotated_by": "hadamard"}


@pytest.mark.parametrize(("name", "method", "arguments"), METHODS)
def test_all_that_transformers_writes_is_known_and_nothing_else(name: str, method: str, arguments: Any) -> None:
    written = getattr(transformers, name)(**arguments).to_dict()
    config = json.loads(json.dumps(written, default=str)) | {"quant_method": method}
    assert find_stored(Tensors(), config) == {}
    assert find_stored(Tensors(), config | {"nothing": None, "empty": {}}) == {}
    with pytest.raises(ValueError, match=r"rotated_by 'hadamard' in its quantization_config.*remove rotated_by from"):
        find_stored(Tensors(), config | UNKNOWN)


REAL: dict[str, dict[str, Any]] = {
    "DeepSeek-V3.1": {
        **{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"},
        "weight_block_size": [128, 128],
    },
    "gptqmodel": {
        **{"bits": 4, "dynamic": {"-:.*gate": {}}, "group_size": 128},
        **{"desc_act": False, "lm_head": False, "method": "gptq", "quant_method": "gptq", "format": "gptq"},
        **{"checkpoint_format": "gptq", "pack_dtype": "int32", "rotation": None, "meta": {"gptaq": None}, "sym": True},
    },
    "autoawq": {
        **{"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        "modules_to_not_convert": ["visual"],
    },
    "Llama-3.1-8B-FP8-dynamic": {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"},
        **{"ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": 1.4},
        "config_groups": {
            "group_0": {
                **{"input_activations": {"dynamic": True}, "output_activations": None, "targets": ["Linear"]},
                "weights": {
                    **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8},
                    **{"observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True},
                    "type": "float",
                },
            }
        },
    },
}


def test_configurations_of_published_checkpoints_are_known() -> None:
    assert [find_stored(Tensors(), config) for config in REAL.values()] == [{}] * len(REAL)


ROWS = REAL["Llama-3.1-8B-FP8-dynamic"]


def with_weights(**changes: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors with other ``weights``."""
    group = ROWS["config_groups"]["group_0"]
    return ROWS | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "a transform": (ROWS | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
    "sparse": (ROWS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config {"),
    "integers": (ROWS | {"format": "pack-quantized"}, "float-quantized and dense can be read; dequantize it"),
    "integers in a group": (with_weights(type="int"), "config_groups.group_0.weights.type 'int'"),
    "nvfp4": (ROWS | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
    "an order": (with_weights(actorder="group"), "config_groups.group_0.weights.actorder 'group'"),
    "groups": (with_weights(strategy="group", group_size=32), "config_groups.group_0.weights.group_size 32"),
    "weights'": (with_weights(**UNKNOWN), "config_groups.group_0.weights.rotated_by"),
    "a preset": (ROWS | {"config_groups": {"FP8": ["Linear"]}}, "has FP8 ['Linear'], and a mapping belongs"),
    "a group that is none": (ROWS | {"config_groups": {"group_0": 4}}, "group_0 4, and a mapping belongs"),
    "no configuration": ({}, "a.qweight is of GPTQ or AWQ, but no config.json"),
    "awq, another version": ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
    "awq, 8 bits": ({"quant_method": "awq", "bits": 8}, "bits 8"),
    "gptq, rotated": (REAL["gptqmodel"] | {"rotation": "hadamard"}, "rotation 'hadamard'"),
    "gptq, two versions": (REAL["gptqmodel"] | {"format": "gptq_v2"}, "checkpoint_format"),
    "gptq, one layer": (REAL["gptqmodel"] | {"dynamic": {"a": {"bits": 8}}}, "patterns that exclude layers"),
    "awq, another packing": (REAL["autoawq"] | {"backend": "llm-awq"}, "backend 'llm-awq'"),
    "fp8, experts": (REAL["DeepSeek-V3.1"] | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
    "LLM.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit True, and False can be read"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type 'af4'"),
}


def refused(parts: dict[str, Tensor], config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        find_stored(Tensors({f"a.{name}": part for name, part in parts.items()}), config)


@pytest.mark.parametrize("case", CHANGED)
def test_settings_that_change_what_weights_mean_are_refused(case: str) -> None:
    config, said = CHANGED[case]
    refused(as_fp8(256, 1) if config.get("quant_method") == "compressed-tensors" else ORDERED, config, said)


def as_fp8(*scales: int, shape: tuple[int, ...] = (256, 256)) -> dict[str, Tensor]:
    return {"weight": torch.zeros(shape).to(torch.float8_e4m3fn), "weight_scale": torch.ones(scales)}


FP8 = {"quant_method": "fp8"}
SQUARES = FP8 | {"weight_block_size": [64, 64]}
ORDERED = by_hand.gptq(48, 128)[0]
UNORDERED = {name: part for name, part in ORDERED.items() if name != "g_idx"}
GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 32}
MISFITS: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "fp8, other blocks": (as_fp8(2, 2), SQUARES, "needs a scale for each 64 x 64 of (256, 256)"),
    "fp8, nothing said": (as_fp8(2, 2), FP8, "nothing says which values share"),
    "fp8, two scales": (as_fp8() | {"weight_scale_inv": torch.ones(())}, FP8, "needs one of them"),
    "fp8 of another kind": (as_fp8(), FP8 | {"fmt": "e5m2"}, "needs e5m2, as config.json says in fmt"),
    "fp8, zero points": (
        as_fp8(256, 1) | {"weight_zero_point": torch.ones(256, 1)},
        ROWS,
        "in a way that can't be read",
    ),
    "fp8, one scale": (as_fp8(256, 1), with_weights(strategy="tensor"), "needs a scale for each all x all of"),
    "fp8, a stack": (as_fp8(2, 8, 1, shape=(2, 8, 8)), FP8, "a.weight of shape (2, 8, 8), and matrices alone can be"),
    "integers": ({"weight_packed": torch.zeros(8, 8, dtype=torch.int32)}, ROWS, "in a way that can't be read"),
    "gptq, an order": (UNORDERED, GPTQ4 | {"desc_act": True}, "a.g_idx as missing"),
    "gptq, other groups": (UNORDERED, GPTQ4 | {"group_size": 64}, "groups of 64, the group_size of config.json"),
    "awq, other groups": (by_hand.awq(48, 128)[0], REAL["autoawq"], "groups of 128, the group_size of config.json"),
    "scales of what is not compressed": (
        {"weight": torch.zeros(4, 4), "weight_scale": torch.ones(4, 1)},
        ROWS | {"quantization_status": "frozen"},
        "a.weight_scale, by which a.weight is quantized in a way that can't be read",
    ),
}


@pytest.mark.parametrize(("parts", "config", "said"), MISFITS.values(), ids=MISFITS)
def test_what_the_configuration_says_is_not_replaced(parts: dict[str, Tensor], config: Any, said: str) -> None:
    refused(parts, config, said)


def test_groups_of_weights_that_share_scales_in_different_ways_are_refused() -> None:
    group = ROWS["config_groups"]["group_0"]
    other = group | {"targets": ["Other"], "weights": group["weights"] | {"strategy": "tensor"}}
    two = ROWS | {"config_groups": {"group_0": group, "group_1": other}}
    refused(as_fp8(256, 1), two, "config_groups ['group_0', 'group_1'], and groups whose scales")


@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_scales_that_are_nan_are_not_kept(name: str) -> None:
    config: dict[str, Any] = FP8 | {"scale_fmt": "ue8m0"} if name == "fp8" else {}
    parts = {"mxfp4": by_hand.mxfp4(2, 8, 32), "fp8": (as_fp8(8, 1, shape=(8, 8)), None)}
    tensors = {("e_" if name == "mxfp4" else "a.") + key: part for key, part in parts[name][0].items()}
    scale = next(key for key in tensors if key.endswith(("e_scales", "weight_scale")))
    tensors[scale] = torch.full(tensors[scale].shape, 127, dtype=torch.uint8)  # 1 in e8m0
    tensors[scale][-1] = 255
    assert read(tensors, config).isnan().any()
    [stored] = find_stored(Tensors(tensors), config).values()
    weight = stored_in(stored, {role: tensors[key] for role, key in stored.keys.items()})
    with pytest.raises(ValueError, match="has scales that are NaN or infinite"):
        weight.payload(0, stored.num_groups)
