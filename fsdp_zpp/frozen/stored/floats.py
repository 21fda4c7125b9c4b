"""Formats of stored floats: fp8, mxfp4, and bitsandbytes' 4-bit codes."""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_zpp.codecs import NF4, Codec
from fsdp_zpp_kernels.reference import LEVELS, MAX_BLOCK

from .format import (
    REMEDY,
    Field,
    Known,
    Parts,
    RecordLayout,
    Settings,
    StoredFormat,
    StoredTensors,
    block_size,
    check_header,
    refuse_misfit,
    refuse_setting,
    refuse_unknown,
    setting,
    shape_of,
)

# ---- codes of 4 bits
#
# Codes of 4 bits, two in a byte, and the values that they stand for.

# Values of the lower three bits of a code; the fourth bit is the sign (OCP Microscaling Formats, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
# bitsandbytes' value of each code, as a fraction of the block's scale.
TABLES = {"nf4": LEVELS, "fp4": (*_FP4, *(-level for level in _FP4))}


def unpack_4_bits(octets: Tensor, kind: str) -> Tensor:
    """Unpack codes to fp32: [..., bytes] to [..., bytes * 2]; ``kind`` is ``mxfp4`` or a key of ``TABLES``."""
    # Look up both codes of a byte at once, in half the time of two look-ups.
    return torch.nn.functional.embedding(octets.int(), _pairs(kind, octets.device)).flatten(-2)


@functools.cache  # for three kinds and a few devices
def _pairs(kind: str, device: torch.device) -> Tensor:
    """Return the two values of each byte, [256, 2]; thanks to the cache, they are copied to a device once."""
    with torch.inference_mode(False):
        octets = torch.arange(256)
        if kind == "mxfp4":  # the lower bits of a byte are the first code
            values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))
            return torch.stack((values[octets & 15], values[octets >> 4]), dim=1).to(device)
        values = torch.tensor(TABLES[kind])
        return torch.stack((values[octets >> 4], values[octets & 15]), dim=1).to(device)


# ---- fp8
#
# Matrices in fp8, with a scale for each block (DeepSeek's ``weight_scale_inv``), for each row, or for the whole matrix.
#
# ``value = code * scale`` in fp32, rounded once. Tensor names and decoded values are those of transformers'
# ``integrations.finegrained_fp8``. Scales in e8m0, powers of two in a byte, are kept as fp32.
#
# The configuration states how many rows and columns share a scale (:func:`_stated_block`):
#
# ==========================================================================  ======================
# ``weight_block_size`` of ``fp8``, strategy ``block`` of compressed-tensors  these rows and columns
# strategy ``channel``, ``fbgemm_fp8``                                        a row
# strategy ``tensor``                                                         a matrix
# ==========================================================================  ======================
#
# The shapes must fit the configuration. If it states nothing, there must be one scale for the whole matrix, or one
# for each row.

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)  # scales that are powers of two; uint8 holds the bits of e8m0
_SCALES = (torch.float32, torch.bfloat16, torch.float16, *_E8M0)
_SUFFIXES = ("_scale_inv", "_scale")
_UNBLOCKED = 128  # rows in a group if the whole matrix has one scale
_CODE_NAMES = {
    **dict.fromkeys(("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"), CODES[0]),
    **dict.fromkeys(("e5m2", "float8_e5m2"), CODES[1]),
}

_LAYERS: Known = dict.fromkeys(("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore"))
_ACTIVATIONS: Known = dict.fromkeys(("activation_scheme", "activation_scale_ub", "kv_cache_scheme"))
# The known settings of fp8, as DeepSeek, transformers and AutoFP8 write them.
FP8_SETTINGS: Known = {
    **_LAYERS,
    **_ACTIVATIONS,
    "quant_method": None,
    "dequantize": None,
    "weight_block_size": None,
    "fmt": tuple(_CODE_NAMES),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
}
FBGEMM_SETTINGS: Known = {**_LAYERS, **_ACTIVATIONS, "quant_method": None, "dequantize": None}

COMPRESSED = "compressed-tensors"
COMPRESSED_SETTINGS: Known = {
    **dict.fromkeys(("quant_method", "version", "kv_cache_scheme", "global_compression_ratio", "ignore")),
    **dict.fromkeys(("run_compressed", "dequantize", "use_optimized_inference")),
    "config_groups": None,  # read below
    "format": ("float-quantized", "dense"),
    # In any of these states, files may hold codes. _refuse_unread refuses scales of plain weights.
    "quantization_status": ("initialized", "calibration", "frozen", "compressed"),
    "transform_config": (),
    "sparsity_config": (),
    "moe_sparsity_config": (),
}
_GROUP: Known = {
    **dict.fromkeys(("targets", "weights", "input_activations", "output_activations")),
    "format": ("float-quantized",),
}
_WEIGHTS: Known = {
    **dict.fromkeys(("block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")),
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True,),
    "dynamic": (False,),
    "actorder": (False,),
    "strategy": ("tensor", "channel", "block"),
    "group_size": (-1,),
}

Block = tuple[int | None, int | None]  # rows and columns that share a scale; None for all of a matrix


@dataclass(frozen=True, eq=False)
class Fp8(StoredFormat):
    """A matrix in fp8; ``block`` is the number of rows, and of columns, that share a scale."""

    name: ClassVar[str] = "fp8"

    code_dtype: torch.dtype
    block: tuple[int, int]

    @classmethod
    def at(cls, key: str, tensors: StoredTensors, config: Settings) -> tuple[str, StoredFormat] | None:
        shape, dtype = tensors.header(key)
        if dtype not in CODES or key.endswith(_SUFFIXES) or len(shape) < 2:
            return None
        if len(shape) > 2:
            refuse_setting(cls.name, f"{key} of shape", shape, "matrices alone")
        assert isinstance(dtype, torch.dtype)
        scale = _scale_of(key, dtype, tensors)
        _check_dtypes(key, dtype, scale, tensors, config)
        block = _block_of(shape, tensors.header(scale).shape, _stated_block(config), scale)
        return key, cls(torch.Size(shape), torch.bfloat16, {"codes": key, "scales": scale}, dtype, block)

    @property
    def description(self) -> str:
        kind = str(self.code_dtype).removeprefix("torch.float8_")
        return f"{self.name} {kind} in blocks of {self.block[0]}x{self.block[1]}, {self.shape[-1]} columns"

    @property
    def rows_per_group(self) -> int:
        return self.block[0]

    @cached_property
    def layout(self) -> RecordLayout:
        columns = self.shape[-1]
        scales = Field("scales", torch.float32, (1, -(-columns // self.block[1])))
        return RecordLayout(Field("codes", torch.uint8, (self.rows_per_group, columns)), scales)

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        codes = parts["codes"][first * self.rows_per_group : last * self.rows_per_group]
        if shape_of(parts["scales"]).numel() == 1:
            scales = _fp32(parts["scales"][...]).reshape(1).expand(last - first)
        else:
            scales = _fp32(parts["scales"][first:last])
        return self.layout.pack(last - first, codes=codes, scales=scales)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        if scales.shape[2] > 1:
            scales = scales.repeat_interleave(self.block[1], dim=2)[:, :, : codes.shape[2]]
        return codes.view(self.code_dtype).float().mul_(scales)


def _stated_block(config: Settings) -> Block | None:
    """Return how many rows and columns share a scale, as the configuration states; None if it does not state it."""
    if config.get("quant_method") != COMPRESSED:
        return (1, None) if config.get("quant_method") == "fbgemm_fp8" else block_size(config, "weight_block_size")
    groups, stated = setting(config, "config_groups", dict) or {}, set[Block | None]()
    for name in groups:
        group = setting(groups, name, dict) or {}
        refuse_unknown(COMPRESSED, group, _GROUP, f"config_groups.{name}.")
        if weights := setting(group, "weights", dict):
            refuse_unknown(COMPRESSED, weights, _WEIGHTS, f"config_groups.{name}.weights.")
            blocks = {"tensor": (None, None), "channel": (1, None), "block": block_size(weights, "block_structure")}
            stated.add(blocks.get((setting(weights, "strategy", str) or "").lower()))
    if len(stated) > 1:
        refuse_setting(COMPRESSED, "config_groups", sorted(groups), "groups whose scales are of parts of one size")
    return next(iter(stated), None)


def _block_of(shape: tuple[int, ...], scales: tuple[int, ...], stated: Block | None, key: str) -> tuple[int, int]:
    """Return how many rows and columns share a scale, from the shapes of a weight and of its scales at ``key``.

    ``stated`` is the result of :func:`_stated_block`.

    Raises:
        ValueError: If the scales don't fit the weight or the configuration, or nothing determines the block.
    """
    rows, columns = shape
    is_single = torch.Size(scales).numel() == 1
    if stated is None:
        if not is_single and scales not in ((rows,), (rows, 1)):
            raise ValueError(
                f"nothing says which values share one of the scales of {key}, {scales} for a weight of shape "
                f"{shape}; put the config.json of the model beside the checkpoint, or add weight_block_size to "
                "its quantization_config"
            )
        stated = (None, None) if is_single else (1, None)
    height, width = stated[0] or rows, stated[1] or columns
    grid = (-(-rows // height), -(-columns // width))
    if len(scales) > 2 or grid != ((1, 1) if is_single else (*scales, 1)[:2]):
        text = " x ".join("all" if size is None else str(size) for size in stated)
        needed = f"a scale for each {text} of {shape} values, as its configuration states"
        refuse_misfit(key, f"a tensor of shape {scales}", needed)
    return (_UNBLOCKED, columns) if grid == (1, 1) and None in stated else (height, width)


def _scale_of(key: str, dtype: torch.dtype, tensors: StoredTensors) -> str:
    names = [key + suffix for suffix in _SUFFIXES]
    if key.endswith(".weight"):
        names.append(key.removesuffix("weight") + "scale")
    found = [name for name in names if name in tensors]
    if not found:
        refuse_misfit(key, f"{dtype} without a scale", f"{names[0]}, which is missing")
    if len(found) > 1:
        refuse_misfit(key, f"{dtype} with {' and '.join(found)}", "one of them")
    return found[0]


def _check_dtypes(key: str, dtype: torch.dtype, scale: str, tensors: StoredTensors, config: Settings) -> None:
    code_name, scale_name = setting(config, "fmt", str), setting(config, "scale_fmt", str)
    if code_name is not None and _CODE_NAMES.get(code_name.lower()) != dtype:
        refuse_misfit(key, dtype, f"{code_name}, as config.json says in fmt")
    if (scales := tensors.header(scale).dtype) not in _SCALES:
        refuse_misfit(scale, scales, "fp32, bf16, fp16 or e8m0")
    # compressed-tensors has e8m0 scales only in formats that are refused; elsewhere, its uint8 means plain numbers.
    if scales in _E8M0 and (config.get("quant_method") not in (None, "fp8") or scale_name == "float"):
        refuse_misfit(scale, scales, "fp32, bf16 or fp16, by config.json")


def _fp32(scales: Tensor) -> Tensor:
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


# ---- mxfp4
#
# Stacks of matrices in mxfp4, as gpt-oss stores its experts. A stack [experts, in, out] is stored transposed:
#
# - ``*_blocks``, uint8 [experts, out, in / 32, 16]: 32 neighbouring inputs are a block, two codes in a byte;
# - ``*_scales``, uint8 [experts, out, in / 32]: each block's scale in e8m0 (its exponent plus 127, or 255 for NaN).
#
# A group is 32 neighbouring inputs of a matrix, with all outputs: blocks [out, 16] and scales [out].

_MXFP4_BLOCK = 32
MXFP4_SETTINGS: Known = dict.fromkeys(("quant_method", "modules_to_not_convert", "dequantize"))


@dataclass(frozen=True, eq=False)
class Mxfp4(StoredFormat):
    name: ClassVar[str] = "mxfp4"

    @classmethod
    def at(cls, key: str, tensors: StoredTensors, config: Settings) -> tuple[str, StoredFormat] | None:
        if not key.endswith("_blocks"):
            return None
        name = key.removesuffix("_blocks")
        keys = {"blocks": key, "scales": f"{name}_scales"}
        experts, out, count, _ = check_header(tensors, key, torch.uint8, shape=(None, None, None, _MXFP4_BLOCK // 2))
        check_header(tensors, keys["scales"], torch.uint8, torch.float8_e8m0fnu, shape=(experts, out, count))
        return name, cls(torch.Size((experts, count * _MXFP4_BLOCK, out)), torch.bfloat16, keys)

    @property
    def rows_per_group(self) -> int:
        return _MXFP4_BLOCK

    @cached_property
    def layout(self) -> RecordLayout:
        out = self.shape[-1]
        codes = Field("blocks", torch.uint8, (out, _MXFP4_BLOCK // 2))
        return RecordLayout(codes, Field("scales", torch.float8_e8m0fnu, (out,)))

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        per_matrix = self.shape[1] // _MXFP4_BLOCK
        values: dict[str, list[Tensor]] = {"blocks": [], "scales": []}
        while first < last:
            matrix, begin = divmod(first, per_matrix)
            # At the start of a matrix, take all whole matrices before ``last``; otherwise, stay within this matrix.
            whole = max(1, (last - first) // per_matrix) if begin == 0 else 1
            end = min(per_matrix, begin + last - first)
            for name, pieces in values.items():
                some: Tensor = parts[name][matrix : matrix + whole, :, begin:end]
                pieces.append(some.transpose(1, 2).flatten(0, 1))
            first += whole * (end - begin)
        fields = {name: torch.cat(pieces).view(torch.uint8) for name, pieces in values.items()}
        return self.layout.pack(len(fields["scales"]), **fields)

    def decode(self, blocks: Tensor, scales: Tensor) -> Tensor:
        return (unpack_4_bits(blocks, self.name) * scales.float().unsqueeze(-1)).mT


# ---- bitsandbytes
#
# Weights that bitsandbytes stores in blocks of 4-bit codes, nf4 or fp4, as for QLoRA.
#
# Tensor names are those of ``QuantState.as_dict`` in ``bitsandbytes.functional``, values those of ``dequantize_4bit``.
# Quantized scales (``bnb_4bit_use_double_quant``) are decoded, and kept as fp32.

BITSANDBYTES_SETTINGS: Known = {
    **dict.fromkeys(("quant_method", "load_in_4bit", "_load_in_4bit")),
    # Most of these may have any value: they say how layers compute or how loading quantizes, not what files hold.
    **dict.fromkeys(("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload")),
    **dict.fromkeys(("llm_int8_has_fp16_weight", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")),
    **dict.fromkeys(("bnb_4bit_use_double_quant", "modules_to_not_convert", "dequantize")),
    **dict.fromkeys(("load_in_8bit", "_load_in_8bit"), (False,)),
    "bnb_4bit_quant_type": ("nf4", "fp4"),
}

_STATE = ".quant_state.bitsandbytes__"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
_READ_KEYS = {"shape", "blocksize", "dtype", "nested_blocksize", "nested_offset"}


@dataclass(frozen=True, eq=False)
class FourBit(StoredFormat):
    """A weight in 4 bits, ``nf4`` or ``fp4``, in blocks of values that share a scale.

    Attributes:
        nested_block: The number of quantized scales that share a scale; 0 if scales are fp32.
        offset: The number to add to each quantized scale after decoding it.
    """

    name: ClassVar[str] = "bitsandbytes"

    kind: str
    block: int
    nested_block: int = 0
    offset: float = 0.0

    @classmethod
    def at(cls, key: str, tensors: StoredTensors, config: Settings) -> tuple[str, StoredFormat] | None:
        if key.endswith(".weight.absmax"):
            weight = key.removesuffix(".absmax")
            if not any(weight + _STATE + kind in tensors for kind in TABLES):
                refuse_misfit(weight, f"codes with {key}", f"{weight}{_STATE}nf4 or ...fp4, which is missing")
        if _STATE not in key:
            return None
        stated = setting(config, "bnb_4bit_quant_type", str) if config.get("load_in_4bit") else None
        if stated is not None and not key.endswith(stated.lower()):
            refuse_misfit(key, "the state of codes", f"codes of {stated}, the bnb_4bit_quant_type of config.json")
        return key.split(_STATE)[0], cls._of(key, tensors)

    @classmethod
    def _of(cls, state_key: str, tensors: StoredTensors) -> FourBit:
        weight, _, kind = state_key.partition(_STATE)
        try:
            state = json.loads(bytes(tensors.read(state_key).tolist()))
            shape, block, dtype = torch.Size(state["shape"]), int(state["blocksize"]), _DTYPES[state["dtype"]]
            nested, offset = int(state.get("nested_blocksize", 0)), float(state.get("nested_offset", 0.0))
            table = TABLES[state["quant_type"]]
            if block < 2 or block & (block - 1) or nested < 0 or len(shape) < 2:
                raise ValueError(f"blocks of {block} values in a weight of shape {tuple(shape)}")
            expected = {"quant_type": kind, "nested_dtype": "float32"}
            others = {key: state[key] for key in state.keys() - _READ_KEYS if state[key] != expected.get(key)}
            if others:
                raise ValueError(f"{others}, which are not known of {kind}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the checkpoint's {state_key} describes no weight ({error!r}); {REMEDY}") from error
        roles = {"codes": "", "absmax": ".absmax", "table": ".quant_map"}
        if nested:
            roles |= {"nested_absmax": ".nested_absmax", "nested_table": ".nested_quant_map"}
        keys = {role: weight + suffix for role, suffix in roles.items()}
        stored = cls(shape, dtype, keys | {"state": state_key}, kind, block, nested, offset)
        stored._check(tensors)
        if not torch.equal(tensors.read(keys["table"]).float(), torch.tensor(table)):
            refuse_misfit(keys["table"], "other values", f"the values of {kind}")
        return stored

    def _check(self, tensors: StoredTensors) -> None:
        keys = self.keys
        check_header(tensors, keys["table"], torch.float32, shape=(16,))
        if self.nested_block:
            check_header(tensors, keys["absmax"], torch.uint8, shape=(self.num_groups,))
            nested = -(-self.num_groups // self.nested_block)
            check_header(tensors, keys["nested_absmax"], torch.float32, shape=(nested,))
            check_header(tensors, keys["nested_table"], torch.float32, shape=(256,))
        else:
            check_header(tensors, keys["absmax"], torch.float32, shape=(self.num_groups,))
        shape = check_header(tensors, keys["codes"], *_STORAGE, shape=None)
        storage, numel = tensors.header(keys["codes"]).dtype, self.shape.numel()
        assert isinstance(storage, torch.dtype)
        elements = -(-numel // (2 * storage.itemsize))
        if torch.Size(shape).numel() != elements or len(shape) == 0 or shape[0] not in (elements, 1):
            refuse_misfit(keys["codes"], f"{storage} {shape}", f"{numel} codes in {elements} elements")

    @property
    def description(self) -> str:
        return f"{self.name} {self.kind} in blocks of {self.block}"

    @property
    def group_numel(self) -> int:
        return self.block

    @cached_property
    def layout(self) -> RecordLayout:
        return RecordLayout(Field("codes", torch.uint8, (self.block // 2,)), Field("scale", torch.float32, (1,)))

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        end = min(last * self.block, self.shape.numel())
        codes = _bytes_of(parts["codes"], first * self.block // 2, -(-end // 2))
        scales = parts["absmax"][first:last]
        if self.nested_block:
            scales = self._nested(parts, scales, first)
        return self.layout.pack(last - first, codes=codes, scale=scales)

    def _nested(self, parts: Parts, scales: Tensor, first: int) -> Tensor:
        """Return the fp32 values of quantized scales; ``first`` is the index of ``scales[0]`` in the weight."""
        size = self.nested_block
        of = torch.arange(first, first + len(scales), device=scales.device) // size - first // size
        absmax = parts["nested_absmax"][first // size : -(-(first + len(scales)) // size)]
        return parts["nested_table"][...][scales.long()] * absmax[of] + self.offset

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return unpack_4_bits(codes, self.kind) * scale

    @cached_property
    def codec(self) -> Codec:
        # This library's NF4 has the same codes and scales, and a kernel that decodes them.
        if self.kind == "nf4" and NF4.least <= self.block <= MAX_BLOCK and importlib.util.find_spec("bitsandbytes"):
            return NF4(self.block)
        return super().codec

    def payload(self, records: Tensor) -> Tensor:
        if not isinstance(self.codec, NF4):
            return super().payload(records)
        layout, numel = self.codec.layout, len(records) * self.block
        payload = records.new_zeros(1, self.codec.nbytes(numel))
        fields = self.layout.split(records)
        layout.codes(payload, numel).copy_(fields["codes"].reshape(1, -1))
        layout.scales(payload, numel).copy_(fields["scale"].reshape(1, -1))
        return payload[0]


def _bytes_of(part: Any, first: int, last: int) -> Tensor:
    """Return bytes ``first`` to ``last - 1`` of a tensor of any dtype, as uint8."""
    shape = shape_of(part)
    flat = shape[0] != 1 or len(shape) == 1
    size = part[:0].element_size()
    start, end = first // size, -(-last // size)
    some: Tensor = part[start:end] if flat else part[:, start:end]
    return some.contiguous().view(-1).view(torch.uint8)[first - start * size : last - start * size]
