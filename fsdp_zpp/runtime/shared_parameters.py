"""Parameters that two units share: FSDP gathers and reduces each in one unit alone, so a call that finds one raises.

torch's own calls go on, and fail in the forward with errors about something else, or train the two apart. Parameters
that a call has sharded are marked, and so are their modules, since FSDP replaces parameters, or takes them away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from fsdp_zpp.module_names import join_fqn, parameter_name

Site = tuple[nn.Module, str]
"""A module and the name of a parameter there."""
_HELD = "_fsdp_zpp_held"
"""Attribute of a parameter, its name in the call that has sharded it; and of a module, these names by parameter.

Only text, since torch.save() also saves the attributes of a parameter.
"""
_ANOTHER = "a parameter of another unit"


@dataclass(frozen=True)
class Shared:
    """A parameter that a call would shard and another unit has.

    Attributes:
        site: Where the call finds it.
        name: Its name in the call's modules.
        parameter: The parameter; None where FSDP has taken it off its module.
        held_as: Its name in the other unit's call.
    """

    site: Site
    name: str
    parameter: nn.Parameter | None
    held_as: str


@dataclass(frozen=True)
class Units:
    """How to recognize the units of an adapter.

    Attributes:
        is_unit: Returns whether a module is one.
        is_torchs: Returns whether torch has sharded the parameter of a module already, by whatever strategy.
    """

    is_unit: Callable[[nn.Module], bool]
    is_torchs: Callable[[nn.Module, nn.Parameter], bool]

    def sites(self, modules: Sequence[nn.Module]) -> dict[Site, tuple[str, nn.Parameter]]:
        """Return the parameters of ``modules`` that are in no unit below them, with names."""
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

        Args:
            modules: The modules that a call shards.
            ignored: Parameters that it leaves alone.
            own: The parameters that it has sharded already.
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
                    return Shared((module, name), parameter_name(path, name), parameter, held_as)
        return None

    def explain(self, shared: Shared, root: nn.Module, modules: Collection[nn.Module]) -> str:
        """Return which units share a parameter.

        Args:
            shared: The parameter.
            root: The outermost module that is known.
            modules: The modules of the call that found it.
        """
        names: dict[str, str] = {}
        for unit, name in self._names(root, shared, modules, "", ""):
            names.setdefault(unit, name)
        if len(names) < 2:
            name = next(iter(names.values()), shared.name)
            return f"{name} was sharded before, as {shared.held_as}"
        return " and ".join(f"{name} (unit {unit or 'root'})" for unit, name in names.items()) + " are one parameter"

    def _names(
        self, module: nn.Module, shared: Shared, units: Collection[nn.Module], path: str, unit: str
    ) -> Iterator[tuple[str, str]]:
        """Yield each unit and name under which ``module`` has a shared parameter; named_modules() has one alone."""
        if self.is_unit(module) or module in units:
            unit = parameter_name(path, "").rstrip(".")
        for name, parameter in module._parameters.items():
            if (module, name) != shared.site and parameter is not None and parameter is shared.parameter:
                yield unit, parameter_name(path, name)
        if module is shared.site[0]:
            yield unit, parameter_name(path, shared.site[1])
        for name, child in module._modules.items():
            if child is not None:
                yield from self._names(child, shared, units, join_fqn(path, name), unit)

    def _own(self, modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that are in no unit below ``modules``, with paths; each once."""
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
    """Mark a parameter as sharded, before or after FSDP has replaced it on its module.

    Args:
        site: Where it is, or was.
        name: Its name in the unit.
        parameter: The parameter, as it was before the call.
        unit: The name of the unit's class.
    """
    module, own_name = site
    held_as = f"{name} of another {unit}"
    vars(module).setdefault(_HELD, {})[own_name] = held_as
    for each in (parameter, module._parameters.get(own_name)):
        if each is not None:
            setattr(each, _HELD, held_as)


def held(parameter: nn.Parameter) -> str | None:
    """Return the name of a parameter in the unit that has sharded it; None if there is none."""
    return vars(parameter).get(_HELD)
