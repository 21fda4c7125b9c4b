"""What the planner is given: values that it refuses, what has no effect, and sizes of models."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from harness.strategies import PARO, sizes
from hypothesis import given, strategies as st
from torch import nn

from fsdp_zpp import Int4, Int8, LoCo, plan
from fsdp_zpp.planner.json_report import plan_to_json
from fsdp_zpp.planner.model_size import ModelSize, Unit, equal_units, module_size

CODECS = {"weights": Int8(64), "gradients": Int4(32), "error_feedback": LoCo(hops="both")}
ONE_NODE = {"nodes": 1, "gpus_per_node": 8, "intra_gbps": 2400, "micro_batches": 2, "presets": False}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"params": 0}, ValueError, "params must be a whole number of at least 1, got 0"),
        ({"params": 1.5}, ValueError, "params must be a whole number of at least 1, got 1.5"),
        ({"params": "7e9"}, TypeError, "params must be a number, got '7e9'"),
        ({"params": float("inf")}, ValueError, "params must be finite"),
        ({"trainable": 0}, ValueError, "trainable must be a whole number of at least 1"),
        ({"trainable": 2e9}, ValueError, "at most the number of parameters, 1,000,000,000, got 2,000,000,000"),
        ({"units": 0}, ValueError, "units must be"),
        ({"nodes": 0}, ValueError, "nodes must be a whole number of at least 1, got 0"),
        ({"nodes": True}, TypeError, "nodes must be a number, got True"),
        ({"gpus_per_node": 2.5}, ValueError, "gpus_per_node must be a whole number"),
        ({"inter_gbps": None}, ValueError, "inter_gbps is missing: there are 4 nodes"),
        ({"intra_gbps": None}, ValueError, "intra_gbps is missing: there are 8 GPUs a node"),
        ({"inter_gbps": 0}, ValueError, "inter_gbps must be above 0, got 0"),
        ({"intra_gbps": float("nan")}, ValueError, "intra_gbps must be finite"),
        ({"micro_batches": 0}, ValueError, "micro_batches must be"),
        ({"tokens": 4096}, ValueError, "got tokens=4096 and tflops=None; give both"),
        ({"tflops": 100}, ValueError, "give both"),
        ({"tokens": 0, "tflops": 100}, ValueError, "tokens must be"),
        ({"tokens": 1, "tflops": -1}, ValueError, "tflops must be above 0"),
        ({"gpu_memory": 0}, ValueError, "gpu_memory must be above 0"),
        ({"activations": -1}, ValueError, "activations must be at least 0, got -1"),
        ({"reserve": -1}, ValueError, "reserve must be at least 0"),
        ({"weights": 8}, TypeError, "weights must be a codec"),
        ({"frozen": Int8(), "frozen_storage": torch.bfloat16}, ValueError, "frozen_storage=torch.bfloat16 has no mean"),
        ({"compute": torch.int8}, ValueError, "compute must be one of torch.float32, .* got torch.int8"),
        ({"reduce": "bf16"}, TypeError, "reduce must be a torch.dtype, got 'bf16'"),
        ({"optimizer_bytes": -1}, ValueError, "optimizer_bytes must be"),
    ],
)
def test_bad_values_say_what_was_given_and_what_is_allowed(
    arguments: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(**{"params": 1e9, **PARO, **arguments})


def test_notes_name_arguments_that_have_nothing_to_do() -> None:
    asked = {"weights": Int8(256), "gradients": Int4(128), "frozen": Int8(256)}
    notes = " ".join(plan(1e9, nodes=1, gpus_per_node=1, **asked).notes)
    for said in ("weights=int8(256)", "gradients=int4(128)", "intra_gradients=int8(128)", "frozen=int8(256)"):
        assert f"{said} has no effect" in notes
    assert "No memory limit" in notes
    assert "no effect" not in " ".join(plan(1e9, trainable=1e6, **PARO, **asked).notes)


@given(st.integers(1, 10**6), st.data())
def test_equal_units_add_up(params: int, data: st.DataObject) -> None:
    trainable, count = data.draw(st.integers(1, params)), data.draw(st.integers(1, 100))
    size = equal_units(params, trainable, count)
    assert (size.params, size.trainable, size.count) == (params, trainable, count)
    for numels in ([unit.trainable for unit in size.units], [unit.frozen for unit in size.units]):
        assert max(numels) - min(numels) <= 1


def _model(tie: bool = False) -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "body": nn.ModuleDict(), "head": nn.Linear(4, 10, bias=False)})
    model["body"]["layers"] = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(3))
    if tie:
        model["head"].weight = model["embed"].weight
    return model


def test_units_of_a_module_are_its_layers_and_the_root() -> None:
    root, layers = Unit(80, 0, reshard_after_forward=False), Unit(30, 0, count=3)
    assert module_size(_model()).units == (root, layers)
    assert module_size(_model(tie=True)).units == (dataclasses.replace(root, trainable=40), layers)
    assert module_size(nn.Linear(3, 3)).units == (Unit(12, reshard_after_forward=False),)
    lora = _model().requires_grad_(False)
    lora["body"]["layers"][1][1].requires_grad_(True)
    assert module_size(lora).units == (Unit(0, 80, 1, False), Unit(0, 30, 2), Unit(10, 20, 1))


def test_a_layer_that_occurs_twice_counts_once() -> None:
    layer = nn.Linear(2, 2)
    assert module_size(nn.ModuleDict({"layers": nn.ModuleList([layer, layer])})).units == (Unit(6),)


def test_models_without_anything_to_train_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing is trainable of 12 parameters"):
        module_size(nn.Linear(3, 3).requires_grad_(False))
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        module_size("model")


def test_units_of_a_model_and_a_number_of_units_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="units=4 was given, but the model has its own 4"):
        plan(module_size(_model()), units=4, **PARO)


@given(sizes, st.data())
def test_shares_of_units_add_up(units: tuple[Unit, ...], data: st.DataObject) -> None:
    size = ModelSize(units)
    trainable = data.draw(st.integers(1, size.params))
    split = size.with_trainable(trainable)
    assert (split.params, split.trainable, split.count) == (size.params, trainable, size.count)
    for unit in split.units:
        # Of elements of the model, each unit has the same share, up to rounding its own and the sum so far.
        assert abs(unit.trainable - unit.numel * trainable / size.params) <= 2


def test_codecs_change_nothing_on_one_node_and_the_notes_say_so() -> None:
    plain, made = plan(1e9, **ONE_NODE), plan(1e9, **ONE_NODE, **CODECS)
    for ours, expected in zip(made.estimates, plain.estimates, strict=True):
        assert (ours.volume, ours.memory, ours.time) == (expected.volume, expected.memory, expected.time)
    assert "has no effect" not in " ".join(plain.notes)
    assert "slow" not in " ".join(plain.notes)
    notes = " ".join(made.notes)
    for said in ("weights=int8(64)", "gradients=int4(32)"):
        assert f"{said} has no effect" in notes
    assert notes.count("error_feedback has no effect") == 2
    assert "link='pcie4' plans each GPU as a node" in notes
    assert "weights unencoded, gradients unencoded between nodes and unencoded inside\n" in str(made)
    assert set(json.loads(plan_to_json(made))["codecs"].values()) == {None}


def test_a_codec_for_the_hop_inside_counts() -> None:
    plain, made = plan(1e9, **ONE_NODE), plan(1e9, **ONE_NODE, **CODECS, intra_gradients=Int8(64))
    assert made["GGG"].memory.errors > 3e9
    assert made["GGG"].volume.intra < 0.9 * plain["GGG"].volume.intra
    assert "as int8(64) inside, error feedback" in str(made)
    assert "intra_gradients" not in " ".join(made.notes)
