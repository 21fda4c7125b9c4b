"""Text as tokens: reads files, tokenizes them, and deals out the same batches whatever the strategy."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Not prose or code that a person wrote for a reader: tests, tables of characters, bundled packages.
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data"} | {
    "idlelib",
    "turtledemo",
    "ensurepip",
}


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and for validation, the same on all ranks."""

    training: Tensor
    validation: Tensor
    vocab: int
    text_bytes: int


@dataclass(frozen=True)
class Share:
    """This rank's part of every batch.

    Args:
        rank: This rank.
        world: Number of ranks.
        batch: Sequences per rank and micro-batch.
        sequence: Tokens per sequence.
    """

    rank: int
    world: int
    batch: int
    sequence: int

    def training_batches(self, tokens: Tensor, seed: int, step: int, micro_batches: int) -> Iterator[Tensor]:
        """Random windows of ``sequence + 1`` tokens, one [batch, sequence + 1] tensor per micro-batch.

        They depend on ``seed`` and ``step`` alone, so a resumed run goes on with the data it would have seen.
        """
        # The seeds of neighbouring runs and steps must not meet.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        last = len(tokens) - self.sequence
        starts = torch.randint(last, (micro_batches, self.world, self.batch), generator=generator)
        for micro_batch in starts[:, self.rank]:
            yield self._windows(tokens, micro_batch)

    def validation_batches(self, tokens: Tensor, batches: int) -> Iterator[Tensor]:
        """Windows spread evenly over ``tokens``; as many on every rank, since each forward is collective."""
        last = len(tokens) - self.sequence - 1
        starts = torch.linspace(0, last, batches * self.world * self.batch).long()
        for batch in starts.view(batches, self.world, self.batch)[:, self.rank]:
            yield self._windows(tokens, batch)

    def _windows(self, tokens: Tensor, starts: Tensor) -> Tensor:
        return tokens[starts[:, None] + torch.arange(self.sequence + 1)].long()


def load_corpus(
    paths: tuple[Path, ...],
    *,
    tokenizer: str,
    vocab: int,
    validation: float,
    sequence: int,
    cache: Path,
    device: torch.device,
) -> Corpus:
    """Read and tokenize ``paths`` on rank 0 and send the tokens to all ranks. Collective.

    Reading once makes the text the same everywhere, even where machines have other files.

    Args:
        paths: Files or folders; empty for the standard library of this Python.
        tokenizer: ``"byte"``, ``"bpe"``, or the folder of a pretrained one.
        vocab: Size of the BPE vocabulary.
        validation: Share of the tokens held out, the last ones.
        sequence: Tokens of a sequence, which both parts must hold.
        cache: Folder that keeps a trained tokenizer.
        device: Device of the collective.
    """
    tokens, sizes = torch.empty(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    if dist.get_rank() == 0:
        text = _read(paths)
        if tokenizer == "byte":
            tokens, vocab = _as_bytes(text), 256
        elif tokenizer == "bpe":
            tokens, vocab = _as_bpe(text, vocab, cache)
        else:
            tokens, vocab = _as_pretrained(text, tokenizer)
        sizes = torch.tensor([len(tokens), vocab, len(text)])
    sizes = _broadcast(sizes, device)
    count, vocab, text_bytes = (int(size) for size in sizes)
    tokens = _broadcast(tokens if len(tokens) else torch.empty(count, dtype=torch.int32), device)
    held_out = int(count * validation)
    if min(held_out, count - held_out) < sequence + 1:
        raise SystemExit(f"{count} tokens, {held_out} of them held out, are too few for sequences of {sequence}")
    return Corpus(tokens[: count - held_out], tokens[count - held_out :], vocab, text_bytes)


def _broadcast(tensor: Tensor, device: torch.device) -> Tensor:
    tensor = tensor.to(device)
    dist.broadcast(tensor, src=0)
    return tensor.cpu()


def _read(paths: tuple[Path, ...]) -> bytes:
    files = list(_files(paths)) if paths else list(_standard_library())
    text = b"\n".join(file.read_bytes() for file in files)
    if not text:
        raise SystemExit(f"no text found in {', '.join(map(str, paths)) or 'the standard library'}; give --data")
    return text


def _files(paths: tuple[Path, ...]) -> Iterator[Path]:
    for path in paths:
        yield from (file for file in sorted(path.rglob("*")) if file.is_file()) if path.is_dir() else [path]


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(file.relative_to(root).parts):
            yield file


def _as_bytes(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int32))


def _as_pretrained(text: bytes, folder: str) -> tuple[Tensor, int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = text.decode("utf-8", errors="replace").splitlines(keepends=True)
    ids = tokenizer(lines, add_special_tokens=False)["input_ids"]
    return torch.from_numpy(np.concatenate([np.asarray(line, dtype=np.int32) for line in ids])), len(tokenizer)


def _as_bpe(text: bytes, vocab: int, cache: Path) -> tuple[Tensor, int]:
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    lines = text.decode("utf-8", errors="replace").splitlines(keepends=True)
    path = cache / f"bpe-{vocab}-{hashlib.sha256(text).hexdigest()[:16]}.json"
    if not path.exists():
        trainee = ByteLevelBPETokenizer()
        trainee.train_from_iterator(lines, vocab_size=vocab, show_progress=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        trainee.save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    encoded = tokenizer.encode_batch_fast(lines)
    ids = np.concatenate([np.asarray(line.ids, dtype=np.int32) for line in encoded])
    return torch.from_numpy(ids), tokenizer.get_vocab_size()
