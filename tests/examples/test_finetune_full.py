"""Full fine-tuning example, from safetensors that no rank holds whole to what from_pretrained loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import llama
from harness.launch import launch
from transformers import AutoModelForCausalLM


def fine_tune(folder: Path, *options: str | Path) -> list[float]:
    """Return the losses that the example prints."""
    command = ["examples/finetune_full.py", "--gpus-per-node", "2", "--model", folder / "model"]
    command += ["--data", folder / "text.txt", "--sequence", "32", "--batch", "2", "--output", folder / "result"]
    result = launch(4, *command, *options, on_cpu=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", result.stdout, re.MULTILINE)]


def make_model(folder: Path, tied: bool) -> dict[str, torch.Tensor]:
    """Save a model as several files, and bytes that it knows; return its weights."""
    model = llama.make_base(torch.bfloat16, tied).cpu()
    model.save_pretrained(folder / "model", max_shard_size="60KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    (folder / "text.txt").write_text("".join(f"{a} and {b}\n" for a in range(60) for b in range(60)))
    return model.state_dict()


@pytest.mark.parametrize("adapter", [[], ["--fsdp1"]], ids=["fsdp2", "fsdp1"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_was_read_is_what_is_exported(tmp_path: Path, adapter: list[str], tied: bool) -> None:
    weights = make_model(tmp_path, tied)
    fine_tune(tmp_path, *adapter, "--steps", "1", "--lr", "0")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert exported.dtype == torch.bfloat16
    assert exported.config.architectures == ["LlamaForCausalLM"]
    assert exported.config.tie_word_embeddings == tied
    assert exported.state_dict().keys() == weights.keys()
    assert all(torch.equal(weights[name], value) for name, value in exported.state_dict().items())


@pytest.mark.parametrize("adapter", [[], ["--fsdp1"]], ids=["fsdp2", "fsdp1"])
def test_it_learns(tmp_path: Path, adapter: list[str]) -> None:
    make_model(tmp_path, tied=True)
    first, *_, last = fine_tune(tmp_path, *adapter, "--steps", "20", "--lr", "1e-2", "--strategy", "IGG")
    assert last < 0.7 * first
    tokens = torch.tensor([list(b"12 and 34\n56 and 7")])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "result", dtype=torch.float32)
    assert exported(input_ids=tokens, labels=tokens).loss.item() < 1.3 * last


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, tied=False)
    (file, *_) = sorted((tmp_path / "model").glob("*.safetensors"))
    file.unlink()
    with pytest.raises(AssertionError, match="has no"):
        fine_tune(tmp_path, "--steps", "1")
