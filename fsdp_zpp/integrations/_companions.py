"""Companions of a framework's checkpoint, saved with it: inside of one that is a folder, beside one that is a file."""

from __future__ import annotations

from pathlib import Path


def companion(checkpoint: Path, name: str) -> Path:
    """Return the path of the companion ``name`` of a checkpoint that exists."""
    # Lightning's ModelCheckpoint(save_last="link") makes links to checkpoints.
    inside, beside = companions(checkpoint.resolve(), name)
    return inside if inside.parent.is_dir() else beside


def companions(checkpoint: Path, name: str) -> tuple[Path, Path]:
    """Return both paths of a companion, inside and beside: a framework may save over one of the other kind."""
    # A link stays one here: to remove it is not to remove what it leads to.
    return checkpoint / name, checkpoint.with_name(f"{checkpoint.name}.{name}")
