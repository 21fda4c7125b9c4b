"""Decodes weights of AWQ checkpoints in the ``gemm`` version, as autoawq and gptqmodel write them.

A linear layer of ``in`` inputs and ``out`` outputs is stored transposed, in 4 bits. Words hold eight neighbouring
outputs, in an order of its own (``packed_codes.py``):

- ``qweight``, int32 [in, out / 8];
- ``qzeros``, int32 [groups, out / 8];
- ``scales``, float [groups, out]. Groups are equally many neighbouring inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from .format import Parts, StoredFormat, StoredTensors, refuse_misfit
from .gptq import COMMON_SETTINGS, settings_of
from .headers import FLOATS, columns_of, float_dtype, matrix, refuse_other_groups
from .packed_codes import scale_codes, unpack_awq_codes
from .records import Field, RecordLayout
from .settings import Known, refuse_setting, setting

SETTINGS: Known = {
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
    """Decode some of the outputs of a weight, or of each weight of a stack.

    Args:
        qweight: int32 [..., in, rows / 8].
        qzeros: int32 [..., groups, rows / 8].
        scales: Floats, [..., groups, rows].

    Returns:
        The values, [..., rows, in], in the dtype of ``scales``.
    """
    return scale_codes(unpack_awq_codes(qweight).mT, unpack_awq_codes(qzeros).mT, scales.mT, None)


@dataclass(frozen=True, eq=False)
class Awq(StoredFormat):
    """A matrix in AWQ's format; a group is eight rows.

    Attributes:
        scale_dtype: The dtype of the scales.
        scale_groups: Groups of inputs that share a scale.
    """

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
