"""Whether user code wrote into compute parameters: a max_norm, a clamp or a moving average in a forward.

The full value of a unit is released, so a write into it would be lost. Version counters show every write
except those through `p.data`, which has a counter of its own: what `p.data` returned for a compute parameter
is kept, and its counter is read instead. `p.data = value` changes no counter at all; it is noted when it
happens. For both, `nn.Parameter` gets a property `data` in front of torch's. A subclass for the compute
parameters was rejected: torch looks up `__torch_function__` on every use of one, 0.5 µs and more each.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fullshard.engine.homes.split_masters import show

_version = attrgetter("_version")
_data: Any = torch.Tensor.data  # torch's own descriptor
KEY = "_fullshard_writes"
_OWN_REFS = max(map(sys.getrefcount, [torch.empty(0)]))  # of an object that is in a list alone


def _has_views(value: torch.Tensor) -> bool:
    """Whether something in C++ holds it besides the object of Python: a view does."""
    count = getattr(value, "_use_count", None)
    return count is not None and count() > 1


class Writes:
    """Notes writes into the compute parameters of one lane."""

    def __init__(self, parameters: Sequence[nn.Parameter], before: Callable[[], None] | None = None) -> None:
        self._parameters = parameters
        # User code may write now: what still reads the values has to be over.
        self._before = None if before is None else weakref.WeakMethod(before)
        self.handed_out: list[torch.Tensor] = []  # by `p.data`, since they were last looked at
        self._kept: list[torch.Tensor] = []  # by user code
        self._seen: list[int] = []  # of their counters
        self.assigned = False  # by `p.data = value`
        self._versions = sum(map(_version, parameters))
        for parameter in parameters:
            parameter.__dict__[KEY] = self

    def begin(self) -> None:
        before = None if self._before is None else self._before()
        if before is not None:
            before()

    def seen(self) -> bool:
        """Whether there was one since the last `forget`."""
        if sum(map(_version, self._parameters)) != self._versions or self.assigned:
            return True
        return bool(self.handed_out or self._kept) and self._written_through_data()

    def _written_through_data(self) -> bool:
        if any(map(_version, self.handed_out)):
            return True
        if [*map(_version, self._kept)] != self._seen:
            return True
        self._let_go()
        return False

    def _let_go(self) -> None:
        """What was handed out stays here as long as user code holds it, or a view of it: it may be written,
        and let go, before anybody looks."""
        known = [*self.handed_out, *self._kept]
        self.handed_out.clear()
        self._kept.clear()
        counts = list(map(sys.getrefcount, known))
        self._kept = [
            value
            for value, count in zip(known, counts, strict=True)
            if count > _OWN_REFS or _has_views(value)
        ]
        self._seen = [*map(_version, self._kept)]

    def forget(self) -> None:
        self._let_go()
        self.assigned = False
        self._versions = sum(map(_version, self._parameters))


class Shown:
    """Values at rest that parameters show as they are, to be read only. What user code writes into them all
    the same is undone: from a copy, which is made before the first write."""

    def __init__(self, parameters: Sequence[nn.Parameter], values: torch.Tensor) -> None:
        self._parameters, self._values = parameters, values
        self._before: torch.Tensor | None = None
        self._writes = Writes(parameters, self.keep)

    def keep(self) -> None:
        """They are about to be written."""
        if self._before is None:
            self._before = self._values.detach().clone()

    def undo(self, values: torch.Tensor) -> bool:
        """`values` rest now, and parameters show them again. False: there were writes by ways that are seen
        too late, and these stay."""
        for parameter in self._parameters:
            parameter.__dict__.pop(KEY, None)
        if self._before is None:
            self._writes.assigned = False  # what was assigned is not shown any more
            return not self._writes.seen()
        with torch.no_grad():
            values.data.copy_(self._before)
        return True


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


def begin_write(parameter: torch.Tensor) -> None:
    """User code is about to write in place, or may be."""
    writes: Writes | None = parameter.__dict__.get(KEY)
    if writes is not None:
        writes.begin()


def _get(parameter: nn.Parameter) -> torch.Tensor:
    writes: Writes | None = parameter.__dict__.get(KEY)
    if writes is not None:
        writes.begin()
    value = get_data(parameter)
    if writes is not None:
        writes.handed_out.append(value)
    return value


def _set(parameter: nn.Parameter, value: torch.Tensor) -> None:
    set_data(parameter, value)
    writes: Writes | None = parameter.__dict__.get(KEY)
    if writes is not None:
        writes.assigned = True
