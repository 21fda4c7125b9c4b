"""A unit as a fragment of local-update training: its exchanges, and the state that differs between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_zpp.collectives.node_share import NodeShare
from fsdp_zpp.collectives.outer_step import OuterStep
from fsdp_zpp.config.local_steps import LocalSteps


@dataclass
class Progress:
    """How far a fragment's training has come, in steps; see [Note: Steps of nodes] in local_training.py.

    Attributes:
        made: Steps made.
        exchanged: How many of these have had their exchanges made.
        arrives: The step after which the exchange under way is received; None if there is none.
    """

    made: int = 0
    exchanged: int = 0
    arrives: int | None = None


class Fragment:
    """The weights of a unit, which nodes train on their own and exchange.

    Args:
        config: When and how.
        outer: Makes its exchanges.
        share: This rank's share of them, if all ranks of a node hold the same weights.
        trained_shards: Returns what this rank holds of the weights.
        invalidate: Marks the weights as changed.

    Attributes:
        config: As given.
        outer: As given.
        progress: How far its training has come.
        pending: By what it is of, state that was loaded besides this and is restored with it, and how.
        was_reloaded: Whether weights were loaded since it was last asked, and no state with them.
    """

    def __init__(
        self,
        config: LocalSteps,
        outer: OuterStep,
        share: NodeShare | None,
        trained_shards: Callable[[], Sequence[Tensor]],
        invalidate: Callable[[], None],
    ) -> None:
        self.config, self.outer, self.progress = config, outer, Progress()
        self.pending: dict[int, tuple[Any, Callable[[Any], None]]] = {}
        self._own: list[Tensor] | None = None
        self._share, self._trained_shards, self._invalidate = share, trained_shards, invalidate
        self._loaded: dict[str, Any] | None = None
        self.was_reloaded = False

    @property
    def is_trainable(self) -> bool:
        """Whether it has weights that require gradients; the same on all ranks."""
        return len(self._trained_shards()) > 0

    @property
    def _exchanged(self) -> Sequence[Tensor]:
        """What this rank exchanges of the weights."""
        whole = self._trained_shards()
        return whole if self._share is None else self._share.of(whole)

    def start(self) -> None:
        """Adopt the weights as the agreed ones, which all nodes must hold alike."""
        self.outer.start(self._exchanged)

    @property
    def weights(self) -> Sequence[Tensor]:
        """What this rank holds of the weights."""
        return self._trained_shards()

    @property
    def holds_agreed(self) -> bool:
        """Whether this rank's weights are the agreed ones."""
        return self.outer.agrees_with(self._exchanged)

    def restart(self) -> None:
        """Adopt the weights as the agreed ones, and forget all exchanges."""
        self.outer.reset()
        self.start()
        self.progress.arrives = None

    def send(self, arrives: int) -> None:
        """Send what the weights have changed, to be received after the step ``arrives``."""
        self.outer.send(self._exchanged)
        self.progress.arrives = arrives

    def receive(self, mix: float) -> None:
        """Go on from the agreed weights, or from a mixture of these and this node's own."""
        self.outer.receive(self._exchanged, mix)
        self._after_write()
        self.progress.arrives = None

    def _after_write(self) -> None:
        if self._share is not None:
            self._share.gather(self._trained_shards(), self.outer.label)
        self._invalidate()

    @contextmanager
    def showing_agreed(self) -> Iterator[None]:
        """Have the agreed weights in place of this node's own. Collective over the node."""
        self._own = [shard.detach().clone() for shard in self._trained_shards()]
        self.outer.receive(self._exchanged)
        self._after_write()
        try:
            yield
        finally:
            self._write(self._own)
            self._own = None

    @torch.no_grad()
    def _write(self, own: Sequence[Tensor]) -> None:
        for shard, kept in zip(self._trained_shards(), own, strict=True):
            shard.copy_(kept)
        self._invalidate()

    def weights_loaded(self) -> None:
        """Handle weights that were loaded, which a state that was loaded with them replaces."""
        self.was_reloaded = self._loaded is None and self.outer.has_started

    # ---- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The progress, the state of the exchanges, and this rank's weights, which other nodes do not have."""
        if self._loaded is not None:
            return self._loaded
        # This node's own, also while the agreed ones are shown.
        held = self._trained_shards() if self._own is None else self._own
        own = [shard.detach().to("cpu", copy=True) for shard in held]
        exchanges = self.outer.state_dict() if self.outer.has_started else None
        return {"progress": asdict(self.progress), "exchanges": exchanges, "weights": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, from the next forward on.

        Raises:
            ValueError: If it was saved for other weights.
        """
        found, saved = ([list(shard.shape) for shard in of] for of in (self._trained_shards(), state["weights"]))
        if found != saved:
            raise ValueError(
                f"{self.outer.label}: the checkpoint has weights of shapes {saved}, but this rank trains {found}"
            )
        # Not at once: a model's state dict may be loaded after this, with weights of whatever node has saved it.
        self._loaded = state
        self.progress = Progress(**state["progress"])

    def restore(self) -> None:
        """Go on with what was loaded, if anything was."""
        if (state := self._loaded) is None:
            return
        self._loaded = None
        self._write(state["weights"])
        if state["exchanges"] is not None:
            self.outer.load_state_dict(state["exchanges"], self._exchanged)
        for value, restore in self.pending.values():
            restore(value)
        self.pending.clear()

    def reset(self) -> None:
        """Start over from the weights of the next forward."""
        self._loaded, self.progress = None, Progress()
        self.pending.clear()
        self.outer.reset()
