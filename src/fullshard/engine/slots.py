"""The places that show a unit's parameters, switched between sharded and compute parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fullshard.errors import AtRestError, unit_label

_EVERYWHERE = -1


class Slots:
    """Every place that holds a unit's parameters, switched between at rest and full.

    A unit of several modules (merged blocks) is switched module by module: only the one whose forward runs
    needs its places, and switching all of them for each would cost the square of their number.
    """

    def __init__(self, unit: str, modules: Sequence[nn.Module]) -> None:
        self.unit = unit
        self._parts: dict[int, list[tuple[Any, Any, nn.Parameter, nn.Parameter]]] = {}
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

    def add(
        self,
        owner: nn.Module | None,
        place: tuple[Any, Any],
        sharded: nn.Parameter,
        compute: nn.Parameter,
        name: str,
    ) -> None:
        """`place` is a container and a key in it; `owner` the module that shows it, if one does."""
        self._parts.setdefault(self.part(owner), []).append((*place, sharded, compute))
        self._names[id(sharded)] = name

    def add_forward(self, module: nn.Module, stand_in: Any) -> None:
        """A stand-in for `module.forward` while the unit is at rest."""
        forwards = self._forwards.setdefault(self.part(module), [])
        forwards.append((module.__dict__, stand_in, stand_in.replaced))
        module.__dict__["forward"] = stand_in

    def stands_in(self, stand_in: Any) -> bool:
        return any(known is stand_in for part in self._forwards.values() for _, known, _ in part)

    def show_full(self, part: int = _EVERYWHERE) -> None:
        for each in self._shown_with(part):
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
        for each in self._shown_with(part):
            for container, key, sharded, _ in self._parts.get(each, ()):
                container[key] = sharded
            for attributes, stand_in, _ in self._forwards.get(each, ()):
                attributes["forward"] = stand_in

    def _shown_with(self, part: int) -> Iterable[int]:
        if part == _EVERYWHERE:
            return self._parts.keys() | self._forwards.keys()
        return part, _EVERYWHERE

    def _undo_and_refuse(self, name: str) -> None:
        for slots in self._parts.values():
            for container, key, sharded, compute in slots:
                if container[key] is compute:
                    container[key] = sharded
        raise AtRestError(
            f"{unit_label(self.unit)}: its parameter {name!r} was replaced after sharding",
            "Edit values in place inside `with fs.full(model):`; torch.func.functional_call works there too.",
        )
