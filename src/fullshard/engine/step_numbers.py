"""Numbers that an optimizer counts, and how to set them back.

Where its step runs several times, each time on some of its parameters, a step counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer


class Snapshot:
    """The numbers in a dict, and how to set them back."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._numbers = {k: v for k, v in values.items() if isinstance(v, bool | int | float | complex)}
        tensors = [v for v in values.values() if isinstance(v, torch.Tensor) and v.dim() == 0]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @property
    def on_device(self) -> bool:
        return any(tensor.device.type != "cpu" for tensor, _ in self._tensors)

    def restore(self, values: dict[str, Any]) -> None:
        values.update(self._numbers)
        for tensor, value in self._tensors:
            with torch.no_grad():
                tensor.copy_(value)


class Numbers:
    """What an optimizer counts in its groups and in itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        places = [vars(optimizer), *optimizer.param_groups]
        self._places = [(place, Snapshot(place), set(place)) for place in places]

    @property
    def on_device(self) -> bool:
        """Whether any is, where user code may write or free it while a step still reads it."""
        return any(snapshot.on_device for _, snapshot, _ in self._places)

    def restore(self) -> None:
        for place, snapshot, keys in self._places:
            for key in [k for k in place if k not in keys and isinstance(place[k], bool | int | float)]:
                del place[key]  # made by the step
            snapshot.restore(place)
