"""A unit's weights as nodes exchange them, and the progress of each exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_zpp.comm.flat_layout import Sharded
from fsdp_zpp.strategy.local_steps import LocalSteps

from .outer_step import OuterStep, OuterStepState

# ---- known optimizers
#
# Optimizers that step a model's parameters; each has the same number on all ranks.


class KnownOptimizers:
    """Numbers optimizers in the order of the events that make them known. All ranks see these events."""

    # It keeps no optimizer alive. Ranks may free an optimizer at different times, so numbers are not reused.
    def __init__(self) -> None:
        self.count = 0
        self._numbers = weakref.WeakKeyDictionary[Optimizer, int]()

    def add(self, optimizer: Optimizer) -> None:
        """Give an optimizer a number, unless it or the optimizer that it wraps has one."""
        if optimizer not in self._numbers and all(optimizer.state is not each.state for each in self._numbers):
            self._numbers[optimizer] = self.count
            self.count += 1

    def alive(self) -> Mapping[int, Optimizer]:
        return {number: optimizer for optimizer, number in self._numbers.items()}


# ---- fragment
#
# A fragment of local-update training is a unit with its exchanges and the state that differs between nodes.

Span = tuple[int, int]  # start and stop of values in a flat tensor
_MOST_SPANS = 64
ParameterState = dict[str, object]  # what an optimizer keeps of one parameter, by name


class FragmentState(TypedDict):
    """A fragment in a checkpoint; parameters are named by FQN."""

    progress: dict[str, Any]
    exchanges: OuterStepState | None  # None while there are no agreed weights
    weights: dict[str, Tensor]
    changed: list[str]  # parameters trained since their last exchange
    sent: list[str]  # parameters in the exchange under way


@dataclass
class Progress:
    """Progress of a fragment's training, in steps; see [Note: Steps of nodes] in local_training.py."""

    made: int = 0
    unstepped: int = 0  # backwards that have synchronized gradients without a step after them
    exchanged: int = 0  # the last step whose due exchanges were made
    arrives: int | None = None  # the step after which the exchange under way is received; None if there is none
    apart: bool = False  # nodes have trained on their own since they last held the same weights and optimizer states
    sent: int = 0  # exchanges sent, including the one under way
    committed: int = 0  # exchanges that elastic nodes have committed to
    round: int = 0  # the elastic round of the last exchange that elastic nodes committed to
    settled: int | None = None  # the step after which elastic nodes have exchanged everything; None if there is none


class ExchangedUnit(Protocol):
    sharded: Sharded

    def invalidate(self) -> None: ...


class Fragment:
    """Weights of a unit, which nodes train on their own and exchange.

    A parameter that was trained since its last exchange takes part in the next, even if it is frozen by then.
    Parameters that never were trained are not exchanged.

    Attributes:
        pending: Loaded optimizer states, by the optimizer's id, with the functions that restore them.
            Restoring the fragment restores these, too.
        before_restore: Called before a loaded state is restored; may call :meth:`reset` to drop it. Collective.
        was_reloaded: True after a load of weights without a state of local steps, until the load is handled.
    """

    def __init__(self, config: LocalSteps, outer: OuterStep, unit: ExchangedUnit) -> None:
        self.config, self.outer, self.progress = config, outer, Progress()
        self.pending: dict[int, tuple[list[ParameterState], Callable[[list[ParameterState]], None]]] = {}
        self.optimizers = KnownOptimizers()
        self._own: dict[str, Tensor] | None = None
        self._unit = unit
        self._changed: set[str] = set()  # trained since their last exchange
        self._sent: list[str] = []  # parameters in the exchange under way
        self._loaded: FragmentState | None = None
        self.before_restore: Callable[[], None] = lambda: None
        self.was_reloaded = False

    @property
    def was_trained(self) -> bool:
        """Return whether any weights are trained now, or were trained before; the same on all ranks."""
        return bool(self.outer.names) or len(self._unit.sharded.trained_names()) > 0

    @property
    def weights(self) -> list[Tensor]:
        return list(self._of(self.outer.names).values())

    def _of(self, names: Collection[str]) -> dict[str, Tensor]:
        return {name: shard for name, shard in self._unit.sharded.named_shards().items() if name in names}

    def start(self, *, anew: bool = False) -> None:
        """Adopt as agreed the weights of newly trained parameters (if ``anew``, of all trained), equal on all nodes."""
        new = set(self._unit.sharded.trained_names()) - (frozenset() if anew else self.outer.names)
        if new:
            self.outer.start(self._of(new))

    def note_trained(self) -> None:
        self.start()
        self._changed |= set(self._unit.sharded.trained_names())

    @property
    def changed(self) -> list[bool]:
        """Return, for each parameter of the unit, whether it was trained on this rank since its last exchange."""
        return [name in self._changed for name in self._unit.sharded.named_shards()]

    @changed.setter
    def changed(self, changed: Sequence[bool]) -> None:
        """Record the parameters that were trained on any rank, so that all ranks exchange the same ones."""
        self._changed = {name for name, flag in zip(self._unit.sharded.named_shards(), changed, strict=True) if flag}
        if new := self._changed - self.outer.names:
            self.outer.start(self._of(new))  # this node has not trained them, so its values are the agreed ones

    @property
    def holds_agreed(self) -> bool:
        return self.outer.agrees_with(self._of(self.outer.names))

    def adopt(self) -> None:
        """Adopt the weights, which are equal on all nodes, as the agreed ones; the momentum stays as it is."""
        self.outer.adopt(self._of(self.outer.names))
        self._changed = set()

    def warm_up(self) -> None:
        """Adopt the changed weights; add to the momentum their changes since the fragment was last due."""
        self.outer.adopt(self._of(self._changed), warms_up=True)
        self._changed = set()

    def restart(self) -> None:
        names = self.outer.names
        self.outer.reset()
        self.outer.start(self._of(names))
        self.progress.arrives, self._sent, self._changed = None, [], set()

    def send(self, arrives: int, weight: float = 1.0) -> None:
        """Send the changed weights, to be received after the step ``arrives``; see :meth:`OuterStep.send`."""
        shards = self._of(self._changed)
        self.outer.send(shards, self._unit.sharded.placements(), weight)
        self._sent, self._changed = [*shards], set()
        self.progress.arrives = arrives
        self.progress.sent += 1

    def receive(self, mix: float) -> None:
        """Continue from the agreed weights, mixed with this node's own where parameters are still trained."""
        trained = set(self._unit.sharded.trained_names()) if mix != 1 else set()
        if mixed := [name for name in self._sent if name in trained]:
            self.outer.receive(self._of(mixed), mix)
            # Nodes still differ in mixed weights: exchange them again even if they are frozen before the next step.
            self._changed.update(mixed)
        # Parameters that are frozen by now may never be exchanged again, so they take the agreed weights unmixed.
        self.outer.receive(self._of([name for name in self._sent if name not in trained]))
        self._unit.invalidate()
        self.progress.arrives, self._sent = None, []

    @contextmanager
    def showing_agreed(self) -> Iterator[None]:
        """Return a context with the agreed weights in place of this node's own. Collective over the node."""
        # Parameters outside ``names`` hold agreed weights, or values that a user has written since they were frozen.
        names = self.outer.names & (self._changed | set(self._sent) | set(self._unit.sharded.trained_names()))
        self._own = {name: shard.detach().clone() for name, shard in self._of(names).items()}
        self.outer.receive(self._of(names))
        self._unit.invalidate()
        try:
            yield
        finally:
            self._write(self._own)
            self._own = None

    @torch.no_grad()
    def _write(self, own: Mapping[str, Tensor]) -> None:
        for name, shard in self._of(own.keys()).items():
            shard.copy_(own[name])
        self._unit.invalidate()

    def weights_loaded(self) -> None:
        """Handle a load of weights. If a fragment's state was loaded, too, its weights replace these later."""
        self.was_reloaded = self._loaded is None and bool(self.outer.names)

    # ---- in checkpoints

    def state_dict(self) -> FragmentState:
        """Return the progress, the state of the exchanges, and this rank's weights, which other nodes do not have."""
        if self._loaded is not None:
            return self._loaded
        trained = self._unit.sharded.trained_names()
        # Save this node's own weights, even while the module shows the agreed ones.
        shards = self._of(self.outer.names | set(trained)) if self._own is None else self._own
        return {
            "progress": asdict(self.progress),
            "exchanges": self.outer.state_dict() if self.outer.names else None,
            "weights": {name: shard.detach().to("cpu", copy=True) for name, shard in shards.items()},
            "changed": sorted(self._changed),
            "sent": self._sent,
        }

    def load_state_dict(self, state: FragmentState) -> None:
        shards = self._unit.sharded.named_shards()
        saved = {name: list(shard.shape) for name, shard in state["weights"].items()}
        present = {name: list(shards[name].shape) for name in saved if name in shards}
        if present != saved:
            raise ValueError(
                f"{self.outer.label}: the checkpoint has weights of shapes {saved}, but this rank holds {present}"
            )
        # Restore the state later: a model's state dict may be loaded next, with weights of the node that saved it.
        self._loaded = state
        self.progress = Progress(**state["progress"])

    def same_as_loaded(self, names: Collection[str]) -> dict[str, tuple[int, list[Span]]]:
        """Return, by parameter, its number of values on this rank, and the spans that equal the loaded values."""
        loaded = {} if self._loaded is None else self._loaded["weights"]
        return {
            name: (shard.numel(), _longest_spans(shard == loaded[name].to(shard.device, shard.dtype)))
            for name, shard in self._of(names).items()
            if name in loaded
        }

    def holds_loaded_agreed(self, names: Collection[str]) -> bool:
        """Return whether this rank's weights of some parameters are the agreed weights of the loaded state."""
        exchanges = None if self._loaded is None else self._loaded["exchanges"]
        agreed = {} if exchanges is None else exchanges["agreed"]
        shards = {name: shard.cpu().view(-1) for name, shard in self._of(names).items()}
        return shards.keys() <= agreed.keys() and all(
            torch.equal(agreed[name].to(shard.dtype), shard) for name, shard in shards.items()
        )

    def restore(self) -> None:
        """Continue with the loaded state, if there is one."""
        if self._loaded is not None:
            self.before_restore()
        if (state := self._loaded) is None:
            return
        self._loaded, self.was_reloaded = None, False  # the state replaces weights that were loaded by themselves
        self._write(state["weights"])
        if state["exchanges"] is not None:
            self.outer.load_state_dict(state["exchanges"], self._of(state["exchanges"]["agreed"].keys()))
        else:
            self.outer.reset()
        self._changed, self._sent = set(state["changed"]), list(state["sent"])
        for value, restore in self.pending.values():
            restore(value)
        self.pending.clear()

    def reset(self) -> None:
        """Start over from the weights of the next forward."""
        self._loaded, self.progress, self._changed, self._sent = None, Progress(), set(), []
        self.pending.clear()
        self.outer.reset()


def _longest_spans(flags: Tensor) -> list[Span]:
    """Return the spans in which flags are set, without the many short ones that arise by chance."""
    padded = torch.nn.functional.pad(flags.reshape(-1).to(torch.int8), (1, 1))
    edges = padded.diff().nonzero().view(-1, 2)
    longest = (edges[:, 1] - edges[:, 0]).topk(min(len(edges), _MOST_SPANS)).indices
    return [(start, stop) for start, stop in edges[longest].tolist()]
