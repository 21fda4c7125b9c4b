"""Results on the disk: one file of JSON a run, of the form that common/result_files.py describes.

A key stands on one line, since rows hold hundreds of losses.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def write(path: Path, record: Record) -> None:
    """Write a run, one line for each key; a file is there when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(key)}: {json.dumps(value, default=str)}" for key, value in record.items())
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(path)


def read(path: Path) -> Record:
    """One run."""
    record: Record = json.loads(path.read_text())
    return record


def read_all(folder: Path) -> list[Record]:
    """All runs in a folder, by the names of their files."""
    return [read(path) for path in sorted(folder.glob("*.json"))]
