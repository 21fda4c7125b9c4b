"""Fine-tuning example, end to end on four processes, and what it leaves for plain PEFT."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import llama
from harness.launch import launch
from peft import PeftModel

from fsdp_zpp import load_frozen_params


def fine_tune(folder: Path, *options: str | Path) -> tuple[list[float], dict[str, int]]:
    """Return the losses that the example prints, and the bytes that it says were sent, by kind and hop."""
    command = ["examples/finetune_lora.py", "--gpus-per-node", "2", "--model", folder / "base"]
    command += ["--data", folder / "text.txt", "--sequence", "32", "--batch", "2", "--steps", "24", "--lr", "1e-2"]
    result = launch(4, *command, "--rank", "4", "--output", folder / "out", *options, on_cpu=True)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", result.stdout, re.MULTILINE)]
    assert losses[-1] < 0.8 * losses[0]
    sent = {
        f"{kind} {hop}": int(n)
        for kind, hops in re.findall(r"'(gather|reduce)': {(.*?)}", result.stdout)
        for hop, n in re.findall(r"'(inter|intra)': (\d+)", hops)
    }
    return losses, sent


def make_base(folder: Path, tied: bool) -> None:
    """Make a model in a folder, without a tokenizer, and bytes that it knows."""
    llama.make_base(llama.ADAPTED, tied).cpu().save_pretrained(folder / "base")
    text = "".join(f"{a} and {b}\n" for a in range(60) for b in range(60))
    (folder / "text.txt").write_bytes(text.encode())


@pytest.mark.parametrize(("options", "tied"), [([], True), (["--fsdp2"], False)], ids=["fsdp1-tied", "fsdp2"])
def test_fine_tunes_a_local_model(tmp_path: Path, options: list[str], tied: bool) -> None:
    make_base(tmp_path, tied)
    _, sent = fine_tune(tmp_path, "--save-base", tmp_path / "quantized", *options)
    adapted = PeftModel.from_pretrained(llama.make_base(llama.ADAPTED, tied).cpu(), tmp_path / "out" / "adapter")
    base = sum(parameter.numel() for name, parameter in adapted.named_parameters() if "lora" not in name)
    # All that goes between nodes in all steps is less than the base once, which full precision sends in every step.
    assert 0 < sent["gather inter"] < 4 * base
    empty = llama.make_base(llama.ADAPTED, tied).cpu().requires_grad_(False)
    load_frozen_params(empty, tmp_path / "quantized")
    loaded = PeftModel.from_pretrained(empty, tmp_path / "out" / "adapter")
    tokens = torch.tensor([list(b"12 and 34\n56 and 7")])
    assert loaded(input_ids=tokens, labels=tokens).loss.item() < 3


def test_learns_as_much_as_on_the_base_as_it_is(tmp_path: Path) -> None:
    make_base(tmp_path, tied=True)
    quantized, _ = fine_tune(tmp_path)
    dense, nothing_counted = fine_tune(tmp_path, "--full-shard")
    # The base is rounded to a part in 254 of each block's largest value.
    assert quantized[-1] == pytest.approx(dense[-1], rel=0.03)
    assert nothing_counted == {}
