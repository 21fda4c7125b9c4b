"""Every exit of accelerate, Trainer and Lightning: all is there, trained or frozen, quantized or not."""

from __future__ import annotations

import itertools
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from harness import llama
from harness.covering import over_each
from harness.pool import Pool, device_type
from hugging_face import fsdp2_plugin, make_trainer, new_job
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ways import ACCELERATOR, Way, environment, let_gather, make_strategy, ranks, shard
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM, Trainer, TrainerCallback
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_zpp import NF4, Int8, Strategy, save_adapter
from fsdp_zpp.integrations import accelerate, transformers

Pools = Callable[[int], Pool]
# Without a codec of weights, or the sharded model would compute with weights that differ from those in files.
STRATEGIES = {
    "none": Strategy.zero3(gpus_per_node=2),
    "mixzpp": Strategy.mixzpp(weights=None, frozen=Int8(64), gpus_per_node=2),
    "nf4": Strategy.mixzpp(weights=None, frozen=NF4(64), gpus_per_node=2),
}
CELLS = {"lora": ("lora", "mixzpp"), "partly frozen": ("partly frozen", "nf4")}
"""What is trained, and the strategy."""
OTHER_CELLS = [
    ("full", "none"),
    ("lora", "none"),
    ("lora", "nf4"),
    ("partly frozen", "none"),
    ("partly frozen", "mixzpp"),
]
STATE_DICTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
SAVED = {f"{fsdp}, {form}": (fsdp, form == "full") for fsdp in ("fsdp1", "fsdp2") for form in ("sharded", "full")}
"""Lightning's FSDP, and whether its checkpoints are files."""
Answers = tuple[list[Tensor], list[str]]
"""Logits after a training and of all that goes on from what it has saved; and what is said to another base."""

over_cells = pytest.mark.parametrize(
    ("kind", "strategy"), [*CELLS.values(), *(pytest.param(*cell, marks=pytest.mark.wide) for cell in OTHER_CELLS)]
)


def over_saved(*chosen: str) -> pytest.MarkDecorator:
    """Parametrize with all of SAVED and CELLS, of which only those that are chosen are not wide."""
    rows = {f"{saved}, {cell}": (SAVED[saved], CELLS[cell]) for saved in SAVED for cell in CELLS}
    marks = {name: [] if name in chosen else [pytest.mark.wide] for name in rows}
    return pytest.mark.parametrize(
        ("saved", "cell"), [pytest.param(*row, id=name, marks=marks[name]) for name, row in rows.items()]
    )


def make_model(kind: str, tied: bool = False, other: bool = False, base: LlamaForCausalLM | None = None) -> Any:
    """Make a Llama of which all is trained, adapters are, or only the last layer and the norm; or another base."""
    model = llama.make_base(tied=tied) if base is None else base
    if other:
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.01)
    if kind == "lora":
        return llama.adapt(model, {"default": "lora"})
    if kind == "partly frozen":
        model.requires_grad_(False)
        for module in (model.model.layers[-1], model.model.norm):
            module.requires_grad_(True)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def logits_of(model: nn.Module) -> Tensor:
    """Return what a model answers, on the CPU."""
    tokens = torch.arange(1, 13, device=next(model.parameters()).device).view(1, -1)
    with torch.no_grad():
        return model(input_ids=tokens).logits.cpu()


def rounded_base(strategy: str) -> LlamaForCausalLM:
    """In one process: the base as a strategy leaves it."""
    frozen = STRATEGIES[strategy].frozen
    return (llama.make_base() if frozen is None else llama.rounded_base(frozen)).cpu()


def loaded(folder: Path, kind: str, strategy: str) -> nn.Module:
    """In one process: what ``from_pretrained`` makes of files, of adapters on what the base was rounded to."""
    if kind != "lora":
        return LlamaForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(rounded_base(strategy), folder)


def check_same(logits: Tensor, trained: Tensor) -> None:
    """Check that a model of files in one process answers as the sharded one, which sums in another order."""
    torch.testing.assert_close(logits, trained, rtol=1e-4, atol=1e-4)


def check_answers(by_rank: list[Answers], kind: str, strategy: str, tied: bool = False) -> Tensor:
    """Check that all that goes on answers as the model did, and that another base is refused; return the logits."""
    first, *others = by_rank[0][0]
    # Or files could hold anything.
    assert not torch.allclose(first, logits_of(make_model(kind, tied).cpu()), atol=0.1)
    assert all(torch.equal(each, first) for each in others)
    for _, errors in by_rank:
        assert len(errors) == (kind != "full" and strategy != "none")
        for error in errors:
            assert "was saved with another base: 1 of the" in error
            assert "model.layers.0.mlp.up_proj.weight, ...)" in error
    return first


@contextmanager
def noting_refusal(errors: list[str]) -> Iterator[None]:
    """Return a context that must raise since a checkpoint is of another base."""
    with pytest.raises(ValueError, match="another base") as error:
        yield
    errors.append(str(error.value))


@contextmanager
def prepared(
    kind: str, strategy: str, state_dict: str, tied: bool = False, other: bool = False
) -> Iterator[tuple[Any, Any, Any]]:
    """Return a context with an accelerator, a model and its optimizer."""
    with new_job():
        accelerator = Accelerator(cpu=device_type() == "cpu")
        accelerate.use_strategy(accelerator, STRATEGIES[strategy], plugin=fsdp2_plugin(state_dict_type=state_dict))
        model = make_model(kind, tied, other)
        yield accelerator, *accelerator.prepare(model, optimizer_of(model))


def saved_by_accelerate(folder: str, kind: str, strategy: str, tied: bool) -> Answers:
    """In a worker: a training that is saved in all ways, and ``load_state`` of each kind."""
    logits: list[Tensor] = []
    errors: list[str] = []
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
    if kind != "full" and strategy != "none":
        with prepared(kind, strategy, state_dict, tied, other=True) as (accelerator, _, _), noting_refusal(errors):
            accelerator.load_state(f"{folder}/{state_dict}")
    return logits, errors


@pytest.mark.parametrize(
    ("kind", "strategy", "tied"),
    [
        ("lora", "mixzpp", False),
        ("partly frozen", "nf4", True),
        pytest.param("partly frozen", "nf4", False, marks=pytest.mark.wide),
        *(pytest.param(*cell, False, marks=pytest.mark.wide) for cell in OTHER_CELLS),
    ],
)
def test_accelerate_saves_all(pool: Pools, tmp_path: Path, kind: str, strategy: str, tied: bool) -> None:
    logits = check_answers(pool(4).run(saved_by_accelerate, str(tmp_path), kind, strategy, tied), kind, strategy, tied)
    if kind != "lora":  # accelerate saves no configuration
        LlamaForCausalLM(make_model(kind, tied).config).config.save_pretrained(tmp_path / "save_model")
    check_files([tmp_path / "save_model", tmp_path / "save_pretrained"], kind, strategy, logits, tied)


def check_files(folders: list[Path], kind: str, strategy: str, logits: Tensor, tied: bool = False) -> None:
    """Check that what is read without the framework answers likewise, and that no weight is left out."""
    for folder in folders:
        check_same(logits_of(loaded(folder, kind, strategy)), logits)
        if kind != "lora" and not tied:  # of tied weights files have one or both
            assert load_file(folder / "model.safetensors").keys() == make_model(kind).state_dict().keys()


def trainer_of(folder: str, kind: str, strategy: str, state_dict: str, other: bool = False, **options: Any) -> Trainer:
    """Return a trainer of two steps, with a checkpoint after them."""
    often = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "learning_rate": 1e-2}
    sharded = {"fsdp": True, "fsdp_config": {"state_dict_type": state_dict}}
    trainer = make_trainer(f"{folder}/{state_dict}", make_model(kind, other=other), **often | sharded | options)
    return transformers.use_strategy(trainer, STRATEGIES[strategy])


def saved_by_trainer(folder: str, kind: str, strategy: str) -> Answers:
    """In a worker: a training that is saved in all ways, and resumed from each kind."""
    logits: list[Tensor] = []
    errors: list[str] = []
    for state_dict, resumed in itertools.product(STATE_DICTS, (False, True)):
        with new_job():
            trainer = trainer_of(folder, kind, strategy, state_dict)
            trainer.train(resume_from_checkpoint=resumed)
            if not resumed:
                trainer.save_model(f"{folder}/save_model")
            logits.append(logits_of(trainer.model))
    if kind != "full" and strategy != "none":
        with new_job(), noting_refusal(errors):
            trainer_of(folder, kind, strategy, state_dict, other=True).train(resume_from_checkpoint=True)
    return logits, errors


@over_cells
def test_trainer_saves_all(pool: Pools, tmp_path: Path, kind: str, strategy: str) -> None:
    logits = check_answers(pool(4).run(saved_by_trainer, str(tmp_path), kind, strategy), kind, strategy)
    check_files([tmp_path / "save_model", tmp_path / "FULL_STATE_DICT" / "checkpoint-2"], kind, strategy, logits)


class KeepsAnswers(TrainerCallback):
    """Keeps what a model answers after each step."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def on_step_end(self, *arguments: Any, model: nn.Module, **others: Any) -> None:
        self.logits.append(logits_of(model))


def best_of_trainer(folder: str, kind: str, strategy: str, state_dict: str) -> list[Tensor]:
    """In a worker: the logits after each step of a training, of which the first is the best, and of the model then."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    with new_job():
        trainer = trainer_of(folder, kind, strategy, state_dict, **best | often)
        trainer.add_callback(answers := KeepsAnswers())
        trainer.train()
        trainer.save_model(f"{folder}/best")
        return [*answers.logits, logits_of(trainer.model)]


@over_each(cell=CELLS, state_dict=STATE_DICTS)
def test_trainer_saves_the_best_in_the_end(pool: Pools, tmp_path: Path, cell: tuple[str, str], state_dict: str) -> None:
    first, last, best = pool(4).run(best_of_trainer, str(tmp_path), *cell, state_dict)[0]
    assert torch.equal(best, first)
    assert not torch.allclose(best, last, atol=1e-3)
    check_same(logits_of(loaded(tmp_path / "best", *cell)), best)


STEPS = 3


def batches() -> Tensor:
    """Return this rank's batches, by row; the Trainer would take a list for several loaders."""
    return torch.stack([llama.tokens(step) for step in range(STEPS)])


def shard_by_layer(model: nn.Module, strategy: str, mesh: Any) -> nn.Module:
    return shard(model, llama.layers_of(model), STRATEGIES[strategy], mesh["data_parallel"])


class Module(LightningModule):
    """A Llama for the Trainer, whose first checkpoint is the best."""

    def __init__(
        self, kind: str, strategy: str = "none", fsdp: str = "fsdp1", full: bool = False, other: bool = True
    ) -> None:
        super().__init__()
        self.model, self.strategy = make_model(kind, other=other), strategy
        self.way, self.full = Way("trainer", fsdp), full
        self.answers: list[Tensor] = []

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def configure_model(self) -> None:
        if self.way.fsdp == "fsdp2" and self.trainer is not None and not isinstance(self.model, FSDPModule):
            shard_by_layer(self.model, self.strategy, self.device_mesh)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)

    def on_train_start(self) -> None:
        let_gather(self.way, self.full, self.trainer.strategy)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.log("score", float(-index))
        return llama.loss_of(self.model, batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        """Do nothing: there is nothing to know but what the model answers."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.answers.append(logits_of(self.trainer.strategy.model))

    def on_validation_end(self) -> None:
        self.answers.append(logits_of(self.trainer.strategy.model))


def strategy_for(way: Way, strategy: str, full: bool) -> Any:
    """Return our strategy of Lightning's kind."""
    return make_strategy(
        way,
        STRATEGIES[strategy],
        full=full,
        layer=LlamaDecoderLayer,
        parallelize=lambda model, mesh: shard_by_layer(model, strategy, mesh),
    )


@contextmanager
def lightning_trainer(
    folder: str, kind: str, strategy: str, fsdp: str, full: bool, other: bool = False
) -> Iterator[tuple[LightningTrainer, Module]]:
    """Return a context with a trainer that keeps the last of its checkpoints and the best, and a module."""
    with environment():
        saving = ModelCheckpoint(
            folder, "{step}", monitor="score", mode="max", every_n_train_steps=1, save_last=True, save_top_k=1
        )
        trainer = LightningTrainer(
            accelerator=ACCELERATOR,
            **ranks(),
            strategy=strategy_for(Way("trainer", fsdp), strategy, full),
            max_steps=STEPS,
            callbacks=[saving],
            logger=False,
            num_sanity_val_steps=0,
            limit_val_batches=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        yield trainer, Module(kind, strategy, fsdp, full, other)


def saved_by_lightning(folder: str, *saved: Any) -> tuple[Answers, Answers]:
    """In a worker: a training that is saved in all ways: the logits of its last model, and those of the best one, each
    with those of what loads it.
    """
    kind, strategy, *_ = saved
    errors: list[str] = []
    with lightning_trainer(folder, *saved) as (trainer, module):
        trainer.fit(module, batches())
        trainer.save_checkpoint(f"{folder}/saved.ckpt")
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        if kind == "lora":
            save_adapter(trainer.strategy.model, f"{folder}/adapter")
        best, *_, last = module.answers
        trainer.validate(module, batches(), ckpt_path="best", verbose=False)
        again, logits = module.answers[-1], [last]
    for name in ("last", "saved"):
        with lightning_trainer(folder, *saved) as (trainer, module):
            trainer.fit(module, batches(), ckpt_path=f"{folder}/{name}.ckpt")
            logits.append(logits_of(trainer.strategy.model))
    if kind != "full" and strategy != "none":
        with lightning_trainer(folder, *saved, True) as (trainer, module), noting_refusal(errors):
            trainer.fit(module, batches(), ckpt_path=f"{folder}/last.ckpt")
    return (logits, errors), ([best, again], errors)


def consolidated(checkpoint: Path) -> dict[str, Any]:
    """Return what Lightning's command makes of a checkpoint that is a folder."""
    with mock.patch.object(sys, "argv", ["", str(checkpoint)]):
        runpy.run_module("lightning.fabric.utilities.consolidate_checkpoint", run_name="__main__")
    return torch.load(f"{checkpoint}.consolidated")


def check_weights(weights: dict[str, Tensor], full: bool, kind: str, strategy: str, trained: Tensor) -> None:
    """Check that a plain model loads all weights of a file, or those of shards on what the base was rounded to."""
    if full:
        model = make_model(kind, other=True).cpu()  # of which nothing is to stay
        model.load_state_dict(weights)
    else:
        model = make_model(kind, base=rounded_base(strategy))
        is_quantized = STRATEGIES[strategy].frozen is not None
        frozen = {name for name, p in model.named_parameters() if p.dim() == 2 and not p.requires_grad}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert set(missing) == (frozen if is_quantized else set())
        assert not unexpected
    check_same(logits_of(model), trained)


@over_saved("fsdp1, full, partly frozen", "fsdp2, sharded, lora")
def test_lightnings_trainer_saves_all(
    pool: Pools, tmp_path: Path, cell: tuple[str, str], saved: tuple[str, bool]
) -> None:
    (kind, strategy), (fsdp, full) = cell, saved
    of_last, of_best = zip(*pool(4).run(saved_by_lightning, str(tmp_path), *cell, *saved), strict=True)
    last, best = (check_answers(list(each), kind, strategy) for each in (of_last, of_best))
    assert not torch.equal(best, last)
    trained = {"last": last, "saved": last, "weights": last, "step=1": best}
    for name, logits in trained.items():
        checkpoint = tmp_path / f"{name}.ckpt"
        if full:
            check_same(logits_of(Module.load_from_checkpoint(checkpoint, map_location="cpu", kind=kind)), logits)
        content = torch.load(checkpoint) if full else consolidated(checkpoint)
        weights = content["model" if not full and fsdp == "fsdp1" else "state_dict"]
        check_weights({name.removeprefix("model."): each for name, each in weights.items()}, full, *cell, logits)
    if kind == "lora":
        check_same(logits_of(loaded(tmp_path / "adapter", *cell)), last)
    is_beside = full and STRATEGIES[strategy].frozen is not None and kind != "full"
    beside = {path.name for path in tmp_path.glob("*.frozen_base.json")}
    assert beside == {f"{name}.ckpt.frozen_base.json" for name in trained if is_beside}  # none of what was removed


@contextmanager
def fabric_of(kind: str, strategy: str, fsdp: str, full: bool, other: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Return a context with a fabric, a model and its optimizer."""
    way = Way("fabric", fsdp)
    with environment():
        fabric = Fabric(accelerator=ACCELERATOR, **ranks(), strategy=strategy_for(way, strategy, full))
        fabric.launch()
        model = fabric.setup_module(make_model(kind, other=other))
        let_gather(way, full, fabric.strategy)
        yield fabric, model, fabric.setup_optimizers(optimizer_of(model))


def trained_names(kind: str) -> set[str]:
    return {name for name, parameter in make_model(kind).named_parameters() if parameter.requires_grad}


def saved_by_fabric(folder: str, kind: str, strategy: str, fsdp: str, full: bool) -> Answers:
    """In a worker: a training that is saved in all ways, and what loads each."""
    errors: list[str] = []
    with fabric_of(kind, strategy, fsdp, full) as (fabric, model, optimizer):
        for step in range(STEPS):
            fabric.backward(llama.loss_of(model, llama.tokens(step)))
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(f"{folder}/saved", {"model": model, "optimizer": optimizer, "step": STEPS})
        fabric.save(f"{folder}/weights", {"model": model})
        if full:
            only = {"model": lambda name, value: name in trained_names(kind)}
            fabric.save(f"{folder}/trained", {"model": model}, filter=only)
        logits = [logits_of(model)]
    with fabric_of(kind, strategy, fsdp, full) as (fabric, model, optimizer):
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(f"{folder}/saved", state)
        assert state["step"] == STEPS
        logits.append(logits_of(model))
    with fabric_of(kind, strategy, fsdp, full) as (fabric, model, _):
        fabric.load(f"{folder}/weights", {"model": model})
        logits.append(logits_of(model))
    if kind != "full" and strategy != "none":
        with fabric_of(kind, strategy, fsdp, full, other=True) as (fabric, model, _), noting_refusal(errors):
            fabric.load(f"{folder}/saved", {"model": model})
    return logits, errors


@over_saved("fsdp1, sharded, lora", "fsdp2, full, partly frozen")
def test_lightnings_fabric_saves_all(
    pool: Pools, tmp_path: Path, cell: tuple[str, str], saved: tuple[str, bool]
) -> None:
    full = saved[1]
    logits = check_answers(pool(4).run(saved_by_fabric, str(tmp_path), *cell, *saved), *cell)
    for name in ("saved", "weights"):
        content = torch.load(tmp_path / name) if full else consolidated(tmp_path / name)
        check_weights(content["model"], full, *cell, logits)
    if full:
        assert torch.load(tmp_path / "trained")["model"].keys() == trained_names(cell[0])


def told_of_values_for_a_quantized_base(folder: str, fsdp: str, full: bool) -> list[str]:
    """In a worker: what is said to weights that a file or a checkpoint has for a base that is quantized."""
    with fabric_of("partly frozen", "none", fsdp, full, other=True) as (fabric, model, _):
        fabric.save(f"{folder}/saved", {"model": model})
        if fabric.is_global_zero:
            torch.save(make_model("partly frozen").state_dict(), f"{folder}/raw")
        fabric.barrier()
    errors = []
    with fabric_of("partly frozen", "nf4", fsdp, full) as (fabric, model, _):
        for load in (
            lambda: fabric.load(f"{folder}/saved", {"model": model}),
            lambda: fabric.load_raw(f"{folder}/raw", model),
        ):
            with pytest.raises(ValueError, match="nothing beside it says") as error:
                load()
            errors.append(str(error.value))
    return errors


@over_each(fsdp=["fsdp1", "fsdp2"], full=[False, True])
def test_weights_for_a_quantized_base_are_not_passed_over(pool: Pools, tmp_path: Path, fsdp: str, full: bool) -> None:
    for errors in pool(4).run(told_of_values_for_a_quantized_base, str(tmp_path), fsdp, full):
        assert all("has values for 9 weights that are quantized in this LlamaForCausalLM" in each for each in errors)
