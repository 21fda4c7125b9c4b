"""Writes a quantized base: safetensors files of limited size, and their index. See the top of file_format.py."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from .drafts import Draft, remove_leftovers, to_disk
from .file_format import FORMAT, SavedWeight, index_text


class BaseWriter:
    """Writes the tensors of a base, as they come.

    It reports an error only at the end, since until then the other ranks need this one in collectives.

    Args:
        folder: The folder.
        limit: Bytes that a file may have.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._pending: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        self._error = ""
        self._draft: Draft | None = None
        try:
            self._draft = Draft(folder)
        except OSError as failure:
            self._error = str(failure)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Put tensors into the current file, or into the next if they would make it too large."""
        nbytes = sum(tensor.nbytes for tensor in (*self._pending.values(), *tensors.values()))
        if self._pending and nbytes > self._limit:
            self._flush()
        self._pending |= tensors

    def finish(self, rest: dict[str, Tensor], stored: dict[str, SavedWeight]) -> str:
        """Write the rest, and the index; return the error if there was one, else an empty string."""
        for name, tensor in rest.items():
            self.add({name: tensor})
        self._flush()
        if self._draft is not None and not self._error:
            try:
                self._draft.publish(index_text(self._files, stored))
            except OSError as failure:
                self._error = str(failure)
        if self._error:
            if self._draft is not None:
                self._draft.abandon()
            return f"{self._error}; what was there before still is"
        try:
            to_disk(self._folder)  # the new index, before the files of the old one are removed
        except OSError as failure:
            return str(failure)
        remove_leftovers(self._folder)
        return ""

    def _flush(self) -> None:
        if self._draft is not None and not self._error:
            path = self._draft.file(len(set(self._files.values())) + 1)
            try:
                save_file(self._pending, path, {"format": FORMAT})
                to_disk(path)
            except Exception as failure:  # any at all, see the top of this class
                self._error = str(failure)
            self._files |= dict.fromkeys(self._pending, path.name)
        self._pending = {}
