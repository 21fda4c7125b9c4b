"""An ``Accelerator`` that refuses checkpoints whose saves were cut off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ._cut_off_saves import check_complete, saving


class SavingAccelerator(Accelerator):
    """Marks a checkpoint while it saves over an earlier one. See _cut_off_saves.py."""

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *arguments: Any, **options: Any) -> Any:
        # accelerate refuses to save over a checkpoint that it names, into a folder that must not be there.
        if output_dir is None or self.project_configuration.automatic_checkpoint_naming:
            return super().save_state(output_dir, *arguments, **options)
        with saving(Path(output_dir), is_folder=True):
            return super().save_state(output_dir, *arguments, **options)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *arguments: Any, **options: Any) -> Any:
        if input_dir is not None:
            check_complete(Path(input_dir).expanduser())
        return super().load_state(input_dir, *arguments, **options)
