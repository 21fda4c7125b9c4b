"""Stored integers: GPTQ and AWQ."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from .format import (
    Field,
    Known,
    Parts,
    RecordLayout,
    Settings,
    StoredFormat,
    StoredTensors,
    check_header,
    refuse_misfit,
    refuse_setting,
    setting,
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # dtypes of scales

# ---- packed codes
#
# Codes of 4 and 8 bits, as GPTQ and AWQ pack them into int32 words, and the values that codes stand for.


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Unpack 4- or 8-bit codes, lowest bits first: int32 [..., words] to unsigned uint8 [..., words * 32 // bits]."""
    flat = torch.empty(words.shape, dtype=words.dtype, device=words.device).copy_(words).view(-1)
    # The first byte of a word has its lowest bits: safetensors and the machines that torch runs on are little-endian.
    octets = flat.view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def unpack_awq_codes(words: Tensor) -> Tensor:
    """Unpack AWQ's 4-bit codes along the last dimension: int32 [..., words] to uint8 [..., words * 8]."""
    # A word holds the codes 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on (autoawq's packing_utils.py).
    return unpack_codes(words, 4).unflatten(-1, (-1, 2, 4)).mT.flatten(-3)


def scale_codes(codes: Tensor, zeros: Tensor, scales: Tensor, order: GroupOrder | None) -> Tensor:
    """Return ``(codes - zeros) * scales``, rounded once, [records, rows, columns] in the dtype of the scales.

    Args:
        codes: uint8 [records, rows, columns].
        zeros: Zero points, uint8 [records, rows, groups].
        scales: Floats, [records, rows, groups].
        order: The group of each column; None if groups are runs of neighbouring columns, all of one size.
    """
    # A code minus a zero point is an integer from -255 to 255, which fp16 and bf16 hold exactly. So the result equals
    # that of the formats' own libraries, which compute in the dtype of the scales.
    integers, offset = codes.to(torch.int16), zeros.to(torch.int16)
    if order is None:
        grouped = integers.unflatten(-1, (scales.shape[-1], -1))
        return ((grouped - offset.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(-2)
    index = order.on(codes.device).long().expand(codes.shape)
    return (integers - offset.gather(-1, index)) * scales.gather(-1, index)


# ---- group order
#
# The group of each input. With GPTQ's ``desc_act``, inputs that share a scale need not be neighbours.


class GroupOrder:
    """The group of each input, int32 [inputs]."""

    def __init__(self, group_of: Tensor) -> None:
        self._on = {group_of.device: group_of}

    @classmethod
    def of(cls, stored: Tensor, inputs: int, groups: int, key: str) -> GroupOrder | None:
        """Return the order in ``stored``, integers [inputs]; None if groups are equal runs of inputs, in order."""
        if stored.shape != (inputs,) or stored.dtype.is_floating_point:
            refuse_misfit(key, f"{stored.dtype} {tuple(stored.shape)}", f"the group of each of {inputs} inputs")
        low, high = int(stored.min()), int(stored.max())
        if low < 0 or high >= groups:
            refuse_misfit(key, f"groups from {low} to {high}", f"groups from 0 to {groups - 1}")
        neighbours = torch.arange(inputs) // max(1, len(stored) // groups)
        if inputs % groups == 0 and torch.equal(stored.long(), neighbours):
            return None
        return cls(stored.int())

    def on(self, device: torch.device) -> Tensor:
        """Return the order on a device; it is copied there once."""
        if device not in self._on:
            self._on[device] = next(iter(self._on.values())).to(device)
        return self._on[device]

    @cached_property
    def description(self) -> str:
        digest = hashlib.sha256(next(iter(self._on.values())).numpy().tobytes()).hexdigest()[:16]
        return f", in the order {digest}"


# ---- scales
#
# Checks of the groups of inputs that share a scale.


def float_dtype(tensors: StoredTensors, key: str) -> torch.dtype:
    """Return the dtype of a tensor; :func:`check_header` has checked that it is a float dtype of torch."""
    dtype = tensors.header(key).dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def check_neighbours(config: Settings, key: str, inputs: int, groups: int) -> None:
    """Raise ValueError unless ``inputs`` split into ``groups`` equal runs, of ``group_size`` if ``config`` has it."""
    if groups == 0 or inputs % groups:
        refuse_misfit(key, f"{groups} groups", f"a number that divides {inputs} inputs")
    size = setting(config, "group_size", int)
    if size is not None and groups != (-(-inputs // size) if size > 0 else 1):
        refuse_misfit(key, f"{groups} groups of {inputs} inputs", f"groups of {size}, the group_size of config.json")


# ---- transposed
#
# GPTQ and AWQ store a linear layer of ``in`` inputs and ``out`` outputs transposed.

_SEARCH = """
    act_group_aware amp autoround_version batch_size cache_block_outputs damp_auto_increment damp_percent dataset
    enable_alg_ext enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps iters
    low_cpu_mem_usage low_gpu_mem_usage lr max_input_length meta minmax_lr model_seqlen mse nsamples pad_token_id
    scale_dtype seqlen static_groups tokenizer true_sequential
"""
_PLACES = """
    block_name_to_quantize disable_exllama do_fuse exllama_config fuse_max_seq_len ignore lm_head
    model_file_base_name model_name_or_path module_name_preceding_first_block modules_in_block_to_quantize
    modules_to_fuse modules_to_not_convert quant_block_list to_quant_block_names use_cuda_fp16 use_exllama
"""
# Known settings of GPTQ and AWQ, as gptqmodel, auto_gptq, autoawq, optimum, transformers and AutoRound write them.
COMMON_SETTINGS: Known = {
    **dict.fromkeys(_SEARCH.split()),  # how codes were found
    **dict.fromkeys(_PLACES.split()),  # which layers have codes, and what computes with them
    **dict.fromkeys(("quant_method", "bits", "group_size", "dynamic", "sym")),
    "data_type": ("int",),
    "pack_dtype": ("int32", "torch.int32"),
    "rotation": (),
    "adapter": (),
}


def refuse_overrides(config: Settings) -> None:
    """Raise ValueError if gptqmodel's ``dynamic`` has settings for some layers; it may only exclude layers (``-:``)."""
    for pattern in setting(config, "dynamic", dict) or {}:
        if not pattern.startswith("-:"):
            refuse_setting(str(config.get("quant_method")), "dynamic", pattern, "patterns that exclude layers (-:)")


@dataclass(frozen=True, eq=False)
class _Transposed(StoredFormat):
    """A matrix stored with outputs as columns; ``scale_groups`` counts the groups of inputs that share scales."""

    scale_groups: int

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        values = {}
        for field in self.layout.fields:
            width = field.shape[1]  # stored columns in a record
            some: Tensor = parts[field.name][:, first * width : last * width]
            values[field.name] = some.unflatten(1, (last - first, width)).transpose(0, 1)
        return self.layout.pack(last - first, **values)


# ---- gptq
#
# Weights of GPTQ checkpoints, as gptqmodel, auto_gptq and optimum write them. A word holds f = 32 / bits codes:
#
# - ``qweight``, int32 [in / f, out]: a word holds neighbouring inputs of one output;
# - ``qzeros``, int32 [groups, out / f]: a word holds the zero points of neighbouring outputs;
# - ``scales``, float [groups, out];
# - ``g_idx``, int32 [in]: the group of each input, in any order if the weight was quantized with ``desc_act``.
#
# In ``checkpoint_format`` ``gptq``, the first version, files hold zero points minus one; in ``gptq_v2``, zero points.

_ONES = {4: 0x11111111, 8: 0x01010101}

GPTQ_SETTINGS: Known = {
    **COMMON_SETTINGS,
    "backend": None,
    "desc_act": None,
    "method": ("gptq",),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2"),
    "is_marlin_format": (False,),
}


@dataclass(frozen=True, eq=False)
class Gptq(_Transposed):
    """A matrix in GPTQ's format; a record holds as many rows as a word holds codes.

    Attributes:
        minus_one: True if zero points are stored minus one.
        order: The group of each input; None if groups are runs of neighbouring inputs, of one size.
    """

    name: ClassVar[str] = "GPTQ"

    bits: int
    minus_one: bool
    order: GroupOrder | None

    @classmethod
    def at(cls, key: str, tensors: StoredTensors, config: Settings) -> tuple[str, StoredFormat] | None:
        if not key.endswith(".qweight"):
            return None
        if not config:
            raise ValueError(
                f"{key} is of GPTQ or AWQ, but no config.json beside the checkpoint says of which; put the config.json "
                "of the model there"
            )
        versions = (setting(config, name, str) for name in ("checkpoint_format", "format"))
        stated = {version.lower() for version in versions if version} or {"gptq"}
        if len(stated) > 1:
            refuse_setting(cls.name, "checkpoint_format", " and ".join(sorted(stated)), "gptq and gptq_v2")
        refuse_overrides(config)
        layer = key.removesuffix(".qweight")
        return f"{layer}.weight", cls._of(layer, tensors, config, stated == {"gptq"})

    @classmethod
    def _of(cls, layer: str, tensors: StoredTensors, config: Settings, minus_one: bool) -> Gptq:
        keys = {role: f"{layer}.{role}" for role in ("qweight", "qzeros", "scales", "g_idx")}
        if keys["g_idx"] not in tensors:
            del keys["g_idx"]
        words, out = check_header(tensors, keys["qweight"], torch.int32)
        groups, _ = check_header(tensors, keys["scales"], *_FLOATS, shape=(None, out))
        stored_order = tensors.read(keys["g_idx"]) if "g_idx" in keys else None
        stated = setting(config, "bits", int)
        bits = stated if stored_order is None else 32 * words / max(1, len(stored_order))
        if bits not in _ONES:
            refuse_setting(cls.name, f"bits of {layer}", bits, "4 and 8")
        if stated not in (None, bits):
            refuse_misfit(keys["qweight"], f"codes of {bits:g} bits", f"{stated} bits, as config.json says")
        bits = int(bits)
        inputs, per_word = words * 32 // bits, 32 // bits
        if out % per_word or groups == 0:
            refuse_misfit(keys["qweight"], f"{groups} groups for {out} outputs", f"outputs in multiples of {per_word}")
        check_header(tensors, keys["qzeros"], torch.int32, shape=(groups, out // per_word))
        order = None
        if stored_order is not None:
            order = GroupOrder.of(stored_order, inputs, groups, keys["g_idx"])
        elif setting(config, "desc_act", bool):
            refuse_misfit(f"{layer}.g_idx", "missing", "the group of each input, since config.json says desc_act")
        else:
            check_neighbours(config, keys["scales"], inputs, groups)
        dtype = float_dtype(tensors, keys["scales"])
        return cls(torch.Size((out, inputs)), dtype, keys, groups, bits, minus_one, order)

    @cached_property
    def description(self) -> str:
        version = "" if self.minus_one else " v2"
        order = "" if self.order is None else self.order.description
        return (
            f"{self.name}{version} of {self.bits} bits in {self.scale_groups} groups of {self.dtype}, "
            f"{self.shape[-1]} columns{order}"
        )

    @property
    def rows_per_group(self) -> int:
        return 32 // self.bits

    @cached_property
    def layout(self) -> RecordLayout:
        return RecordLayout(
            Field("qweight", torch.int32, (self.shape[-1] // self.rows_per_group, self.rows_per_group)),
            Field("qzeros", torch.int32, (self.scale_groups, 1)),
            Field("scales", self.dtype, (self.scale_groups, self.rows_per_group)),
        )

    def decode(self, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
        if self.minus_one:
            # Add to whole words, so that carries reach the next code: gptqmodel has subtracted from whole
            # words, and a zero point of 0 has borrowed from the next code. An overflow of int32 wraps around.
            qzeros = qzeros + torch.tensor(_ONES[self.bits], dtype=torch.int32, device=qzeros.device)
        codes = unpack_codes(qweight.mT, self.bits)
        zeros = unpack_codes(qzeros, self.bits)[..., : self.rows_per_group].mT
        return scale_codes(codes, zeros, scales.mT, self.order)


# ---- awq
#
# Weights of AWQ checkpoints in the ``gemm`` version, as autoawq and gptqmodel write them, in 4 bits. A word holds eight
# neighbouring outputs, in AWQ's order (``unpack_awq_codes``):
#
# - ``qweight``, int32 [in, out / 8];
# - ``qzeros``, int32 [groups, out / 8];
# - ``scales``, float [groups, out]. Groups are runs of neighbouring inputs, of one size.

AWQ_SETTINGS: Known = {
    **COMMON_SETTINGS,
    "zero_point": None,  # files have zero points whether it is true or false
    "method": ("awq",),
    "bits": (4,),
    "version": ("gemm",),
    "format": ("gemm",),
    "desc_act": (False,),
    # One backend of transformers is missing here, since it packs codes in another format.
    "backend": (
        *("auto", "auto_trainable", "autoawq", "gemm", "gemm_triton", "machete", "marlin"),
        *("exllama_v1", "exllama_v2", "torch_awq", "torch_fused_awq"),
    ),
}


@dataclass(frozen=True, eq=False)
class Awq(_Transposed):
    """A matrix in AWQ's format; a record holds eight rows."""

    name: ClassVar[str] = "AWQ"

    @classmethod
    def at(cls, key: str, tensors: StoredTensors, config: Settings) -> tuple[str, StoredFormat] | None:
        if not key.endswith(".qweight"):
            return None
        layer = key.removesuffix(".qweight")
        refuse_overrides(config)
        keys = {role: f"{layer}.{role}" for role in ("qweight", "qzeros", "scales")}
        inputs, words = check_header(tensors, key, torch.int32)
        groups, _ = check_header(tensors, keys["scales"], *_FLOATS, shape=(None, words * 8))
        check_header(tensors, keys["qzeros"], torch.int32, shape=(groups, words))
        check_neighbours(config, keys["scales"], inputs, groups)
        dtype = float_dtype(tensors, keys["scales"])
        return f"{layer}.weight", cls(torch.Size((words * 8, inputs)), dtype, keys, groups)

    @property
    def description(self) -> str:
        return f"{self.name} in {self.scale_groups} groups of {self.dtype}, {self.shape[-1]} columns"

    @property
    def rows_per_group(self) -> int:
        return 8

    @cached_property
    def layout(self) -> RecordLayout:
        return RecordLayout(
            Field("qweight", torch.int32, (self.shape[-1], 1)),
            Field("qzeros", torch.int32, (self.scale_groups, 1)),
            Field("scales", self.dtype, (self.scale_groups, 8)),
        )

    def decode(self, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
        return scale_codes(unpack_awq_codes(qweight).mT, unpack_awq_codes(qzeros).mT, scales.mT, None)
