"""What the planner says of a contender before it runs: the memory of its model states, and the bytes that it sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_zpp.planner.config import MemoryBudget
from fsdp_zpp.planner.estimate import Estimate
from fsdp_zpp.planner.model_size import ModelSize
from fsdp_zpp.planner.plan import plan
from fsdp_zpp.planner.report import Plan

from .contenders import Contender
from .links import Link, Links
from .result_file import Row
from .task import Task


@dataclass(frozen=True)
class Planner:
    """Plans contenders of one run.

    Attributes:
        size: Units of the model.
        task: Task that is trained.
        links: The links, and the layout of the ranks.
        free: GiB that are free on each GPU; None sets no limit.
    """

    size: ModelSize
    task: Task
    links: Links
    free: float | None

    def best(self, gpus_per_node: int, **codecs: Any) -> list[Estimate]:
        """Return the estimates that fit with these codecs on nodes of this size, fastest first, then smallest."""
        # What is beside model states is not known yet: as the planner assumes.
        beside = MemoryBudget.activations + MemoryBudget.reserve
        planned = self._plan(self.links.layout_of(gpus_per_node), codecs, beside)
        return sorted(
            (one for one in planned.estimates if one.fits),
            key=lambda one: (one.time.total, one.memory.total),
        )

    def states_gib(self, contender: Contender) -> float | None:
        """Return the GiB that a rank needs for model states and units in flight; None if that is not planned."""
        return self._of(contender).gib if _is_planned(contender) else None

    def does_not_fit(self, contender: Contender, beside_states: float) -> str:
        """Say why a contender can't run; empty if it may.

        Args:
            contender: The contender.
            beside_states: GiB that another one of this run took beside its model states, activations above all.
        """
        needed = self.states_gib(contender)
        if needed is None or self.free is None or needed + beside_states <= self.free:
            return ""
        return f"left out: needs about {needed + beside_states:.1f} GiB, {self.free:.1f} are free"

    def sent(self, contender: Contender) -> Row:
        """Return the MiB that a rank sends a step under one of torch's strategies, as a row has it."""
        sent = self._of(contender).volume
        mib = {"inter": sent.inter / 2**20, "intra": sent.intra / 2**20}
        return {"sent_mib_a_step": mib, "sent_is_planned": True}

    def _of(self, contender: Contender) -> Estimate:
        if contender.is_torchs:
            # On a single node, HYBRID_SHARD shards over all ranks, as FULL_SHARD does.
            name = contender.strategy.name if self.links.nodes > 1 else "FULL_SHARD"
            return self._plan(self.links, {})[name]
        strategy = contender.strategy
        codecs = {name: getattr(strategy, name) for name in ("weights", "gradients", "intra_gradients", "frozen")}
        codecs["error_feedback"] = strategy.error_feedback
        if contender.base is not None:
            codecs["frozen"] = contender.base
        return self._plan(self.links.layout_of(strategy.gpus_per_node), codecs)[strategy.levels]

    def _plan(self, links: Links, codecs: dict[str, Any], beside: float = 0.0) -> Plan:
        """Plan torch's rows, and letters with these codecs. A frozen base without a codec is in the compute dtype."""
        return plan(
            self.size,
            nodes=links.nodes,
            gpus_per_node=links.gpus_per_node,
            inter_gbps=_gbps(links.inter),
            intra_gbps=_gbps(links.intra),
            slow_links=links.are_slow,
            micro_batches=self.task.micro_batches,
            gpu_memory=self.free,
            activations=beside,
            reserve=0,
            presets=True,
            **codecs,
        )


def _gbps(link: Link | None) -> float | None:
    return None if link is None else link.gbps


def _is_planned(contender: Contender) -> bool:
    return contender.is_torchs or (contender.arguments.get("local_steps") is None and contender.preset != "diloco")
