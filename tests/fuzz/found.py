"""Programs that ours once ran differently, as small as they got."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_zpp import Int8, LocalSteps, Strategy

from .program import (
    Branch,
    Evaluation,
    Event,
    Freeze,
    MicroBatch,
    Model,
    Op,
    Pass,
    Program,
    Step,
    Tune,
    Unit,
    ZeroGrad,
)

ONE = (Model(units=(Unit((Branch("affine"), Branch("norm"))),), root=(Branch("linear"),)),)
OWNER = (((0, 0), (0, 1)),)
ALL, FIRST, SECOND = ((Pass((0,), ((used, (0,)),)),) for used in ((0, 1), (0,), (1,)))


def _program(where: str, ops: tuple[Op, ...], **others: Any) -> Program:
    adapter, _, scopes = where.rpartition(" ")
    return replace(Program(adapter, Strategy(scopes, gpus_per_node=2), ONE, ops, OWNER), **others)


TWO_UNITS = (Model(units=(Unit((Branch("linear"),)), Unit((Branch("scale"), Branch("scale"))))),)
WITHOUT_BLOCK = (Pass((), (((0, 1), (0,)),)),)
RUN, ACCUMULATE = MicroBatch(ALL), MicroBatch(ALL, sync=False)
PART, LEFT_OUT, STEP = MicroBatch(FIRST), MicroBatch(WITHOUT_BLOCK), Step()

# On nodes of one GPU, FSDP1 has no shards under the optimizer scope I.
WHOLE = Strategy("III", gpus_per_node=1)
IN_ROOT = (Model(units=(Unit((Branch("mlp"),), wrapped=False),)),)
ON_ITS_OWN = LocalSteps(2, outer_lr=1.0, outer_momentum=0.5, codec=None)
ENCODED = Strategy("NNN", gradients=Int8(32), gpus_per_node=2)

FOUND = {
    "a block that only an evaluation has gathered since its gradient was reduced": _program(
        "fsdp1 GGG",
        (RUN, Evaluation(ALL), MicroBatch(WITHOUT_BLOCK, sync=False), LEFT_OUT, STEP),
    ),
    "gradients cleared after an evaluation": _program(
        "fsdp2 NGG", (RUN, Evaluation(ALL), ZeroGrad("models"), RUN, STEP)
    ),
    "optimizer states of flat parameters in a node": _program(
        "fsdp1 flat III", (RUN, STEP, ZeroGrad(), Event("resume"), RUN, STEP), optimizer="adamw"
    ),
    "a move after gradients are cleared": _program("fsdp1 IGG", (RUN, ZeroGrad(), Event("move"), RUN, STEP)),
    "what only a dropped micro-batch has used": _program("fsdp2 GGG", (ACCUMULATE, ZeroGrad(), PART, STEP)),
    "an exception in a backward": _program("fsdp2 IGG", (MicroBatch(ALL, fails="backward"), PART, STEP)),
    "an exception in a backward after another micro-batch": _program(
        "fsdp2 IIG", (ACCUMULATE, MicroBatch(ALL, fails="backward"), PART, STEP)
    ),
    "ranks that use different units": _program(
        "fsdp2 III",
        (
            MicroBatch((Pass((0, 1), (((0,), (), (0,)), ((0,), (0, 1), ()), ((), (), ()), ((), (), ()))),)),
            MicroBatch((Pass((0, 1), (((0,), (), (0,)),)),), sync=False),
            MicroBatch((Pass((0, 1), (((0,), (0,), (0,)),)),)),
            STEP,
        ),
        models=TWO_UNITS,
        optimizers=(((0, 0), (0, 1), (0, 2)),),
        zero_unused=True,
    ),
    "a part of a unit without shards that is thawed within a step": _program(
        "fsdp1 III",
        (Freeze(0, 0, True, 0), PART, Freeze(0, 0, False, 0), MicroBatch(FIRST, sync=False), PART, STEP),
        strategy=WHOLE,
        models=IN_ROOT,
    ),
    "a part of a unit without shards whose gradients are cleared alone": _program(
        "fsdp1 III",
        (PART, ZeroGrad(1), MicroBatch(FIRST, sync=False), PART, Step((0, 1))),
        strategy=WHOLE,
        models=IN_ROOT,
        optimizers=(((0, 0),), ((0, 1),)),
        interleaved=True,
    ),
    "replaced parameters of a unit that does not run before a move": _program(
        "fsdp1 NNI",
        (RUN, STEP, Event("move"), LEFT_OUT),
        optimizer="replaces-data",
        observe=False,
    ),
    "replaced parameters of a unit without shards that does not run": _program(
        "fsdp1 III",
        (RUN, STEP, LEFT_OUT, STEP),
        strategy=replace(WHOLE, local_steps=ON_ITS_OWN),
        optimizer="replaces-data",
        observe=False,
    ),
    "a summons of a unit that was prefetched and not run": _program(
        "fsdp1 NNG",
        (RUN, STEP, Evaluation(WITHOUT_BLOCK)),
        strategy=Strategy("NNG", weights=Int8(32), gradients=Int8(32), gpus_per_node=2),
        prefetch=True,
    ),
    "a unit that is thawed and not used, in 16 bits": _program(
        "fsdp2 NIG",
        (Freeze(0, 0), RUN, Freeze(0, 0, False), MicroBatch((Pass((0,), (((), ()),)),), sync=False), LEFT_OUT, STEP),
        precision="bf16 none",
    ),
    "a unit that is unsharded by hand before the first forward": _program(
        "fsdp2 III",
        (Tune("unshard", 0, 0), ACCUMULATE, Freeze(0, 0), MicroBatch((Pass((0,), (((), (0,)),)),)), STEP),
    ),
    "two forwards in a micro-batch that reduces in fp32": _program(
        "fsdp2 III", (MicroBatch(ALL, sync=False, forwards=2), RUN, STEP), precision="bf16 fp32"
    ),
    "a part of a unit that no rank uses and that no longer trains, where unused ones get zeros": _program(
        "fsdp2 IGG",
        (MicroBatch(SECOND, sync=False), Freeze(0, 0, branch=0), MicroBatch(SECOND), STEP),
        zero_unused=True,
    ),
    "codecs where a first step finds no gradients": _program(
        "fsdp2 NNN",
        (MicroBatch(ALL, fails="loss"), STEP, RUN, STEP),
        strategy=ENCODED,
        optimizer="adamw",
    ),
    "zeros in place of an overflow that codecs have spread": _program(
        "fsdp1 NNN",
        (
            Freeze(0, 0, branch=0),
            MicroBatch(ALL, overflows=0),
            STEP,
            ZeroGrad(set_to_none=False),
            Freeze(0, 0, False, branch=0),
            RUN,
            STEP,
        ),
        strategy=ENCODED,
        scaler=True,
    ),
    "unreduced gradients of 16 bits on nodes of one GPU": _program(
        "fsdp1 NNN",
        (ACCUMULATE, RUN, STEP),
        strategy=Strategy("III", gpus_per_node=1, local_steps=replace(ON_ITS_OWN, outer_momentum=0.0)),
        precision="fp16 fp32",
    ),
}
