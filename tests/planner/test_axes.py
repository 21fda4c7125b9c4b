"""Plans beside tensor, pipeline, context and expert parallelism: what a rank has and sends, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.strategies import PARO
from hypothesis import given, strategies as st
from torch import nn

from fsdp_zpp import Int4, Int8, LocalSteps, Strategy, choose_strategy, plan
from fsdp_zpp.__main__ import main
from fsdp_zpp.config.levels import LEGAL_LEVELS
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.planner.json_report import plan_to_json
from fsdp_zpp.planner.memory import Memory
from fsdp_zpp.planner.model_config import LayerShape, Routing
from fsdp_zpp.planner.model_size import ModelSize, Unit, module_size
from fsdp_zpp.planner.volume import Volume

GBPS = {"inter_gbps": 100, "intra_gbps": 2400}
CODECS: dict[str, Any] = {"weights": Int8(64), "gradients": Int4(32)}
MOE = ModelSize(
    (Unit(96, reshard_after_forward=False), Unit(640, count=4, expert_trainable=512)),
    idle_trainable=4 * 256,
    routing=Routing(8, 4),
    layer=LayerShape(16, 8),
)
"""96 elements in the root, and four layers of 128 dense elements and 512 in experts."""


def _without_fixed(memory: Memory) -> list[int]:
    return [getattr(memory, name) for name in ("parameters", "shard", "optimizer", "gradients", "errors", "working")]


@pytest.mark.parametrize("codecs", [{}, CODECS], ids=["full precision", "codecs"])
def test_tensor_parallelism_is_a_smaller_model_on_fewer_ranks(codecs: dict[str, Any]) -> None:
    whole = ModelSize((Unit(640, 64, count=3), Unit(96, reshard_after_forward=False)))
    half = ModelSize((Unit(320, 32, count=3), Unit(48, reshard_after_forward=False)))
    work = {"micro_batches": 3, "tokens": 1000, "tflops": 100, **codecs, **GBPS}
    beside, alone = plan(whole, nodes=4, gpus_per_node=8, tp=2, **work), plan(half, nodes=4, gpus_per_node=4, **work)
    for levels in LEGAL_LEVELS:
        assert beside[levels].strategy == alone[levels].strategy
        assert (beside[levels].volume, beside[levels].memory) == (alone[levels].volume, alone[levels].memory)
        assert beside[levels].time.computation == alone[levels].time.computation
        assert beside[levels].inter_node_bytes == 2 * alone[levels].inter_node_bytes  # of twice as many GPUs a node


@pytest.mark.parametrize(("own", "codecs"), [(None, {}), ("IIG", CODECS)])
def test_experts_are_a_model_of_their_own_on_their_ranks(own: str | None, codecs: dict[str, Any]) -> None:
    dense = ModelSize((Unit(48, reshard_after_forward=False), Unit(64, count=4)))
    experts = ModelSize((Unit(128, count=4),))
    work = {"micro_batches": 3, **codecs, **GBPS}
    made = plan(MOE, nodes=4, gpus_per_node=8, tp=2, ep=4, experts_strategy=own, **work)
    of_dense, of_experts = (plan(size, nodes=4, gpus_per_node=n, **work) for size, n in ((dense, 4), (experts, 2)))
    for levels in LEGAL_LEVELS:
        found, apart = made[levels], of_experts[own or levels]
        assert found.experts.strategy == apart.strategy
        assert found.experts.topology == Topology(8, 2)
        assert (found.dense_volume, found.experts.volume) == (of_dense[levels].volume, apart.volume)
        assert found.volume == of_dense[levels].volume + apart.volume
        parts = zip(_without_fixed(of_dense[levels].memory), _without_fixed(apart.memory), strict=True)
        assert _without_fixed(found.memory) == [sum(part) for part in parts]
        assert _without_fixed(found.experts.memory) == _without_fixed(apart.memory)
        assert found.memory.activations == of_dense[levels].memory.activations


def test_context_parallel_ranks_are_data_parallel_ranks() -> None:
    alone, beside = plan(1e9, **PARO), plan(1e9, **PARO, cp=4)
    assert [(e.volume, e.memory, e.strategy) for e in beside.estimates] == [
        (e.volume, e.memory, e.strategy) for e in alone.estimates
    ]


@pytest.mark.parametrize(
    ("units", "stages", "elements"),
    [
        # Of seven layers, two stages have four and three; of the root, half each.
        ((Unit(10, reshard_after_forward=False), Unit(100, count=7)), 2, 405),
        # The larger layers spread evenly, and so do the smaller ones.
        ((Unit(10, count=3), Unit(100, count=58)), 16, 400),
        ((Unit(100, count=4), Unit(10, count=4)), 4, 110),
        ((Unit(10, count=4), Unit(11, count=1)), 5, 11),
    ],
)
def test_a_stage_has_its_share_of_the_layers(units: tuple[Unit, ...], stages: int, elements: int) -> None:
    made = plan(ModelSize(units), nodes=stages, gpus_per_node=2, pp=stages, **GBPS)
    assert made["NNN"].memory.shard == 4 * elements
    assert made["GGG"].topology == Topology(2, 2)
    # From the first backward to the last, all of the stage stays gathered.
    gradient = max(unit.trainable for unit in units) * (2 + 4)
    assert made["GGG"].memory.working == 2 * elements + gradient


def test_activations_along_each_axis() -> None:
    """A stage of two layers; 100 tokens, 16 activations each, in 16 bits, are 1600 bytes on a rank of two."""
    made = plan(MOE, nodes=4, gpus_per_node=4, tp=2, cp=4, pp=2, ep=8, tokens=100, tflops=1, micro_batches=3, **GBPS)
    own = 100 * 16 * 2 // 2
    assert dict(made.activations) == {
        "tp": Volume(0, 3 * 2 * 8 * own),
        # Of the four context-parallel ranks two are on a node; keys and values are as large as activations here.
        "cp": Volume(2 * (each := 3 * 2 * 3 * own), each),
        # Each token goes to four experts and back; of eight ranks three others are on the node.
        "ep": Volume(4 * (each := 3 * 2 * 4 * own * 4 // 8), 3 * each),
        "pp": Volume(3 * own, 0),
    }
    assert plan(MOE, nodes=4, gpus_per_node=4, tp=2, **GBPS).activations == ()
    three = plan(MOE, nodes=2, gpus_per_node=4, pp=4, tokens=100, tflops=1, **GBPS)
    assert dict(three.activations) == {"pp": Volume(100 * 16 * 2, 100 * 16 * 2)}  # two stages on a node


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict(self._layer()) for _ in range(2))

    @staticmethod
    def _layer() -> dict[str, nn.Module]:
        experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(8))
        return {"router": nn.Linear(4, 8), "experts": experts, "shared_experts": nn.Linear(4, 4, bias=False)}


def test_routed_experts_of_a_module_are_known_and_shared_ones_are_dense() -> None:
    layer = Unit(40 + 8 * 16 + 16, count=2, expert_trainable=8 * 16)
    assert module_size(_Mixture()).units == (layer,)
    frozen = _Mixture()
    for each in frozen.layers:
        each["experts"].requires_grad_(False)
    assert module_size(frozen).units == (Unit(56, 128, 2, expert_frozen=128),)


@given(st.integers(1, MOE.params))
def test_shares_of_experts_are_those_of_their_units(trainable: int) -> None:
    split = MOE.with_trainable(trainable)
    assert (split.routing, split.layer) == (MOE.routing, MOE.layer)
    assert abs(split.experts - MOE.experts) <= split.count
    for unit in split.units:
        assert abs(
            unit.expert_trainable * unit.numel - unit.trainable * (unit.expert_trainable + unit.expert_frozen)
        ) <= (unit.numel)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tp": 0}, ValueError, "tp must be a whole number of at least 1, got 0"),
        ({"ep": "2"}, TypeError, "ep must be a number, got '2'"),
        ({"tp": 3}, ValueError, r"tp=3 x pp=1 x cp=1 is 3 ranks, which does not divide the 32 .* 4, 8, 16, 32\]"),
        ({"tp": 2, "pp": 2, "cp": 16}, ValueError, "is 64 ranks, which does not divide the 32"),
        ({"pp": 4, "ep": 16}, ValueError, r"ep=16 does not divide the 8 ranks of a pipeline stage; .*\[1, 2, 4, 8\]"),
        ({"ep": 16}, ValueError, "ep=16 does not divide the 8 experts of a layer"),
        ({"pp": 8}, ValueError, "pp=8 must be at most the number of layers, 4"),
        (
            {"nodes": 2, "gpus_per_node": 6, "tp": 4},
            ValueError,
            "4 tensor-parallel ranks at a distance of 1 do not lie",
        ),
        ({"params": 1e6, "ep": 2}, ValueError, "the model has none that the planner knows of"),
        ({"params": 1e6, "experts_strategy": "IGG"}, ValueError, "the model has none that the planner knows of"),
        ({"experts_strategy": "GGI"}, ValueError, "levels 'GGI' is not legal"),
        ({"experts_strategy": Int8()}, TypeError, "experts_strategy must be a Strategy, three letters"),
        (
            {"ep": 8, "experts_strategy": Strategy(gpus_per_node=8)},
            ValueError,
            "experts_strategy has gpus_per_node=8, but 1 of the ranks",
        ),
        ({"tp": 2, "local_steps": LocalSteps(4)}, ValueError, "local steps are not planned beside"),
        ({"experts_strategy": Strategy.diloco()}, ValueError, "local steps are not planned beside"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(**{"params": MOE, **PARO, **options})


def test_experts_may_have_codecs_of_their_own() -> None:
    own = Strategy("III", weights=Int4(32))
    made = plan(MOE, **PARO, ep=4, experts_strategy=own)
    assert {estimate.experts.strategy for estimate in made.estimates} == {
        Strategy("III", weights=Int4(32), gpus_per_node=2)
    }
    assert made.choice.strategy.weights is None


def test_codecs_of_stages_that_share_a_node_have_no_effect() -> None:
    notes = " ".join(plan(MOE, **PARO, pp=4, **CODECS).notes)
    assert "Each strategy's ranks share a node" in notes
    assert "weights=int8(64) has no effect" in notes
    assert "has no effect" not in " ".join(plan(MOE, **PARO, pp=2, **CODECS).notes)


def test_a_note_says_that_stacks_of_fewer_experts_than_ranks_are_padded() -> None:
    """FSDP cuts the first dimension of a parameter, which is that of the experts, if nobody tells it another one."""
    padded = plan(MOE, **PARO, ep=2).notes[-1]
    assert padded.startswith("Experts are sharded over 16 ranks, and a layer has 4 for them: fully_shard pads")
    enough = plan(MOE, **PARO | {"nodes": 1}, ep=4)
    assert enough["GGG"].experts.topology.world == MOE.routing.experts // 4
    assert "Experts are sharded" not in " ".join(enough.notes)


def test_the_report_says_where_ranks_lie_and_what_each_axis_sends() -> None:
    made = plan(MOE, **PARO, tp=2, ep=4, experts_strategy="IIG", tokens=100, tflops=1)
    lines = str(made).splitlines()
    assert (
        "tp 2, pp 1, cp 1, ep 4; dense parameters sharded over 16 ranks, 4 a node, experts over 8 ranks, 2 a node"
        in (lines[2])
    )
    start = lines.index(next(line for line in lines if line.startswith(f"GB a step under {made.choice.name}:")))
    axes = [line.split("  ")[1].strip() for line in lines[start + 1 : start + 5]]
    assert axes == ["dp, dense parameters", "dp, experts (IIG)", "tp, activations *", "ep, activations *"]
    assert lines[start + 5].startswith("* estimated")
    report = json.loads(plan_to_json(made))
    assert report["axes"] == {"tp": 2, "pp": 1, "cp": 1, "ep": 4}
    assert set(report["estimated_activation_bytes_per_gpu"]) == {"tp", "ep"}
    assert report["model"]["units"][1]["expert_trainable"] == 512
    strategy = report["strategies"]["GGG"]
    assert strategy["ranks"] == {"world": 16, "gpus_per_node": 4}
    assert strategy["experts"]["levels"] == "IIG"
    assert strategy["experts"]["sent_bytes_per_gpu"] == vars(made["GGG"].experts.volume)


def test_plans_of_data_parallelism_alone_do_not_speak_of_axes() -> None:
    made = plan(MOE, **PARO)
    assert "axis" not in str(made)
    assert "ep 1" not in str(made)
    report = json.loads(plan_to_json(made))
    assert not {"axes", "estimated_activation_bytes_per_gpu"} & set(report)
    assert set(report["model"]["units"][0]) == {"trainable", "frozen", "count", "reshard_after_forward"}
    assert "ranks" not in report["strategies"]["GGG"]


QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
}


def test_options_and_a_config_of_experts_reach_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    options = "--nodes 2 --gpus-per-node 4 --inter-gbps 100 --intra-gbps 2400 --tokens 64 --tflops 1"
    axes = "--tp 2 --pp 2 --cp 2 --ep 2 --experts-strategy NNG"
    assert main(["plan", "--model", str(path), *options.split(), *axes.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["axes"] == {"tp": 2, "pp": 2, "cp": 2, "ep": 2}
    assert found["model"]["units"][1]["expert_trainable"] == 4 * 3 * 16 * 8
    assert found["strategies"]["III"]["experts"]["levels"] == "NNG"
    # Keys of one head of 8, values as well.
    sent = found["estimated_activation_bytes_per_gpu"]
    assert sent["cp"] == {"inter": 0, "intra": 3 * 2 * 64 * 8 * 2 // 2}
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(path), *options.split(), "--ep", "8"])
    assert "ep=8 does not divide the 4 experts of a layer" in capsys.readouterr().err


def test_choose_strategy_takes_other_parallelisms() -> None:
    cluster = {"nodes": 2, "gpus_per_node": 4, "gpu_memory": 80, **GBPS}
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})
    chosen = choose_strategy(model, **cluster, tp=2, pp=2)
    assert chosen == plan(module_size(model), **cluster, tp=2, pp=2).choice.strategy
    assert chosen.gpus_per_node == 2
