"""Experts of a mixture: which parameters are theirs, and how much of them a token computes with."""

from __future__ import annotations

from torch import nn

from .model_config import Routing

_MODULES = {"experts", "routed_experts"}


def expert_parameters(model: nn.Module, routing: Routing | None) -> set[nn.Parameter]:
    """Return the parameters of experts that tokens are routed to, which expert parallelism splits.

    They are the parameters below a module named ``experts`` or ``routed_experts``, and if the number of experts is
    known, any other 3-D parameters with one slice per expert. Shared experts, which every token uses, are not among
    them.
    """

    def is_experts(name: str, parameter: nn.Parameter) -> bool:
        fused = routing is not None and parameter.dim() == 3 and parameter.shape[0] == routing.experts
        return fused or not _MODULES.isdisjoint(name.split("."))

    return {parameter for name, parameter in model.named_parameters() if is_experts(name, parameter)}


def idle_elements(model: nn.Module, routing: Routing | None) -> tuple[int, int]:
    """Return the average numbers of trainable and of frozen elements in experts that a token is not routed to.

    Both are 0 if it is not known how many experts there are and how many of them a token is routed to.
    """
    if routing is None:
        return 0, 0
    routed = {True: 0, False: 0}
    for parameter in expert_parameters(model, routing):
        routed[parameter.requires_grad] += parameter.numel()
    idle = routing.experts - routing.chosen
    return routed[True] * idle // routing.experts, routed[False] * idle // routing.experts
