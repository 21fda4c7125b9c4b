"""Node size as launched: what torchrun says counts, then what srun says where its tasks are the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch.distributed as dist
from harness.adapter import Adapter
from harness.covering import over_adapters
from harness.models import batch, loss_of, make_net
from harness.pool import Pool

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.collectives.launcher import launched_on_each_node


def under_srun(nodes_of_ranks: list[int], tasks: str) -> dict[str, str]:
    """In a worker: the variables of one of srun's tasks; ``nodes_of_ranks`` are the nodes on which it put them."""
    rank = dist.get_rank()
    node = nodes_of_ranks[rank]
    place = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(nodes_of_ranks[:rank].count(node))}
    return place | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_PROCID": str(rank)}


def what_is_launched(nodes_of_ranks: list[int], tasks: str, others: dict[str, str]) -> int | str:
    """In a worker: the size of nodes, or the error."""
    with patch.dict(os.environ, under_srun(nodes_of_ranks, tasks)):
        del os.environ["LOCAL_WORLD_SIZE"]
        os.environ |= others
        try:
            return launched_on_each_node()
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    ("nodes", "tasks", "others", "size"),
    [
        ([0, 0, 1, 1], "2(x2)", {}, 2),
        ([0, 0, 1, 1], "2,2", {}, 2),
        ([0, 0, 0, 0], "4", {}, 4),
        ([0, 1, 2, 3], "1(x4)", {}, 1),
        ([0, 0, 1, 1], "2(x2)", {"LOCAL_WORLD_SIZE": "4"}, 4),  # torchrun under srun
        ([0, 0, 1, 1], "2(x2)", {"SLURM_NTASKS_PER_NODE": "4"}, 2),  # which is the job's
    ],
)
def test_equal_nodes_of_consecutive_ranks(
    pool: Callable[[int], Pool], nodes: list[int], tasks: str, others: dict[str, str], size: int
) -> None:
    assert pool(4).run(what_is_launched, nodes, tasks, others) == [size] * 4


@pytest.mark.parametrize(
    ("nodes", "tasks", "message"),
    [
        ([0, 0, 0, 1], "3,1", "the nodes are of different sizes: 4 ranks on 2 nodes"),
        ([0, 0, 1, 1], "1(x2)", "gpus_per_node was not given"),  # a daemon on each node, which has started the ranks
        ([0, 0, 1, 1], "", "gpus_per_node was not given"),
        ([0, 0, 1, 1], "two", "gpus_per_node was not given"),
    ],
)
def test_anything_else_is_an_error_on_all_ranks(
    pool: Callable[[int], Pool], nodes: list[int], tasks: str, message: str
) -> None:
    for raised in pool(4).run(what_is_launched, nodes, tasks, {}):
        assert isinstance(raised, str)
        assert message in raised
        assert "pass gpus_per_node" in raised


def test_ranks_out_of_order_are_named(pool: Callable[[int], Pool]) -> None:
    raised = pool(4).run(what_is_launched, [0, 1, 0, 1], "2(x2)", {})
    assert raised[0] == raised[3] == 2  # these have the place that they would have in order
    assert all("srun has not put consecutive ranks on a node" in str(raised[rank]) for rank in (1, 2))


def sent(adapter: Adapter, strategy: Strategy) -> object:
    """In a worker: the bytes of a step on two nodes of two of srun's."""
    with patch.dict(os.environ, under_srun([0, 0, 1, 1], "2(x2)")):
        del os.environ["LOCAL_WORLD_SIZE"]
        model = adapter.wrap(make_net(), strategy)
        loss_of(model, batch(0, 0)).backward()
        return traffic(model)


@over_adapters
@pytest.mark.parametrize("levels", ["IGG", "GGG"])
def test_a_strategy_has_sruns_nodes(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    by_srun = pool(4).run(sent, adapter, Strategy(levels))
    assert by_srun == pool(4).run(sent, adapter, Strategy(levels, gpus_per_node=2))
    assert all(each["gather"]["inter"] for each in by_srun)
