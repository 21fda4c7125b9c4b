"""Every exit of accelerate, Trainer and Lightning: all is there, trained or frozen, quantized or not."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from harness import llama
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
from transformers import LlamaForCausalLM, Trainer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_zpp import NF4, Int8, Strategy, save_adapter
from fsdp_zpp.integrations import accelerate, transformers

Pools = Callable[[int], Pool]
# Without a codec of weights, or the sharded model would compute with weights that differ from those in files.
STRATEGIES = {
    "none": Strategy.zero3(gpus_per_node=1),
    "int8": Strategy.mixzpp(weights=None, frozen=Int8(64), gpus_per_node=1),
    "nf4": Strategy.mixzpp(weights=None, frozen=NF4(64), gpus_per_node=1),
}
STEPS = 2
Answers = tuple[list[Tensor], list[str]]
"""Logits after a training and of all that goes on from what it has saved; and what is said to another base."""


@dataclass(frozen=True)
class Cell:
    """A kind of model, the strategy, whether checkpoints are full, and, if it matters, Lightning's FSDP."""

    kind: str
    strategy: str
    full: bool
    fsdp: str = "fsdp2"


LORA, PARTLY_FROZEN = Cell("lora", "int8", full=False), Cell("partly frozen", "nf4", full=True)
over_cells = pytest.mark.parametrize("cell", [LORA, PARTLY_FROZEN], ids=["lora", "partly frozen"])


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
    return llama.rounded_base(STRATEGIES[strategy].frozen).cpu()


def loaded(folder: Path, cell: Cell) -> nn.Module:
    """In one process: what ``from_pretrained`` makes of files, of adapters on what the base was rounded to."""
    if cell.kind != "lora":
        return LlamaForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(rounded_base(cell.strategy), folder)


def check_same(logits: Tensor, trained: Tensor) -> None:
    """Check that a model of files in one process answers as the sharded one, which sums in another order."""
    torch.testing.assert_close(logits, trained, rtol=1e-4, atol=1e-4)


def check_answers(by_rank: list[Answers], kind: str, tied: bool = False) -> Tensor:
    """Check that all that goes on answers as the model did, and that another base is refused; return the logits."""
    first, *others = by_rank[0][0]
    # Or files could hold anything.
    assert not torch.allclose(first, logits_of(make_model(kind, tied).cpu()), atol=0.1)
    assert all(torch.equal(each, first) for each in others)
    for _, (error,) in by_rank:
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
def prepared(cell: Cell, tied: bool, other: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Return a context with an accelerator, a model and its optimizer."""
    plugin = fsdp2_plugin(state_dict_type="FULL_STATE_DICT" if cell.full else "SHARDED_STATE_DICT")
    with new_job():
        accelerator = Accelerator(cpu=device_type() == "cpu")
        accelerate.use_strategy(accelerator, STRATEGIES[cell.strategy], plugin=plugin)
        model = make_model(cell.kind, tied, other)
        yield accelerator, *accelerator.prepare(model, optimizer_of(model))


def saved_by_accelerate(folder: str, cell: Cell, tied: bool) -> Answers:
    """In a worker: a training that is saved in all ways, and ``load_state``."""
    errors: list[str] = []
    with prepared(cell, tied) as (accelerator, model, optimizer):
        llama.train(model, optimizer)
        accelerator.save_state(f"{folder}/state")
        accelerator.save_model(model, f"{folder}/save_model")
        model.save_pretrained(
            f"{folder}/save_pretrained",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
        logits = [logits_of(model)]
    with prepared(cell, tied) as (accelerator, model, _):
        accelerator.load_state(f"{folder}/state")
        logits.append(logits_of(model))
    with prepared(cell, tied, other=True) as (accelerator, _, _), noting_refusal(errors):
        accelerator.load_state(f"{folder}/state")
    return logits, errors


@pytest.mark.parametrize(("cell", "tied"), [(LORA, False), (PARTLY_FROZEN, True)], ids=["lora", "partly frozen, tied"])
def test_accelerate_saves_all(pool: Pools, tmp_path: Path, cell: Cell, tied: bool) -> None:
    logits = check_answers(pool(2).run(saved_by_accelerate, str(tmp_path), cell, tied), cell.kind, tied)
    if cell.kind != "lora":  # accelerate saves no configuration
        LlamaForCausalLM(make_model(cell.kind, tied).config).config.save_pretrained(tmp_path / "save_model")
    check_files([tmp_path / "save_model", tmp_path / "save_pretrained"], cell, logits, tied)


def check_files(folders: list[Path], cell: Cell, logits: Tensor, tied: bool = False) -> None:
    """Check that what is read without the framework answers likewise, and that no weight is left out."""
    for folder in folders:
        check_same(logits_of(loaded(folder, cell)), logits)
        if cell.kind != "lora" and not tied:  # of tied weights files have one or both
            assert load_file(folder / "model.safetensors").keys() == make_model(cell.kind).state_dict().keys()


def trainer_of(folder: str, cell: Cell, other: bool = False) -> Trainer:
    """Return a trainer with a checkpoint after its steps."""
    options = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": STEPS, "eval_strategy": "no"}
    state_dict = "FULL_STATE_DICT" if cell.full else "SHARDED_STATE_DICT"
    sharded = {"fsdp": True, "fsdp_config": {"state_dict_type": state_dict}}
    trainer = make_trainer(folder, make_model(cell.kind, other=other), learning_rate=1e-2, **options | sharded)
    return transformers.use_strategy(trainer, STRATEGIES[cell.strategy])


def saved_by_trainer(folder: str, cell: Cell) -> Answers:
    """In a worker: a training that is saved in all ways, and resumed."""
    logits: list[Tensor] = []
    errors: list[str] = []
    for is_resumed in (False, True):
        with new_job():
            trainer = trainer_of(folder, cell)
            trainer.train(resume_from_checkpoint=is_resumed)
            if not is_resumed:
                trainer.save_model(f"{folder}/save_model")
            logits.append(logits_of(trainer.model))
    with new_job(), noting_refusal(errors):
        trainer_of(folder, cell, other=True).train(resume_from_checkpoint=True)
    return logits, errors


@over_cells
def test_trainer_saves_all(pool: Pools, tmp_path: Path, cell: Cell) -> None:
    logits = check_answers(pool(2).run(saved_by_trainer, str(tmp_path), cell), cell.kind)
    check_files([tmp_path / "save_model", tmp_path / f"checkpoint-{STEPS}"], cell, logits)


def batches() -> Tensor:
    """Return this rank's batches, by row; the Trainer would take a list for several loaders."""
    return torch.stack([llama.tokens(step) for step in range(STEPS)])


def shard_by_layer(model: nn.Module, strategy: str, mesh: Any) -> nn.Module:
    return shard(model, llama.layers_of(model), STRATEGIES[strategy], mesh["data_parallel"])


class Module(LightningModule):
    """A Llama for the Trainer, whose first checkpoint is the best; by default another base, for what is loaded."""

    def __init__(self, cell: Cell, other: bool = True) -> None:
        super().__init__()
        self.model, self.cell = make_model(cell.kind, other=other), cell
        self.answers: list[Tensor] = []

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def configure_model(self) -> None:
        if self.cell.fsdp == "fsdp2" and self.trainer is not None and not isinstance(self.model, FSDPModule):
            shard_by_layer(self.model, self.cell.strategy, self.device_mesh)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)

    def on_train_start(self) -> None:
        let_gather(Way("trainer", self.cell.fsdp), self.cell.full, self.trainer.strategy)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.log("score", float(-index))
        return llama.loss_of(self.model, batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        """Do nothing: there is nothing to know but what the model answers."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.answers.append(logits_of(self.trainer.strategy.model))

    def on_validation_end(self) -> None:
        self.answers.append(logits_of(self.trainer.strategy.model))


def strategy_for(framework: str, cell: Cell) -> Any:
    """Return our strategy of Lightning's kind."""
    return make_strategy(
        Way(framework, cell.fsdp),
        STRATEGIES[cell.strategy],
        full=cell.full,
        layer=LlamaDecoderLayer,
        parallelize=lambda model, mesh: shard_by_layer(model, cell.strategy, mesh),
    )


@contextmanager
def lightning_trainer(folder: str, cell: Cell, other: bool = False) -> Iterator[tuple[LightningTrainer, Module]]:
    """Return a context with a trainer that keeps the last of its checkpoints and the best, and a module."""
    with environment():
        saving = ModelCheckpoint(
            folder, "{step}", monitor="score", mode="max", every_n_train_steps=1, save_last=True, save_top_k=1
        )
        trainer = LightningTrainer(
            accelerator=ACCELERATOR,
            **ranks(),
            strategy=strategy_for("trainer", cell),
            max_steps=STEPS,
            callbacks=[saving],
            logger=False,
            num_sanity_val_steps=0,
            limit_val_batches=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        yield trainer, Module(cell, other)


def saved_by_lightning(folder: str, cell: Cell) -> tuple[Answers, Answers]:
    """In a worker: a training that is saved in all ways: the logits of its last model, and those of the best one, each
    with those of what loads it.
    """
    errors: list[str] = []
    with lightning_trainer(folder, cell) as (trainer, module):
        trainer.fit(module, batches())
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        if cell.kind == "lora":
            save_adapter(trainer.strategy.model, f"{folder}/adapter")
        best, last = module.answers
        trainer.validate(module, batches(), ckpt_path="best", verbose=False)
        again = module.answers[-1]
    with lightning_trainer(folder, cell) as (trainer, module):
        trainer.fit(module, batches(), ckpt_path=f"{folder}/last.ckpt")
        resumed = logits_of(trainer.strategy.model)
    with lightning_trainer(folder, cell, other=True) as (trainer, module), noting_refusal(errors):
        trainer.fit(module, batches(), ckpt_path=f"{folder}/last.ckpt")
    return ([last, resumed], errors), ([best, again], errors)


def consolidated(checkpoint: Path) -> dict[str, Any]:
    """Return what Lightning's command makes of a checkpoint that is a folder."""
    with mock.patch.object(sys, "argv", ["", str(checkpoint)]):
        runpy.run_module("lightning.fabric.utilities.consolidate_checkpoint", run_name="__main__")
    return torch.load(f"{checkpoint}.consolidated")


def check_weights(weights: dict[str, Tensor], cell: Cell, trained: Tensor) -> None:
    """Check that a plain model loads all weights of a file, or those of shards on what the base was rounded to."""
    if cell.full:
        model = make_model(cell.kind, other=True).cpu()  # of which nothing is to stay
        model.load_state_dict(weights)
    else:
        model = make_model(cell.kind, base=rounded_base(cell.strategy))
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert set(missing) == {name for name, p in model.named_parameters() if p.dim() == 2 and not p.requires_grad}
        assert not unexpected
    check_same(logits_of(model), trained)


@pytest.mark.parametrize("cell", [LORA, replace(PARTLY_FROZEN, fsdp="fsdp1")], ids=["fsdp2, lora", "fsdp1, partly"])
def test_lightnings_trainer_saves_all(pool: Pools, tmp_path: Path, cell: Cell) -> None:
    of_last, of_best = zip(*pool(2).run(saved_by_lightning, str(tmp_path), cell), strict=True)
    last, best = (check_answers(list(each), cell.kind) for each in (of_last, of_best))
    assert not torch.equal(best, last)
    trained = {"last": last, "weights": last, "step=1": best}
    for name, logits in trained.items():
        checkpoint = tmp_path / f"{name}.ckpt"
        if cell.full:
            check_same(logits_of(Module.load_from_checkpoint(checkpoint, map_location="cpu", cell=cell)), logits)
        content = torch.load(checkpoint) if cell.full else consolidated(checkpoint)
        weights = content["state_dict"]
        check_weights({name.removeprefix("model."): each for name, each in weights.items()}, cell, logits)
    if cell.kind == "lora":
        check_same(logits_of(loaded(tmp_path / "adapter", cell)), last)
    beside = {path.name for path in tmp_path.glob("*.frozen_base.json")}
    assert beside == {f"{name}.ckpt.frozen_base.json" for name in trained if cell.full}  # none of what was removed


@contextmanager
def fabric_of(cell: Cell, other: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Return a context with a fabric, a model and its optimizer."""
    with environment():
        fabric = Fabric(accelerator=ACCELERATOR, **ranks(), strategy=strategy_for("fabric", cell))
        fabric.launch()
        model = fabric.setup_module(make_model(cell.kind, other=other))
        let_gather(Way("fabric", cell.fsdp), cell.full, fabric.strategy)
        yield fabric, model, fabric.setup_optimizers(optimizer_of(model))


def trained_names(kind: str) -> set[str]:
    return {name for name, parameter in make_model(kind).named_parameters() if parameter.requires_grad}


def saved_by_fabric(folder: str, cell: Cell) -> Answers:
    """In a worker: a training that is saved in all ways, and what loads each."""
    errors: list[str] = []
    with fabric_of(cell) as (fabric, model, optimizer):
        for step in range(STEPS):
            fabric.backward(llama.loss_of(model, llama.tokens(step)))
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(f"{folder}/saved", {"model": model, "optimizer": optimizer, "step": STEPS})
        fabric.save(f"{folder}/weights", {"model": model})
        if cell.full:
            only = {"model": lambda name, value: name in trained_names(cell.kind)}
            fabric.save(f"{folder}/trained", {"model": model}, filter=only)
        logits = [logits_of(model)]
    with fabric_of(cell) as (fabric, model, optimizer):
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(f"{folder}/saved", state)
        assert state["step"] == STEPS
        logits.append(logits_of(model))
    with fabric_of(cell) as (fabric, model, _):
        fabric.load(f"{folder}/weights", {"model": model})
        logits.append(logits_of(model))
    with fabric_of(cell, other=True) as (fabric, model, _), noting_refusal(errors):
        fabric.load(f"{folder}/saved", {"model": model})
    return logits, errors


@pytest.mark.parametrize("cell", [replace(LORA, fsdp="fsdp1"), PARTLY_FROZEN], ids=["fsdp1, lora", "fsdp2, partly"])
def test_lightnings_fabric_saves_all(pool: Pools, tmp_path: Path, cell: Cell) -> None:
    logits = check_answers(pool(2).run(saved_by_fabric, str(tmp_path), cell), cell.kind)
    for name in ("saved", "weights"):
        content = torch.load(tmp_path / name) if cell.full else consolidated(tmp_path / name)
        check_weights(content["model"], cell, logits)
    if cell.full:
        assert torch.load(tmp_path / "trained")["model"].keys() == trained_names(cell.kind)


def told_of_values_for_a_quantized_base(folder: str, cell: Cell) -> list[str]:
    """In a worker: what is said to weights that a file or a checkpoint has for a base that is quantized."""
    with fabric_of(replace(cell, strategy="none"), other=True) as (fabric, model, _):
        fabric.save(f"{folder}/saved", {"model": model})
        if fabric.is_global_zero:
            torch.save(make_model("partly frozen").state_dict(), f"{folder}/raw")
        fabric.barrier()
    errors = []
    with fabric_of(cell) as (fabric, model, _):
        for load in (
            lambda: fabric.load(f"{folder}/saved", {"model": model}),
            lambda: fabric.load_raw(f"{folder}/raw", model),
        ):
            with pytest.raises(ValueError, match="nothing beside it says") as error:
                load()
            errors.append(str(error.value))
    return errors


@pytest.mark.parametrize(("fsdp", "full"), [("fsdp1", False), ("fsdp2", True)])
def test_weights_for_a_quantized_base_are_not_passed_over(pool: Pools, tmp_path: Path, fsdp: str, full: bool) -> None:
    cell = replace(PARTLY_FROZEN, fsdp=fsdp, full=full)
    for errors in pool(2).run(told_of_values_for_a_quantized_base, str(tmp_path), cell):
        assert all("has values for 9 weights that are quantized in this LlamaForCausalLM" in each for each in errors)
