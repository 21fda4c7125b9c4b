"""How Lightning's two strategies for FSDP write and read checkpoints that are files, the same in Trainer and Fabric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.load import _lazy_load


class CheckpointFiles(ABC):
    """An interface to a strategy's checkpoints that are files."""

    @property
    @abstractmethod
    def _saves_files(self) -> bool:
        """Return whether checkpoints are files, with everything gathered."""

    @abstractmethod
    def _read(self, file: Path, weights_only: bool | None) -> Mapping[str, Any]:
        """Read a file as Lightning will, without the tensors' values."""


class FilesOfFSDP(CheckpointFiles):
    """Files as ``FSDPStrategy`` writes and reads them."""

    _state_dict_type: Literal["full", "sharded"]

    @property
    def _saves_files(self) -> bool:
        return self._state_dict_type == "full"

    def _read(self, file: Path, weights_only: bool | None) -> Mapping[str, Any]:
        return _lazy_load(file)


class FilesOfModelParallel(CheckpointFiles):
    """Files as ``ModelParallelStrategy`` writes and reads them."""

    _save_distributed_checkpoint: bool

    @property
    def _saves_files(self) -> bool:
        return not self._save_distributed_checkpoint

    def _read(self, file: Path, weights_only: bool | None) -> Mapping[str, Any]:
        return torch.load(file, mmap=True, map_location="cpu", weights_only=weights_only)
