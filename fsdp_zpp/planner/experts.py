"""Mixtures of experts: how many elements of a model a token does not compute with.

Memory and traffic count all experts, since some token of a batch goes to each. Computation counts the experts that a
token is routed to, and the parameters that all tokens share.
"""

from __future__ import annotations

from torch import nn

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")


def idle_elements(model: nn.Module) -> tuple[int, int]:
    """Trainable and frozen elements of the experts that a token is not routed to, on average.

    Hugging Face's ``model.config`` says how many experts there are and how many a token is routed to. Experts are the
    parameters below a module called ``experts``, and any other 3-D parameters with one slice for each expert.
    """
    found = _routing(model)
    if found is None:
        return 0, 0
    experts, chosen = found
    routed = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        fused = parameter.dim() == 3 and parameter.shape[0] == experts
        if fused or "experts" in name.split("."):
            routed[parameter.requires_grad] += parameter.numel()
    return routed[True] * (experts - chosen) // experts, routed[False] * (experts - chosen) // experts


def _routing(model: nn.Module) -> tuple[int, int] | None:
    """How many experts there are, and how many a token is routed to; None if the model does not say."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    for said in (config, text() if callable(text) else None):
        experts, chosen = _first(said, _EXPERTS), _first(said, _CHOSEN)
        if experts is not None and chosen is not None and chosen <= experts:
            return experts, chosen
    return None


def _first(config: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
