"""Private names of torch's flat parameters: a handle whose weights and gradients go through a strategy."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp.adapters._torch_shard_version import ShardVersion
from fsdp_zpp.collectives.flat_layout import FlatLayout
from fsdp_zpp.collectives.secondary_shard import ShardValues
from fsdp_zpp.collectives.weight_gather import WeightGather
from fsdp_zpp.runtime._torch_flat_parts import copy_replaced_shards
from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch import FlatParamHandle, HandleTrainingState, no_dispatch_record_stream
from ._torch_flat_layout import FlatParameterLayout
from ._torch_step_gradients import StepGradients
from ._torch_views import ParameterViews, set_parameter, set_tensor


class StrategyHandle(FlatParamHandle):
    """A flat parameter's handle that gathers and reduces through a strategy.

    Made by :func:`_torch_adoption.adopt_handle` from the handle that torch built. It overrides what torch calls to
    gather, to reshard and to show parameters, and is the source of the unit's secondary shard. Whatever asks for full
    precision (state dicts, ``summon_full_params``, evaluation under FSDP_USE_FULL_PREC_IN_EVAL) is left to torch's own
    gather.

    Attributes:
        gradients: Its gradient, as the strategy accumulates and reduces it.
        views: What modules show in place of its parameters.
        parameter_layout: Where its parameters lie.
        written_back: Called after parameters were written to the shard, or moved.
    """

    gradients: StepGradients
    views: ParameterViews
    parameter_layout: FlatParameterLayout
    written_back: Callable[[], None]
    _gather: WeightGather | None
    _gather_is_lossy: bool
    _keeps_unsharded: bool
    _holds_decoded_weights: bool
    _version: ShardVersion
    _version_at_summon: Hashable
    _has_optim_in_backward: bool

    def adopt(self, instance: FullyShardedDataParallel, unit: StrategyUnit, layout: FlatParameterLayout) -> None:
        """Set the attributes of this class, in place of a constructor; the arguments are those of ``adopt_handle``."""
        self.parameter_layout = layout
        self._zero_padding()
        self._gather, self._keeps_unsharded = unit.gather, unit.keep_unsharded
        self._gather_is_lossy = unit.gather is not None and unit.gather.secondary.codec is not None
        self._holds_decoded_weights, self._version_at_summon = False, None
        self._version = ShardVersion()
        self.gradients = StepGradients(instance, self, layout, unit)
        self.views = ParameterViews(self)
        if self.views.are_direct:
            self._setattr_tensor, self._setattr_param = set_tensor, set_parameter
        self.written_back = unit.invalidate

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
        if self._keeps_unsharded and not self._wants_full_precision() and self.keeps_gathered():
            assert self._gather is not None
            self._gather.secondary.check_version(self.shard_version())
        super().unshard()

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        summoned = self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS
        # Parameter scope N keeps what was gathered until the weights change; weights_changed() frees it then.
        super().reshard(free_unsharded_flat_param and (summoned or not self._keeps_unsharded))
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
        self.gradients.was_gathered = True
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

    # ---- what modules show in place of parameters

    def _use_sharded_views(self) -> None:
        if not self.views.show_shard():
            super()._use_sharded_views()
            self.views.keep()
            return
        self._unsharded_flat_param_for_skipped_views = None
        tensors = self.flat_param._tensors
        if self._training_state == HandleTrainingState.BACKWARD_POST and tensors is not None:
            tensors[:] = [None] * len(tensors)

    def _writeback_orig_params(self) -> bool:
        return not self.views.are_written_back() and super()._writeback_orig_params()

    def _use_unsharded_views(self, as_params: bool) -> None:
        if as_params:
            self.views.drop()  # parameters become views of what was gathered
        elif self._training_state == HandleTrainingState.BACKWARD_PRE and self.views.show_forward_views():
            return
        super()._use_unsharded_views(as_params)
        current = self.gradients.unit.reductions.current
        if not as_params and current is not None and current.errors is not None:
            self.gradients.watch_use()

    # ---- the memory of what is gathered

    def _alloc_padded_unsharded_flat_param(self) -> Tensor:
        unsharded = self._get_padded_unsharded_flat_param()
        unsharded.untyped_storage().resize_(unsharded.numel() * unsharded.itemsize)
        return unsharded

    def _free_unsharded_flat_param(self) -> None:
        unsharded = self._get_padded_unsharded_flat_param()
        storage = unsharded.untyped_storage()
        if storage.size():
            no_dispatch_record_stream(unsharded, self._device_handle.current_stream())
            storage.resize_(0)

    # ---- when weights change

    def weights_changed(self, by_step: bool) -> None:
        """Drop what FSDP still keeps unsharded between forwards, so that the next one gathers it anew.

        FSDP keeps the root, and units that a forward has prefetched and not run.
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

    def drop_gradients(self) -> None:
        """Drop the sum of reduced gradients that optimizers do not see before the last micro-batch."""
        if hasattr(self.flat_param, "_saved_grad_shard"):
            del self.flat_param._saved_grad_shard
        if torch._C._current_graph_task_id() == -1:  # else an optimizer in the backward has cleared its own gradients
            self.gradients.used.clear()

    def drop_cleared_gradients(self) -> None:
        """Drop the flat gradient if all original parameters' are cleared: a move would restore them from it."""
        self._reset_flat_param_grad_info_if_needed()

    # ---- as a ShardSource, which is asked before FSDP's gather

    def can_be_read(self) -> bool:
        """Return whether the shard may be read: not in a backward, in which an optimizer may write to it."""
        return torch._C._current_graph_task_id() == -1

    def prepare_read(self) -> int:
        """Copy parameters that have other storage by now to the shard, as FSDP does; return this rank's value count."""
        copy_replaced_shards(self)
        return self.flat_param._local_shard.numel()

    def read(self) -> ShardValues:
        """Return this rank's values, on the device to gather on."""
        shard, trained = self.flat_param._local_shard.to(self.device, non_blocking=True), self.is_trained()
        return ShardValues([shard], shard.numel(), self.shard_version(), trained)

    def compares_contents(self) -> bool:
        """Return whether versions of the shards are fingerprints, as FSDP_ZPP_CHECK asks for."""
        return self._version.of_contents

    def keeps_gathered(self) -> bool:
        """Return whether unsharded weights are kept, to be reused if they have not changed."""
        return self._keeps_unsharded and self._holds_decoded_weights and not self.needs_unshard()

    def layout(self, numel: int) -> FlatLayout:
        """Return where parameters lie in a gathered flat parameter of ``numel`` values."""
        return self.parameter_layout.whole(numel)

    def is_trained(self: FlatParamHandle) -> bool:
        """Return whether the flat parameter or an original one, which a forward passes on, requires a gradient.

        It is called on torch's own handles, too.
        """
        flat_param = self.flat_param
        return flat_param.requires_grad or any(p.requires_grad for p in flat_param._params or ())

    def shard_version(self) -> Hashable:
        """Return a value that changes with every write to the shard that torch counts, and when it is moved."""
        flat_param = self.flat_param
        shard = flat_param._local_shard
        return self._version.of((shard,), (shard, flat_param, *(flat_param._params or ())))

    def flat_param_to(self, *args: object, **kwargs: object) -> None:
        super().flat_param_to(*args, **kwargs)
        # While the unit is idle, a user moves it, unless FSDP offloads parameters.
        if self._training_state == HandleTrainingState.IDLE and not self._offload_params:
            self.moved()

    def moved(self) -> None:
        """Handle a move or cast of the flat parameter by a user."""
        self.views.drop()
        flat_param = self.flat_param
        shard = getattr(flat_param, "_local_shard", None)  # there is none until FSDP's lazy initialization
        # FSDP would return to the old memory after the next forward, and lose what was written to the new memory.
        # A changed dtype is left alone: the next gather raises.
        same_kind = shard is not None and (flat_param.dtype, flat_param.size()) == (shard.dtype, shard.size())
        if same_kind and not self._offload_params:
            flat_param._local_shard = flat_param.data
        self.written_back()
