"""Decoders of packed formats give what was packed, as the libraries that own the formats do."""

from __future__ import annotations

from typing import Any

import packed_codes_by_hand as by_hand
import pytest
import torch
from torch import Tensor

from fsdp_zpp.frozen.stored.awq import decode_awq
from fsdp_zpp.frozen.stored.gptq import decode_gptq
from fsdp_zpp.frozen.stored.mxfp4 import decode_mxfp4
from fsdp_zpp.frozen.stored.nvfp4 import decode_nvfp4
from fsdp_zpp.frozen.stored.packed_integers import decode_packed_integers

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


@pytest.mark.parametrize("options", INTEGERS, ids=str)
def test_compressed_tensors_reads_the_same(options: dict[str, Any]) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if options["act"]:
        pytest.skip("this version of the library does not read weight_g_idx")
    parts, values = by_hand.packed_integers(48, 128, **options)
    strategy = {"strategy": "group", "group_size": options["group"]} if options["group"] else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=options["bits"], symmetric=options["sym"], **strategy)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    read = compressor.decompress(parts, QuantizationScheme(targets=["Linear"], weights=weights))
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
