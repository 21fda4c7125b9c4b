"""Local steps: nodes train on their own, and exchange changes of weights every few steps.

Source: DiLoCo (arXiv 2311.08105); Streaming DiLoCo (arXiv 2501.18512) for fragments that are exchanged one after the
other, in 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_zpp.codecs.base import Codec, check_codec, check_hop_codec
from fsdp_zpp.codecs.blockwise import Int4
from fsdp_zpp.codecs.delta import Int4Delta

from .elastic import Elastic
from .error_feedback import LoCo, check_loco

_INT4 = Int4(128)


@dataclass(frozen=True)
class LocalSteps:
    """Local-update training: between exchanges nothing goes between nodes.

    In an exchange, nodes average how much their weights have changed since the last one, and all of them continue from
    the weights that an outer optimizer, SGD with momentum, makes of that average (DiLoCo, arXiv 2311.08105, algorithm
    1). The fragments of a model, its units, are exchanged one after the other.

    Args:
        every: Optimizer steps between two exchanges of a fragment.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its momentum, in [0, 1).
        nesterov: Whether the momentum is Nesterov's.
        codec: Encodes the changes and the outer optimizer's answer; None sends fp32.
        error_feedback: Error feedback on the codec, both ways. Its ``reset_every`` counts exchanges here.
        spread: Whether to spread fragments over the ``every`` steps, so that each step sends about the same (arXiv
            2501.18512, section 2.2), instead of exchanging all of them after the last one.
        overlap: Steps that an exchange may take to arrive, less than ``every``; the node trains on meanwhile.
        mix: Share of the agreed weights in those with which a node continues when an exchange arrives; the rest is its
            own weights. With an overlap, arXiv 2501.18512, section 2.3, takes 0.5: 1 discards the steps made meanwhile.
        offload: Whether the agreed weights and the momentum are kept on the CPU between exchanges. The CPU then waits
            for an exchange when it is sent, in spite of an overlap.
        elastic: Lets nodes be lost, and come back or join, while the others train on; each is a job of its own.

    Raises:
        ValueError: If a number is out of range, the codec does not suit changes, Nesterov's momentum is 0, error
            feedback has no codec to correct, or elastic nodes have an overlap.
        TypeError: If a flag, the codec, error feedback or ``elastic`` has the wrong type.
    """

    every: int = 64
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    codec: Codec | None = _INT4
    error_feedback: LoCo | None = None
    spread: bool = True
    overlap: int = 0
    mix: float = 1.0
    offload: bool = False
    elastic: Elastic | None = None

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be an int of 1 or more optimizer steps, got {self.every!r}")
        if not _is_number(self.outer_lr) or not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"outer_lr must be a number above 0, got {self.outer_lr!r}")
        if not _is_number(self.outer_momentum) or not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum!r}")
        if isinstance(self.overlap, bool) or not isinstance(self.overlap, int) or not 0 <= self.overlap < self.every:
            raise ValueError(
                f"overlap must be an int of 0 or more optimizer steps and below every={self.every}, so that an "
                f"exchange arrives before the next; got {self.overlap!r}"
            )
        if not _is_number(self.mix) or not 0 < self.mix <= 1:
            raise ValueError(f"mix must be in (0, 1], got {self.mix!r}")
        for name in ("nesterov", "spread", "offload"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.nesterov and self.outer_momentum == 0:
            raise ValueError("nesterov=True needs momentum, but outer_momentum is 0: pass nesterov=False")
        self._check_codec()
        self._check_elastic()

    def _check_codec(self) -> None:
        check_codec("codec", self.codec, such_as="Int4(128)")
        if isinstance(self.codec, Int4Delta):
            raise ValueError(f"codec encodes changes already: pass Int4(...) instead of {self.codec!r}")
        check_hop_codec("codec", self.codec)
        check_loco(self.error_feedback)
        if self.error_feedback is not None and self.codec is None:
            raise ValueError("error_feedback corrects the error of the codec, but codec=None has no error")

    def _check_elastic(self) -> None:
        if self.elastic is None:
            return
        if not isinstance(self.elastic, Elastic):
            raise TypeError(f"elastic must be Elastic(...) or None, got {self.elastic!r}")
        if self.overlap:
            raise ValueError(
                f"overlap={self.overlap} leaves an exchange under way while nodes train on, which elastic nodes could "
                "not repeat without one that was lost: pass overlap=0"
            )

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
        members = f", among {self.elastic}" if self.elastic else ""
        return f"every {self.every} steps as {sent}, outer lr {self.outer_lr}, {momentum}{arrives}{mixed}{members}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
