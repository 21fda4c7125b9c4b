"""Frameworks that read all from files: a small Llama with a tokenizer of bytes, chats, and ranks that train on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import lora
from harness.pool import Pool, too_few_gpus
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fsdp_zpp import Int8

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
TOKENS = torch.arange(3, 35).view(2, 16)
QUESTIONS = [(f"{a} plus {b}?", f"{a + b}") for a in range(8) for b in range(8)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


def framework_workers(import_framework: Callable[[], None]) -> Iterator[Callable[..., list[Any]]]:
    """Yield ``workers(function, *args)`` on four ranks of their own, since frameworks patch much where imported."""
    if reason := too_few_gpus(4):
        pytest.skip(reason)
    pool = Pool(4)
    pool.run(import_framework)  # which takes so long that it is no part of a training's time
    yield pool.run
    pool.stop()


def write_model(folder: Path, dtype: torch.dtype) -> None:
    """Write the model and its tokenizer."""
    names = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4}
    numbers = {"vocab_size": len(names), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(**sizes, **numbers, max_position_embeddings=128)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def write_models_and_chats(folder: Path) -> None:
    """Write ``model`` and ``bf16``, chats as OpenAI and as Alpaca has them, and pairs for DPO of both kinds."""
    write_model(folder / "model", torch.float32)
    write_model(folder / "bf16", torch.bfloat16)
    messages = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in QUESTIONS]
    pairs = [{"messages": each, "rejected_response": "none"} for each in messages]
    for name, rows in {"messages": [{"messages": each} for each in messages], "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alpaca = [{"instruction": q, "input": "", "output": a} for q, a in QUESTIONS]
    ranked = [{"instruction": q, "input": "", "chosen": a, "rejected": "none"} for q, a in QUESTIONS]
    for name, entries in {"alpaca": alpaca, "ranked": ranked}.items():
        (folder / f"{name}.json").write_text(json.dumps(entries))


def check_adapters(files: Path, base: Path, logits: Tensor) -> None:
    """Check that plain PEFT reads adapters that were trained in bf16 on a base that mixzpp has quantized."""
    plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    for parameter in plain.parameters():
        if parameter.dim() == 2:
            lora.round_weight(parameter, Int8(256))
    loaded = PeftModel.from_pretrained(plain, files).eval()
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, logits, rtol=0.05, atol=0.05)
    with loaded.disable_adapter():
        assert not torch.allclose(loaded(input_ids=TOKENS).logits, logits, rtol=0.05, atol=0.05)


def check_whole(files: Path, logits: Tensor) -> None:
    """Check that ``from_pretrained`` reads a whole model."""
    loaded = LlamaForCausalLM.from_pretrained(files, dtype=torch.float32)
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
