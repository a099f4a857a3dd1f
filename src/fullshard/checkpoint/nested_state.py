"""Optimizer state in containers: the tensors in it are states like others, beside an outline of the rest.

AggMo, for example, keeps a dict of momenta for each parameter. Each of them is sharded as its parameter is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.errors import CheckpointError

Place = tuple[Any, ...]  # the keys and indices that lead to a tensor in a container


@dataclass(frozen=True)
class Nested:
    """A container with None in the places of its tensors, and the key under which each is stored."""

    outline: Any
    keys: dict[str, Place]


@dataclass(frozen=True)
class FlatState:
    """The state of a parameter: single values by key, and the containers whose tensors are among these."""

    values: dict[Any, Any] = field(default_factory=dict)
    nested: dict[Any, Nested] = field(default_factory=dict)


def flattened(name: str, state: Mapping[Any, Any]) -> FlatState:
    """The state of the parameter of this name."""
    flat = FlatState()
    for key, value in state.items():
        tensors = list(_tensors(f"{name}.{key}", value, (), 0))
        if isinstance(value, torch.Tensor) or not tensors:
            flat.values[key] = value
            continue
        keys: dict[str, Place] = {}
        for place, tensor in tensors:
            inner = str(key) + "".join(f"[{step!r}]" for step in place)
            while inner in flat.values or inner in state:  # two keys of a dict may have the same repr
                inner += "+"
            keys[inner] = place
            flat.values[inner] = tensor
        flat.nested[key] = Nested(filled(value, dict.fromkeys(keys.values())), keys)
    return flat


def _tensors(name: str, value: Any, place: Place, depth: int) -> Iterator[tuple[Place, torch.Tensor]]:
    if depth > 100:
        raise CheckpointError(f"optimizer state {name!r} is nested too deeply", "Use fewer levels.")
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(name, item, (*place, key), depth + 1)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _tensors(name, item, (*place, index), depth + 1)
    elif isinstance(value, set | frozenset) and any(isinstance(item, torch.Tensor) for item in value):
        raise CheckpointError(
            f"optimizer state {name!r} is a set of tensors, which have no names in it",
            "Keep them in a list or a dict.",
        )


def filled(outline: Any, leaves: Mapping[Place, Any], place: Place = ()) -> Any:
    """The outline with these values in their places."""
    if place in leaves:
        return leaves[place]
    if isinstance(outline, dict):
        return {key: filled(item, leaves, (*place, key)) for key, item in outline.items()}
    if type(outline) in (list, tuple):
        return type(outline)(filled(item, leaves, (*place, i)) for i, item in enumerate(outline))
    return outline
