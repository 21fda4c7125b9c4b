"""Results: one JSON file a run, which says how it was made before its measurements.

    {"manifest": {...}, "arguments": {...}, "rows": [{...}, ...]}

``fsdp_zpp.bench.results`` writes them. A result may have more beside its rows. A manifest (``manifest.py``) with
``"recovered": true`` was written after the run, from what the run printed and from when its figures were committed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]


def read(folder: Path, *names: str) -> dict[str, Result]:
    """Return results of a folder, by the names of their files without ``.json``.

    Args:
        folder: Folder of the files.
        names: Names of the files to read; a ``*`` stands for all. Default: all that lie in no folder below.
    """
    files = [file for name in names or ("*",) for file in sorted(folder.glob(f"{name}.json"))]
    return {file.relative_to(folder).as_posix().removesuffix(".json"): json.loads(file.read_text()) for file in files}
