"""Fine-tuning examples, end to end on four processes: from files of a model to what from_pretrained and PEFT load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import llama
from harness.launch import launch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fsdp_zpp import load_frozen_params

LINES = "".join(f"{a} and {b}\n" for a in range(60) for b in range(60))


def fine_tune(script: str, folder: Path, *options: str | Path) -> tuple[list[float], str]:
    """Train the model in ``folder`` on bytes that it knows; return the losses that are printed, and all that is."""
    (folder / "text.txt").write_text(LINES)
    command = [f"examples/{script}", "--gpus-per-node", "2", "--model", folder / "model"]
    command += ["--data", folder / "text.txt", "--sequence", "32", "--batch", "2"]
    done = launch(4, *command, *options, on_cpu=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)], done.stdout


def loss_of(model: torch.nn.Module) -> float:
    tokens = torch.tensor([list(b"12 and 34\n56 and 7")])
    return model(input_ids=tokens, labels=tokens).loss.item()


# ---- all parameters


def make_model(folder: Path, tied: bool) -> dict[str, torch.Tensor]:
    """Save a model as several files; return its weights."""
    model = llama.make_base(torch.bfloat16, tied).cpu()
    model.save_pretrained(folder / "model", max_shard_size="60KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    return model.state_dict()


@pytest.mark.parametrize(("tied", "adapter"), [(True, []), (False, ["--fsdp1"])], ids=["tied", "untied-fsdp1"])
def test_what_was_read_is_what_is_exported(tmp_path: Path, adapter: list[str], tied: bool) -> None:
    weights = make_model(tmp_path, tied)
    fine_tune("finetune_full.py", tmp_path, *adapter, "--output", tmp_path / "result", "--steps", "1", "--lr", "0")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert exported.dtype == torch.bfloat16
    assert exported.config.architectures == ["LlamaForCausalLM"]
    assert exported.config.tie_word_embeddings == tied
    assert exported.state_dict().keys() == weights.keys()
    assert all(torch.equal(weights[name], value) for name, value in exported.state_dict().items())


@pytest.mark.parametrize("adapter", [[], pytest.param(["--fsdp1"], marks=pytest.mark.wide)], ids=["fsdp2", "fsdp1"])
def test_all_parameters_learn(tmp_path: Path, adapter: list[str]) -> None:
    make_model(tmp_path, tied=True)
    options = (*adapter, "--output", tmp_path / "result", "--steps", "20", "--lr", "1e-2", "--strategy", "IGG")
    (first, *_, last), _ = fine_tune("finetune_full.py", tmp_path, *options)
    assert last < 0.7 * first
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "result", dtype=torch.float32)
    assert loss_of(exported) < 1.3 * last


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, tied=False)
    (file, *_) = sorted((tmp_path / "model").glob("*.safetensors"))
    file.unlink()
    with pytest.raises(AssertionError, match="has no"):
        fine_tune("finetune_full.py", tmp_path, "--output", tmp_path / "result", "--steps", "1")


# ---- adapters


def train_adapters(folder: Path, *options: str | Path) -> tuple[list[float], int]:
    """The losses, and the bytes of gathers between nodes that the example says were sent."""
    options = ("--steps", "24", "--lr", "1e-2", "--rank", "4", "--output", folder / "out", *options)
    losses, printed = fine_tune("finetune_lora.py", folder, *options)
    assert losses[-1] < 0.8 * losses[0]
    sent = re.search(r"'gather': {.*?'inter': (\d+)", printed)
    return losses, int(sent[1]) if sent else 0


@pytest.mark.parametrize(
    ("options", "tied"),
    [(["--fsdp2"], False), pytest.param([], True, marks=pytest.mark.wide)],
    ids=["fsdp2", "fsdp1-tied"],
)
def test_adapters_learn_on_a_quantized_base_and_plain_peft_loads_them(
    tmp_path: Path, options: list[str], tied: bool
) -> None:
    llama.make_base(llama.ADAPTED, tied).cpu().save_pretrained(tmp_path / "model")
    quantized, sent = train_adapters(tmp_path, "--save-base", tmp_path / "quantized", *options)
    adapted = PeftModel.from_pretrained(llama.make_base(llama.ADAPTED, tied).cpu(), tmp_path / "out" / "adapter")
    base = sum(parameter.numel() for name, parameter in adapted.named_parameters() if "lora" not in name)
    # All that goes between nodes in all steps is less than the base once, which full precision sends in every step.
    assert 0 < sent < 4 * base
    empty = llama.make_base(llama.ADAPTED, tied).cpu().requires_grad_(False)
    load_frozen_params(empty, tmp_path / "quantized")
    assert loss_of(PeftModel.from_pretrained(empty, tmp_path / "out" / "adapter")) < 3
    if tied:
        dense, nothing_counted = train_adapters(tmp_path, "--full-shard")
        # The base is rounded to a part in 254 of each block's largest value.
        assert quantized[-1] == pytest.approx(dense[-1], rel=0.03)
        assert nothing_counted == 0
