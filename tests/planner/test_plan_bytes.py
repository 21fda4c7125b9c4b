"""Planned bytes and memory: by the definition, a step played out event by event, and of sizes of models."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from harness.strategies import FOURTEEN, PARO
from hypothesis import given, settings, strategies as st
from torch import nn

from fsdp_zpp import Codec, Int2Delta, Int4, Int4Delta, Int8, Strategy, plan
from fsdp_zpp.planner.cluster import GIB, Precision
from fsdp_zpp.planner.memory import Volume, step_volume
from fsdp_zpp.planner.model_size import ModelSize, Unit, module_size
from fsdp_zpp.strategy.error_feedback import Topology

TWO: dict[str, Any] = {"nodes": 2, "gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 1}
small_unit = st.builds(Unit, st.integers(0, 9999), st.integers(0, 9999), st.integers(1, 3), st.booleans())
sizes = st.lists(small_unit, min_size=1, max_size=3).map(tuple).filter(lambda us: any(u.trainable for u in us))

# ---- bytes that are sent


class Job(NamedTuple):
    """A cluster, and what is trained on it."""

    nodes: int
    gpus: int
    micro_batches: int
    dtype: torch.dtype
    reduce_dtype: torch.dtype


def played_out(numel: int, trainable: bool, reshard: bool, strategy: Strategy, job: Job) -> Counter[str]:
    """The bytes of a rank in a step, by going through the step: an oracle that shares no formula with the planner."""
    p, g, o = strategy.levels
    nodes, gpus, micro_batches, *dtypes = job
    itemsizes = [dtype.itemsize for dtype in dtypes]
    sent: Counter[str] = Counter(inter=0, intra=0)

    def size(codec: Codec | None, values: int, itemsize: int) -> int:
        return values * itemsize if codec is None else codec.nbytes(values)

    def chunk(parts: int) -> int:
        return (numel + parts - 1) // parts

    weights, (intra, inter) = strategy.weights, strategy.gradient_codecs
    if nodes == 1:  # codecs are for the slow network, but for that which was asked for inside a node by name
        weights, intra, inter = None, None if strategy.intra_gradients == "auto" else intra, None
    codec = weights
    on_node = on_rank = not trainable
    for micro_batch in range(micro_batches):
        for _ in range(2 if reshard else 1):
            if o == "I" and not (p == "N" and on_rank):
                sent["intra"] += size(codec, chunk(gpus), itemsizes[0]) * (gpus - 1)
            elif o == "G" and not (p == "N" and on_rank):
                shard = size(codec, chunk(nodes * gpus), itemsizes[0])
                if p != "I" or not on_node:
                    sent["inter"] += shard * (nodes - 1)
                sent["intra"] += nodes * shard * (gpus - 1)
            on_node = on_rank = True
        if trainable:
            last = micro_batch == micro_batches - 1
            share = nodes * size(intra, chunk(nodes * gpus), itemsizes[1]) if o == "G" else 0
            if g != "N" or last:
                sent["intra"] += (share or size(intra, chunk(gpus), itemsizes[1])) * (gpus - 1)
            if g == "G" or last:
                sent["inter"] += size(inter, chunk(nodes * gpus), itemsizes[1]) * (nodes - 1)
            if last and o != "G":
                back = size(inter if nodes > 1 else intra, chunk(nodes * gpus), itemsizes[1])
                sent["inter"] += back * (nodes - 1)
                sent["intra"] += nodes * back * (gpus - 1) if o == "N" else 0
    return sent


codecs = st.sampled_from([None, Int8(32), Int8(256), Int4(32), Int4(128)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
few = st.integers(1, 3)
SENT = {"weights": codecs, "gradients": codecs, "intra_gradients": codecs | st.just("auto")}


@settings(deadline=None, max_examples=60)
@given(units=sizes, asked=st.fixed_dictionaries(SENT), job=st.builds(Job, few, few, few, dtypes, dtypes))
def test_bytes_are_those_of_the_step_played_out(units: tuple[Unit, ...], asked: dict[str, Any], job: Job) -> None:
    for scopes in FOURTEEN:
        strategy = Strategy(scopes, **asked)
        expected: Counter[str] = Counter()
        for unit, trainable in itertools.product(units, (True, False)):
            numel = unit.trainable if trainable else unit.frozen
            one = played_out(numel, trainable, unit.reshard_after_forward, strategy, job)
            expected.update({hop: unit.count * sent for hop, sent in one.items()})
        resolved = strategy.resolve(Topology(job.nodes * job.gpus, job.gpus))
        found = step_volume(ModelSize(units), resolved, job.micro_batches, Precision(job.dtype, job.reduce_dtype))
        assert found == Volume(expected["inter"], expected["intra"]), scopes


@pytest.mark.parametrize("codec", [Int4Delta(), Int2Delta()], ids=str)
def test_differences_save_half_or_three_quarters_of_what_weights_send_between_nodes(codec: Codec) -> None:
    differences, whole = (plan(7e9, **PARO, weights=weights) for weights in (codec, Int8(256)))
    assert differences["IGG"].strategy.weights == codec
    assert differences["GGG"].strategy.weights == Int8(256)
    assert f"weights as {codec}" in str(differences)
    assert differences["GGG"].volume == whole["GGG"].volume
    assert differences["IGG"].memory == whole["IGG"].memory
    saved = whole["IGG"].volume.inter - differences["IGG"].volume.inter
    shard, others = 7e9 / 32, 3
    assert saved == pytest.approx(shard * others * (1 / 2 if codec == Int4Delta() else 3 / 4), rel=0.01)


# ---- memory

STATES = {  # 100 trainable elements on 2 x 2 in 16-bit compute: weights, shard, optimizer, gradients
    "NNN": (0, 400, 800, 400),
    "NNI": (200, 200, 400, 400),
    "NII": (200, 200, 400, 200),
    "INI": (0, 200, 400, 400),
    "III": (0, 200, 400, 200),
    "NNG": (200, 100, 200, 400),
    "NIG": (200, 100, 200, 200),
    "NGG": (200, 100, 200, 100),
    "ING": (100, 100, 200, 400),
    "IIG": (100, 100, 200, 200),
    "IGG": (100, 100, 200, 100),
    "GNG": (0, 100, 200, 400),
    "GIG": (0, 100, 200, 200),
    "GGG": (0, 100, 200, 100),
}


def test_each_state_takes_its_scopes_share() -> None:
    made, single = (plan(100, units=1, **TWO, micro_batches=n) for n in (2, 1))
    for scopes, states in STATES.items():
        memory = made[scopes].memory
        assert (memory.parameters, memory.shard, memory.optimizer, memory.gradients) == states
        # A single micro-batch leaves nothing to accumulate but the shard's own gradient.
        assert single[scopes].memory.gradients == memory.shard
    odd = plan(101, units=1, **TWO, micro_batches=2)["IIG"].memory
    assert (odd.parameters, odd.shard, odd.gradients) == (2 * 26 * 2, 26 * 4, 2 * 26 * 4)


def test_frozen_weights_have_no_gradient_and_no_optimizer_state() -> None:
    two = TWO | {"micro_batches": 2, "presets": False}
    size = ModelSize((Unit(trainable=0, frozen=4096), Unit(trainable=4, frozen=0)))
    memory = plan(size, **two)["IIG"].memory
    assert (memory.parameters, memory.shard) == (2 * 2048 + 4, 2 * 1024 + 4)
    assert (memory.optimizer, memory.gradients) == (8, 8)
    encoded = plan(size, **two, frozen=Int8(256))
    # 1024 codes and 4 scales a shard; a rank has its node's, also under G after the first gather, or all.
    for scopes, kept in {"GIG": 2 * 1040, "IIG": 2 * 1040 + 4, "NIG": 4 * 1040 + 8}.items():
        assert (encoded[scopes].memory.parameters, encoded[scopes].memory.shard) == (kept, 4)


def test_working_memory_is_the_kept_unit_and_two_more_and_a_gradient() -> None:
    size = ModelSize((Unit(50, reshard_after_forward=False), Unit(100, 7, count=2), Unit(30, 1000)))
    made = plan(size, **TWO)
    gradient = 100 * (2 + 4)
    assert made["GGG"].memory.working == 2 * (50 + 1030 + 107) + gradient
    assert made["NIG"].memory.working == gradient  # the weights are there already
    one_layer = plan(100, units=1, **TWO)
    assert one_layer["GGG"].memory.working == 2 * 100 + gradient


def test_activations_and_reserve_are_gib_and_decide_what_fits() -> None:
    small = TWO | {"params": 1000, "activations": 3}
    memory = plan(**small)["GGG"].memory
    assert (memory.activations, memory.reserve) == (3 * GIB, 2 * GIB)
    for limit, fits in ((memory.total, True), (memory.total - 1, False)):
        assert plan(**small, gpu_memory=limit / GIB)["GGG"].fits == fits
    states = memory.parameters + memory.shard + memory.optimizer + memory.gradients + memory.working
    assert memory.total == states + memory.activations + memory.reserve


# ---- sizes of models


@given(sizes, st.data())
def test_shares_of_units_add_up(units: tuple[Unit, ...], data: st.DataObject) -> None:
    size = ModelSize(units)
    trainable = data.draw(st.integers(1, size.params))
    split = size.with_trainable(trainable)
    assert (split.params, split.trainable, split.count) == (size.params, trainable, size.count)
    for unit in split.units:
        # Each unit has the same share of its elements, up to rounding its own and the sum so far.
        assert abs(unit.trainable - unit.numel * trainable / size.params) <= 2


def _model(tie: bool = False) -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "body": nn.ModuleDict(), "head": nn.Linear(4, 10, bias=False)})
    model["body"]["layers"] = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(3))
    if tie:
        model["head"].weight = model["embed"].weight
    return model


def test_units_of_a_module_are_its_layers_and_the_root() -> None:
    root, layers = Unit(80, 0, reshard_after_forward=False), Unit(30, 0, count=3)
    size = module_size(_model())
    assert size.units == (root, layers)
    assert (size.idle_trainable, size.idle_frozen) == (0, 0)
    assert module_size(_model(tie=True)).units == (dataclasses.replace(root, trainable=40), layers)
    assert module_size(nn.Linear(3, 3)).units == (Unit(12, reshard_after_forward=False),)
    layer = nn.Linear(2, 2)
    assert module_size(nn.ModuleDict({"layers": nn.ModuleList([layer, layer])})).units == (Unit(6),)
    lora = _model().requires_grad_(False)
    lora["body"]["layers"][1][1].requires_grad_(True)
    assert module_size(lora).units == (Unit(0, 80, 1, False), Unit(0, 30, 2), Unit(10, 20, 1))


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing is trainable of 12 parameters"):
        module_size(nn.Linear(3, 3).requires_grad_(False))
    with pytest.raises(ValueError, match="units=4 was given, but the model has its own 4"):
        plan(module_size(_model()), units=4, **PARO)


DEEPSEEK: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 12, "head_dim": 8},
    "deepseek_v3": DEEPSEEK | {"moe_intermediate_size": 12, "first_k_dense_replace": 1},
}


def mixture(kind: str) -> nn.Module:
    """A model without values of three layers with eight experts that are 12 wide, of which a token sees two."""
    common = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    common |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **common | EXPERTS[kind])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", EXPERTS)
def test_only_experts_that_a_token_is_routed_to_count_as_computation(kind: str) -> None:
    model, layers = mixture(kind), 2 if kind == "deepseek_v3" else 3
    idle = layers * 6 * 3 * 16 * 12
    size = module_size(model)
    assert (size.idle_trainable, size.idle_frozen) == (idle, 0)
    assert size.params == sum(p.numel() for p in model.parameters())
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    frozen = module_size(model)
    assert (frozen.idle_trainable, frozen.idle_frozen) == (0, idle)
    split = size.with_trainable(size.params // 4)
    assert (split.idle_trainable, split.idle_trainable + split.idle_frozen) == (idle // 4, idle)
    active = {size: 6 * (size.trainable - idle), frozen: 6 * frozen.trainable + 4 * (frozen.frozen - idle)}
    for each, flops in active.items():
        found = plan(each, **TWO, tokens=1000, tflops=1)["GGG"].time.computation
        assert found == pytest.approx(flops * 1000 / 1e12)
