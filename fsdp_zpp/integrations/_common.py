"""Parts that integrations share: version checks, the key ``fsdp_zpp``, and files saved with checkpoints."""

from __future__ import annotations

import glob
import json
import logging
import secrets
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from fsdp_zpp.comm.agreement import agree, from_first_rank, run_on_first_rank
from fsdp_zpp.frozen.base_files import check_base, describe_base, write_whole
from fsdp_zpp.names import how_to_install
from fsdp_zpp.runtime.checkpoint import CodecState
from fsdp_zpp.runtime.unit import named_units
from fsdp_zpp.strategy.strategy import Strategy

# ---- requirement
#
# Versions of frameworks that integrations need.


def require(distribution: str, least: str, *, purpose: str = "", install: str = "") -> None:
    """Check that a framework is installed, before it is imported.

    Args:
        distribution: The framework's name on PyPI, which is also the name of this package's extra.
        least: The oldest version that works.
        purpose: The feature that needs that version, if the integration itself works with an older one.
        install: How to install a framework for which there is no extra.

    Raises:
        ImportError: If the framework is missing or older than ``least``; the error says how to install it.
    """
    module = {"llamafactory": "llama_factory"}.get(distribution, distribution.replace("-", "_"))
    try:
        present = version(distribution)
    except PackageNotFoundError:
        install = install or how_to_install(distribution)
        raise ImportError(f"fsdp_zpp.integrations.{module} needs {distribution}: {install}") from None
    if TorchVersion(present) < least:
        needs = f"{distribution} {least} or later" + (f" {purpose}" if purpose else "")
        install = install or how_to_install(distribution, upgrade=True)
        raise ImportError(f"fsdp_zpp.integrations.{module} needs {needs}, and {present} is installed: {install}")


# ---- strategy key
#
# The key that holds a strategy in a framework's configuration.

KEY = "fsdp_zpp"

NO_DEEPSPEED = "a strategy is for torch's FSDP: leave it out (Strategy.from_deepspeed reads such a file)"
NO_WHOLE_MATRICES = "it works on whole matrices, and a strategy leaves a shard of each on a rank: leave it out"
PACKED_BASE = (
    "training on a base that the framework has packed has not been tried with a strategy, which quantizes one itself: "
    "leave it out, and "
)
NO_PACKED_BASE = f"{PACKED_BASE}write fsdp_zpp: {{preset: mixzpp, frozen: nf4}}"


def strategy_of(value: object) -> Strategy:
    """Return the strategy that the value of the key ``fsdp_zpp`` describes.

    Raises:
        ValueError: If ``value`` describes no strategy; the error names the key.
    """
    try:
        return Strategy.from_dict(value)  # type: ignore[arg-type]  # from_dict checks it
    except (TypeError, ValueError) as error:  # pydantic reports only a ValueError as an error of the key
        raise ValueError(f"{KEY}: {error}") from None


def quantizes(strategy: Strategy) -> bool:
    return any(each.frozen is not None for each in strategy.all_strategies)


def refuse(key: str, value: object, instead: str) -> None:
    """Raise a ValueError for a key that can't be combined with a strategy; ``instead`` says what to do."""
    raise ValueError(f"{key}: {value!r} can't be combined with fsdp_zpp: {instead}")


def refuse_set(values: Mapping[str, Any], alternatives: Mapping[str, str], section: str = "") -> None:
    """Refuse the first key of ``alternatives`` with a truthy value in ``values``; the error puts ``section`` first."""
    for key, instead in alternatives.items():
        if values.get(key):
            refuse(f"{section}{key}", values[key], instead)


# ---- companions
#
# A companion is a file or folder of ours that belongs to a framework's checkpoint. It lies inside a checkpoint that is
# a folder, and beside one that is a file.


def companion(checkpoint: Path, name: str) -> Path:
    """Return the path of the companion ``name``; the checkpoint must exist."""
    # Companions lie with a link's target: Lightning's ModelCheckpoint(save_last="link") makes links to checkpoints.
    inside, beside = companions(checkpoint.resolve(), name)
    return inside if inside.parent.is_dir() else beside


def companions(checkpoint: Path, name: str) -> tuple[Path, Path]:
    """Return a companion's paths inside and beside a checkpoint; both may exist if a folder has replaced a file."""
    # Links are not resolved: removing a link must not remove the companions of its target.
    return checkpoint / name, checkpoint.with_name(f"{checkpoint.name}.{name}")


def remove_companions(checkpoint: Path) -> None:
    """Remove all companions and marks of a checkpoint. Call it on one rank only."""
    remove_codec_state(checkpoint)
    for file in companions(checkpoint, _BASE_FILE):
        _remove_file(file)
    remove_marks(checkpoint)


def _remove_file(path: Path) -> None:
    if path.is_file():  # for a path inside a file, unlink raises NotADirectoryError
        path.unlink(missing_ok=True)


# ---- marks
#
# Marks tell a whole save from one that was cut off or that two jobs wrote.
#
# Frameworks overwrite a checkpoint file by file. If a save is cut off, or two jobs save into one place, weights,
# optimizer and codec state may come from two saves, and the framework's files don't show it. So each save has a token,
# and a mark: a file with the token in its name, from before the first write until after the last. A save that begins
# removes all other marks. A save that ends writes its token to ``saved_under``, then removes its mark. Codec state and
# base identity hold the token, too.
#
# A checkpoint with a mark is refused, and so is one whose codec state or base identity holds another token than
# ``saved_under``. A job that ends its save and finds its mark gone leaves a new mark, which says that two jobs saved.

_MARK = "save_was_cut_off"
_DONE = "saved_under"
_TOKEN = "[0-9a-f]" * 16
_MIXED = "Two jobs have saved this checkpoint at the same time. Its files may be of both.\n"

logger = logging.getLogger("fsdp_zpp")


class MarkedSave:
    """A context that marks a checkpoint until its save is complete. Collective; make it before any write.

    Args:
        checkpoint: The framework's file or folder, the same on all ranks.
        place: Place of the mark: ``inside`` the checkpoint folder; ``beside`` a checkpoint that may be a file; or
            ``above``, beside the parent folder, for a framework that saves only to new folders and counts siblings.
        written_last: The file in the checkpoint that the framework writes last; an earlier save's is removed first.

    Attributes:
        token: Token of this save; the companions that it writes must hold the token.

    Raises:
        OSError: On every rank, if rank 0 can't write the mark.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        place: Literal["inside", "beside", "above"] = "beside",
        written_last: str | None = None,
    ) -> None:
        # Marks, like companions, lie with a link's target.
        self._target = checkpoint.resolve()
        self.token = from_first_rank(secrets.token_hex(8))
        own = dict(zip(("inside", "beside", "above"), _marks_of(self._target, f"{self.token}."), strict=True))
        self._mark, self._inside = own[place], own["inside"]
        run_on_first_rank(lambda: self._begin(written_last))

    def __enter__(self) -> MarkedSave:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.complete()

    def complete(self) -> None:
        """Remove the mark. Collective; call it when all ranks have written."""
        dist.barrier()
        run_on_first_rank(self.end)

    def end(self) -> None:
        """Remove the mark. Call it on rank 0 only, when all ranks have written."""
        if self._mark != self._inside:
            _remove_file(self._inside)
        write_whole(companion(self._target, _DONE), self.token)
        try:
            self._mark.unlink()
        except FileNotFoundError:
            logger.warning(
                "another job has saved %s at the same time, so that its files may be of both; give each job a folder "
                "of its own",
                self._target,
            )
            if self._mark.parent.is_dir():  # another job may have removed the checkpoint
                write_whole(self._mark, _MIXED)

    def _begin(self, written_last: str | None) -> None:
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        text = "This checkpoint is being saved, or its save was cut off. Its files may then be of two saves.\n"
        write_whole(self._mark, text)
        if self._mark != self._inside and self._target.is_dir():  # users may move the folder without the mark
            write_whole(self._inside, text)
        remove_marks(self._target, except_for=self.token)
        if written_last is not None:
            _remove_file(self._target / written_last)


def remove_marks(checkpoint: Path, *, except_for: str = "") -> None:
    """Remove ``saved_under``, and the marks without the token ``except_for``. Call it on one rank only."""
    target = checkpoint.resolve()
    for file in (*_marks(target), *companions(target, _DONE)):
        if not except_for or except_for not in file.name:
            _remove_file(file)


def check_complete(checkpoint: Path, *, models: int = 1, written_last: str | None = None) -> None:
    """Raise unless a single, completed save wrote ``checkpoint``. Collective; call it before anything is loaded.

    Args:
        checkpoint: The framework's file or folder.
        models: Number of models in the checkpoint; each model after the first has companions in ``model_<index>``.
        written_last: The file in the checkpoint that the framework writes last.

    Raises:
        ValueError: On every rank, if the save has not completed, or two saves are mixed.
    """
    # Rank 0 looks for all ranks, since they may see a change of a shared folder at different times.
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if failure := from_first_rank(_failure(checkpoint, models, written_last) if is_first else ""):
        raise ValueError(failure)


def _failure(checkpoint: Path, models: int, written_last: str | None) -> str:
    try:
        if marks := _marks(checkpoint.resolve()):
            remedy = (
                "so that its weights, optimizer and codec state may be of two saves, or missing: resume from another "
                f"checkpoint. To load it as it is, remove {marks[0]}; codec state that was not saved with its weights "
                "is dropped then, with a warning"
            )
            if any(mark.read_text() == _MIXED for mark in marks):
                return f"two jobs have saved {checkpoint} at the same time, {remedy}"
            return f"the last save of {checkpoint} was cut off, or goes on in another job, {remedy}"
        if written_last is not None and checkpoint.is_dir() and not (checkpoint / written_last).is_file():
            return (
                f"{checkpoint} has no {written_last}, which is written last, so that its save was cut off: remove it, "
                "and resume from another checkpoint"
            )
        done = companion(checkpoint, _DONE)
        token = done.read_text() if done.is_file() else None
        for each in (checkpoint, *(checkpoint / f"model_{index}" for index in range(1, models))):
            if token is not None and (other := _under_another_token(each, token)):
                return (
                    f"{other} is of another save than {done}, so that two jobs have saved {checkpoint}: resume from "
                    f"another checkpoint, or remove {other} to load the rest"
                )
    except OSError as error:
        return f"whether {checkpoint} is complete can't be told: {error}"
    return ""


def _under_another_token(checkpoint: Path, token: str) -> Path | None:
    identity, codecs = companion(checkpoint, _BASE_FILE), companion(checkpoint, _CODECS_FOLDER)
    saved, failure = _read(identity)
    if saved and not failure and saved.get(_DONE) != token:
        return identity
    of_codecs = codecs / _DONE
    if codecs.is_dir() and not (of_codecs.is_file() and of_codecs.read_text() == token):
        return codecs
    return None


def _marks(target: Path) -> list[Path]:
    escaped = Path(*map(glob.escape, target.parts))
    patterns = [pattern for token in (f"{_TOKEN}.", "") for pattern in _marks_of(escaped, token)]
    return [Path(found) for pattern in patterns for found in glob.glob(str(pattern))]


def _marks_of(target: Path, token: str) -> tuple[Path, Path, Path]:
    """Return the paths that a mark may have: inside a checkpoint, beside it and above it."""
    name = f"{token}{_MARK}"
    above = target.parent.with_name(f"{target.parent.name}.{target.name}.{name}")
    return *companions(target, name), above


# ---- base files
#
# With a quantized base, frameworks save only the trained weights. The identity of the base is saved with them.

_BASE_FILE = "frozen_base.json"


def save_base_identity(model: nn.Module, checkpoint: Path, token: str = "") -> None:
    """Save the identity of the quantized base of ``model``, if it has one. Collective."""
    identity, file = describe_base(model), companion(checkpoint, _BASE_FILE)

    def write() -> None:
        for earlier in companions(checkpoint.resolve(), _BASE_FILE):
            _remove_file(earlier)
        if identity:
            write_whole(file, json.dumps({_DONE: token, "weights": identity}))

    run_on_first_rank(write)


def check_base_identity(model: nn.Module, checkpoint: Path) -> bool:
    """Return whether a checkpoint has the identity of a quantized base. Collective.

    Raises:
        ValueError: If ``model`` has another base, or the identity can't be read; on every rank.
    """
    saved, failure = from_first_rank(_read(companion(checkpoint, _BASE_FILE)) if dist.get_rank() == 0 else ({}, ""))
    if failure:
        raise ValueError(
            f"{companion(checkpoint, _BASE_FILE)} can't be read ({failure}): load another checkpoint, or remove this "
            "file if the model has the base that it had when the checkpoint was saved"
        )
    if saved:
        check_base(model, saved["weights"] if _DONE in saved else saved, str(checkpoint))
    return bool(saved)


def _read(file: Path) -> tuple[dict[str, Any], str]:
    """Return a JSON file's content ({} if there is no file), and why it can't be read ("" if it can)."""
    try:
        return (json.loads(file.read_text()) if file.is_file() else {}), ""
    except (OSError, ValueError) as error:
        return {}, str(error)


# ---- codec files
#
# Codec state, saved with a framework's checkpoint.
#
# A framework saves a folder of shards, or a file that rank 0 gathers. Each rank has codec state of its own, so
# torch.distributed.checkpoint saves it to a folder: ``codecs`` inside a checkpoint folder, or ``<file>.codecs`` beside
# a checkpoint file. A model without codec state leaves no such folder.

_CODECS_FOLDER = "codecs"
_LAYOUT = "layout"  # the key that a CodecState's state dict has even without codec state


def save_codec_state(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path, token: str = "") -> None:
    """Save the codec state of ``model``, if any, with a checkpoint that the framework has saved. Collective."""
    # All ranks wait for rank 0: an early one would write into the folder that rank 0 is still removing.
    run_on_first_rank(lambda: remove_codec_state(checkpoint))
    if (codec_state := _codec_state_of(model, optimizers)) is not None:
        _, state = codec_state
        folder = companion(checkpoint, _CODECS_FOLDER)
        dcp.save(state, checkpoint_id=folder)
        if token:
            run_on_first_rank(lambda: write_whole(folder / _DONE, token))


def load_codec_state(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path) -> None:
    """Continue with the codec state next to ``checkpoint``; start over, with a warning, if there is none. Collective.

    Raises:
        ValueError: If the codec state is of other units or another configuration of error feedback; on every rank, if
            files are missing.
    """
    if (codec_state := _codec_state_of(model, optimizers)) is None:
        return
    codecs, state = codec_state
    folder = companion(checkpoint, _CODECS_FOLDER)
    if not from_first_rank(folder.is_dir()):  # ranks that disagree on whether it exists would hang
        codecs.load_state_dict({_LAYOUT: f"no ranks (there is no {folder})"})
        return
    # A checkpoint of fewer ranks or other units lacks keys. Load the others: CodecState then starts over or raises.
    try:
        metadata = agree(dist.group.WORLD, dcp.FileSystemReader(folder).read_metadata, lambda metadata: "", "")
        loaded = {key: value for key, value in state.items() if key in metadata.state_dict_metadata}
        dcp.load(loaded, checkpoint_id=folder)  # raises on all ranks if it fails on one
    except (Exception, CheckpointException) as error:
        raise ValueError(
            f"the codec state in {folder} can't be read; its save was cut off, unless files were removed since: resume "
            "from another checkpoint, or remove this folder to go on from this one with codec state that starts over"
        ) from error
    codecs.load_state_dict(loaded)


def save_beside(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path, token: str) -> None:
    """Save base identity and codec state with a checkpoint that the framework has saved. Collective."""
    save_base_identity(model, checkpoint, token)
    save_codec_state(model, optimizers, checkpoint, token)


def load_beside(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path) -> None:
    """Check that ``model`` has the quantized base of ``checkpoint``, and load codec state. Collective."""
    check_base_identity(model, checkpoint)
    load_codec_state(model, optimizers, checkpoint)


def remove_codec_state(checkpoint: Path) -> None:
    """Remove the codec state of ``checkpoint``, if there is any. Call it on one rank only."""
    for folder in companions(checkpoint, _CODECS_FOLDER):
        if folder.is_dir():
            shutil.rmtree(folder)


def _codec_state_of(
    model: nn.Module, optimizers: Iterable[Optimizer]
) -> tuple[CodecState, dict[str, str | bytes]] | None:
    if not named_units(model):  # torch shards the whole model
        return None
    codecs = CodecState(model, list(optimizers))
    state = codecs.state_dict()
    return (codecs, state) if state.keys() - {_LAYOUT} else None
