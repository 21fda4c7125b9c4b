"""TRL's trainers with a reference model: both models are sharded by the strategy, and training is as with DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import llama
from harness.pool import Pool, device_type
from hugging_face import new_job
from tokenizers import Tokenizer, models as token_models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.integrations.transformers import use_strategy

datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")

STEPS = 4
HPZ = Strategy("IGG", gpus_per_node=2)
"""Strategy that keeps weights from one forward to the next, and rounds nothing."""
WORDS = ["<pad>", "<eos>", *map(str, range(2, llama.VOCABULARY))]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of numbers."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(token_models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def texts(seed: int, length: int = 8) -> list[str]:
    """Return some texts of numbers."""
    numbers = torch.randint(2, llama.VOCABULARY, (32, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(map(str, row.tolist())) for row in numbers]


def make(kind: str, base: Path, strategy: Strategy | None, sync: bool) -> Any:
    """Return a trainer of TRL with a reference, with a strategy or without."""
    cls = {"dpo": trl.DPOTrainer, "kto": trl.KTOTrainer, "grpo": trl.GRPOTrainer}[kind]
    configuration = {"dpo": trl.DPOConfig, "kto": trl.KTOConfig, "grpo": trl.GRPOConfig}[kind]
    options: dict[str, Any] = {
        "output_dir": str(base / "out"),
        "use_cpu": device_type() == "cpu",
        "bf16": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    if sync:
        options |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    prompts = {"prompt": texts(0)}
    if kind == "dpo":
        data = prompts | {"chosen": texts(1), "rejected": texts(2)}
    elif kind == "kto":
        data = prompts | {"completion": texts(1), "label": [number % 2 == 0 for number in range(32)]}
    else:
        data = prompts
        options |= {"beta": 0.1, "num_generations": 2, "max_completion_length": 6}
    model, reference = (LlamaForCausalLM.from_pretrained(base) for _ in range(2))
    judges: dict[str, Any] = {"reward_funcs": reward} if kind == "grpo" else {"ref_model": reference}
    if strategy is not None:
        cls = use_strategy(cls, strategy)
    return cls(
        model=model,  # from where GRPO takes its reference, too
        args=configuration(**options),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(),
        **judges,
    )


def reward(completions: list[str], **others: Any) -> list[float]:
    """Reward large numbers."""
    return [sum(float(word) for word in text.split() if word.isdigit()) / 500 for text in completions]


def trained(kind: str, base: Path, strategy: Strategy | None, sync: bool) -> tuple[list[float], int, int]:
    """In a worker: the losses of a training, and the units of both models."""
    with new_job():
        trainer = make(kind, base, strategy, sync)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        models = (trainer.model, trainer.ref_model)
        first, second = (sum(isinstance(module, FSDPModule) for module in model.modules()) for model in models)
        if strategy is not None:
            assert all(traffic(model)["gather"]["inter"] for model in models)
        return losses, first, second


@pytest.mark.parametrize(("kind", "sync"), [("dpo", False), ("dpo", True), ("kto", False), ("grpo", False)])
def test_losses_are_those_of_ddp(pool: Callable[[int], Pool], tmp_path: Path, kind: str, sync: bool) -> None:
    llama.make_base().save_pretrained(tmp_path)
    (expected, *_), (losses, *units) = (
        pool(4).run(trained, kind, tmp_path, strategy, sync)[0] for strategy in (None, HPZ)
    )
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert units == [3, 3]
