"""Real text as bytes, the same for whoever has the same Python packages: their sources and documents."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SUFFIXES = (".py", ".md", ".rst", ".txt")
HELD_OUT = 0.02
"""Share of the files that are held out."""


@dataclass(frozen=True)
class Corpus:
    """Bytes for training and bytes of other files for validation, both uint8.

    Args:
        training: Flat.
        held_out: Flat.
        files: Number of files in both.
        sha256: Of the training bytes and the held-out bytes, one after the other.
    """

    training: Tensor
    held_out: Tensor
    files: int
    sha256: str

    def summary(self) -> dict[str, int | str]:
        """What tells a reader whether he has the same text."""
        return {
            "files": self.files,
            "training_bytes": len(self.training),
            "held_out_bytes": len(self.held_out),
            "sha256": self.sha256,
        }


def load_corpus(folders: list[Path]) -> Corpus:
    """The text of ``folders``, from the disk if it was read before.

    Args:
        folders: Where to look for text; empty for the standard library and the installed packages.
    """
    folders = [folder.resolve() for folder in folders] or _python_folders()
    key = hashlib.sha256("\n".join(map(str, (*folders, *SUFFIXES, HELD_OUT))).encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"fsdp_zpp-corpus-{key}.pt"
    if not kept.exists():
        partial = kept.with_suffix(f".{os.getpid()}")
        torch.save(vars(_read(folders)), partial)
        partial.rename(kept)
    return Corpus(**torch.load(kept, mmap=True))


def _python_folders() -> list[Path]:
    packages = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    folders = {Path(sysconfig.get_paths()["stdlib"]).resolve(), *(path.resolve() for path in packages)}
    return sorted(folders)


def _read(folders: list[Path]) -> Corpus:
    # By path inside its folder, so that the order does not depend on where Python is installed.
    named = [(path.relative_to(folder).as_posix(), path) for folder in folders for path in _text_files(folder)]
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda item: _content(item[1]), named))
    files = sorted((name, hashlib.sha256(text).digest(), text) for (name, _), text in zip(named, texts, strict=True))
    parts: tuple[list[bytes], list[bytes]] = [], []
    seen: set[bytes] = set()
    for _, digest, text in files:
        if text and digest not in seen:
            seen.add(digest)
            parts[digest[0] < 256 * HELD_OUT].append(text)
    training, held_out = (b"\n".join(part) for part in parts)
    sha256 = hashlib.sha256(training + held_out).hexdigest()
    return Corpus(_tensor(training), _tensor(held_out), len(seen), sha256)


def _text_files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names if name.endswith(SUFFIXES))


def _content(path: Path) -> bytes:
    # Packages hold broken links.
    return path.read_bytes() if path.is_file() else b""


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
