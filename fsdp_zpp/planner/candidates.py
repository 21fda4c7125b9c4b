"""What a plan compares: strategies of torch's that people run today, presets with their codecs, and the 14 letters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from fsdp_zpp.codecs.as_stored import FrozenName
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.blockwise import Int4, Int8
from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.codecs.nf4 import NF4
from fsdp_zpp.config.levels import LEGAL_LEVELS
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.strategy import Strategy

from .config import Cluster, StepConfig
from .levels import with_levels, with_local_steps
from .model_size import ModelSize


@dataclass(frozen=True)
class Candidate:
    """One row of a plan.

    Attributes:
        strategy: The strategy. For one of torch's, that which sends the same here. It keeps the same, too, but that
            gradients of several micro-batches accumulate in fp32; torch's do in the dtype in which they are reduced.
        title: Name of a preset, with what is different from its defaults, or of torch's strategy; None has letters
            alone.
        torch: Name of torch's ``ShardingStrategy``; None for a strategy of this package.
        coarser: Whether the base is coarser than the preset's, and takes longer to decode: to fit, or to send less.
        instead: Strategies to use here for one of torch's, in this order, if gradients in fp32 do not fit: they reduce
            each micro-batch, so they send more than planned and keep less.
    """

    strategy: Strategy
    title: str | None = None
    torch: str | None = None
    coarser: bool = False
    instead: tuple[Strategy, ...] = ()


def lettered(codecs: Strategy, cluster: Cluster, local_steps: LocalSteps | None) -> list[Candidate]:
    """Return the 14 letters under the codecs of a strategy, then those of them that can have local steps."""
    strategies = [with_levels(codecs, levels) for levels in LEGAL_LEVELS]
    if local_steps is not None:
        local = [with_local_steps(each, local_steps) for each in strategies if each.optimizer != "G"]
        strategies += local if cluster.nodes > 1 else []
    return [Candidate(strategy) for strategy in strategies]


def of_torch(cluster: Cluster, work: StepConfig) -> Iterator[Candidate]:
    """Return what people run without this package: FULL_SHARD and, on several nodes, HYBRID_SHARD.

    Under ``no_sync``, torch accumulates whole gradients on each rank, and communicates them once a step.
    """
    accumulates = work.micro_batches > 1
    full, hybrid = Strategy("GGG"), Strategy("III")
    yield Candidate(Strategy("GNG") if accumulates else full, "FULL_SHARD", "FULL_SHARD", instead=(full,))
    if cluster.nodes > 1:
        planned = Strategy("INI") if accumulates else hybrid
        yield Candidate(planned, "HYBRID_SHARD", "HYBRID_SHARD", instead=(hybrid, full))


def presets(
    size: ModelSize, cluster: Cluster, work: StepConfig, frozen: Codec | FrozenName | None
) -> Iterator[Candidate]:
    """Return presets with their codecs: of ZeRO++, and of MixZ++ if parts of the model are frozen.

    Args:
        size: The size of the model.
        cluster: The cluster. On a single node with fast links ZeRO++'s codecs are inactive, so it is left out. If links
            inside nodes are slow, each GPU as a node is a candidate, too, where that is not what links decide.
        work: The work of a step. Scopes that accumulate inside a node are candidates if it accumulates.
        frozen: Codec of the frozen base; None compares those that there are, and a base without a codec.
    """
    accumulates = work.micro_batches > 1
    found: list[Candidate] = []
    if size.frozen:
        found += _with_quantized_base(accumulates, _base_codecs() if frozen is None else [frozen])
    if (frozen is None or not size.frozen) and (cluster.nodes > 1 or cluster.slow_links):
        found += _with_codecs(accumulates, several_nodes=cluster.nodes > 1)
    splits = cluster.slow_links and cluster.gpus_per_node > 1
    for candidate in found:
        yield candidate
        if splits and (cluster.nodes > 1 or candidate.strategy.frozen is not None):
            finer = dataclasses.replace(candidate.strategy, gpus_per_node=1)
            yield Candidate(finer, f"{candidate.title}, nodes of 1")


def _with_codecs(accumulates: bool, several_nodes: bool) -> Iterator[Candidate]:
    yield Candidate(Strategy.zeropp(), "zeropp")
    yield Candidate(Strategy.zeropp(weights=Int4Delta()), "zeropp Int4Delta")
    if accumulates:
        yield Candidate(Strategy.zeropp(levels="IIG"), "zeropp IIG")
        yield Candidate(Strategy.zeropp(levels="IIG", weights=Int4Delta()), "zeropp IIG Int4Delta")
    yield Candidate(Strategy.loco(), "loco")
    for levels in ("GGG", "NNG", *(["III"] if several_nodes else [])):
        yield Candidate(Strategy.zeropp(levels=levels), f"zeropp {levels}")


def _with_quantized_base(accumulates: bool, codecs: Iterable[Codec | FrozenName]) -> Iterator[Candidate]:
    for index, codec in enumerate(codecs):
        name = "mixzpp" if codec in ("auto", Int8(256)) else f"mixzpp {codec}"
        yield Candidate(Strategy.mixzpp(frozen=codec), name, coarser=index > 0)
        if accumulates:
            yield Candidate(Strategy.mixzpp(frozen=codec, levels="IIG"), f"{name} IIG", coarser=index > 0)


def _base_codecs() -> Iterator[Codec | FrozenName]:
    yield "auto"  # which is Int8(256) for the weights that a plan knows of
    # NF4 is as small and closer to the weights, but its kernels are those of bitsandbytes.
    yield Int4(128) if find_spec("bitsandbytes") is None else NF4(64)
