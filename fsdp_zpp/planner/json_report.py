"""A plan as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from .axes_report import ranks_of
from .estimate import Estimate
from .memory import Memory
from .model_size import Unit
from .report import Plan
from .step_time import StepTime


def plan_to_json(plan: Plan) -> str:
    """Return all inputs and figures as JSON: bytes, seconds, and GiB for inputs that were given in GiB."""
    report: dict[str, Any] = {
        "choice": None if plan.choice is None else plan.choice.name,
        "reason": plan.reason,
        "notes": plan.notes,
        "model": {
            "params": plan.size.params,
            "trainable": plan.size.trainable,
            "active": plan.size.active_trainable + plan.size.active_frozen,
            "units": [_unit(unit, plan.has_axes) for unit in plan.size.units],
        },
        "cluster": dataclasses.asdict(plan.cluster),
        "work": dataclasses.asdict(plan.work),
        "budget_gib": {name: figure for name, figure in vars(plan.budget).items() if name != "offload"},
        "precision": dataclasses.asdict(plan.precision),
        "codecs": _codecs(plan),
        "paste": None if plan.choice is None else plan.choice.paste,
        "strategies": {estimate.name: _figures(estimate, plan) for estimate in plan.rows},
    }
    if plan.has_axes:
        report["axes"] = dataclasses.asdict(plan.axes)
        report["estimated_activation_bytes_per_gpu"] = {
            axis: dataclasses.asdict(volume) for axis, volume in plan.activations
        }
    if plan.budget.offload is not None:
        report["offload"] = dataclasses.asdict(plan.budget.offload)
    if plan.local_steps is not None:
        # Codecs as text: asdict would leave of them no more than their blocks.
        report["local_steps"] = vars(plan.local_steps)
    return json.dumps(report, indent=1, default=str)


def _codecs(plan: Plan) -> dict[str, str | None]:
    strategy = plan.resolved
    intra, inter = strategy.gradient_codecs
    codecs: dict[str, object] = {
        "weights": strategy.weights,
        "gradients": inter,
        "intra_gradients": intra,
        "frozen": strategy.frozen,
    }
    codecs["error_feedback"] = strategy.error_feedback
    return {name: None if codec is None else str(codec) for name, codec in codecs.items()}


_OF_LOCAL_STEPS = ("outer", "exchange", "wait")
_OF_OFFLOAD = ("host", "optimizer")


def _unit(unit: Unit, with_experts: bool) -> dict[str, Any]:
    figures = dataclasses.asdict(unit)
    return {name: figure for name, figure in figures.items() if with_experts or not name.startswith("expert_")}


def _figures(estimate: Estimate, plan: Plan) -> dict[str, Any]:
    offloads = plan.budget.offload is not None

    def fields_of(value: Memory | StepTime) -> dict[str, Any]:
        left_out: tuple[str, ...] = _OF_LOCAL_STEPS if estimate.strategy.local_steps is None else ()
        if not offloads:
            left_out += ("host",) if isinstance(value, Memory) else _OF_OFFLOAD
        return {name: figure for name, figure in dataclasses.asdict(value).items() if name not in left_out}

    return (ranks_of(estimate) if plan.has_axes else {}) | {
        "torch": estimate.torch,
        "paste": estimate.paste,
        "levels": estimate.levels,
        "gpus_per_node": estimate.topology.gpus_per_node,
        "fits": estimate.fits,
        "memory_bytes": fields_of(estimate.memory) | {"total": estimate.memory.total},
        "inter_node_bytes": estimate.inter_node_bytes,
        "sent_bytes_per_gpu": dataclasses.asdict(estimate.volume),
        "seconds": fields_of(estimate.time)
        | {"communication": estimate.time.communication, "step": estimate.time.total},
    }
