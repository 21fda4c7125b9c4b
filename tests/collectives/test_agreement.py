"""Facts that ranks must agree on are compared, weights by checksums, and an error names who differs in what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.pool import device_type
from torch import Tensor

from fsdp_zpp.collectives.agreement import agree, check_agreement
from fsdp_zpp.collectives.fingerprint import checksums
from fsdp_zpp.collectives.rank_names import name_by_axes, named_ranks

OnRanks = Callable[..., list[Any]]


def test_an_error_names_ranks_in_ranges() -> None:
    assert named_ranks([5]) == "rank 5"
    assert named_ranks([*range(512), 600, 602, 603]) == "ranks 0-511, 600, 602-603"


def difference(facts: Callable[[int], Mapping[str, object]]) -> str:
    """On a rank: the error of facts that ranks have."""
    with pytest.raises(ValueError, match=r" on ranks? ") as caught:
        check_agreement(dist.group.WORLD, "a call", facts(dist.get_rank()))
    return str(caught.value)


def test_many_differences_are_abridged_and_another_order_is_one(on_ranks: OnRanks) -> None:
    text = on_ranks(1, 4, difference, lambda rank: {f"fact {i}": rank // 2 for i in range(9)})[0]
    assert "fact 3: 0 on ranks 0-1, 1 on ranks 2-3; and 5 more" in text
    assert "fact 4" not in text
    text = on_ranks(1, 4, difference, lambda rank: dict.fromkeys(["a", "b"] if rank else ["b", "a"], 1))[0]
    assert "order: b, a on rank 0, a, b on ranks 1-3" in text


class Unprintable:
    """An object that names itself by its address, as a codec of one's own may."""


def test_addresses_of_objects_are_no_difference(on_ranks: OnRanks) -> None:
    on_ranks(1, 4, lambda: check_agreement(dist.group.WORLD, "a call", {"codec": Unprintable()}))


def test_ranks_of_a_mesh_are_named_by_coordinates(on_ranks: OnRanks) -> None:
    def disagree_on_a_mesh() -> list[str]:
        group, rank, texts = dist.new_group([0, 1, 2, 3]), dist.get_rank(), []
        name_by_axes(group, ("dp", "tp"), torch.arange(4).view(2, 2))
        for attempt in (
            lambda: check_agreement(group, "a call", {"fact": rank == 3}),
            lambda: agree(group, lambda: [0][rank // 3]),
            lambda: agree(group, lambda: rank % 2, str, "read other files than"),
        ):
            with pytest.raises((ValueError, RuntimeError, IndexError)) as caught:
                attempt()
            texts.append(str(caught.value))
        return texts

    fact, failure, other = on_ranks(1, 4, disagree_on_a_mesh)[0]
    assert "fact: False on ranks 0-2, True on rank 3 (dp 1, tp 1)" in fact
    assert failure == "on rank 3 (dp 1, tp 1): list index out of range"
    assert other == "ranks 1, 3 (dp 0-1, tp 1) read other files than rank 0 (dp 0, tp 0)"


# ---- checksums of weights

VALUES = torch.randn(200_003, generator=torch.Generator().manual_seed(0))


def of(tensor: Tensor) -> tuple[str, int]:
    return checksums({"weight": tensor})["weight"]


def changed(place: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    values = VALUES.to(dtype, copy=True)
    values[place] = value
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_value_and_the_order_make_a_difference(dtype: torch.dtype) -> None:
    for place in (0, 70_000, 200_002):
        last_bit = torch.nextafter(VALUES[place].to(dtype), torch.tensor(9.0, dtype=dtype)).item()
        assert of(changed(place, last_bit, dtype)) != of(VALUES.to(dtype))
    assert of(VALUES.flip(0)) != of(VALUES)
    assert of(VALUES.roll(1 << 16)) != of(VALUES)


def test_neither_shape_nor_strides_nor_the_sign_of_zero_does() -> None:
    even = VALUES[:200_000]
    assert of(even.view(400, 500)) == of(even.view(400, 500).t().contiguous().t()) == of(even)
    assert of(changed(3, -0.0)) == of(changed(3, 0.0))
    assert checksums({"nothing": torch.empty(0)}) == {"nothing": ("torch.float32", 0)}
    assert checksums({}) == {}


def test_a_device_computes_what_the_cpu_does() -> None:
    assert of(VALUES.to(device_type())) == of(VALUES)
