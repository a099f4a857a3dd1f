"""State dicts of optimizers that hold sharded parameters.

From its first step, or from `fs.load`, on, an optimizer's `state_dict()` holds StateShards as the model's
does: a bare shard under a full name is how people lose state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fullshard.engine.lane import Lane
from fullshard.engine.step.block_state import BlockState, decoded
from fullshard.engine.step.optimizers import owned_step, runtimes_of, streamed_step
from fullshard.errors import StateError
from fullshard.plan.tensor_parallel import is_cut
from fullshard.state import owned_state
from fullshard.state.state_dict import StateShard, shard_of, to_rest
from fullshard.state.tensor_subclasses import is_subclass

_as_they_are: set[int] = set()  # optimizers whose state dicts hold their own values for now, by identity


def show_state_shards(optimizer: torch.optim.Optimizer) -> None:
    """State dicts of this optimizer hold StateShards from now on; what was loaded before is cut."""
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if hooks is None:
        return  # a wrapper, whose state dict is that of the optimizer inside
    if _to_shards in hooks.values():
        if _holds_shards(optimizer):
            _take_loaded(optimizer)
        return
    optimizer.register_state_dict_post_hook(_to_shards)
    optimizer.register_load_state_dict_post_hook(_take_loaded)
    _take_loaded(optimizer)


def _holds_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a `load_state_dict` that is not torch's, and calls no hooks, has left a state dict's values."""
    first = next(iter(optimizer.state.values()), None)
    return isinstance(first, dict) and any(isinstance(value, StateShard) for _, value in tensors_of(first))


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state, also those in containers, and where they are."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}")
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{path}[{index}]")


def _with_tensors(value: Any, change: Callable[[str, torch.Tensor], Any], path: str = "") -> Any:
    """The same state with its tensors replaced. Containers in which nothing changes stay the same objects."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, dict):
        items = {key: _with_tensors(item, change, f"{path}.{key}") for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if type(value) in (list, tuple):
        parts = [_with_tensors(item, change, f"{path}[{i}]") for i, item in enumerate(value)]
        return type(value)(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value


def _places(optimizer: torch.optim.Optimizer) -> dict[int, tuple[Lane, int]]:
    """Where the parameters of an optimizer lie, by identity, without those whose state is not cut."""
    lanes = [lane for r in runtimes_of(optimizer) for lane in r.lanes if not lane.replicated or lane.specs]
    owned = owned_step(optimizer)
    entire = {} if owned is None else owned.by_parameter
    return {id(p): (lane, i) for lane in lanes for i, p in enumerate(lane.parameters) if id(p) not in entire}


def _to_shards(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    if id(optimizer) in _as_they_are:
        return state_dict
    places = _places(optimizer)
    order = [p for group in optimizer.param_groups for p in group["params"]]
    # The values of a state dict are the optimizer's own dicts, and states in blocks are of no use elsewhere.
    state = {index: _decoded(own) for index, own in state_dict["state"].items()}
    for index, parameter in enumerate(order):
        if index in state and id(parameter) in places:
            lane, at = places[id(parameter)]
            to_shard = partial(_to_shard, lane, at)
            state[index] = _with_tensors(state[index], to_shard, lane.layout.pieces[at].name)
    owned = owned_step(optimizer)
    if owned is not None:
        state = owned_state.to_shards(optimizer, owned, state)
    return {**state_dict, "state": state}


def _to_shard(lane: Lane, index: int, key: str, value: torch.Tensor) -> torch.Tensor:
    """Element-wise state becomes a StateShard; a step count, say, is the same on every rank."""
    if (
        value.shape != lane.shard_views[index].shape
        or value.dim() == 0
        or is_subclass(value)  # one rank's blocks: torch.distributed.checkpoint cannot cut them differently
    ):
        return value
    if lane.replicated:
        spec = lane.specs[index]
        return value if spec is None else spec.wrap(value)
    return shard_of(lane, index, value, key)


def _decoded(state: Any) -> Any:
    if isinstance(state, dict) and any(isinstance(value, BlockState) for value in state.values()):
        return {key: decoded(value) for key, value in state.items()}
    return state


def _take_loaded(optimizer: torch.optim.Optimizer) -> None:
    """What load_state_dict was given becomes state as it rests here."""
    if id(optimizer) in _as_they_are:
        return
    copies = _Copies()
    _to_own_elements(optimizer, copies)
    streamed = streamed_step(optimizer)
    if streamed is None:
        return
    for parameter, state in optimizer.state.items():
        of_parameter = isinstance(parameter, torch.Tensor) and isinstance(state, dict)
        for key, value in state.items() if of_parameter else ():
            state[key] = _with_tensors(streamed.put_state(parameter, key, value), copies.of_number)


def _to_own_elements(optimizer: torch.optim.Optimizer, copies: _Copies) -> None:
    """Of what load_state_dict was given, unsharded values or StateShards, keep this rank's elements."""
    owned = owned_step(optimizer)
    if owned is not None:
        owned_state.to_owners(optimizer, owned)
    places = _places(optimizer)
    # One for a parameter; that of a parameter without dimensions looks like its elements.
    numbers = {".step"}
    for parameter, state in optimizer.state.items():
        if id(parameter) in places and places[id(parameter)][0].layout.pieces[places[id(parameter)][1]].shape:
            numbers |= {path for path, value in tensors_of(state) if value.dim() == 0}
    found = [(p, s) for p, s in optimizer.state.items() if isinstance(p, torch.Tensor) and id(p) in places]
    given = {id(value) for _, state in found for _, value in tensors_of(state)}
    is_loaded = False
    for parameter, state in found:
        to_own = partial(_to_own, *places[id(parameter)], numbers)
        for key, value in state.items():
            state[key] = _with_tensors(value, to_own, f".{key}")
            is_loaded |= state[key] is not value
    for _, state in found if is_loaded else ():
        for key, value in state.items():
            state[key] = _with_tensors(value, lambda _, v: copies.of(v) if id(v) in given else v)


class _Copies:
    """Of what a state dict holds, where most of it is cut, or goes to its home, and so is copied anyway.

    torch leaves the rest to the state dict as well, step counts, say: it would count on, and be of no use for
    a second load. What parameters share, they go on sharing.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # each with what it is a copy of

    def of(self, value: torch.Tensor) -> torch.Tensor:
        if type(value) is not torch.Tensor:
            return value
        return self._copies.setdefault(id(value), (value, value.clone()))[1]

    def of_number(self, _: str, value: torch.Tensor) -> torch.Tensor:
        return value if value.dim() else self.of(value)


def _to_own(lane: Lane, index: int, numbers: set[str], path: str, value: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor that was loaded; others, one for all ranks, stay as they are."""
    piece = lane.layout.pieces[index]
    if isinstance(value, StateShard):
        if value.entire:
            raise StateError(
                f"'{piece.name}{path}' was taken from an optimizer that steps on entire tensors "
                "(optimizer_step='owned'), and this one is element-wise",
                "Shard with optimizer_step='owned', or load unsharded values.",
            )
        return to_rest(f"{piece.name}{path}", value, lane, index).clone()
    differs = value.shape != lane.shard_views[index].shape
    if tuple(value.shape) == piece.global_shape and path not in numbers and (is_cut(value) or differs):
        return to_rest(f"{piece.name}{path}", value, lane, index).clone()
    return value


# ---- what belongs to no parameter


def other_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """State under other keys than parameters."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}


def other_entries(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """What its state dict holds beside state and groups: the class, or a hook of the user, has added it."""
    base = torch.optim.Optimizer
    hooks = [
        h for h in getattr(optimizer, "_optimizer_state_dict_post_hooks", {}).values() if h is not _to_shards
    ]
    if type(optimizer).state_dict is base.state_dict and not hooks:
        return {}
    with _as_it_is(optimizer):
        return {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")}


def load_other_entries(optimizer: torch.optim.Optimizer, entries: Mapping[Any, Any]) -> None:
    """Give `load_state_dict` of the class what `other_entries` returned; state and groups stay as they are.

    It sees these as well, as in one process, and may keep references to the containers that it makes. But
    torch casts state to the parameters' dtypes there, so their contents are put back.
    """
    with _as_it_is(optimizer):
        state, groups = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
        optimizer.load_state_dict({**optimizer.state_dict(), **entries})
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(options)


@contextmanager
def _as_it_is(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    _as_they_are.add(id(optimizer))
    try:
        yield
    finally:
        _as_they_are.discard(id(optimizer))


def shards_in(value: Any) -> bool:
    """Whether a value of a state dict has a part of a tensor in it."""
    return any(isinstance(part, StateShard) or is_cut(part) for _, part in tensors_of(value))
