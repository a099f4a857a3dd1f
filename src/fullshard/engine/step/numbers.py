"""Numbers that an optimizer counts, and how to set them back.

Where its step runs several times, each time on some of its parameters, a step counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer


def _is_tensor(value: Any) -> bool:
    """Whether a number is in a tensor, of any shape."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_plain and value.numel() == 1


def _is_parameter(key: Any) -> bool:
    return isinstance(key, torch.Tensor)


def _is_count(key: Any, value: Any) -> bool:
    """Also numbers in a dict, of state that is no parameter's."""
    if isinstance(value, dict):
        return not _is_parameter(key) and all(_is_count(k, v) for k, v in value.items())
    return isinstance(value, bool | int | float) or _is_tensor(value)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class Snapshot:
    """The numbers in a dict, and how to set them back."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._numbers = {k: v for k, v in values.items() if isinstance(v, bool | int | float | complex)}
        tensors = [(k, v) for k, v in values.items() if _is_tensor(v)]
        self._tensors = {k: (v, v.detach().clone(), _version(v)) for k, v in tensors}

    @property
    def on_device(self) -> bool:
        return any(tensor.device.type != "cpu" for tensor, *_ in self._tensors.values())

    def restore(self, values: dict[Any, Any], unless_as_it_was: bool = False) -> None:
        """`unless_as_it_was`: tensors that were not written since are not copied, which is a launch each."""
        values.update(self._numbers)
        for key, (tensor, value, version) in self._tensors.items():
            was_there = key in values and values[key] is tensor
            if unless_as_it_was and was_there and version is not None and _version(tensor) == version:
                continue
            values[key] = tensor
            with torch.no_grad():
                tensor.copy_(value)


class Numbers:
    """What an optimizer counts in its groups, in itself, and in states that are no parameter's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._state = state = optimizer.state
        self._shared = {k: v for k, v in state.items() if isinstance(v, dict) and not _is_parameter(k)}
        places: list[dict[Any, Any]] = [vars(optimizer), *optimizer.param_groups, state]
        places += self._shared.values()
        self._places = [(place, Snapshot(place), set(place)) for place in places]

    @property
    def on_device(self) -> bool:
        """Whether any is, where user code may write or free it while a step still reads it."""
        return any(snapshot.on_device for _, snapshot, _ in self._places)

    def restore(self) -> None:
        for place, snapshot, keys in self._places:
            for key in [k for k in place if k not in keys and _is_count(k, place[k])]:
                del place[key]  # made by the step
            snapshot.restore(place)
        self._state.update(self._shared)
