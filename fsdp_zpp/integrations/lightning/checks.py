"""Checks that Lightning's strategies make before they shard or load anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp.collectives.agreement import from_first_rank
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.files.whole_state_dicts import quantized_names
from fsdp_zpp.integrations._base_files import check_base_identity
from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime.checkpoint import CodecState
from fsdp_zpp.runtime.unit import StrategyUnit, named_units
from fsdp_zpp.runtime.validation import check_instance

if TYPE_CHECKING:
    from lightning.fabric.strategies.fsdp import _SHARDING_STRATEGY

Content = Mapping[str, Any]
"""Content of a checkpoint that is a file."""


def split_sharding_strategy(
    sharding_strategy: Strategy | ShardingStrategy | str, arguments: Mapping[str, object]
) -> _SHARDING_STRATEGY:
    """Return the sharding strategy to give to Lightning's constructor, which reads its name.

    Args:
        sharding_strategy: A :class:`Strategy`, or what Lightning takes.
        arguments: The other arguments of Lightning's FSDPStrategy.

    Raises:
        TypeError: If it is the class Strategy itself.
        ValueError: If an argument contradicts a :class:`Strategy`.
    """
    check_instance("sharding_strategy", sharding_strategy)
    if not isinstance(sharding_strategy, Strategy):
        return cast("_SHARDING_STRATEGY", sharding_strategy)  # Lightning checks the name
    mesh = arguments.get("device_mesh")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"device_mesh={mesh!r} splits the ranks as HYBRID_SHARD does; a Strategy takes gpus_per_node instead: "
            'Strategy("III", gpus_per_node=...) shards inside each node and replicates across nodes'
        )
    return "FULL_SHARD"


def announce_node_size(processes: int) -> None:
    """Tell strategies how many processes a node has, as torchrun does and Lightning's own launchers do not."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(processes))


def check_data_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise if ``model`` is sharded over other ranks than those to which Lightning gives data of their own.

    Args:
        model: What was sharded with :func:`fsdp_zpp.fully_shard`.
        mesh: Lightning's mesh, with the dimensions ``data_parallel`` and ``tensor_parallel``.

    Raises:
        ValueError: On every rank, naming a part of the model.
    """
    expected = dist.get_process_group_ranks(mesh["data_parallel"].get_group())
    for unit, name in named_units(model).items():
        if not isinstance(unit, StrategyUnit) or unit.ranks.group is None or unit.stock:
            continue  # torch does it all, and what it accepts is Lightning's to say
        ranks = dist.get_process_group_ranks(unit.ranks.group)
        if ranks != expected:
            sizes = dict(zip(("data_parallel_size", "tensor_parallel_size"), mesh.shape, strict=True))
            raise ValueError(
                f"{name or 'the model'} is sharded over the ranks {ranks}, but with {sizes} Lightning gives data of "
                f"their own to the ranks {expected}; without tensor parallelism, pass data_parallel_size="
                f"{dist.get_world_size()}, tensor_parallel_size=1 to ModelParallelStrategy; with it, pass "
                'mesh=device_mesh["data_parallel"] to fully_shard'
            )


def check_no_codec_state(state: Iterable[object]) -> None:
    """Raise if the state that Fabric is to save or load has codec state: Fabric would save rank 0's alone.

    Raises:
        TypeError: If so.
    """
    if any(isinstance(value, CodecState) for value in state):
        raise TypeError(
            "the state holds a CodecState, and Fabric would save only rank 0's; leave it out: the strategy saves and "
            "loads codec state together with the optimizer"
        )


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a checkpoint on a disk.

    Raises:
        ValueError: If it is on a remote file system: Lightning's strategies for FSDP write to disks alone.
    """
    if "://" in str(path):
        raise ValueError(f"{path} is remote, and sharded checkpoints are written to a disk: save there, and upload it")
    return Path(path)


def check_base(model: nn.Module, checkpoint: Path, keys: Collection[str], read: Callable[[Path], Content]) -> bool:
    """Raise if a checkpoint was made on another quantized base than the model has. Collective.

    Args:
        model: The model.
        checkpoint: Lightning's file or folder, the same on all ranks.
        keys: Where in it the model's weights may be; empty if it is a bare state dict.
        read: How Lightning reads a file.

    Returns:
        Whether the checkpoint was saved on the model's base; it may then hold the base's values, too.

    Raises:
        ValueError: On every rank; also if the checkpoint has values for quantized weights, but does not tell its base.
            Lightning would skip these values, or call them unexpected.
    """
    if check_base_identity(model, checkpoint):
        return True
    quantized = quantized_names(model)
    if not quantized:
        return False
    names = _names_in(checkpoint, keys, read) if dist.get_rank() == 0 else set()
    if overlap := from_first_rank(sorted(quantized & names)):
        raise ValueError(
            f"{checkpoint} has values for {len(overlap)} weights that are quantized in this {model_name(model)} "
            f"({overlap[0]}, ...), and nothing beside it says that they are the same: load them into the model before "
            "the strategy shards it, or remove them from the checkpoint if the model has them already"
        )
    return False


def _names_in(checkpoint: Path, keys: Collection[str], read: Callable[[Path], Content]) -> set[str]:
    """Return the names of weights in a checkpoint; none if it can't be read, which Lightning will report."""
    try:
        if checkpoint.is_dir():
            saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
            return {name.removeprefix(f"{key}.") for name in saved for key in keys}
        content = read(checkpoint)
        return set(content).union(*(content.get(key, ()) for key in keys))
    except Exception:
        return set()
