"""Tensors inside whatever a module takes and returns: tuples, lists, dicts, dataclasses, objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_DEPTH = 8


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Every tensor a caller could reach from `value`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, str | bytes | int | float | nn.Module | type):
        return
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    else:
        for item in _attributes(value).values():
            yield from tensors_in(item, depth - 1)


def _attributes(value: Any) -> dict[str, Any]:
    """Of a plain object, slots included."""
    found = dict(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def map_tensors(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int = _DEPTH, objects: bool = True
) -> Any:
    """`value` with its tensors changed; the same object where nothing changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth == 0 or value is None or isinstance(value, str | bytes | int | float | nn.Module | type):
        return value
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change, depth - 1, objects) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        changed = {k: map_tensors(v, change, depth - 1, objects) for k, v in value.items()}
        if all(changed[k] is value[k] for k in value):
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return result
    if objects:
        attributes = _attributes(value)
        fresh = {k: map_tensors(v, change, depth - 1, objects) for k, v in attributes.items()}
        different = {k: v for k, v in fresh.items() if v is not attributes[k]}
        if not different:
            return value
        result = copy.copy(value)
        for key, item in different.items():
            object.__setattr__(result, key, item)
        return result
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating point tensors of a module's input in another dtype. A cache object keeps its identity."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    return map_tensors(value, cast, objects=False)


def first_node(args: Any, kwargs: Any) -> torch.autograd.graph.Node | None:
    """The autograd node that made the first input that needs a gradient."""
    for value in args:
        if isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None:
            return value.grad_fn
    if kwargs or any(not isinstance(a, torch.Tensor) for a in args):
        for value in tensors_in([args, kwargs]):
            if value.requires_grad and value.grad_fn is not None:
                return value.grad_fn
    return None
