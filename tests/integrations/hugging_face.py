"""accelerate and Trainer in workers of a pool, which run one job after the other, and examples in processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from harness.launch import launch
from harness.pool import device_type
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from transformers import Trainer, TrainingArguments

from fsdp_zpp.fsdp2._torch_weights import groups_of, state_of

STEPS = 4
TOKENS = torch.arange(1, 13).view(1, -1)
SMALL_EXAMPLE = ["--hidden", "32", "--layers", "2", "--gpus-per-node", "1"]


@contextmanager
def new_job() -> Iterator[None]:
    """Return a context without what accelerate has kept for the process, and after which it keeps nothing."""
    _forget()
    tf32 = torch.backends.cuda.matmul.allow_tf32  # which accelerate allows if a model is to be compiled
    try:
        with mock.patch.dict(os.environ):  # plugins and arguments set variables for all that come
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def fsdp2_plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    """Return accelerate's own description of FSDP2, with sharded state dicts unless options say otherwise."""
    return FullyShardedDataParallelPlugin(
        **{"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "SHARDED_STATE_DICT"}
        | options
    )


def choose_own_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Make accelerate shard by its own FSDP2, which it does not choose on a CPU."""
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def shard_trainer_by_own_fsdp(trainer: Trainer) -> None:
    """Make a trainer shard by accelerate's own FSDP2, which it does not choose on a CPU."""
    choose_own_fsdp(trainer.accelerator, fsdp2_plugin())
    trainer.is_fsdp_enabled = True


def offloads(model: nn.Module) -> bool:
    """Return whether all units of a model are offloaded: on a CPU, private names of torch's FSDP2 alone tell."""
    units = [each for each in model.modules() if isinstance(each, FullyShardedDataParallel)]
    groups = [group for each in model.modules() if isinstance(each, FSDPModule) for group in groups_of(state_of(each))]
    of_units = {each.cpu_offload.offload_params for each in units}
    (is_offloaded,) = of_units | {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups}
    return is_offloaded


def make_trainer(folder: str, model: nn.Module, cls: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """Return a trainer of two micro-batches a step, with an evaluation every other step, on tokens that are few."""
    arguments = TrainingArguments(
        **{
            "output_dir": folder,
            "use_cpu": device_type() == "cpu",
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 2e-3,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        | options
    )
    return cls(model, arguments, train_dataset=_rows(4 * STEPS * 4, 0), eval_dataset=_rows(16, 1))


def _rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 40, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def logged(trainer: Trainer, what: str) -> list[float]:
    return [entry[what] for entry in trainer.state.log_history if what in entry]


def run_example(script: str, *options: str | Path) -> list[str]:
    """Run an example on two processes, as two nodes; return the losses that it prints, as it prints them."""
    result = launch(2, f"examples/{script}", *options, on_cpu=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "'inter': 0}" not in result.stdout
    return re.findall(r"(?:loss |'loss': ')([\d.]+)", result.stdout)
