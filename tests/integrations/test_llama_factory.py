"""LLaMA-Factory and its V1 with a strategy: losses, checkpoints and adapters, and what V1 may not be asked for."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness.pool import device_type
from hugging_face import new_job, shard_trainer_by_own_fsdp
from tiny_chats import TOKENS, check_adapters, check_whole, framework_workers, write_models_and_chats
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from fsdp_zpp import Strategy, traffic

os.environ["DISABLE_VERSION_CHECK"] = "1"  # which LLaMA-Factory looks at when it is imported, here and in workers
pytest.importorskip("llamafactory")

Workers = Callable[..., list[Any]]
NODES = {"gpus_per_node": 2}
COLUMNS = {"prompt": "instruction", "query": "input"}
RANKED = {"ranking": True, "columns": COLUMNS | {"chosen": "chosen", "rejected": "rejected"}}
DATASETS: dict[str, dict[str, Any]] = {
    "chats": {"file_name": "alpaca.json"},
    "pairs": {"file_name": "ranked.json", **RANKED},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model in fp32, the same in bf16, and chats."""
    folder = tmp_path_factory.mktemp("llama_factory")
    write_models_and_chats(folder)
    (folder / "dataset_info.json").write_text(json.dumps(DATASETS))
    chats = {"path": str(folder / "alpaca.json"), "source": "local", "converter": "alpaca"}
    (folder / "v1.yaml").write_text(json.dumps({"chats": chats}))  # which is YAML, too
    return folder


def import_llama_factory() -> None:
    """In a worker: import LLaMA-Factory."""
    import llamafactory.train.tuner  # noqa: F401

    import fsdp_zpp.integrations.llama_factory  # noqa: F401


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Return ``workers(function, *args)`` on four ranks."""
    yield from framework_workers(import_llama_factory)


@dataclass
class Result:
    """Results that a training leaves behind: also logits of the sharded model, and the strategy's traffic."""

    losses: list[float]
    logits: Tensor
    sent: dict[str, Any] | None


def result_of(model: nn.Module, losses: list[float], *, has_strategy: bool) -> Result:
    """Return what a training has left behind."""
    assert isinstance(model, FSDPModule)  # by itself accelerate would choose DDP on a CPU
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=TOKENS.to(device_type())).logits.float().cpu()
    model.train(was_training)
    return Result(losses, logits, traffic(model) if has_strategy else None)


@contextmanager
def llama_factory_job() -> Iterator[None]:
    """Return a context in which LLaMA-Factory runs as its command would run it, and after which it keeps nothing."""
    environment = {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", "WANDB_DISABLED": "true"}
    with (
        new_job(),
        patch.dict(os.environ, environment),
        patch("torch.distributed.destroy_process_group"),  # the workers' process group outlives a job
    ):
        yield


class Keeps(TrainerCallback):
    """Keeps what a training leaves behind."""

    def __init__(self, *, has_strategy: bool) -> None:
        self.has_strategy = has_strategy
        self.result: Result | None = None

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self.result = result_of(others["model"], losses, has_strategy=self.has_strategy)


@contextmanager
def _own_fsdp(stage: str) -> Iterator[None]:
    """Return a context in which a stage's trainer shards by accelerate's FSDP2, which it does not choose on a CPU."""
    from fsdp_zpp.integrations.llama_factory import TRAINERS

    name = TRAINERS[stage]
    modules = [importlib.import_module(f"llamafactory.train.{stage}.{each}") for each in ("trainer", "workflow")]
    cls = vars(modules[0])[name]

    class OwnSharding(cls):  # type: ignore[misc,valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            shard_trainer_by_own_fsdp(self)

    with ExitStack() as replaced:
        for module in modules:
            if vars(module).get(name) is cls:
                replaced.enter_context(patch.object(module, name, OwnSharding))
        yield


def trained(folder: Path, output: Path, **others: Any) -> Result:
    """Train the small model by LLaMA-Factory's own functions, by its own FSDP2 if there is no strategy.

    It takes four steps of two micro-batches.
    """
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
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "preprocessing_num_workers": 1,
        "dataloader_num_workers": 0,  # a pool's workers may have no processes of their own
        "use_cpu": device_type() == "cpu",
    } | others
    with llama_factory_job():
        from llamafactory.train import tuner

        from fsdp_zpp.integrations.llama_factory import run_exp

        keeps = Keeps(has_strategy="fsdp_zpp" in arguments)
        if keeps.has_strategy:
            run_exp(arguments, [keeps])
        else:
            with _own_fsdp(arguments["stage"]):
                tuner.run_exp(arguments, [keeps])
        assert keeps.result is not None
        return keeps.result


def trained_by_v1(folder: Path, output: Path, **others: Any) -> Result:
    """Train likewise by V1's own functions."""
    arguments = {
        "model": str(folder / "model"),
        "model_class": "llm",
        "peft_config": {"name": "lora", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all"},
        "dist_config": {"name": "fsdp2"},
        "train_dataset": str(folder / "v1.yaml"),
        "output_dir": str(output),
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "cutoff_len": 128,
        "learning_rate": 5e-3,
        "max_steps": 4,
        "save_steps": 2,
        "bf16": False,
        "batching_workers": 0,
    } | others
    with llama_factory_job():
        from llamafactory.v1.accelerator.interface import DistributedInterface
        from llamafactory.v1.trainers import sft_trainer
        from llamafactory.v1.utils.callbacks import LoggingCallback

        from fsdp_zpp.integrations.llama_factory import run_sft

        has_strategy = "fsdp_zpp" in arguments
        results: list[Result] = []
        losses: list[float] = []
        save = sft_trainer.SFTTrainer.save_model
        on_log = LoggingCallback.on_log

        def save_and_keep(trainer: Any) -> None:
            save(trainer)
            results.append(result_of(trainer.model, losses, has_strategy=has_strategy))

        def log_and_keep(callback: Any, args: Any, state: Any, logs: dict[str, Any], **others: Any) -> None:
            losses.append(logs["loss"])
            on_log(callback, args, state, logs, **others)

        on_cpu = patch("torch.accelerator.synchronize") if device_type() == "cpu" else patch.dict({})
        DistributedInterface._instance, DistributedInterface._initialized = None, False
        with (
            on_cpu,  # which has nothing to synchronize, and torch raises
            patch("llamafactory.v1.accelerator.interface.init_process_group"),  # the pool has one
            patch("llamafactory.v1.accelerator.interface.destroy_process_group"),
            patch.object(sft_trainer.SFTTrainer, "save_model", save_and_keep),
            patch.object(LoggingCallback, "on_log", log_and_keep),
        ):
            (run_sft if has_strategy else sft_trainer.run_sft)(arguments)
        return results[0]


TRAINED = {"V0": trained, "V1": trained_by_v1}
WHOLE: dict[str, dict[str, Any]] = {
    "V0": {"finetuning_type": "full", "learning_rate": 2e-3},
    "V1": {"peft_config": None, "learning_rate": 2e-3},
}


def run(api: str, folder: Path, output: Path, options: dict[str, Any]) -> Result:
    """In a worker: a training by one of LLaMA-Factory's two programs."""
    return TRAINED[api](folder, output, **options)


def skip_without(api: str) -> None:
    """Skip where LLaMA-Factory 0.9.5 has no V1, or its older transformers can't have a strategy without it."""
    if api == "V1":
        pytest.importorskip("llamafactory.v1.plugins.trainer_plugins.distributed.interface")
    else:
        pytest.importorskip("fsdp_zpp.integrations.transformers", exc_type=ImportError)


@pytest.mark.parametrize(
    ("api", "kind"),
    [("V0", "adapters"), ("V0", "whole"), ("V0", "pt"), ("V0", "dpo"), ("V1", "adapters"), ("V1", "whole")],
)
def test_losses_are_those_of_llama_factorys_own_fsdp(
    workers: Workers, folder: Path, tmp_path: Path, api: str, kind: str
) -> None:
    skip_without(api)
    options = {
        "adapters": {},
        "whole": WHOLE[api],
        "pt": WHOLE[api] | {"stage": "pt", "packing": False},
        "dpo": WHOLE[api] | {"stage": "dpo", "dataset": "pairs", "learning_rate": 1e-3},
    }[kind]
    own, plain, zeropp = (
        workers(run, api, folder, tmp_path / name, options | each)[0]
        for name, each in {
            "own": {},
            "plain": {"fsdp_zpp": {"levels": "GGG"} | NODES},
            "zeropp": {"fsdp_zpp": {"preset": "zeropp"} | NODES},
        }.items()
    )
    assert own.losses[-1] < 0.97 * own.losses[0]
    assert plain.losses == pytest.approx(own.losses, rel=1e-4 if kind == "dpo" else 1e-5)  # sums in another order
    assert zeropp.losses == pytest.approx(own.losses, rel=0.1 if kind == "dpo" else 0.01)
    for hop in ("gather", "reduce"):
        assert 0 < 3 * zeropp.sent[hop]["inter"] < plain.sent[hop]["inter"]
    if kind in ("whole", "pt"):
        check_whole(tmp_path / "plain", plain.logits)


def test_v1_may_load_weights_after_sharding(workers: Workers, folder: Path, tmp_path: Path) -> None:
    skip_without("V1")
    options = WHOLE["V1"] | {"fsdp_zpp": {"preset": "zeropp"} | NODES}
    first, second = (
        workers(run, "V1", folder, tmp_path, options | each)[0]
        for each in ({}, {"init_config": {"name": "init_on_meta"}})
    )
    assert second.losses == first.losses


MIXZPP: dict[str, Any] = {"bf16": True, "fsdp_zpp": {"preset": "mixzpp"} | NODES}


def test_adapters_on_a_quantized_bf16_base_are_read_by_plain_peft(
    workers: Workers, folder: Path, tmp_path: Path
) -> None:
    skip_without("V0")
    options = MIXZPP | {"model_name_or_path": str(folder / "bf16")}
    first = workers(run, "V0", folder, tmp_path, options)[0]
    assert first.losses[-1] < first.losses[0]
    check_adapters(tmp_path, folder / "bf16", first.logits)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resume = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    resumed = workers(run, "V0", folder, tmp_path, options | resume)[0]
    assert resumed.losses == first.losses
    assert torch.equal(resumed.logits, first.logits)


@pytest.mark.parametrize("replicas", [1, 2])
def test_adapters_of_v1_on_a_quantized_bf16_base_are_read_by_plain_peft(
    workers: Workers, folder: Path, tmp_path: Path, replicas: int
) -> None:
    skip_without("V1")
    options = MIXZPP | {"model": str(folder / "bf16"), "mp_replicate_size": replicas, "save_ckpt_as_hf": True}
    first = workers(run, "V1", folder, tmp_path, options)[0]
    assert first.losses[-1] < first.losses[0]
    for files in (tmp_path, tmp_path / "checkpoint-4" / "hf_model"):
        check_adapters(files, folder / "bf16", first.logits)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = workers(run, "V1", folder, tmp_path, options | {"resume_from_checkpoint": "auto"})[0]
    assert resumed.losses == first.losses[2:]
    assert torch.equal(resumed.logits, first.logits)


REFUSED_BY_V1: list[tuple[dict[str, Any], str]] = [
    ({"dist_config": {"name": "deepspeed"}}, "dist_config.name: 'deepspeed' .* takes the place of fsdp2"),
    ({"cp_size": 2}, "cp_size: 2 .* not been tried"),
    ({"quant_config": {"name": "bnb"}}, r"quant_config: .* not been tried .* \{preset: mixzpp, frozen: nf4\}"),
    ({"init_config": {"name": "init_on_meta"}}, "init_config: 'init_on_meta' .* or frozen"),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED_BY_V1, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_conflicts_are_refused_by_v1s_key(options: dict[str, Any], message: str) -> None:
    skip_without("V1")
    from fsdp_zpp.integrations._llama_factory_v1 import check_arguments

    check_arguments({"init_config": {"name": "init_on_default"}}, Strategy.mixzpp())
    with pytest.raises(ValueError, match=message):
        check_arguments(options, Strategy.mixzpp())
