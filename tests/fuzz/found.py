"""Programs that ours once ran differently, as small as they got."""

from __future__ import annotations

from fsdp_zpp import Strategy

from .program import Branch, Evaluation, MicroBatch, Model, Move, Pass, Program, Resume, Step, Unit, ZeroGrad

ONE = (Model(units=(Unit((Branch("affine"), Branch("norm"))),), root=(Branch("linear"),)),)
OWNER = (((0, 0), (0, 1)),)
ALL, FIRST = (Pass((0,), (((0, 1), (0,)),)),), (Pass((0,), (((0,), (0,)),)),)


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
}
