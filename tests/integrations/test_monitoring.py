"""What monitors log in transformers' Trainer, in Lightning's, and in torchtitan: the bytes that traffic() counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torchtitan_on_cpu
from harness import llama
from harness.pool import Pool, device_type
from hugging_face import new_job
from lightning_runs import Outcome, Run, train_by_trainer
from lightning_ways import TRAINER_FSDP1, TRAINER_FSDP2, Way, environment
from torchtitan_or_skip import torchtitan_or_skip
from trainer_training import STEPS, make_trainer
from transformers import TrainerCallback

from fsdp_zpp import Strategy
from fsdp_zpp.integrations.lightning.monitoring import MonitorCallback as LightningCallback
from fsdp_zpp.integrations.transformers import MonitorCallback, use_strategy

STRATEGY = Strategy("GGG", gpus_per_node=2)
INTER, SHARE = "fsdp_zpp/weights/inter/bytes", "fsdp_zpp/inter/share"


class Reporter(TrainerCallback):
    """Keeps what those who report to TensorBoard and the like are given."""

    def __init__(self) -> None:
        self.reported: list[dict[str, float]] = []

    def on_log(self, *arguments: Any, **others: Any) -> None:
        self.reported.append(dict(others["logs"]))


def reported(folder: str) -> list[dict[str, float]]:
    """In a worker: what is reported in a training by Trainer."""
    with new_job():
        trainer = use_strategy(make_trainer(folder, llama.make_base(), eval_strategy="no"), STRATEGY)
        reporter = Reporter()
        trainer.add_callback(reporter)
        trainer.add_callback(MonitorCallback(trainer))
        trainer.train()
        return [logs for logs in reporter.reported if "loss" in logs]


def trained_again(folder: str) -> bool:
    """In a worker: whether a Trainer's callback reports a training after one that has failed."""
    with new_job():
        trainer = use_strategy(make_trainer(folder, llama.make_base(), eval_strategy="no"), STRATEGY)
        reporter, failing = Reporter(), TrainerCallback()
        failing.on_step_end = Mock(side_effect=RuntimeError("failed"))  # type: ignore[method-assign]
        for callback in (reporter, MonitorCallback(trainer), failing):
            trainer.add_callback(callback)
        with pytest.raises(RuntimeError, match="failed"):
            trainer.train()
        trainer.remove_callback(failing)
        trainer.train()
        return any(INTER in logs for logs in reporter.reported)


def test_trainer_measures_again_after_a_failure(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    assert all(pool(4).run(trained_again, str(tmp_path)))


def test_trainer_reports_each_step(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    logs = pool(4).run(reported, str(tmp_path))[0]
    assert [each["fsdp_zpp/step"] for each in logs] == list(range(1, STEPS + 1))
    # Without codecs and with all gradients reduced at the end, as FULL_SHARD; its scopes reduce every micro-batch.
    assert all(each[INTER] > 0 and each[SHARE] >= 1 for each in logs)


def logged(way: Way) -> list[dict[str, float]]:
    """In a worker: what a LightningModule has logged after each step of two micro-batches."""
    found: list[dict[str, float]] = []

    class Kept(LightningCallback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
            before = self._done
            super().on_train_batch_end(trainer, pl_module, *others)
            if self._done != before:
                found.append({name: float(figure) for name, figure in trainer.callback_metrics.items()})

    with environment():
        # The place of another callback, which a run without checkpoints leaves empty.
        train_by_trainer(Run(way, STRATEGY, save_to=Path()), Outcome(), Kept())  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("way", [TRAINER_FSDP1, TRAINER_FSDP2], ids=str)
def test_lightning_logs_each_step(pool: Callable[[int], Pool], way: Way) -> None:
    for steps in pool(4).run(logged, way):
        numbers = [figures.get("fsdp_zpp/step", 0) for figures in steps]
        if device_type() == "cpu":
            assert numbers == [1, 2, 3]
        else:  # which may have yet to complete a step when it ends for the host; the latest one is logged again
            assert numbers[-1] > 0
            assert numbers == sorted(numbers)
            assert all(number <= own for own, number in enumerate(numbers, start=1))
        assert all(figures[INTER] > 0 and figures[SHARE] >= 1 for figures in steps if INTER in figures)


def test_torchtitan_logs_the_step_before(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    torchtitan_or_skip()
    options = ["--parallelism.strategy", '{"levels": "GGG", "gpus_per_node": 2}', "--parallelism.monitor"]
    run = pool(4).run(torchtitan_on_cpu.call, "train", "strategy", tmp_path, *options)[0]
    assert run.metrics["fsdp_zpp/step"] == 3
    assert run.metrics[INTER] == run.traffic[-1]["gather"]["inter"] - run.traffic[-2]["gather"]["inter"] > 0


def test_torchtitan_saves_a_seed_checkpoint_without(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    torchtitan_or_skip()
    options = ["--parallelism.strategy", '{"levels": "GGG", "gpus_per_node": 2}', "--parallelism.monitor"]
    options += ["--checkpoint.enable", "--checkpoint.interval", "100"]
    assert "model" in pool(1).run(torchtitan_on_cpu.call, "seed_checkpoint", tmp_path, *options)[0]


def test_torchtitan_monitors_strategies_alone(pool: Callable[[int], Pool]) -> None:
    torchtitan_or_skip()
    refused = pool(4).run(torchtitan_on_cpu.call, "refusal", "strategy", "--parallelism.monitor")[0]
    words = " ".join(refused.replace("│", " ").split())  # in a box, with lines of its own
    assert "parallelism.monitor measures what a strategy sends; set parallelism.strategy, too" in words
