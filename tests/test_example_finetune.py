"""The fine-tuning example, end to end on four processes, and what it leaves for plain PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import llama
from harness.launch import launch
from peft import PeftModel

from fsdp_zpp import load_frozen_params


@pytest.mark.parametrize(
    ("options", "tied"), [(["--compare"], True), (["--fsdp2"], False)], ids=["fsdp1-tied-compared", "fsdp2"]
)
def test_fine_tunes_a_local_model(tmp_path: Path, options: list[str], tied: bool) -> None:
    base = llama.make_base(tied=tied)
    base.cpu().save_pretrained(tmp_path / "base")
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(byte % 128 for a in range(60) for b in range(60) for byte in f"{a} and {b}\n".encode()))
    command = ["examples/finetune_lora.py", "--gpus-per-node", "2", "--device", "cpu", "--model", tmp_path / "base"]
    command += ["--data", text, "--sequence", "32", "--batch", "2", "--steps", "24", "--lr", "1e-2"]
    command += ["--rank", "4", "--frozen", "int8:64", "--save-base", tmp_path / "quantized", *options]
    result = launch(4, *command, "--output", tmp_path / "out")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "out" / "result.json").read_text())
    *full_shard, ours = report["runs"]
    assert [run["label"] for run in full_shard] == ["full_shard"] * ("--compare" in options)
    assert ours["label"] == "LoRA on int8(64)"
    for run in report["runs"]:
        assert run["train_loss"] < 0.8 * run["losses"][0]
        assert run["label"] in result.stdout
    assert 0 < ours["traffic"]["gather"]["inter"] < ours["full_shard_traffic"]["gather"]["inter"] / 4
    for stock in full_shard:
        # The base is rounded to a part in 254 of each block's largest value.
        assert abs(report["validation_difference_percent"]) < 3
        assert ours["traffic"]["gather"]["inter"] < stock["traffic"]["gather"]["inter"] / 4
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    empty = llama.make_base(tied=tied).cpu().requires_grad_(False)
    load_frozen_params(empty, tmp_path / "quantized")
    loaded = PeftModel.from_pretrained(empty, tmp_path / "out" / "adapter")
    tokens = torch.tensor([list(b"12 and 34\n56 and 7")])
    assert loaded(input_ids=tokens, labels=tokens).loss.item() < 3
