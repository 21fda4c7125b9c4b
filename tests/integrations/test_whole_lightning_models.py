"""Every exit of Lightning's Trainer and Fabric: what is trained and what is frozen, quantized or not, is all there."""

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
from harness import llama
from harness.covering import over_each
from harness.pool import Pool
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ways import ACCELERATOR, Way, environment, let_gather, make_strategy, ranks, shard
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from whole_models import (
    CELLS,
    KINDS,
    STRATEGIES,
    check_same,
    check_trained,
    loaded,
    logits_of,
    make_model,
    rounded_base,
)

from fsdp_zpp import save_adapter

STEPS = 3
FORMS = ("sharded", "full")
FSDPS = ("fsdp1", "fsdp2")
# Every kind with every strategy, so that both FSDPs have some quantized base in a file; all else is slow.
over_cells = over_each(
    cell={"-".join(cell): cell for cell in CELLS},
    saved={"-".join(saved): saved for saved in itertools.product(FSDPS, FORMS)},
)


class Module(LightningModule):
    """A Llama for the Trainer, whose first checkpoint is the best."""

    def __init__(
        self, kind: str, strategy: str = "none", fsdp: str = "fsdp1", form: str = "sharded", other: bool = True
    ) -> None:
        super().__init__()
        self.model, self.strategy = make_model(kind, other=other), strategy
        self.way, self.form = Way("trainer", fsdp), form
        self.answers: list[Tensor] = []

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def configure_model(self) -> None:
        if self.way.fsdp == "fsdp2" and self.trainer is not None and not isinstance(self.model, FSDPModule):
            shard_by_layer(self.model, self.strategy, self.device_mesh)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)

    def on_train_start(self) -> None:
        let_gather(self.way, self.form == "full", self.trainer.strategy)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.log("score", float(-index))
        return llama.loss_of(self.model, batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        """Do nothing: there is nothing to know but what the model answers."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.answers.append(logits_of(self.trainer.strategy.model))

    def on_validation_end(self) -> None:
        self.answers.append(logits_of(self.trainer.strategy.model))


def shard_by_layer(model: nn.Module, strategy: str, mesh: Any) -> nn.Module:
    """Shard the model by ``fully_shard``."""
    return shard(model, llama.layers_of(model), STRATEGIES[strategy], mesh["data_parallel"])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer of what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def strategy_for(way: Way, strategy: str, form: str) -> Any:
    """Make our strategy of Lightning's kind."""
    return make_strategy(
        way,
        STRATEGIES[strategy],
        full=form == "full",
        layer=LlamaDecoderLayer,
        parallelize=lambda model, mesh: shard_by_layer(model, strategy, mesh),
    )


def batches() -> Tensor:
    """Return this rank's batches, by row; the Trainer would take a list for several loaders."""
    return torch.stack([llama.tokens(step) for step in range(STEPS)])


@contextmanager
def trainer_of(folder: str, strategy: str, fsdp: str, form: str) -> Iterator[Trainer]:
    """Return a context with a trainer that keeps the last of its checkpoints and the best."""
    way = Way("trainer", fsdp)
    with environment():
        own = strategy_for(way, strategy, form)
        saving = ModelCheckpoint(
            folder, "{step}", monitor="score", mode="max", every_n_train_steps=1, save_last=True, save_top_k=1
        )
        trainer = Trainer(
            accelerator=ACCELERATOR,
            **ranks(),
            strategy=own,
            max_steps=STEPS,
            callbacks=[saving],
            logger=False,
            num_sanity_val_steps=0,
            limit_val_batches=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        yield trainer


def saved_by_trainer(folder: str, kind: str, strategy: str, fsdp: str, form: str) -> dict[str, Tensor]:
    """In a worker: a training that is saved in all ways; logits in it, and of what loads each."""
    with trainer_of(folder, strategy, fsdp, form) as trainer:
        module = Module(kind, strategy, fsdp, form, other=False)
        trainer.fit(module, batches())
        trainer.save_checkpoint(f"{folder}/saved.ckpt")
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        if kind == "lora":
            save_adapter(trainer.strategy.model, f"{folder}/adapter")
        logits = {"best": module.answers[0], "last": module.answers[-1]}
        trainer.validate(module, batches(), ckpt_path="best", verbose=False)
        logits["best again"] = module.answers[-1]
    for name in ("last", "saved"):
        with trainer_of(folder, strategy, fsdp, form) as trainer:
            module = Module(kind, strategy, fsdp, form, other=False)
            trainer.fit(module, batches(), ckpt_path=f"{folder}/{name}.ckpt")
            logits[f"{name} again"] = logits_of(trainer.strategy.model)
    return logits


def consolidated(checkpoint: Path) -> dict[str, Any]:
    """Return what Lightning's command makes of a checkpoint that is a folder."""
    with mock.patch.object(sys, "argv", ["", str(checkpoint)]):
        runpy.run_module("lightning.fabric.utilities.consolidate_checkpoint", run_name="__main__")
    return torch.load(f"{checkpoint}.consolidated")


def check_weights(weights: dict[str, Tensor], form: str, kind: str, strategy: str, trained: Tensor) -> None:
    """Check that a plain model loads all weights of a file, or those of shards on what the base was rounded to."""
    if form == "full":
        model = make_model(kind, other=True).cpu()  # of which nothing is to stay
        model.load_state_dict(weights)
    else:
        model = make_model(kind, base=rounded_base(strategy))
        expected = {} if STRATEGIES[strategy].frozen is None else frozen_matrices(kind)
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert set(missing) == set(expected)
        assert not unexpected
    check_same(logits_of(model), trained)


def trained_names(kind: str) -> set[str]:
    """Return the names of what is trained."""
    return {name for name, parameter in make_model(kind).named_parameters() if parameter.requires_grad}


def frozen_matrices(kind: str) -> list[str]:
    """Return what a strategy quantizes."""
    return [name for name, p in make_model(kind).named_parameters() if p.dim() == 2 and not p.requires_grad]


@over_cells
def test_trainer_saves_all(
    pool: Callable[[int], Pool], tmp_path: Path, cell: tuple[str, str], saved: tuple[str, str]
) -> None:
    (kind, strategy), (fsdp, form) = cell, saved
    logits = pool(4).run(saved_by_trainer, str(tmp_path), kind, strategy, fsdp, form)[0]
    check_trained(logits["last"], kind)
    assert not torch.equal(logits["best"], logits["last"])
    for again, first in {"last again": "last", "saved again": "last", "best again": "best"}.items():
        assert torch.equal(logits[again], logits[first])
    names = {"last": "last", "saved": "last", "weights": "last", "step=1": "best"}
    for name, trained in names.items():
        checkpoint = tmp_path / f"{name}.ckpt"
        if form == "full":
            loaded_by_lightning = Module.load_from_checkpoint(checkpoint, map_location="cpu", kind=kind)
            check_same(logits_of(loaded_by_lightning), logits[trained])
            content = torch.load(checkpoint)
        else:
            content = consolidated(checkpoint)
        weights = content["model" if form == "sharded" and fsdp == "fsdp1" else "state_dict"]
        weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        check_weights(weights, form, kind, strategy, logits[trained])
    if kind == "lora":
        check_same(logits_of(loaded(tmp_path / "adapter", kind, strategy)), logits["last"])
    is_beside = form == "full" and STRATEGIES[strategy].frozen is not None and kind != "full"
    beside = {path.name for path in tmp_path.glob("*.frozen_base.json")}
    assert beside == {f"{name}.ckpt.frozen_base.json" for name in names if is_beside}  # none of what was removed


@contextmanager
def fabric_of(kind: str, strategy: str, fsdp: str, form: str, other: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Return a context with a fabric, a model and its optimizer."""
    way = Way("fabric", fsdp)
    with environment():
        fabric = Fabric(accelerator=ACCELERATOR, **ranks(), strategy=strategy_for(way, strategy, form))
        fabric.launch()
        model = fabric.setup_module(make_model(kind, other=other))
        let_gather(way, form == "full", fabric.strategy)
        yield fabric, model, fabric.setup_optimizers(optimizer_of(model))


def saved_by_fabric(folder: str, kind: str, strategy: str, fsdp: str, form: str) -> list[Tensor]:
    """In a worker: a training that is saved in all ways; the logits after it, and of what loads each."""
    with fabric_of(kind, strategy, fsdp, form) as (fabric, model, optimizer):
        for step in range(STEPS):
            fabric.backward(llama.loss_of(model, llama.tokens(step)))
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(f"{folder}/saved", {"model": model, "optimizer": optimizer, "step": STEPS})
        fabric.save(f"{folder}/weights", {"model": model})
        if form == "full":
            only = {"model": lambda name, value: name in trained_names(kind)}
            fabric.save(f"{folder}/trained", {"model": model}, filter=only)
        logits = [logits_of(model)]
    with fabric_of(kind, strategy, fsdp, form) as (fabric, model, optimizer):
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(f"{folder}/saved", state)
        assert state["step"] == STEPS
        logits.append(logits_of(model))
    with fabric_of(kind, strategy, fsdp, form) as (fabric, model, _):
        fabric.load(f"{folder}/weights", {"model": model})
        logits.append(logits_of(model))
    return logits


@over_cells
def test_fabric_saves_all(
    pool: Callable[[int], Pool], tmp_path: Path, cell: tuple[str, str], saved: tuple[str, str]
) -> None:
    (kind, strategy), (fsdp, form) = cell, saved
    first, *others = pool(4).run(saved_by_fabric, str(tmp_path), kind, strategy, fsdp, form)[0]
    check_trained(first, kind)
    assert all(torch.equal(each, first) for each in others)
    for name in ("saved", "weights"):
        content = torch.load(tmp_path / name) if form == "full" else consolidated(tmp_path / name)
        check_weights(content["model"], form, kind, strategy, first)
    if form == "full":
        assert torch.load(tmp_path / "trained")["model"].keys() == trained_names(kind)


def loaded_on_another_base(folder: str, kind: str, fsdp: str, form: str) -> list[str]:
    """In a worker: what Trainer and Fabric say to checkpoints of what was trained on another base."""
    errors = []
    for other in (False, True):
        with trainer_of(folder, "nf4", fsdp, form) as trainer:
            module = Module(kind, "nf4", fsdp, form, other=other)
            if other:
                with pytest.raises(ValueError, match="another base") as error:
                    trainer.fit(module, batches(), ckpt_path=f"{folder}/last.ckpt")
                errors.append(str(error.value))
            else:
                trainer.fit(module, batches())
        with fabric_of(kind, "nf4", fsdp, form, other) as (fabric, model, _):
            if other:
                with pytest.raises(ValueError, match="another base") as error:
                    fabric.load(f"{folder}/saved", {"model": model})
                errors.append(str(error.value))
            else:
                fabric.save(f"{folder}/saved", {"model": model})
    return errors


@over_each(kind=KINDS[1:], fsdp=FSDPS, form=FORMS)
def test_a_checkpoint_on_another_base_is_refused_on_every_rank(
    pool: Callable[[int], Pool], tmp_path: Path, kind: str, fsdp: str, form: str
) -> None:
    for errors in pool(4).run(loaded_on_another_base, str(tmp_path), kind, fsdp, form):
        assert len(errors) == 2
        for each in errors:
            assert "was saved with another base: 1 of the" in each
            assert "model.layers.0.mlp.up_proj.weight, ...)" in each


def told_of_values_for_a_quantized_base(folder: str, fsdp: str, form: str) -> list[str]:
    """In a worker: what is said to weights that a file or a checkpoint has for a base that is quantized."""
    with fabric_of("partly frozen", "none", fsdp, form, other=True) as (fabric, model, _):
        fabric.save(f"{folder}/saved", {"model": model})
        if fabric.is_global_zero:
            torch.save(make_model("partly frozen").state_dict(), f"{folder}/raw")
        fabric.barrier()
    errors = []
    with fabric_of("partly frozen", "nf4", fsdp, form) as (fabric, model, _):
        for load in (
            lambda: fabric.load(f"{folder}/saved", {"model": model}),
            lambda: fabric.load_raw(f"{folder}/raw", model),
        ):
            with pytest.raises(ValueError, match="nothing beside it says") as error:
                load()
            errors.append(str(error.value))
    return errors


@over_each(fsdp=FSDPS, form=FORMS)
def test_weights_for_a_quantized_base_are_not_passed_over(
    pool: Callable[[int], Pool], tmp_path: Path, fsdp: str, form: str
) -> None:
    for errors in pool(4).run(told_of_values_for_a_quantized_base, str(tmp_path), fsdp, form):
        assert all("has values for 9 weights that are quantized in this LlamaForCausalLM" in each for each in errors)
