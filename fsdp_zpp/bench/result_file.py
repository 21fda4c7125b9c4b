"""Results: one JSON file a run, which says how it was made before its measurements.

    {"manifest": {...}, "arguments": {...}, "rows": [{...}, ...]}

A result may have more beside its rows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]
NOT_RECORDED = ("out", "output", "resume", "worker", "json", "chart", "run", "parser", "version")
"""Options that change no figure: where a result goes, and those of a script to its own processes."""


def write(path: Path, manifest: dict[str, Any], arguments: object, rows: list[Row], **others: Any) -> None:
    """Write one run's result, a line for each row; the file is there when it is complete.

    Args:
        path: File; its folder is made.
        manifest: When, where and how the result was made.
        arguments: Object whose attributes are the options; those of ``NOT_RECORDED`` are left out.
        rows: Measurements, a row for each case.
        others: Further entries of the result.
    """
    options = {name: value for name, value in vars(arguments).items() if name not in NOT_RECORDED}
    head = {"manifest": manifest, "arguments": options, **others}
    lines = [f"{json.dumps(name)}: {json.dumps(value, default=str)}," for name, value in head.items()]
    lines += ['"rows": [', ",\n".join(json.dumps(row) for row in rows), "]"]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text("\n".join(["{", *lines, "}\n"]))
    partial.replace(path)


def check_writable(option: str, path: Path) -> None:
    """Make the folder of ``path``, and raise unless the file can be written; one that is there stays as it is.

    Raises:
        OSError: If it can't be written. It names the ``option``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise OSError(f"{option} {path} can't be written: {error}; name a file where rank 0 may write") from error
