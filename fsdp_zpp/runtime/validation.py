"""Checks that both adapters make before they send anything."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.strategy import Strategy

from .packed_weights import holds_packed_values
from .rank_layout import node_size_fact

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_module(model: object) -> None:
    """Raise unless ``model`` is a module.

    Raises:
        TypeError: If it is not one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")


def check_folder(path: object) -> Path:
    """Return the folder that the argument ``path`` names.

    Raises:
        TypeError: If it is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a folder, as a str or a path, got {path!r}")
    return Path(path)


def check_instance(name: str, value: object) -> None:
    """Raise if the class Strategy, or a method that makes one, was passed where an instance was meant.

    Raises:
        TypeError: If ``value`` is one of these.
    """
    if isinstance(value, type) and issubclass(value, Strategy):
        raise TypeError(f"{name} is the class Strategy itself, not an instance; did you mean Strategy()?")
    made_by = getattr(value, "__self__", None)
    if isinstance(made_by, type) and issubclass(made_by, Strategy):
        call = f"Strategy.{getattr(value, '__name__', '')}"
        raise TypeError(f"{name} is the method {call} itself, not what it returns; did you mean {call}()?")


def strategy_facts(strategy: object, group: dist.ProcessGroup) -> dict[str, object]:
    """Return the facts about a strategy on which ranks must agree; see [Note: Agreement] in agreement.py."""
    # Of what is no strategy, too: a rank that just raised would leave the others in the comparison.
    if not isinstance(strategy, Strategy):
        return {"strategy": strategy}
    facts: dict[str, object] = {"strategy": "a Strategy"}
    facts |= {field.name: getattr(strategy, field.name) for field in dataclasses.fields(strategy)}
    return facts | {"gpus_per_node": node_size_fact(strategy.gpus_per_node, group)}


def check_dtypes(parameters: Iterable[tuple[str, Tensor]], remedy: str, *, takes_integers: bool = False) -> None:
    """Raise if a parameter has a dtype that can't be sharded.

    Args:
        parameters: Names and parameters.
        remedy: What to do about it, for the error.
        takes_integers: Whether FSDP gathers integers, so that packed values may be stored as such.

    Raises:
        TypeError: It names the parameter.
    """
    for name, parameter in parameters:
        if parameter.dtype in DTYPES:
            continue
        is_packed = holds_packed_values(parameter)
        # bitsandbytes' layers in 8 bits read more of their parameters than FSDP keeps.
        in_8_bits = hasattr(parameter, "CB")
        if is_packed and takes_integers and not in_8_bits:
            continue
        frozen = "pass frozen= to the strategy, which takes over bitsandbytes' layers of 4096 values or more; or "
        storage = "" if in_8_bits else "store packed values with bnb_4bit_quant_storage=torch.bfloat16; or "
        raise TypeError(
            f"parameter {name} is {parameter.dtype}; a Strategy shards {', '.join(map(str, DTYPES))}; "
            f"{(storage + frozen) * is_packed}{remedy}"
        )


def check_exchanges(local_steps: LocalSteps, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if exchanges would round parameters of which another parallelism has copies, each rank in its own way.

    Raises:
        NotImplementedError: It names a parameter that another parallelism has sharded, beside which copies lie.
    """
    codec = local_steps.codec
    if codec is None or codec.block_numel:
        return
    for name, parameter in parameters:
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"local_steps with codec={codec} can't be combined with another parallelism, but {name} is sharded "
                "already: the codec's block_numel is 0, so all values depend on each other, and copies of a parameter "
                "would be rounded as their neighbours on each rank demand; return the size of a block, or use "
                "LocalSteps(codec=None)"
            )
