"""What one rank alone is given wrong is an error on every rank, whichever rank it is; none hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import frozen_files as files, llama, models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_adapters
from harness.pool import Pool, device_type
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

import fsdp_zpp
from fsdp_zpp import (
    Int8,
    QuantizedReduceState,
    Strategy,
    choose_strategy,
    dequantize_frozen_params,
    exchange_weights,
    gathered_weights,
    load_frozen_params,
    quantize_frozen_params,
    save_adapter,
    save_frozen_params,
)

NOT_COLLECTIVE = {
    *("NF4", "Codec", "Int4", "Int4Delta", "Int8", "LoCo", "LocalSteps", "Monitor", "Strategy", "TopK"),
    *("Elastic", "count_tokens", "end_training", "members"),
    *("CodecState", "agreed_weights", "clip_grad_norm_", "invalidate", "monitor", "plan", "quantized_reduce_hook"),
    *("traffic", "DeltaReceiver", "OutOfSyncError", "SyncToken", "WeightUpdate"),
}
"""The public names that ranks may use one by one, or that communicate in training alone."""


def quantized() -> nn.Module:
    net = files.make_base()
    quantize_frozen_params(net, files.CODEC, gpus_per_node=2)
    return net


def with_nan() -> nn.Module:
    net = files.make_base()
    net.blocks[1].up.weight[3, 5] = torch.nan
    return net


def local() -> nn.Module:
    net: nn.Module = ADAPTERS[1].wrap(models.make_net(), Strategy.diloco(gpus_per_node=1))
    models.loss_of(net, models.batch(0, 0))
    return net


def adapted() -> nn.Module:
    return llama.adapt(llama.make_base(), {"default": "lora"})


def case(call: Callable[..., Any], good: dict[str, Any], **bad: tuple[Any, str]) -> dict[str, Any]:
    """A call that is right with ``good``, and values that are not, each with a part of what is said.

    ``model`` is a function that makes it. Several values of an argument are numbered.
    """
    return {"call": call, "good": good, "bad": bad}


FUNCTIONS: dict[str, dict[str, Any]] = {
    "quantize_frozen_params": case(
        quantize_frozen_params,
        {"model": files.make_base, "gpus_per_node": 2},
        model=(lambda: 3, "model must be an nn.Module"),
        model_1=(with_nan, "blocks.1.up.weight has values that are NaN or infinite"),
        codec=("int8", "codec must be a codec such as"),
        min_numel=(0, "min_numel must be a positive int"),
        dtype=(torch.int8, "dtype must be one of"),
        device=("nowhere", "nowhere"),
        placement=("X", "X on rank"),
        gpus_per_node=(3, "gpus_per_node: "),
        checkpoint=(3, "from a checkpoint: "),
        ignored_params=(3, "not iterable"),
    ),
    "dequantize_frozen_params": case(
        dequantize_frozen_params,
        {"model": quantized},
        model=(lambda: quantized() and 3, "model must be an nn.Module"),
        model_1=(lambda: quantized() and files.make_base(), "other quantized weights than rank"),
    ),
    "save_frozen_params": case(
        save_frozen_params,
        {"model": quantized, "path": "saved"},
        model=(lambda: quantized() and 3, "model must be an nn.Module"),
        model_1=(lambda: quantized() and files.make_base(), "nothing of this Net is quantized"),
        path=(None, "path must be a folder"),
        max_file_size=("5 apples", "max_file_size must be a positive number of bytes, or a text such as"),
        max_file_size_1=(0, "max_file_size must be"),
        max_file_size_2=(5e9, "max_file_size must be"),
    ),
    "load_frozen_params": case(
        load_frozen_params,
        {"model": files.make_base, "path": "base", "gpus_per_node": 2},
        model=(lambda: 3, "model must be an nn.Module"),
        path=(None, "path must be a folder"),
        path_1=("missing", "which save_frozen_params writes"),
        device=("nowhere", "nowhere"),
        placement=("X", "X on rank"),
    ),
    "save_adapter": case(
        save_adapter,
        {"model": adapted, "path": "adapter"},
        model=(lambda: 3, "model must be an nn.Module"),
        model_1=(files.make_base, "there is no PeftModel in this Net"),
        path=(None, "path must be a folder"),
        adapters=("default", "adapters must be a list of names such as ['default'], got 'default'"),
        adapters_1=(["missing"], "there is no adapter ['missing'] in this model"),
        adapters_2=(3, "adapters must be a list of names"),
    ),
    "gathered_weights": case(
        lambda **arguments: dict(gathered_weights(**arguments)),
        {"model": adapted},
        model=(lambda: 3, "model must be an nn.Module"),
        model_1=(files.make_base, "called gathered_weights with other arguments or another model than rank"),
        dtype=(torch.int8, "dtype must be one of"),
        adapters_only=("default", "adapters_only must be a bool"),
        adapters_only_1=(True, "called gathered_weights with other arguments"),
        merged=(1, "merged must be a bool"),
        since=("yesterday", "since must be a SyncToken"),
        rank=(2, "rank must be a rank of the model: one of [0, 1], got 2"),
        rank_1=("first", "rank must be a rank of the model, or None for all"),
    ),
    "exchange_weights": case(
        exchange_weights,
        {"model": local},
        model=(lambda: local() and 3, "model must be an nn.Module"),
        model_1=(lambda: local() and models.make_net(), "no part of this Net"),
    ),
    "QuantizedReduceState": case(
        QuantizedReduceState,
        {"codec": Int8(64), "gpus_per_node": 1},
        codec=(3, "codec must be"),
        intra_codec=(3, "intra_codec must be"),
        error_feedback=(3, "error_feedback must be"),
        gpus_per_node=(0, "gpus_per_node must be"),
    ),
    "choose_strategy": case(
        choose_strategy,
        {"model": models.make_net, "inter_gbps": 1.0, "gpus_per_node": 1},
        model=(lambda: 3, "model must be an nn.Module"),
        nodes=(0, "nodes must be"),
        inter_gbps=(-1, "inter_gbps must be"),
        tokens=("many", "computation time needs both tokens"),
    ),
}


def raised(function: str, argument: str, folder: str) -> list[str]:
    """In a worker: what a call raises where it is rank 0 that has a bad argument, and where it is the last rank."""
    of, said = FUNCTIONS[function], []
    for rank in (0, dist.get_world_size() - 1):
        arguments = dict(of["good"])
        if dist.get_rank() == rank:
            arguments[argument.rstrip("_12")] = of["bad"][argument][0]
        if "model" in arguments:
            arguments["model"] = arguments["model"]()
        if isinstance(arguments.get("path"), str):
            arguments["path"] = str(Path(folder, arguments["path"]))
        said.append(error_of(lambda arguments=arguments: of["call"](**arguments)))
    return said


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("function", "argument"), [(function, argument) for function, of in FUNCTIONS.items() for argument in of["bad"]]
)
def test_a_bad_argument_on_one_rank_raises_on_all(
    pool: Callable[[int], Pool], function: str, argument: str, tmp_path: Path
) -> None:
    save_frozen_params(alone(), tmp_path / "base")
    for said in pool(2).run(raised, function, argument, str(tmp_path)):
        for text in said:
            assert FUNCTIONS[function]["bad"][argument][1] in text
    assert not (tmp_path / "saved").exists()
    assert not (tmp_path / "adapter").exists()


def alone() -> nn.Module:
    net = files.make_base()
    quantize_frozen_params(net, files.CODEC)
    return net


def offloads(adapter: Adapter) -> dict[str, Any]:
    return {"offload_policy": CPUOffloadPolicy()} if adapter is ADAPTERS[1] else {"cpu_offload": CPUOffload(True)}


TWO = Strategy(gpus_per_node=1)
SHARDED: dict[str, tuple[Callable[[Adapter, bool], Any], str]] = {
    "a name": (lambda adapter, bad: adapter.wrap(models.make_net(), "zeropp" if bad else TWO), "zeropp"),
    "the class": (lambda adapter, bad: adapter.wrap(models.make_net(), Strategy if bad else TWO), "class"),
    "no module": (
        lambda adapter, bad: adapter.wrap(3 if bad else models.make_net(), TWO),
        "do not make the same calls",
    ),
    "doubles": (
        lambda adapter, bad: adapter.wrap(models.make_net().double() if bad else models.make_net(), TWO),
        "torch.float64 ",
    ),
    "NaN": (
        lambda adapter, bad: adapter.wrap(with_nan() if bad else files.make_base(), Strategy.mixzpp(gpus_per_node=1)),
        "blocks.1.up.weight has values that are NaN or infinite",
    ),
    "offload": (
        lambda adapter, bad: adapter.wrap(models.make_net(), TWO, **offloads(adapter) if bad else {}),
        "needs an accelerator",
    ),
}


def raised_in_wrapping(adapter: Adapter, name: str) -> list[str]:
    """In a worker: likewise, where modules are wrapped."""
    ranks = (0, dist.get_world_size() - 1)
    adapter = next(each for each in ADAPTERS if each == adapter)
    return [error_of(lambda rank=rank: SHARDED[name][0](adapter, dist.get_rank() == rank)) for rank in ranks]


@pytest.mark.parametrize("name", SHARDED)
@over_adapters
def test_a_bad_argument_on_one_rank_raises_on_all_in_wrapping(
    pool: Callable[[int], Pool], adapter: Adapter, name: str
) -> None:
    if name == "offload" and device_type() != "cpu":
        pytest.skip("possible with an accelerator")
    for said in pool(2).run(raised_in_wrapping, adapter, name):
        for text in said:
            assert SHARDED[name][1] in text


def test_all_public_names_are_here() -> None:
    assert set(fsdp_zpp.__all__) == NOT_COLLECTIVE | set(FUNCTIONS) | {"fully_shard"}
