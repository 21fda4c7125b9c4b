"""TRL's GRPO with a vLLM server: before each generation, the server has the weights that the training has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import llama
from harness.pool import Pool, device_type
from hugging_face import new_job
from peft import LoraConfig
from test_trl import reward, texts, tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from fsdp_zpp import Int8, Strategy
from fsdp_zpp.integrations.transformers import use_strategy

datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
vllm_generation = pytest.importorskip("trl.generation.vllm_generation")

STEPS = 3


class Client:
    """TRL's client of a server, with the server: a model of transformers, which samples with what it was sent."""

    def __init__(self, base: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(base)
        self.sent: list[dict[str, Tensor]] = []
        self.generator = torch.Generator().manual_seed(0)

    def init_communicator(self, device: object) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        sent = dict(named_params)
        assert [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in sent.items()] == metadata
        loaded = self.model.load_state_dict({name: tensor.cpu() for name, tensor in sent.items()}, strict=False)
        assert not loaded.unexpected_keys
        assert loaded.missing_keys == ["lm_head.weight"] * self.model.config.tie_word_embeddings
        self.sent.append({name: tensor.cpu().clone() for name, tensor in sent.items()})

    def reset_prefix_cache(self) -> None:
        pass

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **others: Any) -> dict[str, Any]:
        completions, logprobs = [], []
        for prompt in prompts:
            for _ in range(n):
                tokens, chosen = list(prompt), []
                for _ in range(max_tokens):
                    scores = self.model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
                    tokens.append(int(torch.multinomial(scores.exp(), 1, generator=self.generator)))
                    chosen.append([scores[tokens[-1]].item()])
                completions.append(tokens[len(prompt) :])
                logprobs.append(chosen)
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


def trained(base: Path, strategy: Strategy, adapters: bool) -> tuple[list[float], int, float]:
    """In a worker: how far the server's log-probabilities are from the training's, how often this rank has sent it
    weights, and how far these have moved at least from one time to the next.
    """
    client = Client(base)
    with new_job(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "is_vllm_available", lambda: True)
        patch.setattr(vllm_generation, "VLLMClient", lambda **arguments: client)
        configuration = trl.GRPOConfig(
            output_dir=str(base / "out"),
            use_cpu=device_type() == "cpu",
            bf16=False,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=2e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=False,
            num_generations=2,
            max_completion_length=6,
            use_vllm=True,
            vllm_mode="server",
        )
        trainer = use_strategy(trl.GRPOTrainer, strategy)(
            model=LlamaForCausalLM.from_pretrained(base),
            args=configuration,
            train_dataset=datasets.Dataset.from_dict({"prompt": texts(0)}),
            processing_class=tokenizer(),
            reward_funcs=reward,
            peft_config=LoraConfig(r=4, target_modules=llama.TARGETS) if adapters else None,
        )
        trainer.train()
        key = "sampling/sampling_logp_difference/max"
        differences = [entry[key] for entry in trainer.state.log_history if key in entry]
    moved = [
        max((first[name] - last[name]).abs().max().item() for name in first)
        for first, last in zip(client.sent, client.sent[1:], strict=False)
    ]
    return differences, len(client.sent), min(moved, default=0.0)


@pytest.mark.parametrize(
    ("strategy", "adapters", "tied"),
    [
        (Strategy("IGG", gpus_per_node=2), False, True),
        (Strategy("IGG", gpus_per_node=2), True, False),
        (Strategy("IGG", gpus_per_node=2, frozen=Int8()), True, False),
    ],
    ids=["all trained", "adapters", "adapters on a quantized base"],
)
def test_the_server_has_the_weights_of_the_training(
    pool: Callable[[int], Pool], tmp_path: Path, strategy: Strategy, adapters: bool, tied: bool
) -> None:
    llama.make_base(tied=tied).cpu().save_pretrained(tmp_path)
    results = pool(4).run(trained, tmp_path, strategy, adapters)
    differences, sent, moved = results[0]
    assert sent == STEPS
    assert moved > 1e-4  # what the server had before would not do
    assert len(differences) == STEPS
    assert max(differences) < 1e-3
    assert [result[1] for result in results[1:]] == [0, 0, 0]  # rank 0 alone has a client
