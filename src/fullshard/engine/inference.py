"""Units that stay full while a model is only evaluated (`fs.inference`).

A unit that stays full is gathered once, when the context is entered. For the others there is no agreed order
here: ranks exchange which unit each needs, and all ranks gather these, as in the first pass of a
training run. That costs one small agreement per gather and the prefetch, and every rank keeps its own path
and its own number of passes; a rank that has finished takes part until all have. Walking along the learned
order instead, as training does, was rejected: a decoder would gather its encoder with every token, and a
rank with fewer passes would need to know of those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from fullshard.comm.groups import Comm, as_bytes
from fullshard.engine.lane import Lane
from fullshard.engine.unit import LiveUnit, State
from fullshard.errors import StateError, unit_label

_DONE = -1
_PHASE = "inference"
_REMEDY = "Leave `with fs.inference(model):` before parameters change, and enter it again."


@dataclass(frozen=True)
class Kept:
    """What stays full inside fs.inference: how many units of how many, and the bytes of their full values."""

    units: int
    of_units: int
    num_bytes: int

    @property
    def everything(self) -> bool:
        """Whether forwards need no other rank at all."""
        return self.units == self.of_units


def chosen(sizes: Sequence[int], among: Set[int], free: Set[int], budget_bytes: int) -> set[int]:
    """Which units stay full: those of `free`, which cost nothing, and what fits of `among`.

    The root first, because every pass calls it; then the last units first, because in an encoder-decoder
    these are called with every token and the encoder's once. If not all fit, room is left for the largest
    of those that come and go.
    """
    kept = set(free)
    others = [unit for unit in (0, *reversed(range(1, len(sizes)))) if unit in among - free]
    if sum(sizes[unit] for unit in others) <= budget_bytes:
        return kept | set(others)
    left = budget_bytes - max(sizes[unit] for unit in others)
    for unit in others:
        if sizes[unit] <= left:
            kept.add(unit)
            left -= sizes[unit]
    return kept


class InferenceSession:
    """One use of fs.inference, from entering it to leaving it."""

    def __init__(self, units: Sequence[LiveUnit], comm: Comm, kept: set[int]) -> None:
        self._units, self._comm = list(units), comm
        self._lanes = [lane for unit in units for lane in unit.lanes]
        self._were_full = {unit.index for unit in units if unit.state is not State.AT_REST}
        held = [unit for unit in units if unit.index in kept]
        self.kept = Kept(len(held), len(self._units), sum(unit.full_bytes for unit in held))
        held = [unit for unit in held if unit.cast or not unit.is_unsharded]  # fs.full shows these already
        self._versions = self._now()
        self._marks = list(_marks(self._lanes))
        self._marked = self._read_marks()
        self._differed = torch.zeros((), dtype=torch.bool, device=comm.device)  # marks did, in some pass
        self._reports_at_once = comm.device.type == "cpu"  # elsewhere, reading it would make the device wait
        for unit in self._units:
            unit.await_all()
        try:
            self._gather(held)
        except BaseException:
            self.let_go()
            raise

    def _gather(self, held: list[LiveUnit]) -> None:
        """Also those that a training forward left full: parameters may have been edited since."""
        for at, unit in enumerate(held):
            if at == 0:
                unit.issue(_PHASE)
            if at + 1 < len(held):
                held[at + 1].issue(_PHASE)  # one ahead: a gather in flight may need memory beyond its result
            unit.ready(_PHASE)
            unit.held = True

    # ---- one forward of a unit

    def need(self, unit: LiveUnit) -> None:
        """Full when this returns."""
        if torch.is_grad_enabled():
            raise StateError(
                f"{unit_label(unit.name)}: a forward that records gradients inside fs.inference",
                "Leave `with fs.inference(model):` before training; inside it gradients are off.",
            )
        if unit.pass_state.depth == 0 and (unit.index == 0 or self._units[0].pass_state.depth == 0):
            self._refuse_changes(unit)
        if unit.state is not State.FULL:
            self._gather_what_any_rank_needs(unit.index)

    def leave(self, unit: LiveUnit) -> None:
        if unit.pass_state.depth:
            return
        if unit.index == 0:
            for other in self._units:
                other.release(even_if_read=True)
        elif not unit.pass_state.awaited:
            unit.release()

    def _gather_what_any_rank_needs(self, needed: int) -> None:
        while True:
            by_rank = self._comm.all_gather_int(needed, _PHASE)
            for index in sorted(set(by_rank) - {_DONE}):
                unit = self._units[index]
                was_full = unit.state is State.FULL
                unit.issue(_PHASE)  # where it is full already, the same values arrive once more
                unit.ready(_PHASE)
                if index != needed and not was_full:
                    unit.release()
            if needed != _DONE or set(by_rank) == {_DONE}:
                return

    # ---- the end

    def close(self, failed: bool) -> None:
        """Let go what was not full before; first, take part in what other ranks still need.

        Also after an error in user code: it may be caught, and then this rank is where the others are.
        """
        try:
            if not self.kept.everything:
                self._gather_what_any_rank_needs(_DONE)
            if not failed:
                self._refuse_difference()
                self._refuse_hidden_changes()
        finally:
            self.let_go()

    def let_go(self) -> None:
        for unit in self._units:
            unit.drop_calls()  # interrupted, if any of its forwards seems to run
            unit.held = False
            if unit.index not in self._were_full:
                unit.release(even_if_read=True)

    # ---- parameters that change inside

    def _refuse_changes(self, unit: LiveUnit) -> None:
        """Counters do not see `p.data.copy_()`, so one element of every parameter is looked at as well.

        Once per pass of the root, and not read back on a GPU: a difference is reported when leaving.
        """
        if self._now() != self._versions or any(lane.assigned for lane in self._lanes):
            raise StateError("parameters changed inside fs.inference, where full values are kept", _REMEDY)
        if unit.index == 0:
            for now, before in zip(self._read_marks(), self._marked, strict=True):
                self._differed |= torch.ne(now, before).any()
            if self._reports_at_once:
                self._refuse_difference()

    def _refuse_difference(self) -> None:
        if bool(self._differed):
            self._differed.zero_()
            raise StateError("parameters changed through p.data inside fs.inference", _REMEDY)

    def _now(self) -> list[int]:
        return [p._version for lane in self._lanes for p in lane.parameters]

    def _read_marks(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [as_bytes(torch.cat(marks)) for marks in self._marks]

    def _refuse_hidden_changes(self) -> None:
        """At the end all elements are compared. A change that counters saw came after the last forward."""
        if self._now() == self._versions:
            for unit in self._units:
                if unit.held and not unit.is_unsharded and not all(map(_is_current, unit.lanes)):
                    raise StateError(
                        f"{unit_label(unit.name)}: parameters changed through p.data inside fs.inference; "
                        "what was computed after that came from the values before",
                        _REMEDY,
                    )


def _is_current(lane: Lane) -> bool:
    """Whether the full value is what a gather would bring. What came in 8-bit blocks cannot be compared."""
    if lane.permanent or (not lane.dtypes.exact_gather and lane.comm.ranks > 1 and not lane.replicated):
        return True
    own = lane.full if lane.replicated else lane.own
    return torch.equal(as_bytes(own), as_bytes(lane.home.stage(lane.rest).to(own.dtype)))


def _marks(lanes: Sequence[Lane]) -> Iterator[list[torch.Tensor]]:
    """By dtype, one element of each parameter that this rank has a part of."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for lane in lanes:
        if not lane.permanent:  # otherwise the full value and the shard are the same memory
            for view in lane.shard_views:
                if view.numel():
                    middle = view.numel() // 2 + view.storage_offset()
                    found.setdefault(lane.rest.dtype, []).append(lane.rest.data[middle : middle + 1])
    yield from found.values()
