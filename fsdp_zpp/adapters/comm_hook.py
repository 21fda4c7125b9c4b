"""Quantized gradient reduction by itself: a communication hook for any FSDP model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from fsdp_zpp.codecs.base import Codec, check_codec, check_place
from fsdp_zpp.collectives.agreement import agree, check_agreement
from fsdp_zpp.collectives.error_state import ErrorFeedbackState
from fsdp_zpp.collectives.flat_layout import FlatLayout
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.links import find_links
from fsdp_zpp.collectives.mesh import ProcessMesh, mesh_on, process_mesh
from fsdp_zpp.config.error_feedback import LoCo, check_error_feedback
from fsdp_zpp.config.resolve import intra_node_codec
from fsdp_zpp.config.strategy import check_gpus_per_node
from fsdp_zpp.runtime.checkpoint import RankState
from fsdp_zpp.runtime.rank_layout import joined_by_links, node_size_fact
from fsdp_zpp.suggestions import explains_keywords


@explains_keywords
class QuantizedReduceState:
    """State of ``quantized_reduce_hook``: ZeRO++'s qgZ on a model with one of torch's own strategies.

    Constructing one is collective over ``process_group``. With error feedback, its ``state_dict`` belongs in
    checkpoints; ``fsdp_zpp.CodecState`` is the same for models with a strategy.

    Args:
        codec: Codec of the inter-node hop; None for full precision in two hops.
        intra_codec: Codec of the intra-node hop; ``"auto"`` is ``Int8`` with the same block.
        error_feedback: Error feedback on the codecs. A state that has it serves one model only.
        gpus_per_node: Consecutive ranks that share fast links. Default: as for ``Strategy.zeropp()``, or with
            error feedback as for ``Strategy.loco()``.
        process_group: The group that the model is sharded over. Default: all ranks.

    Raises:
        RuntimeError: If torch.distributed is not initialized.
        TypeError: If a codec is not a ``Codec``, or ``error_feedback`` is not a ``LoCo``.
        ValueError: If the group can't be laid out on nodes of ``gpus_per_node``, if ranks pass different arguments, or
            if ``error_feedback`` has no codec whose errors it could feed back.

    Examples:
        >>> model = FullyShardedDataParallel(model)
        >>> model.register_comm_hook(QuantizedReduceState(Int4(128), gpus_per_node=8), quantized_reduce_hook)
    """

    def __init__(
        self,
        codec: Codec | None,
        *,
        intra_codec: Codec | Literal["auto"] | None = "auto",
        error_feedback: LoCo | None = None,
        gpus_per_node: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "there is no process group for QuantizedReduceState; call torch.distributed.init_process_group() first"
            )
        self.process_group = process_group if process_group is not None else dist.group.WORLD
        assert self.process_group is not None
        intra = agree(self.process_group, lambda: _checked(codec, intra_codec, error_feedback, gpus_per_node))
        self.traffic = Traffic()
        facts: dict[str, object] = {"codec": codec, "intra_codec": intra, "error_feedback": error_feedback}
        facts |= {"gpus_per_node": node_size_fact(gpus_per_node, self.process_group)}
        # Before links are asked and process groups are made: ranks with different node sizes would hang in either.
        check_agreement(self.process_group, "QuantizedReduceState", facts)
        self.mesh = _mesh_of(self.process_group, gpus_per_node, gains=codec is not None and error_feedback is None)
        self.codecs = (intra, codec)
        self.error_feedback = error_feedback
        self._is_of_unit = False
        self._layout: Callable[[int], FlatLayout] | None = None
        self._units: dict[str, ErrorFeedbackState] = {}
        self._reduce = self._reduction("comm hook")

    def _reduction(self, label: str) -> GradientReduce:
        return GradientReduce(self.mesh, *self.codecs, self.traffic, label, error_feedback=self.error_feedback)

    def of_unit(self, name: str, layout: Callable[[int], FlatLayout] | None = None) -> QuantizedReduceState:
        """Make a state for one unit of the model, for FSDP to pass to the hook: each unit has errors of its own.

        Args:
            name: The unit's name.
            layout: Returns where parameters lie in the unit's flat gradient, given its size.

        Raises:
            ValueError: If a state of that name exists already and has errors.
        """
        if name in self._units:
            raise ValueError(
                "this QuantizedReduceState already feeds back the errors of a model; make another one for each model"
            )
        unit = copy.copy(self)  # shallow: all units count into one Traffic
        unit._is_of_unit, unit._layout = True, layout
        unit._reduce = self._reduction(name)
        if unit._reduce.errors is not None:
            self._units[name] = unit._reduce.errors
        return unit

    @property
    def errors(self) -> ErrorFeedbackState | None:
        """Error state of this unit; None without error feedback."""
        return self._reduce.errors

    def error_nbytes(self, numel: int) -> int:
        """Return the bytes of error state on this rank, for a unit of which it keeps a shard of ``numel`` values."""
        return self._reduce.error_nbytes(numel)

    def reduce(self, gradient: Tensor, out: Tensor) -> None:
        """Reduce a unit's gradient, as ``quantized_reduce_hook`` describes.

        Raises:
            RuntimeError: If errors are fed back, but this is not the state of one unit.
        """
        # FSDP passes the hook no unit. register_comm_hook gives each unit a state of its own, but it sees only a
        # QuantizedReduceState, not one that a user's hook wraps; errors of different units would then mix.
        if self.errors is not None and not self._is_of_unit:
            raise RuntimeError(
                "error feedback keeps errors for each unit of a model, but this QuantizedReduceState was not passed to "
                "model.register_comm_hook; pass the state itself there, together with quantized_reduce_hook"
            )
        layout = None if self._layout is None else self._layout(gradient.numel())
        self._reduce.start(gradient, out, layout=layout).finish()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's errors; see ``fsdp_zpp.CodecState``. There are none before ``register_comm_hook``."""
        return self._rank_state().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned; call it after ``register_comm_hook``.

        Raises:
            ValueError: If the errors were saved under another configuration.
        """
        self._rank_state().load_state_dict(state)

    def _rank_state(self) -> RankState:
        return RankState(self._units, [self.mesh], warns=self.mesh.rank == 0)


def _checked(
    codec: Codec | None,
    intra_codec: Codec | Literal["auto"] | None,
    error_feedback: LoCo | None,
    gpus_per_node: int | None,
) -> Codec | None:
    """Check all arguments, and return the codec of the intra-node hop."""
    intra = intra_node_codec(intra_codec, codec)  # first, since the checks below are for codecs, not for "auto"
    for name, value in (("codec", codec), ("intra_codec", intra)):
        check_codec(name, value, such_as="Int4(128)")
        check_place(name, value, "gradients")
    check_error_feedback(error_feedback, "codec", intra, codec)
    check_gpus_per_node(gpus_per_node)
    return intra


def _mesh_of(group: dist.ProcessGroup, gpus_per_node: int | None, gains: bool) -> ProcessMesh:
    """Return the mesh of a hook. Like a strategy, it follows links if it gains by that at little cost. Collective."""
    if gpus_per_node is None and gains:
        find_links(group)
        if (joined := joined_by_links(group)) is not None:
            return mesh_on(group, joined, by_links=True)
    return process_mesh(group, gpus_per_node)


def quantized_reduce_hook(state: QuantizedReduceState, gradient: Tensor, out: Tensor | None = None) -> None:
    """Reduce an FSDP unit's gradient in two quantized hops; see ``QuantizedReduceState``.

    Args:
        state: The hook's state.
        gradient: The unit's unsharded gradient, flat [world * numel], padded to a multiple of the world size.
        out: Receives the mean over all ranks of this rank's chunk, flat [numel]. FSDP passes none for units that it
            does not shard.

    Raises:
        TypeError: If ``state`` is not a ``QuantizedReduceState``.
        ValueError: If FSDP does not shard the unit, but the state has several ranks.
    """
    if not isinstance(state, QuantizedReduceState):
        raise TypeError(f"quantized_reduce_hook needs a QuantizedReduceState, got {type(state).__name__}")
    if out is not None:
        state.reduce(gradient, out)
    elif state.mesh.topology.world > 1:  # on one rank the gradient is its own mean, and torch has it in place
        raise ValueError(
            f"quantized_reduce_hook reduces to shards, but FSDP does not shard this unit over the state's "
            f"{state.mesh.topology.world} ranks (NO_SHARD); use FULL_SHARD or SHARD_GRAD_OP"
        )
