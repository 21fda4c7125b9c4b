"""Models without values, on the meta device, from a configuration of transformers; with LoRA around a frozen base.

With ``lora`` the base is frozen and in bf16, beside trainable adapters on q, k, v and o.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from fsdp_zpp.extras import how_to_install
from fsdp_zpp.planner.model_size import layers, pretrained_size

from .task import Task

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def load_config(name: str) -> Any:
    """Return the configuration of a causal language model.

    Args:
        name: A config.json, a directory that has one, or a name on the hub.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
        ValueError: If there is no such configuration, the hub can't be reached, or it is of another kind of model.
    """
    pretrained_size(name)  # which raises for whatever can't be built
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name)


def network(task: Task, one_dtype: bool = False) -> nn.Module:
    """Build the model without values, on the meta device.

    Args:
        task: Task that is trained.
        one_dtype: Whether LoRA's adapters are in bf16 as the base is, not in fp32.

    Returns:
        The transformers model in fp32, or a PEFT model around one in bf16.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(task.config)
    config.get_text_config().use_cache = False  # a cache would keep the keys and values of every layer
    with torch.device("meta"):
        base: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = adapted(base.to(torch.bfloat16), task.lora) if task.lora else base
        if task.lora and one_dtype:
            model.to(torch.bfloat16)
    return model


def adapted(base: nn.Module, rank: int) -> nn.Module:
    """Freeze ``base`` and add adapters of ``rank`` on the projections of attention, or on all layers if it has none.

    Raises:
        ModuleNotFoundError: If PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"adapters need peft: {how_to_install('bench')}") from error
    names = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    targets: list[str] | str = [name for name in _PROJECTIONS if name in names] or "all-linear"
    model: nn.Module = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    return model


def base_of(model: nn.Module) -> Any:
    """Return the transformers model inside of ``model``, which may be PEFT's."""
    base: Any = getattr(model, "get_base_model", lambda: model)
    return base()


def layer_places(model: nn.Module) -> Iterator[tuple[nn.ModuleList, int]]:
    """Yield where each layer of ``model`` stands: its list, and its index there.

    Layers are those that the planner takes for units: the entries of the outermost lists.
    """
    own = {id(layer) for layer in layers(model)}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for places in lists:
        yield from ((places, index) for index, layer in enumerate(places) if id(layer) in own)


def prepare(task: Task, places: nn.ModuleList, index: int) -> None:
    """Wrap one layer before it is sharded: recompute its activations, and compile it, if the task says so."""
    layer = places[index]
    if task.checkpointing:
        apply_activation_checkpointing(places, check_fn=lambda module: module is layer)
    if task.compile:
        places[index].compile()
