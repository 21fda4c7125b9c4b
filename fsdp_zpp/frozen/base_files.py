"""Saves and loads files of a quantized base, and checks that a model has the base of a training checkpoint."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp_zpp.codecs import NF4, Int4, Int8
from fsdp_zpp.comm.agreement import agree, from_first_rank
from fsdp_zpp.comm.mesh import compute_device
from fsdp_zpp.frozen.stored.format import StoredCodec, TensorHeader
from fsdp_zpp.names import base_fqns, join_fqn, model_name, original_path
from fsdp_zpp.runtime.api import DTYPES, check_folder, check_module, ranks_of
from fsdp_zpp.runtime.full_tensors import tensors_of

from .checkpoint_reading import (
    BASE_INDEX,
    ModelTensor,
    TensorFiles,
    check_header,
    frozen_names,
    match_keys,
    read_index,
)
from .frozen_base import FrozenReport
from .hugging_face import on_first_rank
from .quantize import (
    Encoded,
    FrozenOptions,
    QuantizableWeight,
    ReadTensors,
    Selection,
    put_in,
    refuse_infinite_values,
    select,
)
from .weight import FrozenWeight, Placement, Storable, place_base

# ---- writes

logger = logging.getLogger("fsdp_zpp")


def write_whole(path: Path, text: str) -> None:
    """Write a file. If this is interrupted, ``path`` has either its previous content or all of ``text``.

    The folder is synced before the rename, so the names of other new files in it are on disk before this one's.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with aside.open("x") as file:
            file.write(text)
        to_disk(aside)
        to_disk(path.parent)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- file format
#
# Defines the format of a quantized base in safetensors files.
#
# Each weight is two tensors: ``<name>.codes``, uint8, the codes of its flat values, and ``<name>.scales``, fp32, one
# for each block. A rank's chunk is whole blocks (see ``Placement``), so at any world size the chunk is a slice of the
# codes and a slice of the scales, and loading quantizes nothing. Frozen parameters that are not quantized are stored as
# they are, and so are persistent buffers. Names are FQNs without adapters and wrappers. The index has the file of each
# tensor, and its metadata has the shape, dtype and codec of each weight.
#
# A folder holds one base, since a base never changes. A save writes files with a random token in their names, then the
# index. So an interrupted save leaves the folder either without an index, ready for the next save, or with a whole
# base. If two jobs save into one folder at once, the index names the files of one job alone.

FORMAT = "fsdp_zpp"
VERSION = 1
CODES, SCALES = "codes", "scales"
REMEDY = "save the base again with save_frozen_params, into a folder of its own"
CODECS: dict[str, type[Storable]] = {"Int8": Int8, "Int4": Int4, "NF4": NF4}


@dataclass(frozen=True)
class SavedWeight:
    shape: tuple[int, ...]
    dtype: str
    codec: str
    block: int

    @classmethod
    def of(cls, weight: FrozenWeight) -> SavedWeight:
        if isinstance(weight.codec, StoredCodec):
            raise ValueError(
                f"{weight.name} is kept {weight.codec}, and its codes are in the checkpoint that it was read from: "
                "instead of saving them again, read that checkpoint again, or name a codec in quantize_frozen_params"
            )
        kind = type(weight.codec).__name__
        # Compare the class, not its name: a user's codec of the same name, or a subclass, may decode differently.
        if CODECS.get(kind) is not type(weight.codec):
            raise ValueError(f"{weight.name} is quantized as {weight.codec}, but only {', '.join(CODECS)} can be saved")
        assert isinstance(weight.codec, Storable)
        return cls(tuple(weight.shape), str(weight.dtype).removeprefix("torch."), kind, weight.codec.block)

    def make_codec(self) -> Storable:
        return CODECS[self.codec](self.block)

    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def headers(self) -> tuple[TensorHeader, TensorHeader]:
        """Return the headers that the weight's codes and scales must have in files."""
        layout = self.make_codec().layout
        blocks = layout.blocks(torch.Size(self.shape).numel())
        codes = TensorHeader((layout.codes_nbytes(blocks * layout.block),), torch.uint8)
        return codes, TensorHeader((blocks,), torch.float32)


def read_base(folder: Path) -> tuple[TensorFiles, dict[str, SavedWeight]]:
    """Return the files of a base and the metadata of its weights; check the tensors' headers against the metadata."""
    path = folder / BASE_INDEX
    if not path.exists():
        raise ValueError(f"{folder} has no {BASE_INDEX}, which save_frozen_params writes")
    file_of, index = read_index(path, REMEDY)
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not the index of a quantized base; {REMEDY}")
    # An index without a version has version 1: the first indexes had none.
    if (version := metadata.get("version", VERSION)) != VERSION:
        raise ValueError(
            f"{path} has the format version {version!r}, but this fsdp_zpp reads version {VERSION}; load the base with "
            f"the fsdp_zpp that saved it, or {REMEDY}"
        )
    entries = metadata.get("weights")
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{path} is not the index of a quantized base; {REMEDY}")
    weights = {name: _saved_weight(name, entry, path) for name, entry in entries.items()}
    files = TensorFiles(file_of, path, REMEDY)
    for name, stored in weights.items():
        for kind, expected in zip((CODES, SCALES), stored.headers(), strict=True):
            key = f"{name}.{kind}"
            if key not in files:
                raise ValueError(f"{path} has no {key}, but lists the weight {name}; {REMEDY}")
            if (header := files.header(key)) != expected:
                raise ValueError(
                    f"{files.file_of(key)} has {key} as {header.dtype} {header.shape}, but {name}, {stored.codec} in "
                    f"blocks of {stored.block} and of shape {stored.shape}, needs {expected.dtype} {expected.shape}; "
                    f"{REMEDY}"
                )
    return files, weights


def _saved_weight(name: str, entry: Any, path: Path) -> SavedWeight:
    try:
        stored = SavedWeight(tuple(entry["shape"]), entry["dtype"], entry["codec"], entry["block"])
        # Compare types: JSON's true would be an int by isinstance.
        sizes_fit = all(type(size) is int and size > 0 for size in stored.shape) and len(stored.shape) > 1
        if not sizes_fit or stored.torch_dtype() not in DTYPES:
            raise ValueError(f"a weight of shape {stored.shape} and dtype {stored.dtype}")
        stored.make_codec()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} describes {name} as {entry!r}, which is not a quantized weight ({error}); {REMEDY}"
        ) from error
    return stored


# ---- base writer
#
# Writes a quantized base to safetensors files of limited size, and an index.


class BaseWriter:
    """Writes tensors of a base, as they come, to files of at most ``limit`` bytes.

    Only ``finish`` reports errors: if another method raised, the other ranks would wait in a collective.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._pending: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        self._error = ""
        self._token = secrets.token_hex(8)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            self._error = str(failure)

    def add(self, tensors: dict[str, Tensor]) -> None:
        nbytes = sum(tensor.nbytes for tensor in (*self._pending.values(), *tensors.values()))
        if self._pending and nbytes > self._limit:
            self._flush()
        self._pending |= tensors

    def finish(self, rest: dict[str, Tensor], stored: dict[str, SavedWeight]) -> str:
        """Write the rest and the index; return the error, or an empty string."""
        for name, tensor in rest.items():
            self.add({name: tensor})
        self._flush()
        if not self._error:
            try:
                entries = {name: asdict(weight) for name, weight in stored.items()}
                metadata = {"format": FORMAT, "version": VERSION, "weights": entries}
                index = json.dumps({"metadata": metadata, "weight_map": self._files}, indent=1)
                write_whole(self._folder / BASE_INDEX, index)
            except OSError as failure:
                self._error = str(failure)
        if self._error:
            with suppress(OSError):
                for path in self._folder.glob(f"frozen_base-{self._token}-*"):
                    path.unlink()
        return self._error

    def _flush(self) -> None:
        if not self._error:
            number = len(set(self._files.values())) + 1
            path = self._folder / f"frozen_base-{self._token}-{number:05}.safetensors"
            try:
                save_file(self._pending, path, {"format": FORMAT})
                to_disk(path)
            except Exception as failure:  # of any kind; see the docstring of the class
                self._error = str(failure)
            self._files |= dict.fromkeys(self._pending, path.name)
        self._pending = {}


# ---- identity
#
# Checks that a model has the quantized base that a training checkpoint was made on.
#
# Training checkpoints lack the quantized base, since it never changes. A model on another base would load a checkpoint
# without an error, and compute something else. So each checkpoint has a few scales of each quantized weight. They are
# compared with a tolerance, since kernels may round divisions differently; scales of another base differ by far more.

_SAMPLED = 8
_SAMPLING = Storable | StoredCodec
_TOLERANCE = 1e-3


class WeightIdentity(TypedDict):
    """The description of a quantized weight in a training checkpoint: its codec, and a few of its scales."""

    codec: str
    scales: list[float]


def describe_base(model: nn.Module) -> dict[str, WeightIdentity]:
    """Return the identity of each quantized weight by its name, the same on all ranks. Collective."""
    # Leave out weights with user-defined codecs: the place of the scales in their payloads is unknown.
    known = {weight: names for weight, names in frozen_names(model).items() if isinstance(weight.codec, _SAMPLING)}
    weights = {names[0]: weight for weight, names in known.items()}
    return {name: {"codec": str(weight.codec), "scales": _scales(weight)} for name, weight in weights.items()}


def check_base(model: nn.Module, saved: Mapping[str, WeightIdentity], where: str) -> None:
    """Raise ValueError if the quantized weights of ``model`` differ from the description ``saved``. Collective.

    ``where`` names the checkpoint in the error.
    """
    own = {name: weight for name, weight in describe_base(model).items() if name in saved}
    recoded = [name for name, weight in own.items() if weight["codec"] != saved[name]["codec"]]
    other = [name for name in own if name not in recoded and not _is_close(own[name], saved[name])]
    if other:
        raise ValueError(
            f"{where} was saved with another base: {len(other)} of the {len(own)} quantized weights of this "
            f"{model_name(model)} differ ({other[0]}, ...), and the checkpoint holds only what is trained; make the "
            "model from the base that it had then, before it is prepared"
        )
    if recoded and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%s was saved with %s of %s, which is quantized as %s now: the model computes something else",
            where,
            saved[recoded[0]]["codec"],
            recoded[0],
            own[recoded[0]]["codec"],
        )


def _is_close(own: WeightIdentity, saved: WeightIdentity) -> bool:
    a, b = (torch.tensor(weight["scales"], dtype=torch.float64) for weight in (own, saved))
    return a.shape == b.shape and torch.allclose(a, b, rtol=_TOLERANCE, atol=0.0, equal_nan=True)


def _scales(weight: FrozenWeight) -> list[float]:
    if weight.sampled is None:
        rows = weight.holder.gathered_payload(weight, weight.device)
        if isinstance(weight.codec, StoredCodec):
            # The place of the scales in a record depends on the format, so take the sum of the record's bytes instead.
            groups = -(-weight.shape.numel() // weight.codec.block)
            scales = weight.codec.records(rows, weight.chunk_numel).flatten(0, 1)[:groups].sum(1)
        else:
            _, scales = weight.codes_and_scales(rows)
        places = torch.linspace(0, len(scales) - 1, min(_SAMPLED, len(scales)), dtype=torch.float64).long()
        weight.sampled = scales.cpu()[places].tolist()
    return weight.sampled


# ---- saving
#
# ``save_frozen_params`` writes a quantized base to safetensors files.


def save_frozen_params(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_file_size: int = 5 * 2**30,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the quantized base of ``model``, codes and scales, to safetensors files in a folder. Collective.

    The model's first rank gathers and writes one weight at a time. It also writes persistent buffers and frozen
    parameters that are not quantized, but no trainable parameters or adapters. ``load_frozen_params`` reads the files
    on any number of ranks, without quantizing again. The model in memory does not change. An interrupted save may leave
    files without an index; you can remove them. If two jobs save into one folder at once, it has the base of one.

    Args:
        model: A model whose frozen weights are quantized, sharded by FSDP or not.
        path: The folder; it must not have a base yet.
        max_file_size: The most bytes in a file; a larger weight has a file of its own.
        process_group: The ranks of the model; the first one writes. Default: those that the base is sharded over.

    Raises:
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If no weight of ``model`` is quantized, a weight has a user-defined codec, the folder has a base, or
            ``max_file_size`` is not a positive int, on any rank; every rank raises.
        RuntimeError: If the first rank can't write; every rank raises.
    """
    group = ranks_of(model, process_group)
    weights, stored = agree(
        group,
        lambda: _check(model, path, max_file_size),
        lambda checked: repr(list(checked[1].items())),
        "called save_frozen_params with other quantized weights than",
    )
    rest = _not_quantized(model, group)
    folder = Path(path)
    writer = BaseWriter(folder, max_file_size) if group is None or dist.get_rank(group) == 0 else None
    for weight, name in weights.items():  # on all ranks, since gathers are collective
        codes, scales = weight.codes_and_scales(weight.holder.gathered_payload(weight, weight.device))
        if writer is not None:
            # Clone: on a CPU, codes and scales are views of a buffer, which later gathers overwrite.
            writer.add({f"{name}.{CODES}": codes.cpu().clone(), f"{name}.{SCALES}": scales.cpu().clone()})
    if error := from_first_rank("" if writer is None else writer.finish(rest, stored), group):
        raise RuntimeError(f"the frozen base could not be saved to {folder}: {error}")


def _check(
    model: nn.Module, path: str | os.PathLike[str], max_file_size: int
) -> tuple[dict[FrozenWeight, str], dict[str, SavedWeight]]:
    check_module(model)
    weights = {weight: names[0] for weight, names in frozen_names(model).items()}
    if not weights:
        raise ValueError(f"nothing of this {type(model).__name__} is quantized; call quantize_frozen_params first")
    stored = {name: SavedWeight.of(weight) for weight, name in weights.items()}
    if isinstance(max_file_size, bool) or not isinstance(max_file_size, int) or max_file_size < 1:
        raise ValueError(f"max_file_size must be a positive number of bytes, got {max_file_size!r}")
    folder = check_folder(path)
    if (folder / BASE_INDEX).exists():
        raise ValueError(
            f"{folder} has a base already, and a base is saved once, since it does not change; give another folder, or "
            "remove that base first"
        )
    return weights, stored


def _not_quantized(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Gather plain frozen parameters and persistent buffers on the first rank, by their names in files. Collective."""
    bases = {original_path(path): base for path, base, _ in base_fqns(model)}
    names, wanted = {}, []
    for tensor in tensors_of(model):
        module, _, own_name = tensor.names[0].rpartition(".")
        base = bases[module]
        if base is not None and (tensor.is_buffer or not tensor.full.requires_grad):
            names[tensor.names[0]] = join_fqn(base, own_name)
            wanted.append(tensor)
    return {names[path]: tensor for path, tensor in on_first_rank(wanted, group).items()}


# ---- loading
#
# ``load_frozen_params`` reads a quantized base from files, at any world size.

_REMEDY = (
    "load it into the architecture that it was saved from; tensors that were trainable when it was saved are not in "
    "its files, so they must be trainable and have values here"
)


def load_frozen_params(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    placement: str = "I",
    gpus_per_node: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
) -> FrozenReport:
    """Put the base that ``save_frozen_params`` wrote into ``model``, without quantizing again. Collective.

    Each rank reads the slices that it keeps. Call it before you wrap the model. The files must have every frozen
    parameter and persistent buffer of ``model``, and ``model`` must have every tensor in the files.

    Args:
        model: A model of the same architecture, its base frozen, with any values or on the meta device, with or without
            adapters. Parameters that were trainable at the save are not in the files, and must be trainable here.
        path: The folder.
        placement: As for ``quantize_frozen_params``. This and the next three arguments may differ from the save's.
        gpus_per_node: As for ``quantize_frozen_params``.
        process_group: As for ``quantize_frozen_params``.
        device: As for ``quantize_frozen_params``.

    Returns:
        A report: the weights that are quantized now, and the parameters that stay as they are.

    Raises:
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If the files are broken or don't fit the model exactly, on any rank, or the model is already
            sharded. Every rank raises, and the model is unchanged.
    """
    group = ranks_of(model, process_group)

    def check() -> tuple[Selection, torch.device | None]:
        check_module(model)
        check_folder(path)
        selection = select(model, 1)  # weights of any size: the files determine which are quantized
        selection.refuse_sharded(f"call load_frozen_params(model, {os.fspath(path)!r}) before you wrap the model")
        return selection, compute_device(group, device)

    selection, kept_on = agree(group, check)
    selection.check_agreement("load_frozen_params", model, group, gpus_per_node, {"placement": placement})
    # Ranks must have agreed before: if their node sizes differed, making process groups would hang.
    where = place_base(model, placement, group, gpus_per_node)
    return put_in(model, selection, group, lambda: _read(model, selection, Path(path), where, kept_on))


def _read(
    model: nn.Module, selection: Selection, folder: Path, where: Placement, device: torch.device | None
) -> ReadTensors:
    files, stored = read_base(folder)
    # The codes and scales of a quantized weight are two tensors, but have one key here, the weight's name.
    keys = [*stored, *(key for key in files if key.removesuffix(f".{CODES}").removesuffix(f".{SCALES}") not in stored)]
    matches = match_keys(model, keys, f"the base in {folder}", _REMEDY)
    _check_both_ways(model, selection, files, stored, keys, matches)
    key_of = {id(tensor.tensor): key for tensor, (key, *_) in matches}
    encoded = []
    for candidate in list(selection.chosen):
        key = key_of.get(id(candidate.parameter), "")
        if key in stored:
            encoded.append(_read_weight(files, key, stored[key], candidate, where, device))
        else:
            selection.leave(candidate, "not quantized in the files")
    others = [(tensor, files.read(key)) for tensor, (key, *_) in matches if key not in stored]
    for tensor, value in others:
        if isinstance(tensor.tensor, nn.Parameter):  # buffers such as masks may have infinite values
            key = key_of[id(tensor.tensor)]
            refuse_infinite_values(value, f"{files.file_of(key)} is broken: {key}", REMEDY)
    options = FrozenOptions(encoded[0][0].codec, where, device)
    return ReadTensors(options, encoded, others, repr([stored, [(key, files.file_of(key).name) for key in files]]))


def _read_weight(
    files: TensorFiles,
    key: str,
    saved: SavedWeight,
    candidate: QuantizableWeight,
    where: Placement,
    device: torch.device | None,
) -> Encoded:
    codec, dtype = saved.make_codec(), saved.torch_dtype()
    weight = FrozenWeight(candidate.name, candidate.parameter.shape, dtype, codec, where)
    codes, scales = f"{key}.{CODES}", f"{key}.{SCALES}"
    row = weight.local_payload_from_slices(files.slice(codes), files.slice(scales))
    _, own_scales = weight.codes_and_scales(row.unsqueeze(0))
    refuse_infinite_values(own_scales, f"{files.file_of(scales)} is broken: {scales}", REMEDY)
    kept_on = candidate.parameter.device if device is None else device
    return weight, row.to("cpu" if kept_on.type == "meta" else kept_on)


def _check_both_ways(
    model: nn.Module,
    selection: Selection,
    files: TensorFiles,
    stored: dict[str, SavedWeight],
    keys: list[str],
    matches: list[tuple[ModelTensor, list[str]]],
) -> None:
    """Raise unless ``model`` has each tensor of the files, in its shape, and freezes those quantized in the files."""
    name, source = model_name(model), files.source
    by_key = {key: tensor for tensor, names in matches for key in names}
    if unknown := [key for key in keys if key not in by_key]:
        quantized = {name for names in frozen_names(model).values() for name in names}
        why = "which is already quantized" if unknown[0] in quantized else "which has no place"
        more = f" ({len(unknown)} tensors in all)" if len(unknown) > 1 else ""
        raise ValueError(
            f"{source} has {unknown[0]}, {why} in this {name}{more}; load the base into the architecture that it was "
            "saved from, before you quantize any of it"
        )
    reasons = {id(parameter): reason for reason, left in selection.left.items() for _, parameter in left}
    chosen = {id(candidate.parameter) for candidate in selection.chosen}
    for tensor, (key, *others) in matches:
        if others:
            raise ValueError(
                f"this {name} ties {key} and {others[0]}, but {source} has them untied; construct the model with "
                "tie_word_embeddings=False"
            )
        if key in stored:
            shape, dtype = stored[key].shape, stored[key].torch_dtype()
            check_header(tensor, key, TensorHeader(shape, dtype), source)
            if id(tensor.tensor) not in chosen:
                reason = "trainable" if tensor.tensor.requires_grad else reasons.get(id(tensor.tensor), "no weight")
                raise ValueError(
                    f"{source} has {key} as a quantized weight, but in this {name} it is not a frozen weight but "
                    f"{reason}; freeze all weights that were frozen when the base was saved"
                )
        else:
            check_header(tensor, key, files.header(key), files.file_of(key))
