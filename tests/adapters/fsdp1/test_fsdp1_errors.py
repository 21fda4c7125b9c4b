"""Bad input that only FullyShardedDataParallel takes is an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from harness import models
from harness.adapter import Case
from harness.fsdp1 import Fsdp1
from harness.messages import Refusal, Reply, assert_refused, attempt
from harness.pool import Pool
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

from fsdp_zpp import Strategy

TWO: Any = {"gpus_per_node": 2}


def _pair_of_groups() -> Any:
    groups = dist.new_group([0, 1]), dist.new_group([2, 3])
    return FSDP(models.make_net(), process_group=groups, sharding_strategy=Strategy(**TWO))


PAIR_OF_GROUPS: Refusal = (_pair_of_groups, ValueError, "pair of groups")


def pair_of_groups() -> Reply:
    """In a worker: how HYBRID_SHARD's groups are refused."""
    return attempt(PAIR_OF_GROUPS)


def test_a_pair_of_groups_is_refused(pool: Callable[[int], Pool]) -> None:
    assert_refused(pool(4).run(pair_of_groups), PAIR_OF_GROUPS)


def _name_of_a_strategy() -> Any:
    return FSDP(models.make_net(), sharding_strategy="IGG", device_id=models.device())  # type: ignore[arg-type]


NAME_OF_A_STRATEGY: Refusal = (_name_of_a_strategy, TypeError, "must be a Strategy such as Strategy.zeropp()")


def name_of_a_strategy() -> Reply:
    """In a worker: how a string is refused."""
    return attempt(NAME_OF_A_STRATEGY)


def test_a_string_is_refused(pool: Callable[[int], Pool]) -> None:
    assert_refused(pool(2).run(name_of_a_strategy), NAME_OF_A_STRATEGY)


def _local_state_dict() -> Any:
    model = Fsdp1(use_orig_params=False).make(Case(), Strategy("NII", **TWO))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict()


LOCAL_WITHIN_A_NODE: Refusal = (_local_state_dict, ValueError, "use SHARDED_STATE_DICT or FULL_STATE_DICT")


def local_within_a_node() -> Reply:
    """In a worker: how a state dict is refused that torch fails to make on some ranks."""
    return attempt(LOCAL_WITHIN_A_NODE)


def test_a_local_state_dict_is_refused_under_optimizer_scope_i(pool: Callable[[int], Pool]) -> None:
    assert_refused(pool(4).run(local_within_a_node), LOCAL_WITHIN_A_NODE)


def third_letters_mixed(others: str) -> str:
    """In a worker: what the first forward says of a block that is sharded inside of nodes, the rest otherwise."""
    net = models.make_net()
    net.blocks[0] = FSDP(net.blocks[0], sharding_strategy=Strategy("III", **TWO), device_id=models.device())
    model = FSDP(net, sharding_strategy=Strategy(others, **TWO), device_id=models.device())
    try:
        models.loss_of(model, models.batch(0, 0))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("others", ["GGG", "NNN"])
def test_all_units_must_shard_over_one_group(pool: Callable[[int], Pool], others: str) -> None:
    for said in pool(4).run(third_letters_mixed, others):
        assert "blocks.0 is sharded inside nodes" in said
