"""Reads the weights of a model from the files of a checkpoint."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_zpp.frozen.stored.format import StoredFormat, StoredWeight, TensorHeader, stacked, stored_in
from fsdp_zpp.names import base_fqns, join_fqn, model_name
from fsdp_zpp.runtime.api import DTYPES

from ._torch_modules import frozen_sites
from .stored import find_stored, read_config
from .weight import FrozenWeight

# ---- tensor files
#
# Safetensors files and their indexes. All input is validated; each error names the file and the remedy.

# Dtypes by their names in files.
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}

OTHER_FILES = "read different files from"  # completes the error of comm.agreement.agree
_INDEX = ".safetensors.index.json"
BASE_INDEX = f"frozen_base{_INDEX}"  # the index of a quantized base
_MODEL = ("model.safetensors", f"model{_INDEX}")  # the files that transformers looks for, in its order


class TensorFiles:
    """Tensors in safetensors files, read slice by slice; errors name ``source`` and ``remedy``."""

    def __init__(self, files: dict[str, Path], source: Path, remedy: str) -> None:
        self.source = source
        self._files, self._remedy = files, remedy
        self._open: dict[Path, tuple[safe_open, set[str]]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def file_of(self, key: str) -> Path:
        return self._files[key]

    def header(self, key: str) -> TensorHeader:
        part = self.slice(key)
        dtype = part.get_dtype()
        return TensorHeader(tuple(part.get_shape()), STORED_DTYPES.get(dtype, dtype))

    def slice(self, key: str) -> Any:
        """Return a lazy tensor; indexing it returns views of the mapped file."""
        file, keys = self._opened(self._files[key])
        if key not in keys:
            raise ValueError(f"{self._files[key]} has no {key}, which {self.source} lists in it; {self._remedy}")
        return file.get_slice(key)

    def values(self, key: str, first: int, last: int) -> Tensor:
        """Return the flat values ``first`` to ``last - 1`` of a tensor."""
        part = self.slice(key)
        size = torch.Size(part.get_shape())[1:].numel()
        begin = first // size
        rows: Tensor = part[begin : -(-last // size)]  # mapped, so only the values in use are read
        return rows.reshape(-1)[first - begin * size : last - begin * size]

    def read(self, key: str) -> Tensor:
        self.slice(key)  # raises, with the remedy, if the file lacks it
        whole: Tensor = self._opened(self._files[key])[0].get_tensor(key)
        return whole.clone()  # a mapped tensor would change if someone writes to the file

    def _opened(self, path: Path) -> tuple[safe_open, set[str]]:
        if path not in self._open:
            file = open_file(path, self._remedy, f", which {self.source} names" if path != self.source else "")
            self._open[path] = file, set(file.keys())
        return self._open[path]


def open_file(path: Path, remedy: str, named_by: str = "") -> safe_open:
    if not path.is_file():
        raise ValueError(f"there is no file {path}{named_by}; {remedy}")
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); {remedy}") from error


def read_index(path: Path, remedy: str) -> tuple[dict[str, Path], dict[str, object]]:
    """Return the path of each tensor's file, and the content of the index at ``path``."""
    try:
        index = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not an index of safetensors files ({error}); {remedy}") from error
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict):
        raise ValueError(f"{path} is not an index of safetensors files: it has no weight_map; {remedy}")
    for key, file in file_of.items():
        if not isinstance(file, str) or not _is_inside(file):
            # A downloaded index must not make the process read other files of this machine.
            raise ValueError(f"{path} names {file!r} as the file of {key}, which is not in its folder; {remedy}")
    return {key: path.parent / file for key, file in file_of.items()}, index


def _is_inside(file: str) -> bool:
    kinds = (PurePosixPath(file), PureWindowsPath(file))  # an index may come from POSIX or Windows
    return bool(file) and all(not path.anchor and ".." not in path.parts for path in kinds)


def find_checkpoint(path: Path) -> Path:
    """Return ``path`` or, if it is a folder, the safetensors file or index in it that transformers would read."""
    if not path.is_dir():
        if not path.exists():
            raise ValueError(f"there is no {path}; give a safetensors file, an index of several, or their folder")
        return path
    for name in _MODEL:
        if (path / name).exists():
            return path / name
    if (path / BASE_INDEX).exists():
        raise ValueError(f"{path} holds a base that is already quantized; load it with load_frozen_params")
    raise ValueError(
        f"{path} has no {' or '.join(_MODEL)}; give the folder of the base, or the path of a file or index"
    )


# ---- model tensors
#
# Parameters and buffers of a model, tied ones once, with their names in files.


@dataclass(eq=False)  # compared and hashed by identity, since == of tensors compares values
class ModelTensor:
    """A parameter or buffer, and all places where it is registered.

    Attributes:
        sites: The modules that have it, with its name in each.
        paths: Its FQNs in the model.
        names: Its FQNs in the base, which is the model without adapters; empty if only adapters have it.
        persistent: True if it is in state dicts.
    """

    tensor: Tensor
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    persistent: bool = False

    @property
    def name(self) -> str:
        return (self.names or self.paths)[0]

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys([*self.paths, *self.names]))

    @property
    def needs_a_value(self) -> bool:
        """Return whether files must have it: it is in state dicts of the base, and frozen or on the meta device."""
        if not self.names or not self.persistent:
            return False
        return self.tensor.is_meta or not self.tensor.requires_grad

    def fill(self, value: Tensor, device: torch.device) -> None:
        """Set the tensor to ``value`` in all its modules; replace a tensor on the meta device by one on ``device``."""
        if not self.tensor.is_meta:
            with torch.no_grad():  # in place, since optimizers and others hold the tensor
                self.tensor.copy_(value)
            return
        fresh: Tensor = value.to(device, self.tensor.dtype)
        if isinstance(self.tensor, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=self.tensor.requires_grad)
        for module, name in self.sites:
            setattr(module, name, fresh)
        self.tensor = fresh


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return all parameters and buffers of ``model``, tied ones once, in the model's order."""
    tensors: dict[int, ModelTensor] = {}
    for path, base, module in base_fqns(model):
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is None:
                    continue
                entry = tensors.setdefault(id(tensor), ModelTensor(tensor))
                entry.sites.append((module, name))
                entry.paths.append(join_fqn(path, name))
                if base is not None:
                    entry.names.append(join_fqn(base, name))
                # A tied tensor is in state dicts if any of its names is.
                entry.persistent |= registry is module._parameters or name not in module._non_persistent_buffers_set
    return list(tensors.values())


def frozen_names(model: nn.Module) -> dict[FrozenWeight, list[str]]:
    """Return the quantized weights of ``model`` with their names in the base; a tied weight has several."""
    bases = {path: base for path, base, _ in base_fqns(model)}
    names: dict[FrozenWeight, list[str]] = {}
    for path, _, name, weight in frozen_sites(model):
        if (base := bases[path]) is not None:
            names.setdefault(weight, []).append(join_fqn(base, name))
    return names


# ---- completeness
#
# Checks that files have every tensor that a model needs, in exactly its shape, before the model changes.
#
# A tensor that a checkpoint lacks would stay as the constructor left it, random or on the meta device, and training
# would run without a warning. So a missing tensor is an error, and all headers are checked before any tensor is read.


def match_keys(model: nn.Module, keys: Collection[str], where: str, remedy: str) -> list[tuple[ModelTensor, list[str]]]:
    """Return the tensors of ``model`` that files have, each with its names among ``keys``, the names in the files.

    Raises:
        ValueError: If the model needs a tensor that the files lack, or is sharded.
    """
    refuse_sharded_tensors(model, where)
    stored = frozenset(keys)
    matches = [(tensor, [key for key in tensor.keys if key in stored]) for tensor in model_tensors(model)]
    missing = [tensor for tensor, names in matches if tensor.needs_a_value and not names]
    if missing:
        examples = ", ".join(list(keys)[:4])
        more = f" ({len(missing)} tensors of this {model_name(model)} are missing)" if len(missing) > 1 else ""
        raise ValueError(
            f"{where} has no {missing[0].name}; it has {examples}, ...{more}; {remedy}; or, if the model ties it to "
            "another one, call model.tie_weights() after init_empty_weights, which unties them"
        )
    refuse_unfilled(model, [tensor for tensor, names in matches if not names])
    return [(tensor, names) for tensor, names in matches if names]


def refuse_unfilled(model: nn.Module, tensors: Iterable[ModelTensor]) -> None:
    """Raise ValueError if a non-persistent buffer of the base is on the meta device, since no file has its value."""
    for tensor in tensors:
        if tensor.names and not tensor.persistent and tensor.tensor.is_meta:
            raise ValueError(
                f"{tensor.name} is on the meta device and in no checkpoint: it is a buffer that {model_name(model)} "
                "computes itself; construct the model with accelerate's init_empty_weights, which gives buffers their "
                "values, and call model.tie_weights() after it, or give the buffer its value first"
            )


def refuse_sharded_tensors(model: nn.Module, where: str) -> None:
    """Raise ValueError, with the part's name, if FSDP has sharded a part of ``model``."""
    for path, module in model.named_modules():
        sharded = isinstance(module, (FullyShardedDataParallel, FSDPModule))
        if sharded or any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            name = path or f"this {model_name(model)}"
            raise ValueError(f"{name} is already sharded; load {where} before you wrap the model")


def check_header(tensor: ModelTensor, key: str, header: TensorHeader, where: object) -> None:
    """Raise ValueError unless a stored tensor has exactly the model's shape, and a dtype that casts to the model's."""
    shape, dtype, stored = tuple(tensor.tensor.shape), tensor.tensor.dtype, header.dtype
    if header.shape != shape:
        raise ValueError(
            f"{key} is {shape} in the model and {header.shape} in {where}; give files of the same architecture"
        )
    # Refuse a cast between float and integer, and a cast from fp8: fp8 values mean nothing without their scales.
    both_float = dtype.is_floating_point and stored in DTYPES
    both_integers = not dtype.is_floating_point and isinstance(stored, torch.dtype) and not stored.is_floating_point
    if stored != dtype and not both_float and not both_integers:
        raise ValueError(f"{key} is {dtype} in the model and {stored} in {where}; give files in {dtype}")


# ---- checkpoint tensors
#
# Tensors of a checkpoint, by their names in models. If a weight is stored quantized, its header and values are those of
# the decoded weight.
#
# Experts of MoE layers are single matrices in checkpoints and stacks in models of transformers. A model has
# ``mlp.experts.gate_up_proj``, of shape ``[experts, gate and up, width]``. Files have
# ``mlp.experts.0.gate_proj.weight`` and so on, the names in models before transformers 5, under which transformers
# still saves them. Reading a stack concatenates its matrices.

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")
# For each stack, the stored matrices that form one expert's matrix, top to bottom: usual names, then Mixtral's.
_PARTS = {
    "gate_up_proj": (("gate_proj.weight", "up_proj.weight"), ("w1.weight", "w3.weight")),
    "down_proj": (("down_proj.weight",), ("w2.weight",)),
}
_MIXTRAL = (".block_sparse_moe.", ".mlp.")  # the name of Mixtral's MoE layer in files and in models


class PlainTensor:
    """A tensor that is stored as it is."""

    description = "as it is"

    def __init__(self, files: TensorFiles, key: str) -> None:
        self._files, self._key = files, key
        self.parts = [key]  # names of the stored tensors that form this one

    @property
    def file(self) -> Path:
        return self._files.file_of(self._key)

    def header(self) -> TensorHeader:
        return self._files.header(self._key)

    def values(self, first: int, last: int) -> Tensor:
        return self._files.values(self._key, first, last)

    def read(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a copy of the tensor in its stored dtype; a quantized one is decoded and rounded once to ``dtype``."""
        return self._files.read(self._key)

    def stored(self) -> StoredWeight | None:
        """Return a quantized weight with its stored codes; None if the weight is not quantized.

        Raises:
            NoStackError: If the matrices of a stack can't be stacked without being decoded.
        """
        return None


class QuantizedTensor(PlainTensor):
    def __init__(self, files: TensorFiles, key: str, format: StoredFormat) -> None:
        super().__init__(files, key)
        self._format, self.description = format, format.description

    @property
    def file(self) -> Path:
        return self._files.file_of(next(iter(self._format.keys.values())))

    def header(self) -> TensorHeader:
        return TensorHeader(tuple(self._format.shape), self._format.dtype)

    def values(self, first: int, last: int) -> Tensor:
        return self.stored().values(first, last)

    def read(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.stored().values(0, self._format.shape.numel(), dtype).view(self._format.shape)

    def stored(self) -> StoredWeight:
        return stored_in(self._format, {role: self._files.slice(name) for role, name in self._format.keys.items()})


class ExpertStack(PlainTensor):
    """A stack of matrices; ``matrices[i]`` lists the tensors that form matrix ``i``, top to bottom."""

    def __init__(self, files: TensorFiles, key: str, matrices: list[list[PlainTensor]]) -> None:
        super().__init__(files, key)
        self._matrices, self.description = matrices, matrices[0][0].description
        self.parts = [part for matrix in matrices for tensor in matrix for part in tensor.parts]

    @property
    def file(self) -> Path:
        return self._matrices[0][0].file

    def header(self) -> TensorHeader:
        matrices = [[part.header() for part in matrix] for matrix in self._matrices]
        first = matrices[0][0]
        if any(matrix != matrices[0] for matrix in matrices) or any(
            len(part.shape) != 2 or part.shape[1:] != first.shape[1:] or part.dtype != first.dtype
            for part in matrices[0]
        ):
            raise ValueError(
                f"the experts of {self._key} differ in shape or dtype in {self._files.source}; give a complete "
                "checkpoint"
            )
        return TensorHeader((len(matrices), sum(part.shape[0] for part in matrices[0]), *first.shape[1:]), first.dtype)

    def values(self, first: int, last: int) -> Tensor:
        # All matrices have parts of the same shapes as the first; otherwise, header() has raised.
        sizes = [torch.Size(part.header().shape).numel() for part in self._matrices[0]]
        pieces = []
        for matrix in range(first // sum(sizes), -(-last // sum(sizes))):
            start = matrix * sum(sizes)
            for part, size in zip(self._matrices[matrix], sizes, strict=True):
                if first < start + size and start < last:
                    pieces.append(part.values(max(first - start, 0), min(last - start, size)))
                start += size
        return torch.cat(pieces)

    def read(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.stack([torch.cat([part.read(dtype) for part in matrix]) for matrix in self._matrices])

    def stored(self) -> StoredWeight | None:
        matrices = [[part.stored() for part in matrix] for matrix in self._matrices]
        known = [[part for part in matrix if part is not None] for matrix in matrices]
        if not any(known):
            return None
        if known != matrices:
            raise ValueError(
                f"some matrices of {self._key} are quantized, and others are not; give a complete checkpoint"
            )
        return stacked(known, self._key)


def checkpoint_tensors(files: TensorFiles) -> dict[str, PlainTensor]:
    """Return all tensors of a checkpoint, and the stacks that these form, each by its name in models."""
    config = read_config(files.source)
    try:
        quantized = find_stored(files, config)
    except ValueError as error:
        raise ValueError(f"{files.source}: {error}") from error
    of_quantized = {key for stored in quantized.values() for key in stored.keys.values()}
    tensors = {key: PlainTensor(files, key) for key in files if key not in of_quantized}
    tensors |= {key: QuantizedTensor(files, key, stored) for key, stored in quantized.items()}
    stacks = {
        key: ExpertStack(files, key, [[tensors[name] for name in names] for names in matrices])
        for key, matrices in _stacks_in(tensors).items()
    }
    renamed = {key.replace(*_MIXTRAL): tensor for key, tensor in tensors.items() if _MIXTRAL[0] in key}
    # A stored tensor takes precedence over a renamed tensor or a stack of the same name.
    return tensors | {key: tensor for key, tensor in (renamed | stacks).items() if key not in tensors}


def _stacks_in(keys: Iterable[str]) -> dict[str, list[list[str]]]:
    """Return for each stack, expert by expert, the names of the stored matrices that form the expert's matrix."""
    experts: dict[str, dict[int, set[str]]] = {}
    for key in keys:
        if match := _EXPERT.fullmatch(key):
            prefix, index, name = match.groups()
            experts.setdefault(prefix, {}).setdefault(int(index), set()).add(name)
    stacks = {}
    for prefix, by_index in experts.items():
        if sorted(by_index) != list(range(len(by_index))):
            continue  # an expert is missing: match_keys then reports the stack as missing
        for stack, ways in _PARTS.items():
            for names in ways:
                if all(set(names) <= those for those in by_index.values()):
                    matrices = [[f"{prefix}.{i}.{name}" for name in names] for i in range(len(by_index))]
                    stacks[f"{prefix}.{stack}".replace(*_MIXTRAL)] = matrices
    return stacks


# ---- source
#
# Finds the tensors of a model in a checkpoint, in full precision or quantized.

logger = logging.getLogger("fsdp_zpp")

_REMEDY = "give a complete checkpoint of this model in safetensors, downloaded or converted again"


def find_tensors(
    path: str | os.PathLike[str], model: nn.Module, warns: bool
) -> tuple[dict[ModelTensor, PlainTensor], str]:
    """Find the tensors of ``model`` in a checkpoint, and check that they fit; ``model`` does not change.

    Args:
        path: A safetensors file, an index of several, or a folder with either.
        model: The model.
        warns: True to warn of tensors that ``model`` has no place for; set it on one rank only.

    Returns:
        The stored tensor for each tensor found, and a summary for ranks to compare, since all must read the same.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"checkpoint must be the path of a safetensors file, an index of several, or their folder, got {path!r}"
        )
    source = find_checkpoint(Path(path))
    if source.name.endswith(".index.json"):
        files, _ = read_index(source, _REMEDY)
    else:
        files = dict.fromkeys(open_file(source, _REMEDY).keys(), source)
    tensors = checkpoint_tensors(TensorFiles(files, source, _REMEDY))
    found: dict[ModelTensor, PlainTensor] = {}
    headers = []
    for tensor, keys in match_keys(model, tensors, f"the checkpoint {source}", _REMEDY):
        for key in keys:
            header = tensors[key].header()
            check_header(tensor, key, header, f"the checkpoint's {tensors[key].file}")
            headers.append((key, header, tensors[key].description))
        found[tensor] = tensors[keys[0]]
        for other in keys[1:]:
            if not torch.equal(found[tensor].read(), tensors[other].read()):
                raise ValueError(
                    f"this {model_name(model)} ties {keys[0]} and {other}, but they differ in the checkpoint {source}; "
                    "construct the model with tie_word_embeddings=False"
                )
    if warns:
        _warn_of_others(model, tensors, source)
    return found, repr(headers)


def _warn_of_others(model: nn.Module, tensors: dict[str, PlainTensor], source: Path) -> None:
    # Unused tensors are no error, since the checkpoint may be of a larger model.
    known = {key for tensor in model_tensors(model) for key in tensor.keys}
    known |= {name for names in frozen_names(model).values() for name in names}
    used = {part for key in known & tensors.keys() for part in tensors[key].parts}
    # A stored matrix is used if its stack is. Report stored names only, not stacks and renamed keys.
    if others := [key for key, tensor in tensors.items() if tensor.parts == [key] and key not in used]:
        logger.warning(
            "%s: the checkpoint %s has %d tensors that the model has no place for: %s",
            model_name(model),
            source,
            len(others),
            ", ".join(others[:4]),
        )
