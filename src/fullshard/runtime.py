"""The states of a unit and the hooks that drive them.

    AT_REST --issue--> GATHERING --ready--> FULL --release--> AT_REST

A forward is a pass: a walk along the agreed order (see `order`). A unit's forward needs it full, asks
for the next unit's gather, computes, and lets go. In backward the same happens in reverse; when a
unit's gradients are complete it is released and reduced.

When is a unit's backward over? Autograd runs nodes of one device in falling order of creation, so
when the node that made a unit's *input* is about to run, everything the unit created has run. One hook
per unit, none per parameter. Where there is no such node (the first unit, checkpoint segments), the
end of the graph task is the signal.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fullshard.collectives import Comm
from fullshard.errors import StateError, Unsupported
from fullshard.options import Options
from fullshard.order import Walk, backward_order, complete_order, reduce_order
from fullshard.plan import Plan
from fullshard.reduction import Reduction
from fullshard.shards import Lane, Slots
from fullshard.tensors import cast_floats, first_node, map_tensors, tensors_in

_DONE = -1
_no_task = -1
_task: Callable[[], int] = torch._C._current_graph_task_id
_requires_grad = attrgetter("requires_grad")
_tensor_hooks = attrgetter("_backward_hooks")


class State(Enum):
    AT_REST = "at rest"
    GATHERING = "gathering"
    FULL = "full"


class LiveUnit:
    """One unit while the model lives."""

    def __init__(
        self,
        index: int,
        name: str,
        modules: Sequence[nn.Module],
        lanes: Sequence[Lane],
        slots: Slots,
        sites: Sequence[tuple[nn.Module, str]],
    ) -> None:
        self.index, self.name = index, name
        self.sites = list(sites)  # every (module, attribute) that shows one of its parameters
        self.modules, self.lanes, self.slots = tuple(modules), list(lanes), slots
        self.state = State.AT_REST
        self.depth = 0  # forwards of it that are running
        self.claims = 0  # entries of the walk that were passed for it and not used yet
        self.calls: list[torch.autograd.graph.Node | None] = []
        self.entry_failed = False
        self.called = False  # by a forward whose backward is not over
        self.pending = 0  # such calls whose input node has not come up yet
        self.task = _no_task  # graph task in which its backward began
        self.storages = {lane.full.untyped_storage()._cdata for lane in lanes if not lane.permanent}
        self.inner: list[LiveUnit] = []  # units inside this one's module
        self.whole = False  # inside fs.full: its parameters hold whole values
        self.cast = any(lane.dtypes.compute != lane.dtypes.rest for lane in lanes)

    duplicate: Callable[[dict[int, Any]], dict[int, Any]]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.duplicate(memo)[id(self)]

    @property
    def releasable(self) -> bool:
        return bool(self.storages)


class Turn:
    """What one autograd node means to us: units that end just before it, units that begin with it."""

    __slots__ = ("begins", "ends", "runtime")

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.ends: list[LiveUnit] = []
        self.begins: list[LiveUnit] = []

    def __call__(self, _: Any) -> None:
        self.runtime.turn(self)


class Runtime:
    """Drives all units of one model."""

    def __init__(self, units: Sequence[LiveUnit], comm: Comm, options: Options) -> None:
        self.units, self.comm, self.options = list(units), comm, options
        self.root = self.units[0]
        self.lanes = [lane for unit in units for lane in unit.lanes]
        self.parameters = [p for lane in self.lanes for p in lane.parameters]
        self._computing = [c for lane in self.lanes for c in lane.computing]
        self.reduction = Reduction([unit.lanes for unit in self.units], comm, options)
        self.order: list[int] | None = None
        self._seen: list[int] = []
        self._forward: Walk | None = None
        self._backward: Walk | None = None
        self._not_in_backward: set[int] = set()  # frozen units that no rank's backward needed
        self._began_backward: set[int] = set()
        self._tasks: list[int] = []
        self._fresh: set[int] = set()  # units gathered in this pass, or kept full and still valid
        self._ahead: int | None = None  # the unit asked for ahead of its need
        self._releasing = True  # this pass lets units go after their forward
        self._grad_pass = False
        self._versions: tuple[int, ...] | None = None
        self._trainable = list(map(_requires_grad, self.parameters))
        self.ignored: list[nn.Parameter] = []
        self.unfinished: Callable[[], None] | None = None  # a copy finds its modules at its first forward
        for unit in self.units:
            unit.duplicate = self._duplicate
        for lane in self.lanes:
            lane.duplicate = self._duplicate

    plan: Plan  # what it was built from
    copier: Callable[[Runtime, dict[int, Any]], Runtime]

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return self.copier(self, memo)

    def _duplicate(self, memo: dict[int, Any]) -> dict[int, Any]:
        copy.deepcopy(self, memo)
        return memo

    # ---- gather, release

    def _issue(self, unit: LiveUnit) -> None:
        if unit.state is State.GATHERING:
            self._ready(unit)
        for lane in unit.lanes:
            lane.gather()
        unit.state = State.GATHERING

    def _ready(self, unit: LiveUnit) -> None:
        if unit.state is State.AT_REST:
            self._issue(unit)
        if unit.state is State.GATHERING:
            for lane in unit.lanes:
                lane.wait()
            unit.state = State.FULL

    def release(self, unit: LiveUnit) -> None:
        if unit.state is State.GATHERING:
            self._ready(unit)
        if unit.releasable and unit.depth == 0:
            for lane in unit.lanes:
                lane.release()
            unit.state = State.AT_REST
        unit.claims = 0

    def _need(self, unit: LiveUnit) -> None:
        """Make a unit full, passing the agreed order up to it and asking for the next one."""
        walk = self._walk()
        if walk is None or unit.whole:
            if unit.depth == 0:
                self._issue(unit)  # outside any pass: every rank is taken to make the same call
        elif unit.state is State.AT_REST or (walk is self._forward and unit.index not in self._fresh):
            self._ahead = None
            if self.order is None:
                self._roll_call(unit.index)
            else:
                self._pass_up_to(unit, walk)
        elif unit.index == self._ahead:
            self._ahead = None
        self._ready(unit)
        if walk is not None and self.options.prefetch and self._ahead is None:
            self._ask_for_next(walk)

    def _walk(self) -> Walk | None:
        if _task() == _no_task:
            return self._forward
        if self._backward is None:
            self.begin_backward()
        return self._backward

    def _pass_up_to(self, unit: LiveUnit, walk: Walk) -> None:
        passed = walk.up_to(unit.index)
        if passed is None:
            self._issue(unit)  # a call more than the order knows: every rank is taken to make it
            return
        for index, repeated in passed:
            self._take_part(self.units[index], repeated)

    def _ask_for_next(self, walk: Walk) -> None:
        if walk.next() is not None:
            self._ahead, repeated = walk.take()
            self._take_part(self.units[self._ahead], repeated)

    def _take_part(self, unit: LiveUnit, repeated: bool) -> None:
        """One entry of the walk. Whether it gathers depends on the order alone, not on this rank's path."""
        unit.claims += 1
        releasing = self._releasing and self._backward is None
        if repeated or (unit.index in self._fresh and not releasing):
            return
        self._issue(unit)
        self._fresh.add(unit.index)

    @property
    def _keeps(self) -> bool:
        """Full values stay for the next micro-batch."""
        return self.reduction.postponing and not self.options.releases_after_forward

    # ---- forward passes

    def begin_pass(self) -> None:
        if self._backward is not None:
            self._recover()
        self._follow_user()
        if not self._still_valid():
            self._fresh.clear()
        self._forward = Walk(self.order or ())
        self._ahead = None
        self._grad_pass = torch.is_grad_enabled()
        self._releasing = self.options.releases_after_forward or not self._grad_pass
        for unit in self.units:
            unit.pending = 0  # a forward that never saw its backward does not hold this one up
        self.comm.phase = "forward"

    def _still_valid(self) -> bool:
        """Kept full values outlive their pass only from one micro-batch inside fs.accumulate to the next.

        Version counters alone are not enough to trust across passes: `p.data.copy_()` does not move
        them, and a fused optimizer does not move those of a rank's empty shards.
        """
        before = self._versions
        self._versions = tuple(p._version for p in self.parameters) if self._keeps else None
        if before is None:
            return False
        return before == (self._versions or tuple(p._version for p in self.parameters))

    def _follow_user(self) -> None:
        """Freezing, unfreezing and tensor hooks set on parameters since the last pass take effect."""
        trainable = list(map(_requires_grad, self.parameters))
        if trainable != self._trainable:
            self._trainable = trainable
            self._not_in_backward.clear()
            for computing, flag in zip(self._computing, trainable, strict=True):
                computing.requires_grad_(flag)
        for index, hooks in enumerate(map(_tensor_hooks, self.parameters)):
            if hooks is not None and self._computing[index]._backward_hooks is not hooks:
                self._computing[index]._backward_hooks = hooks

    def _end_pass(self, keep: bool) -> None:
        walk, self._forward = self._forward, None
        self._ahead = None
        if self.order is None:
            self._roll_call(_DONE)
            self.order = complete_order(self._seen, len(self.units))
        elif walk is not None:
            for index, repeated in walk.remaining():
                self._take_part(self.units[index], repeated)
                if self._releasing:
                    self.release(self.units[index])
        for unit in self.units[1:]:
            if self._releasing or not keep:
                self.release(unit)
            unit.claims = 0
        if not keep:
            self.release(self.root)

    def _roll_call(self, wish: int) -> None:
        """First pass: every rank says what it needs, all gather it. Right whatever path a rank takes."""
        while True:
            wishes = self.comm.tell(wish)
            for index in dict.fromkeys(w for w in wishes if w != _DONE):
                self._seen.append(index)
                unit = self.units[index]
                self._issue(unit)
                self._ready(unit)
                self._fresh.add(index)
                if index != wish and unit is not self.root and self._releasing:
                    self.release(unit)
            if wish != _DONE or all(w == _DONE for w in wishes):
                return

    def before_forward(self, unit: LiveUnit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        unit.entry_failed = True
        if self.unfinished is not None:
            self.unfinished()
        if unit is self.root and self._forward is None and _task() == _no_task:
            self.begin_pass()
        if not (unit.depth and unit.state is State.FULL):
            self._need(unit)
        unit.claims = max(0, unit.claims - 1)
        dtype = self.options.precision.compute
        if dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        node = first_node(args, kwargs) if torch.is_grad_enabled() else None
        if unit.depth == 0:
            unit.slots.show_full()
        unit.depth += 1
        unit.calls.append(node)
        unit.entry_failed = False
        return args, kwargs

    def after_forward(self, unit: LiveUnit, output: Any) -> Any:
        if unit.entry_failed or not unit.calls:
            unit.entry_failed = False
            return output
        node = unit.calls.pop()
        unit.depth -= 1
        if unit.depth == 0:
            unit.slots.show_resting()
        output = self._detach_from_full(unit, output)
        hooked = torch.is_grad_enabled() and self._hook(unit, output, node)
        if unit is self.root and self.options.precision.outputs is not None:
            output = cast_floats(output, self.options.precision.outputs)
        if _task() == _no_task:
            unit.called = unit.called or hooked or (self._forward is not None and self._grad_pass)
            self._leave(unit, hooked)
        return output

    def _leave(self, unit: LiveUnit, hooked: bool) -> None:
        if unit is self.root:
            if unit.depth == 0:
                self._end_pass(keep=hooked)
            return
        if unit.depth or unit.claims:
            return
        walk = self._forward
        releasing = self._releasing if walk is not None else self.options.releases_after_forward or not hooked
        if not releasing or (walk is not None and walk.next() == unit.index):
            return  # kept for backward, or called again at once
        self.release(unit)
        for inner in unit.inner:
            self.release(inner)  # skipped on this rank: nobody can call it any more

    def _detach_from_full(self, unit: LiveUnit, output: Any) -> Any:
        """An output that is a view of a parameter would dangle after release: give the caller a copy."""

        def own_memory(tensor: torch.Tensor) -> torch.Tensor:
            plain = type(tensor) in (torch.Tensor, nn.Parameter)
            if plain and tensor.untyped_storage()._cdata in unit.storages:
                return tensor.clone()
            return tensor

        if type(output) is torch.Tensor:
            return own_memory(output)
        return map_tensors(output, own_memory)

    def _hook(self, unit: LiveUnit, output: Any, node: torch.autograd.graph.Node | None) -> bool:
        hooked = False
        for tensor in (output,) if type(output) is torch.Tensor else tensors_in(output):
            if tensor.requires_grad:
                made_by = _surviving_node(tensor)
                if made_by is not None:
                    turn = self._turn_of(made_by)
                    if unit not in turn.begins:
                        turn.begins.append(unit)
                    hooked = True
        if hooked and _task() == _no_task:
            unit.pending += 1
            if node is not None:
                self._turn_of(node).ends.append(unit)
        return hooked

    def _turn_of(self, node: torch.autograd.graph.Node) -> Turn:
        turns: dict[Any, Turn] = node.metadata  # type: ignore[assignment]
        turn = turns.get(self)
        if turn is None:
            turn = turns[self] = Turn(self)
            node.register_prehook(turn)
        return turn

    @contextmanager
    def shown(self, unit: LiveUnit) -> Iterator[None]:
        """Full parameters in the modules' places while a recomputation runs."""
        if unit.depth == 0:
            self._need(unit)
            unit.slots.show_full()
        unit.depth += 1
        try:
            yield
        finally:
            unit.depth -= 1
            if unit.depth == 0:
                unit.slots.show_resting()

    @contextmanager
    def opened(self, units: Sequence[LiveUnit], writeback: bool) -> Iterator[None]:
        """Parameters of these units hold whole values: fs.full."""
        if _task() != _no_task or self._forward is not None:
            raise StateError("fs.full inside a forward or backward", "Open it between steps.")
        self.comm.phase = "full"
        fresh = [unit for unit in units if not unit.whole]
        for unit in fresh:
            for lane in unit.lanes:
                lane.open_whole()
            unit.whole = True
        try:
            yield
        finally:
            self.comm.phase = "full"
            for unit in fresh:
                unit.whole = False
                for lane in unit.lanes:
                    if writeback:
                        self._first_ranks_edits(lane)
                    lane.close_whole(writeback)
                self.release(unit)

    def _first_ranks_edits(self, lane: Lane) -> None:
        """Ranks that edited alike keep their own; where they differ the first rank's values are kept."""
        whole = lane.rest if lane.whole_at_rest else lane.whole
        if whole is None or self.comm.all_ranks == 1:
            return
        if len(set(self.comm.tell(_checksum(whole)))) > 1:
            warnings.warn(
                f"ranks left fs.full with different values in unit {lane.unit!r}; the first rank's are kept",
                stacklevel=4,
            )
            self.comm.from_first(whole)

    # ---- backward

    def turn(self, turn: Turn) -> None:
        if turn.begins and torch.is_grad_enabled():
            self._refuse_double_backward(turn.begins[0])
        with torch.no_grad():
            ended = [unit for unit in turn.ends if self._ended(unit)]
            for unit in turn.begins:
                self._begin(unit)
            for unit in ended:
                self.reduction.done(unit.index, self._called)

    def _called(self, index: int) -> bool:
        return self.units[index].called

    def _ended(self, unit: LiveUnit) -> bool:
        unit.pending = max(0, unit.pending - 1)
        if unit.pending or self._backward is None:
            return False
        computing = [c for lane in unit.lanes for c in lane.computing if c.requires_grad]
        if computing and all(c.grad is None for c in computing):
            return False  # used once more in this graph: the rest is still to come
        if unit is not self.root and not self._keeps:
            self.release(unit)
        return True

    def _begin(self, unit: LiveUnit) -> None:
        if unit.whole:
            raise StateError("backward inside fs.full", "Leave `with fs.full(model):` before training.")
        if self._backward is None:
            self.begin_backward()
        task = _task()
        if task not in self._tasks:
            # A checkpoint segment of torch's reentrant kind runs a graph task of its own.
            self._tasks.append(task)
            _at_end_of_task(lambda: self._end_segment(task))
        unit.task = task
        self._began_backward.add(unit.index)
        self._need(unit)

    def begin_backward(self) -> None:
        if self.order is None:
            self.order = complete_order(self._seen, len(self.units))
        self.comm.phase = "backward"
        kept = {u.index for u in self.units if u.state is State.FULL}
        self._fresh = {0} if self.options.releases_after_forward else kept
        self._backward = Walk(backward_order(self.order, self._not_in_backward))
        self._ahead = None
        self._tasks = [_task()]
        self.reduction.begin(reduce_order(self.order))
        _at_end_of_task(self.end_backward)
        if self.root.state is not State.FULL:
            self._ready(self.root)  # an evaluation between forward and backward let it go

    def _refuse_double_backward(self, unit: LiveUnit) -> None:
        if unit.releasable:
            raise Unsupported(
                f"unit {unit.name!r}: backward(create_graph=True) keeps references into released values",
                "Use strategy='replicate' with precision='fp32', which never releases.",
            )

    def _end_segment(self, task: int) -> None:
        with torch.no_grad():
            for unit in reversed(self.units):
                if unit.task == task and unit is not self.root:
                    unit.pending = 0
                    if self._ended(unit):
                        self.reduction.done(unit.index, self._called)

    def end_backward(self) -> None:
        with torch.no_grad():
            if self._backward is None:
                return
            self.reduction.flush()
            for index, repeated in self._backward.remaining():
                self._take_part(self.units[index], repeated)
                if not self._keeps:
                    self.release(self.units[index])
            for unit in self.units:
                if not self._keeps:
                    self.release(unit)
                unit.called, unit.pending, unit.claims, unit.task = False, 0, 0, _no_task
            self._backward = None
            self._learn_backward()
            self.reduction.finish()
            if not self.reduction.postponing:
                self.comm.step += 1

    def _learn_backward(self) -> None:
        """Frozen units that no rank needed in the first backward are left out of the next ones."""
        frozen = [u.index for u in self.units if not any(any(lane.trainable) for lane in u.lanes)]
        if self._not_in_backward or not frozen or self.options.whole_at_rest:
            return
        needed = self.comm.tell_many([int(i in self._began_backward) for i in frozen]).amax(0).tolist()
        self._not_in_backward = {i for i, need in zip(frozen, needed, strict=True) if not need} or {_DONE}

    def _recover(self) -> None:
        """A backward that raised left its marks: forget it."""
        self._backward = None
        for unit in self.units:
            unit.called, unit.pending, unit.task, unit.depth = False, 0, _no_task, 0
            unit.calls.clear()
            self.release(unit)
        self._fresh.clear()
        self.reduction.drop()


def _checksum(values: torch.Tensor) -> int:
    raw = values.detach().cpu()
    raw = torch.view_as_real(raw).view(-1) if raw.is_complex() else raw
    return zlib.crc32(raw.view(torch.uint8).numpy().data)


def _surviving_node(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """The node whose hook fires whatever a caller writes into `tensor`.

    Writing into a view replaces the view's own node, and a hook on it goes silently. The base's node
    stays in the graph, below the write.
    """
    if tensor._is_view() and tensor._base is not None and tensor._base.grad_fn is not None:
        return tensor._base.grad_fn
    return tensor.grad_fn


def _at_end_of_task(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
