"""FSDP instances around a model of Lightning's, including those that Lightning can't make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

if TYPE_CHECKING:
    from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
    from lightning.pytorch.strategies import FSDPStrategy as TrainerFSDPStrategy

_POLICY = "auto_wrap_policy"


@contextmanager
def wrapped_on_cpu(
    model: nn.Module, strategy: FabricFSDPStrategy | TrainerFSDPStrategy, arguments: dict[str, Any]
) -> Iterator[nn.Module]:
    """Return a context with FSDP around ``model`` on a CPU; elsewhere with ``model`` itself, for Lightning to wrap.

    Args:
        model: The model to shard; it is left alone if users have wrapped parts of it.
        strategy: Lightning's FSDPStrategy, of the Trainer or of Fabric.
        arguments: The arguments that Lightning passes on to FSDP. In the context the policy is not among them, since
            Lightning would warn that it skips modules that are wrapped already.

    Raises:
        ValueError: If checkpoints are to be full ones on a CPU.
    """
    if strategy.root_device.type != "cpu":
        yield model
        return
    if strategy._state_dict_type == "full":
        # Lightning has FSDP move what it gathers to the CPU. What is there already, torch does not copy, and then it
        # frees the weights, and gathers the next moments into the memory of the last.
        raise ValueError(
            'state_dict_type="full" of a model on a CPU makes torch save memory that it has freed or reused; '
            'pass state_dict_type="sharded"'
        )
    if outermost_fsdp(model):
        yield model
        return
    # Lightning passes FSDP the index of the device alone. A CPU has none, and without a device FSDP wants a GPU.
    wrapped = FullyShardedDataParallel(
        model,
        cpu_offload=strategy.cpu_offload,
        mixed_precision=strategy.mixed_precision_config,
        sharding_strategy=strategy.sharding_strategy,
        device_id=strategy.root_device,
        **arguments,
    )
    policy = {_POLICY: arguments.pop(_POLICY)} if _POLICY in arguments else {}
    try:
        yield wrapped
    finally:
        arguments.update(policy)


def outermost_fsdp(model: nn.Module) -> list[FullyShardedDataParallel]:
    """Return the FSDP instances of ``model`` that are in no other: itself, unless users wrap parts of it."""
    if isinstance(model, FullyShardedDataParallel):
        return [model]
    return [instance for child in model.children() for instance in outermost_fsdp(child)]
