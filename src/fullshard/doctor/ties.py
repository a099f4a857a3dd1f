"""Parameters that were one, and are two when the model is sharded."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fullshard.doctor.reference import computing


class Ties:
    """Notes at which places of modules each parameter was registered."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[weakref.ref[nn.Module], str]]] = {}
        # Not weak: torch does not exchange tensors that weak references refer to, as a meta model needs.
        self._parameters: dict[int, Any] = {}
        self._copied: list[tuple[Any, Any]] = []  # tied parameters, and their copies by copy.deepcopy

    def registering(self, original: Any) -> Any:
        def register_parameter(module: nn.Module, name: str, parameter: Any) -> None:
            original(module, name, parameter)
            if parameter is not None:
                self._note(module, name, parameter)

        return register_parameter

    def _note(self, module: nn.Module, name: str, parameter: Any) -> None:
        self._parameters[id(parameter)] = parameter
        self._places.setdefault(id(parameter), []).append((weakref.ref(module), name))

    def copying(self, original: Any) -> Any:
        def __deepcopy__(parameter: Any, memo: Any) -> Any:
            known = id(parameter) in memo
            copied = original(parameter, memo)
            if not known and not computing[0] and len(self._places.get(id(parameter), ())) > 1:
                self._copied.append((parameter, copied))
            return copied

        return __deepcopy__

    def name_of(self, parameter: Any) -> str:
        """The class and attribute where a parameter was registered first."""
        for module, name in self._places.get(id(parameter), ()):
            if (holder := module()) is not None:
                return f"{type(holder).__name__}.{name}"
        return ""

    def untied(self, model: Any) -> list[tuple[str, str]]:
        """Pairs of names that shared a parameter before, or look as if they should, and do not now."""
        if not isinstance(model, nn.Module):
            return []
        names = {module: name for name, module in model.named_modules()}
        pairs = [
            *self._separated(names),
            *self._copied_apart(model, names),
            *_equal_ends(model),
            *_declared(model, names),
        ]
        return list(dict.fromkeys(tuple(sorted(pair)) for pair in pairs))  # type: ignore[misc]

    def _separated(self, names: dict[nn.Module, str]) -> list[tuple[str, str]]:
        pairs = []
        for places in self._places.values():
            held = [
                (f"{names[module]}.{name}".lstrip("."), module._parameters.get(name))
                for reference, name in places
                if (module := reference()) is not None and module in names
            ]
            for (first, one), (second, other) in pairwise(held):
                if first != second and one is not None and other is not None and one is not other:
                    pairs.append((first, second))
        return pairs

    def _copied_apart(self, model: nn.Module, names: dict[nn.Module, str]) -> list[tuple[str, str]]:
        """A module that shared a parameter was exchanged for a copy of itself, which has its own."""
        held: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            held.setdefault(id(parameter), []).append(name)
        pairs = []
        for parameter, copied in self._copied:
            lost = {
                name
                for module, name in self._places[id(parameter)]
                if (holder := module()) is None or holder not in names
            }
            here, there = held.get(id(parameter)), held.get(id(copied), ())
            if here and len(there) == 1 and there[0].rpartition(".")[2] in lost:
                pairs.append((here[0], there[0]))
        return pairs


def _equal_ends(model: nn.Module) -> list[tuple[str, str]]:
    """An embedding and a linear layer with equal, random values, in two parameters."""
    tables = [(n, m.weight) for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    heads = [(n, m.weight) for n, m in model.named_modules() if type(m) is nn.Linear]
    return [
        (f"{name}.weight", f"{other}.weight")
        for name, table in tables
        for other, head in heads
        if table is not head
        and table.shape == head.shape
        and not table.is_meta
        and not head.is_meta
        and torch.equal(table, head)
        and float(table.detach().float().std()) > 0
    ]


def _declared(model: nn.Module, names: dict[nn.Module, str]) -> list[tuple[str, str]]:
    """A model library's own declaration that its embeddings are tied."""
    config: Any = getattr(model, "config", None)
    ends = [getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output")]
    if not getattr(config, "tie_word_embeddings", False) or not all(map(callable, ends)):
        return []
    first, last = (end() for end in ends if end is not None)
    if not isinstance(first, nn.Module) or not isinstance(last, nn.Module) or first is last:
        return []
    one, other = getattr(first, "weight", None), getattr(last, "weight", None)
    if one is None or other is None or one is other or one.shape != other.shape:
        return []
    return [(f"{names.get(first, '')}.weight".lstrip("."), f"{names.get(last, '')}.weight".lstrip("."))]
