"""bitsandbytes' formats: 4 bits in blocks (nf4 and fp4, QLoRA's), and 8 bits in rows (LLM.int8).

Names and values are those of ``bitsandbytes.functional``: ``QuantState.as_dict``, ``dequantize_4bit`` and
``int8_vectorwise_dequant``. Scales that are quantized themselves (``bnb_4bit_use_double_quant``) are kept as the fp32
values that they stand for.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.nf4 import MIN_BLOCK, NF4
from fsdp_zpp_kernels.nf4 import LEVELS
from fsdp_zpp_kernels.payload import MAX_BLOCK

from .format import REMEDY, Parts, StoredFormat, StoredTensors, refuse_misfit
from .records import Field, RecordLayout
from .settings import Known, setting

SETTINGS: Known = {
    **dict.fromkeys(("quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")),
    # How layers compute, or how weights are quantized when they are loaded; files say how they are stored.
    **dict.fromkeys(("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload")),
    **dict.fromkeys(("llm_int8_has_fp16_weight", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")),
    **dict.fromkeys(("bnb_4bit_use_double_quant", "modules_to_not_convert", "dequantize")),
    "bnb_4bit_quant_type": ("nf4", "fp4"),
}
_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
TABLES = {"nf4": LEVELS, "fp4": (*_FP4, *(-level for level in _FP4))}
"""The value of each code, as a fraction of the block's scale."""

_STATE = ".quant_state.bitsandbytes__"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
_READ_KEYS = {"shape", "blocksize", "dtype", "nested_blocksize", "nested_offset"}
_RECIPROCAL = 7.874015718698502e-3
"""1 / 127, as bitsandbytes rounds it."""


@dataclass(frozen=True, eq=False)
class FourBit(StoredFormat):
    """A weight in 4 bits.

    Attributes:
        kind: ``nf4`` or ``fp4``.
        block: Values that share a scale.
        nested_block: Scales that share a scale of theirs; 0 if they are fp32.
        offset: What is added to each scale then.
    """

    name: ClassVar[str] = "bitsandbytes"

    kind: str
    block: int
    nested_block: int = 0
    offset: float = 0.0

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        states = [key for key in tensors if _STATE in key]
        found: dict[str, StoredFormat] = {key.split(_STATE)[0]: cls._of(tensors, key) for key in states}
        stated = setting(config, "bnb_4bit_quant_type", str) if config.get("load_in_4bit") else None
        for key in states:
            if stated is not None and not key.endswith(stated.lower()):
                refuse_misfit(key, "the state of codes", f"codes of {stated}, the bnb_4bit_quant_type of config.json")
        for key in tensors:
            if key.endswith(".weight.absmax") and (weight := key.removesuffix(".absmax")) not in found:
                refuse_misfit(weight, f"codes with {key}", f"{weight}{_STATE}nf4 or ...fp4, which is missing")
        return found

    @classmethod
    def _of(cls, tensors: StoredTensors, state_key: str) -> FourBit:
        weight, _, kind = state_key.partition(_STATE)
        try:
            state = json.loads(bytes(tensors.read(state_key).tolist()))
            shape, block, dtype = torch.Size(state["shape"]), int(state["blocksize"]), _DTYPES[state["dtype"]]
            nested = int(state.get("nested_blocksize", 0))
            stored = cls(shape, dtype, {}, state["quant_type"], block, nested, float(state.get("nested_offset", 0.0)))
            table = TABLES[stored.kind]
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
        object.__setattr__(stored, "keys", keys | {"state": state_key})
        stored._check(tensors)
        if not torch.equal(tensors.read(keys["table"]).float(), torch.tensor(table)):
            refuse_misfit(keys["table"], "other values", f"the values of {kind}")
        return stored

    def _check(self, tensors: StoredTensors) -> None:
        """Raise unless the weight's tensors have the sizes and dtypes that its description implies."""
        for role, key in self.keys.items():
            if key not in tensors:
                refuse_misfit(key, "nothing", f"the {role} of {self.kind}, which are missing")
        numel, scales = self.shape.numel(), self.groups
        nested = -(-scales // self.nested_block) if self.nested_block else 0
        expected = {"absmax": (scales, torch.uint8 if nested else torch.float32), "table": (16, torch.float32)}
        if nested:
            expected |= {"nested_absmax": (nested, torch.float32), "nested_table": (256, torch.float32)}
        for role, (count, dtype) in expected.items():
            key = self.keys[role]
            if tensors.shape(key) != (count,) or tensors.dtype(key) != dtype:
                refuse_misfit(key, f"{tensors.dtype(key)} {tensors.shape(key)}", f"{dtype} ({count},)")
        key = self.keys["codes"]
        shape, storage = tensors.shape(key), tensors.dtype(key)
        if not isinstance(storage, torch.dtype) or storage not in _STORAGE:
            refuse_misfit(key, f"{storage} {shape}", f"4-bit codes in one of {', '.join(map(str, _STORAGE))}")
        elements = -(-numel // (2 * storage.itemsize))
        if torch.Size(shape).numel() != elements or len(shape) == 0 or shape[0] not in (elements, 1):
            refuse_misfit(key, f"{storage} {shape}", f"{numel} codes in {elements} elements")

    @property
    def description(self) -> str:
        return f"{self.name} {self.kind} in blocks of {self.block}"

    @property
    def group_numel(self) -> int:
        return self.block

    @cached_property
    def layout(self) -> RecordLayout:
        codes = Field("codes", torch.uint8, (self.block // 2,))
        return RecordLayout((codes, Field("scale", torch.float32, (1,))))

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        end = min(last * self.block, self.shape.numel())
        codes = _bytes_of(parts["codes"], first * self.block // 2, -(-end // 2))
        scales = parts["absmax"][first:last]
        if self.nested_block:
            scales = self._nested(parts, scales, first)
        return self.layout.pack(last - first, codes=codes, scale=scales)

    def _nested(self, parts: Parts, scales: Tensor, first: int) -> Tensor:
        """Return the fp32 values of scales that are quantized, of which the first is number ``first``."""
        size = self.nested_block
        of = torch.arange(first, first + len(scales), device=scales.device) // size - first // size
        absmax = parts["nested_absmax"][first // size : -(-(first + len(scales)) // size)]
        return parts["nested_table"][...][scales.long()] * absmax[of] + self.offset

    def decode(self, records: Tensor) -> Tensor:
        codes = self.layout.get(records, "codes")
        pairs = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1)  # the first value is the high nibble
        return _table_on(self.kind, records.device)[pairs.long()] * self.layout.get(records, "scale")

    @cached_property
    def codec(self) -> Codec:
        # The same codes and scales, for which there is a kernel.
        if self.kind == "nf4" and MIN_BLOCK <= self.block <= MAX_BLOCK and importlib.util.find_spec("bitsandbytes"):
            return NF4(self.block)
        return super().codec

    def payload(self, records: Tensor) -> Tensor:
        if not isinstance(self.codec, NF4):
            return super().payload(records)
        layout, numel = self.codec.layout, len(records) * self.block
        payload = records.new_zeros(1, self.codec.nbytes(numel))
        layout.codes(payload, numel).copy_(self.layout.get(records, "codes").reshape(1, -1))
        layout.scales(payload, numel).copy_(self.layout.get(records, "scale").reshape(1, -1))
        return payload[0]


@dataclass(frozen=True, eq=False)
class Int8Rows(StoredFormat):
    """A weight of LLM.int8: 8 bits, with a scale for each row."""

    name: ClassVar[str] = "bitsandbytes"

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        found: dict[str, StoredFormat] = {}
        for key in tensors:
            if not key.endswith(".weight") or tensors.dtype(key) != torch.int8:
                continue
            scales, order = (key.removesuffix("weight") + name for name in ("SCB", "weight_format"))
            shape = torch.Size(tensors.shape(key))
            if scales not in tensors:
                refuse_misfit(key, f"torch.int8 {tuple(shape)}", f"its scales {scales}, which are missing")
            if len(shape) != 2 or tensors.shape(scales) != shape[:1] or tensors.dtype(scales) != torch.float32:
                found_as = f"{tensors.dtype(scales)} {tensors.shape(scales)}"
                refuse_misfit(scales, found_as, f"one torch.float32 scale for each row of {key}, {tuple(shape)}")
            keys = {"codes": key, "scales": scales}
            if order in tensors:
                if tensors.read(order).item() != 0:
                    refuse_misfit(order, tensors.read(order).item(), "0: only codes in rows can be read")
                keys["order"] = order
            found[key] = cls(shape, torch.bfloat16, keys)
        return found

    @property
    def description(self) -> str:
        return f"{self.name} int8 in rows of {self.shape[-1]}"

    @property
    def group_numel(self) -> int:
        return self.shape[-1]

    @cached_property
    def layout(self) -> RecordLayout:
        codes = Field("codes", torch.uint8, (self.shape[-1],))
        return RecordLayout((codes, Field("scale", torch.float32, (1,))))

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        codes: Tensor = parts["codes"][first:last]
        return self.layout.pack(
            last - first, codes=codes.contiguous().view(torch.uint8), scale=parts["scales"][first:last]
        )

    def decode(self, records: Tensor) -> Tensor:
        codes = self.layout.get(records, "codes").view(torch.int8).float()
        return codes.mul_(self.layout.get(records, "scale")).mul_(_RECIPROCAL)


@functools.cache  # there are two tables, and few devices
def _table_on(kind: str, device: torch.device) -> Tensor:
    """Return a table of :data:`TABLES` on a device; the CPU waits only for the first copy to a GPU."""
    with torch.inference_mode(False):
        return torch.tensor(TABLES[kind], device=device)


def _bytes_of(part: Any, first: int, last: int) -> Tensor:
    """Return bytes ``first`` to ``last - 1`` of a tensor whose elements may have several, uint8."""
    is_tensor = isinstance(part, Tensor)
    shape = tuple(part.shape if is_tensor else part.get_shape())
    flat = shape[0] != 1 or len(shape) == 1
    size = part.element_size() if is_tensor else part[:0].element_size()
    start, end = first // size, -(-last // size)
    some: Tensor = part[start:end] if flat else part[:, start:end]
    return some.contiguous().view(-1).view(torch.uint8)[first - start * size : last - start * size]
