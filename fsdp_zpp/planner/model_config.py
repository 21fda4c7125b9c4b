"""What Hugging Face's config says of a model: its experts, and the shape of its layers."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

# The names that Hugging Face's configurations have for the number of experts, and for those that a token is routed to.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")


class Routing(NamedTuple):
    """Number of experts in a layer, and of those that a token is routed to."""

    experts: int
    chosen: int


class LayerShape(NamedTuple):
    """Shape of what a layer computes.

    Attributes:
        hidden: Size of a token's activations between layers.
        keys: Size of a token's keys, and of its values; None if it is not known.
    """

    hidden: int
    keys: int | None


def routing_of(model: nn.Module) -> Routing | None:
    """Return what Hugging Face's ``model.config`` says of the experts; None if it does not tell."""
    for said in _configs_of(model):
        experts, chosen = _first(said, _EXPERTS), _first(said, _CHOSEN)
        if experts is not None and chosen is not None and chosen <= experts:
            return Routing(experts, chosen)
    return None


def shape_of(model: nn.Module) -> LayerShape | None:
    """Return what Hugging Face's ``model.config`` says of the layers; None if it does not tell."""
    for said in _configs_of(model):
        if (hidden := _first(said, ("hidden_size", "n_embd", "d_model"))) is not None:
            return LayerShape(hidden, _keys_of(said, hidden))
    return None


def _keys_of(config: object, hidden: int) -> int | None:
    heads = _first(config, ("num_attention_heads", "n_head"))
    if heads is None or hasattr(config, "kv_lora_rank"):  # keys and values of latent attention differ in size
        return None
    groups = _first(config, ("num_key_value_heads",)) or heads
    return groups * (_first(config, ("head_dim",)) or hidden // heads)


def _configs_of(model: nn.Module) -> tuple[object, object]:
    # Models of text and images keep these numbers in the config of their text part.
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return config, text() if callable(text) else None


def _first(config: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
