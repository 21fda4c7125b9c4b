"""Facts that ranks must agree on are compared, and an error names who differs in what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness.pool import Pool

from fsdp_zpp.collectives.agreement import agree, check_agreement
from fsdp_zpp.collectives.rank_names import name_by_axes, named_ranks


def test_an_error_names_ranks_in_ranges() -> None:
    assert named_ranks([5]) == "rank 5"
    assert named_ranks([*range(512), 600, 602, 603]) == "ranks 0-511, 600, 602-603"


def disagree_in_many() -> str:
    with pytest.raises(ValueError, match=r" on ranks? ") as caught:
        check_agreement(dist.group.WORLD, "a call", {f"fact {i}": dist.get_rank() // 2 for i in range(9)})
    return str(caught.value)


def agree_but_for_the_order() -> str:
    names = ["a", "b"] if dist.get_rank() else ["b", "a"]
    with pytest.raises(ValueError, match=r" on ranks? ") as caught:
        check_agreement(dist.group.WORLD, "a call", dict.fromkeys(names, 1))
    return str(caught.value)


def test_many_differences_are_abridged_and_another_order_is_one(pool: Callable[[int], Pool]) -> None:
    text = pool(4).run(disagree_in_many)[0]
    assert "fact 3: 0 on ranks 0-1, 1 on ranks 2-3; and 5 more" in text
    assert "fact 4" not in text
    assert "order: b, a on rank 0, a, b on ranks 1-3" in pool(4).run(agree_but_for_the_order)[0]


class Unprintable:
    """An object that names itself by its address, as a codec of one's own may."""


def agree_on_objects() -> None:
    check_agreement(dist.group.WORLD, "a call", {"codec": Unprintable()})


def test_addresses_of_objects_are_no_difference(pool: Callable[[int], Pool]) -> None:
    pool(4).run(agree_on_objects)


def disagree_on_a_mesh() -> list[str]:
    group = dist.new_group([0, 1, 2, 3])
    name_by_axes(group, ("dp", "tp"), torch.arange(4).view(2, 2))
    attempts: list[Callable[[], object]] = [
        lambda: check_agreement(group, "a call", {"fact": dist.get_rank() == 3}),
        lambda: agree(group, lambda: [0][dist.get_rank() // 3]),
        lambda: agree(group, lambda: dist.get_rank() % 2, str, "read other files than"),
    ]
    texts = []
    for attempt in attempts:
        with pytest.raises((ValueError, RuntimeError, IndexError)) as caught:
            attempt()
        texts.append(str(caught.value))
    dist.destroy_process_group(group)
    return texts


def test_ranks_of_a_mesh_are_named_by_coordinates(pool: Callable[[int], Pool]) -> None:
    fact, failure, other = pool(4).run(disagree_on_a_mesh)[0]
    assert "fact: False on ranks 0-2, True on rank 3 (dp 1, tp 1)" in fact
    assert failure == "on rank 3 (dp 1, tp 1): list index out of range"
    assert other == "ranks 1, 3 (dp 0-1, tp 1) read other files than rank 0 (dp 0, tp 0)"
