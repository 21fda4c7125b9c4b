"""Training with local steps: when weights and optimizers' moments are exchanged."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_zpp.comm.agreement import (
    PLACE,
    agree,
    all_reduce_flags,
    check_agreement,
    from_each_rank,
    on_any_rank,
    ordered_sum,
    replicas_are_equal,
)
from fsdp_zpp.comm.flat_layout import Sharded
from fsdp_zpp.comm.gradient_reduce import StepReductions, set_synchronous
from fsdp_zpp.comm.hops import Hop, SideStream, Traffic, decode, encode
from fsdp_zpp.comm.mesh import ProcessMesh, collective_device, for_collectives
from fsdp_zpp.strategy.local_steps import MOMENT_CODEC, TARGET_GAIN

from .fragment import Fragment, ParameterState, Progress
from .outer_step import MOST_GAIN, MOST_IN_A_ROW, NodeChunks, Products

# ---- made optimizers
#
# The optimizers that this process has constructed, found by the parameters that they hold.
#
# A node that joins takes over optimizer states before its own optimizers have stepped. fragment.py knows only the
# optimizers that have stepped.

_MADE = "_fsdp_zpp_made"
IN_OPTIMIZER = "_fsdp_zpp_in_optimizer"
"""Attribute of parameters that were given to some optimizer."""


def note_optimizer(optimizer: Optimizer) -> None:
    """Remember ``optimizer`` for as long as it exists; called when it is constructed."""
    _made().setdefault(id(optimizer), optimizer)


def optimizers_of(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Return the optimizers that hold any of ``parameters``, in the order of their construction."""
    ids = {id(parameter) for parameter in parameters}
    return [
        each for each in _made().values() if any(id(p) in ids for group in each.param_groups for p in group["params"])
    ]


def _made() -> weakref.WeakValueDictionary[int, Optimizer]:
    # The dictionary is an attribute of torch's Optimizer class. Its order, that of construction, is the same in all
    # processes that run the same program. A WeakValueDictionary forgets dead optimizers even while the interpreter
    # shuts down; a weakref callback of this module would find the module's globals gone.
    if _MADE not in vars(Optimizer):
        setattr(Optimizer, _MADE, weakref.WeakValueDictionary())
    made: weakref.WeakValueDictionary[int, Optimizer] = vars(Optimizer)[_MADE]
    return made


# ---- optimizer state
#
# An optimizer's state on this rank, in checkpoints of nodes that train on their own.
#
# torch's checkpoints keep one copy of tensors that replicas share. Nodes that train on their own are not replicas, so
# each rank saves its own optimizer state.


class OptimizerState:
    """An optimizer's state on this rank; it is restored together with ``fragment``."""

    def __init__(self, optimizer: Optimizer, fragment: Fragment) -> None:
        self._optimizer, self._fragment = optimizer, fragment

    def state_dict(self) -> dict[str, list[ParameterState]]:
        """Return the state by parameter, in the optimizer's order."""
        if id(self._optimizer) in self._fragment.pending:
            return {"state": self._fragment.pending[id(self._optimizer)][0]}
        states = (self._optimizer.state.get(parameter, {}) for parameter in self._parameters())
        return {"state": [{name: _saved(value) for name, value in state.items()} for state in states]}

    def load_state_dict(self, state: dict[str, list[ParameterState]]) -> None:
        """Continue with a saved state from the next forward on."""
        self.check(state["state"])
        # The fragment keeps the state, so that another OptimizerState can save it again before the next forward.
        self._fragment.pending[id(self._optimizer)] = (state["state"], self.restore)

    def check(self, saved_states: list[ParameterState]) -> None:
        parameters = len(list(self._parameters()))
        if parameters != len(saved_states):
            raise ValueError(
                f"the saved optimizer state has {len(saved_states)} parameters, but this optimizer has {parameters}"
            )

    def reset(self) -> None:
        """Drop the loaded state, so that the state from torch's own checkpoint stays."""
        self._fragment.pending.pop(id(self._optimizer), None)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def restore(self, saved_states: list[ParameterState]) -> None:
        states = iter(saved_states)
        for group in self._optimizer.param_groups:
            for parameter, saved in zip(group["params"], states, strict=False):
                state = self._optimizer.state[parameter]
                present = dict(state)
                state.clear()
                for name, value in saved.items():
                    state[name] = _restored(value, present.get(name), parameter, group)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _saved(value: object) -> object:
    return _local(value).detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _restored(saved: object, present: object, parameter: nn.Parameter, group: Mapping[str, Any]) -> object:
    """Return the ``saved`` state of ``parameter`` in the form that its optimizer uses, such as a DTensor."""
    if not isinstance(saved, Tensor):
        return saved
    if isinstance(present, Tensor):
        local = _local(present)
        if local.shape == saved.shape and local.dtype == saved.dtype:
            local.copy_(saved)
            return present
    if isinstance(parameter, DTensor) and saved.shape == parameter.to_local().shape:
        shard = saved.to(parameter.device)
        return DTensor.from_local(
            shard, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    # torch counts steps of fused and capturable optimizers on the device, those of others on the CPU.
    counts_on_device = group.get("fused") or group.get("capturable")
    return saved.to(parameter.device) if saved.ndim or counts_on_device else saved


# ---- moment average
#
# Average of optimizers' moments over nodes that train on their own.
#
#     this node's moments         this rank's shard of each moment, in the moment's dtype
#         | in chunks             fp32, each parameter cut into one chunk per node
#     mean over nodes             encode, all-to-all among the ranks with this local index, decode, sum in fp32
#         | each rank its chunk
#     moments of all nodes        encode, all-gather among the same ranks, decode: equal bit for bit
#
# Source: DES-LOC (arXiv 2505.22549), algorithm 1, which averages moments more rarely than weights.
#
# [Note: Roots of moments]
# Adam divides by the root of its second moment. A blockwise code rounds the small values of a block to 0, and an update
# is then divided by eps alone. So the codec encodes fourth roots, with their signs: the smallest code of 8 bits stands
# for 1 / 127**4 of a block's largest value. If a block has no negative values, roots that would still round to 0 decode
# to half of the smallest code. First moments are encoded in the same way: an optimizer divides each value by its own
# scale, so small values matter, too. The mean is taken over the moments, after their roots are decoded.

_HALF_CODE = 1 / 254  # half of the distance between two codes of 8 bits, as a share of a block's largest value


class MomentAverage:
    """Replaces moments by their mean over nodes; sends roots of moments in 8 bits."""

    def __init__(self, mesh: ProcessMesh, traffic: Traffic, label: str) -> None:
        assert mesh.inter is not None
        self._label, self._nodes = label, mesh.topology.nodes
        self._reduce = Hop(mesh.inter, "reduce", "inter", traffic)
        self._gather = Hop(mesh.inter, "gather", "inter", traffic)

    @torch.no_grad()
    def average(self, moments: Mapping[str, Tensor], placements: Mapping[str, Hashable]) -> None:
        """Replace moments of one kind, such as Adam's second ones, by their mean over nodes, in place.

        Collective among the ranks with this local index if they hold values of these moments. Moments are contiguous,
        and have the same sizes on all nodes.
        """
        held = {name: moment.view(-1) for name, moment in moments.items() if moment.numel()}
        if not held:
            return
        numels = {name: moment.numel() for name, moment in held.items()}
        chunks = NodeChunks(numels, placements, self._nodes, MOMENT_CODEC.block)
        device = for_collectives(next(iter(held.values())).new_empty(0), self._gather.group).device
        # Zeros where chunks are padded.
        flat = torch.zeros(self._nodes, chunks.layout.numel, dtype=torch.float32, device=device)
        for name, places, part in chunks.places(flat):
            part.copy_(held[name][places])
        # No variable holds a payload, so that the payload's memory is freed once it is decoded.
        self._decode(self._reduce.all_to_all(self._encoded(flat), self._label), flat)
        mean = flat[:1]
        for other in flat[1:]:  # in node order, so that copies on other mesh axes are summed in the same order
            mean.add_(other)
        self._decode(self._gather.all_gather(self._encoded(mean.div_(self._nodes)), self._label), flat)
        for name, places, part in chunks.places(flat):
            held[name][places].copy_(part)

    def _encoded(self, rows: Tensor) -> Tensor:
        for row in rows:
            signs = row.sign()
            row.abs_().sqrt_().sqrt_().mul_(signs)
        return encode(MOMENT_CODEC, rows.view(-1), 1, len(rows), self._label)

    def _decode(self, payload: Tensor, rows: Tensor) -> None:
        decode(MOMENT_CODEC, payload, rows.view(-1), 1, len(rows), self._label)
        for row in rows:
            whole = len(row) // MOMENT_CODEC.block * MOMENT_CODEC.block
            for blocks in (row[:whole].view(-1, MOMENT_CODEC.block), row[whole:].view(1, -1)):
                if blocks.numel():
                    _clamp_to_half_code(blocks)
            signs = row.sign()
            row.square_().square_().mul_(signs)


def _clamp_to_half_code(blocks: Tensor) -> None:
    """Raise values to at least half a code in blocks that have no negative value; see [Note: Roots of moments]."""
    half, lowest = blocks.amax(1, keepdim=True).mul_(_HALF_CODE), blocks.amin(1, keepdim=True)
    torch.maximum(blocks, torch.where(lowest < 0, -torch.inf, half), out=blocks)


# ---- moments
#
# This section finds the moments of a model's optimizers, and averages them over nodes that train on their own.
#
# [Note: States that nodes average]
# A moment is a floating-point tensor with as many values as this rank holds of its parameter: Adam's two, Muon's
# momentum. After an average all nodes hold the same states bit for bit. If a parameter has had no gradient on a node,
# that node's optimizer has no state of it. The node then counts with moments of zero, those that zero gradients make.
# Numbers such as step counters come from the node with the most steps of the parameter: fewer steps would make bias
# corrections, and so updates, larger. States of other kinds can't be averaged, and are refused.

_CALL = "an average of moments over nodes"
Number = int | float | Tensor
States = Mapping[str, torch.dtype | Number]  # a parameter's states by name: a moment's dtype, or a number
Key = tuple[str, str, int]  # a unit's name, a parameter's FQN, and its optimizer's number


class MomentUnit(Protocol):
    sharded: Sharded
    ranks: ProcessMesh
    traffic: Traffic


@dataclass(frozen=True, eq=False)
class _OptimizerParam:
    unit: MomentUnit
    name: str  # the parameter's FQN; for a flat parameter, the first FQN in it
    parameter: nn.Parameter
    optimizer: Optimizer
    group: Mapping[str, Any]
    number: int  # the optimizer's, among the known optimizers

    def metadata(self) -> States:
        """Return the moments' dtypes and the numbers; raise a ValueError if nodes can't average a state."""
        states = self.optimizer.state.get(self.parameter, {})  # empty until the optimizer first steps it
        return {name: self._metadata_of(name, value) for name, value in states.items() if value is not None}

    def _metadata_of(self, name: str, value: object) -> torch.dtype | Number:
        if isinstance(value, int | float):
            return value
        local = _local(value)
        if isinstance(local, Tensor) and type(local) in (Tensor, nn.Parameter) and local.layout == torch.strided:
            if local.ndim == 0:
                return local.detach().cpu()
            numel = _local(self.parameter).numel()
            if local.is_floating_point() and local.is_contiguous() and local.numel() == numel:
                return local.dtype
        shape = f" {local.dtype} of shape {list(local.shape)}" if isinstance(local, Tensor) else ""
        raise ValueError(
            f"{self.unit.sharded.name}: {type(self.optimizer).__name__} keeps {name!r} of {self.name} as a "
            f"{type(local).__name__}{shape}, which nodes can't average: a moment is a plain, contiguous floating-point "
            "tensor with as many values as the rank holds of the parameter; use another optimizer, or local steps "
            "without moments_every"
        )

    def adopt(self, states: States) -> None:
        state = self.optimizer.state[self.parameter]
        for name, value in states.items():
            if not isinstance(value, torch.dtype):
                state[name] = _restored(value, state.get(name), self.parameter, self.group)
            elif state.get(name) is None:
                zeros = torch.zeros(_local(self.parameter).shape, dtype=value)
                state[name] = _restored(zeros, None, self.parameter, self.group)


class OptimizerMoments:
    """Averages the moments of a model's optimizers over nodes."""

    def __init__(self, model: str, units: Mapping[Fragment, MomentUnit], ranks: ProcessMesh) -> None:
        self._model, self._units, self._ranks = model, units, ranks
        self._optimizers = next(iter(units)).optimizers

    def saw(self, optimizer: object) -> None:
        if isinstance(optimizer, Optimizer):
            self._optimizers.add(optimizer)

    @torch.no_grad()
    def average(self, fragments: Sequence[Fragment]) -> None:
        """Replace the moments of all nodes by their mean, the same bit for bit. Collective.

        Raises a ValueError on every rank, before any moment is sent, if nodes can't average a state, nodes keep
        different states, or no optimizer is known.
        """
        units = [self._units[fragment] for fragment in fragments]
        params, metadata = agree(self._ranks.group, lambda: self._params_and_metadata(units), call=_CALL)
        gone = self._gone_on_any_rank()
        metadata = {key: states for key, states in metadata.items() if key[2] not in gone}
        by_node = [
            from_each_rank(
                {key: states for key, states in metadata.items() if params[key].unit.ranks == mesh}, mesh.inter
            )
            for mesh in dict.fromkeys(unit.ranks for unit in units)
            if mesh.inter is not None
        ]
        agreed = agree(
            self._ranks.group,
            lambda: {key: states for each in by_node for key, states in _agreed(each).items()},
            call=_CALL,
        )
        for key, states in agreed.items():
            params[key].adopt(states)
        for unit in units:
            self._average(unit, {params[key]: states for key, states in agreed.items() if params[key].unit is unit})

    def _gone_on_any_rank(self) -> frozenset[int]:
        """Return the numbers of the optimizers that any rank has freed. Collective."""
        gone = frozenset(range(self._optimizers.count)) - self._optimizers.alive().keys()
        group = self._ranks.group
        return gone if group is None else gone.union(*from_each_rank(gone, group))

    def _average(self, unit: MomentUnit, params: Mapping[_OptimizerParam, States]) -> None:
        kinds: dict[tuple[str, int], dict[str, Tensor]] = {}
        for each, states in params.items():
            for state, value in states.items():
                if isinstance(value, torch.dtype):
                    moment = _local(each.optimizer.state[each.parameter][state])
                    kinds.setdefault((state, each.number), {}).update(unit.sharded.named_parts(each.parameter, moment))
        over_nodes = MomentAverage(unit.ranks, unit.traffic, unit.sharded.name)
        placements = unit.sharded.placements()
        for _, moments in sorted(kinds.items(), key=itemgetter(0)):
            over_nodes.average(moments, placements)

    def _params_and_metadata(self, units: Sequence[MomentUnit]) -> tuple[dict[Key, _OptimizerParam], dict[Key, States]]:
        params = {(unit.sharded.name, each.name, each.number): each for unit in units for each in self._params_of(unit)}
        return params, {key: each.metadata() for key, each in params.items()}

    def _params_of(self, unit: MomentUnit) -> Iterator[_OptimizerParam]:
        """Yield each parameter with values on this rank, once per optimizer group with it; the same on all nodes."""
        if not self._optimizers.count:
            raise ValueError(
                f"{self._model}: nodes average the moments of optimizers, but no optimizer derived from "
                "torch.optim.Optimizer has stepped its parameters; use such an optimizer, or local steps without "
                "moments_every and stop"
            )
        of: dict[int, list[tuple[Optimizer, dict[str, Any], int]]] = {}
        for number, optimizer in self._optimizers.alive().items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    of.setdefault(id(parameter), []).append((optimizer, group, number))
        for parameter in unit.sharded.parameters():
            local: Tensor = _local(parameter).detach()
            if local.numel():
                name = next(iter(unit.sharded.named_parts(parameter, local)))
                for holder in of.get(id(parameter), []):
                    yield _OptimizerParam(unit, name, parameter, *holder)


def _agreed(by_node: Sequence[Mapping[Key, States]]) -> dict[Key, States]:
    """Return the states that all nodes will have; raise a ValueError if nodes keep different kinds for a parameter."""
    agreed: dict[Key, States] = {}
    for key in dict.fromkeys(key for node in by_node for key in node):
        present = [states for node in by_node if (states := node.get(key))]
        if not present:
            continue
        alike = all(_kinds(states) == _kinds(present[0]) for states in present)
        if not alike or any(key not in node for node in by_node):
            raise ValueError(
                f"{key[0]}: nodes average the moments of {key[1]}, but their optimizers keep different states of it; "
                "use the same optimizers with the same parameters on every node"
            )
        agreed[key] = max(present, key=_steps)
    return agreed


def _kinds(states: States) -> dict[str, Hashable]:
    return {name: value if isinstance(value, torch.dtype) else "number" for name, value in states.items()}


def _steps(states: States) -> float:
    steps = states.get("step", 0)
    return 0.0 if isinstance(steps, torch.dtype) else float(steps)


# ---- local training
#
# Local-update training of a model: it counts steps, and exchanges fragments between nodes when they are due.
#
# [Note: Steps of nodes]
# Nodes step on their own, but must agree after which step they exchange. So all nodes count the same event: the first
# step of an optimizer after a backward that synchronizes gradients, even if a gradient scaler skips that step. Steps of
# further optimizers do not count. Steps of an optimizer that is not torch's can't be observed; if there is no other
# optimizer, each backward that synchronizes gradients counts. Exchanges that are due after a step take place before the
# next forward that records gradients: all optimizers have stepped by then.
#
# [Note: Phases of local steps]
# The number of steps made decides whether the next step is synchronous. This is decided for all units at once, before
# the step's first forward and after the exchanges due before it. In synchronous steps nodes stay equal bit for bit, as
# without local steps, so they exchange nothing; a fragment that is due warms up its momentum. After the last
# synchronous step, the weights become the agreed ones. Changes of a fragment since it was last due are not in the
# momentum.
#
# A checkpoint may be loaded into another schedule, so it also says if nodes are ``apart``, training on their own.
#
# [Note: One place to meet]
# Nodes may be at different places of a training: one exchanges before a forward, while another is in
# ``exchange_weights`` after its loop, or is about to leave the synchronous steps. So before nodes communicate here,
# they compare their places over one group, as in [Note: Agreement] in agreement.py. Hops between nodes use other
# communicators, so the comparison does not wait for an exchange under way.
#
# In synchronous steps each backward reduces over all ranks, so nodes stay together as ranks do without local steps. But
# a node that skips the optimizer step after a backward needs more backwards to leave the synchronous steps. Other
# nodes may leave as soon as they have made as many backwards as there are synchronous steps. From that backward on,
# nodes that are still in these steps compare their places before each forward.

logger = logging.getLogger("fsdp_zpp")

EXCHANGE = "an exchange of weights between nodes"  # in errors; see [Note: One place to meet]


def before_forward_of(step: int) -> str:
    return f"before the forward of step {step + 1}"


class LocalTraining:
    """Counts the steps of the model under a root, and exchanges its fragments when due. The constructor is collective.

    ``fragments`` have the same order on all ranks; users may freeze and unfreeze them. Raises a ValueError if ranks
    differ in the number of steps made.
    """

    def __init__(
        self,
        model: str,
        fragments: Sequence[Fragment],
        reductions: Sequence[StepReductions],
        ranks: ProcessMesh,
        parameters: Callable[[], Iterable[nn.Parameter]],
        model_parallel_groups: Callable[[], Iterable[dist.ProcessGroup]],
        moments: OptimizerMoments,
    ) -> None:
        self._model_parallel_groups, self.moments = model_parallel_groups, moments
        self.model, self._all, self._reductions, self._ranks = model, fragments, reductions, ranks
        self._trained = [fragment for fragment in fragments if fragment.was_trained]
        self._parameters = parameters
        self._config = fragments[0].config
        self._awaits_step = self._shows_agreed = self._has_warned = False
        self._met_after = 0
        steps = [fragment.progress.made for fragment in fragments]
        check_agreement(ranks.group, f"the first forward of {model}", {"optimizer steps made, by unit": steps})
        stream = SideStream()
        for fragment in fragments:
            fragment.outer.stream = stream

    @property
    def _progress(self) -> Progress:
        return self._all[0].progress

    def gradients_synchronized(self) -> None:
        for fragment in self._all if self._awaits_step else ():
            fragment.progress.unstepped += 1
        self._awaits_step = True
        self._note_trained()

    def _note_trained(self) -> None:
        for fragment in self._all:
            fragment.note_trained()

    def step_ended(self) -> None:
        """Count a step, made or skipped; raise a RuntimeError if no forward of the root lies between two steps."""
        if not self._awaits_step:
            return
        self._awaits_step = False
        self._note_trained()
        for fragment in self._all:
            fragment.progress.made += 1
        if self._progress.made > self._progress.exchanged + 1:
            raise RuntimeError(
                f"{self.model} has made two optimizer steps without a forward of its outermost module between them; "
                "nodes exchange weights (local_steps) before that forward, so call the outermost module itself, not a "
                "method of it or a module inside it"
            )

    # The compiler must not trace this hook: at each call, the number of steps decides whether exchanges are due.
    @torch.compiler.disable
    def before_forward(self, root: nn.Module, *inputs: object) -> None:
        """Make the exchanges that are due; this is a hook before the root's forward."""
        if self._shows_agreed or not torch.is_grad_enabled():
            for fragment in self._all:
                fragment.restore()
            return
        if not any(getattr(parameter, IN_OPTIMIZER, False) for parameter in self._parameters()):  # no step is announced
            self.step_ended()
        self._prepare()
        self._catch_up()

    def _catch_up(self) -> None:
        """Make the exchanges that are due after the steps made so far, and enter the phase of the next step."""
        progress = self._progress
        if progress.apart and progress.made < self._config.start:
            raise ValueError(
                f"{self.model}: nodes have trained on their own for {progress.made} steps in the loaded state, but "
                f"start={self._config.start} has them make the next step together: continue with a start of "
                f"{progress.made} or less, or from weights alone that were saved under agreed_weights"
            )
        while progress.exchanged < progress.made:
            self._exchange_after(progress.exchanged + 1)
        self._enter_phase()

    def _prepare(self) -> None:
        """Restore loaded states, and give agreed weights to all parameters that were trained so far."""
        for fragment in self._all:
            fragment.restore()
        furthest = max((fragment.progress for fragment in self._all), key=lambda progress: progress.made)
        for fragment in self._all:  # a loaded state need not have all fragments
            fragment.progress.made, fragment.progress.exchanged = furthest.made, furthest.exchanged
            fragment.progress.apart, fragment.progress.unstepped = furthest.apart, furthest.unstepped
        for fragment in self._all:
            # Until the first step, adopt all weights again at each call: nothing notices if a user sets them.
            fragment.start(anew=furthest.made == 0 and not self._awaits_step)
        # The schedule counts all fragments that were ever trained, so that freezing one does not shift the others.
        self._trained = [fragment for fragment in self._all if fragment.was_trained]
        self._restart_from_loaded()

    def _restart_from_loaded(self) -> None:
        """If weights were loaded without a state of local steps, and are the same on all nodes, agree on them."""
        reloaded = [fragment for fragment in self._trained if fragment.was_reloaded]
        for fragment in reloaded:
            fragment.was_reloaded = False
        if not reloaded:
            return
        if not self._progress.apart:
            # Nodes hold the same weights, whether they have loaded new ones or put their old ones back.
            for fragment in reloaded:
                fragment.adopt()
            return
        shards = [shard for fragment in reloaded for shard in fragment.weights]
        differs = any(not fragment.holds_agreed for fragment in reloaded)
        # Loaded weights that differ between nodes are each node's own, such as those put back after an evaluation.
        # Loaded weights that equal the agreed ones change nothing. In both cases exchanges go on without a restart.
        met = self._on_any_rank(differs, "at the first use of weights that were loaded")
        if met and replicas_are_equal(shards, self._ranks, "I"):
            for fragment in reloaded:
                fragment.restart()

    def _exchange_after(self, step: int) -> None:
        if self._progress.apart:
            self._exchange_due(step)
        elif step <= self._config.start:
            for index in self._config.due(step, len(self._trained)):
                self._trained[index].warm_up()
        for fragment in self._all:
            fragment.progress.exchanged = step

    def _exchange_due(self, step: int) -> None:
        self._receive(step)
        due = self._config.due(step, len(self._trained))
        if due:
            self._on_any_rank(False, before_forward_of(step), units=f"{due} of {len(self._trained)} after step {step}")
            self._agree_on_exchange([self._trained[index] for index in due])
            self._average_moments([self._trained[index] for index in due])
        for index in due:
            fragment = self._trained[index]
            if fragment.progress.arrives is not None:  # still under way: a newly trained unit has shifted the schedule
                fragment.receive(self._config.mix)
            fragment.send(step + self._config.overlap)
        self._receive(step)

    def _receive(self, step: int) -> None:
        for fragment in self._trained:
            if fragment.progress.arrives is not None and fragment.progress.arrives <= step:
                fragment.receive(self._config.mix)

    def _on_any_rank(self, here: bool, place: str, **facts: object) -> bool:
        """Return whether ``here`` is true on any rank; raise if ``place`` differs: [Note: One place to meet]."""
        return on_any_rank(here, self._ranks.group, EXCHANGE, {PLACE: place, "model": self.model, **facts})

    def _agree_on_exchange(self, fragments: Sequence[Fragment]) -> None:
        """Mark parameters that any node has trained as changed on all nodes, and adapt the momentum. Collective."""
        flags = [(fragment, self._ranks, fragment.changed) for fragment in fragments]
        for fragment, on_any in all_reduce_flags(flags):
            fragment.changed = on_any()
        if fragments:
            self._adapt_momentum(fragments, self._products(fragments))

    def _average_moments(self, fragments: Sequence[Fragment]) -> None:
        """Average the moments of the fragments whose next exchange includes moments. Collective."""
        # Moments go first: hops over the same ranks take turns, and only the exchange of weights can overlap training.
        every = self._config.moments_every
        due = [each for each in fragments if every is not None and (each.progress.sent + 1) % every == 0]
        if due and due[0].progress.made:
            self.moments.average(due)

    @property
    def _groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self._ranks.group, *self._model_parallel_groups()) if group is not None]

    def _products(self, fragments: Sequence[Fragment]) -> list[Products]:
        """Return <m, g> and <g, g> of each fragment's last outer step, summed over ranks. Collective.

        ``fragments`` is not empty. Each rank knows the products of its own chunks. They are summed when a fragment is
        due again: the host waits for other ranks there anyway, and equal sums give all ranks the same momentum.
        """
        groups = self._groups
        device = collective_device(groups[0]) if groups else torch.device("cpu")
        sums = ordered_sum(torch.cat([fragment.outer.products.to(device) for fragment in fragments]), groups)
        return list(zip(sums[::2], sums[1::2], strict=True))

    def _adapt_momentum(self, fragments: Sequence[Fragment], products: Sequence[Products]) -> None:
        """Choose the momentum of each fragment's next outer step from its last steps; warn once if these overshoot."""
        gains = [fragment.outer.adapt_momentum(of) for fragment, of in zip(fragments, products, strict=True)]
        gain = max((each for each in gains if each is not None), default=None)
        if gain is None or self._has_warned:
            return
        self._has_warned = True
        config = self._config
        remedy = f"outer_lr={config.outer_lr}"
        if config.outer_momentum not in ("auto", 0):
            remedy = f"outer_momentum={config.outer_momentum} or {remedy}"
            remedy += ", or pass outer_momentum='auto'" * (config.outer_lr < TARGET_GAIN)  # else "auto" is refused
        if all(dist.get_rank(group) == 0 for group in self._groups):
            logger.warning(
                "%s: outer steps overshoot: in %d exchanges in a row they were more than %g times the nodes' mean "
                "change (now %.2f times); lower %s",
                self.model,
                MOST_IN_A_ROW,
                MOST_GAIN,
                gain,
                remedy,
            )

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the group of ranks that compare which exchange is next. See [Note: One place to meet]."""
        return self._ranks.group

    def describe_exchange_all(self) -> str:
        """Describe the exchanges of :meth:`exchange_all` for errors; the text must be the same on all ranks."""
        self._check_not_shown()
        units = sum(fragment.was_trained for fragment in self._all)
        return f"all {units} after step {max(fragment.progress.made for fragment in self._all)}"

    def exchange_all(self) -> None:
        """Exchange all fragments, so that nodes agree. Collective; callers compare ``describe_exchange_all`` first."""
        self._prepare()
        if not self._progress.apart:
            return
        step = self._progress.made
        for fragment in self._trained:
            fragment.note_trained()
        for fragment in self._trained:
            if fragment.progress.arrives is not None:
                fragment.receive(self._config.mix)
        self._agree_on_exchange(self._trained)
        self._average_moments(self._trained)
        for fragment in self._trained:
            fragment.send(step)
        for fragment in self._trained:
            fragment.receive(1.0)
        for fragment in self._all:
            fragment.progress.exchanged = step

    def _enter_phase(self) -> None:
        progress = self._progress
        synchronous = progress.made < self._config.start
        if synchronous:
            self._look_for_others()
        begins = f"{before_forward_of(progress.made)}, where {'synchronous' if synchronous else 'local'} steps begin"
        step = f"{self.model}, step {progress.made + 1}"
        set_synchronous(self._reductions, synchronous, partial(self._on_any_rank, place=begins), step)
        if not synchronous and not progress.apart:
            for fragment in self._all:
                if progress.made:
                    fragment.adopt()
                fragment.progress.apart = True

    def _look_for_others(self) -> None:
        """Raise if other nodes have left the synchronous steps. Collective as soon as any node may have left them."""
        progress = self._progress
        passed = progress.made + progress.unstepped + self._awaits_step  # equal on all nodes in synchronous steps
        if progress.made < self._config.start <= passed != self._met_after:
            self._met_after = passed
            self._on_any_rank(False, before_forward_of(progress.made))

    @contextmanager
    def showing_agreed(self) -> Iterator[None]:
        """Return a context in which the model has the agreed weights instead of this node's own."""
        self._check_not_shown()
        self._prepare()
        with patch.multiple(self, _shows_agreed=True), ExitStack() as stack:
            for fragment in self._trained if self._progress.apart else []:  # else all nodes hold the same weights
                stack.enter_context(fragment.showing_agreed())
            yield

    def _check_not_shown(self) -> None:
        if self._shows_agreed:
            raise RuntimeError(f"{self.model} shows its agreed weights: leave agreed_weights() first")
