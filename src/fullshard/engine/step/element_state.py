"""What an optimizer keeps for one parameter, while its step runs in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.engine.step.chunks import Key, Part
from fullshard.engine.step.numbers import Snapshot
from fullshard.errors import OptimizerError, unit_label


class _Keeping(Protocol):
    """What a state needs of the span that its parameter is in."""

    @property
    def lane(self) -> Any: ...
    def at_rest(self, key: Key, index: int) -> torch.Tensor: ...
    def put(self, values: Mapping[Key, torch.Tensor], index: int) -> None: ...


def put_in_place(optimizer: Optimizer, span: _Keeping, index: int, parameter: nn.Parameter) -> None:
    """States that were loaded or replaced, or made by the constructor, go where they rest."""
    span.put(states_of(optimizer, span, index, parameter), index)


def states_of(
    optimizer: Optimizer, span: _Keeping, index: int, parameter: nn.Parameter
) -> dict[Key, torch.Tensor]:
    known = optimizer.state.get(parameter) or {}
    keys = _keys_of(known, span.lane.shard_views[index].shape)
    return {key: known[name] for name, key in keys.items()}


class ElementState:
    """What an optimizer keeps for one parameter, during a step that runs in chunks."""

    def __init__(self, optimizer: Optimizer, span: _Keeping, index: int, parameter: nn.Parameter) -> None:
        self._all, self._span, self._index, self._parameter = optimizer.state, span, index, parameter
        known = dict(optimizer.state.get(parameter) or {})
        self._keys = _keys_of(known, span.lane.shard_views[index].shape)
        self._keys_before = self._keys
        self._numbers = Snapshot({k: v for k, v in known.items() if k not in self._keys})
        self.is_new = not known
        self.rests = False  # the step on all parts is over

    def move_numbers(self, device: torch.device) -> None:
        """Fused steps count on the device that computes; `load_state_dict` follows the parameter's."""
        state = self._all.get(self._parameter) or {}
        moved = {
            k: v.to(device)
            for k, v in state.items()
            if isinstance(v, torch.Tensor) and v.dim() == 0 and v.device != device
        }
        if moved:
            state.update(moved)
            self._numbers = Snapshot({k: v for k, v in state.items() if k not in self._keys})

    def show(self, staged: Mapping[Key, torch.Tensor], is_first: bool = False) -> None:
        if self.is_new:
            self._all.pop(self._parameter, None)  # for each of its parts the optimizer makes it anew
            return
        state = self._all[self._parameter]
        self._numbers.restore(state, unless_as_it_was=is_first)
        state.update({name: staged[key] for name, key in self._keys.items()})

    def take(self, part: Part) -> dict[Key, torch.Tensor]:
        """The values of one part, after the step on it."""
        shape = self._parameter.shape
        state = self._all.get(self._parameter) or {}
        made = {name: value for name, value in state.items() if is_element_wise(value, shape)}
        foreign = next((k for k, v in state.items() if hasattr(type(v), "__tensor_flatten__")), None)
        if foreign is not None:
            raise OptimizerError(
                f"{unit_label(self._span.lane.unit)}: state {foreign!r} of parameter "
                f"{self._span.lane.layout.pieces[self._index].name!r} is a {type(state[foreign]).__name__}, "
                "which a step in chunks (offload=, state='8bit') cannot keep",
                "Use torch's own optimizer with state='8bit', or leave out offload.",
            )
        strange = next((k for k, v in state.items() if k not in made and _numel(v) > 1), None)
        if strange is not None and not part.is_all:
            raise OptimizerError(
                f"{unit_label(self._span.lane.unit)}: state {strange!r} of parameter "
                f"{self._span.lane.layout.pieces[self._index].name!r} is not one value per element, and the "
                f"parameter is too large for one chunk of an offloaded step",
                "Use an optimizer whose state has the parameter's shape, or leave out offload.",
            )
        self._keys = {name: (name, value.dtype) for name, value in made.items()}
        return {(name, value.dtype): value for name, value in made.items()}

    def undo(self) -> None:
        """As it was before the step."""
        if self.is_new:
            self._all.pop(self._parameter, None)
            return
        self._keys = self._keys_before
        self._numbers.restore(self._all[self._parameter])
        self.rest()

    def rest(self) -> None:
        """The step on all its parts is over."""
        self.rests = True
        if self._keys:
            at_rest = {name: self._span.at_rest(key, self._index) for name, key in self._keys.items()}
            self._all[self._parameter].update(at_rest)


def _keys_of(state: Mapping[str, Any], shape: torch.Size) -> dict[str, Key]:
    """Of states that have a value per element."""
    return {name: (name, value.dtype) for name, value in state.items() if is_element_wise(value, shape)}


def is_element_wise(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape


def _numel(value: Any) -> int:
    """Of the largest tensor in a state."""
    if isinstance(value, dict | list | tuple):
        return max(map(_numel, value.values() if isinstance(value, dict) else value), default=1)
    return value.numel() if isinstance(value, torch.Tensor) else 1
