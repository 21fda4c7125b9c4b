"""Parts that integrations share: versions, the key ``fsdp_zpp``, and files beside checkpoints."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
        distribution: Its name on PyPI, which is also the name of this package's extra.
        least: The oldest version that works.
        purpose: What needs that version, if the integration itself works with an older one.
        install: What to run, for a framework that no extra can install.

    Raises:
        ImportError: If it is not installed, or is older; says what to install.
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
# The key of a framework's configuration file that names a strategy.

KEY = "fsdp_zpp"

NO_DEEPSPEED = "a strategy is for torch's FSDP: leave it out (Strategy.from_deepspeed reads such a file)"
NO_WHOLE_MATRICES = "it works on whole matrices, and a strategy leaves a shard of each on a rank: leave it out"
PACKED_BASE = (
    "training on a base that the framework has packed has not been tried with a strategy, which quantizes one itself: "
    "leave it out, and "
)
NO_PACKED_BASE = f"{PACKED_BASE}write fsdp_zpp: {{preset: mixzpp, frozen: nf4}}"


def strategy_of(value: object) -> Strategy:
    """Return the strategy that the key ``fsdp_zpp`` stands for.

    Raises:
        ValueError: If ``value`` stands for none; the error names the key.
    """
    try:
        return Strategy.from_dict(value)  # type: ignore[arg-type]  # which it checks
    except (TypeError, ValueError) as error:  # pydantic reports no TypeError
        raise ValueError(f"{KEY}: {error}") from None


def quantizes(strategy: Strategy) -> bool:
    return any(each.frozen is not None for each in strategy.all_strategies)


def refuse(key: str, value: object, instead: str) -> None:
    """Raise a ValueError that says what to do in place of a key that can't be honoured."""
    raise ValueError(f"{key}: {value!r} can't be combined with fsdp_zpp: {instead}")


def refuse_set(values: Mapping[str, Any], alternatives: Mapping[str, str], section: str = "") -> None:
    """Refuse the first key of ``alternatives`` that ``values`` sets to anything but what asks for nothing."""
    for key, instead in alternatives.items():
        if values.get(key):
            refuse(f"{section}{key}", values[key], instead)


def check_strategy(strategy: object) -> None:
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be a Strategy such as Strategy.zeropp(), got {strategy!r}; for a preset's name or a "
            "mapping, pass Strategy.from_dict(...)"
        )


# ---- companions
#
# Companions of a framework's checkpoint, saved with it: inside of one that is a folder, beside one that is a file.


def companion(checkpoint: Path, name: str) -> Path:
    """Return the path of the companion ``name`` of a checkpoint that exists."""
    # Lightning's ModelCheckpoint(save_last="link") makes links to checkpoints.
    inside, beside = companions(checkpoint.resolve(), name)
    return inside if inside.parent.is_dir() else beside


def companions(checkpoint: Path, name: str) -> tuple[Path, Path]:
    """Return both paths of a companion, inside and beside: a framework may save over one of the other kind."""
    # A link stays one here: to remove it is not to remove what it leads to.
    return checkpoint / name, checkpoint.with_name(f"{checkpoint.name}.{name}")


def remove_companions(checkpoint: Path) -> None:
    """Remove the codec state, the identity of a base and the marks of a checkpoint; for one rank alone."""
    remove_codec_state(checkpoint)
    for file in companions(checkpoint, _BASE_FILE):
        _remove_file(file)
    remove_marks(checkpoint)


def _remove_file(path: Path) -> None:
    if path.is_file():  # to unlink what would be inside of a file raises another error
        path.unlink(missing_ok=True)


# ---- marks
#
# Saves that were cut off.
#
# Frameworks write file by file, over what is there. If a save is cut off, weights, optimizer and codec state may be of
# two saves, and nothing in the framework's files tells. So a mark lies in the checkpoint, or beside it, from before the
# first write until after the last, and a checkpoint with a mark is refused. A job that finds its mark gone when it is
# done leaves another one: a second job has saved there meanwhile, and taken it away.

_MARK = "save_was_cut_off"
_CUT_OFF = "This checkpoint is being saved, or its save was cut off, or made beside another. It may be of two saves.\n"

logger = logging.getLogger("fsdp_zpp")


class MarkedSave:
    """A context in which a checkpoint is saved, with a mark until that is complete. Collective, before any write.

    Args:
        checkpoint: The framework's file or folder, the same on all ranks.
        inside: True if the mark is inside of a folder, and not beside what may be a file.
        written_last: The file in it that the framework writes last; an earlier one is removed.

    Raises:
        OSError: On every rank, if rank 0 can't write the mark.
    """

    def __init__(self, checkpoint: Path, *, inside: bool = False, written_last: str | None = None) -> None:
        # Lightning's ModelCheckpoint(save_last="link") makes links to checkpoints.
        self._target = checkpoint.resolve()
        self._inside, beside = companions(self._target, _MARK)
        self._mark = self._inside if inside else beside
        run_on_first_rank(lambda: self._begin(written_last))

    def __enter__(self) -> MarkedSave:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.complete()

    def complete(self) -> None:
        """Take the mark away. Collective, after all is written."""
        dist.barrier()
        run_on_first_rank(self.end)

    def end(self) -> None:
        """Take the mark away, on rank 0, when all ranks have written."""
        try:
            self._mark.unlink()
        except FileNotFoundError:
            logger.warning(
                "another job has saved %s at the same time, so that its files may be of both; give each job a folder "
                "of its own",
                self._target,
            )
            if self._mark.parent.is_dir():  # another job may have removed the checkpoint
                write_whole(self._mark, _CUT_OFF)
        else:
            remove_marks(self._target)

    def _begin(self, written_last: str | None) -> None:
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        # One inside of a folder in any case: users may move that.
        for mark in dict.fromkeys([self._mark, self._inside] if self._target.is_dir() else [self._mark]):
            write_whole(mark, _CUT_OFF)
        if written_last is not None:
            _remove_file(self._target / written_last)


def remove_marks(checkpoint: Path) -> None:
    """Remove the marks of a checkpoint; for one rank alone."""
    for file in companions(checkpoint.resolve(), _MARK):
        _remove_file(file)


def check_complete(checkpoint: Path, *, written_last: str | None = None) -> None:
    """Raise unless the save of a checkpoint has ended. Collective, before anything is loaded.

    Args:
        checkpoint: The framework's file or folder.
        written_last: The file in it that the framework writes last.

    Raises:
        ValueError: On every rank.
    """
    # Rank 0's word counts, since ranks may see a shared folder at different times.
    marks = [str(file) for file in companions(checkpoint.resolve(), _MARK) if os.path.isfile(file)]
    is_short = written_last is not None and os.path.isdir(checkpoint) and not os.path.isfile(checkpoint / written_last)
    marks, is_short = from_first_rank((marks, is_short))
    if marks:
        raise ValueError(
            f"the last save of {checkpoint} was cut off, or goes on in another job, or another job has saved there at "
            "the same time, so that its weights, optimizer and codec state may be of two saves, or missing: resume "
            f"from another checkpoint. To load it as it is, remove {' and '.join(marks)}; codec state that was not "
            "saved with its weights is dropped then, with a warning"
        )
    if is_short:
        raise ValueError(
            f"{checkpoint} has no {written_last}, which is written last, so that its save was cut off: remove it, and "
            "resume from another checkpoint"
        )


# ---- base files
#
# Identity of a model's quantized base, next to a framework's checkpoint of what is trained on it.

_BASE_FILE = "frozen_base.json"


def save_base_identity(model: nn.Module, checkpoint: Path) -> None:
    """Save the identity of the quantized base of ``model``, if it has one. Collective."""
    identity, file = describe_base(model), companion(checkpoint, _BASE_FILE)

    def write() -> None:
        for earlier in companions(checkpoint.resolve(), _BASE_FILE):
            _remove_file(earlier)
        if identity:
            write_whole(file, json.dumps(identity))

    run_on_first_rank(write)


def check_base_identity(model: nn.Module, checkpoint: Path) -> bool:
    """Return whether a checkpoint tells on which quantized base it was saved. Collective.

    Raises:
        ValueError: On every rank, if that is not the base of ``model``, or can't be read.
    """
    saved, failure = from_first_rank(_read(companion(checkpoint, _BASE_FILE)) if dist.get_rank() == 0 else ({}, ""))
    if failure:
        raise ValueError(
            f"{companion(checkpoint, _BASE_FILE)} can't be read ({failure}): load another checkpoint, or remove this "
            "file if the model has the base that it had when the checkpoint was saved"
        )
    if saved:
        check_base(model, saved, str(checkpoint))
    return bool(saved)


def _read(file: Path) -> tuple[dict[str, Any], str]:
    """Return the content of a file, empty if there is none, and why it can't be read, or an empty string."""
    try:
        return (json.loads(file.read_text()) if file.is_file() else {}), ""
    except (OSError, ValueError) as error:
        return {}, str(error)


# ---- codec files
#
# Codec state next to a framework's checkpoint.
#
# Frameworks write a folder, with shards in it, or a file, with everything gathered on rank 0. Codec state is each
# rank's own, so it goes through torch.distributed.checkpoint into a folder: ``codecs`` inside of a checkpoint that is a
# folder, and ``<file>.codecs`` beside one that is a file. A model without codec state leaves no such folder.

_CODECS_FOLDER = "codecs"
_LAYOUT = "layout"  # even the state dict of a CodecState without any state has it


def save_codec_state(model: nn.Module, optimizers: Iterable[Optimizer] | None, checkpoint: Path) -> None:
    """Save the codec state of ``model``, if it has any, with what a framework has just saved. Collective.

    If weights alone were saved, without ``optimizers``, it only removes that of an earlier save.
    """
    # All wait for it: a rank that is early would write into the folder that rank 0 is still removing.
    run_on_first_rank(lambda: remove_codec_state(checkpoint))
    if optimizers is not None and (codec_state := _codec_state_of(model, optimizers)) is not None:
        _, state = codec_state
        dcp.save(state, checkpoint_id=companion(checkpoint, _CODECS_FOLDER))


def load_codec_state(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path) -> None:
    """Continue with the codec state next to ``checkpoint``; start over, with a warning, if there is none. Collective.

    Raises:
        ValueError: If it was saved for other units, or under another configuration of error feedback, or if its files
            are not all there; the latter on every rank.
    """
    if (codec_state := _codec_state_of(model, optimizers)) is None:
        return
    codecs, state = codec_state
    folder = companion(checkpoint, _CODECS_FOLDER)
    if not from_first_rank(folder.is_dir()):  # ranks that see a shared folder at different times would hang
        codecs.load_state_dict({_LAYOUT: f"no ranks (there is no {folder})"})
        return
    # Only what is there: a checkpoint of fewer ranks, or of other units, lacks keys, and CodecState says what follows.
    try:
        metadata = agree(dist.group.WORLD, dcp.FileSystemReader(folder).read_metadata, lambda metadata: "", "")
        loaded = {key: value for key, value in state.items() if key in metadata.state_dict_metadata}
        dcp.load(loaded, checkpoint_id=folder)  # which raises on all ranks if it fails on any
    except (Exception, CheckpointException) as error:
        raise ValueError(
            f"the codec state in {folder} can't be read; its save was cut off, unless files were removed since: resume "
            "from another checkpoint, or remove this folder to go on from this one with codec state that starts over"
        ) from error
    codecs.load_state_dict(loaded)


def save_beside(model: nn.Module, optimizers: Iterable[Optimizer] | None, checkpoint: Path) -> None:
    """Save the identity of the base of ``model``, and codec state, with what a framework has saved. Collective."""
    save_base_identity(model, checkpoint)
    save_codec_state(model, optimizers, checkpoint)


def load_beside(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path) -> None:
    """Check that ``model`` has the base that it was saved with, and load codec state. Collective."""
    check_base_identity(model, checkpoint)
    load_codec_state(model, optimizers, checkpoint)


def remove_codec_state(checkpoint: Path) -> None:
    """Remove the codec state next to ``checkpoint``, if there is any; for one rank alone."""
    for folder in companions(checkpoint, _CODECS_FOLDER):
        if folder.is_dir():
            shutil.rmtree(folder)


def _codec_state_of(
    model: nn.Module, optimizers: Iterable[Optimizer]
) -> tuple[CodecState, dict[str, str | bytes]] | None:
    if not named_units(model):  # only torch's own strategies are in the model
        return None
    codecs = CodecState(model, list(optimizers))
    state = codecs.state_dict()
    return (codecs, state) if state.keys() - {_LAYOUT} else None
