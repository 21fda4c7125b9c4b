"""How large a model is: its FSDP units, and how much of each is trainable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from .checks import whole
from .experts import idle_elements

DEFAULT_UNITS = 32


@dataclass(frozen=True)
class Unit:
    """``count`` FSDP units of one size; each has a flat group of trainable elements and one of frozen ones.

    Args:
        trainable: Trainable elements of one unit.
        frozen: Its frozen elements.
        count: How many there are.
        reshard_after_forward: Whether it is gathered again for backward. FSDP keeps the root unit.

    Raises:
        TypeError: If a size is not a number.
        ValueError: If one is out of range.
    """

    trainable: int
    frozen: int = 0
    count: int = 1
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        for name, least in (("trainable", 0), ("frozen", 0), ("count", 1)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))

    @property
    def numel(self) -> int:
        """Elements of one unit."""
        return self.trainable + self.frozen


@dataclass(frozen=True)
class ModelSize:
    """All units of a model.

    Args:
        units: The units.
        idle_trainable: Trainable elements of the experts that a token is not routed to.
        idle_frozen: Frozen elements of these experts.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If nothing is trainable, or more is idle than there is.
    """

    units: tuple[Unit, ...]
    idle_trainable: int = 0
    idle_frozen: int = 0

    def __post_init__(self) -> None:
        for name, most in (("idle_trainable", self.trainable), ("idle_frozen", self.frozen)):
            if whole(name, getattr(self, name), 0) > most:
                raise ValueError(f"{name} must be at most {most:,}, got {getattr(self, name):,}")
        if self.trainable == 0:
            raise ValueError(f"nothing is trainable of {self.frozen:,} parameters, so there is no training to plan")

    @property
    def trainable(self) -> int:
        """Trainable elements."""
        return sum(unit.count * unit.trainable for unit in self.units)

    @property
    def frozen(self) -> int:
        """Frozen elements."""
        return sum(unit.count * unit.frozen for unit in self.units)

    @property
    def params(self) -> int:
        """All elements."""
        return self.trainable + self.frozen

    @property
    def active_trainable(self) -> int:
        """Trainable elements that a token computes with."""
        return self.trainable - self.idle_trainable

    @property
    def active_frozen(self) -> int:
        """Frozen elements that a token computes with."""
        return self.frozen - self.idle_frozen

    @property
    def count(self) -> int:
        """Number of units."""
        return sum(unit.count for unit in self.units)

    def with_trainable(self, trainable: float) -> ModelSize:
        """The same model with ``trainable`` of its elements trainable, each unit its share of them.

        Raises:
            ValueError: If the model has fewer elements.
        """
        trainable = _trainable_count(trainable, self.params)
        units: list[Unit] = []
        before = 0
        for unit in self.units:
            # Shares are differences of rounded running sums, so that they add up.
            after = before + unit.count * unit.numel
            share = trainable * after // self.params - trainable * before // self.params
            units += _split(after - before, share, unit.count, unit.reshard_after_forward)
            before = after
        idle = self.idle_trainable + self.idle_frozen
        idle_trainable = idle * trainable // self.params
        return ModelSize(tuple(units), idle_trainable, idle - idle_trainable)


def equal_units(params: float, trainable: float | None = None, units: int | None = None) -> ModelSize:
    """A model of which only totals are known, as units of equal size (or one element more).

    Args:
        params: Elements in all.
        trainable: How many of them are trainable; None is all.
        units: Into how many units FSDP wraps them, typically the layers; None is 32.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If one is out of range.
    """
    total = whole("params", params)
    count = whole("units", DEFAULT_UNITS if units is None else units)
    part = total if trainable is None else _trainable_count(trainable, total)
    return ModelSize(tuple(_split(total, part, count, True)))


def module_size(model: nn.Module) -> ModelSize:
    """The units of a module: each entry of its outermost ``nn.ModuleList``s, and the root, which has the rest.

    That is what wrapping each layer and then the model makes of it. A shared parameter counts once, in the first
    layer that has it. Not counted is what FSDP pads: to equal shards (the planner does), and, with
    ``use_orig_params``, each parameter to 16 bytes. Of experts, a token computes with those that it is routed to.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If nothing in it is trainable.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")
    layers = list(_layers(model))
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    root = _unit_of(set(model.parameters()) - inside, reshard_after_forward=False)
    sizes: Counter[Unit] = Counter()
    seen: set[nn.Parameter] = set()
    for layer in layers:
        own = set(layer.parameters()) - seen
        seen |= own
        sizes[_unit_of(own)] += 1
    units = [Unit(unit.trainable, unit.frozen, count) for unit, count in sizes.items() if unit.numel]
    return ModelSize((*([root] if root.numel else []), *units), *idle_elements(model))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def _unit_of(parameters: set[nn.Parameter], reshard_after_forward: bool = True) -> Unit:
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    return Unit(trainable, total - trainable, reshard_after_forward=reshard_after_forward)


def _trainable_count(trainable: float, params: int) -> int:
    count = whole("trainable", trainable)
    if count > params:
        raise ValueError(f"trainable must be at most the number of parameters, {params:,}, got {count:,}")
    return count


def _split(params: int, trainable: int, count: int, reshard_after_forward: bool) -> list[Unit]:
    """``count`` units that add up exactly: the first few of them have one element more."""
    (each, more), (frozen_each, frozen_more) = divmod(trainable, count), divmod(params - trainable, count)
    bounds = sorted({0, more, frozen_more, count})
    return [
        Unit(each + (start < more), frozen_each + (start < frozen_more), end - start, reshard_after_forward)
        for start, end in pairwise(bounds)
    ]
