"""Codec state of two models on disjoint halves of a job: each is saved, loaded, and told of what does not match."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Case
from harness.covering import over_each
from harness.fsdp2 import Fsdp2
from harness.messages import collected
from harness.pool import Pool
from harness.training import train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_zpp import CodecState, Int4, Int4Delta, LocalSteps, LoCo, Strategy

STRATEGIES = {
    "errors and deltas": Strategy(
        "IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=1
    ),
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=1),
}


def on_halves(strategy: Strategy, folder: Path, alone: bool) -> tuple[list[float], list[float], list[list[str]]]:
    """In a worker: losses of a training, of one that resumes, and the warnings of that and of one with older codecs.

    ``alone`` says whether only the second half has a model.
    """
    groups, half = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])], dist.get_rank() // 2
    if alone and half == 0:
        return [], [], [[], []]
    folder = folder / str(half)

    def made() -> tuple[Any, Any]:
        model = Fsdp2().make(Case(), strategy, groups[half])
        return model, models.make_optimizer("adamw", model.parameters())

    model, optimizer = made()
    for name, first_step in (("older", 0), ("newer", 2)):
        train(Fsdp2(), model, Case(steps=2 + half), optimizer=optimizer, first_step=first_step)
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "codecs": CodecState(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / name, process_group=groups[half])
    expected = train(Fsdp2(), model, Case(steps=4), optimizer=optimizer, first_step=5)
    found, warnings = [], []
    for codecs_of in ("newer", "older"):
        model, optimizer = made()
        weights, states = get_state_dict(model, optimizer)
        parts = {"newer": {"model": weights, "optimizer": states}}
        parts.setdefault(codecs_of, {})["codecs"] = CodecState(model, optimizer)
        with collected() as records:
            for name, part in parts.items():
                dcp.load(part, checkpoint_id=folder / name, process_group=groups[half])
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
            found.append(train(Fsdp2(), model, Case(steps=4), optimizer=optimizer, first_step=5))
        warnings.append([text for level, text in records if level == "WARNING" and "codec state" in text])
    assert found[1] != found[0]
    return expected, found[0], warnings


@pytest.mark.parametrize("alone", [False, True], ids=["two models", "one on the second half"])
@over_each(strategy=STRATEGIES)
def test_each_half_resumes_its_own_and_its_first_rank_warns(
    pool: Callable[[int], Pool], tmp_path: Path, strategy: Strategy, alone: bool
) -> None:
    by_rank = pool(4).run(on_halves, strategy, tmp_path, alone)
    for expected, found, _ in by_rank:
        assert found == expected
    told = [[len(each) for each in warnings] for _, _, warnings in by_rank]
    assert told == [[0, int(not alone)], [0, 0], [0, 1], [0, 0]]
