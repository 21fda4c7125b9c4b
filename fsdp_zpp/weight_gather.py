"""The two-hop all-gather of weights, and the secondary shard that its first hop leaves behind.

[Note: The secondary shard]
Weights are encoded once, from the full-precision shard, and gathered between nodes among ranks of the same
local index; what that leaves on a rank, nodes x payload, is the *secondary shard*. The second hop gathers it
inside the node. Kept, still encoded, the secondary shard is ZeRO++'s hpZ: later gathers start at the second
hop and send nothing between nodes. All ranks, the owner too, decode the same bytes, so they compute with the
same weights bit for bit.

[Note: Staleness]
A kept secondary shard is stale once the weights have changed. Ranks that disagree on that would enter
different collectives and hang, so staleness is told by events that all ranks share (``invalidate``), never by
looking at the shard: a rank whose shard is all padding sees no write. Looking at the shard serves as a check
only: if the caller's ``version`` of the shard differs from the one that was encoded, something wrote to the
weights without an event, and the gather raises rather than compute with old weights. That error is local: ranks
that saw no write wait for this one until their process group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .codecs import Codec, FullPrecision
from .hop import Hop, Traffic, hop_over
from .labels import labelled
from .loaded_shard import LoadedShard, fingerprint
from .topology import ProcessMesh
from .weight_difference import Int4Delta


class StaleSecondaryError(RuntimeError):
    """The weights were written to in a way that no event announced."""


@dataclass(frozen=True)
class FirstHop:
    """What a unit sends between nodes.

    Args:
        hop: Over which; None if there is nothing to be sent.
        payload: This rank's, uint8 [1, nbytes]; without a hop, what it would leave.
        label: Names the unit in profiles.
        complete: Takes what all have sent, uint8 [nodes, nbytes].
    """

    hop: Hop | None
    payload: Tensor
    label: str
    complete: Callable[[Tensor], None]

    def make(self) -> None:
        """Send it. Collective."""
        self.complete(self.payload if self.hop is None else self.hop.all_gather(self.payload, self.label))


class FirstHops(Protocol):
    """Makes the first hops of several units; see [Note: First hops ahead] in first_hops.py."""

    def needed(self, gather: WeightGather, begin: Callable[[], FirstHop], device: torch.device) -> None: ...

    def used(self, gather: WeightGather) -> None: ...


class WeightGather:
    """All-gathers one flat shard over a mesh in two hops.

    Args:
        mesh: The ranks.
        codec: Encodes the weights for both hops; None sends them in the dtype of the output. For an
            :class:`Int4Delta` see [Note: Weight differences] in weight_difference.py.
        keep_secondary: Keep the secondary shard from one call to the next, until :meth:`invalidate`.
        traffic: Where bytes are counted.
        label: Names the unit in profiles and errors.

    Attributes:
        first_hops: Makes this unit's first hop among those of others, ahead of its use; None if it makes it itself.
        shard_ahead: Returns the shard that a gather would get now, and its version; None if they are not known.
    """

    first_hops: FirstHops | None = None
    shard_ahead: Callable[[], tuple[Tensor, Hashable] | None] | None = None

    def __init__(
        self,
        mesh: ProcessMesh,
        codec: Codec | None,
        keep_secondary: bool,
        traffic: Traffic,
        label: str = "unit",
    ) -> None:
        self.codec = codec
        self.label = label
        # Without a second node there is no hop to save, so keeping the result of the first is of no use.
        self.keep_secondary = keep_secondary and mesh.inter is not None
        self._topology = mesh.topology
        self._inter = hop_over(mesh.inter, "gather", "inter", traffic)
        self._intra = hop_over(mesh.intra, "gather", "intra", traffic)
        self._own_node = mesh.rank // mesh.topology.gpus_per_node
        self._secondary: Tensor | None = None
        self._before: Tensor | None = None  # what a difference can be against
        self._loaded: LoadedShard | None = None
        self._encoded: tuple[Codec, Hashable] | None = None
        self._last_codec: Codec | None = None
        self._ready: torch.cuda.Event | None = None  # the secondary shard, if it is made in another stream

    @property
    def secondary_nbytes(self) -> int:
        """Bytes held by the secondary shard."""
        return 0 if self._secondary is None else self._secondary.nbytes

    def invalidate(self, *, by_step: bool = False) -> None:
        """Declare the secondary shard stale; to be called on all ranks. See [Note: Staleness].

        Args:
            by_step: Whether the weights have changed by a step only, and so by little.
        """
        if not by_step or not self.sends_differences:
            self._before = None
        elif self._secondary is not None:
            self._before = self._secondary
        self._secondary = None
        self._encoded = None

    @property
    def has_first_hop(self) -> bool:
        """Whether there are several nodes to gather from."""
        return self._inter is not None

    @property
    def stale(self) -> bool:
        """Whether the weights have changed since they were gathered between nodes."""
        return self._encoded is None

    @property
    def next_codec(self) -> Codec | None:
        """What will encode full-precision weights for the next gather, if that is known by now."""
        codec = self.codec or self._last_codec
        # Parameters of several dtypes go as bytes, which are not to be had from the shard.
        bytes_only = isinstance(codec, FullPrecision) and not codec.dtype.is_floating_point
        return None if bytes_only else codec

    @property
    def sends_differences(self) -> bool:
        """Whether changes of the weights go between nodes by themselves."""
        return isinstance(self.codec, Int4Delta) and self.keep_secondary

    def same_weights(self, before: Hashable, after: Hashable) -> None:
        """Declare that the change of version from ``before`` to ``after`` was no change of the shard."""
        if self._encoded is not None and self._encoded[1] == before:
            self._encoded = self._encoded[0], after

    def check_unchanged(self, version: Hashable) -> None:
        """Raise if the shard's version is not the one that was gathered last.

        Raises:
            StaleSecondaryError: If it is another, with no event in between.
        """
        if self._encoded is not None and self._encoded[1] != version:
            raise StaleSecondaryError(
                f"the weights of {self.label} were changed outside of an optimizer step, load_state_dict or "
                "summon_full_params(writeback=True), or in a forward that had begun to send them, so what other ranks "
                "have of them is out of date; after such a change, call fsdp_zpp.invalidate(model) on every rank"
            )

    @torch.no_grad()
    def __call__(self, shard: Tensor, out: Tensor, version: Hashable = None) -> None:
        """Gather every rank's ``shard`` into ``out``.

        Args:
            shard: This rank's full-precision values, flat [numel], the same numel on every rank.
            out: Flat [world * numel], in any float dtype; chunk i receives rank i's shard.
            version: Identifies the state of ``shard``; compared while the secondary shard is reused.

        Raises:
            ValueError: If the sizes do not fit, before any communication.
            StaleSecondaryError: If the secondary shard is reused but ``version`` has changed.
        """
        if out.numel() != self._topology.world * shard.numel():
            raise ValueError(
                f"{self.label}: a gather of {shard.numel()} values over {self._topology.world} ranks needs an output "
                f"of {self._topology.world * shard.numel()} values, got {out.numel()}"
            )
        codec = self.codec or FullPrecision(out.dtype)
        payload = self._secondary_shard(shard, codec, version)
        if self._intra is not None:
            payload = self._intra.all_gather(payload, self.label)
        with labelled("decode", self.label):
            codec.decode(payload, out, rows=self._topology.gpus_per_node, cols=self._topology.nodes)

    def _secondary_shard(self, shard: Tensor, codec: Codec, version: Hashable) -> Tensor:
        """The shards of all ranks with this local index, encoded: uint8 [nodes, nbytes]."""
        if self._secondary is not None and self._encoded is not None and self._encoded[0] == codec:
            self.check_unchanged(version)
        elif self.first_hops is not None:
            self.first_hops.needed(self, lambda: self.begin_first_hop(shard, codec, version), shard.device)
        else:
            self.begin_first_hop(shard, codec, version).make()
        payload = self._secondary
        assert payload is not None
        if self._ready is not None:
            torch.cuda.current_stream(payload.device).wait_event(self._ready)
        if self.first_hops is not None:
            self.first_hops.used(self)
        if not self.keep_secondary:
            self._secondary = None
            _read_here(payload)
        return payload

    @torch.no_grad()
    def begin_first_hop(self, shard: Tensor, codec: Codec, version: Hashable) -> FirstHop:
        """Encode ``shard`` for the hop between nodes, in the current stream. Collective after a checkpoint was loaded.

        Args:
            shard: As in :meth:`__call__`.
            codec: What encodes it.
            version: As in :meth:`__call__`.

        Returns:
            What is to be sent, in the same stream.
        """

        def complete(secondary: Tensor) -> None:
            self._encoded, self._secondary, self._last_codec = (codec, version), secondary, codec
            in_another_stream = self.first_hops is not None and secondary.is_cuda
            self._ready = torch.cuda.current_stream(secondary.device).record_event() if in_another_stream else None

        before, up_to_date = self._take_what_is_held(shard, codec)
        if before is not None and up_to_date:
            return FirstHop(None, before, self.label, complete)
        with labelled("encode", self.label):
            if before is None or not isinstance(codec, Int4Delta):
                return FirstHop(self._inter, codec.encode(shard, 1, 1), self.label, complete)
            held, change = before, codec.difference(before, self._own_node, shard)
        return FirstHop(
            self._inter, change, self.label, lambda all_: complete(codec.renewed(held, all_, shard.numel()))
        )

    def _take_what_is_held(self, shard: Tensor, codec: Codec) -> tuple[Tensor | None, bool]:
        """An older secondary shard to send a difference to, if there is one, and whether it is of the weights as is."""
        before, loaded = self._before, self._loaded
        self._before = self._loaded = None
        if before is not None:
            _read_here(before)
        if loaded is None or self._inter is None or not self.sends_differences:
            return before, False
        # See [Note: Weights of a checkpoint] in loaded_shard.py.
        fits = torch.tensor([[loaded.is_of(shard, codec.nbytes(shard.numel()))]], dtype=torch.uint8)
        rows = self._inter.all_gather(torch.cat((loaded.row, fits), dim=1).to(shard.device), self.label)
        return (rows[:, :-1].contiguous(), loaded.fresh) if rows[:, -1].all() else (None, False)

    # ---- in checkpoints

    def reset(self) -> None:
        """Send the weights whole when they are gathered next."""
        self._loaded = None
        self.invalidate()

    def state_dict(self) -> dict[str, Any]:
        """This rank's row of the secondary shard that differences are made against, on the CPU."""
        if (loaded := self._loaded) is not None:
            return {"row": loaded.row.clone(), "fresh": loaded.fresh, "fingerprint": loaded.fingerprint}
        held = self._secondary if self._secondary is not None else self._before
        if held is None:
            return {"row": None, "fresh": False, "fingerprint": None}
        if self._ready is not None:
            self._ready.synchronize()
        row = held[self._own_node : self._own_node + 1].cpu().clone()
        now = None if self.shard_ahead is None else self.shard_ahead()
        return {
            "row": row,
            "fresh": self._secondary is not None,
            "fingerprint": None if now is None else fingerprint(now[0]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, be the weights loaded before or after."""
        self.reset()
        if (row := state["row"]) is not None:
            self._loaded = LoadedShard(row.cpu(), state["fresh"], state.get("fingerprint"))


def _read_here(payload: Tensor) -> None:
    """Keep memory that nobody holds from now on until the current stream has read it; another one may have made it."""
    if payload.is_cuda:
        payload.record_stream(torch.cuda.current_stream(payload.device))
