"""Patches functions of ``torch.nn.utils`` that compute a weight from others: for a frozen weight they raise.

These functions compute the weight anew in each forward. So they take the parameter out of its module, and a frozen
weight is no parameter: torch itself raises a ``KeyError`` that names nothing but ``weight``. If they are called before
quantizing, they are honoured: the parameter that they make is not the weight of a layer any more, so it is not
quantized.

Other ways to replace a frozen weight are honoured by ``modules.py`` (PEFT's ``target_parameters``, an entry in
``module._parameters`` or the instance's ``__dict__``), or raise there (whatever writes to it or sets it).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from .modules import frozen_weights_of

_REPLACING: tuple[tuple[str, str | None, str], ...] = (
    ("torch.nn.utils.parametrize", None, "register_parametrization"),
    ("torch.nn.utils.weight_norm", "WeightNorm", "apply"),
    ("torch.nn.utils.spectral_norm", "SpectralNorm", "apply"),
    ("torch.nn.utils.prune", "BasePruningMethod", "apply"),
)
"""What is replaced: the module, the class if it is a method, and its name. The first two arguments are the module whose
weight is meant and its name there."""
_MARK = "_fsdp_zpp_refuses_frozen"


def refuse_replacing() -> None:
    """Make functions of ``torch.nn.utils`` raise for frozen weights, from now on. See the top of this file."""
    for path, cls, name in _REPLACING:
        owner: object = importlib.import_module(path)
        owner = owner if cls is None else getattr(owner, cls, None)  # the old norms are deprecated, and may go
        original = None if owner is None else vars(owner).get(name)
        if original is not None and not hasattr(original, _MARK):
            setattr(owner, name, _wrap(original, f"{path}.{cls or name}"))


def _wrap(original: Any, what: str) -> Any:
    """Wrap a function, or a static or class method, so that it raises if it is given a frozen weight."""
    kind = type(original) if isinstance(original, (staticmethod, classmethod)) else None
    function: Callable[..., object] = original if kind is None else original.__func__
    first = 1 if kind is classmethod else 0

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        module = args[first] if len(args) > first else kwargs.get("module")
        name = args[first + 1] if len(args) > first + 1 else kwargs.get("tensor_name", kwargs.get("name"))
        if isinstance(module, nn.Module) and name in (frozen := frozen_weights_of(module)):
            raise RuntimeError(
                f"{frozen[name].name} is frozen and quantized, so {what} can't compute it from other parameters; call "
                "it before you quantize, which then leaves this weight out, or call "
                "fsdp_zpp.dequantize_frozen_params(module) first, on every rank and before sharding"
            )
        return function(*args, **kwargs)

    wrapped: Any = checked if kind is None else kind(checked)
    setattr(wrapped, _MARK, True)
    return wrapped
