"""Checkpoints of nodes that train in step at times, and on their own at others."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_each, over_pairs
from harness.pool import Pool
from harness.training import differing_tensors, load, save, train
from test_local_checkpoints import LAYOUTS, resumed

from fsdp_zpp import CodecState, Int4, Int8, LocalSteps, LoCo, Strategy, exchange_weights

SAVED = {
    "in the start": LocalSteps(2, start=6),
    "in the start, at once": LocalSteps(3, start=7, spread=False, offload=True),
    "after its last step": LocalSteps(3, start=4, overlap=1),
    "after it": LocalSteps(3, start=3, overlap=2, mix=0.5),
    "before the stop": LocalSteps(3, stop=6, overlap=1),
    "after the last local step": LocalSteps(4, start=1, stop=4, overlap=3, mix=0.5),
    "after the stop": LocalSteps(2, start=1, stop=3, error_feedback=LoCo()),
    "between segments": LocalSteps(((0, 2), (4, 3), (6, 1)), start=2),
}
"""By where a training is when it is saved, after four steps of eight."""
CODECS: dict[str, dict[str, Any]] = {
    "no codec": {},
    "errors between nodes": {"gradients": Int4(32), "error_feedback": LoCo()},
    "errors on both hops": {"gradients": Int4(32), "intra_gradients": Int8(32), "error_feedback": LoCo(hops="both")},
}


@over_each(
    times=2,
    adapter=ADAPTERS,
    config=SAVED,
    layout=LAYOUTS,
    codecs=CODECS,
    optimizer=["sgd", "adamw-foreach"],
    codecs_last={"all at once": False, "codecs last": True},
    trained={"into a new model": False, "into one that has trained": True},
)
def test_a_training_resumes_bit_for_bit_in_every_phase(
    pool: Callable[[int], Pool],
    tmp_path: Path,
    adapter: Adapter,
    config: LocalSteps,
    layout: tuple[str, int],
    codecs: dict[str, Any],
    optimizer: str,
    codecs_last: bool,
    trained: bool,
) -> None:
    strategy = Strategy(layout[0], local_steps=config, gpus_per_node=layout[1], **codecs)
    pool(4).run(resumed, adapter, strategy, optimizer, str(tmp_path / "checkpoint"), codecs_last, trained)


def rescheduled(adapter: Adapter, strategy: Strategy, config: LocalSteps, path: str) -> tuple[int, int, int]:
    """In a worker: differing tensors of a training when it is saved, and when it goes on in another schedule."""
    case, found = Case(steps=4, optimizer="adamw-foreach"), []
    for each in (strategy, replace(strategy, local_steps=config)):
        model = adapter.make(case, each)
        optimizer = models.make_optimizer(case.optimizer, model.parameters())
        if each is strategy:
            train(adapter, model, case, optimizer=optimizer)
            found.append(differing_tensors(adapter, model))
            save(model, optimizer, CodecState(model, optimizer), path)
            continue
        load(model, optimizer, CodecState(model, optimizer), path)
        for steps, first in ((1, 4), (4, 5)):
            train(adapter, model, replace(case, steps=steps), optimizer=optimizer, first_step=first)
            found.append(differing_tensors(adapter, model))
    return found[0], found[1], found[2]


@over_pairs(
    adapter=ADAPTERS,
    layout=LAYOUTS,
    change={
        "stopped already": (LocalSteps(3), LocalSteps(3, stop=2), (True, False, False)),
        "in a start that was put off": (LocalSteps(3), LocalSteps(3, start=6), (True, False, True)),
        "started no more": (LocalSteps(3, start=6), LocalSteps(3), (False, True, True)),
        "stopped no more": (LocalSteps(2, stop=3), LocalSteps(2), (False, True, True)),
    },
)
def test_a_training_goes_on_in_another_schedule(
    pool: Callable[[int], Pool],
    tmp_path: Path,
    adapter: Adapter,
    layout: tuple[str, int],
    change: tuple[LocalSteps, LocalSteps, tuple[bool, bool, bool]],
) -> None:
    before, after, differ = change
    strategy = Strategy(layout[0], gpus_per_node=layout[1], local_steps=before)
    for found in pool(4).run(rescheduled, adapter, strategy, after, str(tmp_path / "checkpoint")):
        assert tuple(n > 0 for n in found) == differ


def resumed_without_a_stop(adapter: Adapter, levels: str, path: str) -> float:
    """In a worker: how far a model that has trained before is from a new one, once both have loaded and gone on."""
    case, configs = Case(steps=4), (LocalSteps(2, stop=2), LocalSteps(2))
    stopped, *others = (
        adapter.make(case, Strategy(levels, gpus_per_node=2, local_steps=configs[at > 0])) for at in range(3)
    )
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in (stopped, *others)]
    for model, optimizer in zip((stopped, others[0]), optimizers, strict=False):
        train(adapter, model, case, optimizer=optimizer)
    save(stopped, optimizers[0], CodecState(stopped, optimizers[0]), path)
    for model, optimizer in zip(others, optimizers[1:], strict=True):
        load(model, optimizer, CodecState(model, optimizer), path)
        train(adapter, model, case, optimizer=optimizer, first_step=4)
        exchange_weights(model)
    return models.distance(*map(adapter.full_weights, others))


@over_pairs(adapter=ADAPTERS, levels=["III", "NNN"])
def test_a_stopped_training_takes_nothing_over_from_the_model_that_loads_it(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, levels: str
) -> None:
    assert pool(4).run(resumed_without_a_stop, adapter, levels, str(tmp_path / "checkpoint")) == [0] * 4


class WithoutPhases:
    """Codec state as it was saved before there were phases."""

    def __init__(self, codecs: CodecState) -> None:
        self.codecs = codecs

    def state_dict(self) -> dict[str, Any]:
        """The same without what came with phases."""
        return {key: self._older(value) if "local steps of" in key else value for key, value in self._saved()}

    def _saved(self) -> Any:
        return self.codecs.state_dict().items()

    @staticmethod
    def _older(saved: Any) -> bytes:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        assert state["progress"].pop("apart")
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is loaded into it."""
        raise NotImplementedError


def resumed_from_older(adapter: Adapter, path: str) -> tuple[float, int]:
    """In a worker: how far a training that was saved without phases is from one that went on; differing tensors."""
    strategy, case = Strategy("III", local_steps=LocalSteps(3), gpus_per_node=2), Case(steps=4)
    first, second = adapter.make(case, strategy), adapter.make(case, strategy)
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in (first, second)]
    train(adapter, first, case, optimizer=optimizers[0])
    save(first, optimizers[0], WithoutPhases(CodecState(first, optimizers[0])), path)  # type: ignore[arg-type]
    load(second, optimizers[1], CodecState(second, optimizers[1]), path)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        train(adapter, model, case, optimizer=optimizer, first_step=4)
    differing = differing_tensors(adapter, second)
    for model in (first, second):
        exchange_weights(model)
    return models.distance(adapter.full_weights(first), adapter.full_weights(second)), differing


@over_adapters
def test_an_older_checkpoint_is_of_nodes_on_their_own(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter
) -> None:
    for distance, differing in pool(4).run(resumed_from_older, adapter, str(tmp_path / "checkpoint")):
        assert distance == 0
        assert differing > 0
