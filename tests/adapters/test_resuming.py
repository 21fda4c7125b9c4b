"""A training that is saved, loaded and goes on is the one that never stopped; what does not fit is dropped."""

from __future__ import annotations

import io
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.messages import collected
from harness.offload import offloading, without_pinning
from harness.pool import Pools
from harness.strategies import BOTH, COARSE, INTER
from harness.training import differing_tensors, load, make_scaler, save, scaled_steps, train
from local_nodes import LAYOUTS, ONE_BLOCK, TRAINED, set_trained, train_parts
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fsdp_zpp import (
    CodecState,
    Int4,
    Int4Delta,
    Int8,
    LocalSteps,
    LoCo,
    Strategy,
    agreed_weights,
    exchange_weights,
)

KEPT = {
    "errors between nodes": replace(COARSE, error_feedback=replace(INTER, reset_every=4)),
    "errors on both hops": replace(COARSE, error_feedback=replace(BOTH, reset_every=4)),
    "errors and deltas": replace(COARSE, weights=Int4Delta(64, Int8(64)), error_feedback=INTER),
}
"""Strategies with codecs that keep something from step to step."""
SMALL = Case(model=(("blocks", 1),), optimizer="adamw")
LONG = replace(SMALL, steps=4, optimizer="adamw-foreach")
CASES = {"no_sync": replace(LONG, micro_batches=2), "synced": replace(LONG, micro_batches=2, synced=True)}

LOCAL = {
    "int4": LocalSteps(3),
    "on its way": LocalSteps(4, overlap=3, mix=0.5, spread=False),
    "with errors": LocalSteps(2, error_feedback=LoCo(dtype=Int8(32)), overlap=1),
    "on the CPU": LocalSteps(2, offload=True),
    "momentum that fits": LocalSteps(1, outer_momentum="auto", outer_lr=1),
    "with moments": LocalSteps(2, moments_every=2),
    "in the start": LocalSteps(3, start=7, spread=False, offload=True),
    "after its last step": LocalSteps(3, start=4, overlap=1),
    "after the start": LocalSteps(3, start=3, overlap=2, mix=0.5),
    "before the stop": LocalSteps(3, stop=6, overlap=1),
    "after the last local step": LocalSteps(4, start=1, stop=4, overlap=3, mix=0.5),
    "after the stop": LocalSteps(2, start=1, stop=3, error_feedback=LoCo()),
    "between segments": LocalSteps(((0, 2), (4, 3), (6, 1)), start=2),
}
"""By what they keep, and by where they are after four steps of eight, when a training is saved."""
CODECS: dict[str, dict[str, Any]] = {
    "no codec": {},
    "errors between nodes": {"gradients": Int4(32), "error_feedback": LoCo()},
    "errors on both hops": {"gradients": Int4(32), "intra_gradients": Int8(32), "error_feedback": LoCo(hops="both")},
}
WAYS = ("at once", "codecs last", "trained before, codecs last", "saved again")
"""How a model takes over."""
WAYS_OF_CODECS = (*WAYS, "offloaded", "a rank without rows")
LOCAL_WAYS = (
    *WAYS,
    "agreed weights shown at the save",
    "offloaded",
    "frozen, codecs last",
    "a root without parameters",
)


class Outermost(nn.Module):
    """A module whose parameters are all in a unit inside it."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    @property
    def embedding(self) -> nn.Module:
        return self.net.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


def made(adapter: Adapter, case: Case, strategy: Strategy | None, way: str = "") -> tuple[Any, Any]:
    """A model and its optimizer."""
    if way == "a rank without rows":
        model = adapter.shard(lora.make_net(blocks=1), case, strategy)
    else:
        model = adapter.make(case, strategy)
    if way == "a root without parameters":
        model = adapter.wrap(Outermost(model), strategy)
    return model, models.make_optimizer(case.optimizer, (p for p in model.parameters() if p.requires_grad))


def take_over(adapter: Adapter, model: Any, optimizer: Any, path: str, way: str) -> None:
    """In a worker: load what was saved."""
    if "trained before" in way:
        train(adapter, model, Case(steps=1), optimizer=optimizer, first_step=50)
    codecs = CodecState(model, [optimizer])
    load(model, optimizer, None if "codecs last" in way else codecs, path)
    if "codecs last" in way:
        model.requires_grad_("frozen" not in way)
        dcp.load({"codecs": codecs}, checkpoint_id=path)
        model.requires_grad_(True)
    if way == "saved again":  # before any forward, by objects of its own
        for move in (save, load):
            move(model, optimizer, CodecState(model, optimizer), path + "-again")


def resumed(adapter: Adapter, strategy: Strategy, case: Case, way: str, path: str) -> None:
    """In a worker: a training that is saved and goes on, and one that goes on from there, are the same on each node."""
    with ExitStack() as stack:
        if way == "offloaded":
            stack.enter_context(without_pinning())
            adapter = offloading(adapter)
        check_resumed(adapter, strategy, case, way, path)


def check_resumed(adapter: Adapter, strategy: Strategy, case: Case, way: str, path: str) -> None:
    (first, optimizer), (second, its_optimizer) = (made(adapter, case, strategy, way) for _ in range(2))
    train(adapter, first, case, optimizer=optimizer)
    with agreed_weights(first) if "agreed" in way else nullcontext():
        save(first, optimizer, CodecState(first, optimizer), path)
        if "agreed" in way:
            models.loss_of(first, models.batch(9, 0))  # an evaluation that records gradients
    expected = train(adapter, first, case, optimizer=optimizer, first_step=4)
    take_over(adapter, second, its_optimizer, path, way)
    assert train(adapter, second, case, optimizer=its_optimizer, first_step=4) == expected
    assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0
    if strategy.local_steps is not None:
        for model in (first, second):
            exchange_weights(model)
        assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0


# Without a mesh, FullyShardedDataParallel, stock too, can't load its checkpoint where a rank has no row of a weight.
@over_each(rest=False, adapter=[Fsdp1(mesh=True), Fsdp2()], strategy=KEPT, case=CASES, way=WAYS_OF_CODECS)
def test_a_training_resumes_with_what_codecs_keep(
    pool: Pools, tmp_path: Path, adapter: Adapter, strategy: Strategy, case: Case, way: str
) -> None:
    pool(4).run(resumed, adapter, strategy, case, way, str(tmp_path / "checkpoint"))


def resumed_with_scaler(adapter: Adapter, strategy: Strategy, path: str, goes_on_scaled: bool) -> float:
    """In a worker: likewise, with a loss scale that changes just before saving, or is given up then."""
    trained, scale = [], {}
    for resumes in (False, True):
        (model, optimizer), scaler = made(adapter, SMALL, strategy), make_scaler()
        if resumes:
            load(model, optimizer, CodecState(model), path)
            scaler.load_state_dict(scale)
        else:
            scaled_steps(model, optimizer, scaler, range(2))
            save(model, optimizer, CodecState(model), path)
            scale = scaler.state_dict()
        scaler = scaler if goes_on_scaled else make_scaler(False)
        scaled_steps(model, optimizer, scaler, [2, -1, 3] if goes_on_scaled else [2, 3])
        trained.append(adapter.full_weights(model))
    return models.distance(*trained)


@over_each(
    rest=False,
    adapter=ADAPTERS,
    strategy={name: KEPT[name] for name in ("errors between nodes", "errors on both hops")},
    goes_on_scaled={"scaled": True, "unscaled from then on": False},
)
def test_a_training_resumes_with_a_loss_scale(
    pool: Pools, tmp_path: Path, adapter: Adapter, strategy: Strategy, goes_on_scaled: bool
) -> None:
    path = str(tmp_path / "checkpoint")
    assert pool(4).run(resumed_with_scaler, adapter, strategy, path, goes_on_scaled) == [0] * 4


@over_each(
    rest=False,
    adapter=ADAPTERS,
    config=LOCAL,
    layout=LAYOUTS[1:],
    codecs=CODECS,
    optimizer=["adamw-foreach", "sgd", "adamw-foreach"],
    way=LOCAL_WAYS,
)
def test_a_training_resumes_bit_for_bit_on_every_node(
    pool: Pools,
    tmp_path: Path,
    adapter: Adapter,
    config: LocalSteps,
    layout: tuple[str, int],
    codecs: dict[str, Any],
    optimizer: str,
    way: str,
) -> None:
    encoded = codecs if config.has_synchronous_steps else {}
    strategy = Strategy(layout[0], local_steps=config, gpus_per_node=layout[1], **encoded)
    case = replace(LONG, optimizer=optimizer)
    pool(4).run(resumed, adapter, strategy, case, way, str(tmp_path / "checkpoint"))


def resumed_in_parts(adapter: Adapter, trained: str, is_older: bool) -> float:
    """In a worker: how far a training whose trained parameters change is from one that was loaded, in the end."""
    config = LocalSteps(3, codec=Int4(32), error_feedback=LoCo(beta=0.0), overlap=1)
    strategy = Strategy("III", gpus_per_node=2, local_steps=config)
    (model, optimizer), (again, its_optimizer) = (made(adapter, ONE_BLOCK, strategy) for _ in range(2))
    train_parts(adapter, model, optimizer, TRAINED[trained][:5])
    saved = CodecState(model, optimizer).state_dict()
    set_trained(again, TRAINED[trained][4])
    CodecState(again, its_optimizer).load_state_dict(without_phases(saved) if is_older else saved)
    set_model_state_dict(again, get_model_state_dict(model))
    for each, its in ((model, optimizer), (again, its_optimizer)):
        train_parts(adapter, each, its, TRAINED[trained][5:8], first_step=5)
        exchange_weights(each)
    return models.distance(adapter.full_weights(again), adapter.full_weights(model))


def without_phases(saved: dict[str, Any]) -> dict[str, Any]:
    """Codec state of nodes on their own, as it was saved before there were phases."""
    older = dict(saved)
    for name in [name for name in saved if "local steps of" in name]:
        state = torch.load(io.BytesIO(saved[name]), weights_only=True)
        assert state["progress"].pop("apart")
        torch.save(state, buffer := io.BytesIO())
        older[name] = buffer.getvalue()
    return older


@over_each(
    rest=False,
    adapter=ADAPTERS,
    trained=["a, then b", "a and again", "turns"],
    is_older={"": False, "without phases": True},
)
def test_a_training_of_ever_other_parameters_resumes(
    pool: Pools, adapter: Adapter, trained: str, is_older: bool
) -> None:
    assert pool(4).run(resumed_in_parts, adapter, trained, is_older) == [0] * 4


# ---- in another schedule


def rescheduled(adapter: Adapter, strategy: Strategy, config: LocalSteps, path: str) -> tuple[int, int, int]:
    """In a worker: differing tensors of a training when it is saved, and when it goes on in another schedule.

    A new model goes on as one that has trained before, of which nothing is taken over.
    """
    case, found = LONG, []
    model, optimizer = made(adapter, case, strategy)
    train(adapter, model, case, optimizer=optimizer)
    found.append(differing_tensors(adapter, model))
    save(model, optimizer, CodecState(model, optimizer), path)
    new, used = (made(adapter, case, replace(strategy, local_steps=config)) for _ in range(2))
    train(adapter, used[0], replace(case, steps=1), optimizer=used[1], first_step=50)
    for each, its_optimizer in (used, new):
        load(each, its_optimizer, CodecState(each, its_optimizer), path)
    for steps, first in ((1, 4), (4, 5)):
        for each, its_optimizer in (used, new):
            train(adapter, each, replace(case, steps=steps), optimizer=its_optimizer, first_step=first)
        found.append(differing_tensors(adapter, new[0]))
    for each, _ in (used, new):
        exchange_weights(each)
    assert models.distance(adapter.full_weights(used[0]), adapter.full_weights(new[0])) == 0
    return found[0], found[1], found[2]


@over_each(
    rest=False,
    adapter=ADAPTERS,
    layout=[("III", 2), ("NNI", 2), ("NNN", 1)],
    change={
        "stopped already": (LocalSteps(3), LocalSteps(3, stop=2), (True, False, False)),
        "in a start that was put off": (LocalSteps(3), LocalSteps(3, start=6), (True, False, True)),
        "started no more": (LocalSteps(3, start=6), LocalSteps(3), (False, True, True)),
        "stopped no more": (LocalSteps(2, stop=2), LocalSteps(2), (False, True, True)),
    },
)
def test_a_training_goes_on_in_another_schedule(
    pool: Pools,
    tmp_path: Path,
    adapter: Adapter,
    layout: tuple[str, int],
    change: tuple[LocalSteps, LocalSteps, tuple[bool, bool, bool]],
) -> None:
    before, after, differ = change
    strategy = Strategy(layout[0], gpus_per_node=layout[1], local_steps=before)
    for found in pool(4).run(rescheduled, adapter, strategy, after, str(tmp_path / "checkpoint")):
        assert tuple(n > 0 for n in found) == differ


# ---- on other ranks


def saved_here(adapter: Adapter, strategy: Strategy, path: str) -> dict[str, Tensor]:
    """In a worker: save after some steps, the agreed weights if there are any; return them."""
    model, optimizer = made(adapter, SMALL, strategy)
    train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer)
    with agreed_weights(model) if strategy.local_steps is not None else nullcontext():
        save(model, optimizer, CodecState(model, optimizer), path)
        return adapter.full_weights(model)


def loaded_elsewhere(
    adapter: Adapter, strategy: Strategy | None, path: str
) -> tuple[dict[str, Tensor], list[str], int]:
    """In a worker of another world: the weights, warnings, and how many tensors differ between nodes after steps."""
    model, optimizer = made(adapter, SMALL, strategy)
    train(adapter, model, replace(SMALL, steps=1), optimizer=optimizer)
    load(model, optimizer, None, path)
    with collected() as records:
        if strategy is not STOCK:
            state = {"codecs": CodecState(model, optimizer)}
            dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    weights = adapter.full_weights(model)
    train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer, first_step=2)
    if strategy is not STOCK and strategy.local_steps is not None:
        exchange_weights(model)
    return weights, [text for level, text in records if level == "WARNING"], differing_tensors(adapter, model)


Layout = tuple[int, int]
"""Ranks, and how many of them a node has."""
TWO_OF_TWO = (4, 2)
STARTS_OVER: dict[str, tuple[Layout, Layout, Strategy, tuple[str, ...]]] = {
    "errors": (TWO_OF_TWO, (2, 1), replace(COARSE, error_feedback=INTER), ("start from zero",)),
    "errors and deltas, on more ranks": (
        (2, 1),
        TWO_OF_TWO,
        KEPT["errors and deltas"],
        ("start from zero", "weights are sent whole"),
    ),
    "errors, on one node": (TWO_OF_TWO, (2, 2), replace(COARSE, error_feedback=INTER), ("not used",)),
    "local steps": (TWO_OF_TWO, (4, 1), Strategy("III", local_steps=LocalSteps(2)), ("start over from the loaded",)),
    "nothing": (TWO_OF_TWO, (2, 1), Strategy.zeropp(), ()),
}
"""The layouts before and after, a strategy, and what is said."""


@over_each(rest=False, adapter=ADAPTERS, kept=STARTS_OVER)
def test_another_layout_starts_over_from_the_saved_weights_and_says_so(
    pool: Pools, tmp_path: Path, adapter: Adapter, kept: tuple[Layout, Layout, Strategy, tuple[str, ...]]
) -> None:
    (ranks, per_node), (world, gpus_per_node), strategy, said = kept
    path = str(tmp_path / "checkpoint")
    saved = pool(ranks).run(saved_here, adapter, replace(strategy, gpus_per_node=per_node), path)[0]
    found = pool(world).run(loaded_elsewhere, adapter, replace(strategy, gpus_per_node=gpus_per_node), path)
    for rank, (weights, warnings, differing) in enumerate(found):
        assert models.distance(weights, saved) == 0
        assert differing == 0
        assert len(warnings) == (rank == 0 and bool(said))
        for part in (*said, f"{ranks} ranks as 2 nodes x {per_node}"):
            assert all(part in text for text in warnings)
    if not said:
        for weights, _, _ in pool(2).run(loaded_elsewhere, adapter, STOCK, path):
            assert models.distance(weights, saved) == 0


def on_halves(strategy: Strategy, folder: Path, alone: bool) -> tuple[list[float], list[float], list[list[str]]]:
    """In a worker: losses of a training, of one that resumes, and the warnings of that and of one with older codecs.

    ``alone`` says whether only the second half has a model.
    """
    groups, half = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])], dist.get_rank() // 2
    if alone and half == 0:
        return [], [], [[], []]
    folder = folder / str(half)

    def new() -> tuple[Any, Any]:
        model = Fsdp2().make(SMALL, strategy, groups[half])
        return model, models.make_optimizer("adamw", model.parameters())

    model, optimizer = new()
    for name, first_step in (("older", 0), ("newer", 2)):
        train(Fsdp2(), model, Case(steps=2 + half), optimizer=optimizer, first_step=first_step)
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "codecs": CodecState(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / name, process_group=groups[half])
    expected = train(Fsdp2(), model, Case(steps=4), optimizer=optimizer, first_step=5)
    found, warnings = [], []
    for codecs_of in ("newer", "older"):
        model, optimizer = new()
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


@over_each(
    rest=False,
    strategy={
        "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=1),
        "errors and deltas": Strategy(
            "IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=1
        ),
    },
    alone={"two models": False, "one on the second half": True},
)
def test_each_half_of_a_job_resumes_its_own_and_its_first_rank_warns(
    pool: Pools, tmp_path: Path, strategy: Strategy, alone: bool
) -> None:
    by_rank = pool(4).run(on_halves, strategy, tmp_path, alone)
    for expected, found, _ in by_rank:
        assert found == expected
    told = [[len(each) for each in warnings] for _, _, warnings in by_rank]
    assert told == [[0, int(not alone)], [0, 0], [0, 1], [0, 0]]


# ---- beside other weights

BESIDE = {
    "errors": replace(COARSE, error_feedback=INTER),
    "errors and deltas": KEPT["errors and deltas"],
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=2),
}
NOTHING: dict[str, Any] = {"layout": "nothing"}


def resumed_with(
    adapter: Adapter, strategy: Strategy, folder: Path, codecs_of: str | None, codecs_first: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after steps from the newer weights with the codec state of a checkpoint, and the warnings."""
    model, optimizer = made(adapter, SMALL, strategy)
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
        # Saved again before it is used, it is of the same weights still.
        codecs.load_state_dict(NOTHING if codecs_of is None else CodecState(model, optimizer).state_dict())
        train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer, first_step=4)
    return adapter.full_weights(model), [text for level, text in records if level == "WARNING" and "codec" in text]


def mixed(adapter: Adapter, strategy: Strategy, folder: Path, codecs_first: bool) -> list[str]:
    """In a worker: the warnings about codec state of the older checkpoint beside the newer weights."""
    model, optimizer = made(adapter, SMALL, strategy)
    for name, first_step in (("older", 0), ("newer", 2)):
        train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer, first_step=first_step)
        save(model, optimizer, CodecState(model, optimizer), str(folder / name))
    matching, silent = resumed_with(adapter, strategy, folder, "newer", codecs_first)
    without, _ = resumed_with(adapter, strategy, folder, None, codecs_first)
    dropped, warnings = resumed_with(adapter, strategy, folder, "older", codecs_first)
    assert silent == [], silent
    assert models.distance(dropped, without) == 0
    assert models.distance(matching, without) > 0
    return warnings


@over_each(rest=False, adapter=ADAPTERS, strategy=BESIDE, codecs_first={"codecs first": True, "weights first": False})
def test_codec_state_of_an_older_save_is_dropped_and_one_rank_says_so(
    pool: Pools, tmp_path: Path, adapter: Adapter, strategy: Strategy, codecs_first: bool
) -> None:
    first, *others = pool(4).run(mixed, adapter, strategy, tmp_path, codecs_first)
    assert len(first) == 1
    assert "was not saved with the weights that were loaded" in first[0]
    assert "start" in first[0]
    assert others == [[]] * 3


def one_rank_has_older(adapter: Adapter, folder: str) -> float:
    """In a worker: the distance to what starts over, if one rank's codec state alone is older."""
    case, strategy, states = SMALL, BESIDE["errors"], []
    model, optimizer = made(adapter, case, strategy)
    for first_step in (0, 2):
        train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer, first_step=first_step)
        states.append(CodecState(model).state_dict())
    save(model, optimizer, CodecState(model), folder)
    trained = []
    for state in (states[dist.get_rank() != 1], NOTHING):
        model, optimizer = made(adapter, case, strategy)
        load(model, optimizer, None, folder)
        CodecState(model).load_state_dict(state)
        train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer, first_step=4)
        trained.append(adapter.full_weights(model))
    return models.distance(*trained)


@over_adapters
def test_all_ranks_drop_what_does_not_match_on_one(pool: Pools, tmp_path: Path, adapter: Adapter) -> None:
    assert pool(4).run(one_rank_has_older, adapter, str(tmp_path)) == [0] * 4


def resumed_beside_agreed(adapter: Adapter, strategy: Strategy, folder: Path) -> list[str]:
    """In a worker: the warnings if the agreed weights were saved, and codec state that replaces them."""
    case = replace(SMALL, steps=4)
    model, optimizer = made(adapter, case, strategy)
    train(adapter, model, case, optimizer=optimizer)
    with agreed_weights(model):
        save(model, optimizer, CodecState(model, optimizer), str(folder / "agreed"))
    dcp.save({"codecs": CodecState(model, optimizer)}, checkpoint_id=folder / "codecs")
    expected = train(adapter, model, case, optimizer=optimizer, first_step=4)
    model, optimizer = made(adapter, case, strategy)
    codecs = CodecState(model, optimizer)
    with collected() as records:
        load(model, optimizer, None, str(folder / "agreed"))
        dcp.load({"codecs": codecs}, checkpoint_id=folder / "codecs")
        assert train(adapter, model, case, optimizer=optimizer, first_step=4) == expected
    return [text for level, text in records if level == "WARNING" and "codec" in text]


@over_adapters
def test_agreed_weights_may_lie_beside_the_codec_state_of_nodes(pool: Pools, tmp_path: Path, adapter: Adapter) -> None:
    assert pool(4).run(resumed_beside_agreed, adapter, BESIDE["local steps"], tmp_path) == [[]] * 4
