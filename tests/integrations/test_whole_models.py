"""Every exit of accelerate and Lightning: all is there, trained or frozen, quantized or not."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from harness import llama
from harness.pool import Pools, device_type
from hugging_face import fsdp2_plugin, new_job
from lightning.pytorch import LightningModule, Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ways import ACCELERATOR, environment, let_gather, make_strategy, ranks, shard
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_zpp import NF4, Int8, Strategy
from fsdp_zpp.integrations import accelerate

# Without a codec of weights, or the sharded model would compute with weights that differ from those in files.
STRATEGIES = {
    "none": Strategy.zero3(gpus_per_node=1),
    "int8": Strategy.mixzpp(weights=None, frozen=Int8(64), gpus_per_node=1),
    "nf4": Strategy.mixzpp(weights=None, frozen=NF4(64), gpus_per_node=1),
}
STEPS = 2


@dataclass(frozen=True)
class Cell:
    """A kind of model, the strategy, whether checkpoints are full, and, if it matters, Lightning's FSDP."""

    kind: str
    strategy: str
    full: bool
    fsdp: str = "fsdp2"


LORA, PARTLY_FROZEN = Cell("lora", "int8", full=False), Cell("partly frozen", "nf4", full=True)


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
    tokens = torch.arange(1, 13, device=next(model.parameters()).device).view(1, -1)
    with torch.no_grad():
        return model(input_ids=tokens).logits.cpu()


def rounded_base(strategy: str) -> LlamaForCausalLM:
    return llama.rounded_base(STRATEGIES[strategy].frozen).cpu()


def loaded(folder: Path, cell: Cell) -> nn.Module:
    """In one process: what ``from_pretrained`` makes of files, of adapters on what the base was rounded to."""
    if cell.kind != "lora":
        return LlamaForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(rounded_base(cell.strategy), folder)


def check_same(logits: Tensor, trained: Tensor) -> None:
    """Check that a model of files in one process answers as the sharded one, which sums in another order."""
    torch.testing.assert_close(logits, trained, rtol=1e-4, atol=1e-4)


def check_answers(by_rank: list[list[Tensor]], kind: str, tied: bool = False) -> Tensor:
    """Check that all that goes on from what was saved answers as the model did, and return the logits."""
    first, *others = by_rank[0]
    # Or files could hold anything.
    assert not torch.allclose(first, logits_of(make_model(kind, tied).cpu()), atol=0.1)
    assert all(torch.equal(each, first) for each in others)
    return first


@contextmanager
def refusal_of_another_base() -> Iterator[None]:
    with pytest.raises(ValueError, match="was saved with another base: 1 of the") as error:
        yield
    assert "model.layers.0.mlp.up_proj.weight, ...)" in str(error.value)


@contextmanager
def prepared(cell: Cell, tied: bool, other: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    plugin = fsdp2_plugin(state_dict_type="FULL_STATE_DICT" if cell.full else "SHARDED_STATE_DICT")
    with new_job():
        accelerator = Accelerator(cpu=device_type() == "cpu")
        accelerate.use_strategy(accelerator, STRATEGIES[cell.strategy], plugin=plugin)
        model = make_model(cell.kind, tied, other)
        yield accelerator, *accelerator.prepare(model, optimizer_of(model))


def saved_by_accelerate(folder: str, cell: Cell, tied: bool) -> list[Tensor]:
    """In a worker: a training that is saved in all ways, and ``load_state``."""
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
    with prepared(cell, tied, other=True) as (accelerator, _, _), refusal_of_another_base():
        accelerator.load_state(f"{folder}/state")
    return logits


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


def batches() -> Tensor:
    """Return this rank's batches, by row; the Trainer would take a list for several loaders."""
    return torch.stack([llama.tokens(step) for step in range(STEPS)])


class Module(LightningModule):
    """A Llama for the Trainer; by default another base, for what is loaded."""

    def __init__(self, cell: Cell, other: bool = True) -> None:
        super().__init__()
        self.model, self.cell = make_model(cell.kind, other=other), cell

    def configure_model(self) -> None:
        if self.cell.fsdp == "fsdp2" and self.device_mesh is not None:  # as it is where one process loads it
            mesh = self.device_mesh["data_parallel"]
            shard(self.model, llama.layers_of(self.model), STRATEGIES[self.cell.strategy], mesh)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)

    def on_train_start(self) -> None:
        let_gather(self.cell.fsdp, self.cell.full, self.trainer.strategy)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return llama.loss_of(self.model, batch)


@contextmanager
def lightning_trainer(folder: str, cell: Cell, other: bool = False) -> Iterator[tuple[LightningTrainer, Module]]:
    """Return a context with a trainer that keeps the last of its checkpoints, and a module."""
    with environment():
        trainer = LightningTrainer(
            accelerator=ACCELERATOR,
            **ranks(),
            strategy=make_strategy(cell.fsdp, STRATEGIES[cell.strategy], full=cell.full, layer=LlamaDecoderLayer),
            max_steps=STEPS,
            callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_last=True)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        yield trainer, Module(cell, other)


def saved_by_lightning(folder: str, cell: Cell) -> list[Tensor]:
    """In a worker: a training that is saved in all ways, and resumed."""
    logits: list[Tensor] = []
    for path in (None, f"{folder}/last.ckpt"):
        with lightning_trainer(folder, cell) as (trainer, module):
            trainer.fit(module, batches(), ckpt_path=path)
            logits.append(logits_of(trainer.strategy.model))
            if path is None:
                trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    with lightning_trainer(folder, cell, other=True) as (trainer, module), refusal_of_another_base():
        trainer.fit(module, batches(), ckpt_path=f"{folder}/last.ckpt")
    return logits


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


@pytest.mark.parametrize(
    "cell",
    [replace(PARTLY_FROZEN, fsdp="fsdp1"), replace(LORA, fsdp="fsdp1"), PARTLY_FROZEN],
    ids=["fsdp1, partly", "fsdp1, lora", "fsdp2, partly"],
)
def test_lightning_saves_all(pool: Pools, tmp_path: Path, cell: Cell) -> None:
    logits = check_answers(pool(2).run(saved_by_lightning, str(tmp_path), cell), cell.kind)
    names = ("last", "weights", f"step={STEPS}")
    for name in names:
        checkpoint = tmp_path / f"{name}.ckpt"
        weights = torch.load(checkpoint)["state_dict"] if cell.full else consolidated(checkpoint)["model"]
        check_weights({name.removeprefix("model."): each for name, each in weights.items()}, cell, logits)
        if cell.full:
            check_same(logits_of(Module.load_from_checkpoint(checkpoint, map_location="cpu", cell=cell)), logits)
    if cell.full:
        beside = {path.name for path in tmp_path.glob("*.frozen_base.json")}
        assert beside == {f"{name}.ckpt.frozen_base.json" for name in names}  # none of what was removed


def load_values_for_a_quantized_base(folder: str, cell: Cell) -> None:
    """In a worker: fail unless weights are refused that a checkpoint has for a base that is quantized."""
    with lightning_trainer(folder, replace(cell, strategy="none"), other=True) as (trainer, module):
        trainer.fit(module, batches())
    told = "has values for 9 weights that are quantized in this Module.* nothing beside it says"
    with lightning_trainer(folder, cell) as (trainer, module), pytest.raises(ValueError, match=told):
        trainer.fit(module, batches(), ckpt_path=f"{folder}/last.ckpt")


@pytest.mark.parametrize(("fsdp", "full"), [("fsdp1", False), ("fsdp2", True)])
def test_weights_for_a_quantized_base_are_not_passed_over(pool: Pools, tmp_path: Path, fsdp: str, full: bool) -> None:
    cell = replace(PARTLY_FROZEN, fsdp=fsdp, full=full)
    pool(2).run(load_values_for_a_quantized_base, str(tmp_path), cell)
