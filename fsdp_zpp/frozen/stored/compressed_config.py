"""The configuration of compressed-tensors: how a checkpoint, and each of its weights, is quantized.

Names, defaults and the order of targets are those of compressed-tensors' ``QuantizationConfig``, ``QuantizationArgs``
and ``match_targets``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .format import REMEDY, StoredFormat
from .settings import Known, block_size, matches, refuse_setting, refuse_unknown, setting

Format = TypeVar("Format", bound=StoredFormat)

_NAME = "compressed-tensors"
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "dense",
    "mixed-precision",  # each group of layers has a format of its own
)
_READ = ", ".join(_FORMATS[:-2])
SETTINGS: Known = {
    **dict.fromkeys(("quant_method", "version", "kv_cache_scheme", "global_compression_ratio", "ignore")),
    **dict.fromkeys(("run_compressed", "dequantize", "use_optimized_inference")),
    **dict.fromkeys(("config_groups", "format", "sparsity_config")),  # read below
    # Files may have codes under any of these; plain weights are refused if they have scales.
    "quantization_status": ("initialized", "calibration", "frozen", "compressed", "decompressed"),
    "transform_config": (),
    "moe_sparsity_config": (),
}
_SPARSITY: Known = {
    **dict.fromkeys(("format", "targets", "ignore", "global_sparsity", "sparsity_structure")),
    "registry_requires_subclass": (False,),
}
_GROUP: Known = dict.fromkeys(("targets", "weights", "input_activations", "output_activations", "format"))
_WEIGHTS: Known = {
    **dict.fromkeys(("num_bits", "strategy", "group_size", "block_structure", "symmetric", "observer")),
    **dict.fromkeys(("observer_kwargs", "scale_dtype")),  # files have scales of any dtype that can be read
    "type": ("int", "float"),
    "dynamic": (False,),
    # In the order of activations, files have the group of each input; in that of weights, groups are neighbours.
    "actorder": (False, True, "group", "dynamic", "weight", "static"),
    "zp_dtype": ("torch.int8", "int8", "torch.float8_e4m3fn", "float8_e4m3fn"),
}


@dataclass(frozen=True)
class Scheme:
    """How some weights are quantized.

    Attributes:
        kind: ``int`` or ``float``.
        bits: Bits of a code.
        symmetric: Whether zero points are 0.
        strategy: The part that has a scale of its own: ``tensor``, ``channel``, ``group``, ``tensor_group`` or
            ``block``.
        group_size: Neighbouring inputs that share a scale, of ``group`` and ``tensor_group``.
        block: Rows and columns that share one, of ``block``.
        ordered: Whether the inputs of a group are those that files say, not neighbours.
    """

    kind: str = "int"
    bits: int = 8
    symmetric: bool = True
    strategy: str = "tensor"
    group_size: int | None = None
    block: tuple[int, int] | None = None
    ordered: bool = False

    @classmethod
    def of(cls, weights: Mapping[str, Any]) -> Scheme:
        """Return the scheme that ``weights`` of a group states.

        Raises:
            ValueError: If it states something impossible or unknown.
        """
        refuse_unknown(_NAME, weights, _WEIGHTS, "config_groups.*.weights.")
        size, strategy = setting(weights, "group_size", int), setting(weights, "strategy", str)
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        text = weights.get("block_structure")
        block = [int(part) if part.isdigit() else part for part in text.split("x")] if isinstance(text, str) else text
        bits, symmetric = setting(weights, "num_bits", int), setting(weights, "symmetric", bool)
        scheme = cls(
            (setting(weights, "type", str) or cls.kind).lower(),
            cls.bits if bits is None else bits,
            cls.symmetric if symmetric is None else symmetric,
            strategy.lower(),
            size,
            block_size({"block_structure": block}, "block_structure"),
            str(weights.get("actorder")).lower() in ("true", "group", "dynamic"),
        )
        lacks_size = scheme.strategy in ("group", "tensor_group") and (size is None or size < 1)
        if lacks_size or (scheme.strategy == "block") != (scheme.block is not None):
            raise ValueError(
                f"config.json beside the checkpoint has the strategy {strategy!r} with group_size {size!r} and "
                f"block_structure {text!r}, which contradict each other; {REMEDY}"
            )
        return scheme

    def groups(self, columns: int) -> int:
        """Return how many groups of columns have a scale of their own in each row."""
        return -(-columns // self.group_size) if self.group_size and self.strategy.endswith("group") else 1


_INT, _INT4, _FP8 = Scheme(strategy="channel"), Scheme(bits=4, strategy="group", group_size=128), Scheme("float")
_PRESETS = {
    "W8A8": _INT,
    "INT8": _INT,
    "W4A16": _INT4,
    "W4A8": _INT4,
    "W4AFP8": _INT4,
    "W4A16_ASYM": Scheme(bits=4, symmetric=False, strategy="group", group_size=128),
    "FP8": _FP8,
    "FP8_DYNAMIC": Scheme("float", strategy="channel"),
    "FP8_BLOCK": Scheme("float", strategy="block", block=(128, 128)),
    "NVFP4": Scheme("float", 4, strategy="tensor_group", group_size=16),
    "NVFP4A16": Scheme("float", 4, strategy="tensor_group", group_size=16),
}
"""Schemes by name. Others are refused: some are not read, and ``W8A16`` has not always been the same."""


def refuse_other_formats(config: Mapping[str, Any]) -> None:
    """Raise if some weights are in a format of compressed-tensors, or have a setting, that can't be read.

    Raises:
        ValueError: It names the format or setting.
    """
    if config.get("quant_method") != _NAME:
        return
    sparsity = setting(config, "sparsity_config", dict) or {}
    refuse_unknown(_NAME, sparsity, _SPARSITY, "sparsity_config.")
    groups = setting(config, "config_groups", dict) or {}
    mappings = [groups[name] for name in groups if not isinstance(groups[name], list)]
    for name in groups:
        if not isinstance(groups[name], list):
            refuse_unknown(_NAME, setting(groups, name, dict) or {}, _GROUP, f"config_groups.{name}.")
    for settings in (config, sparsity, *filter(None, mappings)):
        format = setting(settings, "format", str)
        if format is not None and format not in (_FORMATS if settings is not sparsity else ("dense",)):
            refuse_setting(_NAME, "format", format, _READ)
    _schemes(config)


def as_stated(config: Mapping[str, Any], weight: str, kind: str, read: Callable[[Scheme | None], Format]) -> Format:
    """Return the format of a weight that the configuration states.

    Several groups may be the weight's, since the class of its module is unknown here. All groups that its tensors fit
    must come to the same format.

    Args:
        config: ``quantization_config``.
        weight: The weight's name in the checkpoint.
        kind: The kind of its codes, ``int`` or ``float``.
        read: Returns the format by a scheme; None if the configuration has none. Raises if the tensors don't fit it.

    Raises:
        ValueError: If no group is the weight's, or its tensors fit none, or several in different ways.
    """
    schemes = _schemes(config) if config.get("quant_method") == _NAME else []
    if not schemes:
        return read(None)
    those = [scheme for scheme in _candidates(schemes, weight.removesuffix(".weight"), kind) if scheme.kind == kind]
    if not those:
        raise ValueError(
            f"the checkpoint has {weight} as {kind} codes, but no group of config_groups in config.json has such "
            f"weights for it; {REMEDY}"
        )
    found: dict[str, Format] = {}
    errors: list[ValueError] = []
    for scheme in those:
        try:
            format = read(scheme)
            found[format.description] = format
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    if len(found) > 1:
        raise ValueError(
            f"config_groups in config.json leaves open which of its groups is that of {weight}: it could be "
            f"{' or '.join(found)}; name it in the targets of one of them"
        )
    return next(iter(found.values()))


def _schemes(config: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    """Return the targets and the scheme of each group that has weights."""
    groups = setting(config, "config_groups", dict) or {}
    schemes = []
    for name, group in groups.items():
        if isinstance(group, list):
            if name.upper() not in _PRESETS:
                refuse_setting(_NAME, f"config_groups.{name}", group, f"{', '.join(_PRESETS)}, and schemes in full,")
            schemes.append((group, _PRESETS[name.upper()]))
        elif weights := setting(setting(groups, name, dict) or {}, "weights", dict):
            schemes.append((setting(group, "targets", list) or [], Scheme.of(weights)))
    return schemes


def _candidates(schemes: list[tuple[list[str], Scheme]], module: str, kind: str) -> list[Scheme]:
    """Return the schemes that may be a module's: by its name, else by its unknown class, else any.

    Targets name modules as the model does, and the checkpoint may have other names.
    """
    targets = {str(target): scheme for some, scheme in schemes for target in some}
    for target in sorted(targets, key=lambda each: ("re:" in each, each)):
        named = target.startswith("re:") and matches(target.removeprefix("re:"), module)
        if named or target == module:
            return [targets[target]]
    classes = [scheme for target, scheme in targets.items() if target[:1].isupper() and scheme.kind == kind]
    return list(dict.fromkeys(classes or [scheme for _, scheme in schemes]))
