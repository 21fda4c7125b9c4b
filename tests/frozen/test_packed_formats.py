"""Decoders of packed formats give what was packed, as the libraries that own the formats do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import packed_codes_by_hand as by_hand
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fsdp_zpp.frozen.stored.awq import Awq, decode_awq
from fsdp_zpp.frozen.stored.format import stored_in
from fsdp_zpp.frozen.stored.gptq import Gptq, decode_gptq
from fsdp_zpp.frozen.stored.mxfp4 import Mxfp4, decode_mxfp4
from fsdp_zpp.frozen.stored.nvfp4 import Nvfp4, decode_nvfp4
from fsdp_zpp.frozen.stored.packed_integers import PackedIntegers, decode_packed_integers
from fsdp_zpp.frozen.stored.plain_integers import PlainIntegers

GPTQ = [
    {"bits": bits, "sym": sym, "act": act, "v2": v2}
    for bits in (4, 8)
    for sym, act, v2 in ((True, False, False), (False, True, False), (False, False, True))
]
INTEGERS = [
    {"bits": bits, "sym": sym, "group": group, "act": act}
    for bits in (4, 8)
    for sym, group, act in ((True, 32, False), (False, 32, False), (False, None, False), (True, 32, True))
]
PLAIN = [{"sym": True, "one": True}, {"sym": False, "one": False}]
COMPRESSED = {"quant_method": "compressed-tensors"}


def same(one: Tensor, other: Tensor) -> bool:
    """Whether both are equal bit for bit, dtype and all."""
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("options", GPTQ, ids=str)
def test_gptq_decodes(options: dict[str, Any]) -> None:
    parts, values = by_hand.gptq(48, 128, **options)
    arguments = options["bits"], not options["v2"]
    assert same(decode_gptq(*parts.values(), *arguments), values)
    stack = {name: torch.stack([part, part.flip(0) if name == "scales" else part]) for name, part in parts.items()}
    assert same(decode_gptq(*stack.values(), *arguments)[0], values)
    if not options["act"]:
        assert same(decode_gptq(parts["qweight"], parts["qzeros"], parts["scales"], None, *arguments), values)
    per_word = 32 // options["bits"]
    some = slice(2 * per_word, 4 * per_word)
    part = decode_gptq(
        parts["qweight"][:, some], parts["qzeros"][:, 2:4], parts["scales"][:, some], parts["g_idx"], *arguments
    )
    assert same(part, values[some])


@pytest.mark.parametrize("options", GPTQ, ids=str)
def test_gptqmodel_reads_the_same(options: dict[str, Any]) -> None:
    gptqmodel = pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    assert gptqmodel
    parts, values = by_hand.gptq(64, 128, **options)
    settings = {"bits": options["bits"], "sym": options["sym"], "desc_act": options["act"]}
    linear = TorchLinear(**settings, group_size=32, in_features=128, out_features=64)
    for name, part in parts.items():
        getattr(linear, name).copy_(part)
    linear.post_init()
    if not options["v2"]:
        convert_gptq_v1_to_v2_format_module(linear, options["bits"], torch.int32)
    assert same(linear.dequantize_weight().T.contiguous(), values)


def test_awq_decodes() -> None:
    parts, values = by_hand.awq(48, 128)
    assert same(decode_awq(*parts.values()), values)
    some = decode_awq(parts["qweight"][:, 2:4], parts["qzeros"][:, 2:4], parts["scales"][:, 16:32])
    assert same(some, values[16:32])


def test_gptqmodel_reads_the_same_awq() -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    parts, values = by_hand.awq(48, 128)
    assert same(dequantize_gemm(*parts.values(), 4, 32).T.contiguous(), values)


@pytest.mark.parametrize("options", INTEGERS, ids=str)
def test_packed_integers_decode(options: dict[str, Any]) -> None:
    # The last word of a row is not full.
    parts, values = by_hand.packed_integers(48, 4 * 33, **options | {"group": options["group"] and 33})
    zeros, group_of = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    packed, scale, bits = parts["weight_packed"], parts["weight_scale"], options["bits"]
    assert same(decode_packed_integers(packed, scale, zeros, group_of, bits, 132), values)
    per_word = 32 // bits
    some = slice(2 * per_word, 4 * per_word)
    zeros = None if zeros is None else zeros[2:4]
    assert same(decode_packed_integers(packed[some], scale[some], zeros, group_of, bits, 132), values[some])


# Without weight_g_idx, which this version of the library does not read.
@pytest.mark.parametrize("options", [options for options in INTEGERS if not options["act"]], ids=str)
def test_compressed_tensors_reads_the_same(options: dict[str, Any]) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    parts, values = by_hand.packed_integers(48, 128, **options)
    strategy = {"strategy": "group", "group_size": options["group"]} if options["group"] else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=options["bits"], symmetric=options["sym"], **strategy)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    read = compressor.decompress(parts, QuantizationScheme(targets=["Linear"], weights=weights))
    assert same(read["weight"], values)


@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_compressed_tensors_reads_the_same_plain_integers(options: dict[str, Any]) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    parts, values = by_hand.plain_integers(48, 128, **options)
    strategy = "tensor" if options["one"] else "channel"
    weights = QuantizationArgs(num_bits=8, symmetric=options["sym"], strategy=strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    read = BaseCompressor.get_value_from_registry("int-quantized").decompress(parts, scheme)
    assert same(read["weight"], values)


def test_nvfp4_decodes() -> None:
    parts, values = by_hand.nvfp4(48, 128)
    assert same(decode_nvfp4(*parts.values()), values)


def test_compressed_tensors_reads_the_same_nvfp4() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    parts, values = by_hand.nvfp4(48, 128)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    read = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress(parts, scheme)
    assert same(read["weight"], values.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_decodes_as_transformers_does(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts, values = by_hand.mxfp4(3, 48, 64)
    ours = decode_mxfp4(parts["blocks"], parts["scales"], dtype).mT
    assert same(ours.contiguous(), values.to(dtype))
    assert same(ours.contiguous(), convert_moe_packed_tensors(**parts, dtype=dtype))


# ---- formats


class Tensors(dict[str, Tensor]):
    """The tensors of a checkpoint, in memory."""

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self[key].shape)

    def dtype(self, key: str) -> torch.dtype:
        return self[key].dtype

    def read(self, key: str) -> Tensor:
        return self[key]


def _gptq_config(options: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "gptq", "checkpoint_format": "gptq_v2" if options["v2"] else "gptq"}


FORMATS: dict[str, Any] = {
    **{f"gptq {options}": (Gptq, by_hand.gptq(48, 128, **options), "", _gptq_config(options)) for options in GPTQ},
    "awq": (Awq, by_hand.awq(48, 128), "", {"quant_method": "awq", "version": "GEMM"}),
    **{
        f"integers {options}": (PackedIntegers, by_hand.packed_integers(44, 128, **options), "", {})
        for options in INTEGERS
    },
    **{
        f"plain {options}": (PlainIntegers, by_hand.plain_integers(48, 128, **options), "", COMPRESSED)
        for options in PLAIN
    },
    "nvfp4": (Nvfp4, by_hand.nvfp4(48, 128), "", {}),
    "mxfp4": (Mxfp4, by_hand.mxfp4(3, 48, 64), "experts_", {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_format_decode_alone(name: str, tmp_path: Path) -> None:
    kind, (parts, values), prefix, config = FORMATS[name]
    tensors = Tensors({(prefix or "layer.") + key: part for key, part in parts.items()})
    [(found, stored)] = kind.find(tensors, config).items()
    assert found == (prefix.removesuffix("_") or "layer.weight")
    assert stored.shape == values.shape
    assert set(stored.keys.values()) == set(tensors)
    save_file(tensors, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        for read in (tensors.__getitem__, file.get_slice):
            weight = stored_in(stored, {role: read(key) for role, key in stored.keys.items()})
            for first, last in ((0, len(values)), (0, 1), (1, 3), (len(values) - 1, len(values))):
                row = values[0].numel()
                some = weight.values(first * row, last * row)
                assert torch.equal(some.view_as(values[first:last]), values[first:last].float())
            middle = weight.values(values.numel() // 2 - 3, values.numel() // 2 + 5)  # which begin and end within a row
            assert torch.equal(middle, values.flatten()[values.numel() // 2 - 3 :][:8].float())
            everything = weight.records(0, stored.groups)
            for cut in range(1, stored.groups):
                assert torch.equal(torch.cat([weight.records(0, cut), weight.records(cut, stored.groups)]), everything)


@pytest.mark.parametrize("name", FORMATS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    kind, (parts, _), prefix, config = FORMATS[name]
    prefix = prefix or "layer."
    tensors = Tensors({prefix + key: part for key, part in parts.items()})
    for key, part in parts.items():
        changes = {"shorter": part[:-1], "dtype": part.double()}
        if key not in _NEED_NOT_BE_THERE:
            del tensors[prefix + key]
            with pytest.raises(ValueError, match=f"{prefix}.*give a complete checkpoint"):
                kind.find(tensors, config)
        for what, changed in changes.items():
            tensors[prefix + key] = changed
            if what == "dtype" and (key == "weight" or (key == "weight_packed" and kind is PackedIntegers)):
                assert not kind.find(tensors, config)  # another format
                continue
            if key == "weight" and len(parts["weight_scale"]) == 1:
                continue  # what has one scale may have any number of rows
            with pytest.raises(ValueError, match=f"{prefix}.*(give a complete checkpoint|or give another checkpoint)"):
                kind.find(tensors, config)
        tensors[prefix + key] = part


_NEED_NOT_BE_THERE = {
    *("qweight", "weight_packed", "blocks", "weight_global_scale", "weight"),  # by which formats find their weights
    *("g_idx", "weight_g_idx", "weight_zero_point"),  # which not all weights have
}


def test_settings_that_are_not_supported_are_refused() -> None:
    tensors = Tensors({f"layer.{key}": part for key, part in by_hand.gptq(48, 128)[0].items()})
    for kind, config, said in (
        (
            Gptq,
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            r"checkpoint_format 'marlin'.* gptq and gptq_v2",
        ),
        (Awq, {"quant_method": "awq", "version": "gemv"}, r"version 'gemv'.* gemm alone"),
        (Awq, {"quant_method": "awq", "bits": 8}, r"bits 8.* 4 alone"),
        (PackedIntegers, COMPRESSED | {"format": "marlin-24"}, r"format 'marlin-24'.* pack-quantized, int-quantized"),
        (PackedIntegers, COMPRESSED | {"config_groups": ["Linear"]}, r"groups \['Linear'\], and a mapping belongs"),
        (PackedIntegers, COMPRESSED | {"config_groups": {"group_0": 4}}, "group_0 4, and a mapping belongs"),
        (PackedIntegers, COMPRESSED | {"config_groups": {"0": {"format": 4}}}, "format 4, and a string belongs"),
        (PackedIntegers, COMPRESSED | {"sparsity_config": "none"}, "sparsity_config 'none', and a mapping belongs"),
        (Gptq, {}, "layer.qweight is of GPTQ or AWQ, but no config.json"),
    ):
        with pytest.raises(ValueError, match=said):
            kind.find(tensors, config)
    three_bits = Tensors(tensors | {"layer.g_idx": torch.zeros(48 * 128 * 4 // 3 // 48, dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"bits of layer.* 4 and 8"):
        Gptq.find(three_bits, {"quant_method": "gptq", "bits": 3})


def test_weights_in_another_order_have_another_codec() -> None:
    config = {"quant_method": "gptq", "bits": 4}
    orders = [torch.arange(128).flip(0) // 32, torch.arange(128).roll(1) // 32, torch.arange(128) // 32]
    codecs = []
    for order in [*orders, orders[0].clone()]:
        tensors = by_hand.gptq(48, 128)[0] | {"g_idx": order.int()}
        [stored] = Gptq.find(Tensors({f"a.{key}": part for key, part in tensors.items()}), config).values()
        codecs.append(stored.codec)
    assert codecs[3] == codecs[0]
    assert len({str(codec) for codec in codecs}) == 3
