"""FQNs of modules and parameters, without the parts that FSDP, activation checkpointing, torch.compile and PEFT insert.

Files hold the base and must be readable whether or not any of these wrap the model. So a tensor's name in files is its
FQN without the parts that those insert, which the modules themselves reveal. Tensors of adapters have no name in the
base. A tied tensor has several names, of which files have at least one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

_PASSED = ("original_module", "token_adapter")
"""Children that hold the wrapped module in PEFT's wrappers of whole modules."""
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Children that hold the wrapped module in wrappers of FSDP, activation checkpointing and torch.compile."""


def original_path(path: str) -> str:
    """Return a path without the parts that wrappers insert."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def parameter_name(path: str, own_name: str) -> str:
    """Return the FQN of the parameter ``own_name`` of the module at ``path``, without what wrappers insert."""
    return original_path(f"{path}.{own_name}").removeprefix(".")


def model_name(model: nn.Module) -> str:
    """Return the name of a model's class, whether or not the model is sharded."""
    if isinstance(model, FullyShardedDataParallel):
        model = model.module
    name = type(model).__name__
    # fully_shard makes a class of its own for each model, with this prefix.
    return name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name


def base_fqns(model: nn.Module) -> Iterator[tuple[str, str | None, nn.Module]]:
    """Yield each module, its FQN and its FQN in the base (None for an adapter's); shared ones under every FQN."""
    yield from _walk(model, "", "")


def _walk(module: nn.Module, path: str, base: str | None) -> Iterator[tuple[str, str | None, nn.Module]]:
    # named_modules() does not suffice: a module's FQN in the base depends on what its ancestors insert.
    inserted = _inserted_children(module)
    yield path, None if inserted is not None else base, module
    for name, child in module._modules.items():
        if child is None:  # a registered child that a model leaves out
            continue
        if base is None or (inserted is not None and name not in inserted):
            below = None
        elif inserted is not None:
            below = base
        else:
            below = original_path(join_fqn(base, name))
        yield from _walk(child, join_fqn(path, name), below)


def _inserted_children(module: nn.Module) -> tuple[str, ...] | None:
    """Return the children that stand for ``module`` in the base if PEFT inserted it; None if PEFT did not."""
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
    """Return the FQN of the child ``name`` of the module at ``path``; the root is at ""."""
    return f"{path}.{name}" if path else name
