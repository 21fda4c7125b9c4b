"""TRL's trainers with a strategy: with a reference model, with a vLLM server, and the example of fine-tuning."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import llama
from harness.launch import printed_by
from harness.pool import Pools, device_type
from hugging_face import logged, new_job
from peft import LoraConfig
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM

from fsdp_zpp import Int8, Strategy, traffic
from fsdp_zpp.integrations.transformers import use_strategy

datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")

HPZ = Strategy("IGG", gpus_per_node=2)
"""Strategy that keeps weights from one forward to the next, and rounds nothing."""


def texts(seed: int, length: int = 8) -> list[str]:
    numbers = torch.randint(2, llama.VOCABULARY, (32, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(map(str, row.tolist())) for row in numbers]


def reward(completions: list[str], **others: Any) -> list[float]:
    return [sum(float(word) for word in text.split() if word.isdigit()) / 500 for text in completions]


def make(kind: str, base: Path, strategy: Strategy | None, data: dict[str, Any], **options: Any) -> Any:
    """Return a trainer of TRL on some data; of its own arguments some are the trainer's, and others configure it."""
    cls, configuration = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    own = {
        name: options.pop(name)
        for name in ("ref_model", "reward_funcs", "peft_config", "eval_dataset")
        if name in options
    }
    configured = configuration(
        **{
            "output_dir": str(base / "out"),
            "use_cpu": device_type() == "cpu",
            "bf16": False,
            "per_device_train_batch_size": 2,
            "learning_rate": 2e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "gradient_checkpointing": False,
        }
        | options
    )
    return (cls if strategy is None else use_strategy(cls, strategy))(
        model=LlamaForCausalLM.from_pretrained(base),  # from where GRPO takes its reference, too
        args=configured,
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=llama.tokenizer(),
        **own,
    )


GRPO: dict[str, Any] = {"reward_funcs": reward, "num_generations": 2, "max_completion_length": 6}
SYNCHRONIZED: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}


def trained(kind: str, base: Path, strategy: Strategy | None) -> list[float]:
    """In a worker: the losses of a training and its evaluations; a strategy shards both models."""
    with new_job():
        if kind == "GRPO":
            trainer = make(kind, base, strategy, {"prompt": texts(0)}, max_steps=3, beta=0.1, **GRPO)
        else:
            data = {"prompt": texts(0), "chosen": texts(1), "rejected": texts(2)}
            reference = LlamaForCausalLM.from_pretrained(base)
            how = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": datasets.Dataset.from_dict(data)}
            trainer = make(kind, base, strategy, data, max_steps=3, ref_model=reference, **how, **SYNCHRONIZED)
        trainer.train()
        for model in () if strategy is None else (trainer.model, trainer.ref_model):
            assert traffic(model)["gather"]["inter"]
            assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 3
        return logged(trainer, "loss") + logged(trainer, "eval_loss")


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_losses_with_a_reference_model_are_those_of_ddp(pool: Pools, tmp_path: Path, kind: str) -> None:
    llama.make_base().save_pretrained(tmp_path)
    expected, losses = (pool(4).run(trained, kind, tmp_path, strategy)[0] for strategy in (None, HPZ))
    assert expected[2] != pytest.approx(expected[0], rel=1e-3)
    assert losses == pytest.approx(expected, rel=1e-3)


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


def trained_with_a_server(
    base: Path, strategy: Strategy, adapters: bool
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """In a worker: how far the server's log-probabilities are from the training's, and all weights that it was sent."""
    vllm_generation = pytest.importorskip("trl.generation.vllm_generation")
    client = Client(base)
    server = GRPO | {"use_vllm": True, "vllm_mode": "server", "learning_rate": 2e-2, "max_steps": 3}
    lora = LoraConfig(r=4, target_modules=llama.TARGETS) if adapters else None
    with new_job(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "is_vllm_available", lambda: True)
        patch.setattr(vllm_generation, "VLLMClient", lambda **arguments: client)
        trainer = make("GRPO", base, strategy, {"prompt": texts(0)}, **server, peft_config=lora)
        trainer.train()
        return logged(trainer, "sampling/sampling_logp_difference/max"), client.sent


@pytest.mark.parametrize(
    ("strategy", "adapters", "tied"),
    [(HPZ, False, True), (Strategy("IGG", gpus_per_node=2, frozen=Int8()), True, False)],
    ids=["all trained", "adapters on a quantized base"],
)
def test_the_server_has_the_weights_of_the_training_before_each_generation(
    pool: Pools, tmp_path: Path, strategy: Strategy, adapters: bool, tied: bool
) -> None:
    pytest.importorskip("trl.generation.vllm_generation")
    llama.make_base(tied=tied).cpu().save_pretrained(tmp_path)
    results = pool(4).run(trained_with_a_server, tmp_path, strategy, adapters)
    differences, sent = results[0]
    assert len(sent) == 3
    for first, last in pairwise(sent):  # what the server had before would not do
        assert max((first[name] - last[name]).abs().max().item() for name in first) > 1e-4
    assert len(differences) == 3
    assert max(differences) < 1e-3
    assert [sent for _, sent in results[1:]] == [[], [], []]  # rank 0 alone has a client


def run_example(arguments: list[str]) -> str:
    with new_job():
        return printed_by("examples/trl_sft.py", arguments)


def test_the_example_goes_on(pool: Pools, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    llama.make_base(llama.ADAPTED).cpu().save_pretrained(base)
    llama.tokenizer().save_pretrained(base)
    lines = [" ".join(str(n % 100 + 2) for n in range(first, first + 30)) for first in range(100)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    arguments = ["--model", str(base), "--data", str(tmp_path / "texts.jsonl"), "--output", str(out)]
    arguments += ["--gpus-per-node", "2", "--steps", "4"]
    adapters = out / "final" / "adapter_model.safetensors"
    whole, saved = losses_in(pool(4).run(run_example, arguments)[0]), adapters.read_bytes()
    shutil.rmtree(out / "checkpoint-4")  # as if it had been killed before
    second = losses_in(pool(4).run(run_example, [*arguments, "--resume"])[0])
    assert len(whole) == 4
    assert second == whole[2:]
    assert adapters.read_bytes() == saved


def losses_in(printed: str) -> list[str]:
    assert "'inter': 0}" not in printed
    return re.findall(r"'loss': '([\d.]+)", printed)
