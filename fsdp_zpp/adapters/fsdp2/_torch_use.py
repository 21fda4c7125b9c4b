"""Private names of torch's fully_shard: which parameters of a group ranks have used in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch_gradients import has_gradient

Hooks = Mapping[int, Callable[[Tensor], None]]
"""What runs after a gradient was accumulated: optimizers in the backward."""


class UnusedParameter(NamedTuple):
    """A parameter that this rank has not used, its sharded gradient before the step's, and its postponed hooks."""

    param: FSDPParam
    gradient: Tensor | None
    hooks: Hooks | None


@dataclass(eq=False, repr=False)
class ParameterUse:
    """Tells which parameters of a group one step has used, since ranks reduce all of them.

    Ranks may use different parameters in a micro-batch, but must reduce the same ones. So a micro-batch that is not the
    last of its step reduces all parameters of a group, and so does the last one of that step. With error feedback every
    step reduces all of them, since errors are laid out as all parameters of a group. Parameters that no rank has used
    get no gradient in the end, as with torch's own reduction (:meth:`drop_unused`).

    Args:
        group: The group.
        unit: Its unit.

    Attributes:
        took_part: Whether ranks have gathered the group in an earlier micro-batch of the step.
        has_errors: Whether the last micro-batch feeds errors back.
        unused: The parameters that this rank has not used, by id.
        reduced: The parameters that the last micro-batch of the step reduces.
    """

    group: FSDPParamGroup
    unit: StrategyUnit
    took_part: bool = False
    has_errors: bool = False
    reduced: list[FSDPParam] = field(default_factory=list)
    unused: dict[int, UnusedParameter] = field(default_factory=dict)
    _used: set[int] = field(default_factory=set)

    def forget_used(self) -> None:
        """Forget which parameters were used, since their gradients are dropped."""
        self._used = set()

    def note(self, params: Sequence[FSDPParam], gradients: Sequence[Tensor | None]) -> bool:
        """Note which of ``params`` have gradients in a micro-batch; return whether any has."""
        used = {id(param) for param, gradient in zip(params, gradients, strict=True) if gradient is not None}
        self._used |= used
        return bool(used)

    def fill_missing(self, params: Sequence[FSDPParam]) -> None:
        """Add zero gradients where the last micro-batch has none, but earlier ones or other ranks may have some."""
        for param in params:
            if has_gradient(param):
                self._used.add(id(param))
            else:
                dtype = getattr(param, "unsharded_grad_dtype", None) or param.unsharded_param.dtype
                param.unsharded_param.grad = torch.zeros_like(param.unsharded_param, dtype=dtype)
        # Until torch 2.14, accumulated gradients have another dtype, and torch reduces gradients of a single dtype.
        any_accumulated = any(param.unsharded_accumulated_grad is not None for param in params)
        if any_accumulated and hasattr(FSDPParam, "to_accumulated_grad_if_needed"):
            for param in params:
                param.accumulate_unsharded_grad_if_needed()  # or the next line replaces what is accumulated
                param.to_accumulated_grad_if_needed()
        for param in filter(self._goes_without, params):
            if id(param) in self._used:
                self.unused.pop(id(param), None)  # a module that runs twice comes here twice
            elif id(param) not in self.unused:
                sharded = param.sharded_param
                hooks = getattr(sharded, "_post_accumulate_grad_hooks", None)
                self.unused[id(param)] = UnusedParameter(param, sharded.grad, hooks)

    def _goes_without(self, param: FSDPParam) -> bool:
        """Return whether a parameter gets no gradient if no rank has used it, so that ranks exchange whether they have.

        It gets zeros if it requires a gradient by now and ``set_reduce_scatter_unused_params`` asks for them.
        """
        if self.unit.reduce is None:
            return False
        zeros_reduced = getattr(self.group, "reduce_scatter_unused_params", False)  # from torch 2.13 on
        return not (zeros_reduced and param._unsharded_param.requires_grad)

    @contextmanager
    def postponing_hooks(self) -> Iterator[None]:
        """Postpone optimizers in the backward, which must not step on gradients that perhaps no rank has used."""
        for param, _, _ in self.unused.values():
            set_hooks(param, None)
        try:
            yield
        finally:
            for param, _, hooks in self.unused.values():
                set_hooks(param, hooks)

    def idle(self) -> list[str]:
        """Return the names of the reduced parameters that this rank has not used in the step."""
        return [param._param_fqn or "" for param in self.reduced if id(param) not in self._used]

    # ---- after the backward

    def in_step(self) -> list[bool]:
        """Return, for each reduced parameter, whether this rank has used it; an empty list if ranks need not agree."""
        if not any(map(self._goes_without, self.reduced)):
            return []
        return [id(param) in self._used for param in self.reduced]

    def drop_unused(self, used_by_any: Callable[[], list[bool]]) -> None:
        """Remove gradients of parameters that no rank has used in the step; run the postponed hooks of the others."""
        if not self.unused:
            return
        by_id = dict(zip(map(id, self.reduced), used_by_any(), strict=True))
        for param, before, hooks in self.unused.values():
            if not by_id[id(param)]:
                param.sharded_param.grad = before
                continue
            for hook in (hooks or {}).values():
                hook(param.sharded_param)


def set_hooks(param: FSDPParam, hooks: Hooks | None) -> None:
    """Set the hooks that torch runs when a parameter has its sharded gradient."""
    param.sharded_param._post_accumulate_grad_hooks = hooks  # type: ignore[assignment]  # torch declares a dict
