"""Writes into parameters at rest, and pickling them.

A parameter at rest holds this rank's elements. A write in place takes those of an operand that has the
unsharded shape; what would need every rank's elements is refused, and so is pickling: the file would hold a
part under the name of all. The methods of `nn.Parameter` itself are wrapped, as `writes` does for `data`:
of a class of our own, torch would look up `__torch_function__` at each use.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.engine.cuts import Cut, is_everything, operand
from fullshard.engine.gradients import GradShard, Step
from fullshard.engine.homes.split_masters import restored
from fullshard.engine.lane import Lane
from fullshard.engine.piecewise import ELEMENT_WISE, IN_PLACE_OPERATORS
from fullshard.engine.writes import KEY, begin_write
from fullshard.errors import AtRestError, StateError, unit_label

_PLACE = "_fullshard_place"
_SAME = {"requires_grad_", "detach_", "share_memory_", "resize_", "resize_as_", "set_", "rename_", "names_"}
_DRAWS = {
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
}


def mark(lanes: Sequence[Lane]) -> None:
    """From now on these parameters know their place."""
    for lane in lanes:
        if not lane.specs:
            for index, parameter in enumerate(lane.parameters):
                parameter.__dict__[_PLACE] = weakref.ref(lane), index


def _place(parameter: torch.Tensor) -> tuple[Lane, int] | None:
    """Of a parameter at rest; None of any other, and inside fs.full."""
    reference, index = parameter.__dict__.get(_PLACE, (None, 0))
    lane: Lane | None = None if reference is None else reference()
    if (
        lane is None
        or lane.replicated
        or lane.unsharded is not None
        or lane.parameters[index] is not parameter
    ):
        return None
    return lane, index


def watch_parameters() -> None:
    """From now on writes into parameters at rest are seen; for any other parameter nothing changes."""
    if hasattr(nn.Parameter.__reduce_ex__, "__wrapped__"):
        return
    setattr(nn.Parameter, "__reduce_ex__", _pickled(nn.Parameter.__reduce_ex__))  # noqa: B010
    names = [n for n in dir(torch.Tensor) if n.endswith("_") and not n.startswith("_")]
    for name in {*names, *IN_PLACE_OPERATORS} - _SAME - _DRAWS:
        original = getattr(nn.Parameter, name, None)
        if callable(original):
            setattr(nn.Parameter, name, _set_item(original) if name == "__setitem__" else _written(original))


def _pickled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_ex(self: nn.Parameter, protocol: Any) -> Any:
        place = _place(self)
        if place is not None:
            raise StateError(
                f"{_name(*place)} is sharded: pickling or saving it would write this rank's elements alone",
                "Use fs.save, or save model.state_dict() or parameters inside `with fs.full(model):`.",
            )
        ours = {key: self.__dict__.pop(key) for key in (_PLACE, KEY) if key in self.__dict__}
        try:  # the file is for anybody
            return original(restored(self), protocol)
        finally:
            self.__dict__.update(ours)

    return reduce_ex


def _written(original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__
    fits = name in IN_PLACE_OPERATORS or name[:-1] in ELEMENT_WISE

    @functools.wraps(original)
    def write(self: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        begin_write(self)
        place = None if Step.running else _place(self)
        if place is None:
            return original(self, *args, **kwargs)
        if not fits:
            raise _refusal(name, place, "would need every rank's elements")
        fit = functools.partial(_fit, name, self, place)
        return original(self, *map(fit, args), **{key: fit(value) for key, value in kwargs.items()})

    return write


def _set_item(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_item(self: nn.Parameter, key: Any, value: Any) -> None:
        begin_write(self)
        place = None if Step.running else _place(self)
        everything = is_everything(key)
        if place is not None and not everything:
            key = _fit("__setitem__", self, place, key)
            number = not isinstance(value, torch.Tensor) or value.numel() == 1
            mask = isinstance(key, torch.Tensor) and key.dtype is torch.bool and key.shape == self.shape
            if not (mask and number):
                raise _refusal("__setitem__", place, "would need every rank's elements")
        if place is not None and everything:
            value = _fit("__setitem__", self, place, value)
        original(self, key, value)

    return set_item


def _fit(name: str, parameter: nn.Parameter, place: tuple[Lane, int], value: Any) -> Any:
    """This rank's elements of an operand."""
    if not isinstance(value, torch.Tensor) or isinstance(value, GradShard):
        return value
    other = _place(value) if isinstance(value, nn.Parameter) else None
    if other is not None:
        if _position(*other) != _position(*place):
            raise _refusal(name, place, f"is cut differently between the ranks than {_name(*other)}")
        return value
    if value.shape == parameter.shape:
        return value
    lane, index = place
    with torch.no_grad():
        cut = Cut.of_rank(lane.layout, lane.layout.pieces[index], lane.comm.rank)
        found = operand(cut, tuple(parameter.shape), value)
    if isinstance(found, str):
        raise _refusal(name, place, f"and an operand of shape {tuple(value.shape)} do not fit")
    return found


def _position(lane: Lane, index: int) -> tuple[Any, ...]:
    """Where its elements are, on all ranks."""
    piece = lane.layout.pieces[index]
    return piece.start, piece.shape, piece.order, lane.layout.interval, lane.comm.ranks


def _name(lane: Lane, index: int) -> str:
    piece = lane.layout.pieces[index]
    return f"parameter {piece.name!r} of {unit_label(lane.unit)}, of shape {piece.shape},"


def _refusal(name: str, place: tuple[Lane, int], why: str) -> AtRestError:
    return AtRestError(
        f"{name!r} on {_name(*place)} which is at rest, where it holds this rank's elements: it {why}",
        "Write it inside `with fs.full(model):`, where it has its unsharded shape.",
    )
