"""A plan as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from .choice import Estimate
from .plan import Plan


def plan_to_json(plan: Plan) -> str:
    """All inputs and figures: bytes, seconds, and GiB where they were given so."""
    report: dict[str, Any] = {
        "choice": None if plan.choice is None else plan.choice.levels,
        "reason": plan.reason,
        "notes": plan.notes,
        "model": {
            "params": plan.size.params,
            "trainable": plan.size.trainable,
            "active": plan.size.active_trainable + plan.size.active_frozen,
            "units": [dataclasses.asdict(unit) for unit in plan.size.units],
        },
        "cluster": dataclasses.asdict(plan.cluster),
        "work": dataclasses.asdict(plan.work),
        "budget_gib": dataclasses.asdict(plan.budget),
        "precision": dataclasses.asdict(plan.precision),
        "codecs": _codecs(plan),
        "strategies": {estimate.levels: _figures(estimate) for estimate in plan.estimates},
    }
    return json.dumps(report, indent=1, default=str)


def _codecs(plan: Plan) -> dict[str, str | None]:
    strategy = plan.at_work
    intra, inter = strategy.gradient_codecs
    codecs: dict[str, object] = {
        "weights": strategy.weights,
        "gradients": inter,
        "intra_gradients": intra,
        "frozen": strategy.frozen,
    }
    codecs["error_feedback"] = strategy.error_feedback
    return {name: None if codec is None else str(codec) for name, codec in codecs.items()}


def _figures(estimate: Estimate) -> dict[str, Any]:
    return {
        "fits": estimate.fits,
        "memory_bytes": dataclasses.asdict(estimate.memory) | {"total": estimate.memory.total},
        "inter_node_bytes": estimate.inter_node_bytes,
        "sent_bytes_per_gpu": dataclasses.asdict(estimate.volume),
        "seconds": dataclasses.asdict(estimate.time)
        | {"communication": estimate.time.communication, "step": estimate.time.total},
    }
