"""Size of a model: its FSDP units, how much of each is trainable, and how much of it a token computes with.

Memory and traffic count all experts of a mixture, since some token of a batch goes to each. Computation counts the
experts that one token is routed to, and the parameters that all tokens share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from fsdp_zpp.extras import how_to_install
from fsdp_zpp.runtime.validation import check_module

from .config import whole
from .experts import expert_parameters, idle_elements
from .model_config import LayerShape, Routing, routing_of, shape_of

DEFAULT_UNITS = 32


@dataclass(frozen=True)
class Unit:
    """``count`` FSDP units of one size; each has a flat group of trainable elements and one of frozen elements.

    Args:
        trainable: Trainable elements of one unit.
        frozen: Frozen elements of one unit.
        count: Number of such units.
        reshard_after_forward: Whether a unit is gathered again for backward. FSDP keeps the root unit gathered.
        expert_trainable: How many of ``trainable`` are in experts that tokens are routed to.
        expert_frozen: How many of ``frozen`` are.

    Raises:
        TypeError: If a size is not a number.
        ValueError: If a size is out of range.
    """

    trainable: int
    frozen: int = 0
    count: int = 1
    reshard_after_forward: bool = True
    expert_trainable: int = 0
    expert_frozen: int = 0

    def __post_init__(self) -> None:
        for name in ("trainable", "frozen", "count", "expert_trainable", "expert_frozen"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=int(name == "count")))
        _check_at_most("expert_trainable", self.expert_trainable, self.trainable)
        _check_at_most("expert_frozen", self.expert_frozen, self.frozen)

    @property
    def numel(self) -> int:
        """Return the elements of one unit."""
        return self.trainable + self.frozen


def _check_at_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value:,}")


@dataclass(frozen=True)
class Units:
    """FSDP units of a model, or those parts of them that a rank has beside other parallelisms.

    Args:
        units: The units.
    """

    units: tuple[Unit, ...]

    @property
    def trainable(self) -> int:
        """Return the trainable elements."""
        return sum(unit.count * unit.trainable for unit in self.units)

    @property
    def frozen(self) -> int:
        """Return the frozen elements."""
        return sum(unit.count * unit.frozen for unit in self.units)

    @property
    def params(self) -> int:
        """Return all elements."""
        return self.trainable + self.frozen

    @property
    def count(self) -> int:
        """Return the number of units."""
        return sum(unit.count for unit in self.units)


@dataclass(frozen=True)
class ModelSize(Units):
    """All units of a model.

    Args:
        units: The units.
        idle_trainable: Trainable elements of the experts that a token is not routed to.
        idle_frozen: Frozen elements of the experts that a token is not routed to.
        routing: Number of experts, if known.
        layer: Shape of what layers compute, if known.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If nothing is trainable, or more elements are idle than the model has.
    """

    idle_trainable: int = 0
    idle_frozen: int = 0
    routing: Routing | None = None
    layer: LayerShape | None = None

    def __post_init__(self) -> None:
        for name, most in (("idle_trainable", self.trainable), ("idle_frozen", self.frozen)):
            _check_at_most(name, whole(name, getattr(self, name), 0), most)
        if self.trainable == 0:
            raise ValueError(
                f"nothing is trainable of {self.frozen:,} parameters, so there is no training to plan; a plan needs "
                "at least one trainable parameter"
            )

    @property
    def experts(self) -> int:
        """Return the elements in experts that tokens are routed to."""
        return sum(unit.count * (unit.expert_trainable + unit.expert_frozen) for unit in self.units)

    @property
    def active_trainable(self) -> int:
        """Return the trainable elements that a token computes with."""
        return self.trainable - self.idle_trainable

    @property
    def active_frozen(self) -> int:
        """Return the frozen elements that a token computes with."""
        return self.frozen - self.idle_frozen

    def with_trainable(self, trainable: float) -> ModelSize:
        """Return the model with ``trainable`` of its elements trainable, in each unit in proportion to its size.

        Raises:
            ValueError: If the model has fewer elements.
        """
        trainable = _trainable_count(trainable, self.params)
        units: list[Unit] = []
        before = 0
        for unit in self.units:
            # Shares are differences of rounded running sums, so that they add up to the total exactly.
            after = before + unit.count * unit.numel
            share = trainable * after // self.params - trainable * before // self.params
            split = _split(after - before, share, unit.count, unit.reshard_after_forward)
            units += [_with_experts(part, unit.expert_trainable + unit.expert_frozen) for part in split]
            before = after
        idle = self.idle_trainable + self.idle_frozen
        idle_trainable = idle * trainable // self.params
        return replace(self, units=tuple(units), idle_trainable=idle_trainable, idle_frozen=idle - idle_trainable)


def equal_units(params: float, trainable: float | None = None, units: int | None = None) -> ModelSize:
    """Split a model of which only totals are known into units of equal size, up to one element.

    Args:
        params: Number of elements.
        trainable: Number of trainable elements; None means all.
        units: Number of FSDP units, typically the layers; None means 32.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.
    """
    total = whole("params", params)
    count = whole("units", DEFAULT_UNITS if units is None else units)
    part = total if trainable is None else _trainable_count(trainable, total)
    return ModelSize(tuple(_split(total, part, count, True)))


def module_size(model: nn.Module) -> ModelSize:
    """Return a module's units: the entries of its outermost ``nn.ModuleList``s, and the root, which has the rest.

    These are the units if each layer is wrapped, then the model. A shared parameter counts once, in the first layer
    that has it. FSDP's padding does not count here: the planner adds the padding to equal shards, but not the padding
    of each parameter to 16 bytes under ``use_orig_params``.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If nothing in it is trainable.
    """
    check_module(model)
    blocks, routing = list(layers(model)), routing_of(model)
    experts = expert_parameters(model, routing)
    # Parameters hash by identity, so a set counts a shared one once.
    inside = {parameter for layer in blocks for parameter in layer.parameters()}
    root = _unit_of(set(model.parameters()) - inside, experts, reshard_after_forward=False)
    sizes: Counter[Unit] = Counter()
    seen: set[nn.Parameter] = set()
    for layer in blocks:
        own = set(layer.parameters()) - seen
        seen |= own
        sizes[_unit_of(own, experts)] += 1
    units = [replace(unit, count=count) for unit, count in sizes.items() if unit.numel]
    idle = idle_elements(model, routing)
    return ModelSize((*([root] if root.numel else []), *units), *idle, routing, shape_of(model))


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Return the entries of the outermost ``nn.ModuleList``s."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else layers(child)


def _unit_of(parameters: set[nn.Parameter], experts: set[nn.Parameter], reshard_after_forward: bool = True) -> Unit:
    def numels(among: set[nn.Parameter]) -> tuple[int, int]:
        trainable = sum(parameter.numel() for parameter in among if parameter.requires_grad)
        return trainable, sum(parameter.numel() for parameter in among) - trainable

    return Unit(*numels(parameters), 1, reshard_after_forward, *numels(parameters & experts))


def _trainable_count(trainable: float, params: int) -> int:
    count = whole("trainable", trainable)
    if count > params:
        raise ValueError(f"trainable must be at most the number of parameters, {params:,}, got {count:,}")
    return count


def _split(params: int, trainable: int, count: int, reshard_after_forward: bool) -> list[Unit]:
    """Make ``count`` units that add up exactly: the first few have one element more."""
    (each, more), (frozen_each, frozen_more) = divmod(trainable, count), divmod(params - trainable, count)
    # The size of a unit changes only where one of the two runs out of extra elements.
    bounds = sorted({0, more, frozen_more, count})
    return [
        Unit(each + (start < more), frozen_each + (start < frozen_more), end - start, reshard_after_forward)
        for start, end in pairwise(bounds)
    ]


def _with_experts(unit: Unit, experts: int) -> Unit:
    """Return the unit with ``experts`` of its elements in experts, trainable and frozen ones in proportion."""
    experts = min(experts, unit.numel)  # units that are split have one element more or less
    trainable = experts * unit.trainable // max(1, unit.numel)
    return replace(unit, expert_trainable=trainable, expert_frozen=experts - trainable)


def pretrained_size(name: str) -> ModelSize:
    """Return the units of a causal language model.

    Args:
        name: A config.json, a directory that has one, or a name on the hub.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
        ValueError: If there is no such config, the hub can't be reached, or it is not a causal language model's.
    """
    try:
        from huggingface_hub.errors import LocalEntryNotFoundError
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading the size of a model from its config needs transformers: {how_to_install('examples')}, "
            "or give the number of parameters instead"
        ) from error
    if name.endswith(".json") and not Path(name).is_file():
        # Transformers would take "a/config.json" for a name on the hub and ask there.
        raise ValueError(f"no such file: {name}")
    try:
        config = AutoConfig.from_pretrained(name)
        # Only sizes matter, so the weights need no memory.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a config of anything makes of transformers' code
        if any(isinstance(cause, LocalEntryNotFoundError) for cause in _causes(error)):
            raise ValueError(
                f"the hub could not be reached for the config of {name}, which is neither a file or directory here nor "
                "in the cache; check the network, give a config.json or a directory that has one, or give the number "
                f"of parameters instead: {error}"
            ) from error
        raise ValueError(
            f"{name} is not a causal language model that transformers can build; allowed are a config.json, "
            f"a directory that has one, or a name on the hub: {type(error).__name__}: {error}"
        ) from error
    return module_size(model)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Return the error and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
