"""Parts that integrations share: versions, the key ``fsdp_zpp``, and files beside checkpoints."""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import json
import logging
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import IO, Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from fsdp_zpp.comm.agreement import agree, from_first_rank, run_on_first_rank
from fsdp_zpp.frozen.base_files import WeightIdentity, check_base, describe_base
from fsdp_zpp.fsdp2.fully_shard import fully_shard
from fsdp_zpp.names import how_to_install
from fsdp_zpp.runtime.checkpoint import CodecState
from fsdp_zpp.runtime.monitor import Monitor, monitor
from fsdp_zpp.runtime.unit import named_units
from fsdp_zpp.strategy.strategy import Strategy

# ---- requirement
#
# Versions of frameworks that integrations need.


def require(distribution: str, least: str, *, purpose: str = "", install: str = "") -> None:
    """Check that a framework is installed, before it is imported.

    Args:
        distribution: Its name on PyPI, which is also the name of this package's extra.
        least: The oldest version that the integration works with.
        purpose: What needs that version, if the integration itself works with an older one.
        install: What to run, for a framework that no extra can install.

    Raises:
        ImportError: If it is not installed, or is older; says what to install.
    """
    try:
        present = version(distribution)
    except PackageNotFoundError:
        raise absent(distribution, install) from None
    if TorchVersion(present) < least:
        needs = f"{distribution} {least} or later" + (f" {purpose}" if purpose else "")
        install = install or how_to_install(distribution, upgrade=True)
        module = _module(distribution)
        raise ImportError(f"fsdp_zpp.integrations.{module} needs {needs}, and {present} is installed: {install}")


def absent(distribution: str, install: str = "") -> ImportError:
    """Return the error for a framework that is not installed; for arguments see :func:`require`."""
    install = install or how_to_install(distribution)
    return ImportError(f"fsdp_zpp.integrations.{_module(distribution)} needs {distribution}: {install}")


def _module(distribution: str) -> str:
    return {"llamafactory": "llama_factory"}.get(distribution, distribution.replace("-", "_"))


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
"""What to do instead of keys that ask for DeepSpeed, for an optimizer of whole matrices, or for a base in few bits."""


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
    """Return whether a strategy, or one of its overrides, quantizes frozen weights."""
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
    """Raise a TypeError unless ``strategy`` is a Strategy."""
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be a Strategy such as Strategy.zeropp(), got {strategy!r}")


# ---- steps


class StepMonitor:
    """Figures of :func:`fsdp_zpp.monitor`, by names that begin with ``fsdp_zpp/``, once it is started."""

    def __init__(self) -> None:
        self._monitor: Monitor | None = None

    def start(self, model: nn.Module) -> None:
        """Begin to measure a sharded model; a measurement that was begun before ends."""
        self.close()
        self._monitor = monitor(model)

    def step(self) -> dict[str, float]:
        """End a step, and return its figures."""
        figures = {} if self._monitor is None else self._monitor.step()
        return {f"fsdp_zpp/{name}": figure for name, figure in figures.items()}

    def close(self) -> None:
        """End the measurement."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


# ---- in place of torchs
#
# Frameworks' own functions that shard, in which ``fully_shard`` is fsdp_zpp's with a strategy.
#
# Such functions import torch's ``fully_shard`` by name. While they run, every module that has that name has ours in its
# place, so that no model needs a copy of what the framework does with it.


def sharding_by(strategy: Strategy, *, reshards_always: bool = False) -> Any:
    """Return a function that takes the arguments of torch's ``fully_shard`` and shards by a strategy.

    To reshard after the forward is what torch and frameworks do by default. As such it is left to the strategy, whose
    parameter scope may keep the parameters.

    Args:
        strategy: The strategy.
        reshards_always: Whether ``reshard_after_forward=True`` is no default, but was asked for.
    """

    def fully_shard_by_strategy(module: Any, *, reshard_after_forward: Any = None, **arguments: Any) -> Any:
        if reshard_after_forward is True and not reshards_always:
            reshard_after_forward = None
        return fully_shard(module, strategy=strategy, reshard_after_forward=reshard_after_forward, **arguments)

    return fully_shard_by_strategy


_IS_REPLACED = "_fsdp_zpp_replaces"


def replace_function(holder: object, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the function ``name`` of a framework's module or class, if it has one, by ``make(original)``, once."""
    original = getattr(holder, name, None)
    if original is not None and not hasattr(original, _IS_REPLACED):
        replacement = functools.wraps(original)(make(original))
        setattr(replacement, _IS_REPLACED, True)
        setattr(holder, name, replacement)


@contextmanager
def in_place_of_torchs(replacement: Any) -> Iterator[None]:
    """Return a context in which whoever has imported torch's ``fully_shard``, or does it there, has another one."""
    holders = [
        module
        for name, module in list(sys.modules.items())
        # What some packages put there is no module.
        if getattr(module, "__dict__", {}).get("fully_shard") is torch_fully_shard and not name.startswith("fsdp_zpp.")
    ]
    replacement = functools.wraps(torch_fully_shard)(replacement)  # torch has its state under its name
    for module in holders:
        vars(module)["fully_shard"] = replacement
    try:
        yield
    finally:
        for module in holders:
            vars(module)["fully_shard"] = torch_fully_shard


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


# ---- turns
#
# Lets one job at a time save a checkpoint: frameworks would leave a mixture of what several jobs write.
#
# While a job saves, each of its ranks locks the byte at its rank of one file. A job begins when its rank 0 holds the
# lock on the whole file, that is, when every process of the previous job has finished or died: the system releases the
# locks of a process that ends. Where a file system has no locks, jobs don't wait for each other; see below
# for how a mixture is then detected.
#
# Locks are POSIX's, on bytes; those of flock, which frozen/base_files.py takes, are on whole files. A process loses
# all POSIX locks that it has on a file when it closes any descriptor of that file, so it opens it once.

logger = logging.getLogger("fsdp_zpp")

_HELD_BY_OTHERS = (errno.EACCES, errno.EAGAIN)
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
PAUSE = 1.0
"""Seconds between two tries to begin."""


class Turn:
    """This job's turn to save, until it is released; making it waits for the turns of other jobs. Collective.

    Args:
        file: The file that ranks lock, the same on all of them; it exists as long as the turn.
        text: The content of the file.

    Raises:
        OSError: On every rank, if rank 0 can't write the file.
        RuntimeError: On every rank, if a rank finds its byte locked.
    """

    def __init__(self, file: Path, text: str = "") -> None:
        self._path, self._text, self._rank = file, text.encode(), dist.get_rank()
        self._file: IO[bytes] | None = None
        try:
            self._wait()
            agree(dist.group.WORLD, self._lock_own)  # of all ranks, before any of them writes
        except BaseException:
            self.abandon()
            raise

    def release(self) -> None:
        """Let other jobs save; call it on each rank when that has written, and on rank 0 when all have."""
        if self._rank == 0 and self.is_alone():
            self._path.unlink(missing_ok=True)
        self.abandon()

    def is_alone(self) -> bool:
        """Return whether no other job has begun since, as one may where there are no locks; call it on rank 0."""
        assert self._file is not None
        return _is_still(self._path, self._file) and os.pread(self._file.fileno(), 4096, 0) == self._text

    def abandon(self) -> None:
        """Let other jobs save, since this one can't complete its save."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _wait(self) -> None:
        # In short collectives: in one long one, the other ranks would run into the process group's timeout.
        for tries in itertools.count():
            # By the word of rank 0 alone, so that all ranks raise, begin or wait.
            outcome = from_first_rank(self._outcome() if self._rank == 0 else False)
            if isinstance(outcome, OSError):
                raise outcome
            if outcome:
                return
            if self._rank == 0 and tries % 600 == 0:
                logger.warning(
                    "another job is saving to %s, and this one waits until that is done; give each job a folder of its "
                    "own. If no other job runs, remove %s",
                    self._path.parent,
                    self._path,
                )
            sleep(PAUSE)

    def _outcome(self) -> bool | OSError:
        """Try to begin, on rank 0; return whether this job has begun, or the error."""
        try:
            self._try()
        except OSError as error:
            return error
        return self._file is not None

    def _try(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+b")
        try:
            if not (_locks_all(file) and _is_still(self._path, file)):
                file.close()  # another job has it, or has just removed it
                return
            file.truncate(0)
            file.write(self._text)
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

    def _lock_own(self) -> None:
        if self._file is not None:
            return
        try:
            self._file = self._path.open("r+b")
        except FileNotFoundError:  # a folder that rank 0 does not share, or whose change is not seen here yet
            return
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._rank)
        except OSError as error:
            if error.errno in _HELD_BY_OTHERS:  # rank 0 has ended since
                raise RuntimeError(
                    f"another job has begun to save to {self._path.parent} in place of this one, whose rank 0 has "
                    "ended: start this job again"
                ) from None
            if error.errno not in _HAS_NO_LOCKS:
                raise


def is_locked(file: Path) -> bool:
    """Return whether a job holds its turn, as far as this machine can tell."""
    try:
        mark = file.open("rb")
    except OSError:
        return False
    with mark:
        try:
            fcntl.lockf(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _HELD_BY_OTHERS
    return False


def _locks_all(file: IO[bytes]) -> bool:
    """Lock all bytes but that of rank 0 for a moment, and that of rank 0 for good; False if another job holds any."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_UN, 0, 1)
    except OSError as error:
        if error.errno in _HELD_BY_OTHERS:
            return False
        if error.errno not in _HAS_NO_LOCKS:
            raise
    return True


def _is_still(path: Path, file: IO[bytes]) -> bool:
    """Return whether the open ``file`` is still the one at ``path``, and was not removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return False
        raise


# ---- cut off saves
#
# Checkpoints whose saves were cut off.
#
# Frameworks write file by file, over what is there. If a save is cut off, weights, optimizer and codec state may be of
# two saves, and nothing in the files tells. So a mark lies in the checkpoint, or beside one that may be a file, from
# before the first write until after the last. A checkpoint with a mark is refused.
#
# Jobs that save into one checkpoint take turns, by locks on the mark. Where there are no locks, a later job
# replaces the mark of the earlier one. A job that finds its mark replaced when it is done leaves a mark that says so,
# which stays until the checkpoint is saved again.

_MARK = "save_was_cut_off"
_MIXED = "Two jobs have saved this checkpoint at the same time. Its files may be of both.\n"


class MarkedSave:
    """A context in which a checkpoint is saved, with a mark until that is complete. Collective, before any write.

    It waits until no other job is saving the checkpoint.

    Args:
        checkpoint: The framework's file or folder, the same on all ranks.
        place: Where the mark is: inside of a folder, beside what may be a file, or above, beside the folder that it is
            in, for a framework that refuses to save where anything is and counts what is beside it.
        written_last: The file in it that the framework writes when the mark is gone; an earlier one is removed.

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
        # Lightning's ModelCheckpoint(save_last="link") makes links to checkpoints.
        self._target = checkpoint.resolve()
        text = (
            "This checkpoint is being saved, or its save was cut off. Its files may then be of two saves.\n"
            f"{socket.gethostname()} {secrets.token_hex(8)}\n"
        )
        # Where all jobs find it, whatever they have made of the checkpoint so far.
        self._mark = dict(zip(("inside", "beside", "above"), _marks(self._target), strict=True))[place]
        self._turn = Turn(self._mark, text)
        try:
            run_on_first_rank(lambda: self._begin(text, written_last))
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.complete()
        else:
            self.abandon()

    def complete(self) -> None:
        """Take the mark away. Collective, after all is written."""
        dist.barrier()
        run_on_first_rank(self._end)
        self._turn.release()

    def abandon(self) -> None:
        """Leave the mark; other jobs may save."""
        self._turn.abandon()

    def _begin(self, text: str, written_last: str | None) -> None:
        if self._mark.parent != self._target and self._target.is_dir():  # which users may move
            (self._target / _MARK).write_text(text)
        if written_last is not None:
            (self._target / written_last).unlink(missing_ok=True)

    def _end(self) -> None:
        if self._turn.is_alone():
            for mark in _marks(self._target):
                if mark != self._mark and mark.is_file():  # its own goes last, with the turn
                    mark.unlink()
        else:
            if self._mark.parent.is_dir():  # another job may have removed the checkpoint
                self._mark.write_text(_MIXED)
            logger.warning(
                "another job has saved %s at the same time, so that its files may be of both; give each job a folder "
                "of its own",
                self._target,
            )


def remove_marks(checkpoint: Path) -> None:
    """Remove the marks of a checkpoint, if there are any; for one rank alone."""
    for mark in _marks(checkpoint.resolve()):
        if mark.is_file():
            mark.unlink()


def check_complete(checkpoint: Path, *, written_last: str | None = None) -> None:
    """Raise if the last save of a checkpoint was cut off. Collective, before anything is loaded.

    Args:
        checkpoint: The framework's file or folder.
        written_last: The file in it that the framework writes last.

    Raises:
        ValueError: On every rank.
    """
    # Rank 0's word counts, since ranks may see a shared folder at different times.
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    state = from_first_rank(_state_of(checkpoint, written_last) if is_first else _State())
    remedy = (
        "so that its weights, optimizer and codec state may be of two saves, or missing: resume from another "
        f"checkpoint. To load it as it is, remove {state.mark}; codec state that was not saved with its weights is "
        "dropped then, with a warning"
    )
    if state.unreadable:
        raise ValueError(f"whether {checkpoint} is complete can't be told: {state.unreadable}")
    if state.is_being_saved:
        raise ValueError(
            f"{checkpoint} is being saved by another job: wait until it is done, or resume from another checkpoint"
        )
    if state.text == _MIXED:
        raise ValueError(f"two jobs have saved {checkpoint} at the same time, {remedy}")
    if state.mark is not None:
        raise ValueError(f"the last save of {checkpoint} was cut off, {remedy}")
    if state.lacks_last_file:
        raise ValueError(
            f"{checkpoint} has no {written_last}, which is written last, so that its save was cut off: remove it, and "
            "resume from another checkpoint"
        )


@dataclass(frozen=True)
class _State:
    """State of a checkpoint, as its files tell it.

    Attributes:
        mark: Its mark, if there is one.
        text: Content of the mark.
        is_being_saved: Whether a job is saving it now.
        lacks_last_file: Whether the file is missing that a framework writes last.
        unreadable: Reason why nothing can be told, if so.
    """

    mark: Path | None = None
    text: str = ""
    is_being_saved: bool = False
    lacks_last_file: bool = False
    unreadable: str = ""


def _state_of(checkpoint: Path, written_last: str | None) -> _State:
    try:
        marks = [mark for mark in _marks(checkpoint.resolve()) if mark.is_file()]
        mark = next(iter(marks), None)
        lacks = written_last is not None and checkpoint.is_dir() and not (checkpoint / written_last).is_file()
        return _State(mark, "" if mark is None else _text_of(mark), any(map(is_locked, marks)), lacks)
    except OSError as error:
        return _State(unreadable=str(error))


def _text_of(mark: Path) -> str:
    with suppress(OSError):
        return mark.read_text()
    return ""


def _marks(target: Path) -> tuple[Path, Path, Path]:
    """Return the possible marks of a checkpoint: inside of it, beside it, and above."""
    above = target.parent.with_name(f"{target.parent.name}.{target.name}.{_MARK}")
    return *companions(target, _MARK), above


# ---- base files
#
# Identity of a model's quantized base, next to a framework's checkpoint of what is trained on it.

_BASE_FILE = "frozen_base.json"


def save_base_identity(model: nn.Module, checkpoint: Path) -> None:
    """Save the identity of the quantized base of ``model``, if it has one. Collective.

    Raises:
        OSError: On every rank, if rank 0 can't write.
    """
    identity, file = describe_base(model), companion(checkpoint, _BASE_FILE)

    def write() -> None:
        remove_base_identity(checkpoint.resolve())  # of an earlier checkpoint of this name
        if identity:
            file.write_text(json.dumps(identity))

    run_on_first_rank(write)


def remove_base_identity(checkpoint: Path) -> None:
    """Remove the saved identity of a base, if there is one; for one rank alone."""
    for file in companions(checkpoint, _BASE_FILE):
        if file.is_file():
            file.unlink()


def check_base_identity(model: nn.Module, checkpoint: Path) -> bool:
    """Raise if ``model`` has another quantized base than it had when it was saved. Collective.

    Returns:
        Whether the checkpoint tells which base it was saved with.

    Raises:
        ValueError: On every rank, also if rank 0 can't read what was saved; says what to do.
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


def _read(file: Path) -> tuple[dict[str, WeightIdentity], str]:
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

State = dict[str, str | bytes]
_CODECS_FOLDER = "codecs"
_LAYOUT = "layout"
"""Key that even the state dict of a :class:`CodecState` without any state has."""


def save_codec_state(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path) -> None:
    """Save the codec state of ``model``, if it has any, with what a framework has just saved. Collective.

    Args:
        model: What a strategy has sharded.
        optimizers: All of its optimizers.
        checkpoint: The framework's file or folder, the same on all ranks.

    Raises:
        OSError: On every rank, if rank 0 can't remove the codec state of an earlier checkpoint of this name.
    """
    # All wait for it: a rank that is early would write into the folder that rank 0 is still removing.
    run_on_first_rank(lambda: remove_codec_state(checkpoint))
    if (codec_state := _codec_state_of(model, optimizers)) is not None:
        _, state = codec_state
        dcp.save(state, checkpoint_id=companion(checkpoint, _CODECS_FOLDER))


def load_codec_state(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path) -> None:
    """Continue with the codec state next to ``checkpoint``; start over, with a warning, if there is none. Collective.

    Args:
        model: What a strategy has sharded; its weights may be loaded before or after.
        optimizers: All of its optimizers, loaded before or after.
        checkpoint: The framework's file or folder, the same on all ranks.

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
        saved = agree(dist.group.WORLD, lambda: _saved_keys(folder), lambda keys: "", "")
        loaded = {key: value for key, value in state.items() if key in saved}
        dcp.load(loaded, checkpoint_id=folder)  # which raises on all ranks if it fails on any
    except (Exception, CheckpointException) as error:
        raise ValueError(
            f"the codec state in {folder} can't be read; its save was cut off, unless files were removed since: resume "
            "from another checkpoint, or remove this folder to go on from this one with codec state that starts over"
        ) from error
    codecs.load_state_dict(loaded)


def _saved_keys(folder: Path) -> set[str]:
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def save_beside(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path) -> None:
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


def _codec_state_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[CodecState, State] | None:
    """Return the codec state of ``model`` and its state dict; None if it has none, the same on all ranks."""
    if not named_units(model):  # only torch's own strategies are in the model
        return None
    codecs = CodecState(model, list(optimizers))
    state = codecs.state_dict()
    return (codecs, state) if state.keys() - {_LAYOUT} else None
