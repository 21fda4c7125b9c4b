"""Recipes that one copies whole run as they are, but for the model, the number of steps and the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import llama
from harness.launch import ROOT, launch
from test_code_blocks import blocks_of

pytest.importorskip("datasets")
pytest.importorskip("trl")

RECIPES = {
    found[1]: block.code
    for block in blocks_of(ROOT / "docs/recipes.md")
    if block.language == "python" and (found := re.match(r"# (\w+\.py)\n", block.code))
}
ON_CPUS = {
    r'"Qwen/[\w.-]+"': '"base"',
    r"Strategy\.(\w+)\(\)": r"Strategy.\1(gpus_per_node=1)",  # two nodes, of a rank each
    "bf16=True": "bf16=True, use_cpu=True, max_steps=2",
    r"Accelerator\(": "Accelerator(cpu=True, ",
    r"torch\.cuda\.set_device\(device\)": "",
    r'torch\.device\("cuda".*': 'torch.device("cpu")',
    '"nccl"': '"gloo"',
}


def test_there_are_the_recipes_of_each_way() -> None:
    assert RECIPES.keys() == {"lora.py", "sft.py", "loop.py", "full.py"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_saves(tmp_path: Path, name: str) -> None:
    llama.make_base(llama.ADAPTED).cpu().save_pretrained(tmp_path / "base")
    llama.tokenizer().save_pretrained(tmp_path / "base")
    lines = [" ".join(map(str, range(first, first + 20))) for first in range(2, 34)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    code = RECIPES[name]
    for ours, on_cpus in ON_CPUS.items():
        code = re.sub(ours, on_cpus, code)
    (tmp_path / name).write_text(code)
    done = launch(2, tmp_path / name, on_cpu=True, working=tmp_path)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    folder, expected = (tmp_path / "out", "model") if name == "full.py" else (tmp_path / "out/adapter", "adapter_model")
    assert (folder / f"{expected}.safetensors").is_file()
