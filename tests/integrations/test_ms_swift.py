"""ms-swift with a strategy: its losses, checkpoints and adapters, and what its arguments may not ask for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness.pool import device_type
from hugging_face import logged, new_job, shard_trainer_by_own_fsdp
from tiny_chats import TOKENS, check_adapters, check_whole, framework_workers, write_models_and_chats
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Strategy, traffic

pytest.importorskip("swift.trainers")

Workers = Callable[..., list[Any]]
OWN = None
"""In place of a strategy: ms-swift's own FSDP2, which accelerate does not choose on a CPU."""
PLAIN = Strategy("GGG", gpus_per_node=2)
FULL: dict[str, Any] = {"tuner_type": "full", "learning_rate": 2e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model in fp32, the same in bf16, and chats."""
    folder = tmp_path_factory.mktemp("ms_swift")
    write_models_and_chats(folder)
    return folder


def import_ms_swift() -> None:
    """In a worker: import ms-swift."""
    import swift.pipelines.train.rlhf
    import swift.pipelines.train.sft
    import swift.rlhf_trainers
    import swift.trainers  # noqa: F401

    import fsdp_zpp.integrations.ms_swift  # noqa: F401


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Return ``workers(function, *args)`` on four ranks."""
    yield from framework_workers(import_ms_swift)


def arguments_for(folder: Path, output: Path, **others: Any) -> list[str]:
    """Return the command line for the small model: four steps of two micro-batches."""
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
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "no",
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,  # a pool's workers may have no processes of their own
        "report_to": "none",
        "check_model": "false",
        "use_cpu": str(device_type() == "cpu").lower(),
    }
    return [text for name, value in (arguments | others).items() for text in (f"--{name}", str(value))]


@contextmanager
def ms_swift_job(strategy: Strategy | None) -> Iterator[None]:
    """Return a context in which ms-swift runs as its command would run it, and after which it keeps nothing."""
    from swift.trainers import TrainerFactory

    from fsdp_zpp.integrations.ms_swift import use_strategy

    original = vars(TrainerFactory)["get_trainer_cls"]
    with new_job(), patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}):
        try:
            if strategy is None:
                TrainerFactory.get_trainer_cls = staticmethod(_with_own_fsdp(TrainerFactory.get_trainer_cls))
            else:
                use_strategy(strategy)
            yield
        finally:
            TrainerFactory.get_trainer_cls = original


def _with_own_fsdp(get_trainer_cls: Any) -> Any:
    def get(args: Any) -> type:
        class OwnSharding(get_trainer_cls(args)):
            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                shard_trainer_by_own_fsdp(self)

        return OwnSharding

    return get


@dataclass
class Result:
    """Results that a training leaves behind: also logits of the sharded model, and the strategy's traffic."""

    losses: list[float]
    logits: Tensor
    sent: dict[str, Any] | None


def trained(arguments: list[str], strategy: Strategy | None) -> Result:
    """In a worker: a training by ms-swift's own functions."""
    with ms_swift_job(strategy):
        from swift.pipelines import rlhf_main, sft_main
        from swift.pipelines.train.sft import SwiftSft

        trainers: list[Any] = []
        train = SwiftSft.train

        def train_and_keep(self: Any, trainer: Any) -> Any:
            trainers.append(trainer)
            return train(self, trainer)

        with patch.object(SwiftSft, "train", train_and_keep):
            (rlhf_main if "--rlhf_type" in arguments else sft_main)(arguments)
        (trainer,) = trainers
        model = trainer.model
        assert isinstance(model, FSDPModule)  # by itself accelerate would choose DDP on a CPU
        with torch.no_grad():
            logits = model(input_ids=TOKENS.to(trainer.args.device)).logits.float().cpu()
        reference = getattr(trainer, "ref_model", None)
        if reference is not None and strategy is not None:
            assert traffic(reference)["gather"]["inter"] > 0
        return Result(logged(trainer, "loss"), logits, None if strategy is None else traffic(model))


@pytest.mark.parametrize("kind", ["adapters", "whole"])
def test_losses_are_those_of_ms_swifts_own_fsdp(workers: Workers, folder: Path, tmp_path: Path, kind: str) -> None:
    options = FULL if kind == "whole" else {}
    own, plain, zeropp = (
        workers(trained, arguments_for(folder, tmp_path / name, **options), strategy)[0]
        for name, strategy in {"own": OWN, "plain": PLAIN, "zeropp": Strategy.zeropp(gpus_per_node=2)}.items()
    )
    assert own.losses[-1] < 0.97 * own.losses[0]
    assert plain.losses == pytest.approx(own.losses, rel=1e-5)  # sums in another order
    assert zeropp.losses == pytest.approx(own.losses, rel=0.01)
    torch.testing.assert_close(plain.logits, own.logits, rtol=1e-3, atol=1e-3)
    for hop in ("gather", "reduce"):
        assert 0 < 3 * zeropp.sent[hop]["inter"] < plain.sent[hop]["inter"]


def test_adapters_on_a_quantized_bf16_base_are_read_by_plain_peft(
    workers: Workers, folder: Path, tmp_path: Path
) -> None:
    arguments = arguments_for(folder, tmp_path, model=folder / "bf16", torch_dtype="bfloat16", bf16="true")
    mixzpp = Strategy.mixzpp(gpus_per_node=2)
    first = workers(trained, arguments, mixzpp)[0]
    assert first.losses[-1] < first.losses[0]
    check_adapters(tmp_path / "checkpoint-4", folder / "bf16", first.logits)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = workers(trained, [*arguments, "--resume_from_checkpoint", str(tmp_path / "checkpoint-2")], mixzpp)[0]
    assert resumed.losses == first.losses
    assert torch.equal(resumed.logits, first.logits)


def test_a_whole_model_is_read_by_from_pretrained(workers: Workers, folder: Path, tmp_path: Path) -> None:
    whole = {"fsdp": json.dumps({"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}})}
    # Without a codec of weights, or the model would compute with weights that differ from those in files.
    strategy = Strategy.zeropp(gpus_per_node=2, weights=None)
    first = workers(trained, arguments_for(folder, tmp_path, **FULL, **whole), strategy)[0]
    check_whole(tmp_path / "checkpoint-4", first.logits)


def test_dpo_shards_its_reference_by_the_strategy(workers: Workers, folder: Path, tmp_path: Path) -> None:
    options = FULL | {"rlhf_type": "dpo", "dataset": folder / "pairs.jsonl", "learning_rate": 1e-3}
    own, plain = (
        workers(trained, arguments_for(folder, tmp_path / name, **options), strategy)[0]
        for name, strategy in {"own": OWN, "plain": PLAIN}.items()
    )
    assert own.losses[-1] < own.losses[0]
    assert plain.losses == pytest.approx(own.losses, rel=1e-4)


ARGUMENTS = {"tuner_backend": "peft", "sequence_parallel_size": 1, "optimizer": None, "task_type": "causal_lm"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"deepspeed": "zero3"}, "deepspeed: 'zero3' .* a strategy is for torch's FSDP"),
    ({"quant_method": "bnb"}, r"quant_method: 'bnb' .* not been tried .* Strategy.mixzpp\(frozen=NF4\(\)\)"),
    ({"use_swift_lora": True}, "use_swift_lora: True .* PEFT's adapters alone"),
    ({"use_ray": True}, "use_ray: True .* NPROC_PER_NODE"),
    ({"tuner_backend": "unsloth"}, "tuner_backend: 'unsloth' .* one process"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size: 2 .* not been tried"),
    ({"optimizer": "muon"}, "optimizer: 'muon' .* whole matrices"),
    ({"rlhf_type": "grpo"}, "rlhf_type: 'grpo' .* only causal_lm, dpo have"),
    ({"task_type": "embedding"}, "rlhf_type: 'embedding' .* only causal_lm, dpo have"),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_conflicts_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    from fsdp_zpp.integrations.ms_swift import check_arguments

    check_arguments(SimpleNamespace(**ARGUMENTS))
    with pytest.raises(ValueError, match=message):
        check_arguments(SimpleNamespace(**ARGUMENTS | options))
