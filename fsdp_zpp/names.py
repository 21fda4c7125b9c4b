"""Names: FQNs of a model's tensors, suggestions for misspelt names, pip extras, and removed public names."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

# ---- FQNs without the parts that FSDP, activation checkpointing, torch.compile and PEFT insert
#
# Files hold the base model and must be readable whether or not any of these wrap it. So a tensor's name in files is
# its FQN without the parts that wrappers insert; the modules show which parts these are. Tensors of adapters have no
# name in the base. A tied tensor has several names, and files have at least one of them.

# Names of the child that is the wrapped module, in PEFT's ModulesToSaveWrapper and TrainableTokensWrapper.
_PASSED = ("original_module", "token_adapter")
# Names of the child that is the wrapped module, in wrappers of FSDP, activation checkpointing and torch.compile.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def original_path(path: str) -> str:
    """Return a path without the parts that wrappers insert."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def parameter_name(path: str, own_name: str) -> str:
    """Return the FQN of the parameter ``own_name`` of the module at ``path``, without the parts of wrappers."""
    return original_path(f"{path}.{own_name}").removeprefix(".")


def model_name(model: nn.Module) -> str:
    if isinstance(model, FullyShardedDataParallel):
        model = model.module
    name = type(model).__name__
    # fully_shard changes the model's class to one with this prefix.
    return name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name


def base_fqns(module: nn.Module, path: str = "", base: str | None = "") -> Iterator[tuple[str, str | None, nn.Module]]:
    """Yield each module's FQN, its FQN in the base (None in adapters) and the module; a shared one under all FQNs."""
    # named_modules() is not enough: a module's FQN in the base depends on the wrappers around it.
    inserted = _inserted_children(module)
    yield path, None if inserted is not None else base, module
    for name, child in module._modules.items():
        if child is None:  # registered as None
            continue
        if inserted is not None:
            below = base if name in inserted else None
        else:
            below = None if base is None else original_path(join_fqn(base, name))
        yield from base_fqns(child, join_fqn(path, name), below)


def _inserted_children(module: nn.Module) -> tuple[str, ...] | None:
    """Return names of children that stand for ``module`` in the base if PEFT inserted it; None if PEFT did not."""
    children = module._modules
    if hasattr(module, "adapter_layer_names"):
        if "base_layer" in children:
            return ("base_layer",)
        if "original_module" in children:
            return _PASSED
    if hasattr(module, "peft_config"):
        if "base_model" in children:  # a PeftModel
            return ("base_model",)
        if "model" in children and hasattr(module, "inject_adapter"):  # a tuner, which a PeftModel wraps
            return ("model",)
    return None


def join_fqn(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name  # the root is at ""


# ---- suggestions, "did you mean ...?"

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def did_you_mean(
    given: object, known: Iterable[str], name: str = "{}", *, before: str = "", most: int = 1, cutoff: float = 0.6
) -> str:
    """Return the question "did you mean ...?" about the ``most`` closest known names; "" if none is close.

    Case does not count. ``name`` formats each name, ``before`` precedes the question, and ``cutoff`` is the closeness
    that is needed, from 0 to 1.
    """
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(given).lower(), by_lower, n=most, cutoff=cutoff)
    return f"{before}did you mean {' or '.join(name.format(by_lower[each]) for each in near)}?" if near else ""


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError unless all keyword arguments of a call are known; the error suggests a name."""
    allowed = list(known)
    for name in given:
        if name not in allowed:
            hint = did_you_mean(name, allowed) or f"allowed are {', '.join(allowed)}"
            raise TypeError(f"{call} has no argument {name!r}; {hint}")


def explains_keywords(cls: C) -> C:
    """Make the error of a constructor for an unknown argument suggest a known one."""
    cls.__init__ = explains_arguments(cls.__init__)  # type: ignore[misc]
    return cls


def explains_arguments(function: F) -> F:
    """Make the error of a function for an unknown argument suggest a known one."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        check_keywords(name, keywords, known)
        return function(*arguments, **keywords)

    return call  # type: ignore[return-value]


# ---- how to install what an optional part needs


def how_to_install(extra: str, *, upgrade: bool = False) -> str:
    """Return the command that installs the packages of ``extra``, as the end of an error."""
    # From a clone: no package index has fsdp_zpp.
    return f"run pip install {'--upgrade ' * upgrade}'.[{extra}]' in your clone of fsdp_zpp"


# ---- removed names

# The alternative to each removed public name.
_TRAFFIC = "call traffic(model, reset=True) after each step for its bytes, and torch.profiler for its times"
_WHOLE_TENSORS = "send the engine the tensors of gathered_weights(model)"
REMOVED = {
    **dict.fromkeys(("DeltaReceiver", "OutOfSyncError", "SyncToken", "WeightUpdate"), _WHOLE_TENSORS),
    "choose_strategy": "use plan(...).choice.strategy, or paste the line that torchrun ... -m fsdp_zpp plan --measure "
    "prints",
    **dict.fromkeys(("Monitor", "monitor"), _TRAFFIC),
    "TopK": "copy it from examples/top_k_codec.py, and pass LocalSteps(codec=TopK(), ...)",
}
