"""The tensors of one PEFT adapter, by the names in the files that PEFT writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_zpp.frozen.hugging_face.peft_saving import adapter_tensors, as_plain, path_of, peft_model_in
from fsdp_zpp.runtime.tensors_of_model import TensorOfModel


def active_adapter_tensors(model: nn.Module) -> list[TensorOfModel]:
    """Return the tensors of the active adapter, by the names that ``save_adapter`` writes them by.

    PEFT itself says which, given tensors without values.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If there is no PEFT model, not exactly one active adapter, or if its files have tensors that are
            computed.
    """
    peft_model: Any = peft_model_in(model)
    from peft import get_peft_model_state_dict

    active = list(peft_model.active_adapters)
    if len(active) != 1:
        raise ValueError(
            f"adapters_only=True hands out the active adapter, but {active} are active; choose one with "
            "model.set_adapter(name)"
        )
    prefix = path_of(peft_model, model)
    tensors = adapter_tensors(model, peft_model)
    by_name = {name.removeprefix(prefix): tensor for tensor in tensors for name in tensor.names}
    state = {name: torch.empty(tensor.full.shape, device="meta") for name, tensor in by_name.items()}
    tensor_of = {id(value): by_name[name] for name, value in state.items()}
    if not peft_model.peft_config[active[0]].is_prompt_learning:
        with as_plain(peft_model, {}):
            # Embeddings that are not trained are not handed out, and looking for changed ones may ask the network.
            files: dict[str, Tensor] = get_peft_model_state_dict(
                peft_model, state_dict=state, adapter_name=active[0], save_embedding_layers=False
            )
    else:
        files = {"": torch.empty(0)}
    if any(id(value) not in tensor_of for value in files.values()):
        raise ValueError(
            f"the files of the adapter {active[0]!r} have tensors that PEFT computes from its parameters; write them "
            "with save_adapter instead"
        )
    result: dict[TensorOfModel, list[str]] = {}
    for name, value in files.items():
        result.setdefault(tensor_of[id(value)], []).append(name)
    return [replace(tensor, names=names) for tensor, names in result.items()]
