"""Outer optimizer of local-update training: SGD with momentum, on the chunks of weights that a rank owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TypedDict

import torch
from torch import Tensor

from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.outer_momentum import aligned_gain, correlation_of_changes, fitting_momentum

from .flat_layout import FlatLayout

_MOST_AT_ONCE = 2**30
"""The most values of which a scalar product is taken at once: cuBLAS counts them in 32 bits."""


class OuterFit(TypedDict):
    """Figures from which the next momentum is chosen, in a checkpoint.

    Attributes:
        products: This rank's part of <m, g> and <g, g> in the last step.
        coefficient: The momentum mu of the last step.
        correlation: The last correlation of successive changes that is known.
    """

    products: Tensor
    coefficient: float
    correlation: float


@dataclass(frozen=True)
class OuterFigures:
    """Figures of an outer step.

    Attributes:
        norm: Squared norm of the mean change g: <g, g>.
        momentum: The momentum mu of the step.
        gain: Its aligned gain; see the top of outer_momentum.py.
        correlation: Correlation of this change and earlier ones, in [-1, 1]; None if there was no earlier one.
    """

    norm: float
    momentum: float
    gain: float
    correlation: float | None


class OuterOptimizer:
    """Makes outer steps, and keeps their momentum by parameter.

    Args:
        config: Its learning rate and momentum.

    Attributes:
        products: This rank's part of <m, g> and <g, g> in the last step: fp32 [2], m the momentum kept before it and g
            the mean change. The products are the sums over all ranks, each of which steps other values.
    """

    def __init__(self, config: LocalSteps) -> None:
        self._config = config
        self._momentum: dict[str, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all momentum; :meth:`start` comes next."""
        self._momentum = {}
        self.products = torch.zeros(2, dtype=torch.float32)
        self._correlation = 1.0  # until it is known: "auto" then chooses the least momentum
        self._last = self._coefficient

    @property
    def _coefficient(self) -> float:
        """Return the momentum mu of the next step."""
        config = self._config
        if config.outer_momentum != "auto":
            return config.outer_momentum
        return fitting_momentum(config.outer_lr, self._correlation, nesterov=config.nesterov)

    def start(self, name: str, numel: int, device: torch.device, kept_on: torch.device) -> None:
        """Start a parameter with a momentum of zero.

        Args:
            name: The FQN of a parameter.
            numel: Number of values in this rank's chunk of it.
            device: Where steps are made.
            kept_on: Where its momentum is kept.
        """
        self._momentum[name] = torch.zeros(numel, dtype=torch.float32, device=kept_on)
        self.products = self.products.to(device)

    def momentum_of(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Yield the momentum of some parameters."""
        return (self._momentum[name] for name in names)

    def step(self, gradient: Tensor, layout: FlatLayout) -> Tensor:
        """Make an outer step, and return what is to be added to the weights: fp32, flat.

        Args:
            gradient: The mean change, fp32, flat; its memory is used up.
            layout: Where this rank's chunks of parameters lie in it.
        """
        config, device = self._config, gradient.device
        self._last = coefficient = self._coefficient
        parts = {piece: self._momentum[piece.name].to(device).view(1, -1) for piece in layout.pieces}
        # The momentum of a single parameter is updated in place.
        momentum = next(iter(parts.values())).view(-1) if len(parts) == 1 else layout.join(parts, 1, gradient)
        for product, other in zip(self.products, (momentum, gradient), strict=True):
            _set_to_product(product, gradient, other)
        momentum.mul_(coefficient).add_(gradient)
        for piece, new in layout.split(momentum).items():
            if (kept := self._momentum[piece.name]).data_ptr() != new.data_ptr():
                kept.copy_(new[0])
        step = gradient.add_(momentum, alpha=coefficient) if config.nesterov else momentum
        return step.mul(-config.outer_lr)

    def warm_up(self, changes: Mapping[str, Tensor]) -> None:
        """Add changes to the momentum without an outer step, as Pier does in synchronous steps (arXiv 2511.17849).

        Args:
            changes: Changes of this rank's chunks, fp32, flat, by FQN; what pads a chunk may be left out.
        """
        self.products.zero_()
        self._last = coefficient = self._coefficient
        for name, change in changes.items():
            momentum = self._momentum[name]
            for product, other in zip(self.products, (momentum[: change.numel()], change), strict=True):
                own = torch.zeros((), dtype=torch.float32, device=change.device)
                _set_to_product(own, change, other)
                product.add_(own.to(product.device))
            momentum.mul_(coefficient)[: change.numel()].add_(change)

    def clear_products(self) -> None:
        """Note that this rank has no part of the last step's products."""
        self.products.zero_()

    def fit(self, products: tuple[float, float]) -> OuterFigures | None:
        """Return figures of the last step, and choose the momentum of the next one.

        Args:
            products: ``products``, summed over the ranks.

        Returns:
            None if nothing has changed, or not by a finite amount.
        """
        config, (along, norm), coefficient = self._config, products, self._last
        figures = None
        if isfinite(along) and isfinite(norm) and norm > 0:
            gain = aligned_gain(config.outer_lr, coefficient, along / norm, nesterov=config.nesterov)
            # <m, g> is exactly 0 only while there is no momentum.
            correlation = correlation_of_changes(coefficient, along / norm) if along else None
            figures = OuterFigures(norm, coefficient, gain, correlation)
            self._correlation = self._correlation if correlation is None else correlation
        return figures

    # ---- in checkpoints

    def state_dict(self) -> tuple[dict[str, Tensor], OuterFit]:
        """Return copies on the CPU: the momentum by parameter, and the figures from which the next one is chosen."""
        return {name: value.to("cpu", copy=True) for name, value in self._momentum.items()}, self.last_fit

    @property
    def last_fit(self) -> OuterFit:
        """Return a copy, on the CPU, of the figures from which the next momentum is chosen."""
        products = self.products.to("cpu", copy=True)
        return {"products": products, "coefficient": self._last, "correlation": self._correlation}

    @last_fit.setter
    def last_fit(self, fit: OuterFit) -> None:
        self.products.copy_(fit["products"])
        self._last, self._correlation = fit["coefficient"], fit["correlation"]

    def load_state_dict(self, momentum: Mapping[str, Tensor], fit: OuterFit | None) -> None:
        """Continue with what :meth:`state_dict` returned, for parameters that were started; old states lack ``fit``."""
        for name, value in momentum.items():
            self._momentum[name].copy_(value)
        if fit is not None:
            self.last_fit = fit


def _set_to_product(product: Tensor, one: Tensor, other: Tensor) -> None:
    """Set a scalar tensor to the scalar product of two flat tensors."""
    product.zero_()
    for pair in zip(one.split(_MOST_AT_ONCE), other.split(_MOST_AT_ONCE), strict=True):
        product.add_(torch.dot(*pair))
