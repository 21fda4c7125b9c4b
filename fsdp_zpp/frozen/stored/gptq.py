"""Decodes weights of GPTQ checkpoints, as gptqmodel, auto_gptq and optimum write them.

A linear layer of ``in`` inputs and ``out`` outputs is stored transposed, with f = 32 / bits codes in a word:

- ``qweight``, int32 [in / f, out]: a word holds neighbouring inputs of one output;
- ``qzeros``, int32 [groups, out / f]: a word holds the zero points of neighbouring outputs;
- ``scales``, float [groups, out];
- ``g_idx``, int32 [in]: the group of each input, in any order if it was quantized with ``desc_act``.

Files of ``checkpoint_format`` ``gptq``, the first version, hold zero points minus one; those of ``gptq_v2`` do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from .format import Parts, StoredFormat, StoredTensors, refuse_misfit
from .group_order import GroupOrder
from .headers import FLOATS, columns_of, float_dtype, matrix, refuse_other_groups
from .packed_codes import scale_codes, unpack_codes
from .records import Field, RecordLayout
from .settings import Known, of_layer, refuse_setting, refuse_unknown, setting

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
COMMON_SETTINGS: Known = {
    **dict.fromkeys(_SEARCH.split()),  # how codes were found
    **dict.fromkeys(_PLACES.split()),  # which layers have some, and what computes with them
    **dict.fromkeys(("quant_method", "bits", "group_size", "dynamic", "sym")),
    "data_type": ("int",),
    "pack_dtype": ("int32", "torch.int32"),
    "rotation": (),
    "adapter": (),
}
"""Known settings of GPTQ and AWQ, as gptqmodel, auto_gptq, autoawq, optimum, transformers, AutoRound write them."""
SETTINGS: Known = {
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
    """Decode some of the outputs of a weight, or of each weight of a stack.

    Args:
        qweight: int32 [..., in / f, rows].
        qzeros: int32 [..., groups, rows / f].
        scales: Floats, [..., groups, rows].
        g_idx: Integers, [..., in]. None: groups are equally many neighbouring inputs.
        bits: 4 or 8.
        minus_one: Whether the zero points are stored minus one.

    Returns:
        The values, [..., rows, in], in the dtype of ``scales``.
    """
    if minus_one:
        # Whole words are added to, with carries, as gptqmodel does: it subtracts whole words when it writes, so that a
        # zero point of 0 borrows from its neighbour. int32 wraps around.
        qzeros = qzeros + torch.tensor(_ONES[bits], dtype=torch.int32, device=qzeros.device)
    codes = unpack_codes(qweight.mT, bits)
    zeros = unpack_codes(qzeros, bits)[..., : scales.shape[-1]].mT
    return scale_codes(codes, zeros, scales.mT, g_idx)


def settings_of(config: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """Return the settings of a layer, for which ``dynamic`` may override some.

    Raises:
        ValueError: If it overrides a setting that can't differ by layer.
    """
    own = of_layer(config, layer)
    changed = {key: value for key, value in own.items() if key not in config or value != config[key]}
    refuse_unknown(str(config.get("quant_method")), changed, _OVERRIDES, "dynamic.*.")
    return own


def _neighbours(own: Mapping[str, Any], key: str, inputs: int, groups: int) -> GroupOrder | None:
    """Return the order of groups of neighbouring inputs, the last of which may have fewer; None if all are of one size.

    Args:
        own: The settings of the layer.
        key: The name of the scales.
        inputs: The number of inputs.
        groups: The number of groups.

    Raises:
        ValueError: If the configuration states other groups, or none while several sizes are possible.
    """
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
        bits: 4 or 8.
        minus_one: Whether zero points are stored minus one.
        scale_dtype: The dtype of the scales.
        scale_groups: Groups of inputs that share a scale.
        order: The group of each input, if groups are not neighbouring inputs.
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
