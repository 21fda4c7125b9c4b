"""Real text as bytes, the same for all users with the same Python packages: their sources and documents."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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

    def to(self, device: torch.device) -> Corpus:
        """Return the corpus on a device."""
        return replace(self, training=self.training.to(device), held_out=self.held_out.to(device))

    def summary(self) -> dict[str, int | str]:
        """Return figures by which a reader can tell whether he has the same text."""
        lengths = {"training_bytes": len(self.training), "held_out_bytes": len(self.held_out)}
        return {"files": self.files, **lengths, "sha256": self.sha256}


def load_corpus(folders: list[Path]) -> Corpus:
    """Load the text of ``folders``, from the disk if it was read before.

    Args:
        folders: Folders with text; empty for the standard library and the installed packages.
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
    return sorted({path.resolve() for path in (Path(sysconfig.get_paths()["stdlib"]), *packages)})


def _read(folders: list[Path]) -> Corpus:
    # By path inside its folder, so that the order does not depend on where Python is installed.
    paths = [(path.relative_to(folder).as_posix(), path) for folder in folders for path in _text_files(folder)]
    with ThreadPoolExecutor(16) as pool:
        # Packages hold broken links.
        texts = list(pool.map(lambda item: item[1].read_bytes() if item[1].is_file() else b"", paths))
    files = sorted((name, hashlib.sha256(text).digest(), text) for (name, _), text in zip(paths, texts, strict=True))
    parts: tuple[list[bytes], list[bytes]] = [], []
    seen: set[bytes] = set()
    for _, digest, text in files:
        if text and digest not in seen:
            seen.add(digest)
            parts[digest[0] < 256 * HELD_OUT].append(text)
    training, held_out = (b"\n".join(part) for part in parts)
    tensors = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (training, held_out))
    return Corpus(*tensors, len(seen), hashlib.sha256(training + held_out).hexdigest())


def _text_files(folder: Path) -> list[Path]:
    return [Path(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(SUFFIXES)]
