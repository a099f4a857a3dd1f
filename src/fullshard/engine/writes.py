"""Whether user code wrote into compute parameters: a max_norm, a clamp or a moving average in a forward.

The full value of a unit is released, so a write into it would be lost. Version counters show every write
except those through `p.data`, which has a counter of its own: what `p.data` returned for a compute parameter
is kept, and its counter is read instead. `p.data = value` changes no counter at all; it is noted when it
happens. For both, `nn.Parameter` gets a property `data` in front of torch's. A subclass for the compute
parameters was rejected: torch looks up `__torch_function__` on every use of one, 0.5 µs and more each.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fullshard.engine.split_masters import show

_version = attrgetter("_version")
_data: Any = torch.Tensor.data  # torch's own descriptor
KEY = "_fullshard_writes"


class Writes:
    """Notes writes into the compute parameters of one lane."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.handed_out: list[torch.Tensor] = []  # by `p.data`, since they were last looked at
        self._kept: list[
            tuple[weakref.ref[torch.Tensor], int]
        ] = []  # by user code, and what was seen of them
        self.assigned = False  # by `p.data = value`
        self._versions = sum(map(_version, parameters))
        for parameter in parameters:
            parameter.__dict__[KEY] = self

    def seen(self) -> bool:
        """Whether there was one since the last `forget`."""
        if sum(map(_version, self._parameters)) != self._versions or self.assigned:
            return True
        return bool(self.handed_out or self._kept) and self._written_through_data()

    def _written_through_data(self) -> bool:
        if any(map(_version, self.handed_out)):
            return True
        if any((kept := known()) is not None and kept._version != seen for known, seen in self._kept):
            return True
        self._let_go()
        return False

    def _let_go(self) -> None:
        """What was handed out was held here until it was looked at; from now on only user code holds it."""
        kept = [*self.handed_out, *(value for known, _ in self._kept if (value := known()) is not None)]
        self._kept = [(weakref.ref(value), value._version) for value in kept]
        self.handed_out.clear()

    def forget(self) -> None:
        self._let_go()
        self.assigned = False
        self._versions = sum(map(_version, self._parameters))


def watch_data() -> None:
    """From now on `p.data` of a compute parameter is noted; for any other parameter nothing changes."""
    if "data" not in vars(nn.Parameter):
        nn.Parameter.data = property(_get, _set, doc=_data.__doc__)  # type: ignore[assignment]


def set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """`parameter.data = value`, by the engine itself."""
    if not show(parameter, value):
        _data.__set__(parameter, value)


def get_data(parameter: torch.Tensor) -> torch.Tensor:
    """`parameter.data`, for the engine itself."""
    value: torch.Tensor = _data.__get__(parameter)
    return value


def _get(parameter: nn.Parameter) -> torch.Tensor:
    value = get_data(parameter)
    writes: Writes | None = parameter.__dict__.get(KEY)
    if writes is not None:
        writes.handed_out.append(value)
    return value


def _set(parameter: nn.Parameter, value: torch.Tensor) -> None:
    set_data(parameter, value)
    writes: Writes | None = parameter.__dict__.get(KEY)
    if writes is not None:
        writes.assigned = True
