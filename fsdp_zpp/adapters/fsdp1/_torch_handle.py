"""Private names of torch's flat parameters: a handle that gathers and reduces through a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp.adapters._torch_shard_version import ShardVersion
from fsdp_zpp.collectives.flat_layout import FlatLayout
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.reduction_order import ReductionOrder
from fsdp_zpp.collectives.secondary_shard import ShardValues
from fsdp_zpp.collectives.weight_gather import WeightGather
from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch import HandleTrainingState, no_dispatch_record_stream, runtime_utils
from ._torch_flat_layout import FlatParameterLayout
from ._torch_views import ViewingHandle


class StrategyHandle(ViewingHandle):
    """A flat parameter's handle that gathers and reduces through a strategy.

    Made by :func:`_torch_adoption.adopt_handle` from the handle that torch built. Whatever asks for full precision
    (state dicts, ``summon_full_params``, evaluation under FSDP_USE_FULL_PREC_IN_EVAL) is left to torch's own gather.

    Attributes:
        state: The instance of FSDP.
        mesh: The ranks over which the model is sharded.
        reduction: Reduces the gradients; None leaves it to torch.
        order: The order in which the model's units reduce; None before the first forward.
        written_back: Called after parameters were written to the shard, or moved.
        parameter_layout: Where its parameters lie.
        unreduced: Whether a unit that is not sharded has gradients that nothing has reduced.
        took_part: Whether ranks have gathered it in an earlier micro-batch of the step.
        used_in_step: Whether this rank has used it in the step.
    """

    state: Any
    mesh: ProcessMesh
    reduction: GradientReduce | None
    order: ReductionOrder[StrategyHandle] | None
    written_back: Callable[[], None]
    unreduced: bool
    took_part: bool
    used_in_step: bool
    _gather: WeightGather | None
    _gather_is_lossy: bool
    _keep_unsharded: bool
    _was_gathered: bool
    _holds_decoded_weights: bool
    _version: ShardVersion
    parameter_layout: FlatParameterLayout
    _version_at_summon: Hashable

    def adopt(self, state: FullyShardedDataParallel, unit: StrategyUnit, layout: FlatParameterLayout) -> None:
        """Initialize the attributes of this class, for ``unit`` to gather and reduce."""
        self.parameter_layout = layout
        self._zero_padding()
        self.state, self.mesh, self.reduction, self.order = state, unit.mesh, unit.reduce, None
        self.written_back = unit.invalidate
        self._gather, self._keep_unsharded = unit.gather, unit.keep_unsharded
        self._gather_is_lossy = unit.gather is not None and unit.gather.secondary.codec is not None
        self._holds_decoded_weights, self._version_at_summon = False, None
        self._version = ShardVersion()
        self.unreduced, self.took_part, self.used_in_step, self._was_gathered = False, False, False, False
        self.prepare_views()

    def _zero_padding(self) -> None:
        # FSDP fills the gaps that align parameters with 42s, which would ruin the scale of the blocks they are in.
        shard = self.flat_param.data
        layout, first = self.parameter_layout.around(shard)
        for start, stop in layout.gaps:
            if stop > first:
                shard[max(start - first, 0) : stop - first].zero_()

    def _wants_full_precision(self) -> bool:
        summoned = self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS
        return summoned or self._force_full_precision

    def pre_unshard(self) -> bool:
        unsharding = super().pre_unshard()
        # Only now: super() has copied replaced parameters to the shard, which counts as a write.
        if self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS:
            self._version_at_summon = self.shard_version()
        return unsharding

    def unshard(self) -> None:
        if self._keep_unsharded and self._holds_decoded_weights and not self._wants_full_precision():
            assert self._gather is not None
            if not self.needs_unshard():
                self._gather.secondary.check_version(self.shard_version())
        super().unshard()

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        summoned = self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS
        # Parameter scope N keeps what was gathered until the weights change; weights_changed() frees it then.
        super().reshard(free_unsharded_flat_param and (summoned or not self._keep_unsharded))
        if summoned and self._gather is not None:
            # Edits of summoned parameters count as writes to them, but are not of the shard unless written back.
            self._gather.secondary.rebase_version(self._version_at_summon, self.shard_version())

    def needs_unshard(self) -> bool:
        # FSDP keeps the root unsharded from forward to backward, and after a forward without backward. A summon
        # in between would take those decoded weights for the true ones, and even write them back.
        if (
            self._holds_decoded_weights
            and self._gather_is_lossy
            and self._wants_full_precision()
            and not self._uses_param_mixed_precision  # else full precision has a buffer of its own
        ):
            if self._prefetched:
                self._leave_prefetched()
            self._free_unsharded_flat_param()
            self._holds_decoded_weights = False
        return super().needs_unshard()

    def _use_low_precision_shard(self) -> None:
        if self._gather is None:
            super()._use_low_precision_shard()
        # The strategy encodes the full-precision shard itself, so there is no 16-bit copy of it to be made.
        else:
            self.flat_param.data = self.flat_param._local_shard.to(self.device, non_blocking=True)

    def _free_low_precision_sharded_param(self) -> None:
        if self._gather is None:
            super()._free_low_precision_sharded_param()

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        self._was_gathered = True
        if self._gather is None or self._wants_full_precision():
            self._holds_decoded_weights = False
            return super()._all_gather_flat_param(padded_unsharded_flat_param)
        shard = self.flat_param.data
        if shard.dtype != (dtype := self.flat_param._local_shard.dtype):
            raise ValueError(
                f"the parameters of {type(self._fully_sharded_module).__name__} were cast from {dtype} to "
                f"{shard.dtype} after their first forward, which FullyShardedDataParallel can't gather; cast a model "
                "before its first forward, or pass mixed_precision=MixedPrecision(param_dtype=...) instead"
            )
        self._gather(shard, padded_unsharded_flat_param, self.shard_version())
        self._holds_decoded_weights = True
        if self._offload_params:  # the copy on the device goes when this returns, and the encoding may still read it
            no_dispatch_record_stream(shard, self._device_handle.current_stream())
        return padded_unsharded_flat_param

    @property
    def reduces_early(self) -> bool:
        """Whether a micro-batch that is not the last reduces, as far as the gradient scope says."""
        # Without shards, FSDP accumulates in the unsharded gradient, which is what the optimizer will see.
        return self.uses_sharded_strategy and self.reduction is not None

    @property
    def is_of_micro_batch(self) -> bool:
        """Whether ranks have gathered it for this micro-batch, used or not; the same on all of them."""
        kept = self._keep_unsharded and not super().needs_unshard()
        return self.reduces_early and self.flat_param.requires_grad and (self._was_gathered or kept)

    @property
    def takes_part(self) -> bool:
        """Whether it is of this micro-batch, and has hops to make before the last one."""
        return self.reduction is not None and self.reduction.communicates_early and self.is_of_micro_batch

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        dtype = self._orig_param_dtype if self._force_full_precision else self._reduce_dtype
        assert dtype is not None
        return dtype

    def accumulate(self, gradient: Tensor) -> None:
        """Reduce the gradient of a micro-batch that is not the last, as far as the gradient scope says."""
        assert self.reduction is not None
        self.reduction.accumulate(gradient, self._gradient_layout(gradient)).finish()

    def reduce(self, gradient: Tensor, out: Tensor) -> None:
        """Write this rank's part of the mean of ``gradient`` to ``out``, with what was accumulated."""
        assert self.reduction is not None
        self.reduction.start(gradient, out, 1.0, self._gradient_layout(gradient)).finish()
        if out is gradient:  # nothing is sharded
            # FSDP adds the next gradient to this tensor, and all is encoded together. What overflows takes its whole
            # blocks along, of which zero_grad(set_to_none=False) clears only the gradients that parameters show.
            for start, stop in self.parameter_layout.trained(out.shape[0]).gaps:
                out[start:stop].zero_()

    def _gradient_layout(self, gradient: Tensor) -> FlatLayout:
        # Only errors are to know which parameters are frozen.
        knows_frozen = self.reduction is not None and self.reduction.errors is not None
        return (self.parameter_layout.trained if knows_frozen else self.parameter_layout.whole)(gradient.shape[0])

    def end_backward(self, synchronized: bool) -> None:
        """The backward is over."""
        self._was_gathered = False
        if synchronized:
            self.took_part, self.used_in_step = False, False

    def weights_changed(self, by_step: bool) -> None:
        """Between forwards, have the next one gather anew what FSDP still keeps unsharded.

        That is the root, and units that a forward has prefetched and not run.
        """
        initialized = hasattr(self.flat_param, "_full_param_padded")
        # What is prefetched counts as idle, but a backward that runs (with optimizers in it) is about to use it.
        is_in_use = self._prefetched and torch._C._current_graph_task_id() != -1
        if initialized and self._training_state == HandleTrainingState.IDLE and not is_in_use:
            if self._prefetched:
                self._leave_prefetched()
            self._free_unsharded_flat_param()

    def _leave_prefetched(self) -> None:
        self._use_sharded_flat_param()
        self._prefetched = False

    def hide_gradients(self) -> None:
        """Before the last micro-batch, hide accumulated gradients from FSDP and from optimizers."""
        # FSDP would take them for gradients that a user has set, and copy them without waiting for the reduction.
        for param in (*(self.flat_param._params or ()), *(self.flat_param._shared_params or ())):
            param.grad = None

    def drop_gradients(self) -> None:
        """Drop the sum of reduced gradients that optimizers do not see before the last micro-batch."""
        if hasattr(self.flat_param, "_saved_grad_shard"):
            del self.flat_param._saved_grad_shard

    def drop_cleared_gradients(self) -> None:
        """Drop the flat gradient if those of all original parameters are cleared; a move would restore them from it."""
        self._reset_flat_param_grad_info_if_needed()

    # ---- as a ShardSource, which is asked before FSDP's gather

    def can_be_read(self) -> bool:
        """Not in a backward, where an optimizer may write to the shard."""
        return torch._C._current_graph_task_id() == -1

    def prepare_read(self) -> int:
        """Copy parameters that have other storage by now to the shard, as FSDP does before it gathers."""
        # In a backward, FSDP keeps gradients where a writeback does not look for them.
        may_differ = (
            torch._C._current_graph_task_id() == -1 and self._use_orig_params and not self._skip_writeback_check
        )
        if may_differ and self._writeback_orig_params():
            self._use_sharded_views()  # or FSDP would do it again, which counts as a write
        return self.flat_param._local_shard.numel()

    def read(self) -> ShardValues:
        """This rank's values, on the device to gather on."""
        shard = self.flat_param._local_shard.to(self.device, non_blocking=True)
        return ShardValues([shard], shard.numel(), self.shard_version(), self.is_trained())

    def layout(self, numel: int) -> FlatLayout:
        """Where parameters lie in a gathered flat parameter of ``numel`` values."""
        return self.parameter_layout.whole(numel)

    def is_trained(self) -> bool:
        """Whether the flat parameter requires a gradient, or an original one, which the next forward passes on."""
        flat_param = self.flat_param
        return flat_param.requires_grad or any(p.requires_grad for p in flat_param._params or ())

    def shard_version(self) -> Hashable:
        """A value that changes with every write to the shard that torch counts, and when it is moved."""
        flat_param = self.flat_param
        shard = flat_param._local_shard
        return self._version.of((shard,), (shard, flat_param, *(flat_param._params or ())))

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        super().flat_param_to(*args, **kwargs)
        # While the unit is idle, a user moves it, unless FSDP offloads parameters.
        if self._training_state == HandleTrainingState.IDLE and not self._offload_params:
            self.moved()

    def moved(self) -> None:
        """Handle a move or cast of the flat parameter by a user."""
        self.drop_views()
        flat_param = self.flat_param
        shard = getattr(flat_param, "_local_shard", None)  # there is none until FSDP's lazy initialization
        # FSDP would return to the old memory after the next forward, and lose what was written to the new memory.
        # A changed dtype is left alone: the next gather raises.
        same_kind = shard is not None and (flat_param.dtype, flat_param.size()) == (shard.dtype, shard.size())
        if same_kind and not self._offload_params:
            flat_param._local_shard = flat_param.data
        self.written_back()


def reduction_hook(handle: StrategyHandle, gradient: Tensor, out: Tensor | None = None) -> None:
    """A communication hook, which gets no ``out`` for what FSDP does not shard."""
    handle.reduce(gradient, gradient if out is None else out)


def shard_gradients_in_constant_time() -> None:
    """Have the size of a gradient's shard computed, where torch cuts the gradient into a view for every rank.

    Of a thousand views one is looked at, and they take longer than all the rest of a unit's backward.
    """
    original = runtime_utils._get_reduce_scatter_tensors

    @functools.wraps(original)
    def get_reduce_scatter_tensors(state: Any, unsharded_grad: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(state._handle, StrategyHandle):
            return original(state, unsharded_grad)
        numel = unsharded_grad.numel()
        of_shard = -(-numel // state.world_size)
        padding = of_shard * state.world_size - numel
        padded = F.pad(unsharded_grad, [0, padding]) if padding else unsharded_grad
        return padded, unsharded_grad.new_empty(of_shard)

    runtime_utils._get_reduce_scatter_tensors = get_reduce_scatter_tensors
