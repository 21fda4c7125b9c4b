"""What elastic nodes are built on: decisions in a store, weighted means, chunks that change owners, rollbacks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import TIMEOUT, Pool
from torch import Tensor
from torch.distributed import distributed_c10d

from fsdp_zpp import Elastic, Int4, LoCo
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.collectives._torch_group_of_store import group_of_store
from fsdp_zpp.collectives.decisions import Decisions
from fsdp_zpp.collectives.elastic_outer_step import ElasticOuterStep
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.weights_of_nodes import relative_weights
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.topology import Topology

SHAPES = {"matrix": (33, 7), "bias": (5,), "small": (1, 2)}
LONG, AT_ONCE = timedelta(seconds=60), timedelta(milliseconds=1)


@pytest.fixture
def port() -> int:
    """Return the port of a store, which lives as long as the process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    STORES.append(store)
    return int(store.port)


STORES: list[dist.TCPStore] = []
NUMBERS = itertools.count()
"""Numbers of groups, which all ranks count alike."""


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def member(port: int, members: int = 1, timeout: timedelta = LONG, round_number: int = 0) -> Decisions:
    """Return the decisions of a member, over a connection of its own."""
    return Decisions(client(port), "run", round_number, members, timeout)


def decisions(port: int, members: Sequence[tuple[bool, timedelta]], one_by_one: bool = False) -> list[bool]:
    """What members get, each with whether it has failed and how long it waits."""

    def of(each: tuple[bool, timedelta]) -> bool:
        return member(port, len(members), each[1]).decide(failed=each[0])

    if one_by_one:
        return [of(each) for each in members]
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(of, members))


def test_members_commit_if_all_have_received(port: int) -> None:
    assert decisions(port, [(False, LONG)] * 4) == [True] * 4


def test_nobody_commits_if_one_has_failed(port: int) -> None:
    assert decisions(port, [(False, LONG), (True, LONG), (False, LONG)]) == [False] * 3


def test_a_member_that_comes_too_late_obeys_those_that_have_given_up(port: int) -> None:
    # The last one has received all of it, and would have made the others commit.
    assert decisions(port, [(False, AT_ONCE), (False, AT_ONCE), (False, LONG)], one_by_one=True) == [False] * 3


def test_a_member_that_was_stopped_commits_when_it_asks_again(port: int) -> None:
    stopped = dist.PrefixStore("fsdp_zpp.run", client(port))
    assert stopped.add("0/0/done", 1) == 1  # and is stopped
    assert member(port, 2).decide(failed=False)
    assert stopped.compare_set("0/0/decision", "", "retry") == b"commit"


@pytest.mark.parametrize("counted", [True, False])
def test_a_round_that_begins_closes_those_before(port: int, counted: bool) -> None:
    first, second, third = (member(port, round_number=number) for number in (0, 2, 3))
    first.close_earlier_rounds()
    assert [first.decide(failed=False) for _ in range(3)] == [True] * 3
    if not counted:  # a member was stopped before it has counted these
        client(port).delete_key("fsdp_zpp.run/0/committed")
    second.close_earlier_rounds()
    assert second.decide(failed=False)
    assert not first.decide(failed=False)  # all of its members were taken for lost, and train on
    third.close_earlier_rounds()
    second.close_earlier_rounds()  # too late
    assert [third.decide(failed=False), second.decide(failed=False), third.decide(failed=False)] == [True, False, True]


def test_rounds_never_commit_side_by_side(port: int) -> None:
    order = client(port)  # counts what rounds have done, in the order in which they did it

    def commits(number: int) -> list[tuple[int, int]]:
        own, store, found = member(port, round_number=number), client(port), []
        own.close_earlier_rounds()
        for _ in range(100):
            before = store.add("order", 1)
            if not own.decide(failed=False):
                break
            found.append((before, store.add("order", 1)))
        return found

    with ThreadPoolExecutor(3) as threads:
        rounds = list(threads.map(commits, range(3)))
    assert order.add("order", 0) > 0
    assert len(rounds[-1]) == 100  # nobody closes the last round
    for earlier, later in itertools.combinations([each for each in rounds if each], 2):
        assert earlier[-1][0] < later[0][1]  # its last commit has begun before the later one's first was over


@pytest.mark.parametrize("trained", [*itertools.product([0, 1, 5, 2**40], repeat=3)])
def test_weights_of_nodes_make_a_weighted_mean(trained: tuple[int, ...]) -> None:
    weights = relative_weights(trained)
    assert sum(weights) == pytest.approx(len(trained))
    for weight, each in zip(weights, trained, strict=True):
        assert weight == pytest.approx(each * 3 / sum(trained) if any(trained) else 1)
    if len(set(trained)) == 1:
        assert weights == [1.0] * 3  # exactly: changes are then sent as they are


def among(ranks: Sequence[int]) -> ProcessMesh | None:
    """In a worker: some ranks as nodes of one; None on others. Collective over all."""
    # Not by new_group: on GPUs, ranks that are not in a group of gloo's would wait for its members to split NCCL's.
    name = f"nodes of tests {next(NUMBERS)}"
    if dist.get_rank() not in ranks:
        return None
    store = dist.PrefixStore(name, distributed_c10d._get_default_store())
    group = group_of_store(store, name, ranks.index(dist.get_rank()), len(ranks), TIMEOUT)
    return ProcessMesh(Topology(len(ranks), 1), ranks.index(dist.get_rank()), None, group, group)


def outer_step(codec: Codec | None = None, feedback: LoCo | None = None, **options: float) -> ElasticOuterStep:
    """In a worker: an exchange between all ranks as nodes."""
    config = LocalSteps(codec=codec, error_feedback=feedback, elastic=Elastic(4), **options)  # type: ignore[arg-type]
    mesh = among(range(dist.get_world_size()))
    assert mesh is not None
    outer = ElasticOuterStep(config, mesh, Traffic())
    outer.start({name: torch.zeros(shape, device=device()) for name, shape in SHAPES.items()})
    return outer


def change(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device()) for name, shape in SHAPES.items()}


def distance_from_weighted_mean(trained: Sequence[int]) -> float:
    """In a worker: how far the agreed weights are from the mean of changes, weighted by what nodes have trained."""
    outer = outer_step(outer_lr=1.0, outer_momentum=0.0, nesterov=False)
    outer.send(change(dist.get_rank()), weight=relative_weights(trained)[dist.get_rank()])
    differences = []
    for name, agreed in outer.agreed.items():
        changes = [each * change(rank)[name].double() for rank, each in enumerate(trained)]
        differences.append((agreed - sum(changes).view(-1) / sum(trained)).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("trained", [(1, 1, 1, 1), (3, 0, 7, 1000), (0, 0, 0, 2)], ids=str)
def test_changes_are_averaged_by_what_nodes_have_trained(pool: Callable[[int], Pool], trained: tuple[int, ...]) -> None:
    assert max(pool(4).run(distance_from_weighted_mean, trained)) < 1e-6


def momentum_after_a_loss(left: list[int], then: list[int]) -> dict[str, list[Tensor]] | None:
    """In a worker: this rank's chunks of the momentum among all, then among those ``left``, and ``then``."""
    outer = outer_step()
    outer.send(change(dist.get_rank()))
    whole = {name: [each.to("cpu", copy=True)] for name, each in outer.state_dict()["momentum"].items()}
    numels = {name: agreed.numel() for name, agreed in outer.agreed.items()}
    for ranks in (left, then):
        mesh = among(ranks)
        if mesh is not None:
            was_member = ranks is left or dist.get_rank() in left
            outer.connect(mesh, outer.momentum_among(mesh, numels, owned=was_member))
            for name, each in outer.state_dict()["momentum"].items():
                whole[name].append(each.to("cpu", copy=True))
    return whole


@pytest.mark.parametrize(
    ("left", "then"),
    [([0, 1, 3], [0, 1, 3]), ([2], [2, 0, 1, 3]), ([3, 0], [0, 3]), ([0, 1, 2, 3], [3, 2, 1, 0])],
    ids=["one is lost", "all but one are lost, then return", "half are lost, then swap", "places change"],
)
def test_chunks_of_the_momentum_change_owners(pool: Callable[[int], Pool], left: list[int], then: list[int]) -> None:
    left, then = sorted(left), sorted(then)  # as torch orders the ranks of a group
    found = pool(4).run(momentum_after_a_loss, left, then)
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        first = [found[rank][name][0] for rank in range(4)]
        lost = [chunk if rank in left else torch.zeros_like(chunk) for rank, chunk in enumerate(first)]
        expected = torch.cat(lost)[:numel]
        assert expected.any() or name == "small"
        for ranks, at in ((left, 1), (then, 2)):
            chunks = [found[rank][name][at if rank in left else -1] for rank in ranks]
            assert torch.equal(torch.cat(chunks)[:numel], expected)


def differences_after_rollback() -> list[str]:
    """In a worker: what an exchange that was taken back has left."""
    outer, twin = (outer_step(Int4(32), LoCo()) for _ in range(2))
    mesh = among(range(dist.get_world_size()))
    numels = {name: agreed.numel() for name, agreed in outer.agreed.items()}
    found = []
    for round_ in range(3):
        outer.send(change(100 * round_ + dist.get_rank()))
        twin.send(change(100 * round_ + dist.get_rank()))
        snapshot = outer.snapshot(SHAPES)
        outer.fit((0.25, 1.0))
        assert outer.last_fit["correlation"] < twin.last_fit["correlation"]
        outer.send(change(7))
        outer.rollback(snapshot)
        fits = [{**each.last_fit, "products": each.last_fit["products"].tolist()} for each in (outer, twin)]
        found += ["fit"] * (fits[0] != fits[1])
        for each in (outer, twin):  # errors start from zero with it
            each.connect(mesh, each.momentum_among(mesh, numels, owned=True))
        for kind in ("agreed", "momentum"):
            pairs = zip(outer.state_dict()[kind].items(), twin.state_dict()[kind].values(), strict=True)
            found += [f"{kind} of {name}" for (name, one), other in pairs if not torch.equal(one, other)]
    return found


def test_an_exchange_is_taken_back_bit_for_bit(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(differences_after_rollback) == [[]] * 4
