"""Functions on sharded models, and checks of models before they are sharded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_zpp.comm.agreement import PLACE, agree
from fsdp_zpp.comm.hops import Kind, Level
from fsdp_zpp.local_steps.elastic import ElasticTraining, Membership
from fsdp_zpp.local_steps.local_training import EXCHANGE, LocalTraining
from fsdp_zpp.names import parameter_name
from fsdp_zpp.strategy.local_steps import LocalSteps
from fsdp_zpp.strategy.strategy import Strategy

from ._torch_rank_layout import node_size_fact
from .unit import COMMUNICATORS, Communicator, StrategyUnit, is_packed, named_units

# ---- ranks of a model, for calls without a process group


def ranks_of(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return ``process_group`` if it is given, otherwise the largest group that a part of ``model`` is sharded over.

    For a model that is not sharded, or is sharded over a mesh of several dimensions, return all ranks of the job. None
    without torch.distributed. Does not communicate. ``model`` may have any type: the caller checks it on all ranks.
    """
    if process_group is not None or not dist.is_initialized() or not isinstance(model, nn.Module):
        return process_group if process_group is not None else dist.group.WORLD
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if any(mesh.ndim > 1 for mesh in meshes):
        return dist.group.WORLD
    groups = _unit_groups(model) or _instance_groups(model) or [mesh.get_group() for mesh in meshes]
    return max(groups, key=dist.get_world_size) if groups else dist.group.WORLD


def _unit_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    # Units come first: under the optimizer scopes I and N, torch knows only the group of a node or of a rank.
    parts = (part for module in model.modules() for part in getattr(module, COMMUNICATORS, ()))
    groups = [*(unit.ranks.group for unit in named_units(model)), *(group for part in parts for group in part.groups)]
    return [group for group in groups if group is not None]


def _instance_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    instances = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    if any("HYBRID" in instance.sharding_strategy.name for instance in instances):  # these have a node's group
        return []
    return [instance.process_group for instance in instances if instance.process_group is not None]


# ---- checks that both adapters make before they send anything

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")


def check_folder(path: object) -> Path:
    """Return the folder that ``path`` names, or raise a TypeError."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a folder, as a str or a path, got {path!r}")
    return Path(path)


def check_instance(name: str, value: object) -> None:
    """Raise a TypeError if the class Strategy, or a method that makes a Strategy, is passed instead of an instance."""
    if isinstance(value, type) and issubclass(value, Strategy):
        raise TypeError(f"{name} is the class Strategy itself, not an instance; did you mean Strategy()?")
    made_by = getattr(value, "__self__", None)
    if isinstance(made_by, type) and issubclass(made_by, Strategy):
        call = f"Strategy.{getattr(value, '__name__', '')}"
        raise TypeError(f"{name} is the method {call} itself, not what it returns; did you mean {call}()?")


def refuse_strategy(strategy: object, name: str = "strategy", also: str = "") -> NoReturn:
    """Raise a TypeError for ``strategy``, which is none; ``also`` names what else the argument may be."""
    check_instance(name, strategy)
    raise TypeError(f"{name} must be a Strategy such as Strategy.zeropp(){also}, got {strategy!r}")


def strategy_facts(strategy: object, group: dist.ProcessGroup) -> dict[str, object]:
    """Return the facts about a strategy on which ranks must agree; see [Note: Agreement] in agreement.py."""
    # Compare any other object, too: if this rank raised here, the others would hang in the comparison.
    if not isinstance(strategy, Strategy):
        return {"strategy": strategy}
    facts: dict[str, object] = {"strategy": "a Strategy"}
    facts |= {field.name: getattr(strategy, field.name) for field in dataclasses.fields(strategy)}
    return facts | {"gpus_per_node": node_size_fact(strategy.gpus_per_node, group)}


def check_dtypes(parameters: Iterable[tuple[str, Tensor]], remedy: str, *, takes_integers: bool = False) -> None:
    """Raise a TypeError if a parameter's dtype can't be sharded; ``remedy`` ends its message."""
    for name, parameter in parameters:
        if parameter.dtype in DTYPES:
            continue
        has_packed = is_packed(parameter)
        # bitsandbytes' layers in 8 bits read attributes of their parameters that FSDP does not keep.
        in_8_bits = hasattr(parameter, "CB")
        if has_packed and takes_integers and not in_8_bits:
            continue
        packed = (
            "store packed values with bnb_4bit_quant_storage=torch.bfloat16; or pass frozen= to the strategy, which "
            "takes over bitsandbytes' layers of 4096 values or more; or "
        )
        if in_8_bits:
            packed = "load the base in 4 bits, or in bf16 and quantize it as Int8(256); or "
        raise TypeError(
            f"parameter {name} is {parameter.dtype}; a Strategy shards {', '.join(map(str, DTYPES))}; "
            f"{packed * has_packed}{remedy}"
        )


def check_exchanges(local_steps: LocalSteps, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a NotImplementedError if exchanges would round copies of a parameter differently on each rank."""
    codec = local_steps.codec
    if codec is None or codec.block_numel:
        return
    for name, parameter in parameters:
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"local_steps with codec={codec} can't be combined with another parallelism, but {name} is sharded "
                "already: the codec's block_numel is 0, so all values depend on each other, and copies of a parameter "
                "would be rounded as their neighbours on each rank demand; return the size of a block, or use "
                "LocalSteps(codec=None)"
            )


# ---- parameters that two units share
#
# FSDP gathers and reduces a parameter in one unit alone, so a call that finds a shared parameter raises. torch's own
# calls do not check: the forward fails with other errors, or two separate copies are trained. Parameters that a call
# has sharded are marked, and so are their modules, since FSDP replaces or removes parameters.

Site = tuple[nn.Module, str]
"""A module and the name of a parameter there."""
_HELD = "_fsdp_zpp_held"
"""On a parameter, this attribute is its name in the call that has sharded it; on a module, a dict from its parameters'
own names to such names. It holds only text, since torch.save() also saves the attributes of a parameter.
"""
_ANOTHER = "a parameter of another unit"


class Shared(NamedTuple):
    """A parameter that another unit has already: its name in this call, and its name in that unit's call."""

    name: str
    held_as: str

    def __str__(self) -> str:
        return f"{self.name} was sharded before, as {self.held_as}: it is shared by two units"


@dataclass(frozen=True)
class AdapterUnits:
    """Predicates of an adapter: which modules are its units, and which parameters torch has sharded."""

    is_unit: Callable[[nn.Module], bool]
    is_torchs: Callable[[nn.Module, nn.Parameter], bool]

    def sites(self, modules: Sequence[nn.Module]) -> dict[Site, tuple[str, nn.Parameter]]:
        """Return the parameters of ``modules``, except those of units below, with names."""
        return {
            (module, name): (parameter_name(path, name), parameter)
            for path, module in self._own(modules)
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def find_shared(
        self, modules: Sequence[nn.Module], ignored: Collection[nn.Parameter] = (), own: Collection[Site] = ()
    ) -> Shared | None:
        """Return the first parameter of ``modules`` that another unit has; None if there is none.

        ``ignored`` are parameters that the call leaves alone, ``own`` those that it has sharded already.
        """
        left_alone = set(map(id, ignored))
        for path, module in self._own(modules):
            held: dict[str, str] = vars(module).get(_HELD, {})
            for name in dict.fromkeys([*module._parameters, *held]):
                parameter = module._parameters.get(name)
                if (module, name) in own or id(parameter) in left_alone:
                    continue
                held_as = held.get(name)
                if parameter is not None and held_as is None:
                    is_torchs = self.is_torchs(module, parameter)
                    held_as = vars(parameter).get(_HELD, _ANOTHER if is_torchs else None)
                if held_as is not None:
                    return Shared(parameter_name(path, name), held_as)
        return None

    def _own(self, modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
        """Yield ``modules`` and all modules below, except units and what they contain, with paths; each once."""
        seen: set[nn.Module] = set()
        waiting = [("", module) for module in reversed(modules)]
        while waiting:
            path, module = waiting.pop()
            if module in seen or self.is_unit(module):
                continue
            seen.add(module)
            yield path, module
            waiting += [
                (f"{path}.{name}" if path else name, child)
                for name, child in reversed(module._modules.items())
                if child is not None
            ]


def hold(site: Site, name: str, parameter: nn.Parameter, unit: str) -> None:
    """Mark a parameter of a unit as sharded, before or after FSDP has replaced it on its module."""
    module, own_name = site
    held_as = f"{name} of another {unit}"
    vars(module).setdefault(_HELD, {})[own_name] = held_as
    for each in (parameter, module._parameters.get(own_name)):
        if each is not None:
            setattr(each, _HELD, held_as)


def held(parameter: nn.Parameter) -> str | None:
    return vars(parameter).get(_HELD)


# ---- functions that users call with a model


def communicators(model: nn.Module) -> Iterator[Communicator]:
    """Yield the units of a model, outermost first, then its frozen base; raise a ValueError if there are none."""
    check_module(model)
    # All modules of a frozen base list the same base. A dict drops repeats and keeps the order, unlike a set.
    parts: dict[Communicator, None] = dict.fromkeys(named_units(model))
    parts |= {part: None for module in model.modules() for part in getattr(module, COMMUNICATORS, ())}
    if not parts:
        raise ValueError(
            f"no part of this {type(model).__name__} communicates through fsdp_zpp; wrap it with a Strategy, register "
            "a quantized_reduce_hook, or quantize its frozen weights first"
        )
    yield from parts


def invalidate(model: nn.Module) -> None:
    """Declare that the weights of ``model`` have changed; call it on every rank.

    These events declare a change by themselves: a backward that synchronizes gradients, a step of a torch optimizer,
    the optimizer's ``train()`` and ``eval()`` if it has them (as schedule-free ones do), ``load_state_dict``,
    ``torch.distributed.checkpoint.load`` into them on all ranks, and ``summon_full_params(writeback=True)``. The first
    three concern only weights that were ever trained or given to an optimizer. After any other write to the weights,
    call this before the next forward, so that the weights are gathered between nodes again. Examples of such writes are
    clipping, averaging, ``p.data.copy_()``, ``torch._foreach_*``, fused kernels that are called directly, a teacher's
    moving average, ``eval()`` and ``train()`` of optimizers that are not torch's. Version counters show some of these
    writes, so that the next gather raises a ``StaleSecondaryError``; ``FSDP_ZPP_CHECK=1`` makes it raise after any.
    A forward sends the weights of all units as soon as it needs the first, so after a write within a forward (in a
    hook, say), call this before the forward reaches the unit that was written to.

    Args:
        model: A model wrapped with a ``Strategy``, or a part of one.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
    """
    for part in communicators(model):
        part.invalidate()


def traffic(model: nn.Module, *, reset: bool = False) -> dict[Kind, dict[Level, int]]:
    """Return the bytes that this rank has sent for ``model`` so far, or since the last reset, by kind and hop.

    It counts what the strategies, comm hooks and frozen bases of fsdp_zpp send. It does not count torch's own
    collectives: full-precision gathers for state dicts and ``summon_full_params``, and, on one node, whatever is not
    encoded. An all-gather of a payload of b bytes over n ranks counts as b * (n - 1), an all-to-all as b * (n - 1) / n.

    Args:
        model: A model, or a part of one, that is wrapped with a ``Strategy``, has a
            ``quantized_reduce_hook``, or has a quantized frozen base.
        reset: Restart the count; the next call then returns the bytes sent after this one.

    Returns:
        ``{"gather": {"inter": ..., "intra": ...}, "reduce": {"inter": ..., "intra": ...}}``, in bytes.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
    """
    total: dict[Kind, dict[Level, int]] = {"gather": {"inter": 0, "intra": 0}, "reduce": {"inter": 0, "intra": 0}}
    # Counters are keyed by identity, since all units of a model with a comm hook share the Traffic of its state.
    for counter in {id(part.traffic): part.traffic for part in communicators(model)}.values():
        for (kind, level), nbytes in counter.since_reset().items():
            total[kind][level] += nbytes
        if reset:
            counter.reset()
    return total


def exchange_weights(model: nn.Module) -> None:
    """Exchange all weights between nodes now, so that all hold the same weights; call it on every rank.

    With ``Strategy(local_steps=...)``, nodes exchange weights every few steps by themselves; this is for the end of
    training, or of a phase of it. Like the other exchanges, it sends encoded changes and makes an outer step. While
    steps are synchronous (``LocalSteps(start=...)``), nodes hold the same weights, and it does nothing.

    Args:
        model: A model wrapped with such a strategy, or a part of one that includes its outermost unit.

    Raises:
        ValueError: If the strategy of some rank has no local steps, ranks have made different numbers of steps, or some
            rank exchanges weights at another place, such as before a forward; every rank raises.
        RuntimeError: If the model of some rank has not run a forward yet, or is in :func:`agreed_weights`; every rank
            raises.
    """

    def check() -> list[tuple[LocalTraining, str]]:
        return [(training, training.describe_exchange_all()) for training in _local_trainings(model)]

    def summary(checked: list[tuple[LocalTraining, str]]) -> dict[str, str]:
        names = ", ".join(training.model for training, _ in checked)
        return {PLACE: "in exchange_weights", "model": names, "units": ", ".join(units for _, units in checked)}

    for training, _ in agree(_ranks_that_compare(model), check, summary, call=EXCHANGE):
        training.exchange_all()


@contextmanager
def agreed_weights(model: nn.Module) -> Iterator[None]:
    """Return a context in which each unit has the weights of its last exchange, the same on all nodes.

    With ``Strategy(local_steps=...)``, evaluation and state dicts show the weights of the node itself; in this context
    they show the agreed ones, as DiLoCo evaluates and saves them. The node's own weights are set aside and restored on
    exit; don't train inside. Nothing is sent between nodes, so entering on every rank of one node is enough.
    Right after a load, enter it on all ranks, since nodes first compare the loaded weights. While steps are
    synchronous, the agreed weights are the current ones.

    Args:
        model: A model wrapped with such a strategy, or a part of one that includes its outermost unit.

    Raises:
        ValueError: If its strategy has no local steps.
        RuntimeError: If the model has not run a forward yet, or shows its agreed weights already.

    Examples:
        >>> with agreed_weights(model):
        ...     state = get_model_state_dict(model)
    """
    with ExitStack() as stack:
        for training in _local_trainings(model):
            stack.enter_context(training.showing_agreed())
        yield


def members(model: nn.Module) -> Membership:
    """Return this node's place among the nodes that train together, and the steps that these have made.

    A node that joins takes over the step of the others in its second forward; its loop must go on from that step.
    Does not communicate.

    Args:
        model: A model wrapped with ``Strategy.diloco(elastic=...)``, or a part of one that includes its outermost unit.

    Raises:
        ValueError: If its strategy has no elastic nodes.
        RuntimeError: If the model has not run a forward yet.

    Examples:
        >>> step = 0
        >>> while step < 10_000:
        ...     train_one_step(model, optimizer, lr=schedule(step))
        ...     step = members(model).step
    """
    return _elastic_training(model).membership


def count_tokens(model: nn.Module, tokens: int) -> None:
    """Count tokens that this node has trained on; exchanges then weight its changes by tokens instead of steps.

    Call it in every step, before the next forward, on all nodes or on none. All ranks of a node pass the same number,
    the tokens of the whole node. Does not communicate.

    Args:
        model: As of :func:`members`.
        tokens: How many tokens this node has trained on since the last call.

    Raises:
        ValueError: If its strategy has no elastic nodes, or ``tokens`` is not a number of tokens.
        RuntimeError: If the model has not run a forward yet.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"tokens must be an int of 0 or more, got {tokens!r}")
    _elastic_training(model).count_tokens(tokens)


def end_training(model: nn.Module) -> None:
    """Declare that elastic nodes have made all steps: no node may join any more, and nodes that wait to join raise.

    Without this call, a node that comes back after the others are done would train from the beginning. Call it after
    :func:`exchange_weights`, on every rank of a node; one node is enough.

    Args:
        model: As of :func:`members`.

    Raises:
        ValueError: If the strategy of some rank has no elastic nodes; every rank raises.
        RuntimeError: If the model has not run a forward yet, or the store can't be reached.
    """
    agree(_ranks_that_compare(model), lambda: _elastic_training(model), call="end_training").end()


def _ranks_that_compare(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks of the local training of ``model``, which compare their calls; by default :func:`ranks_of`."""
    units = named_units(model) if isinstance(model, nn.Module) else {}
    trainings = (unit.local_training for unit in units if isinstance(unit, StrategyUnit))
    return next((training.group for training in trainings if training is not None), ranks_of(model))


def _elastic_training(model: nn.Module) -> ElasticTraining:
    for training in _local_trainings(model):
        if isinstance(training, ElasticTraining):
            return training
    raise ValueError(f"the local steps of this {type(model).__name__} have no elastic=Elastic(...)")


def _local_trainings(model: nn.Module) -> list[LocalTraining]:
    """Return the local trainings of a model; none on a single node, where there is nothing to exchange."""
    parts = communicators(model)
    local = [part for part in parts if isinstance(part, StrategyUnit) and part.strategy.local_steps is not None]
    if not local:
        raise ValueError(f"no part of this {type(model).__name__} has a Strategy(local_steps=...)")
    fragments = [unit.fragment for unit in local if unit.fragment is not None]
    trainings = list(dict.fromkeys(unit.local_training for unit in local if unit.local_training is not None))
    if fragments and not trainings:
        raise RuntimeError(
            f"this {type(model).__name__} has not run a forward yet, and local steps start with the first: run one, "
            "then call this"
        )
    return trainings
