"""Every exit of accelerate and Trainer: what is trained and what is frozen, quantized or not, is all there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from harness import llama
from harness.covering import over_each
from harness.pool import Pool, device_type
from hugging_face import new_job
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from whole_models import CELLS, STRATEGIES, check_same, check_trained, loaded, logits_of, make_model

from fsdp_zpp.integrations import accelerate, transformers

STATE_DICTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


@contextmanager
def prepared(
    kind: str, strategy: str, state_dict: str, tied: bool = False, other: bool = False
) -> Iterator[tuple[Any, Any, Any]]:
    """Return a context with an accelerator, a model and its optimizer."""
    with new_job():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type=state_dict
        )
        accelerator = Accelerator(cpu=device_type() == "cpu")
        accelerate.use_strategy(accelerator, STRATEGIES[strategy], plugin=plugin)
        model = make_model(kind, tied, other)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        yield accelerator, *accelerator.prepare(model, optimizer)


def saved_by_accelerate(folder: str, kind: str, strategy: str, tied: bool = False) -> list[Tensor]:
    """In a worker: a training that is saved in all ways; the logits after it, and after ``load_state`` of each kind."""
    logits = []
    for state_dict in STATE_DICTS:
        with prepared(kind, strategy, state_dict, tied) as (accelerator, model, optimizer):
            llama.train(model, optimizer)
            accelerator.save_state(f"{folder}/{state_dict}")
            accelerator.save_model(model, f"{folder}/save_model")
            model.save_pretrained(
                f"{folder}/save_pretrained",
                is_main_process=accelerator.is_main_process,
                save_function=accelerator.save,
                state_dict=accelerator.get_state_dict(model),
            )
            logits.append(logits_of(model))
        with prepared(kind, strategy, state_dict, tied) as (accelerator, model, _):
            accelerator.load_state(f"{folder}/{state_dict}")
            logits.append(logits_of(model))
    return logits


def make_trainer(folder: str, model: nn.Module, strategy: str, state_dict: str, **options: Any) -> Trainer:
    """Return a trainer of two steps, with a checkpoint after them."""
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(8 * 16).view(8, 16) % llama.VOCABULARY]
    arguments = TrainingArguments(
        output_dir=f"{folder}/{state_dict}",
        use_cpu=device_type() == "cpu",
        fsdp=True,
        fsdp_config={"state_dict_type": state_dict},
        max_steps=2,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        **{"save_steps": 2} | options,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    return transformers.use_strategy(trainer, STRATEGIES[strategy])


def saved_by_trainer(folder: str, kind: str, strategy: str) -> list[Tensor]:
    """In a worker: a training that is saved in all ways; the logits after it, and resumed from each kind."""
    logits = []
    for state_dict, resumed in itertools.product(STATE_DICTS, (False, True)):
        with new_job():
            trainer = make_trainer(folder, make_model(kind), strategy, state_dict)
            trainer.train(resume_from_checkpoint=resumed)
            if not resumed:
                trainer.save_model(f"{folder}/save_model")
            logits.append(logits_of(trainer.model))
    return logits


def check(logits: list[Tensor], folders: list[Path], kind: str, strategy: str) -> None:
    """Compare logits with those of the files."""
    first = logits[0]
    check_trained(first, kind)
    for again in logits[1:]:
        assert torch.equal(again, first)
    for folder in folders:
        model = loaded(folder, kind, strategy)
        check_same(logits_of(model), first)
        if kind != "lora":
            assert load_file(folder / "model.safetensors").keys() == make_model(kind).state_dict().keys()


@pytest.mark.parametrize(("kind", "strategy"), CELLS)
def test_accelerate_saves_all(pool: Callable[[int], Pool], tmp_path: Path, kind: str, strategy: str) -> None:
    logits = pool(4).run(saved_by_accelerate, str(tmp_path), kind, strategy)[0]
    if kind != "lora":  # accelerate saves no configuration
        LlamaForCausalLM(make_model(kind).config).config.save_pretrained(tmp_path / "save_model")
    check(logits, [tmp_path / "save_model", tmp_path / "save_pretrained"], kind, strategy)


@pytest.mark.parametrize(("kind", "strategy"), CELLS)
def test_trainer_saves_all(pool: Callable[[int], Pool], tmp_path: Path, kind: str, strategy: str) -> None:
    logits = pool(4).run(saved_by_trainer, str(tmp_path), kind, strategy)[0]
    check(logits, [tmp_path / "save_model", tmp_path / "FULL_STATE_DICT" / "checkpoint-2"], kind, strategy)


class Answers(TrainerCallback):
    """A callback that keeps what a model answers after each step."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def on_step_end(self, *arguments: Any, model: nn.Module, **others: Any) -> None:
        self.logits.append(logits_of(model))


def best_of_trainer(folder: str, kind: str, strategy: str, state_dict: str) -> list[Tensor]:
    """In a worker: the logits after each step of a training, of which the first is the best, and of the model then."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    with new_job():
        trainer = make_trainer(folder, make_model(kind), strategy, state_dict, **best | often)
        trainer.add_callback(answers := Answers())
        trainer.train()
        trainer.save_model(f"{folder}/best")
        return [*answers.logits, logits_of(trainer.model)]


@over_each(cell={"-".join(cell): cell for cell in CELLS}, state_dict=STATE_DICTS)
def test_trainer_saves_the_best_in_the_end(
    pool: Callable[[int], Pool], tmp_path: Path, cell: tuple[str, str], state_dict: str
) -> None:
    first, last, best = pool(4).run(best_of_trainer, str(tmp_path), *cell, state_dict)[0]
    assert torch.equal(best, first)
    assert not torch.allclose(best, last, atol=1e-3)
    check_same(logits_of(loaded(tmp_path / "best", *cell)), best)


def loaded_on_another_base(folder: str, kind: str) -> list[str]:
    """In a worker: what accelerate and Trainer say to checkpoints of what was trained on another base."""
    errors = []
    for other in (False, True):
        with prepared(kind, "nf4", STATE_DICTS[0], other=other) as (accelerator, _, _):
            if other:
                with pytest.raises(ValueError, match="another base") as error:
                    accelerator.load_state(f"{folder}/state")
                errors.append(str(error.value))
            else:
                accelerator.save_state(f"{folder}/state")
        with new_job():
            trainer = make_trainer(folder, make_model(kind, other=other), "nf4", STATE_DICTS[0])
            if other:
                with pytest.raises(ValueError, match="another base") as error:
                    trainer.train(resume_from_checkpoint=True)
                errors.append(str(error.value))
            else:
                trainer.train()
    return errors


@pytest.mark.parametrize("kind", ["lora", "partly frozen"])
def test_a_checkpoint_on_another_base_is_refused_on_every_rank(
    pool: Callable[[int], Pool], tmp_path: Path, kind: str
) -> None:
    for errors in pool(4).run(loaded_on_another_base, str(tmp_path), kind):
        for each in errors:
            assert "was saved with another base: 1 of the" in each
            assert "(model.layers.0.mlp.up_proj.weight, ...)" in each


def test_tied_quantized_weights_are_saved(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    first, *others = pool(4).run(saved_by_accelerate, str(tmp_path), "partly frozen", "nf4", True)[0]
    assert all(torch.equal(each, first) for each in others)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "save_pretrained")
    check_same(logits_of(model), first)
