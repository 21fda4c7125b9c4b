"""A small Llama with a tokenizer of bytes, and chats, for frameworks that read both from files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
TOKENS = torch.arange(3, 35).view(2, 16)
QUESTIONS = [(f"{a} plus {b}?", f"{a + b}") for a in range(8) for b in range(8)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


def write_model(
    folder: Path, dtype: torch.dtype = torch.float32, positions: int = 128, chat_template: str | None = TEMPLATE
) -> None:
    """Write the model, for sequences of ``positions`` tokens, and its tokenizer."""
    names = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def write_chats(folder: Path) -> None:
    """Write the chats as OpenAI has them and as Alpaca has them, and pairs for DPO of both kinds."""
    messages = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in QUESTIONS]
    alpaca = [{"instruction": q, "input": "", "output": a} for q, a in QUESTIONS]
    pairs = [{"messages": each, "rejected_response": "none"} for each in messages]
    ranked = [{"instruction": q, "input": "", "chosen": a, "rejected": "none"} for q, a in QUESTIONS]
    for name, rows in {"messages": [{"messages": each} for each in messages], "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, entries in {"alpaca": alpaca, "ranked": ranked}.items():
        (folder / f"{name}.json").write_text(json.dumps(entries))


def write_models_and_chats(folder: Path) -> tuple[Path, Path]:
    """Write ``model`` and the chats into ``folder``, and with weights in bf16 into ``bf16`` there; return both."""
    folders = folder, folder / "bf16"
    for each, dtype in zip(folders, (torch.float32, torch.bfloat16), strict=True):
        write_model(each / "model", dtype)
        write_chats(each)
    return folders
