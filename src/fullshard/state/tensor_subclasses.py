"""Optimizer state in tensors of a library's own class, such as torchao's, taken apart into plain tensors.

A class with torch's `__tensor_flatten__` names the tensors inside it, and settings from which it is made
again. Taken apart it is a dict of these, so that state dicts and checkpoints hold nothing but plain values.
It is put together by a class that the process has imported already: a file's entry imports nothing.

The name of the class is in a key: torch's `load_state_dict` takes strings among values for lists.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from fullshard.errors import StateError

_CLASS = "fullshard tensor of "


def is_subclass(value: Any) -> bool:
    """Whether a value is a tensor that consists of others."""
    return isinstance(value, torch.Tensor) and hasattr(type(value), "__tensor_flatten__")


def taken_apart(value: Any) -> Any:
    """The same value without such tensors; those inside lists and dicts, too."""
    if is_subclass(value):
        names, settings = value.__tensor_flatten__()
        kind = type(value)
        parts = {name: taken_apart(getattr(value, name)) for name in names}
        return {f"{_CLASS}{kind.__module__}:{kind.__qualname__}": settings, **parts}
    if isinstance(value, dict):
        return {key: taken_apart(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(taken_apart, value))
    return value


def class_key(value: Any) -> str | None:
    """The key of a dict that is a tensor taken apart."""
    if not isinstance(value, dict):
        return None
    return next((key for key in value if isinstance(key, str) and key.startswith(_CLASS)), None)


def put_together(value: Any) -> Any:
    """The inverse of `taken_apart`."""
    key = class_key(value)
    if key is not None:
        kind = _class_of(key.removeprefix(_CLASS))
        parts = {name: put_together(part) for name, part in value.items() if name != key}
        return kind.__tensor_unflatten__(parts, value[key], None, None)
    if isinstance(value, dict):
        return {key: put_together(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(put_together, value))
    return value


def _class_of(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    if not (isinstance(found, type) and issubclass(found, torch.Tensor)) or not hasattr(
        found, "__tensor_unflatten__"
    ):
        raise StateError(
            f"optimizer state was saved in tensors of the class {name[:100]!r}, which is not here",
            "Use the optimizer that saved it, from the same library.",
        )
    return found
