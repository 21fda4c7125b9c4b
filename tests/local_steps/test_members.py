"""The base of elastic nodes, and a node that is the only one."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Fsdp2
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.pool import TIMEOUT, Pool, free_port
from harness.training import train
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from fsdp_zpp import (
    CodecState,
    Elastic,
    Int4,
    LocalSteps,
    LoCo,
    Strategy,
    count_tokens,
    end_training,
    exchange_weights,
    members,
)
from fsdp_zpp.codecs import Codec
from fsdp_zpp.comm.agreement import from_first_rank
from fsdp_zpp.comm.hops import Traffic
from fsdp_zpp.comm.mesh import ProcessMesh
from fsdp_zpp.local_steps._torch_members import Decisions, group_of_store
from fsdp_zpp.local_steps.elastic import ElasticOuterStep, NodeHeader, Request, check_alike, current_nodes
from fsdp_zpp.local_steps.outer_step import relative_weights
from fsdp_zpp.runtime.unit import StrategyUnit, named_units
from fsdp_zpp.strategy.error_feedback import Topology

SHAPES = {"matrix": (33, 7), "bias": (5,), "small": (1, 2)}
LONG, AT_ONCE = timedelta(seconds=60), timedelta(milliseconds=1)
STORES: list[dist.TCPStore] = []
NUMBERS = itertools.count()
"""Numbers of groups, which all ranks count alike."""


@pytest.fixture
def port() -> int:
    """Return the port of a store, which lives as long as the process."""
    STORES.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return int(STORES[-1].port)


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def member(port: int, members: int = 1, timeout: timedelta = LONG, round_number: int = 0) -> Decisions:
    """Return the decisions of a member, over a connection of its own."""
    return Decisions(client(port), "run", round_number, members, timeout)


@pytest.mark.parametrize("has_failed", [(False,) * 4, (False, True, False)], ids=["none", "one"])
def test_members_commit_if_none_has_failed(port: int, has_failed: Sequence[bool]) -> None:
    def decide(failed: bool) -> bool:
        return member(port, len(has_failed)).decide(failed=failed)

    with ThreadPoolExecutor(len(has_failed)) as threads:
        assert [*threads.map(decide, has_failed)] == [not any(has_failed)] * len(has_failed)


def test_a_member_that_comes_too_late_obeys_those_that_have_given_up(port: int) -> None:
    # The last one has received all of it, and would have made the others commit.
    assert [member(port, 3, timeout).decide(failed=False) for timeout in (AT_ONCE, AT_ONCE, LONG)] == [False] * 3


def test_a_round_that_begins_closes_those_before(port: int) -> None:
    first, second, third = (member(port, round_number=number) for number in (0, 2, 3))
    first.close_earlier_rounds()
    assert [first.decide(failed=False) for _ in range(3)] == [True] * 3
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
        for _ in range(30):
            before = store.add("order", 1)
            if not own.decide(failed=False):
                break
            found.append((before, store.add("order", 1)))
        return found

    with ThreadPoolExecutor(3) as threads:
        rounds = list(threads.map(commits, range(3)))
    assert order.add("order", 0) > 0
    assert len(rounds[-1]) == 30  # nobody closes the last round
    for earlier, later in itertools.combinations([each for each in rounds if each], 2):
        assert earlier[-1][0] < later[0][1]  # its last commit has begun before the later one's first was over


def test_weights_of_nodes_make_a_weighted_mean() -> None:
    for trained in itertools.product([0, 1, 5, 2**40], repeat=3):
        weights = relative_weights(trained)
        assert weights == pytest.approx([each * 3 / sum(trained) if any(trained) else 1 for each in trained])
        if len(set(trained)) == 1:
            assert weights == [1.0] * 3  # exactly: changes are then sent as they are


def among(ranks: Sequence[int]) -> ProcessMesh | None:
    """In a worker: some ranks as nodes of one; None on others. Collective over all."""
    # With new_group on GPUs, ranks that are not in a group of gloo's would wait for its members to split NCCL's.
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
    outer.start({name: torch.zeros(shape, device=models.device()) for name, shape in SHAPES.items()})
    return outer


def change(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(models.device()) for name, shape in SHAPES.items()}


def distance_from_weighted_mean(trained: Sequence[int]) -> float:
    """In a worker: how far the agreed weights are from the mean of changes, weighted by what nodes have trained."""
    outer = outer_step(outer_lr=1.0, outer_momentum=0.0)
    outer.send(change(dist.get_rank()), weight=relative_weights(trained)[dist.get_rank()])
    differences = []
    for name, agreed in outer.agreed.items():
        changes = [each * change(rank)[name].double() for rank, each in enumerate(trained)]
        differences.append((agreed - sum(changes).view(-1) / sum(trained)).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("trained", [(3, 0, 7, 1000), (0, 0, 0, 2)], ids=str)
def test_changes_are_averaged_by_what_nodes_have_trained(pool: Callable[[int], Pool], trained: tuple[int, ...]) -> None:
    assert max(pool(4).run(distance_from_weighted_mean, trained)) < 1e-6


def momentum_after_a_loss(left: list[int], then: list[int]) -> dict[str, list[Tensor]]:
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
    [([0, 1, 3], [0, 1, 3]), ([2], [0, 1, 2, 3])],
    ids=["one is lost", "all but one are lost, then return"],
)
def test_chunks_of_the_momentum_change_owners(pool: Callable[[int], Pool], left: list[int], then: list[int]) -> None:
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
        outer.adapt_momentum((0.25, 1.0))
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


# ---- a node that is the only one

MEAN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": None}
CASE = Case(steps=4, clip=None)


@contextmanager
def alone(levels: str = "III", **local_steps: Any) -> Iterator[Strategy]:
    """In a worker: the strategy of a node that is the only one, with a store of its own."""
    # For each record, torch's log finds out the caller's name by a walk through all modules.
    quick = mock.patch.object(dynamic_rendezvous, "get_method_name", return_value="")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    endpoint = from_first_rank(f"127.0.0.1:{store.port}" if store is not None else "")
    elastic = Elastic(1, endpoint=endpoint, run_id=endpoint, heartbeat=0.5)  # models of other tests may not be gone yet
    with quick:
        yield Strategy(levels, local_steps=LocalSteps(**local_steps, elastic=elastic))
    gc.collect()  # the model has a thread that would ask for the store
    dist.barrier()


def distance_from_stock(adapter: Adapter, levels: str, every: int) -> tuple[float, tuple[int, ...]]:
    """In a worker: how far a node's training is from that of torch's own FSDP, and its place in the end."""
    weights = []
    with alone(levels, every=every, **MEAN) as strategy:
        for each in (strategy, STOCK):
            model = adapter.make(CASE, each)
            train(adapter, model, CASE, optimizer=models.make_optimizer("adamw", model.parameters()))
            if each is not STOCK:
                exchange_weights(model)
                place = tuple(members(model))
                end_training(model)
            weights.append(adapter.full_weights(model))
    return models.distance(*weights), place


@over_each(rest=False, adapter=ADAPTERS, levels=["III", "NNI"], every=[1, 2])
def test_a_node_alone_trains_as_without_exchanges(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str, every: int
) -> None:
    for distance, place in pool(2).run(distance_from_stock, adapter, levels, every):
        assert distance < 2e-5
        assert place == (0, 1, 4)


def error_of(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        call(*arguments)
    return str(error.value)


def come_apart(model: Any) -> None:
    """In a worker: exchange weights before a forward on some ranks of a node, and in a call on the first one."""
    if dist.get_rank() == 0:
        exchange_weights(model)
    else:
        models.loss_of(model, models.batch(0, 0))


def errors_of_ranks_apart(adapter: Adapter) -> list[str]:
    """In a worker: the errors before the node has met others, and after."""
    said = []
    for steps in (1, 2):
        with alone(every=1, **MEAN) as strategy:
            model = adapter.make(CASE, strategy)
            train(adapter, model, replace(CASE, steps=steps))
            said.append(error_of(come_apart, model))
            end_training(model)
            del model
    return said


@over_adapters
def test_ranks_of_a_node_at_different_places_are_told(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    place = "place: in exchange_weights on rank 0, before the forward of step"
    for before, after in pool(2).run(errors_of_ranks_apart, adapter):
        assert before.startswith("an exchange of weights between nodes: ")
        assert f"{place} 2, where this node meets others on rank 1" in before
        assert f"{place} 3 on rank 1" in after


def differing_after_resuming(adapter: Adapter) -> list[str]:
    """In a worker: the weights that differ in a training that was interrupted."""
    ends = []
    for interrupted in (False, True):
        with alone(every=2, codec=Int4(32), error_feedback=LoCo()) as strategy:
            model = adapter.make(CASE, strategy)
            optimizer = models.make_optimizer("adamw", model.parameters())
            for step in range(6):
                if step == 3:
                    # The errors of exchanges start from zero where nodes meet, as they do after a restart.
                    (training,) = {unit.local_training for unit in named_units(model) if isinstance(unit, StrategyUnit)}
                    training._members.disconnect()
                if interrupted and step == 3:
                    saved = CodecState(model, optimizer).state_dict()
                    resumed = adapter.make(CASE, strategy)
                    adapter.load_from(model, resumed, adapter.state_dict_kinds[0])
                    model, optimizer = resumed, models.make_optimizer("adamw", resumed.parameters())
                    CodecState(model, optimizer).load_state_dict(saved)
                    del training, resumed
                    gc.collect()  # as if the process had ended
                models.loss_of(model, models.batch(step, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert members(model).step == 6
            exchange_weights(model)
            ends.append(adapter.full_weights(model))
            end_training(model)
            del model, optimizer
    return [name for name, value in ends[0].items() if not value.equal(ends[1][name])]


@over_adapters
def test_a_node_resumes_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for differing in pool(2).run(differing_after_resuming, adapter):
        assert differing == []


def refusals() -> list[str]:
    """In a worker: errors of what can't be."""
    adapter, tokens = Fsdp2(), models.batch(0, 0)
    nobody = Strategy.diloco(elastic=Elastic(1, endpoint=f"127.0.0.1:{from_first_rank(free_port())}", join_timeout=0.5))
    said = [error_of(adapter.make, CASE, replace(nobody, gpus_per_node=1))]
    model = adapter.make(CASE, nobody)
    said.append(error_of(members, model))
    models.loss_of(model, tokens)
    said.append(error_of(models.loss_of, model, tokens))
    plain = adapter.make(CASE, Strategy.diloco(gpus_per_node=1))
    models.loss_of(plain, tokens)
    said += [error_of(members, plain), error_of(count_tokens, plain, -1)]
    with alone(every=1) as strategy:
        model = adapter.make(CASE, strategy)
        models.loss_of(model, tokens)
        end_training(model)
        again = adapter.make(CASE, strategy)
        models.loss_of(again, tokens)
        said.append(error_of(models.loss_of, again, tokens))
    return said


def test_what_cannot_be_is_refused_on_all_ranks(pool: Callable[[int], Pool]) -> None:
    parts = (
        "elastic nodes are jobs of their own, but this job of 2 ranks has its model on 2 nodes x 1",
        "has not run a forward yet",
        "this node can't meet others at 127.0.0.1:",
        "have no elastic=Elastic(...)",
        "tokens must be an int of 0 or more, got -1",
        "the training has ended: nodes of the run",
    )
    for said in pool(2).run(refusals):
        for text, part in zip(said, parts, strict=True):
            assert part in text


HEADER = NodeHeader("a net", 3, 24, 2, None, False, Request(24, (0,)), ((True,),), (8,), False, ((0.5, 1.0),))


@pytest.mark.parametrize(
    ("headers", "current"),
    [
        ([HEADER, HEADER], [0, 1]),
        ([replace(HEADER, committed=2), HEADER, HEADER], [1, 2]),
        ([HEADER, replace(HEADER, made=25)], [1]),
        # Both have committed to a fourth exchange in rounds of their own; the later round decides.
        ([HEADER, replace(HEADER, round=3), replace(HEADER, round=3)], [1, 2]),
        ([replace(HEADER, committed=0, made=0, round=0, start="one", request=None), HEADER], [1]),
        ([replace(HEADER, committed=0, made=0, start=start) for start in ("one", "other", "one")], [0, 2]),
    ],
    ids=["alike", "one was lost", "one is behind", "apart", "one is new", "all are new"],
)
def test_nodes_with_the_most_exchanges_are_current(headers: list[NodeHeader], current: list[int]) -> None:
    assert current_nodes(headers) == current


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "another"}, "different models or local steps: a net on node 0, another on node 1; give all of them"),
        ({"counts_tokens": True}, "node 1 counts tokens, but node 0 does not"),
    ],
)
def test_nodes_that_were_given_different_things_raise(other: dict[str, Any], message: str) -> None:
    check_alike([HEADER, replace(HEADER, trained=(0,), counts_tokens=True)], "net")  # it has just joined
    with pytest.raises(ValueError, match=message):
        check_alike([HEADER, replace(HEADER, **other)], "net")
