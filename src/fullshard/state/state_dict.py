"""`state_dict` values that know their global shape, and `load_state_dict` of unsharded tensors.

A bare shard under a full name is how people lose weights. So outside `fs.full` a state dict holds
StateShards: global shape, this rank's elements, ready for torch.distributed.checkpoint, refused by
`torch.save` with the remedy.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.comm.groups import Comm
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import in_memory_order, piece_view
from fullshard.errors import ModelError, NotSupported, StateError
from fullshard.plan.layout import Box, Piece, boxes
from fullshard.plan.tensor_parallel import is_cut, part_of
from fullshard.state.full_state_dicts import follow_torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_REMEDY = (
    "fs.save and torch.distributed.checkpoint.save write every rank's part; for plain tensors take the "
    "model's state dict inside `with fs.full(model):`."
)


_MEMORY = {"untyped_storage", "storage", "numpy", "tolist", "item", "__array__"}


class StateShard(torch.Tensor):
    """A state dict value: the global shape, this rank's elements [start, stop) in memory order."""

    key: str
    piece: Piece
    local: torch.Tensor
    start: int
    stop: int
    comm: Comm | None = None  # joins the ranks that hold the rest, where it is known
    entire = False  # all elements are on one rank: state of an optimizer that steps on entire tensors
    fixed_dtype = False  # not cast by torch's `load_state_dict`: a part of a state, such as its codes

    @staticmethod
    def make(key: str, piece: Piece, local: torch.Tensor, start: int, stop: int) -> StateShard:
        if type(local) is not torch.Tensor:  # a momentum that began as a gradient's copy
            with torch._C.DisableTorchFunctionSubclass():
                local = local.as_subclass(torch.Tensor)
        value: StateShard = torch.Tensor._make_wrapper_subclass(
            StateShard, piece.global_shape, dtype=local.dtype, device=local.device
        )
        value.key, value.piece = key, piece
        value.local, value.start, value.stop = local, start, stop
        follow_torch(StateShard)
        return value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = (a for arg in args for a in (arg if isinstance(arg, list | tuple) else (arg,)))
        value = next(a for a in given if isinstance(a, StateShard))
        if func is torch.ops.aten.detach.default:
            return value._holding(value.local)
        if func is torch.ops.aten.clone.default:
            return value._holding(value.local.clone())
        if func is torch.ops.aten._to_copy.default:
            if value.fixed_dtype:
                kwargs = {key: given for key, given in (kwargs or {}).items() if key != "dtype"}
            return value._holding(func(value.local, *args[1:], **(kwargs or {})))
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == value.piece.global_shape:
            # torch.distributed.checkpoint.async_save makes such a one on the host, then fills in `local`.
            return value._holding(func(value.local, value.local.shape, **(kwargs or {})))
        raise StateError(
            f"state dict value {value.key!r} holds this rank's {value.stop - value.start} of "
            f"{value.piece.num_elements} elements; {func} on it has no meaning",
            _REMEDY,
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "data_ptr":
            return 0  # no memory of its own, as torch's DTensors say: async_save goes on to `local` then
        if getattr(func, "__name__", "") in _MEMORY:
            raise StateError(
                f"state dict value {args[0].key!r} holds only this rank's elements; {func.__name__}() would "
                "take them for all elements",
                _REMEDY,
            )
        with torch._C.DisableTorchFunctionSubclass():  # what comes back is of the right class already
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"state dict value {self.key!r} holds this rank's {self.stop - self.start} of "
            f"{self.piece.num_elements} elements and cannot be pickled or saved alone",
            _REMEDY,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StateShard:
        return self._holding(self.local.clone())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"StateShard({self.key!r}, global shape {self.piece.global_shape}, {self.dtype}, this rank's "
            f"elements [{self.start}, {self.stop}))"
        )

    def _holding(self, local: torch.Tensor) -> StateShard:
        twin = StateShard.make(self.key, self.piece, local, self.start, self.stop)
        twin.comm = self.comm
        twin.__class__ = type(self)
        twin.__dict__.update(self.__dict__ | twin.__dict__)
        return twin

    # ---- torch's own names, for scripts that take its sharded state dicts apart

    def to_local(self) -> torch.Tensor:
        """This rank's elements, as the parameter holds them at rest."""
        return self.local

    def full_tensor(self) -> torch.Tensor:
        """The unsharded value, on every rank, on the device of the shard. All ranks must call it, value by
        value in the same order."""
        if self.comm is None:
            raise NotSupported(f"full_tensor() of state dict value {self.key!r}", _REMEDY)
        flat = torch.zeros(self.piece.num_elements, dtype=self.local.dtype, device=self.comm.device)
        region = self.piece.region
        if region is None or region.first:  # of those that hold the same, one counts
            flat[self.start : self.stop] = self.local.detach().reshape(-1)
        part = piece_view(flat, replace(self.piece, start=0))
        if region is None or not region.is_cut:
            self.comm.sum_shards(flat)  # all other elements are zero: nothing is rounded
            return part.to(self.local.device)
        full = flat.new_zeros(region.global_shape)
        part_of(full, region).copy_(part)
        return self.comm.sum_shards(full).to(self.local.device)

    # ---- torch.distributed.checkpoint finds these by name; importing it takes a second, which it has spent

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets), index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box), properties=properties, size=torch.Size(self.piece.global_shape)
                ),
            )
            for index, box in enumerate(self._boxes())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = self.start
        for box in self._boxes():
            if index.offset is None or tuple(index.offset) == box.offsets:
                flat = self.local.view(-1)[at - self.start : at - self.start + box.num_elements]
                shape = tuple(box.sizes[d] for d in self.piece.order)
                order = self.piece.order
                return flat.view(shape).permute([order.index(d) for d in range(len(shape))])
            at += box.num_elements
        raise StateError(f"state dict value {self.key!r} has no part at {index.offset} on this rank")

    def _boxes(self) -> list[Box]:
        return boxes(self.piece, self.start, self.stop)


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


class Places:
    """One module's sharded parameters: attribute to (lane, index in the lane)."""

    def __init__(self, places: dict[str, tuple[Lane, int]]) -> None:
        self.places = places

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)({k: (copy.deepcopy(lane, memo), i) for k, (lane, i) in self.places.items()})


def shard_of(lane: Lane, index: int, local: torch.Tensor, key: str) -> StateShard:
    """This rank's elements of a parameter, or of a tensor of its shape, with the global shape."""
    piece = lane.layout.pieces[index]
    start, stop = lane.layout.kept(piece, lane.comm.rank)
    if local.numel() != stop - start:
        raise StateError(f"{key!r} has {local.numel()} elements, and this rank keeps {stop - start}")
    shard = StateShard.make(key, piece, local.view(lane.shard_views[index].shape), start, stop)
    shard.comm = lane.comm
    if lane.present is not None:
        lane.present(shard, lane, index)
    return shard


class AfterStateDict(Places):
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for attribute, (lane, index) in self.places.items():
            key = prefix + attribute
            if key in state and lane.replicated and lane.specs and not is_cut(state[key]):
                spec = lane.specs[index]
                state[key] = state[key] if spec is None else spec.wrap(state[key])
            if key not in state or lane.unsharded is not None or lane.replicated:
                continue
            state[key] = shard_of(lane, index, lane.parameters[index].detach(), key)


class BeforeLoad(Places):
    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise NotSupported(
                "load_state_dict(assign=True) would replace the sharded parameters",
                "Use assign=False: values are copied into the shards.",
            )
        if not prefix:
            _check_all(module, state)
        self.convert(state, prefix)

    def convert(self, state: dict[str, Any], prefix: str) -> None:
        for attribute, (lane, index) in self.places.items():
            key = prefix + attribute
            if state.get(key) is lane.parameters[index]:
                # torch.distributed.checkpoint.state_dict puts it where the user gave nothing: a missing key.
                del state[key]
            elif key in state and is_cut(lane.parameters[index]):
                state[key] = _as_cut(key, state[key], lane, index)
            elif key in state and lane.unsharded is None:
                state[key] = to_rest(key, state[key], lane, index)


def _check_all(module: nn.Module, state: dict[str, Any]) -> None:
    """Every value below `module`, before one of them is copied: a bad file changes nothing."""
    for name, child in module.named_modules():
        for hook in child._load_state_dict_pre_hooks.values():
            if isinstance(hook.hook, BeforeLoad):
                hook.hook.convert(dict(state), f"{name}." if name else "")


def attach_state(module: nn.Module, places: dict[str, tuple[Lane, int]]) -> None:
    module.register_state_dict_post_hook(AfterStateDict(places))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(BeforeLoad(places))  # type: ignore[no-untyped-call]


def _part(key: str, value: Any, lane: Lane, index: int) -> torch.Tensor:
    """The part that this rank's tensor-parallel group holds, of an unsharded value or a DTensor cut alike."""
    piece, spec = lane.layout.pieces[index], lane.specs[index] if lane.specs else None
    if not isinstance(value, torch.Tensor):
        raise ModelError(
            f"{key!r} in the state dict is a {type(value).__name__}, not a tensor", "Load tensors."
        )
    if tuple(value.shape) != piece.global_shape:
        raise ModelError(
            f"{key!r} has shape {tuple(value.shape)} in the state dict and {piece.global_shape} in the model",
            "Load tensors of the unsharded model.",
        )
    if is_cut(value) and spec is None and piece.region is None:
        value = value.full_tensor()  # a collective; cut by rows, for example, by torch's distribute_tensor
    if is_cut(value) and (spec is None or not spec.cuts_like(value)):
        raise ModelError(
            f"{key!r} in the state dict is a DTensor that is not cut as the parameter is",
            "Load unsharded tensors: value.full_tensor().",
        )
    return part_of(value, piece.region)


def _as_cut(key: str, value: Any, lane: Lane, index: int) -> torch.Tensor:
    """Inside fs.full a tensor-parallel parameter is a DTensor, and takes one."""
    spec = lane.specs[index]
    assert spec is not None
    return spec.wrap(_part(key, value, lane, index).contiguous())


def to_rest(key: str, value: Any, lane: Lane, index: int) -> torch.Tensor:
    """This rank's elements of an unsharded value, in the shape of the parameter at rest."""
    piece = lane.layout.pieces[index]
    shard_view = lane.shard_views[index]
    if isinstance(value, StateShard):
        start, stop = lane.layout.kept(piece, lane.comm.rank)
        if lane.replicated:
            raise StateError(f"{key!r} is a shard of a value, and parameters here are replicated", _REMEDY)
        cut = value.start, value.stop, value.piece.order, value.piece.region
        if cut != (start, stop, piece.order, piece.region):
            raise StateError(
                f"{key!r} was taken from a model that is cut differently (elements [{value.start}, "
                f"{value.stop}), here [{start}, {stop}))",
                _REMEDY,
            )
        return value.local
    part = _part(key, value, lane, index)
    if lane.replicated:
        return part
    start, stop = lane.layout.kept(piece, lane.comm.rank)
    return in_memory_order(part, piece)[start:stop].view(shard_view.shape)
