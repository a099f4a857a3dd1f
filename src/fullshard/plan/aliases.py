"""Aliases of a parameter outside `_parameters`: in list and dict attributes, plain objects and closures.

An LSTM also keeps its weights in a list; a hook may have captured one. Each alias is found before sharding
and is then switched together with the attribute. An alias that cannot be rewritten (in a tuple, a default
argument) is an error: it would keep showing the shard. So is another tensor over a parameter's memory: shards
get memory of their own, and what was one value would be two from then on.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.errors import ModelError
from fullshard.plan.tensor_parallel import local_of

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


# ---- one memory, two tensors


@dataclass(frozen=True)
class _Held:
    """A tensor of the model, with the bytes of its storage that it may touch: [start, stop)."""

    name: str
    kind: str
    tensor: torch.Tensor
    start: int
    stop: int

    @property
    def is_parameter(self) -> bool:
        return self.kind == "parameter"


def refuse_shared_memory(model: nn.Module, ignored: Container[int]) -> None:
    """Raise if a parameter shares memory with another tensor of the model, or has elements that do."""
    by_storage: dict[int, list[_Held]] = {}
    for held in _tensors(model):
        if held.is_parameter and id(held.tensor) not in ignored:
            _refuse_expanded(held)
        by_storage.setdefault(local_of(held.tensor).untyped_storage()._cdata, []).append(held)
    for together in by_storage.values():
        before: list[_Held] = []
        for held in sorted(together, key=lambda h: h.start):
            before = [other for other in before if other.stop > held.start]
            for other in before:
                sharded = [h for h in (other, held) if h.is_parameter and id(h.tensor) not in ignored]
                if sharded and _overlap(held, other):
                    pair = sorted((held, other), key=lambda h: (not h.is_parameter, together.index(h)))
                    raise _shared(*pair)
            before.append(held)


def _tensors(model: nn.Module) -> Iterator[_Held]:
    """Parameters and buffers, each object once.

    Not plain attributes: torch's spectral_norm keeps `weight.data` in one, and sets it anew before each use.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        groups = (module._parameters, "parameter"), (module._buffers, "buffer")
        for values, kind in groups:
            for name, value in values.items():
                if not isinstance(value, torch.Tensor) or id(value) in seen or _has_no_memory(value):
                    continue
                seen.add(id(value))
                yield _Held(f"{path}.{name}".lstrip("."), kind, value, *_extent(local_of(value)))


def _has_no_memory(tensor: torch.Tensor) -> bool:
    lazy = isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer)
    return lazy or tensor.layout is not torch.strided or not tensor.numel()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * size, (first + last + 1) * size


def _overlap(a: _Held, b: _Held) -> bool:
    """Whether they have an element in common, given that their ranges overlap.

    Interleaved ones (columns of one matrix) are laid out to see it.
    """
    first, last = local_of(a.tensor), local_of(b.tensor)
    if first.element_size() != last.element_size() or first.is_contiguous() or last.is_contiguous():
        return True
    size, start = first.element_size(), min(a.start, b.start)
    touched = torch.zeros((max(a.stop, b.stop) - start) // size, dtype=torch.bool)
    touched.as_strided(first.shape, first.stride(), (a.start - start) // size).fill_(True)
    return bool(touched.as_strided(last.shape, last.stride(), (b.start - start) // size).any())


def _refuse_expanded(held: _Held) -> None:
    tensor = local_of(held.tensor)
    expanded = any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if expanded and tensor.requires_grad:
        raise ModelError(
            f"elements of parameter {held.name!r} share memory: it was made by expand()",
            "Keep the small tensor as the parameter and expand it in forward, or make it with .clone().",
        )


def _shared(parameter: _Held, other: _Held) -> ModelError:
    remedy = {
        "parameter": "To tie them, assign the same Parameter object to both modules; otherwise clone one.",
        "buffer": "Read the parameter itself in forward, or register a clone as the buffer.",
    }[other.kind]
    return ModelError(
        f"parameter {parameter.name!r} and {other.kind} {other.name!r} are two tensors over one memory, "
        "which sharding would separate",
        remedy,
    )
