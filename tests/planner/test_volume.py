"""Planned bytes against a step played out event by event."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from harness.strategies import FOURTEEN, sizes
from hypothesis import given, settings, strategies as st

from fsdp_zpp import Codec, Int4, Int4Delta, Int8, Strategy, plan
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.planner.config import Precision
from fsdp_zpp.planner.model_size import ModelSize, Unit
from fsdp_zpp.planner.volume import Volume, step_volume


def played_out(
    numel: int,
    trainable: bool,
    strategy: Strategy,
    nodes: int,
    gpus: int,
    micro_batches: int,
    itemsizes: tuple[int, int],
    reshard: bool,
) -> Counter[str]:
    """What a rank sends in a step, by going through the step: an oracle that shares no formula with the planner."""
    p, g, o = strategy.levels
    sent: Counter[str] = Counter(inter=0, intra=0)

    def size(codec: Codec | None, values: int, itemsize: int) -> int:
        return values * itemsize if codec is None else codec.nbytes(values)

    def chunk(parts: int) -> int:
        return (numel + parts - 1) // parts

    weights, (intra, inter) = strategy.weights, strategy.gradient_codecs
    if nodes == 1:  # codecs are for the slow network, but for that which was asked for inside a node by name
        weights, intra, inter = None, None if strategy.intra_gradients == "auto" else intra, None
    codec = weights
    if not trainable and strategy.frozen is not None:
        return sent  # not by itself: see base_played_out
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


def base_played_out(
    units: tuple[Unit, ...], strategy: Strategy, nodes: int, gpus: int, micro_batches: int
) -> Counter[str]:
    """What a rank sends of a quantized base: of the units on the way through the model and back, two stay gathered, the
    one in use and the one before or, where that is known already, the one after it.
    """
    codec, scope = strategy.frozen, strategy.levels[0]
    if codec is None or scope == "N" or gpus == 1:
        return Counter()
    parts = gpus if scope == "I" else nodes * gpus

    def gathered(numel: int) -> int:
        blocks = (numel + parts * codec.block - 1) // (parts * codec.block)
        return parts * codec.nbytes(blocks * codec.block)

    roots = [unit.frozen for unit in units if not unit.reshard_after_forward]
    layers = [unit.frozen for unit in units if unit.reshard_after_forward for _ in range(unit.count)]
    there = [*(numel // 2 for numel in roots), *layers, *(numel - numel // 2 for numel in roots)]
    way = [*enumerate(there), *reversed([*enumerate(there)][len(roots) :])]
    way = [stop for stop in way if stop[1]]
    if not layers:
        return Counter(intra=2 * micro_batches * sum(map(gathered, there)) // gpus * (gpus - 1))
    sent, held = 0, set()
    for _ in range(3):
        sent = 0
        for i, stop in enumerate(way):
            following = next((s for s in way[i + 1 :] + way if s != stop), stop)
            sent += sum(gathered(numel) for _, numel in {stop, following} - held)
            held = {stop, following}
    return Counter(intra=micro_batches * (sent // gpus * (gpus - 1)))


codecs = st.sampled_from([None, Int8(32), Int8(256), Int4(32), Int4(128)])


@settings(deadline=None, max_examples=60)
@given(
    units=sizes,
    asked=st.fixed_dictionaries(
        {"weights": codecs, "gradients": codecs, "intra_gradients": codecs | st.just("auto"), "frozen": codecs}
    ),
    nodes=st.integers(1, 3),
    gpus=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16])] * 2),
)
def test_bytes_are_those_of_the_step_played_out(
    units: tuple[Unit, ...],
    asked: dict[str, Any],
    nodes: int,
    gpus: int,
    micro_batches: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    itemsizes = dtypes[0].itemsize, dtypes[1].itemsize
    for scopes in FOURTEEN:
        strategy = Strategy(scopes, **asked)
        expected: Counter[str] = Counter()
        for unit, trainable in itertools.product(units, (True, False)):
            numel, reshard = unit.trainable if trainable else unit.frozen, unit.reshard_after_forward
            one = played_out(numel, trainable, strategy, nodes, gpus, micro_batches, itemsizes, reshard)
            expected.update({hop: unit.count * sent for hop, sent in one.items()})
        expected.update(base_played_out(units, strategy, nodes, gpus, micro_batches))
        found = step_volume(
            ModelSize(units), strategy.resolve(Topology(nodes * gpus, gpus)), micro_batches, Precision(*dtypes)
        )
        assert found == Volume(expected["inter"], expected["intra"]), scopes


def test_differences_halve_what_weights_send_between_nodes() -> None:
    cluster = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400}
    differences, whole = (plan(7e9, **cluster, weights=codec) for codec in (Int4Delta(), Int8(256)))
    assert differences["IGG"].strategy.weights == Int4Delta()
    assert differences["GGG"].strategy.weights == Int8(256)
    assert "weights as int8(256), changes as int4(256)" in str(differences)
    assert differences["GGG"].volume == whole["GGG"].volume
    assert differences["IGG"].memory == whole["IGG"].memory
    saved = whole["IGG"].volume.inter - differences["IGG"].volume.inter
    shard, others = 7e9 / 32, 3
    assert saved == pytest.approx(shard * others / 2, rel=0.01)
