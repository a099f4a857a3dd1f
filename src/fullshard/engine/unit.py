"""One unit while the model lives: its buffers, its policy, and what the running pass does with it.

The buffers are in one of three states:

    state       memory of `full`   entered by                    left by
    ---------   ----------------   ---------------------------   --------------------------------------
    AT_REST     none               release (or just made)        issue: every lane starts its gather
    GATHERING   allocated          issue                         ready: waits for the gathers
    FULL        allocated          ready                         release: frees it; issue: gathers anew

A unit that is computing, or held by fs.inference, is not released. `is_unsharded` (inside fs.full) is beside
these states: there the user's own parameters show unsharded values, and a gather copies from them.

What a pass does with the unit is one PassState. It is replaced when a backward ends, and when a pass fails or
was interrupted: recovering is dropping it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import nn

from fullshard.comm.groups import Comm
from fullshard.engine.graph_tasks import NO_TASK
from fullshard.engine.lane import Lane
from fullshard.engine.observer import Observer
from fullshard.engine.reading import Reading
from fullshard.engine.slots import Slots
from fullshard.plan.units import looks_up_only
from fullshard.policy import UnitPolicy


class State(Enum):
    AT_REST = "at rest"
    GATHERING = "gathering"
    FULL = "full"


def _is_result(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


@dataclass(slots=True)
class PassState:
    """What the running pass, from a unit's first forward to the end of its backward, does with the unit."""

    depth: int = 0  # forwards of it that are running
    shown: int | None = None  # which of its slots show compute parameters while they run
    frame: FrameType | None = None  # of the outermost of these forwards
    nodes: list[torch.autograd.graph.Node | None] = field(default_factory=list)  # their inputs' nodes
    entry_failed: bool = False
    claims: int = 0  # entries of the walk that were passed for it and not used yet
    awaited: set[nn.Module] = field(default_factory=set)  # blocks of a merged unit not called since it rested
    to_recompute: set[nn.Module] = field(default_factory=set)  # and those called, but not again in backward
    called: bool = False  # by a forward since the last backward before it: graphs of it may be left
    unhooked: bool = False  # a forward left nothing that marks the beginning of its backward: stays full
    read: bool = False  # other modules computed with its parameters: stays full until backward is over
    written: bool = False  # its full value was written, and that was not settled yet: stays full
    pending: int = 0  # calls whose input node has not come up in backward yet
    task: int = NO_TASK  # graph task in which its backward began


_PASSING = ("fullshard.engine.", "torch._dynamo.")  # frames of ours that return before the forward runs


def _calling_frame() -> FrameType | None:
    """The frame that calls the forward: torch's, or that of a caller of one of our stand-ins."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PASSING):
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Whether a frame of this thread has not returned."""
    at: FrameType | None = sys._getframe() if frame is not None else None
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None


class LiveUnit:
    """A unit's lanes, places and state. Gather and release touch one storage per lane, no parameter."""

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
        comm: Comm,
    ) -> None:
        self.index, self.name, self._comm = index, name, comm
        self.modules, self.lanes, self.slots = tuple(modules), list(lanes), slots
        self.sites = list(sites)  # every (module, attribute) that shows one of its parameters
        self.merged = merged  # its modules are neighbouring blocks
        self.policy = policy
        self.observer: Observer | None = None
        self.inner: list[LiveUnit] = []  # units inside this one's module
        self.inner_indices: frozenset[int] = frozenset()
        self.others: Sequence[LiveUnit] = ()  # of the root: all other units of the model
        self.storages = {lane.full.untyped_storage()._cdata for lane in lanes if not lane.permanent}
        self.releasable = bool(self.storages)
        self.full_bytes = sum(lane.full_bytes for lane in lanes)
        self.share_bytes = sum(lane.share_bytes for lane in lanes)
        self.training_bytes = sum(lane.training_bytes for lane in lanes)
        self.rereads = not looks_up_only(modules)  # backward needs its full value again
        self.cast = any(lane.dtypes.compute != lane.dtypes.rest for lane in lanes)
        self.results: dict[nn.Module, list[tuple[dict[str, Any], str]]] = {}  # attributes that hold results
        self.state = State.AT_REST
        self.is_unsharded = False  # inside fs.full
        self.writes = False  # a forward has written into its parameters
        self.held = False  # inside fs.inference: stays full until that is left
        self.pass_state = PassState()

    def hold(self, inner: list[LiveUnit]) -> None:
        self.inner, self.inner_indices = inner, frozenset(unit.index for unit in inner)

    def unsharded_shapes(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """The shape that each of its parameters has inside fs.full."""
        return {
            parameter: piece.shape
            for lane in self.lanes
            for parameter, piece in zip(lane.parameters, lane.layout.pieces, strict=True)
        }

    duplicate: Callable[[dict[int, Any]], dict[int, Any]]  # set by the runtime

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.duplicate(memo)[id(self)]

    # ---- buffers

    def cross_ahead(self, phase: str, again: bool) -> None:
        """On several nodes: start the part of every lane's next gather that goes between them."""
        tag = self._comm.tag(self.name, phase)
        for lane in self.lanes:
            lane.cross_ahead(tag, again)

    def forget_share(self) -> None:
        """What came from other nodes for gathers to come is not needed any more."""
        if self.share_bytes:
            for lane in self.lanes:
                lane.forget_share()

    def issue(self, phase: str, again: bool = False, keep: bool = False) -> None:
        """Start the gather of every lane. `again`: in backward, with the values of this pass's forward.

        `keep`: on several nodes, what came from the others stays until then.
        """
        if self.state is State.GATHERING:
            self.ready(phase)
        observer = self.observer
        if observer is not None:
            observer.begin("gather", self.name)
        tag = self._comm.tag(self.name, phase)
        for lane in self.lanes:
            lane.gather(tag, again, keep)
        self.state = State.GATHERING
        if observer is not None:
            observer.end("gather", self.name)

    def ready(self, phase: str, again: bool = False) -> None:
        """Full when this returns."""
        if self.state is State.FULL:
            return
        if self.state is State.AT_REST:
            self.issue(phase, again)
        for lane in self.lanes:
            lane.wait()
        self.state = State.FULL

    def release(self, even_if_read: bool = False) -> None:
        now = self.pass_state
        now.claims = 0
        if self.state is State.AT_REST or now.depth or now.written or self.held or not self.releasable:
            return
        if now.read and not even_if_read:
            return
        observer = self.observer
        if observer is not None:
            observer.begin("release", self.name)
        for lane in self.lanes:
            lane.wait()
            lane.release()
        self.state = State.AT_REST
        self.await_all()
        if observer is not None:
            observer.end("release", self.name)

    # ---- the running pass

    def await_all(self) -> None:
        """No block of a merged unit has been called yet. Until each was, a rank may still call one."""
        if self.merged:
            self.pass_state.awaited.update(self.modules)

    def block_called(self, module: nn.Module, recomputing: bool) -> None:
        """Of a merged unit: this block needs no more waiting for."""
        self.pass_state.awaited.discard(module)
        if recomputing:
            self.pass_state.to_recompute.discard(module)
        elif module in self.modules:
            self.pass_state.to_recompute.add(module)

    def enter(self, module: nn.Module | None = None) -> None:
        """A forward of `module` begins: it, or the entire unit, shows compute parameters."""
        now, part = self.pass_state, self.slots.part(module)
        if now.depth == 0:
            self.slots.show_full(part)
            now.shown = part
            now.frame = _calling_frame()
            if self.lanes and self.lanes[0].homes.transfers.held:
                self.lanes[0].homes.transfers.free_held()
        elif part != now.shown:  # one of its modules calls another
            assert now.shown is not None
            self.slots.show_sharded(now.shown)
            self.slots.show_full()
            now.shown = self.slots.part(None)
        now.depth += 1

    def leave(self) -> None:
        now = self.pass_state
        now.depth -= 1
        if now.depth == 0:
            assert now.shown is not None
            self.slots.show_sharded(now.shown)
            now.frame = None

    def wrote(self) -> bool:
        """Whether user code wrote into its compute parameters, and that was not settled yet."""
        return any(lane.writes.seen() for lane in self.lanes)

    def runs(self) -> bool:
        """Whether a forward of it is running, and was not interrupted."""
        return self.pass_state.depth > 0 and is_running(self.pass_state.frame)

    def end_backward(self) -> None:
        """Its backward is over. A forward may still run: user code may call backward inside it."""
        now = self.pass_state
        self.pass_state = PassState(
            now.depth, now.shown, now.frame, now.nodes, awaited=now.awaited, called=now.called
        )

    def drop_calls(self) -> None:
        """Forwards of it that seem to run were interrupted."""
        now = self.pass_state
        if now.depth:
            assert now.shown is not None
            self.slots.show_sharded(now.shown)
        now.depth, now.shown, now.frame = 0, None, None
        now.nodes.clear()

    def drop_pass(self) -> None:
        """The pass failed or was interrupted."""
        self.drop_calls()
        self.pass_state = PassState()
        self.await_all()

    # ---- what leaves the unit

    def hand_out(self, grad: bool, tensor: torch.Tensor) -> torch.Tensor:
        """What a caller gets of a tensor that leaves the unit.

        A view of a parameter would dangle after release: the caller gets a copy. A tensor that needs a
        gradient leaves through a node of its own, younger than all the unit made: autograd runs it first,
        so the unit is full before anything it left elsewhere (an auxiliary loss, say) is differentiated.
        """
        if type(tensor) is Reading:
            return tensor.full().clone()
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        if tensor.untyped_storage()._cdata in self.storages:
            return tensor.clone()
        if grad and tensor.grad_fn is not None:
            return tensor.view_as(tensor)
        return tensor

    def results_in_attributes(self, called: nn.Module) -> Iterator[torch.Tensor]:
        """Tensors that a forward leaves in attributes of its modules (`self.aux_loss`)."""
        places = self.results.get(called)
        if places is None:
            places = [(vars(m), name) for m in self._own_modules(called) for name in vars(m)]
            self.results[called] = places = [(p, name) for p, name in places if _is_result(p[name])]
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
        """It trains, and not one of its gradients has been computed."""
        for lane in self.lanes:
            for parameter in lane.compute_parameters:
                if parameter.grad is not None:
                    return False
        return self.trains()
