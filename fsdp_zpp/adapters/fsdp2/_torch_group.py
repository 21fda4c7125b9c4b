"""Private names of torch's fully_shard: a parameter group whose weights and gradients go through a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllGatherState, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.profiler import record_function

from fsdp_zpp.collectives.streams import keep_until_read
from fsdp_zpp.collectives.weight_gather import WeightGather
from fsdp_zpp.runtime.sharded import Sharded
from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch import groups_of, names_in, numel_of
from ._torch_flat_layout import axes_of, order_parameters
from ._torch_gather_inputs import has_own_bytes
from ._torch_plan import GatherPlan, show_shards
from ._torch_step_gradients import StepGradients
from ._torch_transforms import without_dynamo, without_functorch
from ._torch_weights import GroupWeights


class StrategyGroup(FSDPParamGroup, Sharded):
    """A parameter group that a strategy gathers and reduces.

    Made by :func:`_torch_adoption.adopt_group` from the group that torch built. It overrides what torch calls to
    gather, to reshard and to reduce, and tells the core what FSDP has sharded.

    Attributes:
        unit: Its unit.
        weights: Its weights, as the strategy gathers and keeps them.
        gradients: Its gradients, as the strategy accumulates and reduces them.
    """

    unit: StrategyUnit
    weights: GroupWeights
    gradients: StepGradients
    _path: str
    _state: FSDPState
    _on_lazy_init: Callable[[nn.Module], None] | None
    _is_ordered: bool
    _knows_formats: bool
    _known_names: Mapping[FSDPParam, str]

    def adopt(self, state: FSDPState, unit: StrategyUnit, path: str, on_lazy_init: Callable[[nn.Module], None]) -> None:
        """Set the attributes of this class, in place of a constructor; the arguments are those of ``adopt_group``."""
        self.unit, self._path = unit, path
        self.weights = GroupWeights(self, unit.gather, keeps_unsharded=unit.keep_unsharded)
        self.gradients = StepGradients(self, self.weights, unit)
        self._state, self._on_lazy_init = state, on_lazy_init
        self._is_ordered, self._known_names = unit.stock, MappingProxyType({})
        self._knows_formats = False

    # ---- lazy initialization

    def lazy_init(self) -> None:
        if not self._is_ordered:  # torch comes here more than once, and what has been gathered is in this order
            order_parameters(self)
            self._is_ordered = True
        super().lazy_init()
        if not self._knows_formats:
            self._knows_formats = True
            if not self.unit.stock and has_own_bytes(self.fsdp_params):
                self._leave_weights_uncoded()
        states = self._state._state_ctx.all_states  # empty as long as there was no forward
        if states:
            self._set_missing_names(states[0]._modules[0])
        groups = [group for state in states for group in groups_of(state) if isinstance(group, StrategyGroup)]
        # Lazy initialization may replace the parameters of a group, so this must wait for the last group's.
        if groups and groups[-1] is self and self._on_lazy_init is not None:
            self._on_lazy_init(states[0]._modules[0])  # the root's state comes first
            self._on_lazy_init = None

    def _leave_weights_uncoded(self) -> None:
        """Leave out the codec, since parameters encode themselves; before the first gather, on all ranks alike."""
        was_encoded, self.unit.encodes_itself = self.weights.is_encoded, True
        if was_encoded:
            self.unit.leave_weights_uncoded(in_place_of_torch=True)
            self.weights.set_gather(self.unit.gather, keeps_unsharded=self.unit.keep_unsharded)
            if self.weights.comm is not None:
                self._all_gather_comm = self.weights.comm

    def _set_missing_names(self, root: nn.Module) -> None:
        """Give parameters the FQNs that torch has not found because ``unshard()`` came before the first forward."""
        if all(param._param_fqn is not None for param in self.fsdp_params):
            return
        paths = {module: path for path, module in root.named_modules()}
        for param in self.fsdp_params:
            info = param._module_info
            param._param_fqn = ".".join(filter(None, (paths[info.module], info.param_name)))
        # Both go by these names.
        self.weights.plan = None
        self.gradients.layouts.clear()

    # ---- gathering weights

    pre_backward = without_dynamo(FSDPParamGroup.pre_backward)

    @without_functorch
    def unshard(self, async_op: bool = False) -> None:
        if self._all_gather_result is not None:
            return
        weights = self.weights
        if self.is_unsharded:
            if weights.staleness_guard is not None:
                weights.staleness_guard.check_version(weights.shard_version())
            return
        is_needed = self.unshard_in_backward or self._training_state != TrainingState.PRE_BACKWARD
        if is_needed and weights.is_kept and weights.is_fresh():
            weights.puts_back = True
            return
        if not is_needed or self._all_gather_process_group.size() == 1:
            super().unshard(async_op)
            return
        weights.was_gathered = True  # on all ranks, if on one
        if weights.gather is None or self._all_gather_comm is not weights.comm:
            super().unshard(async_op)
            return
        plan = weights.plan or weights.make_plan()
        self._all_gather_result = self._gathered(weights.gather, plan, async_op)

    def _gathered(self, gather: WeightGather, plan: GatherPlan, async_op: bool) -> AllGatherResult:
        """Gather as torch's ``foreach_all_gather``, without the two copies of shards that it makes for a collective."""
        secondary, inputs, shard = gather.secondary, plan.inputs, None
        _, stream = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        with self._labelled("FSDP::all_gather"), self.device_handle.stream(stream):
            if inputs is not None and (secondary.encoded_by is None or plan.numel == 0):
                shard = plan.put_together(inputs)
            # A stale secondary shard that is made from what ``weights`` reads has the version of that.
            is_compared = self.weights.reuses and not (secondary.stale and shard is None)
            out = torch.empty(plan.numel, dtype=plan.dtype, device=self.device)
            gather(shard, out, self.weights.shard_version() if is_compared else None)
            event = stream.record_event()
        if inputs is not None:
            inputs.tell_torch()
        return AllGatherResult(out, event, **plan.result)

    @without_functorch
    def wait_for_unshard(self) -> None:
        """Show what was gathered, as torch does; from the second time on without looking up what does not change."""
        weights, result = self.weights, self._all_gather_result
        plan = weights.plan
        if result is None:
            if weights.puts_back:
                weights.is_kept = weights.puts_back = False
                self._to_unsharded()
            return
        by_strategy = result.all_gather_work is None and self._all_gather_comm is weights.comm
        if plan is None or not plan.swaps or not by_strategy:
            if by_strategy and plan is not None and plan.mixed and plan.dtype != torch.uint8:
                self.device_handle.current_stream().wait_event(result.all_gather_event)
                # torch keeps only what it is given here, so the next gather could reuse the memory of the rest.
                as_bytes = plan.as_torch_gathers(keep_until_read(result.all_gather_output))
                self._all_gather_result = result._replace(all_gather_output=as_bytes)
            super().wait_for_unshard()
            if plan is not None and not plan.swaps:
                plan.prepare_swaps(self)
            return
        in_forward = self._training_state == TrainingState.FORWARD
        if in_forward and (previous := self.comm_ctx.all_gather_state) is not None:
            self._gather_after(previous.event)
            self.comm_ctx.all_gather_state = None
        with self._labelled("FSDP::all_gather_copy_out"):
            self.device_handle.current_stream().wait_event(result.all_gather_event)
            plan.fill(result.all_gather_output)
        if not self.is_unsharded:
            plan.unshard()
            self._sharded_state = ShardedState.UNSHARDED
        copied = self.device_handle.Event()
        copied.record()
        # A forward keeps what was gathered until its next gather, which need not wait for the copy then.
        if in_forward:
            self.comm_ctx.all_gather_state = AllGatherState(result, copied)
        else:
            self._gather_after(copied)
        self._all_gather_result = None

    def _gather_after(self, event: torch.Event | None) -> None:
        """Let the streams in which weights are gathered wait for ``event``."""
        context = self.comm_ctx
        if event is not None and hasattr(context, "all_gather_stream"):  # there is none before lazy initialization
            context.all_gather_copy_in_stream.wait_event(event)
            context.all_gather_stream.wait_event(event)

    def _labelled(self, phase: str) -> AbstractContextManager[object]:
        """Label the block as torch does, but only while a profiler records: the label takes microseconds."""
        if profiler._is_profiler_enabled:
            return record_function(self._with_fqn(phase))
        return nullcontext()

    def _to_unsharded(self) -> None:
        plan = self.weights.plan
        if plan is None or not plan.swaps or self.is_unsharded:
            super()._to_unsharded()
        else:
            plan.unshard()
            self._sharded_state = ShardedState.UNSHARDED

    def _to_sharded(self) -> None:
        plan = self.weights.plan
        if plan is None or not plan.swaps or self.is_sharded:
            super()._to_sharded()
        else:
            plan.reshard()
            self._sharded_state = ShardedState.SHARDED

    def reshard(self) -> None:
        """Reshard as torch does, but keep the memory under parameter scope N; see [Note: Kept weights]."""
        weights = self.weights
        if weights.staleness_guard is None:
            super().reshard()
        elif self._training_state == TrainingState.IDLE:  # a user asks for it
            super().reshard()
            weights.drop_kept()
        elif self.is_unsharded and (self._training_state != TrainingState.FORWARD or self._reshard_after_forward):
            if weights.plan is not None and weights.plan.swaps:
                weights.plan.show_shards()
            else:
                show_shards(self.fsdp_params)
            self._sharded_state = ShardedState.SHARDED
            weights.is_kept = weights.was_gathered = True

    # ---- reducing gradients

    def post_backward(self, *unused: object) -> None:
        self.gradients.post_backward(*unused)

    def _set_separate_reduce_scatter_group(self, enable: bool, *groups: object) -> None:
        if enable and self.gradients.unit.reductions.current is not None:
            raise NotImplementedError(
                f"set_separate_reduce_scatter_group(True) applies to torch's own reduction, but a Strategy reduces the "
                f"gradients of {self.name} over process groups of its own; remove the call"
            )
        parent: Any = super()
        parent._set_separate_reduce_scatter_group(enable, *groups)  # from torch 2.13 on

    # ---- as what FSDP has sharded of a unit

    @property
    def name(self) -> str:
        """Return the paths of the group's modules from the root, and its own within them if they have several."""
        return ".".join(filter(None, (self._module_fqn, self._path))) or "root"

    def numel(self) -> int:
        """Return the number of values of its parameters, on all ranks together."""
        return numel_of(self)

    def trained_numel(self) -> int:
        """Return the number of values that have gradients, which are all that torch reduces."""
        return self.weights.trained_numel()

    def compute_device(self) -> torch.device:
        """Return the device of the group's mesh."""
        return self.device

    def wire_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes in which FSDP itself gathers the weights, those of a uniform group, and reduces them."""
        first = self.fsdp_params[0]
        weights = first.param_dtype or first.sharded_param.dtype
        trained = next((param for param in self.fsdp_params if param.sharded_param.requires_grad), first)
        return weights, self._reduce_dtype or trained.param_dtype or trained.sharded_param.dtype

    def own_nbytes(self) -> int | None:
        """Return the bytes that torch gathers, of all ranks together, if they are of several dtypes or a format."""
        plan = self.weights.plan
        return plan.numel or None if plan is not None and plan.dtype == torch.uint8 else None

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters, as an optimizer holds them."""
        return [param.sharded_param for param in self.fsdp_params]

    def parameter_owners(self) -> list[tuple[nn.Module, ...]]:
        """Return, for each parameter, the modules on which it is registered."""
        infos = [param._module_info for param in self.fsdp_params]
        return [(info.module, *info.shared_modules) for info in infos]

    def other_axes(self) -> list[dist.ProcessGroup]:
        """Return the ranks along the axes of meshes that another parallelism has a part in, our own axis too."""
        sharded: list[Any] = self.parameters()
        meshes = dict.fromkeys(parameter.device_mesh for parameter in sharded)
        return [group for mesh in meshes if mesh.ndim > 1 for group in mesh.get_all_groups()]

    def is_trained(self) -> bool:
        """Return whether any parameter requires a gradient, sharded or as modules show it."""
        return self.weights.is_trained()

    def trained_names(self) -> list[str]:
        """Return the names of the parameters that require a gradient, as modules show them now, or have one."""
        named = zip(self._names(), self.fsdp_params, strict=True)
        return [name for name, param in named if _shows_trained(param) or param.sharded_param.grad is not None]

    def shards(self) -> list[Tensor]:
        """Return what this rank holds of the parameters."""
        return [param._sharded_param_data for param in self.fsdp_params]

    def named_shards(self) -> dict[str, Tensor]:
        """Return what this rank holds of the parameters, by their names in the group's modules."""
        return dict(zip(self._names(), self.shards(), strict=True))

    def named_parts(self, parameter: nn.Parameter, of: Tensor) -> dict[str, Tensor]:
        """Return a tensor that lies as this rank's shard of a parameter, by the parameter's name."""
        pairs = zip(self._names(), self.fsdp_params, strict=True)
        return {name: of for name, param in pairs if param.sharded_param is parameter}

    def placements(self) -> dict[str, tuple[str, ...]]:
        """Return the mesh dimensions along which each parameter is sharded, by its name in the group's modules."""
        return dict(zip(self._names(), map(axes_of, self.fsdp_params), strict=True))

    def _names(self) -> list[str]:
        if not all(param in self._known_names for param in self.fsdp_params):
            self._known_names = names_in(self)
        return [self._known_names[param] for param in self.fsdp_params]

    def weights_changed(self, by_step: bool) -> None:
        """Drop what does not hold any more; ``by_step`` says that nothing but the values has changed."""
        self.drop_unsharded()
        if not by_step:
            self.weights.plan = None
            # A user's event of the last step, for which alone the next forward's gathers would wait.
            self._state._state_ctx.post_optim_event = None

    def drop_unsharded(self) -> None:
        """Drop what FSDP still keeps unsharded between forwards, so that the next one gathers it anew."""
        if self._training_state == TrainingState.IDLE:
            self.weights.drop_kept()
            self.wait_for_unshard()
            self._to_sharded()

    def drop_gradients(self) -> None:
        """Drop the gradients accumulated from earlier micro-batches of the step."""
        self.gradients.drop()


def _shows_trained(param: FSDPParam) -> bool:
    """Return whether a parameter requires a gradient as modules show it now, which the next forward goes by."""
    shown: nn.Parameter = getattr(param._module_info.module, param._module_info.param_name)
    return shown.requires_grad
