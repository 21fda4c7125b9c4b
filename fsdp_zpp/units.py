"""What an adapter leaves on the modules it manages, and the functions that users call with a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import nn

from .frozen.module import frozen_modules
from .hop import Kind, Level, Traffic
from .topology import ProcessMesh
from .unit_errors import UnitErrors

_ATTRIBUTE = "_fsdp_zpp_unit"


class Part(Protocol):
    """A part of a model that communicates."""

    traffic: Traffic

    def invalidate(self) -> None:
        """Declare the secondary shard stale."""


class Unit(Part, Protocol):
    """One group of parameters that is gathered and reduced together."""

    @property
    def errors(self) -> UnitErrors | None:
        """What feeds the errors of gradient codecs back, if anything does."""

    @property
    def mesh(self) -> ProcessMesh:
        """Its ranks."""


def attach(module: nn.Module, unit: Unit) -> None:
    """Make ``unit`` findable from ``module``."""
    setattr(module, _ATTRIBUTE, unit)


def detach(module: nn.Module) -> None:
    """Forget the unit attached to ``module``."""
    delattr(module, _ATTRIBUTE)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit attached to ``module`` itself."""
    return vars(module).get(_ATTRIBUTE)


def units(model: nn.Module) -> Iterator[Part]:
    """The units of a model, outermost first, then its frozen base.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
    """
    found: list[Part] = [unit for unit in map(unit_of, model.modules()) if unit is not None]
    found += {weight.base: None for _, _, weight in frozen_modules(model)}
    if not found:
        raise ValueError(
            f"no part of this {type(model).__name__} was wrapped with a Strategy or has a quantized_reduce_hook"
        )
    yield from found


def invalidate(model: nn.Module) -> None:
    """Declare that the weights of ``model`` have changed; call it on every rank.

    Gradient-synchronizing backwards, steps of torch's optimizers, ``load_state_dict`` and
    ``summon_full_params(writeback=True)`` announce themselves. Any other write to the weights (clipping them,
    ``p.data.copy_()``, an average) must be followed by this before the next forward, so that they are gathered between
    nodes again. A forward sends all units' weights as soon as it needs the first, so a write within a forward (by a
    hook, say) must be followed by this before the unit that it is in is used.

    Args:
        model: A model wrapped with a :class:`Strategy`, or a part of one.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
    """
    for unit in units(model):
        unit.invalidate()


def traffic(model: nn.Module) -> dict[Kind, dict[Level, int]]:
    """Bytes that this rank has sent for ``model`` so far, by kind and hop.

    Counts what strategies, hooks and frozen bases of fsdp_zpp send. Not counted is what torch's own collectives do:
    gathers in full precision for state dicts and ``summon_full_params``, and, on one node, what is not encoded. An
    all-gather of a payload of b bytes over n ranks counts as b * (n - 1), an all-to-all as b * (n - 1) / n.

    Args:
        model: A model wrapped with a :class:`Strategy` or with a :func:`quantized_reduce_hook`, or with a frozen base
            that is quantized, or a part of one.

    Returns:
        ``{"gather": {"inter": ..., "intra": ...}, "reduce": {"inter": ..., "intra": ...}}``, in bytes.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
    """
    total: dict[Kind, dict[Level, int]] = {
        "gather": {"inter": 0, "intra": 0},
        "reduce": {"inter": 0, "intra": 0},
    }
    # A comm hook's state is shared by all units of a model.
    for counter in {id(unit.traffic): unit.traffic for unit in units(model)}.values():
        for (kind, level), nbytes in counter.sent.items():
            total[kind][level] += nbytes
    return total
