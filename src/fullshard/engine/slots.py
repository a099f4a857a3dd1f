"""The places that show a unit's parameters, switched between sharded and compute parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.engine.reading import RestParameters
from fullshard.errors import AtRestError, unit_label

_EVERYWHERE = -1


@dataclass(slots=True)
class Site:
    """An attribute of a module that holds a parameter of the unit."""

    module: nn.Module
    attribute: str
    sharded: nn.Parameter
    compute: nn.Parameter
    name: str


@dataclass(slots=True)
class Switch:
    """A module whose sharded parameters are all of this unit: two dicts of parameters, exchanged as one."""

    attributes: dict[str, Any]  # the module's __dict__
    rest: RestParameters
    full: dict[str, Any]
    sites: list[Site]


class Entry:
    """One key of a RestParameters as a place, where a module's parameters belong to several units."""

    def __init__(self, rest: RestParameters) -> None:
        self._rest = rest

    def __getitem__(self, key: str) -> Any:
        return self._rest.raw(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._rest.put(key, value)


class Slots:
    """Every place that holds a unit's parameters, switched between at rest and full.

    A unit of several modules (merged blocks) is switched module by module: only the one whose forward runs
    needs its places, and switching all of them for each would cost the square of their number.
    """

    def __init__(self, unit: str, modules: Sequence[nn.Module]) -> None:
        self.unit = unit
        self._sites: dict[int, list[Site]] = {}  # by id of their module, until `attach`
        self._parts: dict[int, list[tuple[Any, Any, nn.Parameter, nn.Parameter]]] = {}
        self._switches: dict[int, list[Switch]] = {}
        self._forwards: dict[int, list[tuple[dict[str, Any], Any, Any]]] = {}
        self._names: dict[int, str] = {}
        self._part_of: dict[int, int] = {}
        for part, module in enumerate(modules if len(modules) > 1 else ()):
            for inside in module.modules():
                shared = id(inside) in self._part_of  # lies in two of them
                self._part_of[id(inside)] = _EVERYWHERE if shared else part

    def part(self, module: nn.Module | None) -> int:
        """What to switch for a forward of `module`."""
        return self._part_of.get(id(module), _EVERYWHERE)

    def add_site(
        self, site: tuple[nn.Module, str], sharded: nn.Parameter, compute: nn.Parameter, name: str
    ) -> None:
        self._sites.setdefault(id(site[0]), []).append(Site(*site, sharded, compute, name))
        self._names[id(sharded)] = name

    def add_alias(
        self, place: tuple[Any, Any], sharded: nn.Parameter, compute: nn.Parameter, name: str
    ) -> None:
        """`place` is a container and a key in it."""
        self._parts.setdefault(_EVERYWHERE, []).append((*place, sharded, compute))
        self._names[id(sharded)] = name

    def add_forward(self, module: nn.Module, stand_in: Any) -> None:
        """A stand-in for `module.forward` while the unit is at rest."""
        forwards = self._forwards.setdefault(self.part(module), [])
        forwards.append((module.__dict__, stand_in, stand_in.replaced))
        module.__dict__["forward"] = stand_in

    def stands_in(self, stand_in: Any) -> bool:
        return any(known is stand_in for part in self._forwards.values() for _, known, _ in part)

    def name_of(self, sharded: nn.Parameter) -> str:
        return self._names[id(sharded)]

    @property
    def module_ids(self) -> Iterable[int]:
        return self._sites.keys()

    def attach(
        self, shared: set[int], is_read_in_a_pass: Callable[[], bool], show: Callable[[Any], Any]
    ) -> None:
        """From now on modules show their parameters as this unit's state has it.

        `shared` are the ids of modules whose parameters belong to several units.
        """
        for sites in self._sites.values():
            module = sites[0].module
            part, attributes = self.part(module), module.__dict__
            rest = attributes["_parameters"]
            if not isinstance(rest, RestParameters):
                rest = attributes["_parameters"] = RestParameters(rest, is_read_in_a_pass, show)
            if id(module) in shared:
                entries = [(Entry(rest), s.attribute, s.sharded, s.compute) for s in sites]
                self._parts.setdefault(part, []).extend(entries)
            else:
                full = dict(dict.items(rest)) | {s.attribute: s.compute for s in sites}
                self._switches.setdefault(part, []).append(Switch(attributes, rest, full, sites))
        self._sites.clear()

    def show_full(self, part: int = _EVERYWHERE) -> None:
        for each in self._shown_with(part):
            for switch in self._switches.get(each, ()):
                if switch.rest.changed:
                    self._follow(switch)
                switch.attributes["_parameters"] = switch.full
            for container, key, sharded, compute in self._parts.get(each, ()):
                if container[key] is not sharded:
                    self._undo_and_refuse(self._names[id(sharded)])
                container[key] = compute
            for attributes, _, original in self._forwards.get(each, ()):
                if original is None:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = original

    def show_sharded(self, part: int = _EVERYWHERE) -> None:
        replaced = ""
        for each in self._shown_with(part):
            for switch in self._switches.get(each, ()):
                switch.attributes["_parameters"] = switch.rest
                full = switch.full
                for site in switch.sites:
                    if full.get(site.attribute) is not site.compute:
                        replaced, full[site.attribute] = site.name, site.compute
                if len(full) != len(switch.rest):  # a forward has registered one that is not sharded
                    for key in full.keys() - switch.rest.keys():
                        switch.rest.put(key, full[key])
            for container, key, sharded, _ in self._parts.get(each, ()):
                container[key] = sharded
            for attributes, stand_in, _ in self._forwards.get(each, ()):
                attributes["forward"] = stand_in
        if replaced:
            raise AtRestError(
                f"{unit_label(self.unit)}: its parameter {replaced!r} was replaced while its module computed",
                "Write into it in place, between steps: inside `with fs.full(model):` all of it is there.",
            )

    def _shown_with(self, part: int) -> Iterable[int]:
        if part == _EVERYWHERE:
            return self._parts.keys() | self._forwards.keys() | self._switches.keys()
        return part, _EVERYWHERE

    def _follow(self, switch: Switch) -> None:
        """Entries of a module's parameters were set since: those of the unit must be what they were."""
        switch.rest.changed = False
        for site in switch.sites:
            if switch.rest.raw(site.attribute) is not site.sharded:
                switch.rest.changed = True  # until it is put back
                self._undo_and_refuse(site.name)
        switch.full.clear()
        switch.full.update(dict.items(switch.rest))
        switch.full.update({s.attribute: s.compute for s in switch.sites})

    def _undo_and_refuse(self, name: str) -> None:
        for switches in self._switches.values():
            for switch in switches:
                switch.attributes["_parameters"] = switch.rest
        for slots in self._parts.values():
            for container, key, sharded, compute in slots:
                if container[key] is compute:
                    container[key] = sharded
        raise AtRestError(
            f"{unit_label(self.unit)}: its parameter {name!r} was replaced after sharding",
            "Prune, parametrize and tie parameters before fs.shard; edit values in place inside "
            "`with fs.full(model):`, where torch.func.functional_call works too.",
        )
