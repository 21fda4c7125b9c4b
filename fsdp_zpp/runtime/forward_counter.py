"""How often a model runs forward in a step: with gradients in a micro-batch, without them in evaluation."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .full_shard import Forwards
from .unit import units_of


class ForwardCounter:
    """Counts forwards of a model.

    Not every model is called itself: a ``LightningModule`` may have its inner model called, and a list of a pipeline's
    stages can't be called at all. So the modules on the way to the first one with a unit are watched, and the outermost
    of them that is trained decides: recomputation runs inner ones more often, and some of it without gradients.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watched = _path_to_unit(model) or [model]
        self._handles = [self._watch(module) for module in self._watched]
        self._trained = dict.fromkeys(self._watched, 0)
        self._evaluated = dict.fromkeys(self._watched, 0)

    def take(self) -> Forwards:
        """Return the number of forwards since the last call."""
        trained, evaluated = self._trained, self._evaluated
        self._trained, self._evaluated = dict.fromkeys(self._watched, 0), dict.fromkeys(self._watched, 0)
        ran = [module for count in (trained, evaluated) for module in self._watched if count[module]]
        return Forwards(trained[ran[0]], evaluated[ran[0]]) if ran else Forwards(0, 0)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._count(module)))

    def _count(self, module: nn.Module) -> None:
        (self._trained if torch.is_grad_enabled() else self._evaluated)[module] += 1


def _path_to_unit(module: nn.Module) -> list[nn.Module]:
    """Return the modules from ``module`` to the first one in it that has a unit, both included; none without units."""
    if units_of(module):
        return [module]
    inner = next(filter(None, map(_path_to_unit, module.children())), [])
    return [module, *inner] if inner else []
