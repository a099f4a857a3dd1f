"""Makes the layout real: flat storage, full views, and what modules show when.

A lane owns two flat buffers. `rest` is this rank's interval; the user's parameters are views of it.
`full` has memory only while the unit is full; the compute parameters are permanent views of it, so
a gather or a release touches one storage, whatever the number of parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fullshard.comm.groups import Comm, as_bytes
from fullshard.comm.watchdog import Operation
from fullshard.engine.direct import Place
from fullshard.engine.gradients import GradShard, Holder
from fullshard.engine.quantize import pack, unpack
from fullshard.engine.tensor_parallel import exchange, show_dtensor
from fullshard.errors import AtRestError, StateError, unit_label
from fullshard.plan.layout import Layout, Piece, shard_shape
from fullshard.plan.tensor_parallel import Spec, local_of, spec_of
from fullshard.precision import LaneDtypes, packed_bytes

_requires_grad = attrgetter("requires_grad")


def piece_view(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A parameter's whole value in a lane's flat buffer, with its own shape and memory order."""
    dense = flat[piece.start : piece.stop].view(piece.memory_shape)
    if piece.order == tuple(range(len(piece.shape))):
        return dense
    return dense.permute([piece.order.index(d) for d in range(len(piece.shape))])


def in_memory_order(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A whole value as the flat sequence that the layout counts in."""
    return value.permute(piece.order).reshape(-1)


class Lane:
    """The parameters of one dtype and one trainability of a unit: one flat buffer each way."""

    def __init__(
        self,
        unit: str,
        layout: Layout,
        dtypes: LaneDtypes,
        parameters: Sequence[nn.Parameter],
        comm: Comm,
        replicated: bool,
    ) -> None:
        self.unit, self.layout, self.dtypes, self.comm = unit, layout, dtypes, comm
        self.parameters = list(parameters)
        self.replicated = replicated
        size = layout.total if replicated else layout.interval
        self.rest = torch.zeros(size, dtype=dtypes.rest, device=comm.device)
        # Replicated and not cast: the full value is the resting one, nothing to gather or release.
        self.permanent = replicated and dtypes.rest == dtypes.compute
        self.full = self.rest if self.permanent else self.rest.new_empty(layout.total, dtype=dtypes.compute)
        self.shard_views: list[torch.Tensor] = []
        self._divide()
        self.full_bytes = self._storage.nbytes()
        specs = [spec_of(p) for p in parameters]
        # How tensor parallelism has cut each parameter; empty for a lane that it has left alone.
        self.specs: list[Spec | None] = specs if any(spec is not None for spec in specs) else []
        self._at_rest: list[tuple[nn.Parameter, torch.Tensor]] = []  # inside fs.full: what DTensors were
        views = [piece_view(self.full.data, piece) for piece in layout.pieces]
        self.compute_parameters = [
            nn.Parameter(view if spec is None else spec.wrap(view), requires_grad=p.requires_grad)
            for p, spec, view in zip(parameters, specs, views, strict=True)
        ]
        self._packed = PackedLane(self) if dtypes.eight_bit_gather and comm.ranks > 1 else None
        self._node = NodeShare(self) if comm.two_level and self._packed is None else None
        if not self.permanent:
            self._storage.resize_(0)
        self.operation: Operation | None = None
        self.keeps_memory = False  # of a small model: getting it anew each time costs more than it holds
        self.places: dict[int, Place] = {}  # parameters whose gradient may be written where it is sent from
        self.unsharded: torch.Tensor | None = None  # inside fs.full: every element, at the resting dtype
        self.gradients: LaneGradients | None = None

    def _divide(self) -> None:
        """Parts of the flat buffers, except the compute parameters."""
        if self.permanent or not self.shard_views:
            self.own = self.full.view(self.comm.ranks, -1)[self.comm.rank]
            self._full_as_bytes, self._own_as_bytes = as_bytes(self.full), as_bytes(self.own)
            self._storage = self.full.untyped_storage()
        self.shard_views = [self._shard_view(piece) for piece in self.layout.pieces]
        self._addresses = [view.data_ptr() for view in self.shard_views]

    def _shard_view(self, piece: Piece) -> torch.Tensor:
        if self.replicated:
            return piece_view(self.rest.data, piece)
        start, stop = self.layout.in_shard(piece, self.comm.rank)
        return self.rest.data[start:stop].view(shard_shape(piece.shape, stop - start))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.duplicate(memo)[id(self)]

    duplicate: Callable[[dict[int, Any]], dict[int, Any]]  # set by the runtime: copies the whole engine once

    # ---- hot path

    def gather(self) -> None:
        self.take_assigned()
        if self.permanent:
            return
        self.wait()  # for what an interrupted call left under way: its memory is about to be used again
        if self._packed is not None and not self.replicated and self.unsharded is None:
            self.operation = self._packed.gather()
            return
        if not self._storage.nbytes():
            self._storage.resize_(self.full_bytes)
        if self.replicated or self.unsharded is not None:
            self.full.copy_(self.rest if self.unsharded is None else self.unsharded)
            return
        if self._node is not None and self._node.kept():
            self.operation = self._node.gather(self._full_as_bytes)
            return
        self.own.copy_(self.rest)
        self.operation = self.comm.gather(self._full_as_bytes, self._own_as_bytes, self.unit)

    @property
    def assigned(self) -> bool:
        """Somebody said `p.data = value` since the last gather, and not inside fs.full."""
        at_rest = self.unsharded is None and not self._at_rest
        return at_rest and [p.data_ptr() for p in self.parameters] != self._addresses

    def take_assigned(self) -> None:
        """`p.data = value` between passes counts like an edit in place: some optimizers step back so.

        Into new memory: `kept = p.data; p.data = average`, and later `p.data = kept`, is how averages are
        tried out, and what was kept is the memory that was ours.
        """
        if not self.assigned:
            return
        values = [local_of(p).detach() for p in self.parameters]
        for value, view, piece in zip(values, self.shard_views, self.layout.pieces, strict=True):
            if value.shape != view.shape:
                has = f"this rank holds {tuple(view.shape)} of"
                self._refuse_shape(piece, value, has, "Assign whole values inside fs.full.")
        with torch.inference_mode(False), torch.no_grad():
            self.rest.data = torch.zeros_like(self.rest)
            self._divide()
            for view, value in zip(self.shard_views, values, strict=True):
                view.copy_(value)
            self.show_sharded()
            for computing, view in zip(
                self.compute_parameters if self.permanent else (), self.shard_views, strict=False
            ):
                local_of(computing).data = view  # the full value is the resting one

    def _refuse_shape(self, piece: Piece, value: torch.Tensor, has: str, remedy: str) -> None:
        given = f"parameter {piece.name!r} was given a value of shape {tuple(value.shape)}"
        raise StateError(f"{unit_label(self.unit)}: {given}; {has} {piece.shape}", remedy)

    def wait(self) -> None:
        if self.operation is not None:
            self.operation.wait()
            self.operation = None
            if self._packed is not None and self._packed.under_way:
                if not self._storage.nbytes():
                    self._storage.resize_(self.full_bytes)
                self._packed.land(self.full)
            if self._node is not None:
                self._node.keep()

    def release(self) -> None:
        if not (self.permanent or self.keeps_memory):
            self._storage.resize_(0)

    # ---- whole values, for fs.full

    def unshard(self) -> None:
        """Every rank's interval at the resting dtype, shown in the user's parameters: a collective."""
        self.take_assigned()
        if self.replicated:
            self._show_as_cut(self.rest.data)
            return
        whole = torch.empty(self.layout.total, dtype=self.dtypes.rest, device=self.rest.device)
        own = whole.view(self.comm.ranks, -1)[self.comm.rank]
        own.copy_(self.rest)
        operation = self.comm.gather(as_bytes(whole), as_bytes(own), self.unit)
        if operation is not None:
            operation.wait()
        self.unsharded = whole
        for parameter, piece in zip(self.parameters, self.layout.pieces, strict=True):
            parameter.data = piece_view(whole, piece)
        self._show_as_cut(whole)

    def _show_as_cut(self, whole: torch.Tensor) -> None:
        """Tensor-parallel parameters are DTensors again, over this rank's part."""
        for parameter, piece, spec in zip(self.parameters, self.layout.pieces, self.specs, strict=False):
            if spec is not None:
                self._at_rest.append((parameter, show_dtensor(parameter, spec, piece_view(whole, piece))))

    def uncut_views(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """What tensor parallelism has not cut: the same on all its ranks."""
        pieces = self.layout.pieces
        return [piece_view(whole, p) for p in pieces if p.region is not None and not p.region.is_cut]

    def take_replaced(self) -> None:
        """`p.data = value` inside fs.full counts like an edit in place."""
        if self.unsharded is None:
            self.take_assigned()
            return
        for parameter, piece in zip(self.parameters, self.layout.pieces, strict=True):
            place, value = piece_view(self.unsharded, piece), local_of(parameter).detach()
            if value.data_ptr() == place.data_ptr() and value.stride() == place.stride():
                continue
            if value.shape != place.shape:
                self._refuse_shape(piece, value, "it has", "A sharded parameter keeps its shape.")
            place.copy_(value)

    def reshard(self, writeback: bool) -> None:
        for parameter, twin in self._at_rest:
            exchange(parameter, twin)
        self._at_rest.clear()
        if self.unsharded is None:
            return
        if writeback:
            self.rest.copy_(self.unsharded.view(self.comm.ranks, -1)[self.comm.rank])
        self.unsharded = None
        self.show_sharded()

    def show_sharded(self) -> None:
        for parameter, view in zip(self.parameters, self.shard_views, strict=True):
            parameter.data = view

    @property
    def trainable(self) -> list[bool]:
        return list(map(_requires_grad, self.parameters))


class NodeShare:
    """This rank's part of what its node holds together (hybrid, sharded across).

    Kept from forward to backward, so that each step gathers between nodes once.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        line = lane.comm.shard_group
        self._share = lane.full.view(line.ranks, -1)[line.rank]
        self._share_as_bytes = as_bytes(self._share)
        self._value: torch.Tensor | None = None
        self._fresh = False  # of the pass that backward belongs to

    def kept(self) -> bool:
        return self._fresh and self._lane.comm.phase == "backward"

    def gather(self, full: torch.Tensor) -> Operation | None:
        assert self._value is not None
        self._share.copy_(self._value)
        return self._lane.comm.shard_group.gather(full, self._share_as_bytes, self._lane.unit)

    def keep(self) -> None:
        self._fresh = self._lane.comm.phase == "backward" or torch.is_grad_enabled()
        if self._lane.comm.phase == "backward" or not self._fresh:
            return
        if self._value is None:
            self._value = torch.empty_like(self._share)
        self._value.copy_(self._share)


class PackedLane:
    """A lane on its way in 8-bit blocks. Packed once a pass; backward sends the same again."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        row_bytes = packed_bytes(lane.layout.interval)
        self._rows = torch.empty(lane.comm.ranks, row_bytes, dtype=torch.uint8, device=lane.rest.device)
        self._flat, self._mine = self._rows.view(-1), self._rows[lane.comm.rank]
        self._storage = self._rows.untyped_storage()
        self._size_bytes = self._storage.nbytes()
        self._own: torch.Tensor | None = None
        self._storage.resize_(0)

    @property
    def under_way(self) -> bool:
        return self._storage.nbytes() > 0

    def gather(self) -> Operation | None:
        comm, lane = self._lane.comm, self._lane
        if self._own is None or comm.phase != "backward":
            if self._own is None:
                self._own = self._mine.new_empty(self._mine.shape)
            pack(lane.rest[None], self._own[None])
        self._storage.resize_(self._size_bytes)
        self._mine.copy_(self._own)
        return comm.gather(self._flat, self._mine, lane.unit)

    def land(self, full: torch.Tensor) -> None:
        unpack(self._rows, full.view(len(self._rows), -1))
        self._storage.resize_(0)


class LaneGradients:
    """The gradient shard of a lane, and the permanent views that become `p.grad`."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.flat = torch.zeros(lane.rest.shape, dtype=lane.dtypes.rest, device=lane.rest.device)
        ranks, rank = lane.comm.ranks, lane.comm.rank
        self.own = self.flat.view(ranks, -1)[rank] if lane.replicated else self.flat
        self.holder = Holder()
        self.views = [self._view(piece) for piece in lane.layout.pieces]
        self.live = False  # holds a sum that the next reduce is added to
        self.was_live = False  # did so when this backward began
        self._storage = self.flat.untyped_storage()
        self._held = self._count()
        self._refs = max(map(sys.getrefcount, self.views), default=0)

    def _view(self, piece: Piece) -> GradShard:
        lane, rank = self.lane, self.lane.comm.rank
        start, stop = lane.layout.in_shard(piece, rank)
        part = self.own[start:stop]
        region = piece.region
        answers = region is None or region.first
        if lane.replicated:
            view = GradShard.make(piece_view(self.flat, piece), lane.comm, part, self.holder, answers)
            view.replicated = region is None or not region.is_cut
            view.answers = answers and rank == 0
            return view
        local = part.view(shard_shape(piece.shape, stop - start))
        return GradShard.make(local, lane.comm, None, self.holder, answers)

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    def shared(self) -> bool:
        """Somebody outside still holds these gradients (PCGrad and the like): they must stay as they are."""
        held = max(map(sys.getrefcount, self.views), default=0)
        return self._count() > self._held or held > self._refs


_EVERYWHERE = -1


class Slots:
    """Every place that holds a unit's parameters, switched between at rest and full.

    A unit of several modules (merged blocks) is switched module by module: only the one whose forward runs
    needs its places, and switching all of them for each would cost the square of their number.
    """

    def __init__(self, unit: str, modules: Sequence[nn.Module]) -> None:
        self.unit = unit
        self._parts: dict[int, list[tuple[Any, Any, nn.Parameter, nn.Parameter]]] = {}
        self._forwards: dict[int, list[tuple[dict[str, Any], Any, Any]]] = {}
        self._names: dict[int, str] = {}
        self._part_of: dict[int, int] = {}
        for part, module in enumerate(modules if len(modules) > 1 else ()):
            for inside in module.modules():
                shared = id(inside) in self._part_of  # lies in two of them
                self._part_of[id(inside)] = _EVERYWHERE if shared else part

    def part(self, module: nn.Module | None) -> int:
        """What to switch for a forward of `module`."""
        return self._part_of.get(id(module), _EVERYWHERE)

    def add(
        self,
        owner: nn.Module | None,
        place: tuple[Any, Any],
        resting: nn.Parameter,
        computing: nn.Parameter,
        name: str,
    ) -> None:
        """`place` is a container and a key in it; `owner` the module that shows it, if one does."""
        self._parts.setdefault(self.part(owner), []).append((*place, resting, computing))
        self._names[id(resting)] = name

    def add_forward(self, module: nn.Module, stand_in: Any) -> None:
        """A stand-in for `module.forward` while the unit is at rest."""
        forwards = self._forwards.setdefault(self.part(module), [])
        forwards.append((module.__dict__, stand_in, stand_in.replaced))
        module.__dict__["forward"] = stand_in

    def stands_in(self, stand_in: Any) -> bool:
        return any(known is stand_in for part in self._forwards.values() for _, known, _ in part)

    def show_full(self, part: int = _EVERYWHERE) -> None:
        for each in self._shown_with(part):
            for container, key, resting, computing in self._parts.get(each, ()):
                if container[key] is not resting:
                    self._undo_and_refuse(self._names[id(resting)])
                container[key] = computing
            for attributes, _, original in self._forwards.get(each, ()):
                if original is None:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = original

    def show_sharded(self, part: int = _EVERYWHERE) -> None:
        for each in self._shown_with(part):
            for container, key, resting, _ in self._parts.get(each, ()):
                container[key] = resting
            for attributes, stand_in, _ in self._forwards.get(each, ()):
                attributes["forward"] = stand_in

    def _shown_with(self, part: int) -> Iterable[int]:
        if part == _EVERYWHERE:
            return self._parts.keys() | self._forwards.keys()
        return part, _EVERYWHERE

    def _undo_and_refuse(self, name: str) -> None:
        for slots in self._parts.values():
            for container, key, resting, computing in slots:
                if container[key] is computing:
                    container[key] = resting
        raise AtRestError(
            f"{unit_label(self.unit)}: somebody replaced its parameter {name!r} after sharding",
            "Edit values in place inside `with fs.full(model):`; torch.func.functional_call works there too.",
        )
