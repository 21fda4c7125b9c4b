"""Models whose optimizers step in the backward, one for each parameter."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim import SGD, Optimizer

from . import models
from .adapter import Adapter, Case
from .fsdp1 import Fsdp1


def make(adapter: Adapter, strategy: Any, optimizer: type[Optimizer], lr: float) -> Any:
    """Return a model whose parameters have an optimizer each that steps in the backward."""
    if isinstance(adapter, Fsdp1):
        net = models.make_net()
        _apply_optimizer_in_backward(optimizer, net.parameters(), {"lr": lr})
        return adapter.shard(net, Case(), strategy)
    model = adapter.make(Case(), strategy)
    of_each: Any = {parameter: optimizer([parameter], lr=lr) for parameter in model.parameters()}  # type: ignore[call-arg]

    def step(parameter: nn.Parameter) -> None:
        of_each[parameter].step()
        of_each[parameter].zero_grad()

    for parameter in of_each:
        parameter.register_post_accumulate_grad_hook(step)
    return model


def stepped(adapter: Adapter, strategy: Any, micro_batches: int) -> dict[str, Tensor]:
    """In a worker: weights after three steps that are made in the backward, as soon as a gradient is reduced."""
    model = make(adapter, strategy, SGD, lr=0.1)
    for step in range(3):
        for micro_batch in range(micro_batches):
            with adapter.micro_batch(model, micro_batch == micro_batches - 1, False):
                models.loss_of(model, models.batch(step, micro_batch)).backward()
    return adapter.full_weights(model)
