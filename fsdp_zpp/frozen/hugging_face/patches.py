"""Patches PEFT to add adapters to a quantized base, and transformers not to save half of it.

PEFT looks at a model's parameters to find tied weights, targets and word embeddings, and to count elements. Frozen
weights are not parameters, since FSDP must not see them. So while one of the methods of PEFT below runs, the tensors
that stand for frozen weights are registered as parameters of their modules.

For ``target_parameters``, PEFT parametrizes the module that has them in every forward. A frozen weight is parametrized
on a stand-in module instead.

transformers' ``save_pretrained`` would write only the part of a model that is not quantized. From a sharded model, it
and PEFT's would write what one rank holds, or nothing. Patched, they raise in these cases unless they are given a state
dict that has all weights.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_zpp.module_names import model_name, parameter_name

from .._tensor import frozen_tensor
from ..modules import FrozenModule, frozen_modules, frozen_sites, frozen_weights_of, replaced

logger = logging.getLogger("fsdp_zpp")

_LOOKING_AT_PARAMETERS = (
    ("peft.peft_model", "PeftModel", "__init__"),
    ("peft.peft_model", "PeftModel", "add_adapter"),
    ("peft.peft_model", "PeftModel", "get_nb_trainable_parameters"),
    ("peft.tuners.tuners_utils", "BaseTuner", "inject_adapter"),
)
"""Methods that look at the parameters of the object they are called on, or of their arguments."""
_COMPUTING_WITH_PARAMETER = ("peft.tuners.lora.layer", "ParamWrapper", "_activate_lora")
_MARK = "_fsdp_zpp_shows_frozen"


def show_to_peft() -> None:
    """Let PEFT see frozen weights, if it is imported or may be later. See the top of this file."""
    # Importing PEFT takes seconds, which a process without any of Hugging Face's libraries need not spend.
    if not {"peft", "transformers"} & set(sys.modules):
        return
    try:
        importlib.import_module("peft")
    except ImportError:
        return
    for module, cls, method in _LOOKING_AT_PARAMETERS:
        _wrap(module, cls, method, _with_parameters_shown)
    _wrap(*_COMPUTING_WITH_PARAMETER, _with_stand_in)


@contextmanager
def shown_as_parameters(*models: object) -> Iterator[None]:
    """Register the frozen weights of ``models`` as parameters of their modules, in this context.

    Args:
        models: The models; objects that are not modules are skipped, so that any arguments of a call can be passed.
    """
    registered: list[tuple[FrozenModule, str]] = []
    for model in models:
        for _, module, name, weight in frozen_sites(model) if isinstance(model, nn.Module) else ():
            # PEFT's methods call each other. Only the outermost context puts weights in, and takes them out.
            if name not in module._parameters:
                module._parameters[name] = frozen_tensor(weight)  # type: ignore[assignment]  # passes for one
                registered.append((module, name))
    try:
        yield
    finally:
        for module, name in registered:
            module._parameters.pop(name, None)


def refuse_lost_ties(model: nn.Module) -> None:
    """Raise if a sharded model has tied adapters, whose tie FSDP does not keep.

    Raises:
        ValueError: It names the adapter.
    """
    modules = list(model.modules())
    if not any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in modules):
        return
    for configs in [vars(module).get("peft_config") for module in modules]:
        for name, config in configs.items() if isinstance(configs, dict) else ():
            if getattr(config, "target_modules_to_tie", None):
                raise ValueError(
                    f"the adapter {name!r} has ensure_weight_tying=True and targets a tied embedding: PEFT makes the "
                    "adapters of tied layers views of one memory, but FSDP shards each on its own, so they would "
                    "differ after the first step. Train the embedding by modules_to_save or trainable_token_indices, "
                    "which stay tied, or target it without ensure_weight_tying"
                )


def _wrap(module: str, cls: str, method: str, how: Callable[..., Callable[..., object]]) -> None:
    owner = getattr(importlib.import_module(module), cls, None)
    original = getattr(owner, method, None)
    if original is None:
        logger.warning("this version of peft has no %s.%s; add adapters before you quantize the base", cls, method)
    # Only once: this runs for every base.
    elif not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(how(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, method, wrapped)


def _with_parameters_shown(original: Callable[..., object]) -> Callable[..., object]:
    def method(self: nn.Module, *args: object, **kwargs: object) -> object:
        # In __init__, self is not a module yet that could be walked.
        own = [self] if "_modules" in vars(self) else []
        with shown_as_parameters(*own, *args, *kwargs.values()):
            return original(self, *args, **kwargs)

    return method


def _with_stand_in(original: Callable[..., AbstractContextManager[object]]) -> Callable[..., object]:
    @contextmanager
    def method(self: Any, active_adapters: list[str]) -> Iterator[None]:
        base, name = self.get_base_layer(), self.parameter_name
        if not isinstance(base, FrozenModule) or name not in frozen_weights_of(base):
            with original(self, active_adapters):
                yield
            return
        stand_in = nn.Module()
        stand_in.register_buffer(name, frozen_tensor(frozen_weights_of(base)[name]))
        # On this instance alone: the original asks for the base layer to parametrize it, and again to undo that.
        self.get_base_layer = lambda: stand_in
        try:
            with original(self, active_adapters), replaced(base, name, lambda: getattr(stand_in, name)):
                yield
        finally:
            del self.get_base_layer

    return method


_METHOD = "save_pretrained"
_IS_SHARDED = "_fsdp_zpp_is_sharded"


def guard_save_pretrained(model: nn.Module) -> None:
    """Make ``save_pretrained`` of ``model`` and its submodules raise if it would leave quantized weights out."""
    for module in model.modules():
        # PeftModel's own save_pretrained writes only adapters, which are complete.
        if hasattr(type(module), _METHOD) and not hasattr(type(module), "get_base_model"):
            # On the instance, since other models of the class are not quantized.
            vars(module)[_METHOD] = functools.partial(_save_pretrained, module)


def guard_sharded(model: nn.Module, is_sharded: Callable[[nn.Module], bool]) -> None:
    """Make ``save_pretrained`` of ``model`` and its submodules raise if it would write one rank's part.

    Args:
        model: The model.
        is_sharded: Returns whether ranks hold parts of a module's weights; the same on all ranks.
    """
    for module in model.modules():
        if hasattr(type(module), _METHOD):
            vars(module)[_IS_SHARDED] = is_sharded
            vars(module)[_METHOD] = functools.partial(_save_pretrained, module)


def _save_pretrained(module: nn.Module, *args: object, **kwargs: object) -> object:
    method = getattr(type(module), _METHOD)
    bound = inspect.signature(method).bind_partial(module, *args, **kwargs).arguments
    arguments = {**bound, **bound.get("kwargs", {})}
    is_sharded = vars(module).get(_IS_SHARDED)
    gathers = getattr(module, "is_distributed_loading_by_transformers", False)  # which transformers does by itself then
    if arguments.get("state_dict") is None and is_sharded is not None and not gathers and is_sharded(module):
        # Even with is_main_process=False, which writes nothing, since rank 0 raises.
        raise RuntimeError(
            f"this {model_name(module)} is sharded, and save_pretrained would write what one rank holds of it; call "
            "fsdp_zpp.save_adapter(model, path) to save an adapter, or pass state_dict= a full state dict, which all "
            "ranks gather: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True)) of torch.distributed.checkpoint.state_dict"
        )
    if hasattr(type(module), "get_base_model"):  # a PeftModel, which writes only adapters
        return method(module, *args, **kwargs)
    # Ranks that write nothing have nothing to leave out.
    left_out = _left_out(module, arguments.get("state_dict") or {}) if arguments.get("is_main_process", True) else 0
    if left_out:
        raise RuntimeError(
            f"{left_out} weights of this {model_name(module)} are frozen and quantized, and save_pretrained would "
            "leave them out; call fsdp_zpp.save_frozen_params(model, path) to save the quantized base, or "
            "fsdp_zpp.save_adapter(model, path) to save an adapter. For a checkpoint in full precision, pass "
            "state_dict=accelerator.get_state_dict(model), or call fsdp_zpp.dequantize_frozen_params(model) first, on "
            "every rank and before sharding"
        )
    return method(module, *args, **kwargs)


def _left_out(module: nn.Module, state: Mapping[str, object]) -> int:
    """Return how many of the quantized weights of ``module`` a state dict lacks."""
    present = {weight for path, _, name, weight in frozen_sites(module) if parameter_name(path, name) in state}
    return len({weight for _, _, weight in frozen_modules(module)} - present)
