"""The model of a plan: its parameters, units and experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_zpp.names import how_to_install
from fsdp_zpp.runtime.api import check_module

from .cluster import Cluster, MemoryBudget, Precision, StepConfig, whole

# ---- model config
#
# Names in Hugging Face configs for the number of experts, and for the number of experts that a token is routed to.

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")


def _routing_of(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of experts in a layer and of experts per token; zeros if they are not known."""
    config: Any = getattr(model, "config", None)
    # Models of text and images keep these numbers in the config of their text part.
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def first(names: tuple[str, ...]) -> int:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), 0)

    experts, chosen = first(_EXPERTS), first(_CHOSEN)
    return (experts, chosen) if 0 < chosen <= experts else (0, 0)


_MODULES = {"experts", "routed_experts"}


def _idle_elements(model: nn.Module) -> tuple[int, int]:
    """Return the average numbers of trainable and of frozen elements in experts that a token is not routed to.

    Routed experts are the parameters below a module named ``experts`` or ``routed_experts``, and any other 3-D
    parameter with one slice per expert. Shared experts, which every token uses, are not routed.
    """
    count, chosen = _routing_of(model)
    if not count:
        return 0, 0
    routed = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        fused = parameter.dim() == 3 and parameter.shape[0] == count
        if fused or not _MODULES.isdisjoint(name.split(".")):
            routed[parameter.requires_grad] += parameter.numel()
    return routed[True] * (count - chosen) // count, routed[False] * (count - chosen) // count


# ---- model size
#
# Size of a model: its FSDP units, how much of each is trainable, and how much of the model a token computes with.
#
# Memory and traffic count all experts of a mixture, since some token of a batch goes to each. Computation counts the
# experts that one token is routed to, and the parameters that all tokens share.

DEFAULT_UNITS = 32


@dataclass(frozen=True)
class Unit:
    """``count`` FSDP units of one size; each has a flat group of trainable elements and one of frozen elements.

    Args:
        trainable: Trainable elements of one unit.
        frozen: Frozen elements of one unit.
        count: Number of such units.
        reshard_after_forward: True if a unit is gathered again for backward. FSDP keeps the root unit gathered.

    Raises:
        TypeError: If a size is not a number.
        ValueError: If a size is out of range.
    """

    trainable: int
    frozen: int = 0
    count: int = 1
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        for name in ("trainable", "frozen", "count"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=int(name == "count")))

    @property
    def numel(self) -> int:
        """Return the number of elements of one unit."""
        return self.trainable + self.frozen


@dataclass(frozen=True)
class Units:
    """FSDP units of a model, or only their trainable or frozen elements."""

    units: tuple[Unit, ...]

    @property
    def trainable(self) -> int:
        """Return the number of trainable elements."""
        return sum(unit.count * unit.trainable for unit in self.units)

    @property
    def frozen(self) -> int:
        """Return the number of frozen elements."""
        return sum(unit.count * unit.frozen for unit in self.units)

    @property
    def params(self) -> int:
        """Return the number of all elements."""
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

    Raises:
        ValueError: If nothing is trainable.
    """

    idle_trainable: int = 0
    idle_frozen: int = 0

    def __post_init__(self) -> None:
        if self.trainable == 0:
            raise ValueError(
                f"nothing is trainable of {self.frozen:,} parameters, so there is no training to plan; a plan needs "
                "at least one trainable parameter"
            )

    @property
    def active_trainable(self) -> int:
        """Return the number of trainable elements that a token computes with."""
        return self.trainable - self.idle_trainable

    @property
    def active_frozen(self) -> int:
        """Return the number of frozen elements that a token computes with."""
        return self.frozen - self.idle_frozen

    def with_trainable(self, trainable: float) -> ModelSize:
        """Return the model with ``trainable`` trainable elements, spread over the units in proportion to their sizes.

        Raises:
            ValueError: If the model has fewer elements.
        """
        trainable = whole("trainable", trainable)
        if trainable > self.params:
            raise ValueError(f"trainable must be at most the number of parameters, {self.params:,}, got {trainable:,}")
        units: list[Unit] = []
        before = 0
        for unit in self.units:
            # Shares are differences of rounded running sums, so that they add up to the total exactly.
            after = before + unit.count * unit.numel
            share = trainable * after // self.params - trainable * before // self.params
            units += _split(after - before, share, unit.count, unit.reshard_after_forward)
            before = after
        idle = self.idle_trainable + self.idle_frozen
        idle_trainable = idle * trainable // self.params
        return replace(self, units=tuple(units), idle_trainable=idle_trainable, idle_frozen=idle - idle_trainable)


def equal_units(params: float, units: int | None = None) -> ModelSize:
    """Split a number of elements into FSDP units whose sizes differ by at most one element.

    Args:
        params: Number of elements. All are trainable.
        units: Number of units, typically the layers; None means 32.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.
    """
    total, count = whole("params", params), whole("units", DEFAULT_UNITS if units is None else units)
    return ModelSize(tuple(_split(total, total, count, True)))


def module_size(model: nn.Module) -> ModelSize:
    """Return a module's units: the entries of its outermost ``nn.ModuleList``s, and the root, which has the rest.

    FSDP has these units if each layer is wrapped, then the model. A shared parameter counts once, in the first layer
    that has it. Sizes are without padding. The plan adds padding that makes shards equal, and leaves out the padding
    of each parameter to 16 bytes under ``use_orig_params``.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If nothing in it is trainable.
    """
    check_module(model)
    blocks = list(layers(model))
    # Parameters hash by identity, so a set counts a shared one once.
    inside = {parameter for layer in blocks for parameter in layer.parameters()}
    root = _unit_of(set(model.parameters()) - inside, reshard_after_forward=False)
    sizes: Counter[Unit] = Counter()
    seen: set[nn.Parameter] = set()
    for layer in blocks:
        own = set(layer.parameters()) - seen
        seen |= own
        sizes[_unit_of(own)] += 1
    units = [replace(unit, count=count) for unit, count in sizes.items() if unit.numel]
    return ModelSize((*([root] if root.numel else []), *units), *_idle_elements(model))


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the outermost ``nn.ModuleList``s."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else layers(child)


def _unit_of(parameters: set[nn.Parameter], reshard_after_forward: bool = True) -> Unit:
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    return Unit(trainable, total - trainable, 1, reshard_after_forward)


def _split(params: int, trainable: int, count: int, reshard_after_forward: bool) -> list[Unit]:
    """Split elements into ``count`` units that add up exactly; the first few may have one element more."""
    (each, more), (frozen_each, frozen_more) = divmod(trainable, count), divmod(params - trainable, count)
    # A unit differs from the one before only where the extra trainable or frozen elements run out.
    bounds = sorted({0, more, frozen_more, count})
    return [
        Unit(each + (start < more), frozen_each + (start < frozen_more), end - start, reshard_after_forward)
        for start, end in pairwise(bounds)
    ]


def pretrained_size(name: str) -> ModelSize:
    """Return the units of a causal language model.

    Args:
        name: A config.json, a directory that has one, or a name on the hub.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
        ValueError: If there is no such config, the hub can't be reached, or the config is of another kind of model.
    """
    try:
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
    except Exception as error:  # a config of another kind can raise anything in transformers
        raise ValueError(
            f"{name} is not a causal language model that transformers can build; allowed are a config.json, a "
            "directory that has one, or a name on a hub that can be reached, or give the number of parameters instead: "
            f"{type(error).__name__}: {error}"
        ) from error
    return module_size(model)


# ---- case


@dataclass(frozen=True)
class Case:
    """The training that is planned, without its strategy."""

    size: ModelSize
    cluster: Cluster
    work: StepConfig
    budget: MemoryBudget
    precision: Precision
