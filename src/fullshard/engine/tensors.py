"""Tensors inside whatever a module takes and returns: tuples, lists, dicts, dataclasses, objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

_T = TypeVar("_T", bound=torch.Tensor)
_DEPTH = 8
_PLAIN = (str, bytes, int, float, complex, type(None), type, nn.Module, torch.dtype, torch.device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor a caller could reach from `value`."""
    return _walk(value, _DEPTH, set())


def _walk(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0 or isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    items: Iterable[Any]
    if isinstance(value, tuple | list | set | frozenset):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    else:
        items = _attributes(value).values()
    for item in items:
        yield from _walk(item, depth - 1, seen)


def _attributes(value: Any) -> dict[str, Any]:
    """Of a plain object, slots included."""
    found = dict(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor], objects: bool = True) -> Any:
    """`value` with its tensors changed; the same object where nothing changed.

    Without `objects` only tuples, lists and dicts are looked into: others keep their identity.
    """
    return _Rebuild(change, objects, always=False).of(value, _DEPTH)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def snapshot(value: Any, change: Callable[[torch.Tensor], torch.Tensor] = _same) -> Any:
    """`value` as it is now: its own lists, dicts and plain objects (a cache, say), the same tensors unless
    they are changed."""
    return _Rebuild(change, objects=True, always=True).of(value, _DEPTH)


def written_by(func: Any, args: Any, kwargs: Any, kind: type[_T]) -> list[_T]:
    """Tensors of this class that an operator changes in place, alone or in lists."""
    found: list[_T] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [
                t for t in (given if isinstance(given, list | tuple) else (given,)) if isinstance(t, kind)
            ]
    return found


def note_written(tensors: Iterable[torch.Tensor]) -> None:
    """Move the version counters of what an operator has written inside a dispatch, where torch moves none."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


# These move counters where they write, which is inside the dispatch; all others do so before it.
_WITHOUT_COUNTING = ("aten::_foreach_", "aten::_fused_", "aten::_amp_")


def note_writes_of(func: Any, args: Any, kwargs: Any) -> None:
    """The same for whatever an operator has written in place, in a `__torch_dispatch__`."""
    if func._schema.name.startswith(_WITHOUT_COUNTING):
        note_written(written_by(func, args, kwargs, torch.Tensor))


class _Rebuild:
    """Containers and plain objects made anew, always or where something inside them changed."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], objects: bool, always: bool) -> None:
        self._change, self._objects, self._always = change, objects, always
        self._done: dict[int, Any] = {}  # an object reached twice is made once

    def of(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self._change(value)
        if depth == 0 or isinstance(value, _PLAIN) or callable(value):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value  # a circle ends here
            self._done[id(value)] = self._inside(value, depth - 1)
        return self._done[id(value)]

    def _inside(self, value: Any, depth: int) -> Any:
        if isinstance(value, tuple | list):
            items = [self.of(item, depth) for item in value]
            if not self._always and all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if not isinstance(value, dict) and not self._objects:
            return value
        held = value if isinstance(value, dict) else _attributes(value)
        changed = {key: new for key, item in held.items() if (new := self.of(item, depth)) is not item}
        if not changed and not self._always:
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            if isinstance(value, dict):
                result[key] = item
            else:
                object.__setattr__(result, key, item)
        return result


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating point tensors of a module's input in another dtype. A cache object keeps its identity."""
    if type(value) is tuple and all(_stays(item, dtype) for item in value):
        return value  # the hot path: nothing to cast, nothing to look into

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    return map_tensors(value, cast, objects=False)


def _stays(value: Any, dtype: torch.dtype) -> bool:
    if type(value) is torch.Tensor:
        return value.dtype is dtype or not value.is_floating_point()
    return value is None


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


def nodes_of(tensor: torch.Tensor) -> Iterator[torch.autograd.graph.Node]:
    """The nodes of which one is sure to run, whatever a caller writes into `tensor`.

    Writing into a view replaces the view's own node, and a hook on it goes silently. The base's node
    stays in the graph, below the write.
    """
    if tensor.grad_fn is not None:
        yield tensor.grad_fn
    if tensor._is_view() and tensor._base is not None and tensor._base.grad_fn is not None:
        yield tensor._base.grad_fn
