"""Checkpoints of Lightning's two strategies for FSDP, in Trainer and Fabric: how they become whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from lightning.fabric.utilities.load import _lazy_load
from torch import nn
from torch.optim import Optimizer

from fsdp_zpp.frozen.files.whole_state_dicts import with_quantized_weights, without_quantized_weights
from fsdp_zpp.integrations._base_files import save_base_identity
from fsdp_zpp.integrations._codec_files import remove_codec_state, save_codec_state
from fsdp_zpp.integrations._cut_off_saves import MarkedSave, check_complete

from .checks import Content, check_base


class CheckpointFiles(ABC):
    """Completes a strategy's checkpoints: with quantized weights or the identity of a base, and with codec state."""

    is_global_zero: bool

    @property
    @abstractmethod
    def _saves_files(self) -> bool:
        """Return whether checkpoints are files, with everything gathered."""

    @abstractmethod
    def _read(self, file: Path, weights_only: bool | None) -> Content:
        """Read a file as Lightning will, without the tensors' values."""

    @contextmanager
    def _saving(self, path: Path, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Return a context in which Lightning saves; its end adds a base's identity and codec state. Collective."""
        with MarkedSave(path):
            yield
            if model is not None:
                save_base_identity(model, path)
            if model is not None and optimizers:
                save_codec_state(model, optimizers, path)
            elif self.is_global_zero:
                remove_codec_state(path)

    @contextmanager
    def _loading(
        self, path: Path, model: nn.Module | None, keys: Collection[str], weights_only: bool | None
    ) -> Iterator[None]:
        """Return a context for Lightning to load, if the checkpoint is complete and of the model's base. Collective.

        Args:
            path: Lightning's file or folder, the same on all ranks.
            model: The model, if one is loaded.
            keys: Where in it the model's weights may be; empty if it is a bare state dict.
            weights_only: As in Lightning.

        Raises:
            ValueError: If the save was cut off, or if the model has another quantized base than it had then.
        """
        check_complete(path)
        has_base = model is not None and check_base(model, path, keys, partial(self._read, weights_only=weights_only))
        with without_quantized_weights(model) if model is not None and has_base else nullcontext():
            yield

    def _with_quantized_weights(self, model: nn.Module | None) -> AbstractContextManager[None]:
        """Return a context in which state dicts for a file have the quantized weights, dequantized."""
        if model is None or not self._saves_files:
            return nullcontext()
        return with_quantized_weights(model)


class FilesOfFSDP(CheckpointFiles):
    """Files as ``FSDPStrategy`` writes and reads them."""

    _state_dict_type: Literal["full", "sharded"]

    @property
    def _saves_files(self) -> bool:
        return self._state_dict_type == "full"

    def _read(self, file: Path, weights_only: bool | None) -> Content:
        content: Content = _lazy_load(file)
        return content


class FilesOfModelParallel(CheckpointFiles):
    """Files as ``ModelParallelStrategy`` writes and reads them."""

    _save_distributed_checkpoint: bool

    @property
    def _saves_files(self) -> bool:
        return not self._save_distributed_checkpoint

    def _read(self, file: Path, weights_only: bool | None) -> Content:
        content: Content = torch.load(file, mmap=True, map_location="cpu", weights_only=weights_only)
        return content
