"""Codec state that was saved with other weights than those that are loaded is dropped, with a warning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_each, over_pairs
from harness.messages import collected
from harness.pool import Pool
from harness.strategies import COARSE, INTER
from harness.training import load, save, train
from torch import Tensor

from fsdp_zpp import CodecState, Int4, Int4Delta, Int8, LocalSteps, Strategy, agreed_weights

STRATEGIES = {
    "errors": replace(COARSE, error_feedback=INTER),
    "errors and deltas": replace(COARSE, weights=Int4Delta(64, Int8(64)), error_feedback=INTER),
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=2),
    "local steps of replicas": Strategy("NNN", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=2),
}
DROPPED = "was not saved with the weights that were loaded"


def made(adapter: Adapter, strategy: Strategy) -> tuple[Any, Any]:
    model = adapter.make(Case(), strategy)
    return model, models.make_optimizer("adamw", model.parameters())


def save_twice(adapter: Adapter, strategy: Strategy, folder: Path) -> None:
    """Save after two steps and after four."""
    model, optimizer = made(adapter, strategy)
    for name, first_step in (("older", 0), ("newer", 2)):
        train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=first_step)
        save(model, optimizer, CodecState(model, optimizer), str(folder / name))


def resumed(
    adapter: Adapter, strategy: Strategy, folder: Path, codecs_of: str | None, codecs_first: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after steps from the newer weights with the codec state of a checkpoint, and the warnings."""
    model, optimizer = made(adapter, strategy)
    codecs = CodecState(model, optimizer)

    def load_codecs() -> None:
        if codecs_of is not None:
            dcp.load({"codecs": codecs}, checkpoint_id=str(folder / codecs_of))

    with collected() as records:
        if codecs_first:
            load_codecs()
        load(model, optimizer, None, str(folder / "newer"))
        if not codecs_first:
            load_codecs()
        if codecs_of is None:
            codecs.load_state_dict({"layout": "nothing"})
        # Saved again before it is used, it is of the same weights still.
        again = CodecState(model, optimizer).state_dict()
        if codecs_of is not None:
            codecs.load_state_dict(again)
        train(adapter, model, Case(steps=4), optimizer=optimizer, first_step=4)
    return adapter.full_weights(model), [text for level, text in records if level == "WARNING" and "codec" in text]


def mixed(adapter: Adapter, strategy: Strategy, folder: Path, codecs_first: bool) -> list[str]:
    """In a worker: the warnings about codec state of the older checkpoint beside the newer weights."""
    save_twice(adapter, strategy, folder)
    matching, silent = resumed(adapter, strategy, folder, "newer", codecs_first)
    without, _ = resumed(adapter, strategy, folder, None, codecs_first)
    dropped, warnings = resumed(adapter, strategy, folder, "older", codecs_first)
    assert silent == [], silent
    assert models.distance(dropped, without) == 0
    assert models.distance(matching, without) > 0
    return warnings


@over_pairs(adapter=ADAPTERS, strategy=STRATEGIES, codecs_first={"codecs first": True, "weights first": False})
def test_codec_state_of_an_older_save_is_dropped_and_one_rank_says_so(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, strategy: Strategy, codecs_first: bool
) -> None:
    first, *others = pool(4).run(mixed, adapter, strategy, tmp_path, codecs_first)
    assert len(first) == 1
    assert DROPPED in first[0]
    assert "start" in first[0]
    assert others == [[]] * 3


def one_rank_has_older(adapter: Adapter, folder: Path) -> float:
    """In a worker: the distance to what starts over, if one rank's codec state alone is older."""
    strategy = STRATEGIES["errors"]
    model, optimizer = made(adapter, strategy)
    states = []
    for first_step in (0, 2):
        train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=first_step)
        states.append(CodecState(model).state_dict())
    save(model, optimizer, CodecState(model), str(folder))
    trained = []
    for state in (states[torch.distributed.get_rank() != 1], {"layout": "nothing"}):
        model, optimizer = made(adapter, strategy)
        load(model, optimizer, None, str(folder))
        CodecState(model).load_state_dict(state)
        train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=4)
        trained.append(adapter.full_weights(model))
    return models.distance(*trained)


@over_each(adapter=ADAPTERS)
def test_all_ranks_drop_what_does_not_match_on_one(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter
) -> None:
    assert pool(4).run(one_rank_has_older, adapter, tmp_path) == [0] * 4


def resumed_beside_agreed(adapter: Adapter, strategy: Strategy, folder: Path) -> list[str]:
    """In a worker: the warnings if the agreed weights were saved, and codec state that replaces them."""
    losses = []
    for is_resumed in (False, True):
        model, optimizer = made(adapter, strategy)
        state = {"codecs": CodecState(model, optimizer)}
        if is_resumed:
            with collected() as records:
                load(model, optimizer, None, str(folder / "agreed"))
                dcp.load(state, checkpoint_id=folder / "codecs")
                losses.append(train(adapter, model, Case(steps=3), optimizer=optimizer, first_step=4))
        else:
            train(adapter, model, Case(steps=4), optimizer=optimizer)
            with agreed_weights(model):
                save(model, optimizer, CodecState(model, optimizer), str(folder / "agreed"))
            dcp.save(state, checkpoint_id=folder / "codecs")
            losses.append(train(adapter, model, Case(steps=3), optimizer=optimizer, first_step=4))
    assert losses[0] == losses[1]
    return [text for level, text in records if level == "WARNING" and "codec" in text]


@over_each(adapter=ADAPTERS, strategy={name: each for name, each in STRATEGIES.items() if each.local_steps})
def test_agreed_weights_may_lie_beside_the_codec_state_of_nodes(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, strategy: Strategy
) -> None:
    assert pool(4).run(resumed_beside_agreed, adapter, strategy, tmp_path) == [[]] * 4
