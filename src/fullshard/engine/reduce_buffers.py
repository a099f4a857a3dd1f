"""Buffers of a reduce: send buffers, accumulation buffers, exchanges in flight, and taking over `p.grad`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.comm.groups import Comm, as_bytes
from fullshard.comm.watchdog import Operation
from fullshard.engine.gradients import GradShard, local_shape, plainly
from fullshard.engine.homes.transfers import Mark
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import piece_view
from fullshard.engine.summation_tree import SummationTree
from fullshard.engine.unit import LiveUnit
from fullshard.engine.wire import Wire, gradient_wire, gradient_wire_across, gradient_wire_back
from fullshard.errors import GradientError, unit_label
from fullshard.plan.layout import Piece

_grad = attrgetter("grad")


class Penalised(NamedTuple):
    """The gradient of a penalty with respect to this rank's elements of one parameter of a lane."""

    lane: Lane
    parameter: int
    gradient: torch.Tensor


class SendBuffer:
    """A lane's packed gradients: memory only from packing to the end of the exchange, views that stay."""

    def __init__(self, lane: Lane, dtype: torch.dtype) -> None:
        self.flat = torch.empty(lane.layout.total, dtype=dtype, device=lane.home.compute_device)
        self.views = [piece_view(self.flat.data, piece) for piece in lane.layout.pieces]
        self.as_bytes = as_bytes(self.flat)
        # Blocks of 8 bits share a scale: what lies between parameters must not be in it.
        in_blocks = lane.dtypes.eight_bit_wire or lane.dtypes.eight_bit_across
        self._gaps = _gaps(self.flat, lane.layout.pieces) if in_blocks else []
        self._storage = self.flat.untyped_storage()
        self.size_bytes = self._storage.nbytes()
        self._places = [(place, self.views[index]) for index, place in lane.places.items()]
        self._keeps_memory = lane.keeps_memory
        self.is_open = False
        self.close()

    @property
    def written(self) -> bool:
        """A matrix product has left a gradient here."""
        return any(place.view is None for place, _ in self._places)

    def invite(self) -> None:
        """Matrix products of a backward that begins may write here, each once.

        Not again while it is open: a unit that begins a second time (segments of reentrant checkpointing)
        has gradients here that a second product would write over.
        """
        if self.is_open:
            return
        self.open()
        for place, view in self._places:
            place.view = view

    def open(self) -> None:
        if self.is_open:
            return
        self.is_open = True
        self._storage.resize_(self.size_bytes)
        if self._gaps:
            torch._foreach_zero_(self._gaps)

    def close(self) -> None:
        self.is_open = False
        for place, _ in self._places:
            place.view = None
        if not self._keeps_memory:
            self._storage.resize_(0)


def _gaps(flat: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    starts = [*(piece.start for piece in pieces[1:]), len(flat)]
    pairs = zip(pieces, starts, strict=True)
    return [flat[piece.stop : start] for piece, start in pairs if start > piece.stop]


class Leg(Enum):
    """Gradients go inside the shard group, then their sums between nodes; with replicas, back from there."""

    INSIDE = 0
    ACROSS = 1
    BACK = 2


@dataclass
class LaneReduction:
    """What one lane needs to reduce: its buffers, and which parameters were used since the last sum."""

    lane: Lane
    unit: LiveUnit
    send_buffer: SendBuffer | None = None
    accumulation: SendBuffer | None = None
    has_accumulated: bool = False  # the accumulation buffer holds gradients that were not sent yet
    accumulated_shard: torch.Tensor | None = None  # hybrid: sums that were not yet added over replicas
    used: list[bool] | None = None
    residuals: dict[Leg, torch.Tensor] = field(default_factory=dict)  # what 8 bits have left out so far
    penalties: dict[int, torch.Tensor] = field(default_factory=dict)  # gradients of penalties, by index
    trees: dict[int, SummationTree] = field(default_factory=dict)  # with reduce='fixed', by part
    round: object = None  # the share of micro-batches that was last sent
    parts: int = 0  # how often it was: more than once if a unit's gradients come in several parts
    wire: Wire = field(init=False)
    across: Wire = field(init=False)  # between nodes
    back: Wire = field(init=False)  # from there, with replicas

    def __post_init__(self) -> None:
        dtypes = self.lane.dtypes
        self.wire, self.across = gradient_wire(dtypes), gradient_wire_across(dtypes)
        self.back = gradient_wire_back(dtypes)

    def residual(self, leg: Leg, values: torch.Tensor) -> torch.Tensor:
        """What 8 bits left out of earlier values of this shape, on this leg."""
        residual = self.residuals.get(leg)
        if residual is None:
            residual = self.residuals[leg] = torch.zeros_like(values, dtype=torch.bfloat16)
        return residual

    def next_part(self, share: object) -> int:
        if self.round is not share:
            self.round, self.parts = share, 0
        self.parts += 1
        return self.parts - 1

    @property
    def trees_incomplete(self) -> bool:
        return any(tree.leaves for tree in self.trees.values())

    def drop_accumulated(self) -> None:
        self.trees.clear()
        self.accumulated_shard = self.used = None
        self.penalties.clear()
        self.has_accumulated = False
        if self.accumulation is not None:
            self.accumulation.close()

    def add_penalty(self, index: int, gradient: torch.Tensor) -> None:
        before = self.penalties.get(index)
        self.penalties[index] = gradient if before is None else before + gradient
        self.note([i == index for i in range(len(self.lane.parameters))])

    def add_penalties(self) -> None:
        """Every rank computed those of its own elements completely: they join the mean as they are."""
        gradients = self.lane.gradients
        assert gradients is not None
        with plainly():
            for index, gradient in self.penalties.items():
                gradients.views[index].add_(gradient.to(gradients.flat.device))
        self.penalties.clear()

    def assign_penalties(self) -> None:
        """The same without a backward of the unit."""
        take_over_grads(self.lane)
        gradients, parameters = self.lane.gradients, self.lane.parameters
        assert gradients is not None
        for index in self.penalties:
            if parameters[index].grad is None:
                gradients.views[index].zero_()
            parameters[index].grad = gradients.views[index]
        self.used = None
        self.add_penalties()

    def note(self, used: Sequence[bool]) -> None:
        if self.unit.policy.zero_unused and any(used):
            used = [True] * len(used)
        self.used = (
            list(used) if self.used is None else [a or b for a, b in zip(self.used, used, strict=True)]
        )


@dataclass
class InFlight:
    """One leg of a reduce in flight: what it sends, where it arrives, and what the sum is divided by."""

    leg: Leg
    reduction: LaneReduction
    sent: SendBuffer | torch.Tensor
    received: torch.Tensor
    operation: Operation | None
    divisor: float
    wire: Wire  # of the received rows
    read: Mark | None = None  # on a device: what was received has been read, for the next leg
    following: InFlight | None = None  # and this is that leg, if there is one
    held: list[torch.Tensor] = field(default_factory=list)  # until then
    part: int = 0  # with reduce='fixed', see LaneReduction

    def over(self) -> bool:
        if self.read is not None:
            return self.read.over()
        return self.operation is None or self.operation.over()

    def wait(self) -> None:
        if self.read is not None:
            self.read.wait()
        elif self.operation is not None:
            self.operation.wait()

    def drop(self) -> None:
        self.wait()
        if self.following is not None:
            self.following.drop()

    def close(self) -> None:
        """It is over, and what was received has been read: the memory that it was sent from is free."""
        if isinstance(self.sent, SendBuffer):
            self.sent.close()


def take_over_grads(lane: Lane) -> None:
    """Fresh gradients overwrite the shard, others are added to it; a user's own values are taken over."""
    gradients = lane.gradients
    shared = gradients is not None and gradients.shared()
    current = list(map(_grad, lane.parameters))
    if gradients is None or (shared and any(g is None for g in current)):
        # User code holds gradients that it took off their parameters: they stay as they are, and new ones
        # begin. What is still on its parameter is taken over below.
        gradients = lane.make_gradients()
    gradients.live = gradients.was_live = any(g is not None for g in current)
    if not gradients.live:
        return
    if any(value is not view for value, view in zip(current, gradients.views, strict=True)):
        gradients.require_no_sum(1)  # else where gradients arrive, if any do
    for parameter, piece, view, value in zip(
        lane.parameters, lane.layout.pieces, gradients.views, current, strict=True
    ):
        if value is view:
            continue
        with torch.no_grad(), plainly():
            if value is None:
                view.zero_()
            elif value.shape == view.shape:
                view.copy_(value)
                parameter.grad = view
            else:
                raise _foreign(lane, piece, value)


def _foreign(lane: Lane, piece: Piece, value: torch.Tensor) -> GradientError:
    return GradientError(
        f"{unit_label(lane.unit)}: parameter {piece.name!r} has a gradient of shape {local_shape(value)}, "
        "which is not its shard's",
        "Set p.grad to None before backward, or to a tensor of p's own shape.",
    )


def copy_into(send_buffer: SendBuffer, gradients: Sequence[torch.Tensor | None]) -> None:
    """Cast and copied in one go; what a matrix product wrote here already stays."""
    views = send_buffer.views
    if send_buffer.written:
        pairs = list(zip(views, gradients, strict=True))
        pairs = [(v, g) for v, g in pairs if g is None or g.data_ptr() != v.data_ptr()]
        views, gradients = [v for v, _ in pairs], [g for _, g in pairs]
    values = [g for g in gradients if g is not None]
    if len(values) < len(views):
        torch._foreach_zero_([v for v, g in zip(views, gradients, strict=True) if g is None])
        views = [v for v, g in zip(views, gradients, strict=True) if g is not None]
    if values:
        torch._foreach_copy_(views, values)


def encode_rows(reduction: LaneReduction, sent: SendBuffer, num_rows: int, feedback: bool) -> torch.Tensor:
    """A lane's packed gradients as the wire sends them, one row per receiving rank."""
    values, wire = sent.flat.view(num_rows, -1), reduction.wire
    if wire.in_place:
        return values
    rows = wire.rows(num_rows, values.shape[1], values.device)
    wire.encode(values, rows, reduction.residual(Leg.INSIDE, values) if feedback else None)
    sent.close()
    return rows


def check_repeated(comm: Comm, reductions: Sequence[LaneReduction]) -> None:
    """Gradients of what tensor parallelism has not cut must be the same on all its ranks, to rounding.

    They are not where a plain parameter works on activations that are cut: each rank then trains its own.
    """
    if comm.world is comm:
        return
    norms: dict[str, float] = {}
    for reduction in reductions:
        layout, gradients = reduction.lane.layout, reduction.lane.gradients
        assert gradients is not None
        gradients.settle()
        for piece in layout.pieces:
            if piece.region is not None and not piece.region.is_cut:
                start, stop = layout.in_shard(piece, comm.rank)
                norms[piece.name] = float(torch.linalg.vector_norm(gradients.own[start:stop].double()))
    gathered = comm.world.all_gather_object(((comm.rank, comm.replica), norms))
    floor = 1e-6 * max((norm for _, theirs in gathered for norm in theirs.values()), default=0.0)
    first: dict[tuple[Any, str], tuple[int, float]] = {}
    for rank, (place, theirs) in zip(comm.world.members, gathered, strict=True):
        for name, norm in theirs.items():
            other, same = first.setdefault((place, name), (rank, norm))
            if abs(norm - same) > floor + 1e-2 * max(norm, same):
                raise GradientError(
                    f"the gradient of {name!r}, which tensor parallelism has not cut, has norm {norm:.6g} on "
                    f"rank {rank} and {same:.6g} on rank {other}",
                    "Put its module into the plan of parallelize_module (SequenceParallel for a norm whose "
                    "input is cut by tokens); p.grad was not set.",
                )


class PlainGradients:
    """`p.grad` as plain tensors of the same elements, for the time of an optimizer's step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._shown: list[tuple[nn.Parameter, GradShard, torch.Tensor]] = []
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, GradShard):
                with plainly():
                    plain = gradient.as_subclass(torch.Tensor)
                self._shown.append((parameter, gradient, plain))
                parameter.grad = plain

    def restore(self) -> None:
        """Gradients that the step has not replaced are gradient shards again."""
        for parameter, gradient, plain in self._shown:
            if parameter.grad is plain:
                parameter.grad = gradient


def unpackable(lane: Lane, gradients: Sequence[torch.Tensor | None], error: Exception) -> GradientError:
    for piece, gradient in zip(lane.layout.pieces, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            return GradientError(
                f"{unit_label(lane.unit)}: the gradient of {piece.name!r} is sparse",
                "Use sparse=False, or ignore=.",
            )
    return GradientError(f"{unit_label(lane.unit)}: its gradients could not be packed: {error}")
