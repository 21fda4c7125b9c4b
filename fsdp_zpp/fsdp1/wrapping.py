"""``FullyShardedDataParallel`` with a strategy, and a communication hook for any FSDP model."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_zpp._torch_compat import Patch
from fsdp_zpp.codecs import Codec, check_codec, check_place
from fsdp_zpp.comm.agreement import agree, check_agreement, parameter_facts, shard_signature
from fsdp_zpp.comm.error_feedback import ErrorFeedbackState
from fsdp_zpp.comm.flat_layout import FlatLayout, Sharded
from fsdp_zpp.comm.gradient_reduce import GradientReduce
from fsdp_zpp.comm.hops import Traffic
from fsdp_zpp.comm.mesh import ProcessMesh, compute_device, mesh_on, own_rank, process_mesh
from fsdp_zpp.frozen.frozen_base import check_nodes
from fsdp_zpp.frozen.hugging_face import guard_save_pretrained
from fsdp_zpp.frozen.quantize import left_to_shard, log_frozen, prepare_frozen, quantize_for
from fsdp_zpp.names import explains_keywords, model_name
from fsdp_zpp.runtime._torch_flat_parts import copy_replaced, hear_of_loads, is_in_flat_parameter
from fsdp_zpp.runtime._torch_rank_layout import RankLayout, joined_by_links, node_size_fact, read_2d_mesh
from fsdp_zpp.runtime.api import (
    AdapterUnits,
    Shared,
    check_dtypes,
    check_exchanges,
    check_module,
    held,
    hold,
    refuse_strategy,
    strategy_facts,
)
from fsdp_zpp.runtime.checkpoint import RankState
from fsdp_zpp.runtime.lifecycle import StepTracker, repeated_if_failed, set_up_model
from fsdp_zpp.runtime.links import find_links
from fsdp_zpp.runtime.log_line import log_reduction
from fsdp_zpp.runtime.unit import (
    Loaded,
    StrategyUnit,
    attach,
    packed,
    packed_facts,
    packed_sites,
    strategies_below,
    strategy_for,
    unit_of,
)
from fsdp_zpp.strategy.error_feedback import LoCo, check_error_feedback
from fsdp_zpp.strategy.strategy import Strategy, check_gpus_per_node, intra_node_codec

from . import _torch_flat_parameter, _torch_handle
from ._torch_flat_parameter import refuse_whole_graphs
from ._torch_handle import ShardedHandle, flattened_sites, sharded_of

# ---- comm hook


@explains_keywords
class QuantizedReduceState:
    """State of ``quantized_reduce_hook``: ZeRO++'s qgZ on a model with one of torch's own strategies.

    The constructor is collective over ``process_group``. With error feedback, save its ``state_dict`` in checkpoints;
    for models with a strategy, ``fsdp_zpp.CodecState`` does this.

    Args:
        codec: Codec of the inter-node hop; None for full precision in two hops.
        intra_codec: Codec of the intra-node hop; ``"auto"`` is ``Int8`` with the block of ``codec``.
        error_feedback: Error feedback on the codecs. A state with error feedback serves one model only.
        gpus_per_node: Consecutive ranks that share fast links. Default: as for ``Strategy.zeropp()``, or with
            error feedback as for ``Strategy.loco()``.
        process_group: The group that the model is sharded over. Default: all ranks.

    Raises:
        RuntimeError: If torch.distributed is not initialized.
        TypeError: If a codec is not a ``Codec``, or ``error_feedback`` is not a ``LoCo``.
        ValueError: If the group can't be laid out on nodes of ``gpus_per_node``, if ranks pass different arguments, or
            if ``error_feedback`` has no codec to correct.

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
        # Compare first: with different node sizes, ranks would hang as they detect links or make process groups.
        check_agreement(self.process_group, "QuantizedReduceState", facts)
        self.mesh = _mesh_of(self.process_group, gpus_per_node, gains=codec is not None and error_feedback is None)
        self.codecs = (intra, codec)
        self.error_feedback = error_feedback
        self._mixes_values = any(each is not None and each.mixes_values for each in self.codecs)
        self._is_of_unit = False
        self._layout: Callable[[int], FlatLayout] | None = None
        self._units: dict[str, ErrorFeedbackState] = {}
        self._reduce = self._reduction("comm hook")

    def _reduction(self, label: str) -> GradientReduce:
        return GradientReduce(self.mesh, *self.codecs, self.traffic, label, error_feedback=self.error_feedback)

    def of_unit(self, name: str, layout: Callable[[int], FlatLayout] | None = None) -> QuantizedReduceState:
        """Make the state that FSDP passes to the hook for one unit of the model, with errors of its own.

        Args:
            name: The unit's name.
            layout: Returns the layout of the unit's flat gradient, given its size.

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
        """Return the bytes of this rank's error state for a unit with a shard of ``numel`` values."""
        return self._reduce.error_nbytes(numel)

    def reduce(self, gradient: Tensor, out: Tensor) -> None:
        """Reduce a unit's gradient, as ``quantized_reduce_hook`` describes.

        Raises:
            RuntimeError: If errors are fed back, but this is not the state of one unit.
        """
        # FSDP does not tell the hook which unit it reduces, so register_comm_hook gives each unit its own state. If a
        # user's hook wraps the state, that does not happen, and the errors of different units would mix.
        # Nor would a codec that mixes values know where parameters begin.
        if not self._is_of_unit and (self.errors is not None or self._mixes_values):
            raise RuntimeError(
                "error feedback keeps errors for each unit of a model, and Int3 must know the unit's parameters, but "
                "this QuantizedReduceState was not passed to model.register_comm_hook; pass the state itself there, "
                "together with quantized_reduce_hook"
            )
        layout = None if self._layout is None else self._layout(gradient.numel())
        finish = self._reduce.start(gradient, out, layout=layout)
        finish()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's errors; see ``fsdp_zpp.CodecState``. There are none before ``register_comm_hook``."""
        return self._rank_state().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``; call it after ``register_comm_hook``.

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
    intra = intra_node_codec(intra_codec, codec)  # first, since the checks below are for codecs, not for "auto"
    for name, value in (("codec", codec), ("intra_codec", intra)):
        check_codec(name, value, such_as="Int4(128)")
        check_place(name, value, "gradients")
    check_error_feedback(error_feedback, "codec", intra, codec)
    check_gpus_per_node(gpus_per_node)
    return intra


def _mesh_of(group: dist.ProcessGroup, gpus_per_node: int | None, gains: bool) -> ProcessMesh:
    """Return the mesh of a hook; if the hook ``gains`` by it, ranks joined by fast links are a node. Collective."""
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
        out: Receives this rank's chunk of the mean over all ranks, flat [numel]. FSDP omits it for units that it does
            not shard.

    Raises:
        TypeError: If ``state`` is not a ``QuantizedReduceState``.
        ValueError: If FSDP does not shard the unit, but the state has several ranks.
    """
    if not isinstance(state, QuantizedReduceState):
        raise TypeError(f"quantized_reduce_hook needs a QuantizedReduceState, got {type(state).__name__}")
    if out is not None:
        state.reduce(gradient, out)
    elif state.mesh.topology.world > 1:  # on one rank the gradient already is the mean
        raise ValueError(
            f"quantized_reduce_hook reduces to shards, but FSDP does not shard this unit over the state's "
            f"{state.mesh.topology.world} ranks (NO_SHARD); use FULL_SHARD or SHARD_GRAD_OP"
        )


# ---- validation

Sites = dict[tuple[nn.Module, str], tuple[str, nn.Parameter]]
UNITS = AdapterUnits(
    is_unit=lambda module: isinstance(module, FullyShardedDataParallel),
    is_torchs=lambda module, parameter: is_in_flat_parameter(parameter),
)


def shared_error(shared: Shared, wrapped: nn.Module) -> ValueError:
    return ValueError(
        f"FullyShardedDataParallel({model_name(wrapped)}): {shared}, but FullyShardedDataParallel flattens a parameter "
        "into one unit alone; wrap the module around both as one unit, and neither of the two by itself (leave their "
        "classes out of auto_wrap_policy)"
    )


def hold_flattened(instance: FullyShardedDataParallel, arguments: dict[str, Any], before: Sites) -> None:
    """Mark the parameters that ``instance`` has flattened; raise a ValueError if a nested instance has one, too.

    ``before`` has the wrapped module's parameters and their names, as they were before construction.
    """
    wrapped, own = arguments["module"], flattened_sites(instance)
    inner = instance._fsdp_wrapped_module
    apart = flattened_sites(inner) if isinstance(inner, FullyShardedDataParallel) else set()
    left_alone = ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"])
    # One unit may have a parameter under several names.
    here = (module._parameters.get(name) for module, name in own | apart)
    left_alone |= {parameter for parameter in here if parameter is not None}
    shared = UNITS.find_shared([wrapped], left_alone, own | apart)
    own_parameters = {id(before[site][1]) for site in own if site in before}
    for site in own & before.keys():
        name, parameter = before[site]
        if (held_as := held(parameter)) is not None:
            shared = shared or Shared(name, held_as)
    if shared is not None:
        raise shared_error(shared, wrapped)
    unit = model_name(wrapped)
    for site, (name, parameter) in before.items():
        if id(parameter) in own_parameters:
            hold(site, name, parameter, unit)


def check_arguments(
    strategy: object, group: dist.ProcessGroup | None, arguments: dict[str, Any]
) -> tuple[Strategy, RankLayout]:
    """Raise if a strategy can't shard by these arguments of FSDP's constructor. Collective over ``group``.

    If ``strategy`` is not a Strategy, ranks compare it before they raise. Iterators in ``arguments`` become lists.
    Returns the strategy that applies to the module itself, without overrides, and the layout of the ranks.
    """
    own = [] if group is None else _check_agreement(strategy, group, arguments)
    if not isinstance(strategy, Strategy):
        refuse_strategy(strategy, "sharding_strategy", ", or one of torch's ShardingStrategy")
    assert group is not None
    by = strategy_for(arguments["module"], strategy) if strategy.overrides else strategy
    if by.gpus_per_node is None:
        find_links(group, compute_device(group, arguments["device_id"]))
    own = left_to_shard(by, [arguments["module"]], own)
    return by, agree(group, lambda: _check_what_is_sharded(by, group, own, arguments["cpu_offload"]))


def check_overrides(
    wrapped: nn.Module, own: Strategy, strategy: Strategy, flattened: Iterable[tuple[nn.Module, str]]
) -> None:
    """Raise a ValueError if overrides give a module another strategy than ``own``, the strategy of its FSDP instance.

    ``flattened`` has the module and the name of each parameter in the instance's flat parameter.
    """
    by_module = strategies_below(wrapped, own, strategy)
    for module, name in flattened:
        if by_module.get(module, own) not in (own, replace(own, gpus_per_node=None)):
            raise ValueError(
                f"overrides give {type(module).__name__}.{name} another strategy than the {type(wrapped).__name__} "
                "that it is in, but FullyShardedDataParallel flattens both into one parameter; wrap the modules that "
                "overrides name by themselves, as with auto_wrap_policy, or use fully_shard"
            )


def _check_what_is_sharded(
    strategy: Strategy, group: dist.ProcessGroup, own: list[tuple[str, nn.Parameter]], offload: CPUOffload | None
) -> RankLayout:
    layout = RankLayout.of(strategy, group)
    check_dtypes(own, "pass others in ignored_states")
    if strategy.local_steps is not None:
        check_exchanges(strategy.local_steps, own)
    _check_no_other_parallelism(strategy, own)
    _check_offload(offload)
    return layout


def _check_no_other_parallelism(strategy: Strategy, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for NO_SHARD if another parallelism has sharded a parameter, since FSDP can't write the parameter back."""
    for name, parameter in parameters:
        if isinstance(parameter, DTensor) and strategy.optimizer == "N":
            raise NotImplementedError(
                f"{strategy.levels!r} is FullyShardedDataParallel's NO_SHARD, which can't be combined with another "
                f"parallelism, but {name} is sharded already; use another strategy, or fully_shard"
            )


def group_of(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    """Return the group to shard over, by default all ranks; raise a ValueError for several groups or dimensions."""
    group, mesh = arguments["process_group"], arguments["device_mesh"]
    if isinstance(group, tuple):
        raise ValueError(
            "process_group is a pair of groups, as HYBRID_SHARD takes it; a Strategy takes the one group of all "
            "ranks and makes the groups of its hops itself (gpus_per_node)"
        )
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                "a Strategy takes a 1-D device_mesh of all ranks to shard over, or a 2-D one of nodes x ranks of a "
                f"node with names, got {mesh.ndim} dimensions {mesh.mesh_dim_names or tuple(mesh.shape)}"
            )
        group = mesh.get_group(0)
    return group if group is not None else dist.group.WORLD


def _check_agreement(
    strategy: object, group: dist.ProcessGroup, arguments: dict[str, Any]
) -> list[tuple[str, nn.Parameter]]:
    """Raise unless all ranks shard the same module in the same way; return the named parameters to flatten."""
    module: nn.Module = arguments["module"]
    if not isinstance(module, nn.Module):  # other ranks may have a module, and wait in the comparison
        check_agreement(group, f"FullyShardedDataParallel({module!r})", {})
        check_module(module)
    for name in ("ignored_modules", "ignored_states"):
        if isinstance(arguments[name], Iterable):  # an iterator would be used up here, before FSDP sees it
            arguments[name] = list(arguments[name])
    ignored = ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"])
    units = (m for m in module.modules() if isinstance(m, FullyShardedDataParallel) and m is not module)
    nested = {p for unit in units for p in unit.parameters()}
    own = [(name, p) for name, p in module.named_parameters() if p not in ignored and p not in nested]
    shared = UNITS.find_shared([module], ignored)
    if shared is not None:  # before the facts: it is sharded already, and sizes of shards differ
        check_agreement(group, f"FullyShardedDataParallel({model_name(module)})", {"shared": shared.name})
        raise shared_error(shared, module)
    facts = strategy_facts(strategy, group)
    facts |= {name: arguments[name] for name in ("mixed_precision", "use_orig_params", "sync_module_states")}
    call = f"FullyShardedDataParallel({model_name(module)})"
    device = compute_device(group, arguments["device_id"])
    check_agreement(group, call, facts | packed_facts(packed(own)) | parameter_facts(own), device)
    return own


def ignored_parameters(
    ignored_modules: list[nn.Module] | None, ignored_states: list[nn.Module | nn.Parameter] | None
) -> set[nn.Parameter]:
    ignored: set[nn.Parameter] = set()
    for item in (*(ignored_modules or ()), *(ignored_states or ())):
        ignored.update(item.parameters() if isinstance(item, nn.Module) else (item,))
    return ignored


def _check_offload(offload: CPUOffload | None) -> None:
    if offload is not None and offload.offload_params and not torch.accelerator.is_available():
        raise ValueError(f"{offload} needs an accelerator to offload from: FSDP pins the memory of the parameters")


def refuse_local_state_dict(module: FullyShardedDataParallel, *unused: object) -> None:
    """Before ``module`` gives a state dict, raise a ValueError if that would be a local one."""
    # torch takes a rank in the node's group for a global rank, as under its HYBRID_SHARD: all nodes but one raise.
    if FullyShardedDataParallel.get_state_dict_type(module).state_dict_type == StateDictType.LOCAL_STATE_DICT:
        raise ValueError(
            "LOCAL_STATE_DICT can't hold weights that are sharded inside nodes (optimizer scope I); use "
            "SHARDED_STATE_DICT or FULL_STATE_DICT"
        )


def check_one_group(units: Iterable[StrategyUnit]) -> None:
    by_scope = {unit.scopes.optimizer: unit.sharded.name for unit in units}
    if "I" in by_scope and len(by_scope) > 1:
        other = next(name for scope, name in by_scope.items() if scope != "I")
        raise ValueError(
            f"{by_scope['I']} is sharded inside nodes (optimizer scope I) and {other} is not, but FSDP clips gradients "
            "and saves optimizer states over one group for the whole model; use optimizer scope I for all parts of a "
            "model, or for none"
        )


# ---- wrapping


class CommHookUnit:
    """The unit of an FSDP instance that has a stock strategy and a :class:`QuantizedReduceState`."""

    def __init__(self, state: QuantizedReduceState, sharded: Sharded) -> None:
        self.traffic = state.traffic
        self.errors, self.ranks = state.errors, state.mesh
        self.sharded = sharded
        self.loads = 0
        self.loaded_state: Loaded | None = None
        hear_of_loads(self)

    # Nothing to drop: stock FSDP keeps no weights and no secondary shard, and has gradients only in ``.grad``.
    def invalidate(self, *, by_step: bool = False) -> None: ...

    def weights_loaded(self) -> None:
        self.loads += 1

    def drop_gradients(self) -> None: ...


def _construct(construct: Callable[[], None], module: FullyShardedDataParallel, arguments: dict[str, Any]) -> None:
    strategy = arguments["sharding_strategy"]
    if strategy is None or isinstance(strategy, ShardingStrategy):
        construct()
        return
    mesh = arguments["device_mesh"]
    if isinstance(strategy, Strategy) and isinstance(mesh, DeviceMesh) and (read := read_2d_mesh(strategy, mesh)):
        strategy, arguments["device_mesh"] = read
        arguments["sharding_strategy"] = strategy
    group = group_of(arguments)
    if group is None and isinstance(strategy, Strategy):
        construct()  # to raise FSDP's own error
        return
    own, layout = check_arguments(strategy, group, arguments)
    unit = StrategyUnit(own, layout.mesh())
    unit.patterns = tuple(dict(strategy.overrides))
    mixed_precision = arguments["mixed_precision"]
    unit.left_unquantized = quantize_for(
        own,
        arguments["module"],
        unit.ranks,
        ignored=ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"]),
        device=arguments["device_id"],
        dtype=None if mixed_precision is None else mixed_precision.param_dtype,
        broadcast=group if arguments["sync_module_states"] else None,
    )

    def wrap_frozen(others: set[nn.Parameter]) -> FullyShardedDataParallel:
        # The outer instance handles these. FSDP takes ignored modules or ignored states, not both; ``others`` has all.
        done_outside = {"auto_wrap_policy": None, "param_init_fn": None, "sync_module_states": False}
        given = {name: value for name, value in arguments.items() if name != "self"}
        return FullyShardedDataParallel(**given | done_outside | {"ignored_modules": None, "ignored_states": others})

    hop = unit.mesh.intra if unit.scopes.optimizer == "I" else unit.mesh.group
    shard_group = own_rank() if hop is None else hop
    # Look parameters up before FSDP flattens them.
    packed, sites = packed_sites(arguments["module"]), UNITS.sites([arguments["module"]])
    with ExitStack() as stack:
        stack.enter_context(
            _torch_flat_parameter.sharding_over(module, strategy, shard_group, sharded=unit.scopes.optimizer != "N")
        )
        stack.enter_context(warnings.catch_warnings())
        if shard_group is not group and shard_group.size() == 1:  # intended, so no warning
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
        if arguments["use_orig_params"]:  # else FSDP refuses to mix trained and frozen parameters
            stack.enter_context(_torch_flat_parameter.frozen_apart(module, wrap_frozen))
            warnings.filterwarnings("ignore", ".*both parameters with requires_grad=True and False")
        construct()
    hold_flattened(module, arguments, sites)
    if packed and packed & _torch_handle.flattened_sites(module):
        unit.leave_weights_uncoded()
    if strategy.overrides:
        check_overrides(module.module, own, strategy, _torch_handle.flattened_sites(module))
    _torch_handle.adopt_handle(module, unit)
    # Other loads end in a writeback, which declares the change; a local state dict is loaded into the shard directly.
    module.register_load_state_dict_post_hook(lambda module, incompatible_keys: unit.weights_loaded())
    if unit.scopes.optimizer == "I":
        module.register_state_dict_pre_hook(refuse_local_state_dict)
    attach(module, unit)
    refuse_whole_graphs(module)
    guard_save_pretrained(module.module, functools.partial(_torch_handle.has_shards, module))


def _all_ranks_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return all ranks of ``model`` if its units are sharded inside nodes (all or none are); otherwise None."""
    units = (unit_of(module) for module in model.modules())
    inside = (unit for unit in units if isinstance(unit, StrategyUnit) and unit.scopes.optimizer == "I")
    return next((unit.ranks.group for unit in inside), None)


def _on_lazy_init(root: nn.Module) -> None:
    with repeated_if_failed(root, _on_lazy_init):
        units, others = [], []
        for path, module in root.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                if isinstance(unit := unit_of(module), StrategyUnit):
                    unit.sharded.rename(_name_of(path))
                    units.append(unit)
                else:
                    others.append(sharded_of(module).numel())
        check_one_group(units)
        if units:
            name = model_name(root)
            prepare_frozen(root)
            hooks = set_up_model(root, name, units, [numel for numel in others if numel])
            log_frozen(root, name, units)
            _torch_handle.watch_backwards(root, hooks.backward_ended).reduce_in_two_streams()
            _torch_handle.disable_prefetch_unless_sharded(root)


def _before_move(instance: FullyShardedDataParallel) -> None:
    # Handle all units at once: torch removes the original parameters of all of them before it moves the first.
    for each in FullyShardedDataParallel.fsdp_modules(instance):
        if (handle := _torch_handle.handle_of(each)) is not None:
            handle.drop_cleared_gradients()
            copy_replaced(handle)


def _after_move(instance: FullyShardedDataParallel) -> None:
    if (handle := _torch_handle.handle_of(instance)) is not None:
        handle.moved()


def _name_of(path: str) -> str:
    """Return a unit's name: the path of the wrapped module, or ``frozen of <path>`` for a unit of frozen parameters."""
    name = path.replace("_fsdp_wrapped_module.", "")
    owner = name.removesuffix("_fsdp_wrapped_module").rstrip(".")
    return f"frozen of {owner or 'root'}" if name.endswith("_fsdp_wrapped_module") else name or "root"


def _adopt_hook_state(model: FullyShardedDataParallel, state: object) -> dict[FullyShardedDataParallel, object]:
    """Check that ``state`` reduces over the model's group, attach units that count its traffic, and log the reduction.

    Returns the state of each instance; an empty dict if ``state`` is another hook's.
    """
    if not isinstance(state, QuantizedReduceState):
        return {}
    instances = {path: m for path, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)}
    expected = dist.get_process_group_ranks(state.process_group)
    for instance in instances.values():
        ranks = dist.get_process_group_ranks(instance.process_group)
        if ranks != expected:
            raise ValueError(
                f"the QuantizedReduceState was made for the ranks {expected}, but this model is sharded over {ranks}; "
                "make the state with process_group= the model's group"
            )
    sharded = {_name_of(path): sharded_of(instance) for path, instance in instances.items()}
    sizes = {name: shard_signature(each.shards()) for name, each in sharded.items()}
    facts = {"codecs": state.codecs, "gpus_per_node": state.mesh.topology.gpus_per_node}
    call = f"register_comm_hook of {model_name(model)}"
    check_agreement(state.process_group, call, facts | {"error_feedback": state.error_feedback} | sizes)
    check_nodes(model, state.mesh)
    states: dict[FullyShardedDataParallel, object] = {}
    hooked: list[CommHookUnit] = []
    error_nbytes = 0
    for instance, (name, each) in zip(instances.values(), sharded.items(), strict=True):
        each.rename(name)
        own = states[instance] = state.of_unit(name, each.layout.trained if isinstance(each, ShardedHandle) else None)
        hooked.append(unit := CommHookUnit(own, each))
        if unit_of(instance) is None:
            attach(instance, unit)
            instance.register_load_state_dict_post_hook(lambda module, keys, unit=unit: unit.weights_loaded())
        error_nbytes += sum(own.error_nbytes(shard.numel()) for shard in each.shards())
    log_reduction(state.codecs, state.error_feedback, state.mesh, model_name(model), len(instances), error_nbytes)
    if error_nbytes:
        _torch_handle.watch_backwards(model, StepTracker(hooked).backward_ended)
    return states


PATCHES = (
    Patch(
        "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
        "a Strategy is taken for a sharding_strategy",
        functools.partial(_torch_flat_parameter.intercept_construction, _construct),
    ),
    Patch(
        "torch.distributed.fsdp.FullyShardedDataParallel.register_comm_hook",
        "each unit gets a QuantizedReduceState of its own",
        functools.partial(_torch_flat_parameter.intercept_hook_registration, _adopt_hook_state),
    ),
    Patch(
        "torch.distributed.fsdp._runtime_utils._share_state_and_init_handle_attrs",
        "the root becomes known, and with it all units of the model and the order in which they reduce",
        functools.partial(_torch_flat_parameter.on_lazy_init, _on_lazy_init),
    ),
    Patch(
        "torch.distributed.fsdp._runtime_utils._post_backward_hook",
        "micro-batches that are not the last reduce as far as the gradient scope says",
        _torch_handle.reduce_in_every_backward,
    ),
    Patch(
        "torch.distributed.fsdp._runtime_utils._get_reduce_scatter_tensors",
        "torch makes a view for every rank to find the size of a shard",
        _torch_flat_parameter.shard_gradients_in_constant_time,
    ),
    Patch(
        "torch.distributed.fsdp._runtime_utils._post_backward_final_callback",
        "a backward ends: if it synchronizes gradients, weights will change",
        _torch_handle.hear_of_backwards,
    ),
    Patch(
        "torch.distributed.fsdp._unshard_param_utils._writeback_to_local_shard",
        "weights change by summon_full_params(writeback=True) and load_state_dict",
        _torch_handle.announce_writebacks,
    ),
    Patch(
        "torch.distributed.fsdp.FullyShardedDataParallel._apply",
        "a move or cast of the model reaches the shard, and what was gathered of it is stale",
        functools.partial(_torch_flat_parameter.around_moves, _before_move, _after_move),
    ),
    Patch(
        "torch.distributed.fsdp.fully_sharded_data_parallel._unshard_params",
        "summon_full_params(recurse=False) summons frozen parameters that are kept apart, too",
        _torch_flat_parameter.summon_frozen_too,
    ),
    Patch(
        "torch.distributed.fsdp._optim_utils._map_param_key_to_optim_keys",
        "torch broadcasts keys of optimizer states from global rank 0, which a node's group may not have",
        _torch_flat_parameter.save_optimizer_states_in_any_group,
    ),
    Patch(
        "torch.distributed.fsdp.FullyShardedDataParallel._optim_state_dict_to_load_impl",
        "torch sends optimizer states that rank 0 alone has loaded over a group that may not have it",
        functools.partial(_torch_flat_parameter.load_optimizer_states_over, _all_ranks_of),
    ),
)
"""All parts of torch that are replaced; models with torch's own strategies behave as before.

Besides, handles of flat parameters with a strategy become :class:`_torch_handle.StrategyHandle`, and _torch_handle.py
replaces ``_runtime_utils._post_reduce_grad_callback`` for the first offloaded model.
"""


def install() -> None:
    for patch in PATCHES:
        patch.apply()
