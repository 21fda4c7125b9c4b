"""Functions that users call with a model: ``traffic``, ``invalidate``, and those of local steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch import nn

from fsdp_zpp.collectives.agreement import PLACE, agree
from fsdp_zpp.collectives.kinds import Kind, Level

from .elastic_training import ElasticTraining, Membership
from .local_training import EXCHANGE, LocalTraining
from .model_ranks import ranks_of
from .unit import COMMUNICATORS, Communicator, StrategyUnit, named_units
from .validation import check_module


def communicators(model: nn.Module) -> Iterator[Communicator]:
    """Yield the units of a model, outermost first, then its frozen base.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
    """
    check_module(model)
    # All modules of a frozen base list the base. A dict, since the order of a set would change from run to run.
    parts: dict[Communicator, None] = dict.fromkeys(named_units(model))
    parts |= {part: None for module in model.modules() for part in getattr(module, COMMUNICATORS, ())}
    if not parts:
        raise ValueError(
            f"no part of this {type(model).__name__} communicates through fsdp_zpp; wrap it with a Strategy, register "
            "a quantized_reduce_hook, or quantize its frozen weights first"
        )
    yield from parts


def invalidate(model: nn.Module) -> None:
    """Declare that the weights of ``model`` have changed; call it on every rank.

    These declare it by themselves: a backward that synchronizes gradients, a step of a torch optimizer, its ``train()``
    and ``eval()`` if it has them (schedule-free optimizers do), ``load_state_dict``,
    ``torch.distributed.checkpoint.load`` on all ranks, and ``summon_full_params(writeback=True)``. The first three
    concern only weights that were ever trained or given to an optimizer. After any other write to the weights, call
    this before the next forward, so that the weights are gathered between nodes again: clipping, averaging,
    ``p.data.copy_()``, ``torch._foreach_*``, fused kernels that are called by themselves, a teacher's moving average,
    ``eval()`` and ``train()`` of optimizers that are not torch's. torch counts some of these writes, which then raise a
    ``StaleSecondaryError``; with ``FSDP_ZPP_CHECK=1`` all of them do. A forward sends the weights of all units as soon
    as it needs the first, so after a write within a forward (in a hook, say), call this before the forward reaches the
    unit that was written to.

    Args:
        model: A model wrapped with a ``Strategy``, or a part of one.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
    """
    for part in communicators(model):
        part.invalidate()


def traffic(model: nn.Module, *, reset: bool = False) -> dict[Kind, dict[Level, int]]:
    """Return the bytes that this rank has sent for ``model`` so far, or since the last reset, by kind and hop.

    It counts what the strategies, comm hooks and frozen bases of fsdp_zpp send. It does not count torch's own
    collectives: full-precision gathers for state dicts and ``summon_full_params``, and, on one node, whatever is not
    encoded. An all-gather of a payload of b bytes over n ranks counts as b * (n - 1), an all-to-all as b * (n - 1) / n.

    Args:
        model: A model, or a part of one, that is wrapped with a ``Strategy``, has a
            ``quantized_reduce_hook``, or has a quantized frozen base.
        reset: Whether to begin to count anew; the next call then returns what was sent after this one.

    Returns:
        ``{"gather": {"inter": ..., "intra": ...}, "reduce": {"inter": ..., "intra": ...}}``, in bytes.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
    """
    total: dict[Kind, dict[Level, int]] = {
        "gather": {"inter": 0, "intra": 0},
        "reduce": {"inter": 0, "intra": 0},
    }
    # By identity, since all units of a model with a comm hook count into the one Traffic of its state.
    for counter in {id(part.traffic): part.traffic for part in communicators(model)}.values():
        for (kind, level), nbytes in counter.since_reset().items():
            total[kind][level] += nbytes
        if reset:
            counter.reset()
    return total


def exchange_weights(model: nn.Module) -> None:
    """Exchange all weights between nodes now, after which all of them hold the same; call it on every rank.

    With ``Strategy(local_steps=...)``, nodes exchange weights every few steps by themselves; this is for the end of
    training, or of a phase of it. It is an exchange like the others: of changes, encoded, with an outer step. While
    steps are synchronous (``LocalSteps(start=..., stop=...)``), nodes hold the same weights, and it does nothing.

    Args:
        model: A model wrapped with such a strategy, or a part of one that includes its outermost unit.

    Raises:
        ValueError: If its strategy has no local steps on any rank, ranks have made different numbers of steps, or some
            of them are to exchange weights at another place, such as before a forward; every rank raises.
        RuntimeError: If the model has not run a forward yet, or shows its agreed weights, on any rank; every rank
            raises.
    """

    def check() -> list[tuple[LocalTraining, str]]:
        return [(training, training.exchanged_by_all()) for training in _local_trainings(model)]

    def summary(checked: list[tuple[LocalTraining, str]]) -> dict[str, str]:
        names = ", ".join(training.model for training, _ in checked)
        return {PLACE: "in exchange_weights", "model": names, "units": ", ".join(units for _, units in checked)}

    for training, _ in agree(_ranks_that_compare(model), check, summary, call=EXCHANGE):
        training.exchange_all()


@contextmanager
def agreed_weights(model: nn.Module) -> Iterator[None]:
    """Return a context in which each unit has the weights of its last exchange, the same on all nodes.

    With ``Strategy(local_steps=...)``, evaluation and state dicts show the weights of the node itself; in this context
    they show the agreed ones, as DiLoCo evaluates and saves them. The node's own weights are set aside and restored on
    exit; don't train inside. Nothing is sent between nodes, so it is enough to enter it on every rank of one node.
    Right after a load, enter it on all ranks, since nodes first compare the loaded weights. While steps are
    synchronous, the agreed weights are the current ones.

    Args:
        model: A model wrapped with such a strategy, or a part of one that includes its outermost unit.

    Raises:
        ValueError: If its strategy has no local steps.
        RuntimeError: If the model has not run a forward yet, or shows them already.

    Examples:
        >>> with agreed_weights(model):
        ...     state = get_model_state_dict(model)
    """
    with ExitStack() as stack:
        for training in _local_trainings(model):
            stack.enter_context(training.showing_agreed())
        yield


def members(model: nn.Module) -> Membership:
    """Return this node's place among those that train together, and the steps that they have made.

    A node that joins takes over the step of the others, in its second forward; its own loop has to go on from there.
    Does not communicate.

    Args:
        model: A model wrapped with ``Strategy.diloco(elastic=...)``, or a part of one that includes its outermost unit.

    Raises:
        ValueError: If its strategy has no elastic nodes.
        RuntimeError: If the model has not run a forward yet.

    Examples:
        >>> step = 0
        >>> while step < 10_000:
        ...     train_one_step(model, optimizer, lr=schedule(step))
        ...     step = members(model).step
    """
    return _elastic_training(model).membership


def count_tokens(model: nn.Module, tokens: int) -> None:
    """Count tokens that this node has trained, by which its changes are weighted in exchanges instead of by steps.

    Call it in every step, before the next forward, on all nodes or on none, and with the same number on all ranks of a
    node: the tokens of all of them. Does not communicate.

    Args:
        model: As of :func:`members`.
        tokens: How many this node has trained since the last call.

    Raises:
        ValueError: If its strategy has no elastic nodes, or ``tokens`` is not a number of tokens.
        RuntimeError: If the model has not run a forward yet.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"tokens must be an int of 0 or more, got {tokens!r}")
    _elastic_training(model).count_tokens(tokens)


def end_training(model: nn.Module) -> None:
    """Declare that elastic nodes have made all steps: none may join any more, and those that wait raise.

    Without it, a node that comes back after the others are done would train from the beginning. Call it after
    :func:`exchange_weights`, on every rank of a node; on several nodes it does no more than on one.

    Args:
        model: As of :func:`members`.

    Raises:
        ValueError: If its strategy has no elastic nodes on any rank; every rank raises.
        RuntimeError: If the model has not run a forward yet, or the store can't be reached.
    """
    agree(_ranks_that_compare(model), lambda: _elastic_training(model), call="end_training").end()


def _ranks_that_compare(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that compare for local steps of ``model``; all ranks if it has none, as on a rank that errs."""
    units = named_units(model) if isinstance(model, nn.Module) else {}
    trainings = (unit.local_training for unit in units if isinstance(unit, StrategyUnit))
    return next((training.group for training in trainings if training is not None), ranks_of(model))


def _elastic_training(model: nn.Module) -> ElasticTraining:
    for training in _local_trainings(model):
        if isinstance(training, ElasticTraining):
            return training
    raise ValueError(f"the local steps of this {type(model).__name__} have no elastic=Elastic(...)")


def _local_trainings(model: nn.Module) -> list[LocalTraining]:
    """Return the local trainings of a model; none on a single node, where there is nothing to exchange."""
    parts = communicators(model)
    local = [part for part in parts if isinstance(part, StrategyUnit) and part.strategy.local_steps is not None]
    if not local:
        raise ValueError(f"no part of this {type(model).__name__} has a Strategy(local_steps=...)")
    fragments = [unit.fragment for unit in local if unit.fragment is not None]
    trainings = list(dict.fromkeys(unit.local_training for unit in local if unit.local_training is not None))
    if fragments and not trainings:
        raise RuntimeError(
            f"this {type(model).__name__} has not run a forward yet, and local steps start with the first: run one, "
            "then call this"
        )
    return trainings
