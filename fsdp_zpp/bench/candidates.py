"""Strategies that a run tries unless it is told which: torch's own, and those of fsdp_zpp that may pay."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice

from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.planner.estimate import Estimate
from fsdp_zpp.planner.hardware import SLOWEST_NVLINK

from .contenders import ALONE, BASES, FULL_SHARD, HSDP
from .fitting import Planner
from .links import Links

_PLANNED = 2
"""How many of the planner's first strategies are tried for each size of a node."""


def candidates(planner: Planner, frozen: str | None) -> list[str]:
    """Return the names of strategies to try, the plainest first, as this rank's packages allow.

    Args:
        planner: Planner of the run.
        frozen: Word for the codec of a frozen base; None tries all that can be made here.
    """
    torchs = [FULL_SHARD, HSDP] if planner.links.nodes > 1 else [FULL_SHARD]
    ours = _for_adapters(planner, frozen) if planner.task.lora else _for_full_training(planner)
    return list(dict.fromkeys([*torchs, *ours]))


def _for_adapters(planner: Planner, frozen: str | None) -> Iterator[str]:
    """Yield strategies on a quantized base: sharded inside each node, and whole on each GPU where that may pay."""
    bases = [frozen] if frozen else [base for base in BASES if base != "nf4" or find_spec("bitsandbytes")]
    for alone in ("", ALONE) if _may_pay_alone(planner.links) else ("",):
        yield from (f"once-zeropp{_suffix(base)}{alone}" for base in bases)
    yield f"mixzpp{_suffix(bases[0])}"


def _suffix(base: str) -> str:
    return "" if base == "int8" else f"-{base}"


def _for_full_training(planner: Planner) -> Iterator[str]:
    """Yield those for the nodes that there are, then those for nodes of one GPU where that may pay.

    One node has no slow hop, so fsdp_zpp is torch's FSDP there, unless each of its GPUs counts as a node.
    """
    links = planner.links
    if links.nodes > 1:
        yield from _on_nodes(planner, links.gpus_per_node)
    if _may_pay_alone(links):
        names = _on_nodes(planner, 1) if links.nodes == 1 else iter(("zeropp", "zeropp-delta"))
        yield from (f"{name}{ALONE}" for name in names)


def _may_pay_alone(links: Links) -> bool:
    """Return whether to try each GPU as a node: always on one node; on several, where links inside them are slow."""
    return links.intra is not None and (links.nodes == 1 or links.intra.gbps < SLOWEST_NVLINK)


def _on_nodes(planner: Planner, gpus_per_node: int) -> Iterator[str]:
    """Yield ZeRO++ as it is and with deltas, those that send less under accumulation, and the planner's first."""
    accumulates = planner.task.micro_batches > 1
    yield from ("zeropp", "zeropp-delta", *(("zeropp-IIG", "zeropp-delta-IIG") if accumulates else ()))
    zeropp = Strategy.zeropp()
    estimates = planner.best(gpus_per_node, weights=zeropp.weights, gradients=zeropp.gradients)
    others = _beside(("IGG", "IIG") if accumulates else ("IGG",), estimates)
    yield from (f"zeropp-{levels}" for levels in islice(others, _PLANNED))
    yield "zeropp-GGG"  # which needs the least memory


def _beside(tried: Collection[str], estimates: Sequence[Estimate]) -> Iterator[str]:
    """Yield the letters of estimates that are not ``tried`` under other letters: on nodes of one, I is N."""
    scopes = {one.levels: one.strategy.resolve(one.topology).scopes for one in estimates}
    known = {scopes[levels] for levels in tried if levels in scopes}
    for levels, own in scopes.items():
        if own not in known:
            known.add(own)
            yield levels
