"""Local steps: nodes train on their own, and exchange changes of weights every few steps.

Source: DiLoCo (arXiv 2311.08105); Streaming DiLoCo (arXiv 2501.18512) for fragments that are exchanged one after the
other, in 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_zpp.codecs.base import Codec, check_codec, check_place
from fsdp_zpp.codecs.blockwise import Int4, Int8

from .error_feedback import LoCo, check_loco
from .outer_momentum import TARGET_GAIN

_INT4 = Int4(128)

MOMENT_CODEC = Int8(128)
"""Encodes optimizers' moments in exchanges."""


@dataclass(frozen=True)
class LocalSteps:
    """Local-update training: between exchanges nothing goes between nodes.

    In an exchange, nodes average how much their weights have changed since the last one, and all of them continue from
    the weights that an outer optimizer, SGD with momentum, makes of that average (DiLoCo, arXiv 2311.08105, algorithm
    1). The fragments of a model, its units, are exchanged one after the other.

    Args:
        every: Optimizer steps between two exchanges of a fragment.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its momentum, in [0, 1). ``"auto"`` chooses it for each exchange of a fragment: the largest one
            up to 0.9 with which the outer step is at most 1.4 times the mean change, by the correlation of the last
            changes. See [Note: Automatic momentum] in outer_momentum.py.
        nesterov: Whether the momentum is Nesterov's.
        codec: Encodes the changes and the outer optimizer's answer; None sends fp32. ``TopK()`` sends the largest
            changes alone and needs error feedback.
        error_feedback: Error feedback on the codec, both ways. Its ``reset_every`` counts exchanges here.
        spread: Whether to spread fragments over the ``every`` steps, so that each step sends about the same (arXiv
            2501.18512, section 2.2), instead of exchanging all of them after the last one.
        overlap: Steps that an exchange may take to arrive, less than ``every``; the node trains on meanwhile.
        mix: Share of the agreed weights in those with which a node continues when an exchange arrives; the rest is its
            own weights. With an overlap, arXiv 2501.18512, section 2.3, takes 0.5: 1 discards the steps made meanwhile.
            With 0, nodes keep their own weights until :func:`fsdp_zpp.exchange_weights`.
        offload: Whether the agreed weights and the momentum are kept on the CPU between exchanges. The CPU then waits
            for an exchange when it is sent, in spite of an overlap.
        moments_every: Nodes also average their optimizers' moments, in every ``moments_every``-th exchange of a
            fragment, as int8; None leaves each node its own. DES-LOC (arXiv 2505.22549) takes 3 with Adam. The next
            forward waits for them, in spite of an overlap.

    Raises:
        ValueError: If a number is out of range, the codec does not suit changes or lacks the error feedback that it
            needs, Nesterov's momentum is 0, ``outer_lr`` leaves no room for a momentum that is ``"auto"``, or error
            feedback has no codec to correct.
        TypeError: If a flag, the codec or error feedback has the wrong type.
    """

    every: int = 64
    outer_lr: float = 0.7
    outer_momentum: float | Literal["auto"] = 0.9
    nesterov: bool = True
    codec: Codec | None = _INT4
    error_feedback: LoCo | None = None
    spread: bool = True
    overlap: int = 0
    mix: float = 1.0
    offload: bool = False
    moments_every: int | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.every):
            raise ValueError(f"every must be an int of 1 or more optimizer steps, got {self.every!r}")
        if not _is_number(self.outer_lr) or not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"outer_lr must be a number above 0, got {self.outer_lr!r}")
        self._check_momentum()
        if isinstance(self.overlap, bool) or not isinstance(self.overlap, int) or not 0 <= self.overlap < self.every:
            raise ValueError(
                f"overlap must be an int of 0 or more optimizer steps and below every={self.every}, so that an "
                f"exchange arrives before the next; got {self.overlap!r}"
            )
        if not _is_number(self.mix) or not 0 <= self.mix <= 1:
            raise ValueError(f"mix must be in [0, 1], got {self.mix!r}")
        if self.moments_every is not None and not _is_count(self.moments_every):
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

    def due(self, step: int, fragments: int) -> list[int]:
        """Return the fragments to exchange after a step; in any ``every`` consecutive steps, each of them once.

        Args:
            step: Number of steps made so far, from 1 on.
            fragments: Number of fragments.
        """
        if not self.spread:
            return list(range(fragments)) if step % self.every == 0 else []
        # The last fragment comes with the last of the steps, so that every=1 exchanges all of them in each step.
        return [index for index in range(fragments) if (step - (index + 1) * self.every // fragments) % self.every == 0]

    def __str__(self) -> str:
        momentum = f"{'Nesterov ' if self.nesterov else ''}momentum {self.outer_momentum}"
        feedback = f" with error feedback ({self.error_feedback})" if self.error_feedback else ""
        sent = f"{self.codec or 'fp32'}{feedback}"
        arrives = f", arriving {self.overlap} step{'s' * (self.overlap > 1)} later" if self.overlap else ""
        mixed = f", mixed in at {self.mix}" if self.mix < 1 else ""
        which = "each exchange" if self.moments_every == 1 else f"1 of {self.moments_every} exchanges"
        moments = "" if self.moments_every is None else f", moments in {which} as {MOMENT_CODEC}"
        return f"every {self.every} steps as {sent}, outer lr {self.outer_lr}, {momentum}{arrives}{mixed}{moments}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
