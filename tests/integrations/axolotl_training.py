"""Trainings by axolotl's own functions, for test_axolotl.py.

axolotl does not mean to train in several processes on CPUs. Of its ways to place a model only that of ``fsdp_config``
needs no GPU, but for a mesh of GPUs, which the strategy's plugin leaves out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.loaders import ModelLoader
from harness.launch import ROOT
from harness.pool import device_type
from hugging_face import choose_own_fsdp, new_job
from tiny_chats import TOKENS as TOKENS, write_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import traffic

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"  # which axolotl looks at when it begins to train, here and in workers

EXAMPLE = ROOT / "examples" / "axolotl_lora.yaml"


class OwnShardingPlugin(BasePlugin):
    """axolotl's own FSDP2, which accelerate does not choose on a CPU."""

    def register(self, cfg: Any) -> None:
        if device_type() == "cpu":
            ModelLoader.use_parallel_config = None

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        choose_own_fsdp(trainer.accelerator, FullyShardedDataParallelPlugin(fsdp_version=2))
        trainer.is_fsdp_enabled = True


OWN = {
    "plugins": [f"{__name__}.{OwnShardingPlugin.__name__}"],
    "fsdp_zpp": None,
    "fsdp_version": 2,
    "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"},
    "experimental_skip_move_to_device": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
"""Options of the example without a strategy."""

NO_KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
"""axolotl sets them where the base is not quantized, and some run on GPUs alone."""

WHOLE = {"adapter": None, "learning_rate": 2e-3, "val_set_size": 16, "eval_steps": 2}
"""Options of the example without adapters, and with evaluations."""

PARTLY_FROZEN = WHOLE | {"unfrozen_parameters": ["model.layers.1.*", "model.norm.*"]}
"""Options of the example without adapters, of which the last layer and the norm are trained."""


def write_models_and_texts(folder: Path) -> None:
    """Write a small model in fp32, in ``model``, and in bf16, in ``bf16``, its tokenizer of bytes, and texts."""
    for name, dtype in {"model": torch.float32, "bf16": torch.bfloat16}.items():
        write_model(folder / name, dtype, positions=64, chat_template=None)
    texts = [f"{a} plus {b} is {a + b}" for a in range(16) for b in range(8)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def import_axolotl() -> None:
    """Import axolotl, in a worker."""
    import axolotl.cli.config
    import axolotl.common.datasets
    import axolotl.core.trainers
    import axolotl.train  # noqa: F401


@contextmanager
def axolotl_job() -> Iterator[None]:
    """Return a context in which axolotl runs as its command would run it, and after which it keeps nothing."""
    offline = {"HF_HUB_OFFLINE": "1"}
    on_cpu = {"ACCELERATE_USE_CPU": "true"} if device_type() == "cpu" else {}
    PluginManager.get_instance().plugins.clear()
    with (
        new_job(),
        patch.dict(os.environ, offline | on_cpu),
        patch.object(sys, "argv", ["axolotl"]),
        patch("axolotl.utils.distributed.distributed_state", None),  # which accelerate has forgotten
        patch("axolotl.train.cleanup_distributed"),  # the workers' process group outlives a job
        patch.object(ModelLoader, "use_parallel_config", ModelLoader.use_parallel_config),  # which plugins change
    ):
        yield


def options_for(folder: Path, output: Path) -> dict[str, Any]:
    """Return the options for the small model: four steps of two micro-batches."""
    return {
        "base_model": str(folder / "model"),
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
        "bf16": False,
    }


@dataclass
class Result:
    """Results that a training leaves behind."""

    losses: list[float]
    evaluated: list[float]
    logits: Tensor
    """Logits of the model as it is then, sharded."""
    sent: dict[str, Any] | None
    """Traffic of the strategy."""
    best: str | None
    """Folder of the best checkpoint, if one was to be found."""


def trained(options: dict[str, Any]) -> Result:
    """In a worker: a training by axolotl's own functions."""
    with axolotl_job():
        from axolotl.cli.args import TrainerCliArgs
        from axolotl.cli.config import load_cfg
        from axolotl.common.datasets import load_datasets
        from axolotl.train import train

        torch.manual_seed(0)  # axolotl makes adapters before it sets a seed
        cfg = load_cfg(str(EXAMPLE), **options)
        model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
        assert isinstance(trainer.model, FSDPModule)  # by itself accelerate would choose DDP on a CPU
        with torch.no_grad():
            logits = model(input_ids=TOKENS.to(trainer.args.device)).logits.float().cpu()
        losses, evaluated = (
            [entry[name] for entry in trainer.state.log_history if name in entry] for name in ("loss", "eval_loss")
        )
        sent = None if options["fsdp_zpp"] is None else traffic(model)
        return Result(losses, evaluated, logits, sent, trainer.state.best_model_checkpoint)


def merge(options: dict[str, Any]) -> None:
    """In a worker: what ``axolotl merge-lora`` does."""
    with axolotl_job():
        from axolotl.cli.merge_lora import do_cli

        do_cli(config=str(EXAMPLE), **options)
