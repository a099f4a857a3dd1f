"""State dicts of optimizers that step on entire tensors: each value is on one rank.

In a state dict every rank lists the state of every parameter. A tensor is a StateShard with all elements on
its owner and none elsewhere; numbers are on all ranks. So it is saved by torch.distributed.checkpoint as
others are. Making one is a collective: the ranks do not know each other's state.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard.comm.groups import Comm
from fullshard.engine.pieces import in_memory_order, piece_view
from fullshard.engine.step.owned import Owned, OwnedStep
from fullshard.errors import StateError
from fullshard.plan.layout import Piece
from fullshard.precision import DTYPES
from fullshard.state.state_dict import StateShard
from fullshard.state.tensor_subclasses import class_key, put_together, taken_apart

_TENSOR = "fullshard tensor"  # in the description of a state


def to_shards(optimizer: torch.optim.Optimizer, owned: OwnedStep, state: dict[int, Any]) -> dict[int, Any]:
    """The state of a state dict, by index, with that of parameters of other owners. A collective."""
    if owned.gathered:
        return state
    held = dict.fromkeys(id(p) for group in optimizer.param_groups for p in group["params"])
    items = {index: owned.by_parameter.get(key) for index, key in enumerate(held)}
    state = {index: taken_apart(values) for index, values in state.items()}
    mine = {
        index: {key: _described(value) for key, value in state[index].items()}
        for index, item in items.items()
        if item is not None and item.is_here and index in state
    }
    shown = {index: values for index, values in state.items() if items.get(index) is None}
    for comm in {id(item.lane.comm): item.lane.comm for item in owned.items}.values():
        for theirs in comm.all_gather_object(mine):
            for index, described in theirs.items():
                item = items[index]
                if item is not None and item.lane.comm is comm and index not in shown:
                    here = state.get(index, {}) if item.is_here else {}
                    shown[index] = {
                        key: _shown(f"{item.piece.name}.{key}", what, here.get(key), item)
                        for key, what in described.items()
                    }
    numbers = sorted(index for index in shown if index in items)
    return {key: shown[key] for key in (*numbers, *(key for key in shown if key not in items))}


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        # Not all are row-major in memory, and products of matrices are rounded by that.
        order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
        order = list(range(value.dim())) if value.is_contiguous() else order
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), order]}
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, list | tuple):
        return type(value)(map(_described, value))
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    return value


def _shown(name: str, what: Any, here: Any, item: Owned, in_tensor: bool = False) -> Any:
    """A value of the state dict from its description, and from the value itself on its owner.

    `in_tensor`: it is a part of a tensor that was taken apart.
    """
    if isinstance(what, dict) and _TENSOR in what:
        dtype, shape, order = what[_TENSOR]
        piece = Piece(name, tuple(shape), tuple(order), 0)
        if here is None:
            local = torch.empty(0, dtype=DTYPES[dtype], device=item.lane.rest.device)
            shard = StateShard.make(name, piece, local, 0, 0)
        else:
            local = in_memory_order(here.detach(), piece).view(piece.memory_shape)
            shard = StateShard.make(name, piece, local, 0, piece.num_elements)
        shard.comm, shard.entire, shard.fixed_dtype = item.lane.comm, True, in_tensor
        return shard
    if isinstance(what, torch.Tensor):
        return what.to(item.lane.rest.device) if here is None else here
    if isinstance(what, list | tuple):
        parts = [None] * len(what) if here is None else here
        return type(what)(
            _shown(f"{name}[{i}]", part, own, item)
            for i, (part, own) in enumerate(zip(what, parts, strict=True))
        )
    if isinstance(what, dict):
        apart = in_tensor or class_key(what) is not None
        return {
            key: _shown(f"{name}.{key}", part, None if here is None else here[key], item, apart)
            for key, part in what.items()
        }
    return what


def to_owners(optimizer: torch.optim.Optimizer, owned: OwnedStep) -> None:
    """Of what load_state_dict was given, or the constructor made, owners keep entire values, others none."""
    known = {id(p): p for p in optimizer.state if isinstance(p, torch.Tensor)}
    for comm in {id(item.lane.comm): item.lane.comm for item in owned.items}.values():
        items = [item for item in owned.items if item.lane.comm is comm]
        _gather_elements(optimizer, items, comm, owned.gathered)
    for item in owned.items:
        if id(item.parameter) not in known:
            continue
        if not owned.owns(item.parameter):
            del optimizer.state[item.parameter]
            continue
        state = optimizer.state[item.parameter]
        for key, value in state.items():
            state[key] = put_together(_entire(f"{item.piece.name}.{key}", value, item))


def _entire(name: str, value: Any, item: Owned) -> Any:
    if isinstance(value, StateShard):
        if not value.entire or value.stop - value.start != value.piece.num_elements:
            raise StateError(
                f"{name!r} holds this rank's {value.stop - value.start} of {value.piece.num_elements} "
                "elements, and the optimizer here steps on entire tensors (optimizer_step='owned')",
                "Load a state dict of an optimizer that does so, too, or unsharded values.",
            )
        return piece_view(value.local.reshape(-1), value.piece)
    if isinstance(value, list | tuple):
        return type(value)(_entire(f"{name}[{i}]", part, item) for i, part in enumerate(value))
    if isinstance(value, dict):
        return {key: _entire(f"{name}.{key}", part, item) for key, part in value.items()}
    return value


def _gather_elements(
    optimizer: torch.optim.Optimizer, items: list[Owned], comm: Comm, everywhere: bool
) -> None:
    """State that every rank made for its own elements, in the optimizer's constructor, goes to the owners."""
    mine = {
        str(number): sorted(
            key for key, value in optimizer.state[item.parameter].items() if _fits(value, item)
        )
        for number, item in enumerate(items)
        if item.parameter in optimizer.state
    }
    by_rank = comm.all_gather_object(mine)
    for number, item in enumerate(items):
        keys = [theirs.get(str(number), []) for theirs in by_rank]
        for key in keys[0]:
            if all(key in theirs for theirs in keys):
                state = optimizer.state[item.parameter]
                tag = comm.tag(item.lane.unit, "optimizer state")
                flat = item.lane.gather_pieces({item.index: state[key]}, state[key].dtype, tag)
                if everywhere or item.is_here:
                    piece = item.piece
                    state[key] = item.shaped(flat[piece.start : piece.stop].clone())


def _fits(value: Any, item: Owned) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, StateShard)
        and value.dim() > 0
        and value.shape == item.lane.shard_views[item.index].shape
    )
