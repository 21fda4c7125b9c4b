"""Axolotl, LLaMA-Factory and ms-swift with a strategy, each in an environment where it is installed.

None means to train in several processes on CPUs, so tests choose FSDP for them where a strategy does not.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import lora
from harness.launch import ROOT
from harness.pool import Pool, device_type, too_few_gpus
from hugging_face import logged, new_job, shard_trainer_by_own_fsdp
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from fsdp_zpp import Int8, Strategy, traffic

# Read by frameworks when they are imported, here and in workers.
os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "DISABLE_VERSION_CHECK": "1", "WANDB_DISABLED": "true"}
try:
    from axolotl.integrations.base import BasePlugin
except ImportError:
    BasePlugin = object

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
TOKENS = torch.arange(3, 35).view(2, 16)
QUESTIONS = [(f"{a} plus {b}?", f"{a + b}") for a in range(8) for b in range(8)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
COMMON: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_steps": 2,
    "report_to": "none",
    "dataloader_num_workers": 0,  # a pool's workers may have no processes of their own
}
"""Arguments of Trainer that LLaMA-Factory and ms-swift take."""
StrategyKey = dict[str, Any] | None
"""A strategy as configuration files have it; None is the framework's own FSDP2."""


def write_model(folder: Path, dtype: torch.dtype) -> None:
    """Write a small Llama and a tokenizer of bytes."""
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``model``, the same in ``bf16``, and data as each framework has it."""
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "model", torch.float32)
    write_model(folder / "bf16", torch.bfloat16)
    messages = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in QUESTIONS]
    lines = {
        "texts": [{"text": f"{question} {answer}"} for question, answer in QUESTIONS * 2],
        "messages": [{"messages": each} for each in messages],
        "pairs": [{"messages": each, "rejected_response": "none"} for each in messages],
    }
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "instruction", "query": "input"}
    ranking = {"ranking": True, "columns": columns | {"chosen": "chosen", "rejected": "rejected"}}
    files = {
        "alpaca.json": [{"instruction": q, "input": "", "output": a} for q, a in QUESTIONS],
        "ranked.json": [{"instruction": q, "input": "", "chosen": a, "rejected": "none"} for q, a in QUESTIONS],
        "dataset_info.json": {"chats": {"file_name": "alpaca.json"}, "pairs": {"file_name": "ranked.json", **ranking}},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@dataclass
class Result:
    """Losses, logits of the sharded model, and the strategy's traffic."""

    losses: list[float]
    logits: Tensor
    sent: dict[str, Any] | None


def result_of(model: nn.Module, losses: list[float], strategy: StrategyKey) -> Result:
    assert isinstance(model, FSDPModule)  # by itself accelerate would choose DDP on a CPU
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=TOKENS.to(device_type())).logits.float().cpu()
    model.train(was_training)
    return Result(losses, logits, None if strategy is None else traffic(model))


def with_own_fsdp(cls: Any) -> Any:
    """Return a class of trainers that shard by accelerate's FSDP2, which it does not choose on a CPU."""

    class OwnSharding(cls):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            shard_trainer_by_own_fsdp(self)

    return OwnSharding


class OwnShardingPlugin(BasePlugin):  # type: ignore[misc]
    """axolotl's own FSDP2, which accelerate does not choose on a CPU."""

    def register(self, cfg: Any) -> None:
        from axolotl.loaders import ModelLoader

        if device_type() == "cpu":
            ModelLoader.use_parallel_config = None

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        shard_trainer_by_own_fsdp(trainer)


AXOLOTL_OWN = {
    "plugins": [f"test_separate_frameworks.{OwnShardingPlugin.__name__}"],
    "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"},
    "fsdp_version": 2,
    "experimental_skip_move_to_device": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
NO_KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
"""axolotl sets them where the base is not quantized, and some run on GPUs alone."""


@contextmanager
def axolotl_job() -> Iterator[None]:
    """Return a context in which axolotl runs as its command would run it, and after which it keeps nothing."""
    from axolotl.integrations.base import PluginManager
    from axolotl.loaders import ModelLoader

    on_cpu = {"ACCELERATE_USE_CPU": "true"} if device_type() == "cpu" else {}
    PluginManager.get_instance().plugins.clear()
    with (
        patch.dict(os.environ, on_cpu),
        patch.object(sys, "argv", ["axolotl"]),
        patch("axolotl.utils.distributed.distributed_state", None),  # which accelerate has forgotten
        patch("axolotl.train.cleanup_distributed"),  # the workers' process group outlives a job
        patch.object(ModelLoader, "use_parallel_config", ModelLoader.use_parallel_config),  # which plugins change
    ):
        yield


def train_by_axolotl(folder: Path, output: Path, kind: str, strategy: StrategyKey, resumes: bool) -> Result:
    """Train by axolotl's own functions and its example's file; it resumes from what is there."""
    options: dict[str, Any] = {
        "base_model": str(folder / ("bf16" if kind == "bf16 adapters" else "model")),
        "datasets": [{"path": str(folder / "texts.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,  # a pool's workers may have no processes of their own
        "output_dir": str(output),
        "sequence_len": 64,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 5e-3,
        "lr_scheduler": "constant",
        "optimizer": "adamw_torch",
        "bf16": kind == "bf16 adapters",
        "fsdp_zpp": strategy,
        **NO_KERNELS,
        **({"adapter": None, "learning_rate": 2e-3} if kind == "whole" else {}),
        **(AXOLOTL_OWN if strategy is None else {}),
    }
    with axolotl_job():
        from axolotl.cli.args import TrainerCliArgs
        from axolotl.cli.config import load_cfg
        from axolotl.common.datasets import load_datasets
        from axolotl.train import train

        torch.manual_seed(0)  # axolotl makes adapters before it sets a seed
        cfg = load_cfg(str(ROOT / "examples" / "axolotl_lora.yaml"), **options)
        model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
        return result_of(model, logged(trainer, "loss"), strategy)


class Keeps(TrainerCallback):
    def __init__(self, strategy: StrategyKey) -> None:
        self.strategy, self.results = strategy, list[Result]()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self.results.append(result_of(others["model"], losses, self.strategy))


@contextmanager
def llama_factorys_own_fsdp(stage: str) -> Iterator[None]:
    """Return a context in which a stage's trainer shards by accelerate's FSDP2."""
    from fsdp_zpp.integrations.llama_factory import TRAINERS

    name = TRAINERS[stage]
    modules = [importlib.import_module(f"llamafactory.train.{stage}.{each}") for each in ("trainer", "workflow")]
    cls = vars(modules[0])[name]
    with ExitStack() as replaced:
        for module in modules:
            if vars(module).get(name) is cls:
                replaced.enter_context(patch.object(module, name, with_own_fsdp(cls)))
        yield


def train_by_llama_factory(folder: Path, output: Path, kind: str, strategy: StrategyKey, resumes: bool) -> Result:
    own: dict[str, Any] = {
        "adapters": {},
        "bf16 adapters": {"bf16": True, "model_name_or_path": str(folder / "bf16")},
        "whole": {"finetuning_type": "full", "learning_rate": 2e-3},
        "dpo": {"finetuning_type": "full", "stage": "dpo", "dataset": "pairs", "learning_rate": 1e-3},
    }[kind]
    arguments = {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_target": "all",
        "dataset": "chats",
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": 128,
        "output_dir": str(output),
        "overwrite_cache": True,
        "preprocessing_num_workers": 1,
        "use_cpu": device_type() == "cpu",
        **COMMON,
        **({"resume_from_checkpoint": str(output / "checkpoint-2")} if resumes else {}),
        **own,
    }
    from llamafactory.train import tuner

    from fsdp_zpp.integrations.llama_factory import run_exp

    keeps = Keeps(strategy)
    with patch("torch.distributed.destroy_process_group"):  # the workers' process group outlives a job
        if strategy is None:
            with llama_factorys_own_fsdp(arguments["stage"]):
                tuner.run_exp(arguments, [keeps])
        else:
            run_exp(arguments | {"fsdp_zpp": strategy}, [keeps])
    return keeps.results[0]


@contextmanager
def ms_swift_by(strategy: StrategyKey) -> Iterator[None]:
    """Return a context in which ms-swift's trainers have a strategy, or its own FSDP2."""
    from swift.trainers import TrainerFactory

    from fsdp_zpp.integrations.ms_swift import use_strategy

    original, own = vars(TrainerFactory)["get_trainer_cls"], TrainerFactory.get_trainer_cls
    try:
        if strategy is None:
            TrainerFactory.get_trainer_cls = staticmethod(lambda args: with_own_fsdp(own(args)))
        else:
            use_strategy(Strategy.from_dict(strategy))
        yield
    finally:
        TrainerFactory.get_trainer_cls = original


def train_by_ms_swift(folder: Path, output: Path, kind: str, strategy: StrategyKey, resumes: bool) -> Result:
    own: dict[str, Any] = {
        "adapters": {},
        "bf16 adapters": {"model": folder / "bf16", "torch_dtype": "bfloat16", "bf16": "true"},
        "whole": {"tuner_type": "full", "learning_rate": 2e-3},
        "dpo": {"tuner_type": "full", "learning_rate": 1e-3, "rlhf_type": "dpo", "dataset": folder / "pairs.jsonl"},
    }[kind]
    if kind == "whole" and strategy is not None:
        own["fsdp"] = json.dumps({"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}})
    arguments = {
        "model": folder / "model",
        "model_type": "llama",
        "template": "chatml",
        "dataset": folder / "messages.jsonl",
        "output_dir": output,
        "add_version": "false",
        "torch_dtype": "float32",  # for which ms-swift computes in fp16, unless told not to
        "fp16": "false",
        "bf16": "false",
        "tuner_type": "lora",
        "target_modules": "all-linear",
        "lora_dropout": 0,
        "max_length": 128,
        "warmup_ratio": 0,
        "eval_strategy": "no",
        "dataset_num_proc": 1,
        "check_model": "false",
        "use_cpu": str(device_type() == "cpu").lower(),
        **COMMON,
        **({"resume_from_checkpoint": output / "checkpoint-2"} if resumes else {}),
        **own,
    }
    from swift.pipelines import rlhf_main, sft_main
    from swift.pipelines.train.sft import SwiftSft

    trainers: list[Any] = []
    train = SwiftSft.train

    def train_and_keep(self: Any, trainer: Any) -> Any:
        trainers.append(trainer)
        return train(self, trainer)

    with ms_swift_by(strategy), patch.object(SwiftSft, "train", train_and_keep):
        (rlhf_main if kind == "dpo" else sft_main)(
            [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
        )
    (trainer,) = trainers
    if kind == "dpo" and strategy is not None:
        assert traffic(trainer.ref_model)["gather"]["inter"] > 0
    return result_of(trainer.model, logged(trainer, "loss"), strategy)


TRAIN: dict[str, tuple[str, Callable[..., Result]]] = {
    "axolotl": ("axolotl.train", train_by_axolotl),
    "LLaMA-Factory": ("llamafactory.train.tuner", train_by_llama_factory),
    "ms-swift": ("swift.trainers", train_by_ms_swift),
}
"""By framework the module without which it is not there, and a function that trains four steps of two micro-batches."""


def trained(framework: str, resumes: bool, *arguments: Any) -> Result:
    """In a worker: a training as a framework's command would run it, or its rest from the second step on."""
    with new_job(), patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}):
        return TRAIN[framework][1](*arguments, resumes)


def import_framework(framework: str) -> None:
    importlib.import_module(TRAIN[framework][0])


Workers = Callable[..., Any]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Return ``workers(function, *args)`` on four ranks of their own, since frameworks patch much where imported."""
    if reason := too_few_gpus(4):
        pytest.skip(reason)
    pool = Pool(4)
    yield lambda function, *args: pool.run(function, *args)[0]
    pool.stop()


@pytest.fixture(params=TRAIN)
def framework(request: pytest.FixtureRequest, workers: Workers) -> str:
    pytest.importorskip(TRAIN[request.param][0], exc_type=ImportError)
    workers(import_framework, request.param)  # takes so long that it is no part of a training's time
    return request.param


PLAIN = {"levels": "GGG", "gpus_per_node": 2}
ZEROPP = {"preset": "zeropp", "gpus_per_node": 2}
MIXZPP = {"preset": "mixzpp", "gpus_per_node": 2}


def files_in(output: Path, name: str) -> Path:
    """Return the folder of a training's last model: its own, or that of its last checkpoint."""
    return output if (output / name).exists() else output / "checkpoint-4"


@pytest.mark.parametrize("kind", ["adapters", "whole", "dpo"])
def test_losses_are_those_of_its_own_fsdp(
    workers: Workers, framework: str, folder: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "dpo" and framework == "axolotl":
        pytest.skip("not tried")
    own, plain, zeropp = (
        workers(trained, framework, False, folder, tmp_path / str(number), kind, strategy)
        for number, strategy in enumerate((None, PLAIN, ZEROPP))
    )
    assert own.losses[-1] < 0.97 * own.losses[0]
    assert plain.losses == pytest.approx(own.losses, rel=1e-4 if kind == "dpo" else 1e-5)  # sums in another order
    assert zeropp.losses == pytest.approx(own.losses, rel=0.1 if kind == "dpo" else 0.01)
    assert plain.sent is not None
    assert zeropp.sent is not None
    for hop in ("gather", "reduce"):
        assert 0 < 3 * zeropp.sent[hop]["inter"] < plain.sent[hop]["inter"]
    if kind == "whole":
        loaded = LlamaForCausalLM.from_pretrained(files_in(tmp_path / "1", "config.json"), dtype=torch.float32)
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, plain.logits, rtol=1e-4, atol=1e-4)


def test_adapters_on_a_quantized_bf16_base_resume_bit_for_bit_and_are_read_by_plain_peft(
    workers: Workers, framework: str, folder: Path, tmp_path: Path
) -> None:
    arguments = (folder, tmp_path, "bf16 adapters", MIXZPP)
    first = workers(trained, framework, False, *arguments)
    assert first.losses[-1] < first.losses[0]
    base = LlamaForCausalLM.from_pretrained(folder / "bf16", dtype=torch.float32)
    for parameter in base.parameters():
        if parameter.dim() == 2:
            lora.round_weight(parameter, Int8(256))
    loaded = PeftModel.from_pretrained(base, files_in(tmp_path, "adapter_config.json")).eval()
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, first.logits, rtol=0.05, atol=0.05)
    with loaded.disable_adapter():
        assert not torch.allclose(loaded(input_ids=TOKENS).logits, first.logits, rtol=0.05, atol=0.05)
    shutil.rmtree(tmp_path / "checkpoint-4")
    again = workers(trained, framework, True, *arguments)
    assert again.losses[-2:] == first.losses[-2:]
    assert torch.equal(again.logits, first.logits)
