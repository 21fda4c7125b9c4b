"""Configuration of local steps: when nodes exchange weights, the outer optimizer, nodes that come and go."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, TypeGuard

from fsdp_zpp.codecs import Codec, Int4, Int8, check_codec, check_place
from fsdp_zpp.names import explains_keywords

from .error_feedback import LoCo, check_loco

# ---- local steps
#
# Local steps: nodes train on their own, and exchange changes of weights every few steps.
#
# Sources: DiLoCo (arXiv 2311.08105); Streaming DiLoCo (arXiv 2501.18512) for the exchange of one fragment after the
# other, in 4 bits; Pier (arXiv 2511.17849) for synchronous steps at the beginning.

_INT4 = Int4(128)

MOMENT_CODEC = Int8(128)  # encodes optimizers' moments in exchanges


@explains_keywords
@dataclass(frozen=True)
class LocalSteps:
    """Configures local-update training, in which nodes send each other nothing between exchanges of weights.

    In an exchange, nodes average how much their weights have changed since the last exchange. An outer optimizer, SGD
    with Nesterov momentum, applies the average to the weights on which nodes agreed last, and all nodes continue from
    the new *agreed weights* (DiLoCo, arXiv 2311.08105, algorithm 1). The weights of each unit of the model are a
    fragment, which is exchanged by itself.

    Training may begin with synchronous steps, in which gradients are reduced over all ranks. These steps warm up the
    outer momentum as in Pier (arXiv 2511.17849): a fragment that is due keeps its weights, and how much they have
    changed since it was last due enters its momentum. Changes after its last turn in these steps are left out.

    Args:
        every: Optimizer steps between two exchanges of a fragment.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Outer momentum, in [0, 1); DiLoCo's is 0.9. ``"auto"`` chooses it for each exchange of a
            fragment by the correlation of the last changes: as large as possible, up to 0.9, without an outer step of
            more than 1.4 times the mean change. See [Note: Automatic momentum].
        codec: Codec of the changes, and of the update on the way back; None sends fp32.
        error_feedback: Error feedback on the codec, on both ways. Its ``reset_every`` counts exchanges here.
        spread: True spreads fragments over the ``every`` steps, so that each step sends about the same (arXiv
            2501.18512, section 2.2). False exchanges all of them after the last of these steps.
        overlap: Steps that an exchange may take to arrive, less than ``every``; the node trains on meanwhile.
        mix: Share of the agreed weights when a node mixes them with its own as an exchange arrives. With an
            overlap, arXiv 2501.18512, section 2.3, takes 0.5: 1 drops the steps made meanwhile. With 0, nodes keep
            their own weights until :func:`fsdp_zpp.exchange_weights`.
        offload: True keeps the agreed weights and the momentum on the CPU between exchanges. The CPU then waits for an
            exchange when it is sent, in spite of an overlap.
        start: Number of synchronous steps at the beginning.
        moments_every: Every ``moments_every``-th exchange of a fragment also averages its optimizer moments, as int8;
            None leaves each node its own. DES-LOC (arXiv 2505.22549) takes 3 with Adam. The next forward waits for this
            average, in spite of an overlap.
        elastic: Lets nodes be lost, and come back or join, while the others train on; each node is a job of its own.

    Raises:
        ValueError: If a number is out of range, the codec does not suit changes or lacks the error feedback that it
            needs, ``outer_lr`` is too high for the momentum ``"auto"``, error feedback has no codec to correct, or
            elastic nodes do not support an argument.
        TypeError: If a flag, the codec, error feedback or ``elastic`` has the wrong type.
    """

    every: int = 64
    outer_lr: float = 0.7
    outer_momentum: float | Literal["auto"] = "auto"
    codec: Codec | None = _INT4
    error_feedback: LoCo | None = None
    spread: bool = True
    overlap: int = 0
    mix: float = 1.0
    offload: bool = False
    start: int = 0
    moments_every: int | None = None
    elastic: Elastic | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.every, 1):
            raise ValueError(f"every must be an int of 1 or more optimizer steps, got {self.every!r}")
        if not _is_count(self.start, 0):
            raise ValueError(
                f"start must be an int of 0 or more synchronous steps at the beginning, got {self.start!r}"
            )
        if not _is_number(self.outer_lr) or not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"outer_lr must be a number above 0, got {self.outer_lr!r}")
        self._check_momentum()
        if not _is_count(self.overlap, 0) or self.overlap >= self.every:
            raise ValueError(
                f"overlap must be an int of 0 or more optimizer steps and below every={self.every}, so that an "
                f"exchange arrives before the next; got {self.overlap!r}"
            )
        if not _is_number(self.mix) or not 0 <= self.mix <= 1:
            raise ValueError(f"mix must be in [0, 1], got {self.mix!r}")
        if self.moments_every is not None and not _is_count(self.moments_every, 1):
            raise ValueError(
                "moments_every must be an int of 1 or more exchanges, or None, which leaves moments alone; got "
                f"{self.moments_every!r}"
            )
        for name in ("spread", "offload"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_codec()
        self._check_elastic()

    def _check_momentum(self) -> None:
        if self.outer_momentum == "auto":
            if self.outer_lr >= TARGET_GAIN:
                raise ValueError(
                    f"outer_momentum='auto' makes outer steps of up to {TARGET_GAIN} times the mean change, to which "
                    f"outer_lr={self.outer_lr} leaves no room for momentum: pass a lower outer_lr, or a number"
                )
        elif not _is_number(self.outer_momentum) or not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be 'auto' or in [0, 1), got {self.outer_momentum!r}")

    def _check_codec(self) -> None:
        check_codec("codec", self.codec, such_as="Int4(128)")
        check_place("codec", self.codec, "exchanges")
        check_loco(self.error_feedback)
        if self.error_feedback is None and self.codec is not None and self.codec.needs_feedback:
            raise ValueError(
                f"codec={self.codec!r} leaves out most of a change, which is lost without error feedback: pass "
                "error_feedback=LoCo(beta=0, decay=0.95, reset_every=0), with outer_lr=1 and outer_momentum=0 as in "
                "SparseLoCo"
            )
        if self.error_feedback is not None and self.codec is None:
            raise ValueError("error_feedback corrects the error of the codec, but codec=None has no error")

    def _check_elastic(self) -> None:
        if self.elastic is None:
            return
        if not isinstance(self.elastic, Elastic):
            raise TypeError(f"elastic must be Elastic(...) or None, got {self.elastic!r}")
        for name, unset in (("start", 0), ("moments_every", None)):
            if (given := getattr(self, name)) != unset:
                raise ValueError(
                    f"elastic nodes do not support {name}={given!r}, for which all nodes would have to be there: leave "
                    "it out"
                )
        if self.overlap:
            raise ValueError(
                f"overlap={self.overlap} leaves an exchange under way while nodes train on, which elastic nodes could "
                "not repeat without one that was lost: pass overlap=0"
            )

    def due(self, step: int, fragments: int) -> list[int]:
        """Return the fragments to exchange after ``step`` steps, counted from 1.

        Each fragment is due once in any ``every`` steps in a row.
        """
        every = self.every
        if not self.spread:
            return list(range(fragments)) if step % every == 0 else []
        # The last fragment is due in multiples of ``every``, so every=1 exchanges all fragments in each step.
        return [index for index in range(fragments) if (step - (index + 1) * every // fragments) % every == 0]

    def __str__(self) -> str:
        feedback = f" with error feedback ({self.error_feedback})" if self.error_feedback else ""
        sent = f"{self.codec or 'fp32'}{feedback}"
        arrives = f", arriving {self.overlap} step{'s' * (self.overlap > 1)} later" if self.overlap else ""
        mixed = f", mixed in at {self.mix}" if self.mix < 1 else ""
        started = f", after {self.start} synchronous step{'s' * (self.start > 1)}" if self.start else ""
        which = "each exchange" if self.moments_every == 1 else f"1 of {self.moments_every} exchanges"
        moments = "" if self.moments_every is None else f", moments in {which} as {MOMENT_CODEC}"
        members = f", among {self.elastic}" if self.elastic else ""
        outer = f"outer lr {self.outer_lr}, Nesterov momentum {self.outer_momentum}{arrives}{mixed}{moments}"
        return f"every {self.every} steps as {sent}, {outer}{started}{members}"


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# ---- outer momentum
#
# The gain of an outer step, and the momentum that leads to a chosen gain.
#
# Let g be the mean change of the nodes' weights, m the momentum kept before this exchange, and r = <m, g> / <g, g>.
# Along g, SGD with Nesterov momentum mu makes a step of lr * (1 + mu + mu^2 * r) times g: its aligned gain. If changes
# that are k exchanges apart correlate by rho^k, r settles at rho / (1 - mu * rho), and the gain at lr * (1 + mu / (1 -
# mu * rho)). If all changes are alike (rho = 1), the gain is lr / (1 - mu), as in arXiv 2509.10439.
#
# [Note: Automatic momentum]
# ``outer_momentum="auto"`` is the largest momentum whose settled gain is at most ``TARGET_GAIN``. It takes rho from the
# exchange before, since the host knows that already: to sum r over all ranks within an exchange, a communicator of the
# training would wait for the slow network. A negative rho counts by its absolute value: changes that point against each
# other show an overshoot, so their small gain is no reason for more momentum. Until there are two changes to compare,
# rho is 1.

# Target of "auto": in short runs, 1.4 gave the lowest loss among values of lr / (1 - mu) from 1.0 to 7. See
# docs/results/loss.md.
TARGET_GAIN = 1.4
MOST_MOMENTUM = 0.9  # the largest momentum that "auto" chooses, that of DiLoCo (arXiv 2311.08105)


def aligned_gain(lr: float, momentum: float, alignment: float) -> float:
    """Return the aligned gain: the length of an outer step along the mean change, as a multiple of that change.

    ``momentum`` is mu and ``alignment`` is r, as at the top of this section.
    """
    return lr * (1 + momentum + momentum**2 * alignment)


def correlation_of_changes(momentum: float, alignment: float) -> float:
    """Return the rho in [-1, 1] for which r settles at ``alignment``; for arguments see :func:`aligned_gain`."""
    ahead = 1 + momentum * alignment
    return max(-1.0, min(alignment / ahead, 1.0)) if ahead > 0 else -1.0


def fitting_momentum(lr: float, correlation: float) -> float:
    """Return the momentum that "auto" chooses for rho; ``lr`` is below ``TARGET_GAIN``."""
    room = TARGET_GAIN / lr - 1
    return min(MOST_MOMENTUM, room / (1 + room * abs(correlation)))


# ---- elastic
#
# Elastic nodes train by local steps. A node may be lost, and may come back or join, while the others train on.

ENDPOINT_VARIABLE = "FSDP_ZPP_ENDPOINT"  # gives the endpoint if the argument does not


@explains_keywords
@dataclass(frozen=True)
class Elastic:
    """Configures how elastic nodes meet, and how long they wait for a silent one.

    Each node is a job of its own (``torchrun --standalone``). Nodes meet in a rendezvous of torch.distributed.elastic
    (``DynamicRendezvousHandler``) over a ``TCPStore``, which must outlive every node: start it where no node runs.

    Args:
        max_nodes: The most nodes that train together. Further nodes wait, as spares, until one is lost.
        min_nodes: The fewest nodes that train. Fewer nodes wait for others.
        endpoint: ``host:port`` of the store; None takes it from the environment variable ``FSDP_ZPP_ENDPOINT``.
        run_id: The name of the run in the store. Every run on a store needs a name of its own, even after another run
            has ended; so does every model that trains separately.
        timeout: Seconds that a node waits for the others in an exchange; even the slowest must arrive in this time.
        heartbeat: Seconds between a node's heartbeats. A node that misses three counts as lost. Heartbeats carry the
            sender's time, so the clocks of nodes must differ by much less than three heartbeats.
        last_call: Seconds that nodes wait for more nodes once ``min_nodes`` have met; more than one second.
        join_timeout: Seconds that a node waits for the store and for admission. This must be longer than the time
            between two exchanges, and shorter than the timeout of the node's own process group.

    Raises:
        ValueError: If a number is out of range, or ``endpoint`` is not ``host:port``.
        TypeError: If a number of nodes is not an int, or ``endpoint`` or ``run_id`` is not text.
    """

    max_nodes: int
    min_nodes: int = 1
    endpoint: str | None = None
    run_id: str = "fsdp_zpp"
    timeout: float = 30.0
    heartbeat: float = 2.0
    last_call: float = 3.0
    join_timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in ("max_nodes", "min_nodes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int of 1 or more nodes, got {value!r}")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"min_nodes must be 1 or more and max_nodes no fewer, got min_nodes={self.min_nodes} and "
                f"max_nodes={self.max_nodes}"
            )
        if not isinstance(self.run_id, str) or not self.run_id:
            raise TypeError(f"run_id must be a text that is not empty, got {self.run_id!r}")
        if self.endpoint is not None:
            parse_endpoint(self.endpoint)
        for name, least in (("timeout", 0), ("heartbeat", 0), ("last_call", 1), ("join_timeout", 0)):
            value = getattr(self, name)
            if not _is_number(value) or not least < value < float("inf"):
                raise ValueError(f"{name} must be a number of seconds above {least}, got {value!r}")

    def address(self) -> tuple[str, int]:
        """Return host and port of the store, from the argument or the environment variable."""
        endpoint = self.endpoint or os.environ.get(ENDPOINT_VARIABLE)
        if not endpoint:
            raise ValueError(
                f"elastic nodes need the address of a store: pass Elastic(endpoint='host:port') or set "
                f"{ENDPOINT_VARIABLE}"
            )
        return parse_endpoint(endpoint)

    def __str__(self) -> str:
        at_least = f"{self.min_nodes} to " if self.min_nodes != self.max_nodes else ""
        return f"{at_least}{self.max_nodes} nodes that come and go"


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    if not isinstance(endpoint, str):
        raise TypeError(f"endpoint must be a text such as 'login1:29400', got {endpoint!r}")
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"endpoint must be host:port such as 'login1:29400', got {endpoint!r}")
    return host.strip("[]"), int(port)
