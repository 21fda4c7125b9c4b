"""Activations that other parallelisms send: estimates, from the shape of a layer.

They are the textbook's figures, in each micro-batch and with what backward sends:

- tp, with sequence parallelism (arXiv 2205.05198): four all-gathers and four reduce-scatters of a layer's activations;
- cp, as ring attention (arXiv 2310.01889): keys and values twice, and their gradients once;
- ep: each token to the experts that it is routed to, and back, as if tokens spread evenly;
- pp: the activations that a stage hands on, and their gradients. With two stages, each sends one of them.

A byte counts once for each rank that it goes to. What frameworks do better, or compute again, is not in it.
"""

from __future__ import annotations

from .axes import Axes, AxisRanks
from .config import Cluster, Precision, StepConfig
from .model_config import LayerShape
from .model_size import ModelSize
from .parts import Part
from .volume import Volume

_COLLECTIVES_OF_TP = 8
_PASSES_OF_CP = 3
_EXCHANGES_OF_EP = 4


def activation_volumes(
    size: ModelSize, parts: tuple[Part, ...], cluster: Cluster, axes: Axes, work: StepConfig, precision: Precision
) -> dict[str, Volume]:
    """Return the bytes that one rank sends in a step along each axis but data parallelism, as far as they are known.

    They are known if the shape of layers is, and the number of tokens.
    """
    ranks_of = axes.others(cluster)
    if not ranks_of or size.layer is None or work.tokens is None:
        return {}
    tokens = work.tokens * work.micro_batches
    to_each = _to_each_peer(size.layer, size, parts, axes, tokens)
    volumes = {}
    for axis, ranks in ranks_of.items():
        values = to_each[axis]
        if values is not None:
            volumes[axis] = _sent(axis, ranks, round(values * precision.compute.itemsize), cluster.gpus_per_node)
    return volumes


def _to_each_peer(
    layer: LayerShape, size: ModelSize, parts: tuple[Part, ...], axes: Axes, tokens: int
) -> dict[str, float | None]:
    """Return the values that a rank sends to each other rank of an axis."""
    layers, expert_layers = (_layers(part) for part in (parts[0], parts[-1]))
    own = tokens * layer.hidden / axes.tp  # the ranks of tensor parallelism share the tokens
    return {
        "tp": _COLLECTIVES_OF_TP * layers * own,
        "cp": None if layer.keys is None else _PASSES_OF_CP * layers * 2 * tokens * layer.keys / axes.tp,
        "ep": None if size.routing is None else _EXCHANGES_OF_EP * expert_layers * own * size.routing.chosen / axes.ep,
        "pp": own,
    }


def _layers(part: Part) -> int:
    return sum(unit.count for unit in part.units.units if unit.reshard_after_forward)


def _sent(axis: str, ranks: AxisRanks, to_each: int, gpus_per_node: int) -> Volume:
    together = ranks.on_a_node(gpus_per_node)
    if axis != "pp":
        return Volume(to_each * (ranks.size - together), to_each * (together - 1))
    # A stage has neighbours alone: one on each side, but for the first and the last.
    neighbours = min(ranks.size - 1, 2)
    elsewhere = neighbours if together == 1 else int(together < ranks.size)
    return Volume(to_each * elsewhere, to_each * (neighbours - elsewhere))
