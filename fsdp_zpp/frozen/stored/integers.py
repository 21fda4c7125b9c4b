"""Stored integers: GPTQ, AWQ, and compressed-tensors' packed and plain ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .format import (
    FLOATS,
    Field,
    Known,
    Parts,
    RecordLayout,
    Scheme,
    StoredFormat,
    StoredTensors,
    as_stated,
    columns_of,
    float_dtype,
    matrix,
    of_layer,
    refuse_misfit,
    refuse_other_formats,
    refuse_other_groups,
    refuse_setting,
    refuse_unknown,
    refuse_zero_points,
    rows_of,
    scale_groups,
    setting,
)

# ---- packed codes
#
# Codes of 4 and 8 bits as GPTQ, AWQ and compressed-tensors pack them into int32 words, and what codes are worth.


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Unpack 4- or 8-bit codes, lowest bits first: int32 [..., words] to unsigned uint8 [..., words * 32 // bits]."""
    flat = torch.empty(words.shape, dtype=words.dtype, device=words.device).copy_(words).view(-1)
    # Little-endian, as safetensors and the machines that torch runs on are.
    octets = flat.view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def unpack_awq_codes(words: Tensor) -> Tensor:
    """Unpack AWQ's 4-bit codes along the last dimension: int32 [..., words] to uint8 [..., words * 8]."""
    # From its lowest bits on, a word holds the codes 0, 2, 4, 6, 1, 3, 5, 7 (autoawq's packing_utils.py).
    return unpack_codes(words, 4).unflatten(-1, (-1, 2, 4)).mT.flatten(-3)


def scale_codes(codes: Tensor, zeros: Tensor | int, scales: Tensor, group_of: Tensor | None) -> Tensor:
    """Return ``(codes - zeros) * scales``, rounded once, [..., rows, columns] in the dtype of the scales.

    Args:
        codes: uint8 [..., rows, columns].
        zeros: Unsigned zero points, uint8 [..., rows, groups], or one for all.
        scales: Floats, [..., rows, groups].
        group_of: The group of each column, integers [..., columns]. None: groups are equally many neighbouring columns.
    """
    # fp16 and bf16 hold differences of codes, integers up to 255, exactly. So the libraries that own these formats,
    # which compute in the dtype of the scales, get the same.
    integers = codes.to(torch.int16)
    if group_of is None:
        grouped = integers.unflatten(-1, (scales.shape[-1], -1))
        offset = zeros if isinstance(zeros, int) else zeros.unsqueeze(-1).to(torch.int16)
        return ((grouped - offset) * scales.unsqueeze(-1)).flatten(-2)
    index = group_of.long().unsqueeze(-2).expand(codes.shape)
    offset = zeros if isinstance(zeros, int) else zeros.to(torch.int16).gather(-1, index)
    return (integers - offset) * scales.gather(-1, index)


# ---- group order
#
# The groups of inputs that share a scale, where they are not neighbours: GPTQ's ``desc_act``, others' ``actorder``.


class GroupOrder:
    """The group of each input, int32 [inputs]."""

    def __init__(self, group_of: Tensor) -> None:
        self._on = {group_of.device: group_of}

    @classmethod
    def of(cls, stored: Tensor, inputs: int, groups: int, key: str) -> GroupOrder | None:
        """Return the order in ``stored``, integers [inputs]; None if groups are equally many neighbours, in order.

        -1 anywhere means that the groups are neighbours (compressed-tensors).
        """
        if stored.shape != (inputs,) or stored.dtype.is_floating_point:
            refuse_misfit(key, f"{stored.dtype} {tuple(stored.shape)}", f"the group of each of {inputs} inputs")
        if -1 in stored:
            return None
        low, high = int(stored.min()), int(stored.max())
        if low < 0 or high >= groups:
            refuse_misfit(key, f"groups from {low} to {high}", f"groups from 0 to {groups - 1}")
        neighbours = torch.arange(inputs) // max(1, len(stored) // groups)
        if inputs % groups == 0 and torch.equal(stored.long(), neighbours):
            return None
        return cls(stored.int())

    def on(self, device: torch.device) -> Tensor:
        """Return the groups on a device; they are copied there once."""
        if device not in self._on:
            self._on[device] = next(iter(self._on.values())).to(device)
        return self._on[device]

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(next(iter(self._on.values())).numpy().tobytes()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"in the order {self._digest}"


# ---- gptq
#
# Decodes weights of GPTQ checkpoints, as gptqmodel, auto_gptq and optimum write them.
#
# A linear layer of ``in`` inputs and ``out`` outputs is stored transposed, with f = 32 / bits codes in a word:
#
# - ``qweight``, int32 [in / f, out]: a word holds neighbouring inputs of one output;
# - ``qzeros``, int32 [groups, out / f]: a word holds the zero points of neighbouring outputs;
# - ``scales``, float [groups, out];
# - ``g_idx``, int32 [in]: the group of each input, in any order if it was quantized with ``desc_act``.
#
# Files of ``checkpoint_format`` ``gptq``, the first version, hold zero points minus one; those of ``gptq_v2`` do not.

_ONES = {4: 0x11111111, 8: 0x01010101}

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
# Known settings of GPTQ and AWQ, as gptqmodel, auto_gptq, autoawq, optimum, transformers, AutoRound write them.
COMMON_SETTINGS: Known = {
    **dict.fromkeys(_SEARCH.split()),  # how codes were found
    **dict.fromkeys(_PLACES.split()),  # which layers have some, and what computes with them
    **dict.fromkeys(("quant_method", "bits", "group_size", "dynamic", "sym")),
    "data_type": ("int",),
    "pack_dtype": ("int32", "torch.int32"),
    "rotation": (),
    "adapter": (),
}
GPTQ_SETTINGS: Known = {
    **COMMON_SETTINGS,
    "backend": None,
    "desc_act": None,
    "method": ("gptq",),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2"),
    "is_marlin_format": (False,),
}
_OVERRIDES: Known = {
    **dict.fromkeys(("bits", "group_size", "desc_act", "sym", "mse", "damp_percent", "damp_auto_increment")),
    **dict.fromkeys(("static_groups", "true_sequential", "act_group_aware")),
}


def decode_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, minus_one: bool
) -> Tensor:
    """Decode some of the outputs of a weight, or of each weight of a stack, [..., rows, in] in the dtype of ``scales``.

    Args:
        qweight: int32 [..., in / f, rows].
        qzeros: int32 [..., groups, rows / f].
        scales: Floats, [..., groups, rows].
        g_idx: Integers, [..., in]. None: groups are equally many neighbouring inputs.
        bits: 4 or 8.
        minus_one: Whether the zero points are stored minus one.
    """
    if minus_one:
        # Add to whole words, with carries: gptqmodel subtracts from whole words when it writes, so that a zero point of
        # 0 borrows from its neighbour. int32 wraps around.
        qzeros = qzeros + torch.tensor(_ONES[bits], dtype=torch.int32, device=qzeros.device)
    codes = unpack_codes(qweight.mT, bits)
    zeros = unpack_codes(qzeros, bits)[..., : scales.shape[-1]].mT
    return scale_codes(codes, zeros, scales.mT, g_idx)


def settings_of(config: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """Return the settings of a layer, for which ``dynamic`` may override some."""
    own = of_layer(config, layer)
    changed = {key: value for key, value in own.items() if key not in config or value != config[key]}
    refuse_unknown(str(config.get("quant_method")), changed, _OVERRIDES, "dynamic.*.")
    return own


def _neighbours(own: Mapping[str, Any], key: str, inputs: int, groups: int) -> GroupOrder | None:
    """Return the order of groups of neighbouring inputs; None if all groups have one size."""
    size = setting(own, "group_size", int)
    if size is None:
        sizes = range(-(-inputs // groups), -(-inputs // (groups - 1)) if groups > 1 else inputs + 1)
        if len(sizes) != 1:
            refuse_misfit(key, f"{groups} groups of {inputs} inputs", "their group_size in config.json, or a g_idx")
        size = sizes[0]
    refuse_other_groups(key, inputs, groups, size)
    return GroupOrder.of(torch.arange(inputs) // (size if size > 0 else inputs), inputs, groups, key)


@dataclass(frozen=True, eq=False)
class Gptq(StoredFormat):
    """A matrix in GPTQ's format; a group is as many rows as a word holds codes.

    Attributes:
        minus_one: Whether zero points are stored minus one.
        scale_groups: The number of groups of inputs that share a scale.
        order: The group of each input; None if groups are neighbouring inputs.
    """

    name: ClassVar[str] = "GPTQ"

    bits: int
    minus_one: bool
    scale_dtype: torch.dtype
    scale_groups: int
    order: GroupOrder | None

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        if config.get("quant_method") != "gptq":
            if not config and (unnamed := next((key for key in tensors if key.endswith(".qweight")), None)):
                raise ValueError(
                    f"{unnamed} is of GPTQ or AWQ, but no config.json beside the checkpoint says of which; put the "
                    "config.json of the model there"
                )
            return {}
        versions = [setting(config, key, str) for key in ("checkpoint_format", "format")]
        stated = {version.lower() for version in versions if version}
        version = stated.pop() if stated else "gptq"
        if stated or version not in ("gptq", "gptq_v2"):
            refuse_setting(cls.name, "checkpoint_format", " and ".join((version, *stated)), "gptq and gptq_v2")
        layers = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
        return {f"{layer}.weight": cls._of(layer, tensors, config, version == "gptq") for layer in layers}

    @classmethod
    def _of(cls, layer: str, tensors: StoredTensors, config: Mapping[str, Any], minus_one: bool) -> Gptq:
        keys = {role: f"{layer}.{role}" for role in ("qweight", "qzeros", "scales", "g_idx")}
        if keys["g_idx"] not in tensors:
            del keys["g_idx"]
        words, out = matrix(tensors, keys["qweight"], torch.int32)
        groups, _ = matrix(tensors, keys["scales"], *FLOATS, shape=(None, out))
        stored_order = tensors.read(keys["g_idx"]) if "g_idx" in keys else None
        own = settings_of(config, layer)
        stated = setting(own, "bits", int)
        bits = stated if stored_order is None else 32 * words / max(1, len(stored_order))
        if bits not in _ONES:
            refuse_setting(cls.name, f"bits of {layer}", bits, "4 and 8")
        if stated not in (None, bits):
            refuse_misfit(keys["qweight"], f"codes of {bits:g} bits", f"{stated} bits, as config.json says")
        bits = int(bits)
        inputs, per_word = words * 32 // bits, 32 // bits
        if out % per_word or groups == 0:
            refuse_misfit(keys["qweight"], f"{groups} groups for {out} outputs", f"outputs in multiples of {per_word}")
        matrix(tensors, keys["qzeros"], torch.int32, shape=(groups, out // per_word))
        if stored_order is not None:
            order = GroupOrder.of(stored_order, inputs, groups, keys["g_idx"])
        elif setting(own, "desc_act", bool):
            refuse_misfit(f"{layer}.g_idx", "missing", "the group of each input, since config.json says desc_act")
        else:
            order = _neighbours(own, keys["scales"], inputs, groups)
        dtype = float_dtype(tensors, keys["scales"])
        return cls(torch.Size((out, inputs)), dtype, keys, bits, minus_one, dtype, groups, order)

    @cached_property
    def description(self) -> str:
        version = "" if self.minus_one else " v2"
        order = "" if self.order is None else f", {self.order}"
        return (
            f"{self.name}{version} of {self.bits} bits in {self.scale_groups} groups of {self.scale_dtype}, "
            f"{self.shape[-1]} columns{order}"
        )

    @property
    def _per_word(self) -> int:
        return 32 // self.bits

    @property
    def group_numel(self) -> int:
        return self._per_word * self.shape[-1]

    @cached_property
    def layout(self) -> RecordLayout:
        words, rows, groups = self.shape[-1] // self._per_word, self._per_word, self.scale_groups
        return RecordLayout(
            (
                Field("qweight", torch.int32, (words, rows)),
                Field("qzeros", torch.int32, (groups, 1)),
                Field("scales", self.scale_dtype, (groups, rows)),
            )
        )

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        return self.layout.pack(last - first, **columns_of(parts, self.layout, first, last))

    def decode(self, records: Tensor) -> Tensor:
        qweight, qzeros, scales = (self.layout.get(records, field.name) for field in self.layout.fields)
        order = None if self.order is None else self.order.on(records.device)
        return decode_gptq(qweight, qzeros, scales, order, self.bits, self.minus_one).float().flatten(1)


# ---- awq
#
# Decodes weights of AWQ checkpoints in the ``gemm`` version, as autoawq and gptqmodel write them.
#
# A linear layer of ``in`` inputs and ``out`` outputs is stored transposed, in 4 bits. Words hold eight neighbouring
# outputs, in an order of its own (``unpack_awq_codes``):
#
# - ``qweight``, int32 [in, out / 8];
# - ``qzeros``, int32 [groups, out / 8];
# - ``scales``, float [groups, out]. Groups are equally many neighbouring inputs.

AWQ_SETTINGS: Known = {
    **COMMON_SETTINGS,
    "zero_point": None,  # files have zero points either way
    "method": ("awq",),
    "version": None,
    "format": None,
    "desc_act": (False,),
    # In transformers, one backend, which packs codes otherwise, stands for a format.
    "backend": (
        *("auto", "auto_trainable", "autoawq", "gemm", "gemm_triton", "machete", "marlin"),
        *("exllama_v1", "exllama_v2", "torch_awq", "torch_fused_awq"),
    ),
}


def decode_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """Decode some of the outputs of a weight, or of each weight of a stack, [..., rows, in] in the dtype of ``scales``.

    Args:
        qweight: int32 [..., in, rows / 8].
        qzeros: int32 [..., groups, rows / 8].
        scales: Floats, [..., groups, rows].
    """
    return scale_codes(unpack_awq_codes(qweight).mT, unpack_awq_codes(qzeros).mT, scales.mT, None)


@dataclass(frozen=True, eq=False)
class Awq(StoredFormat):
    """A matrix in AWQ's format; a group is eight rows, ``scale_groups`` groups of inputs share scales."""

    name: ClassVar[str] = "AWQ"

    scale_dtype: torch.dtype
    scale_groups: int

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        if config.get("quant_method") != "awq":
            return {}
        for key in ("version", "format"):
            if (setting(config, key, str) or "gemm").lower() != "gemm":
                refuse_setting(cls.name, key, config[key], "gemm alone")
        if config.get("bits", 4) != 4:
            refuse_setting(cls.name, "bits", config["bits"], "4 alone")
        layers = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
        return {f"{layer}.weight": cls._of(layer, tensors, settings_of(config, layer)) for layer in layers}

    @classmethod
    def _of(cls, layer: str, tensors: StoredTensors, own: Mapping[str, Any]) -> Awq:
        if own.get("bits", 4) != 4:
            refuse_setting(cls.name, f"bits of {layer}", own["bits"], "4 alone")
        keys = {role: f"{layer}.{role}" for role in ("qweight", "qzeros", "scales")}
        inputs, words = matrix(tensors, keys["qweight"], torch.int32)
        groups, _ = matrix(tensors, keys["scales"], *FLOATS, shape=(None, words * 8))
        matrix(tensors, keys["qzeros"], torch.int32, shape=(groups, words))
        if groups == 0 or inputs % groups:
            refuse_misfit(keys["scales"], f"{groups} groups", f"a number that divides {inputs} inputs")
        size = setting(own, "group_size", int)
        if size is not None:
            refuse_other_groups(keys["scales"], inputs, groups, size)
        dtype = float_dtype(tensors, keys["scales"])
        return cls(torch.Size((words * 8, inputs)), dtype, keys, dtype, groups)

    @property
    def description(self) -> str:
        return f"{self.name} in {self.scale_groups} groups of {self.scale_dtype}, {self.shape[-1]} columns"

    @property
    def group_numel(self) -> int:
        return 8 * self.shape[-1]

    @cached_property
    def layout(self) -> RecordLayout:
        return RecordLayout(
            (
                Field("qweight", torch.int32, (self.shape[-1], 1)),
                Field("qzeros", torch.int32, (self.scale_groups, 1)),
                Field("scales", self.scale_dtype, (self.scale_groups, 8)),
            )
        )

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        return self.layout.pack(last - first, **columns_of(parts, self.layout, first, last))

    def decode(self, records: Tensor) -> Tensor:
        return decode_awq(*(self.layout.get(records, field.name) for field in self.layout.fields)).float().flatten(1)


# ---- packed integers
#
# Decodes weights of compressed-tensors' format ``pack-quantized``: int4 and int8, such as Kimi's experts.
#
# With f = 32 / bits codes in a word, codes that are signed but packed plus 2^(bits - 1):
#
# - ``weight_packed``, int32 [out, in / f]: a word holds neighbouring inputs;
# - ``weight_scale``, float [out, groups], [out, 1], or [1] for the whole weight;
# - ``weight_zero_point``, only if the weight is asymmetric: int32 [out / f, groups]: a word holds neighbouring outputs;
# - ``weight_g_idx``, only if groups are in the order of activations: the group of each input, or -1;
# - ``weight_shape``: out and in.


def decode_packed_integers(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_of: Tensor | None, bits: int, columns: int
) -> Tensor:
    """Decode rows of a weight, or of each weight of a stack, [..., rows, columns] in the dtype of ``scale``.

    Args:
        packed: int32 [..., rows, columns / f].
        scale: Floats, [..., rows, groups].
        zero_point: int32 [..., rows / f, groups]; None if all are 0.
        group_of: Integers, [..., columns]. None: groups are equally many neighbouring columns.
        bits: 4 or 8.
        columns: The number of columns, which need not fill the last word.
    """
    codes = unpack_codes(packed, bits)[..., :columns]
    rows = packed.shape[-2]
    # Codes and zero points are packed plus 2^(bits - 1), which cancels in their difference.
    zeros = 2 ** (bits - 1) if zero_point is None else unpack_codes(zero_point.mT, bits)[..., :rows].mT
    return scale_codes(codes, zeros, scale, group_of)


@dataclass(frozen=True, eq=False)
class PackedIntegers(StoredFormat):
    """A matrix in ``pack-quantized``; a group is as many rows as a word holds codes, or one if it is symmetric."""

    name: ClassVar[str] = "compressed-tensors' pack-quantized"

    bits: int
    scale_dtype: torch.dtype
    scale_groups: int
    order: GroupOrder | None

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        refuse_other_formats(config)
        end = ".weight_packed"
        weights = [k.removesuffix("_packed") for k in tensors if k.endswith(end) and tensors.dtype(k) == torch.int32]
        return {weight: as_stated(config, weight, "int", partial(cls._of, weight, tensors)) for weight in weights}

    @classmethod
    def _of(cls, weight: str, tensors: StoredTensors, scheme: Scheme | None) -> PackedIntegers:
        keys = {role: f"{weight}_{role}" for role in ("packed", "scale", "zero_point", "g_idx", "shape")}
        out, words = matrix(tensors, keys["packed"], torch.int32)
        inputs, bits = _inputs_and_bits(keys["shape"], out, words, tensors, scheme)
        groups = scale_groups(keys["scale"], out, inputs, tensors, scheme)
        if keys["zero_point"] in tensors:
            matrix(tensors, keys["zero_point"], torch.int32, shape=(-(-out * bits // 32), groups))
            if scheme is not None and scheme.symmetric:
                refuse_misfit(keys["zero_point"], "zero points", "none, since config.json says that it is symmetric")
        elif scheme is not None and not scheme.symmetric:
            refuse_misfit(keys["zero_point"], "missing", "zero points, since config.json says that it is not symmetric")
        order = None
        if (key := keys["g_idx"]) in tensors:
            order = GroupOrder.of(tensors.read(key), inputs, groups, key)
        elif scheme is not None and scheme.ordered and groups > 1:
            refuse_misfit(key, "missing", "the group of each input, since config.json has another actorder than theirs")
        if order is None and inputs % groups:
            refuse_misfit(keys["scale"], f"{groups} groups", f"a number that divides {inputs} inputs")
        used = {role: key for role, key in keys.items() if key in tensors}
        dtype = float_dtype(tensors, keys["scale"])
        return cls(torch.Size((out, inputs)), dtype, used, bits, dtype, groups, order)

    @cached_property
    def description(self) -> str:
        kind = "asymmetric" if self._asymmetric else "symmetric"
        order = "" if self.order is None else f", {self.order}"
        return (
            f"{self.name} of {self.bits} bits, {kind}, in {self.scale_groups} groups of {self.scale_dtype}, "
            f"{self.shape[-1]} columns{order}"
        )

    @property
    def _asymmetric(self) -> bool:
        return "zero_point" in self.keys

    @property
    def _rows(self) -> int:
        return 32 // self.bits if self._asymmetric else 1  # a word holds the zero points of these rows

    @property
    def group_numel(self) -> int:
        return self._rows * self.shape[-1]

    @cached_property
    def layout(self) -> RecordLayout:
        words = -(-self.shape[-1] * self.bits // 32)
        fields = [
            Field("packed", torch.int32, (self._rows, words)),
            Field("scale", self.scale_dtype, (self._rows, self.scale_groups)),
        ]
        if self._asymmetric:
            fields.append(Field("zero_point", torch.int32, (1, self.scale_groups)))
        return RecordLayout(tuple(fields))

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        rows = first * self._rows, min(last * self._rows, self.shape[0])
        values = {role: rows_of(parts[role], *rows) for role in ("packed", "scale")}
        if self._asymmetric:
            values["zero_point"] = rows_of(parts["zero_point"], first, last)
        return self.layout.pack(last - first, **values)

    def decode(self, records: Tensor) -> Tensor:
        packed, scale = self.layout.get(records, "packed"), self.layout.get(records, "scale")
        zero_point = self.layout.get(records, "zero_point") if self._asymmetric else None
        order = None if self.order is None else self.order.on(records.device)
        values = decode_packed_integers(packed, scale, zero_point, order, self.bits, self.shape[-1])
        return values.float().flatten(1)


def _inputs_and_bits(key: str, out: int, words: int, tensors: StoredTensors, scheme: Scheme | None) -> tuple[int, int]:
    if key not in tensors or tensors.shape(key) != (2,) or tensors.dtype(key) not in (torch.int32, torch.int64):
        refuse_misfit(key, tensors.shape(key) if key in tensors else "missing", "the shape of the weight")
    rows, inputs = tensors.read(key).tolist()
    if rows != out:
        refuse_misfit(key, f"{rows} rows", f"{out} rows, as many as its codes have")
    possible = [bits for bits in range(1, 9) if -(-inputs * bits // 32) == words]
    if scheme is not None:
        possible = [scheme.bits] if scheme.bits in possible or scheme.bits not in (4, 8) else []
    if len(possible) != 1 or possible[0] not in (4, 8):
        found = possible or 32 * words / max(1, inputs)
        refuse_setting(PackedIntegers.name, f"bits of {key}", found, "4 and 8")
    return inputs, possible[0]


# ---- plain integers
#
# Weights of compressed-tensors' formats ``int-quantized`` and ``naive-quantized``: one int8 a value (W8A8).
#
# - ``weight``, int8 [out, in];
# - ``weight_scale``, float [out, groups], [out, 1], or [1] for the whole weight;
# - ``weight_zero_point``, int8 in the shape of the scales, only if the weight is asymmetric.


@dataclass(frozen=True, eq=False)
class PlainIntegers(StoredFormat):
    """A matrix in ``int-quantized``; a group is a row."""

    name: ClassVar[str] = "compressed-tensors' int-quantized"

    scale_dtype: torch.dtype
    scale_groups: int

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        if config.get("quant_method") != "compressed-tensors":
            return {}
        keys = [key for key in tensors if key.endswith(".weight") and tensors.dtype(key) == torch.int8]
        return {key: as_stated(config, key, "int", partial(cls._of, key, tensors)) for key in keys}

    @classmethod
    def _of(cls, weight: str, tensors: StoredTensors, scheme: Scheme | None) -> PlainIntegers:
        keys = {"codes": weight, "scale": f"{weight}_scale", "zero_point": f"{weight}_zero_point"}
        out, inputs = matrix(tensors, weight, torch.int8)
        groups = scale_groups(keys["scale"], out, inputs, tensors, scheme)
        if inputs % groups:
            refuse_misfit(keys["scale"], f"{groups} groups", f"a number that divides {inputs} inputs")
        if keys["zero_point"] not in tensors:
            if scheme is not None and not scheme.symmetric:
                refuse_misfit(keys["zero_point"], "missing", "zero points, since config.json says it is not symmetric")
            del keys["zero_point"]
        elif (tensors.shape(keys["zero_point"]), tensors.dtype(keys["zero_point"])) != (
            tensors.shape(keys["scale"]),
            torch.int8,
        ):
            found = f"{tensors.dtype(keys['zero_point'])} {tensors.shape(keys['zero_point'])}"
            refuse_misfit(keys["zero_point"], found, f"int8 {tensors.shape(keys['scale'])}")
        elif scheme is not None and scheme.symmetric:
            refuse_zero_points(keys["zero_point"], tensors)
        dtype = float_dtype(tensors, keys["scale"])
        return cls(torch.Size((out, inputs)), dtype, keys, dtype, groups)

    @property
    def description(self) -> str:
        kind = "asymmetric" if "zero_point" in self.keys else "symmetric"
        return f"{self.name}, {kind}, in {self.scale_groups} groups of {self.scale_dtype}, {self.shape[-1]} columns"

    @property
    def group_numel(self) -> int:
        return self.shape[-1]

    @cached_property
    def layout(self) -> RecordLayout:
        fields = [
            Field("codes", torch.int8, (1, self.shape[-1])),
            Field("scale", self.scale_dtype, (1, self.scale_groups)),
        ]
        if "zero_point" in self.keys:
            fields.append(Field("zero_point", torch.int8, (1, self.scale_groups)))
        return RecordLayout(tuple(fields))

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        values = {role: rows_of(parts[role], first, last) for role in self.keys}
        return self.layout.pack(last - first, **values)

    def decode(self, records: Tensor) -> Tensor:
        codes, scale = self.layout.get(records, "codes"), self.layout.get(records, "scale")
        zeros = self.layout.get(records, "zero_point") if "zero_point" in self.keys else 0
        return scale_codes(codes, zeros, scale, None).float().flatten(1)
