"""Quantized gradient reduction by itself: a communication hook for any FSDP model."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from .agreement import check_agreement
from .codec_state import RankState
from .codecs import Codec
from .error_feedback import LoCo
from .gradient_reduce import GradientReduce
from .hop import Traffic
from .strategy import check_error_feedback, check_gpus_per_node, check_hop_codec, finer_inside
from .support import launched_node_size
from .topology import process_mesh
from .unit_errors import UnitErrors


class QuantizedReduceState:
    """State of :func:`quantized_reduce_hook`: ZeRO++'s qgZ on a model with one of torch's own strategies.

    Making one is collective over ``process_group``. With error feedback it has a ``state_dict`` that belongs into
    checkpoints; see :class:`fsdp_zpp.CodecState`, which does the same for models with a strategy.

    Args:
        codec: Codec of the hop between nodes; None for full precision in two hops.
        intra_codec: Codec of the hop inside a node; ``"auto"`` is ``Int8`` with the same block.
        error_feedback: Error feedback on the codecs, one model a state.
        gpus_per_node: Consecutive ranks that share a node; default from torchrun (``LOCAL_WORLD_SIZE``).
        process_group: The group that the model is sharded over; default: all ranks.

    Raises:
        RuntimeError: If torch.distributed is not initialized.
        TypeError: If a codec is not a :class:`Codec`, or ``error_feedback`` not a :class:`LoCo`.
        ValueError: If the group can't be laid out on nodes of ``gpus_per_node``, or there is no codec for error
            feedback to correct.

    Example:
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
        intra = finer_inside(intra_codec, codec)
        for name, value in (("codec", codec), ("intra_codec", intra)):
            if value is not None and not isinstance(value, Codec):
                raise TypeError(f"{name} must be a codec such as Int4(128), or None, got {value!r}")
            check_hop_codec(name, value)
        check_error_feedback(error_feedback, "codec", intra, codec)
        check_gpus_per_node(gpus_per_node)
        if not dist.is_initialized():
            raise RuntimeError("QuantizedReduceState needs torch.distributed.init_process_group() first")
        self.process_group = process_group if process_group is not None else dist.group.WORLD
        assert self.process_group is not None
        self.traffic = Traffic()
        facts: dict[str, object] = {"codec": codec, "intra_codec": intra, "error_feedback": error_feedback}
        facts |= {"gpus_per_node": gpus_per_node or launched_node_size(self.process_group)}
        check_agreement(self.process_group, "QuantizedReduceState", facts)
        self.mesh = process_mesh(self.process_group, gpus_per_node)
        self.codecs = (intra, codec)
        self.error_feedback = error_feedback
        self._is_of_unit = False
        self._units: dict[str, UnitErrors] = {}
        self._reduce = self._reduction("comm hook")

    def _reduction(self, label: str) -> GradientReduce:
        return GradientReduce(self.mesh, *self.codecs, self.traffic, label, error_feedback=self.error_feedback)

    def of_unit(self, name: str) -> QuantizedReduceState:
        """A state of one unit of the model, for FSDP to hand to the hook: errors are a unit's own.

        Raises:
            ValueError: If there is one of that name, with errors.
        """
        if name in self._units:
            raise ValueError(
                "this QuantizedReduceState feeds back the errors of a model already; make one for each model"
            )
        unit = copy.copy(self)
        unit._is_of_unit = True
        unit._reduce = self._reduction(name)
        if unit._reduce.errors is not None:
            self._units[name] = unit._reduce.errors
        return unit

    @property
    def errors(self) -> UnitErrors | None:
        """The errors of this unit."""
        return self._reduce.errors

    def error_nbytes(self, numel: int) -> int:
        """Bytes of the errors of a unit of which a rank keeps ``numel`` values."""
        return self._reduce.error_nbytes(numel)

    def reduce(self, gradient: Tensor, out: Tensor) -> None:
        """Reduce as :class:`GradientReduce` does.

        Raises:
            RuntimeError: If errors are to be fed back, but whose gradient this is was never said.
        """
        if self.errors is not None and not self._is_of_unit:
            raise RuntimeError(
                "error feedback keeps errors for each unit of a model, so the QuantizedReduceState itself must be "
                "what is passed to model.register_comm_hook"
            )
        self._reduce(gradient, out)

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors; see :class:`fsdp_zpp.CodecState`. Empty before ``register_comm_hook``."""
        return RankState(self._units, [self.mesh]).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, after ``register_comm_hook``.

        Raises:
            ValueError: If the errors were saved under another configuration.
        """
        RankState(self._units, [self.mesh]).load_state_dict(state)


def quantized_reduce_hook(state: QuantizedReduceState, gradient: Tensor, out: Tensor | None = None) -> None:
    """Reduce an FSDP unit's gradient in two quantized hops; see :class:`QuantizedReduceState`.

    Args:
        state: The hook's state.
        gradient: The unit's unsharded gradient, padded to a multiple of the world size, flat.
        out: Receives the mean of this rank's shard. FSDP gives none for units that it does not shard.

    Raises:
        TypeError: If ``state`` is not a :class:`QuantizedReduceState`.
        ValueError: If the unit is sharded over another group than the state's, or not sharded over several ranks.
    """
    if not isinstance(state, QuantizedReduceState):
        raise TypeError(f"quantized_reduce_hook needs a QuantizedReduceState, got {type(state).__name__}")
    if out is not None:
        state.reduce(gradient, out)
    elif state.mesh.topology.world > 1:
        raise ValueError(
            f"quantized_reduce_hook reduces to shards, but FSDP does not shard this unit over the state's "
            f"{state.mesh.topology.world} ranks (NO_SHARD); use FULL_SHARD or SHARD_GRAD_OP"
        )
