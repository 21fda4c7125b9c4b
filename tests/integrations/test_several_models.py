"""accelerate with several models and optimizers: each is saved and loaded with its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from harness import llama, models
from harness.pool import Pool, device_type
from hugging_face import new_job

from fsdp_zpp import Int4, Int4Delta, LoCo, Strategy
from fsdp_zpp.integrations.accelerate import use_strategy

STATEFUL = Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=2)


def two_trained(folder: str, state_dict: str) -> list[list[float]]:
    """In a worker: losses of two models, one with two optimizers: all, and those after a checkpoint in other objects.

    A third, which is evaluated, is prepared before them, as a teacher is.
    """
    losses: list[list[float]] = []
    for part in (slice(0, 4), slice(0, 2), slice(2, 4)):
        with new_job():
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type=state_dict
            )
            accelerator = use_strategy(Accelerator(cpu=device_type() == "cpu"), STATEFUL, plugin=plugin)
            accelerator.prepare(models.make_net(blocks=2))
            first, second = llama.make_base(), llama.make_base(tied=True)
            halves = [list(second.model.layers.parameters()), list(second.model.embed_tokens.parameters())]
            first, optimizer = accelerator.prepare(first, torch.optim.AdamW(first.parameters(), lr=2e-3))
            others = [torch.optim.AdamW(halves[0], lr=2e-3), torch.optim.SGD(halves[1], lr=0.1, momentum=0.9)]
            second, *others = accelerator.prepare(second, *others)
            if part.start:
                accelerator.load_state(folder)
            run = []
            for step in range(4)[part]:
                for model in (first, second):
                    loss = llama.loss_of(model, llama.tokens(step))
                    accelerator.backward(loss)
                    run.append(float(loss))
                for each in (optimizer, *others):
                    each.step()
                    each.zero_grad()
            losses.append(run)
            if not part.start:
                accelerator.save_state(folder)
    return losses


@pytest.mark.parametrize("state_dict", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_several_models_and_optimizers_go_on_bit_for_bit(
    pool: Callable[[int], Pool], tmp_path: Path, state_dict: str
) -> None:
    for whole, first, second in pool(4).run(two_trained, str(tmp_path), state_dict):
        assert first + second == whole
