"""Programs that ours once ran differently, as small as they got."""

from __future__ import annotations

from dataclasses import replace

from fsdp_zpp import Int8, LocalSteps, Strategy

from .program import (
    Branch,
    Evaluation,
    Freeze,
    MicroBatch,
    Model,
    Move,
    Pass,
    Program,
    Resume,
    Step,
    Tune,
    Unit,
    ZeroGrad,
)

ONE = (Model(units=(Unit((Branch("affine"), Branch("norm"))),), root=(Branch("linear"),)),)
OWNER = (((0, 0), (0, 1)),)
ALL, FIRST, SECOND = ((Pass((0,), ((used, (0,)),)),) for used in ((0, 1), (0,), (1,)))


def _program(adapter: str, scopes: str, *ops: object, optimizer: str = "sgd") -> Program:
    return Program(adapter, Strategy(scopes, gpus_per_node=2), ONE, ops, OWNER, optimizer)  # type: ignore[arg-type]


TWO_UNITS = Program(
    "fsdp2",
    Strategy("III", gpus_per_node=2),
    (Model(units=(Unit((Branch("linear"),)), Unit((Branch("scale"), Branch("scale"))))),),
    (
        MicroBatch((Pass((0, 1), (((0,), (), (0,)), ((0,), (0, 1), ()), ((), (), ()), ((), (), ()))),)),
        MicroBatch((Pass((0, 1), (((0,), (), (0,)),)),), sync=False),
        MicroBatch((Pass((0, 1), (((0,), (0,), (0,)),)),)),
        Step(),
    ),
    (((0, 0), (0, 1), (0, 2)),),
    zero_unused=True,
)

WITHOUT_BLOCK = (Pass((), (((0, 1), (0,)),)),)

# On nodes of one GPU, FSDP1 has no shards under the optimizer scope I.
WHOLE = Strategy("III", gpus_per_node=1)
IN_ROOT = (Model(units=(Unit((Branch("mlp"),), wrapped=False),)),)
ON_ITS_OWN = LocalSteps(2, outer_lr=1.0, outer_momentum=0.5, nesterov=False, codec=None)

FOUND = {
    "a block that only an evaluation has gathered since its gradient was reduced": _program(
        "fsdp1",
        "GGG",
        MicroBatch(ALL),
        Evaluation(ALL),
        MicroBatch(WITHOUT_BLOCK, sync=False),
        MicroBatch(WITHOUT_BLOCK),
        Step(),
    ),
    "gradients cleared after an evaluation": _program(
        "fsdp2", "NGG", MicroBatch(ALL), Evaluation(ALL), ZeroGrad("models"), MicroBatch(ALL), Step()
    ),
    "optimizer states of flat parameters in a node": _program(
        "fsdp1 flat", "III", MicroBatch(ALL), Step(), ZeroGrad(), Resume(), MicroBatch(ALL), Step(), optimizer="adamw"
    ),
    "a move after gradients are cleared": _program(
        "fsdp1", "IGG", MicroBatch(ALL), ZeroGrad(), Move(), MicroBatch(ALL), Step()
    ),
    "what only a dropped micro-batch has used": _program(
        "fsdp2", "GGG", MicroBatch(ALL, sync=False), ZeroGrad(), MicroBatch(FIRST), Step()
    ),
    "an exception in a backward": _program(
        "fsdp2", "IGG", MicroBatch(ALL, fails="backward"), MicroBatch(FIRST), Step()
    ),
    "an exception in a backward after another micro-batch": _program(
        "fsdp2", "IIG", MicroBatch(ALL, sync=False), MicroBatch(ALL, fails="backward"), MicroBatch(FIRST), Step()
    ),
    "ranks that use different units": TWO_UNITS,
    "a part of a unit without shards that is thawed within a step": Program(
        "fsdp1",
        WHOLE,
        IN_ROOT,
        (
            Freeze(0, 0, True, 0),
            MicroBatch(FIRST),
            Freeze(0, 0, False, 0),
            MicroBatch(FIRST, sync=False),
            MicroBatch(FIRST),
            Step(),
        ),
        OWNER,
    ),
    "a part of a unit without shards whose gradients are cleared alone": Program(
        "fsdp1",
        WHOLE,
        IN_ROOT,
        (MicroBatch(FIRST), ZeroGrad(1), MicroBatch(FIRST, sync=False), MicroBatch(FIRST), Step((0, 1))),
        (((0, 0),), ((0, 1),)),
        interleaved=True,
    ),
    "replaced parameters of a unit that does not run before a move": replace(
        _program("fsdp1", "NNI", MicroBatch(ALL), Step(), Move(), MicroBatch(WITHOUT_BLOCK), optimizer="replaces-data"),
        observe=False,
    ),
    "replaced parameters of a unit without shards that does not run": replace(
        _program("fsdp1", "III", MicroBatch(ALL), Step(), MicroBatch(WITHOUT_BLOCK), Step(), optimizer="replaces-data"),
        strategy=replace(WHOLE, local_steps=ON_ITS_OWN),
        observe=False,
    ),
    "a summons of a unit that was prefetched and not run": replace(
        _program("fsdp1", "NNG", MicroBatch(ALL), Step(), Evaluation(WITHOUT_BLOCK)),
        strategy=Strategy("NNG", weights=Int8(32), gradients=Int8(32), gpus_per_node=2),
        prefetch=True,
    ),
    "a unit that is thawed and not used, in 16 bits": replace(
        _program(
            "fsdp2",
            "NIG",
            Freeze(0, 0),
            MicroBatch(ALL),
            Freeze(0, 0, False),
            MicroBatch((Pass((0,), (((), ()),)),), sync=False),
            MicroBatch(WITHOUT_BLOCK),
            Step(),
        ),
        precision="bf16 none",
    ),
    "a unit that is unsharded by hand before the first forward": _program(
        "fsdp2",
        "III",
        Tune("unshard", 0, 0),
        MicroBatch(ALL, sync=False),
        Freeze(0, 0),
        MicroBatch((Pass((0,), (((), (0,)),)),)),
        Step(),
    ),
    "two forwards in a micro-batch that reduces in fp32": replace(
        _program("fsdp2", "III", MicroBatch(ALL, sync=False, forwards=2), MicroBatch(ALL), Step()),
        precision="bf16 fp32",
    ),
    "a part of a unit that no rank uses and that no longer trains, where unused ones get zeros": replace(
        _program(
            "fsdp2",
            "IGG",
            MicroBatch(SECOND, sync=False),
            Freeze(0, 0, branch=0),
            MicroBatch(SECOND),
            Step(),
        ),
        zero_unused=True,
    ),
    "codecs where a first step finds no gradients": replace(
        _program("fsdp2", "NNN", MicroBatch(ALL, fails="loss"), Step(), MicroBatch(ALL), Step(), optimizer="adamw"),
        strategy=Strategy("NNN", gradients=Int8(32), gpus_per_node=2),
    ),
    "zeros in place of an overflow that codecs have spread": replace(
        _program(
            "fsdp1",
            "NNN",
            Freeze(0, 0, branch=0),
            MicroBatch(ALL, overflows=0),
            Step(),
            ZeroGrad(set_to_none=False),
            Freeze(0, 0, False, branch=0),
            MicroBatch(ALL),
            Step(),
        ),
        strategy=Strategy("NNN", gradients=Int8(32), gpus_per_node=2),
        scaler=True,
    ),
    "unreduced gradients of 16 bits on nodes of one GPU": replace(
        _program("fsdp1", "NNN", MicroBatch(ALL, sync=False), MicroBatch(ALL), Step()),
        strategy=Strategy("NNN", gpus_per_node=1, local_steps=replace(ON_ITS_OWN, outer_momentum=0.0)),
        precision="fp16 fp32",
    ),
}
