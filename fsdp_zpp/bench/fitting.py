"""What the planner says of a contender before it runs: the memory of its model states, and the bytes that it sends.

torch's own strategies are planned as those of the same scopes without codecs. Under several micro-batches they keep
gradients whole until the last, in the dtype in which these are reduced.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.planner.config import MemoryBudget
from fsdp_zpp.planner.estimate import Estimate
from fsdp_zpp.planner.model_size import ModelSize
from fsdp_zpp.planner.plan import plan

from .contenders import HSDP, Contender
from .links import Link, Links
from .result_file import Row
from .task import Task

_GIB = 2**30


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
        estimates = self._plan(gpus_per_node, self.task.micro_batches, codecs, beside)
        return sorted(
            (one for one in estimates if one.fits),
            key=lambda one: (one.time.total, one.memory.total),
        )

    def states_gib(self, contender: Contender) -> float | None:
        """Return the GiB that a rank needs for model states and units in flight; None if that is not planned."""
        if contender.is_torchs:
            kept_gradients = 2 * self.size.trainable * (self.task.micro_batches > 1)
            return (self._of(contender, 1).memory.total + kept_gradients) / _GIB
        return self._of(contender).memory.total / _GIB if _is_planned(contender) else None

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

    def _of(self, contender: Contender, micro_batches: int | None = None) -> Estimate:
        strategy, micro_batches = contender.strategy, micro_batches or self.task.micro_batches
        if contender.is_torchs:
            scopes = "INI" if contender.preset == HSDP else "GNG"
            strategy = Strategy(scopes if micro_batches > 1 else scopes.replace("N", scopes[0]))
        if contender.base is not None:
            strategy = dataclasses.replace(strategy, frozen=contender.base)
        codecs = {name: getattr(strategy, name) for name in ("weights", "gradients", "intra_gradients", "frozen")}
        codecs["error_feedback"] = strategy.error_feedback
        gpus_per_node = strategy.gpus_per_node or self.links.gpus_per_node
        return next(one for one in self._plan(gpus_per_node, micro_batches, codecs) if one.levels == strategy.levels)

    def _plan(
        self, gpus_per_node: int, micro_batches: int, codecs: dict[str, Any], beside: float = 0.0
    ) -> tuple[Estimate, ...]:
        links = self.links.layout_of(gpus_per_node)
        base_dtype = torch.bfloat16 if self.task.lora and codecs.get("frozen") is None else None
        return plan(
            self.size,
            nodes=links.nodes,
            gpus_per_node=links.gpus_per_node,
            inter_gbps=_gbps(links.inter),
            intra_gbps=_gbps(links.intra),
            micro_batches=micro_batches,
            gpu_memory=self.free,
            activations=beside,
            reserve=0,
            frozen_storage=base_dtype,
            presets=False,
            **codecs,
        ).estimates


def _gbps(link: Link | None) -> float | None:
    return None if link is None else link.gbps


def _is_planned(contender: Contender) -> bool:
    return contender.arguments.get("local_steps") is None and contender.preset != "diloco"
