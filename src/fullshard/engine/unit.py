"""One unit while the model lives.

AT_REST --issue--> GATHERING --ready--> FULL --release--> AT_REST
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import nn

from fullshard.engine.lane import Lane, Slots
from fullshard.plan.units import looks_up_only
from fullshard.policy import UnitPolicy

NO_TASK = -1


class State(Enum):
    AT_REST = "at rest"
    GATHERING = "gathering"
    FULL = "full"


def running_calls(module: nn.Module) -> int:
    """How many calls of this module are on the stacks of this process."""
    return sum(_is_call(frame, module) for top in sys._current_frames().values() for frame in _stack(top))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_call(frame: FrameType, module: nn.Module) -> bool:
    """A call through torch's hooks, or of one of our stand-ins for a method."""
    if frame.f_code.co_name == "__call__" and frame.f_globals.get("__name__", "").startswith("fullshard."):
        return frame.f_locals.get("module") is module
    return frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module


def _is_result(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


class LiveUnit:
    """A unit's state, lanes and places. Gather and release touch one storage a lane, no parameter."""

    def __init__(
        self,
        index: int,
        name: str,
        modules: Sequence[nn.Module],
        lanes: Sequence[Lane],
        slots: Slots,
        sites: Sequence[tuple[nn.Module, str]],
        merged: bool,
        policy: UnitPolicy,
    ) -> None:
        self.index, self.name = index, name
        self.modules, self.lanes, self.slots = tuple(modules), list(lanes), slots
        self.sites = list(sites)  # every (module, attribute) that shows one of its parameters
        self.merged = merged  # its modules are neighbouring blocks
        self.policy = policy
        self.awaited: set[nn.Module] = set()  # of them, those not called since it was at rest
        self.to_recompute: set[nn.Module] = set()  # and those called, but not again in backward
        self.inner: list[LiveUnit] = []  # units inside this one's module
        self.inner_indices: frozenset[int] = frozenset()
        self.others: Sequence[LiveUnit] = ()  # of the root: all other units of the model
        self.storages = {lane.full.untyped_storage()._cdata for lane in lanes if not lane.permanent}
        self.releasable = bool(self.storages)
        self.full_bytes = sum(lane.full_bytes for lane in lanes)
        self.rereads = not looks_up_only(modules)  # backward needs its full value again
        self.cast = any(lane.dtypes.compute != lane.dtypes.rest for lane in lanes)
        self.state = State.AT_REST
        self.is_unsharded = False  # inside fs.full: its parameters hold whole values
        self.held = False  # inside fs.inference: stays full until that is left
        self.depth = 0  # forwards of it that are running
        self._shown = slots.part(None)  # which of its places show full parameters while they run
        self.claims = 0  # entries of the walk that were passed for it and not used yet
        self.calls: list[torch.autograd.graph.Node | None] = []  # input nodes of the running forwards
        self.entry_failed = False
        self.left: dict[nn.Module, list[tuple[dict[str, Any], str]]] = {}  # attributes that hold results
        self.unhooked = False  # a forward left nothing that tells when its backward begins: stays full
        self.called = False  # by a forward whose backward is not over
        self.pending = 0  # such calls whose input node has not come up yet
        self.task = NO_TASK  # graph task in which its backward began

    def hold(self, inner: list[LiveUnit]) -> None:
        self.inner, self.inner_indices = inner, frozenset(unit.index for unit in inner)

    duplicate: Callable[[dict[int, Any]], dict[int, Any]]  # set by the runtime

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.duplicate(memo)[id(self)]

    def issue(self) -> None:
        """Start the gather of every lane."""
        if self.state is State.GATHERING:
            self.ready()
        for lane in self.lanes:
            lane.gather()
        self.state = State.GATHERING

    def ready(self) -> None:
        """Full when this returns."""
        if self.state is State.FULL:
            return
        if self.state is State.AT_REST:
            self.issue()
        for lane in self.lanes:
            lane.wait()
        self.state = State.FULL

    def release(self) -> None:
        self.claims = 0
        if self.state is State.AT_REST or self.depth or self.held or not self.releasable:
            return
        if self.state is State.GATHERING:
            self.ready()
        for lane in self.lanes:
            lane.release()
        self.state = State.AT_REST
        self.await_all()

    def await_all(self) -> None:
        """No block of a merged unit has been called yet. Until each was, a rank may still call one."""
        if self.merged:
            self.awaited.update(self.modules)

    def meet(self, module: nn.Module, recomputing: bool) -> None:
        """A block of a merged unit is called."""
        self.awaited.discard(module)
        if recomputing:
            self.to_recompute.discard(module)
        elif module in self.modules:
            self.to_recompute.add(module)

    def enter(self, module: nn.Module | None = None) -> None:
        """A forward of `module` begins: it, or the whole unit, shows full parameters."""
        part = self.slots.part(module)
        if self.depth == 0:
            self.slots.show_full(part)
            self._shown = part
        elif part != self._shown:  # one of its modules calls another
            self.slots.show_sharded(self._shown)
            self.slots.show_full()
            self._shown = self.slots.part(None)
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.slots.show_sharded(self._shown)

    def runs(self) -> bool:
        """Whether a forward of it that seems to run does."""
        return self.depth > 0 and any(running_calls(m) for called in self.modules for m in called.modules())

    def abandon(self) -> None:
        """Forwards of it that seem to run were interrupted."""
        if self.depth:
            self.slots.show_sharded(self._shown)
            self.depth = 0
        self.calls.clear()

    def hand_out(self, grad: bool, tensor: torch.Tensor) -> torch.Tensor:
        """What a caller gets of a tensor that leaves the unit.

        A view of a parameter would dangle after release: the caller gets a copy. A tensor that needs a
        gradient leaves through a node of its own, younger than all the unit made: autograd runs it first,
        so the unit is full before anything it left elsewhere (an auxiliary loss, say) is differentiated.
        """
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        if tensor.untyped_storage()._cdata in self.storages:
            return tensor.clone()
        if grad and tensor.grad_fn is not None:
            return tensor.view_as(tensor)
        return tensor

    def results_in_attributes(self, called: nn.Module) -> Iterator[torch.Tensor]:
        """Tensors that a forward leaves in its modules' attributes (`self.aux_loss`), found at the first."""
        places = self.left.get(called)
        if places is None:
            places = [(vars(m), name) for m in self._own_modules(called) for name in vars(m)]
            self.left[called] = places = [(p, name) for p, name in places if _is_result(p[name])]
        for place, name in places:
            if _is_result(place.get(name)):
                yield place[name]

    def _own_modules(self, called: nn.Module) -> Iterator[nn.Module]:
        others = (*self.inner, *self.others)
        inner = {id(m) for unit in others for module in unit.modules for m in module.modules()}
        yield from (m for m in called.modules() if id(m) not in inner)

    def trains(self) -> bool:
        return any(c.requires_grad for lane in self.lanes for c in lane.compute_parameters)

    def gradients_to_come(self) -> bool:
        """It trains, and not one of its gradients has arrived."""
        for lane in self.lanes:
            for computing in lane.compute_parameters:
                if computing.grad is not None:
                    return False
        return self.trains()

    def forget(self) -> None:
        """Its backward is over, or given up."""
        self.called, self.pending, self.claims, self.task = False, 0, 0, NO_TASK
        self.unhooked = False
        self.to_recompute.clear()
