"""Examples of accelerate, Trainer and TRL, on four processes; each is ended in its middle and goes on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from harness import llama
from harness.launch import launch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = ["--hidden", "32", "--layers", "2", "--gpus-per-node", "2"]
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def run(script: str, *options: str | Path) -> tuple[list[str], str]:
    """Return the losses that an example prints, as it prints them, and all that it prints."""
    result = launch(4, f"examples/{script}", *options, on_cpu=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "'inter': 0}" not in result.stdout
    return re.findall(r"(?:loss |'loss': ')([\d.]+)", result.stdout), result.stdout


def test_accelerate(tmp_path: Path) -> None:
    whole, _ = run("accelerate_train.py", *SIZES, "--preset", "loco", "--steps", "6", "--output", tmp_path)
    first, _ = run("accelerate_train.py", *SIZES, "--preset", "loco", "--steps", "3", "--output", tmp_path)
    again = ["--resume", tmp_path / "step-3", "--output", tmp_path / "again"]
    second, _ = run("accelerate_train.py", *SIZES, "--preset", "loco", "--steps", "6", *again)
    assert len(whole) == 6
    assert first + second == whole


@pytest.mark.parametrize("options", [[], ["--lora"]], ids=["full", "lora"])
def test_trainer(tmp_path: Path, options: list[str]) -> None:
    arguments = [*SIZES, *options, "--steps", "6", "--output", tmp_path]
    whole, _ = run("hf_trainer.py", *arguments)
    saved = (tmp_path / "final" / WEIGHTS[bool(options)]).read_bytes()
    shutil.rmtree(tmp_path / "checkpoint-6")  # as if it had been killed before
    second, _ = run("hf_trainer.py", *arguments, "--resume")
    assert len(whole) == 6
    assert second == whole[3:]
    assert (tmp_path / "final" / WEIGHTS[bool(options)]).read_bytes() == saved


def test_sft(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    llama.make_base(llama.ADAPTED).cpu().save_pretrained(tmp_path / "base")
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(100))])}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        tmp_path / "base"
    )
    texts = [{"text": " ".join(str(n % 100) for n in range(first, first + 30))} for first in range(100)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    arguments = ["--model", tmp_path / "base", "--data", tmp_path / "texts.jsonl", "--gpus-per-node", "2"]
    arguments += ["--steps", "6", "--output", tmp_path / "out"]
    whole, _ = run("trl_sft.py", *arguments)
    saved = (tmp_path / "out" / "final" / WEIGHTS[True]).read_bytes()
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    second, _ = run("trl_sft.py", *arguments, "--resume")
    assert len(whole) == 6
    assert second == whole[3:]
    assert (tmp_path / "out" / "final" / WEIGHTS[True]).read_bytes() == saved
    adapted = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out" / "final")
    tokens = torch.tensor([tokenizer.encode(texts[0]["text"]).ids])
    assert adapted(input_ids=tokens, labels=tokens).loss < llama.make_base().cpu()(tokens, labels=tokens).loss
