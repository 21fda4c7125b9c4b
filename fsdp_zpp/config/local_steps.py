"""Local steps: nodes train on their own, and exchange changes of weights every few steps.

Source: DiLoCo (arXiv 2311.08105); Streaming DiLoCo (arXiv 2501.18512) for fragments that are exchanged one after the
other, in 4 bits; Pier (arXiv 2511.17849) for synchronous steps at the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_zpp.codecs.base import Codec, check_codec, check_place
from fsdp_zpp.codecs.blockwise import Int4, Int8
from fsdp_zpp.suggestions import explains_keywords

from .elastic import Elastic
from .error_feedback import LoCo, check_loco
from .exchange_schedule import Segments, check_schedule, due_in, is_count, segments_of
from .outer_momentum import TARGET_GAIN

_INT4 = Int4(128)

MOMENT_CODEC = Int8(128)
"""Encodes optimizers' moments in exchanges."""


@explains_keywords
@dataclass(frozen=True)
class LocalSteps:
    """Configures local-update training, in which nodes send each other nothing between exchanges of weights.

    In an exchange, nodes average how much their weights have changed since the last one. An outer optimizer, SGD with
    momentum, applies that average to the weights that they last agreed on, and all nodes continue from the result
    (DiLoCo, arXiv 2311.08105, algorithm 1). The weights of each unit of the model are a fragment, which is exchanged by
    itself.

    Training may begin and end with synchronous steps, in which gradients are reduced over all ranks. In those at the
    beginning, the outer momentum is warmed up as in Pier (arXiv 2511.17849): whenever a fragment is due, its momentum
    takes in how much the weights have changed since the fragment was due last, and the weights stay as they are.
    Changes in the last of these steps, after a fragment was due for the last time, are left out.

    Args:
        every: Optimizer steps between two exchanges of a fragment; or a schedule, pairs ``(from_step, every)`` such as
            ``((0, 8), (1000, 32))``: every 8 steps, and after the first 1000 steps of the training, synchronous ones
            included, every 32. The first pair begins at 0.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its momentum, in [0, 1); DiLoCo's is 0.9. ``"auto"`` chooses it for each exchange of a fragment:
            the largest one up to 0.9 with which the outer step is at most 1.4 times the mean change, by the correlation
            of the last changes. See [Note: Automatic momentum] in outer_momentum.py.
        nesterov: Whether the momentum is Nesterov's.
        codec: Encodes the changes, and the update on the way back; None sends fp32. ``TopK()`` sends the largest
            changes alone and needs error feedback.
        error_feedback: Error feedback on the codec, on both ways. Its ``reset_every`` counts exchanges here.
        spread: Whether to spread fragments over the ``every`` steps, so that each step sends about the same (arXiv
            2501.18512, section 2.2), instead of exchanging all of them after the last one.
        overlap: Steps that an exchange may take to arrive, less than ``every``; the node trains on meanwhile.
        mix: Share of the agreed weights in those with which a node continues when an exchange arrives; the rest is its
            own weights. With an overlap, arXiv 2501.18512, section 2.3, takes 0.5: 1 discards the steps made meanwhile.
            With 0, nodes keep their own weights until :func:`fsdp_zpp.exchange_weights`.
        offload: Whether the agreed weights and the momentum are kept on the CPU between exchanges. The CPU then waits
            for an exchange when it is sent, in spite of an overlap.
        start: Number of synchronous steps at the beginning.
        stop: The number of steps after which all steps are synchronous again; None never stops local steps. Before the
            first of them, all fragments are exchanged, and the moments of optimizers are averaged over nodes in fp32.
            What ``TopK`` leaves out of that exchange is lost.
        moments_every: Nodes also average their optimizers' moments, in every ``moments_every``-th exchange of a
            fragment, as int8; None leaves each node its own. DES-LOC (arXiv 2505.22549) takes 3 with Adam. The next
            forward waits for them, in spite of an overlap.
        elastic: Lets nodes be lost, and come back or join, while the others train on; each is a job of its own.

    Raises:
        ValueError: If a number is out of range, the schedule is not in order, the codec does not suit changes or lacks
            the error feedback that it needs, Nesterov's momentum is 0, ``outer_lr`` leaves no room for a momentum that
            is ``"auto"``, error feedback has no codec to correct, or elastic nodes are given what they can't do.
        TypeError: If a flag, the codec, error feedback or ``elastic`` has the wrong type.
    """

    every: int | Segments = 64
    outer_lr: float = 0.7
    outer_momentum: float | Literal["auto"] = "auto"
    nesterov: bool = True
    codec: Codec | None = _INT4
    error_feedback: LoCo | None = None
    spread: bool = True
    overlap: int = 0
    mix: float = 1.0
    offload: bool = False
    start: int = 0
    stop: int | None = None
    moments_every: int | None = None
    elastic: Elastic | None = None

    def __post_init__(self) -> None:
        check_schedule(self.every, self.start, self.stop)
        if not _is_number(self.outer_lr) or not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"outer_lr must be a number above 0, got {self.outer_lr!r}")
        self._check_momentum()
        least = min(every for _, every in self.segments)
        if not is_count(self.overlap, 0) or self.overlap >= least:
            raise ValueError(
                f"overlap must be an int of 0 or more optimizer steps and below every={least}, so that an "
                f"exchange arrives before the next; got {self.overlap!r}"
            )
        if not _is_number(self.mix) or not 0 <= self.mix <= 1:
            raise ValueError(f"mix must be in [0, 1], got {self.mix!r}")
        if self.moments_every is not None and not is_count(self.moments_every, 1):
            raise ValueError(
                "moments_every must be an int of 1 or more exchanges, or None, which leaves moments alone; got "
                f"{self.moments_every!r}"
            )
        for name in ("nesterov", "spread", "offload"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.nesterov and self.outer_momentum == 0:
            raise ValueError("nesterov=True needs momentum, but outer_momentum is 0: pass nesterov=False")
        self._check_codec()
        self._check_elastic()

    def _check_momentum(self) -> None:
        if self.outer_momentum == "auto":
            if self.outer_lr >= TARGET_GAIN:
                raise ValueError(
                    f"outer_momentum='auto' makes outer steps of up to {TARGET_GAIN} times the mean change, to which "
                    f"outer_lr={self.outer_lr} leaves no room for momentum: pass a lower outer_lr, or a number"
                )
        elif (
            isinstance(self.outer_momentum, str)
            or not _is_number(self.outer_momentum)
            or not 0 <= self.outer_momentum < 1
        ):
            raise ValueError(f"outer_momentum must be 'auto' or in [0, 1), got {self.outer_momentum!r}")

    def _check_codec(self) -> None:
        check_codec("codec", self.codec, such_as="Int4(128)")
        check_place("codec", self.codec, "exchanges")
        check_loco(self.error_feedback)
        if self.error_feedback is None and self.codec is not None and self.codec.needs_feedback:
            raise ValueError(
                f"codec={self.codec!r} leaves out most of a change, which is lost without error feedback: pass "
                "error_feedback=LoCo(beta=0, decay=0.95, reset_every=0), with outer_lr=1, outer_momentum=0 and "
                "nesterov=False as in SparseLoCo"
            )
        if self.error_feedback is not None and self.codec is None:
            raise ValueError("error_feedback corrects the error of the codec, but codec=None has no error")

    def _check_elastic(self) -> None:
        if self.elastic is None:
            return
        if not isinstance(self.elastic, Elastic):
            raise TypeError(f"elastic must be Elastic(...) or None, got {self.elastic!r}")
        refused = {
            "start": self.start,
            "stop": self.stop is not None,
            "moments_every": self.moments_every,
        }
        if given := [name for name, is_given in refused.items() if is_given]:
            raise ValueError(
                f"elastic nodes do not support {given[0]}={getattr(self, given[0])!r}, for which all nodes would have "
                "to be there: leave it out"
            )
        if self.overlap:
            raise ValueError(
                f"overlap={self.overlap} leaves an exchange under way while nodes train on, which elastic nodes could "
                "not repeat without one that was lost: pass overlap=0"
            )

    @property
    def segments(self) -> Segments:
        """Return the schedule: the step at which each segment begins, and its steps between two exchanges."""
        return segments_of(self.every)

    @property
    def last_every(self) -> int:
        """Return the steps between two exchanges in the last segment, which lasts longest."""
        return self.segments[-1][1]

    @property
    def has_synchronous_steps(self) -> bool:
        """Return whether gradients are ever reduced over all ranks."""
        return self.start > 0 or self.stop is not None

    def is_synchronous(self, made: int) -> bool:
        """Return whether the step that follows ``made`` steps is synchronous."""
        return made < self.start or self.has_stopped(made)

    def has_stopped(self, made: int) -> bool:
        """Return whether all steps that follow ``made`` steps are synchronous."""
        return self.stop is not None and made >= self.stop

    def due(self, step: int, fragments: int) -> list[int]:
        """Return the fragments to exchange after a step; in any ``every`` consecutive steps, each of them once.

        Where a segment of the schedule ends, fragments may come sooner or later than that.

        Args:
            step: Number of steps made so far, from 1 on.
            fragments: Number of fragments.
        """
        return due_in(self.segments, step, fragments, spread=self.spread)

    def __str__(self) -> str:
        momentum = f"{'Nesterov ' if self.nesterov else ''}momentum {self.outer_momentum}"
        feedback = f" with error feedback ({self.error_feedback})" if self.error_feedback else ""
        sent = f"{self.codec or 'fp32'}{feedback}"
        arrives = f", arriving {self.overlap} step{'s' * (self.overlap > 1)} later" if self.overlap else ""
        mixed = f", mixed in at {self.mix}" if self.mix < 1 else ""
        (_, every), *later = self.segments
        changes = "".join(f", from step {begin} on every {each}" for begin, each in later)
        started = f", after {self.start} synchronous step{'s' * (self.start > 1)}" if self.start else ""
        stopped = f", synchronous again from step {self.stop} on" if self.stop is not None else ""
        which = "each exchange" if self.moments_every == 1 else f"1 of {self.moments_every} exchanges"
        moments = "" if self.moments_every is None else f", moments in {which} as {MOMENT_CODEC}"
        members = f", among {self.elastic}" if self.elastic else ""
        outer = f"outer lr {self.outer_lr}, {momentum}{arrives}{mixed}{moments}"
        return f"every {every} steps{changes} as {sent}, {outer}{started}{stopped}{members}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
