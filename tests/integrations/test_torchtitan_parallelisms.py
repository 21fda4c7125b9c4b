"""torchtitan's models and other parallelisms with a strategy, beside its own FSDP and HSDP, on four processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan_flags import EP, FULL_DTENSOR, HSDP, INTERLEAVED, PP, TP, TWO_STEPS, flag
from torchtitan_or_skip import torchtitan_or_skip

from fsdp_zpp.torch_internals import major_minor

torchtitan_or_skip()


@pytest.mark.parametrize(
    ("config", "levels", "gpus_per_node", "options", "stock_options"),
    [
        # A CPU's random numbers depend on the shards, so what shards inside nodes begins with the weights of HSDP.
        ("strategy", "III", 2, [], HSDP),
        ("strategy", "III", 2, HSDP, HSDP),
        ("strategy", "IGG", 2, HSDP, []),
        ("qwen3", "IIG", 2, [], []),
        ("deepseek_v3", "NGG", 2, [], []),
        ("strategy", "IGG", 1, TP, TP),
        ("strategy", "III", 1, TP, [*TP, *HSDP]),
        ("qwen3", "NNG", 1, [*TP, *FULL_DTENSOR], [*TP, *FULL_DTENSOR]),
        ("qwen3", "III", 2, [*HSDP, *FULL_DTENSOR], [*HSDP, *FULL_DTENSOR]),
        ("qwen3", "NNN", 1, [*TP, *FULL_DTENSOR], [*TP, *HSDP, *FULL_DTENSOR]),
        ("deepseek_v3", "IGG", 2, EP, EP),
        ("deepseek_v3", "III", 2, EP, [*EP, *HSDP]),
        ("deepseek_v3", "IIG", 1, [*EP, *TP], [*EP, *TP]),
        ("two_layers", "IGG", 1, PP, PP),
        ("two_layers", "NNG", 1, INTERLEAVED, INTERLEAVED),
    ],
)
def test_trains_as_torchtitan_does(
    torchtitan: Callable[..., list[Any]],
    stock: Callable[..., Any],
    tmp_path: Path,
    config: str,
    levels: str,
    gpus_per_node: int,
    options: list[str],
    stock_options: list[str],
) -> None:
    strategy = flag(levels=levels, gpus_per_node=gpus_per_node)
    run = torchtitan("train", config, tmp_path, *TWO_STEPS, *options, *strategy)[-1]
    own = stock(config, *TWO_STEPS, *stock_options)
    assert run.losses == pytest.approx(own.losses, rel=1e-6)  # sums in another order
    assert run.metrics["grad_norm"] == pytest.approx(own.metrics["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("config", "options"), [("deepseek_v3", EP), ("strategy", TP), ("two_layers", INTERLEAVED)])
def test_zeropp_trains_as_torchtitan_does_but_for_rounding(
    torchtitan: Callable[..., list[Any]], stock: Callable[..., Any], tmp_path: Path, config: str, options: list[str]
) -> None:
    own = stock(config, *TWO_STEPS, *options)
    run = torchtitan("train", config, tmp_path, *TWO_STEPS, *options, *flag("zeropp", gpus_per_node=1))[-1]
    assert run.losses == pytest.approx(own.losses, rel=0.02)
    assert run.losses != own.losses


def test_traffic_is_that_of_all_stages_of_a_rank(torchtitan: Callable[..., list[Any]], tmp_path: Path) -> None:
    options = ["--training.steps", "1", *flag(levels="IIG", gpus_per_node=1)]
    one, two = (torchtitan("train", "two_layers", tmp_path, *options, *stages) for stages in (PP, INTERLEAVED))
    # Of either, a rank has one layer of two, and the embedding or the head, which is as large.
    assert [run.traffic for run in one] == [run.traffic for run in two]
    assert all(run.traffic[0]["reduce"]["inter"] > 0 for run in one)


@pytest.mark.skipif(major_minor(torch.__version__) < (2, 14), reason="torchtitan's default backend needs torch 2.14")
@pytest.mark.parametrize("options", [[], TP, PP])
def test_the_default_backend_trains_as_torchtitan_does(
    torchtitan: Callable[..., list[Any]], stock: Callable[..., Any], tmp_path: Path, options: list[str]
) -> None:
    options = [*TWO_STEPS, "--parallelism.spmd_backend", "spmd_types", *options]
    run = torchtitan("train", "two_layers", tmp_path, *options, *flag(levels="IGG", gpus_per_node=1))[-1]
    assert run.losses == pytest.approx(stock("two_layers", *options).losses, rel=1e-6)


def test_context_parallel_ranks_are_data_parallel_ones(torchtitan: Callable[..., list[Any]], tmp_path: Path) -> None:
    options = [*TWO_STEPS, "--parallelism.context_parallel_degree", "2"]
    own = torchtitan("train_in_chunks", "own_strategy", tmp_path, *options)[0]
    run = torchtitan("train_in_chunks", "strategy", tmp_path, *options, *flag(levels="IGG"))[0]
    assert run.losses == pytest.approx(own.losses, rel=1e-6)
    assert all(run.traffic[-1]["reduce"].values())  # of four ranks on two nodes
