"""Aliases of a parameter outside `_parameters`: in list and dict attributes, plain objects and closures.

An LSTM also keeps its weights in a list; a hook may have captured one. Each alias is found before sharding
and is then switched together with the attribute. An alias that cannot be rewritten (in a tuple, a default
argument) is an error: it would keep showing the shard.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.errors import ModelError

_DEPTH = 4
_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


@dataclass(frozen=True)
class Alias:
    """`container[key]` holds a parameter; `holder` is the module through which it is reached."""

    holder: nn.Module
    container: Any
    key: Any


class Cell:
    """A closure cell as a container, so that a captured parameter is an alias like any other."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cell.cell_contents = value


def find_aliases(model: nn.Module) -> dict[int, list[Alias]]:
    """Aliases by the id of their parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    aliases: dict[int, list[Alias]] = {}
    seen: set[int] = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if name in _OWN:
                continue
            if isinstance(value, nn.Parameter) and id(value) in names:
                aliases.setdefault(id(value), []).append(Alias(module, vars(module), name))
                continue
            for container, key, parameter in _inside(value, seen, names, _DEPTH):
                aliases.setdefault(id(parameter), []).append(Alias(module, container, key))
    return aliases


def _inside(
    value: Any, seen: set[int], names: dict[int, str], depth: int
) -> Iterator[tuple[Any, Any, nn.Parameter]]:
    if depth == 0 or id(value) in seen or not _may_hold_parameters(value):
        return
    seen.add(id(value))
    for container, key, item in _items(value):
        if isinstance(item, nn.Parameter):
            if id(item) in names:
                if container is None:
                    raise ModelError(
                        f"parameter {names[id(item)]!r} is also kept in a {type(value).__name__} of the "
                        "model, which cannot be rewritten and would keep showing a shard",
                        "Keep it in a list or a dict, or read it from the module.",
                    )
                yield container, key, item
        else:
            yield from _inside(item, seen, names, depth - 1)


def _may_hold_parameters(value: Any) -> bool:
    if isinstance(value, nn.Module | torch.Tensor | torch.optim.Optimizer | type | str | bytes | int | float):
        return False
    return isinstance(
        value, list | tuple | dict | types.FunctionType | types.MethodType | functools.partial
    ) or (hasattr(value, "__dict__") and not type(value).__module__.startswith("torch."))


def _items(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(container that can be written or None, key, item)"""
    if isinstance(value, list):
        yield from ((value, i, item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((value, key, item) for key, item in list(value.items()))
    elif isinstance(value, tuple):
        yield from ((None, i, item) for i, item in enumerate(value))
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield Cell(cell), 0, cell.cell_contents
            except ValueError:  # a cell that was never filled
                continue
        yield from ((None, i, item) for i, item in enumerate(value.__defaults__ or ()))
    elif isinstance(value, types.MethodType):
        yield None, 0, value.__self__
    elif isinstance(value, functools.partial):
        yield None, "func", value.func
        yield from ((None, i, item) for i, item in enumerate(value.args))
        yield from ((value.keywords, key, item) for key, item in value.keywords.items())
    else:
        yield from ((vars(value), key, item) for key, item in list(vars(value).items()))
