"""The hooks that drive a sharded model through forward and backward.

When is a unit's backward over? Autograd runs nodes of one device in falling order of creation, so
when the node that made a unit's *input* is about to run, everything the unit created has run. One hook
per unit, none per parameter. Where there is no such node (the first unit, checkpoint segments), the
end of the graph task is the signal.
"""

from __future__ import annotations

import copy
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, Protocol

import torch
from torch import nn

from fullshard.comm.groups import Comm, as_bytes
from fullshard.comm.step_report import modes_of
from fullshard.engine import transforms
from fullshard.engine.gather import Gathering
from fullshard.engine.gradients import Step
from fullshard.engine.graph_tasks import NO_TASK, current_task
from fullshard.engine.lane import Lane
from fullshard.engine.observer import Observer
from fullshard.engine.reading import Reading
from fullshard.engine.reduce import Reduction
from fullshard.engine.reduce_buffers import Penalised
from fullshard.engine.tensors import cast_floats, first_node, map_tensors, nodes_of, tensors_in
from fullshard.engine.unit import LiveUnit, State
from fullshard.environment import return_memory_to_system
from fullshard.errors import AtRestError, NotSupported, Stalled, StateError, unit_label
from fullshard.options import Options
from fullshard.plan.plan import Plan
from fullshard.policy import UnitPolicy

_requires_grad = attrgetter("requires_grad")
_tensor_hooks = attrgetter("_backward_hooks")
_TRIM_EVERY = 10  # passes
_SETTLED = 3
_version = attrgetter("_version")

DEFERRED = "_fullshard_deferred"
_WRITE_BETWEEN_STEPS = (
    "Write parameters between steps: an update element by element works on the shards as it is, any other "
    "inside `with fs.full(model):`. Keep statistics in buffers."
)


class Turn:
    """What one autograd node means to us: units that end just before it, units that begin with it."""

    __slots__ = ("begins", "ends", "runtime", "values")

    def __init__(self, runtime: Runtime, values: tuple[int, int]) -> None:
        self.runtime = runtime
        self.values = values  # which values of the parameters its forward saw
        self.ends: list[LiveUnit] = []
        self.begins: list[LiveUnit] = []

    def __call__(self, _: Any) -> None:
        self.runtime.turn(self)


class Runtime:
    """Drives all units of one model."""

    plan: Plan  # what it was built from
    copier: Callable[[Runtime, dict[int, Any]], Runtime]
    guard: Callable[[Runtime], None]  # watches parameters that train for use at rest
    adopt_optimizer: Callable[[torch.optim.Optimizer], None]  # called with each optimizer at its steps

    def __init__(self, units: Sequence[LiveUnit], comm: Comm, options: Options) -> None:
        self.units, self.root = list(units), units[0]
        self.root.others = self.units[1:]
        self.comm, self.options = comm, options
        self.lanes = [lane for unit in units for lane in unit.lanes]
        self.parameters = [p for lane in self.lanes for p in lane.parameters]
        self._stepping = {lane.homes.transfers for lane in self.lanes if lane.streams_steps}
        self.ignored: list[nn.Parameter] = []
        self.gathering = Gathering(self.units, comm, options)
        self.reduction = Reduction(self.units, comm, options)
        self.reduction.before_send = self.gathering.pass_backward_to
        self.gathering.settle_writes = self._settle_writes
        self.unfinished: Callable[[], None] | None = None  # what is left to do or check at the first forward
        # Set while scripts still initialise a new model's values; called before units are opened.
        self.initialising: Callable[[], None] | None = None
        self._units_by_module = {module: unit for unit in units for module in unit.modules}
        self._modes = 0  # of the last forward with gradients: which units were in training mode
        self._compute_parameters = [c for lane in self.lanes for c in lane.compute_parameters]
        self._trainable = list(map(_requires_grad, self.parameters))
        self._versions: list[int] | None = None
        self._tasks: list[int] = []
        self._penalised_task = NO_TASK  # the backward that has brought a penalty
        self._passes = 0
        self._backward_since_call = False  # of a unit, by a forward with gradients
        self._outermost = self.root  # the unit whose forward is, or was, around all that run
        self._written: list[LiveUnit] = []  # in the running pass, not settled yet
        self._read: set[LiveUnit] = set()  # in the running pass, by other modules
        self._readable: dict[int, tuple[LiveUnit, nn.Parameter, nn.Parameter]] = {}  # by id of the parameter
        self._readings: dict[int, Reading] = {}
        self.steps = 0  # optimizer steps taken on these parameters
        self._values = self._values_in_backward = (0, 0)
        self._anchor: torch.Tensor | None = None
        self._observer: Observer | None = None
        for unit in self.units:
            unit.duplicate = self._duplicate
        for lane in self.lanes:
            lane.duplicate = self._duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return self.copier(self, memo)

    def _duplicate(self, memo: dict[int, Any]) -> dict[int, Any]:
        copy.deepcopy(self, memo)
        return memo

    # ---- forward

    def before_forward(self, unit: LiveUnit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if transforms.running() is not None:
            return self._before_transformed(unit, module, args, kwargs)
        unit.pass_state.entry_failed = True
        if self.unfinished is not None:
            self.unfinished()
        if unit is self.root:
            self.gathering.forget_interrupted()
        if current_task() != NO_TASK:
            self._begin_backward()  # a recomputation may come before any of our nodes
        elif unit is self.root and self.gathering.forward is None and self.gathering.inference is None:
            self._begin_pass()
        elif self.gathering.forward is None and unit.pass_state.depth == 0:
            self._follow_user()  # a part of the model is called by itself: no pass will notice it
        if self._outermost.pass_state.depth == 0:
            self._outermost = unit
        try:
            return self._enter(unit, module, args, kwargs)
        except Exception:
            if unit is self.root and unit.pass_state.depth == 0:
                self.gathering.abandon_pass()
            raise
        except BaseException:  # KeyboardInterrupt: at once, not after what is in flight
            if unit is self.root and unit.pass_state.depth == 0:
                self.gathering.interrupted = True
            raise

    def _enter(self, unit: LiveUnit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.gathering.need(unit)
        if unit.merged:
            unit.block_called(module, current_task() != NO_TASK)
        now = unit.pass_state
        now.claims = max(0, now.claims - 1)
        args, kwargs = self._cast_inputs(unit, args, kwargs)
        node = first_node(args, kwargs) if torch.is_grad_enabled() else None
        unit.enter(module)
        now.nodes.append(node)
        now.entry_failed = False
        if self._observer is not None:
            self._observer.begin(_forward_kind(), unit.name)
        return args, kwargs

    def _cast_inputs(self, unit: LiveUnit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        casts = unit.policy.casts
        dtype = self.options.precision.compute if casts is None else casts[0]
        if dtype is None:
            return args, kwargs
        return cast_floats(args, dtype), cast_floats(kwargs, dtype) if kwargs else kwargs

    def after_forward(self, unit: LiveUnit, module: nn.Module, output: Any) -> Any:
        if transforms.running() is not None:
            return self._after_transformed(unit, module, output)
        now = unit.pass_state
        if now.entry_failed or not now.nodes:
            now.entry_failed = False
            return output
        node = now.nodes.pop()
        unit.leave()
        if now.depth == 0 and unit.wrote():
            self._note_written(unit)
        if self._observer is not None:
            self._observer.end(_forward_kind(), unit.name)
        grad = torch.is_grad_enabled()
        if type(output) is torch.Tensor:
            output = unit.hand_out(grad, output)
        else:
            output = map_tensors(output, partial(unit.hand_out, grad))
        hooked = grad and self._hook(unit, module, output, node)
        now.unhooked |= grad and not hooked and unit.trains()
        output = self._cast_outputs(unit, module, output)
        if current_task() == NO_TASK:
            gathering = self.gathering
            if gathering.inference is not None:
                gathering.inference.leave(unit)
                return output
            if hooked or (gathering.forward is not None and gathering.forward.grads):
                self._note_called(unit)
            if gathering.forward is None and now.depth == 0:
                self._settle_writes()  # a part of the model was called by itself
            if unit is not self.root:
                gathering.leave(unit, hooked)
            elif now.depth == 0:
                gathering.end_pass(keep=hooked or now.unhooked)
                self.comm.check_agreement()
        return output

    def _cast_outputs(self, unit: LiveUnit, module: nn.Module, output: Any) -> Any:
        casts = unit.policy.casts
        dtype = casts[1] if casts else self.options.precision.outputs if unit is self.root else None
        if dtype is not None and (casts is None or module in unit.modules):
            return cast_floats(output, dtype)
        return output

    # ---- the same inside a transform of torch.func, whose tensors only it can compute with

    def _before_transformed(
        self, unit: LiveUnit, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        transforms.refuse_reverse(unit.name)
        plain = [p for tensor in tensors_in((args, kwargs)) for p in transforms.plain_tensors(tensor)]
        with transforms.left():
            self.before_forward(unit, module, (plain,), {})
        return self._cast_inputs(unit, args, kwargs)

    def _after_transformed(self, unit: LiveUnit, module: nn.Module, output: Any) -> Any:
        output = map_tensors(output, torch.clone)  # no view of a parameter, and a node of its own
        plain = [p for tensor in tensors_in(output) for p in transforms.plain_tensors(tensor)]
        with transforms.left():
            self.after_forward(unit, module, plain)
        return self._cast_outputs(unit, module, output)

    # ---- for integrations

    @property
    def model(self) -> nn.Module:
        """The module that was sharded."""
        return self.root.modules[0]

    @property
    def in_pass(self) -> bool:
        """Whether a forward or backward of the model runs."""
        return self.gathering.forward is not None or current_task() != NO_TASK

    @property
    def is_idle(self) -> bool:
        """Whether no forward, backward, fs.full or fs.inference runs."""
        is_open = self.gathering.inference is not None or any(u.is_unsharded for u in self.units)
        return not self.in_pass and not is_open

    def unit_of(self, module: nn.Module) -> LiveUnit | None:
        """The unit that is gathered for the forward of this module."""
        return self._units_by_module.get(module)

    def units_of(self, module: nn.Module) -> list[LiveUnit]:
        """The units that hold parameters of this module."""
        return self.units_holding(p for _, p in nn.Module.named_parameters(module))

    def units_holding(self, parameters: Iterable[nn.Parameter]) -> list[LiveUnit]:
        """The units that hold any of these parameters. One that is tied may belong to an outer unit."""
        held = {id(p) for p in parameters}
        return [u for u in self.units if any(id(p) in held for lane in u.lanes for p in lane.parameters)]

    def settle_step(self) -> None:
        """Wait for a step that goes on beside what follows it: values at rest are about to be read."""
        for transfers in self._stepping:
            transfers.settle()

    def places(self) -> Iterator[tuple[nn.Parameter, Lane, int]]:
        """Every sharded parameter with its lane and its index there, in one order on all ranks."""
        self.settle_step()
        return ((p, lane, index) for lane in self.lanes for index, p in enumerate(lane.parameters))

    @property
    def observer(self) -> Observer | None:
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = self.reduction.observer = observer
        self.comm.observe(observer)
        for unit in self.units:
            unit.observer = observer

    def set_policy(self, unit: LiveUnit, policy: UnitPolicy) -> None:
        """Replace a unit's policy between steps; the same on all ranks."""
        unit.policy = policy
        self.gathering.policy_changed()

    def postpone_reduction(self, flag: bool) -> None:
        """Whether gradients of the backwards to come wait for a later one, where the strategy allows it."""
        self.reduction.postponing = flag

    def abandon(self) -> None:
        """Forget an interrupted or failed pass, with its gathers and reduces in flight."""
        self.gathering.abandon_pass()
        self.reduction.drop()
        self.gathering.recover()

    def forget_failed_backward(self) -> None:
        failed = self.gathering.backward is not None or self.reduction.in_flight
        if failed and current_task() == NO_TASK:
            self.reduction.drop()
            self.gathering.recover()  # the last: if something raises here, the next call begins again

    def _begin_pass(self) -> None:
        self.forget_failed_backward()
        self.refuse_unseen_backward()
        self.comm.report.check()
        self._follow_user()
        Step.running = 0  # one that failed has left it
        self._penalised_task = NO_TASK
        self.reduction.penalties.clear()
        self._passes += 1
        if torch.is_grad_enabled():
            self._modes = modes_of(self._units_by_module)
        if self._passes == _SETTLED and self.comm.device.type == "cuda":
            torch.cuda.empty_cache()  # what only the first steps needed: they learn the order, make states
        if self._passes % _TRIM_EVERY == 0 and self.comm.device.type == "cpu":
            return_memory_to_system()
        self._values = self._current_values()
        self.gathering.begin_pass(self._still_valid())

    def refuse_unseen_backward(self) -> None:
        """A backward that came to a unit's parameters past all its nodes was never reduced: say so."""
        if self.gathering.backward is not None or all(c.grad is None for c in self._compute_parameters):
            return
        unit = next(
            u for u in self.units if any(c.grad is not None for x in u.lanes for c in x.compute_parameters)
        )
        for parameter in self._compute_parameters:
            parameter.grad = None
        raise StateError(
            f"{unit_label(unit.name)}: a backward reached its parameters through a tensor that did not leave "
            "it as its output, and these gradients were not reduced",
            "Return the tensor from the block's forward, or keep it in an attribute of one of its modules.",
        )

    def _still_valid(self) -> bool:
        """Full values, or what came from other nodes, outlive their pass only from one micro-batch inside
        fs.accumulate to the next.

        Version counters alone are not enough to trust across passes: `p.data.copy_()` does not move
        them, and a fused optimizer may not; so optimizer steps are counted as well.
        """
        before = self._versions
        postponing = self.reduction.postponing
        self.gathering.keeping = postponing and not self.options.releases_after_forward
        self.gathering.keeping_shares = postponing and self.comm.two_level
        keeping = self.gathering.keeping or self.gathering.keeping_shares
        now = [self.steps, *map(_version, self.parameters)] if keeping or before is not None else None
        self._versions = now if keeping else None
        return before is not None and before == now and not any(lane.assigned for lane in self.lanes)

    def _follow_user(self) -> None:
        """Freezing, unfreezing and tensor hooks set on parameters since the last pass take effect."""
        if torch._C._get_tracing_state() is not None:
            raise NotSupported(
                "torch.jit.trace of a sharded model",
                "Trace a model that is not sharded, with the state dict taken inside `with fs.full(model):`.",
            )
        trainable = list(map(_requires_grad, self.parameters))
        if trainable != self._trainable:
            self._trainable = trainable
            self.gathering.trainability_changed()
            for parameter, flag in zip(self._compute_parameters, trainable, strict=True):
                parameter.requires_grad_(flag)
            self.guard(self)
        for index, hooks in enumerate(map(_tensor_hooks, self.parameters)):
            if hooks is not None and self._compute_parameters[index]._backward_hooks is not hooks:
                self._compute_parameters[index]._backward_hooks = hooks

    def _current_values(self) -> tuple[int, int]:
        """Changes with every in-place edit of a parameter and every optimizer step.

        The steps are counted because a fused optimizer does not touch a rank's empty shards.
        """
        return self.steps, sum(map(_version, self.parameters))

    def _hook(
        self, unit: LiveUnit, module: nn.Module, output: Any, node: torch.autograd.graph.Node | None
    ) -> bool:
        """Register for the begin and end of this forward's backward; False if it has none."""
        hooked = False
        outputs = (output,) if type(output) is torch.Tensor else tensors_in(output)
        if unit.results.get(module) != []:
            outputs = chain(outputs, unit.results_in_attributes(module))
        for tensor in outputs:
            for made_by in nodes_of(tensor) if tensor.requires_grad else ():
                begins = self._turn_of(made_by).begins
                if unit not in begins:
                    begins.append(unit)
                hooked = True
        if hooked and current_task() == NO_TASK:
            unit.pass_state.pending += 1
            if node is not None:
                self._turn_of(node).ends.append(unit)
        return hooked

    def _turn_of(self, node: torch.autograd.graph.Node) -> Turn:
        turns: dict[Any, Turn] = node.metadata  # type: ignore[assignment]
        turn = turns.get(self)
        if turn is None:
            values = self._values if self.gathering.forward is not None else self._current_values()
            turn = turns[self] = Turn(self, values)
            node.register_prehook(turn)
        return turn

    @contextmanager
    def shown(self, unit: LiveUnit) -> Iterator[None]:
        """Full parameters in the modules' places while a recomputation runs."""
        before: list[torch.Tensor] = []
        if unit.pass_state.depth == 0:
            self._begin_backward()
            self.gathering.need(unit)
            if unit.writes:
                before = [lane.full.clone() for lane in unit.lanes]
        unit.enter()
        if self._observer is not None:
            self._observer.begin(_forward_kind(), unit.name)
        try:
            yield
        finally:
            unit.leave()
            if self._observer is not None:
                self._observer.end(_forward_kind(), unit.name)
            if before:  # here, because checkpointing ends a recomputation by an exception
                self._refuse_written_again(unit, before)

    # ---- backward

    def turn(self, turn: Turn) -> None:
        if torch.is_grad_enabled():  # only under create_graph
            if turn.begins:
                _refuse_double_backward(turn.begins[0])
            with torch.no_grad():
                self._take(turn)
        else:
            self._take(turn)

    def _take(self, turn: Turn) -> None:
        ended = []
        for unit in turn.ends:
            unit.pass_state.pending = max(0, unit.pass_state.pending - 1)
            if self._is_over(unit):
                self._end_unit(unit)
                ended.append(unit)
        task = current_task()
        for unit in turn.begins:
            if unit.pass_state.task != task or (unit.rereads and unit.state is not State.FULL):
                self._begin(unit, turn.values)
        for unit in ended:
            self.reduction.done(unit.index, self._called)

    def _note_called(self, unit: LiveUnit) -> None:
        """A backward may follow, or several: of further losses, or of a graph that is kept."""
        if self._backward_since_call:
            self._backward_since_call = False
            for each in self.units:
                each.pass_state.called = False
        unit.pass_state.called = True

    def _called(self, index: int) -> bool:
        return self.units[index].pass_state.called

    def _is_over(self, unit: LiveUnit) -> bool:
        """Whether its backward is; not while a further use of it in this graph is to come."""
        running = self.gathering.backward is not None
        return running and not unit.pass_state.pending and not unit.gradients_to_come()

    def _end_unit(self, unit: LiveUnit) -> None:
        """Its backward is over. Its gradients are reduced afterwards, so its full value is released first."""
        if self._observer is not None:
            self._observer.end("backward", unit.name)
        if unit.wrote():
            self._note_written(unit)
        if unit is not self.root and not self.gathering.keeping:
            unit.release()

    def _begin(self, unit: LiveUnit, values: tuple[int, int]) -> None:
        if unit.is_unsharded:
            raise StateError("backward inside fs.full", "Leave `with fs.full(model):` before training.")
        self._begin_backward()
        if values != self._values_in_backward:
            raise StateError(
                f"{unit_label(unit.name)}: parameters changed between this forward and its backward",
                "Run backward before optimizer.step() and before editing parameters in place.",
            )
        task = current_task()
        if task not in self._tasks:
            # A checkpoint segment of torch's reentrant kind runs a graph task of its own.
            self._tasks.append(task)
            _at_end_of_task(lambda: self._end_segment(task))
        if self._observer is not None and unit.pass_state.task == NO_TASK:
            self._observer.begin("backward", unit.name)
        unit.pass_state.task = task
        self.reduction.progress()
        self.gathering.began(unit)
        self.reduction.skip_to(unit.index, unit.inner_indices, self._called)
        if unit.rereads:
            self.gathering.need(unit)
        self.reduction.prepare(unit.index)

    def _begin_backward(self) -> None:
        if self.gathering.backward is not None:
            return
        self._follow_user()  # a pass may have come since, with parameters frozen for it alone
        self._tasks = [current_task()]
        self._values_in_backward = self._current_values()
        for transfers in self._stepping:
            transfers.fetch_ahead()
        schedule = self.gathering.begin_backward()
        self.reduction.diverges = schedule.diverges
        with torch.no_grad():
            self.reduction.begin(schedule.reduce, self._modes)
        _at_end_of_task(self._end_backward)

    def _end_segment(self, task: int) -> None:
        with torch.no_grad():
            for unit in reversed(self.units):
                now = unit.pass_state
                if now.task == task and unit is not self.root and not now.to_recompute:
                    now.pending = 0
                    if self._is_over(unit):
                        self._end_unit(unit)
                        self.reduction.done(unit.index, self._called)

    def _end_backward(self) -> None:
        if self._observer is not None:
            self._observer.begin("end of backward", "")
        self._backward_since_call = True
        with torch.no_grad():
            self.gathering.pass_rest_of_backward()
            self.reduction.flush()
            self._settle_writes()
            self.gathering.end_backward()
            self.comm.check_agreement()  # before anything reaches p.grad
            self.reduction.finish()
            if not self.reduction.postponing:
                self.comm.step += 1
        if self._observer is not None:
            self._observer.end("end of backward", "")

    # ---- parameters that other modules read

    def watch_sites(self) -> None:
        """From now on modules show parameters of units that are not computing as `shown_to_reader` has it."""
        for unit in self.units:
            for lane in unit.lanes:
                if not lane.specs:  # a Reading stands for plain tensors only
                    for sharded, compute in zip(lane.parameters, lane.compute_parameters, strict=True):
                        self._readable[id(sharded)] = unit, sharded, compute
        seen: set[int] = set()
        shared: set[int] = set()
        for unit in self.units:
            shared |= seen.intersection(unit.slots.module_ids)
            seen.update(unit.slots.module_ids)
        for unit in self.units:
            unit.slots.attach(shared, self.computes, self.shown_to_reader)

    def computes(self) -> bool:
        """Whether a forward of the model or of a part of it runs, or a backward."""
        if self._outermost.pass_state.depth > 0 or current_task() != NO_TASK:
            return True
        self.settle_step()  # the reader gets what rests
        return False

    def shown_to_reader(self, parameter: Any) -> Any:
        """What code that runs while the model computes gets of a parameter whose unit does not."""
        place = self._readable.get(id(parameter))
        if place is None or (place[0].is_unsharded and not place[0].cast):
            return parameter
        unit, sharded, compute = place
        reading = self._readings.get(id(parameter))
        if reading is None or reading.requires_grad != sharded.requires_grad:
            make_full = torch.compiler.disable(partial(self._read_from, unit))  # type: ignore[no-untyped-call]
            reading = Reading.make(sharded, compute, make_full)
            self._readings[id(parameter)] = reading
        return reading

    def _read_from(self, unit: LiveUnit, parameter: nn.Parameter) -> None:
        """Other code than the unit's own computes with this parameter: the unit becomes full, and stays."""
        if unit.pass_state.depth:
            return
        if current_task() != NO_TASK and unit.state is State.AT_REST:
            raise AtRestError(
                f"parameter {unit.slots.name_of(parameter)!r} of {unit_label(unit.name)} was read in backward"
                f"{_by_caller()}, where only this rank's elements are present",
                "Read it in forward, or between steps inside `with fs.full(model):`.",
            )
        if not self.computes() and self.gathering.forward is None:
            raise AtRestError(
                f"parameter {unit.slots.name_of(parameter)!r} of {unit_label(unit.name)} was obtained in a "
                "forward and used after it",
                "Use it inside the forward, or inside `with fs.full(model):`.",
            )
        with transforms.left():
            self.gathering.need(unit)
        unit.pass_state.read = True
        if unit not in self._read:
            self._read.add(unit)
            for other in self.units:
                other.storages |= unit.storages  # views of it that leave a module are copied

    # ---- parameters that a forward writes

    def _note_written(self, unit: LiveUnit) -> None:
        """Its full value is kept until `_settle_writes`."""
        for lane in unit.lanes:
            lane.take_replaced_compute()
        if self.gathering.inference is not None:
            self._refuse_write_in_inference(unit)
            return
        unit.writes = unit.pass_state.written = True
        if unit not in self._written:
            self._written.append(unit)

    def _settle_writes(self) -> None:
        """What forwards wrote into parameters goes into the shards if all ranks wrote the same: a collective.

        Only where there was a write. Ranks that wrote differently (a max_norm, statistics of their own batch)
        would mix their values; one process has no counterpart to that.
        """
        for unit in self._read:
            if unit.wrote():
                self._note_written(unit)
        self._read.clear()
        if not self._written:
            return
        units, self._written = self._written, []
        for unit in units:
            unit.pass_state.written = False
        try:
            problem = self._keep_written(units)
        finally:
            for lane in self.lanes:
                lane.writes.forget()
        if problem is not None:
            if current_task() == NO_TASK:
                self.gathering.abandon_pass()
            raise problem

    def _keep_written(self, units: Sequence[LiveUnit]) -> StateError | None:
        mine = [int(lane.writes.seen()) for lane in self.lanes]
        try:
            written = self.comm.all_gather_ints(mine, "writes of forward").amax(0).tolist()
        except Stalled as error:
            names = ", ".join(unit_label(unit.name) for unit in units)
            what = (
                f"parameters of {names} were written by a forward of this rank, but not of all: {error.what}"
            )
            raise Stalled(what, _WRITE_BETWEEN_STEPS) from error
        kept: list[Lane] = []
        problem: StateError | None = None
        for unit in self.units:
            for lane in unit.lanes:
                if not written[self.lanes.index(lane)]:
                    continue
                is_full = unit.state is State.FULL or lane.permanent
                found = self._written_problem(lane, is_full)
                problem = problem or found
                if is_full:
                    kept.append(lane)
        for lane in kept:
            if problem is None:
                lane.keep_written()
            elif lane.permanent:
                self.comm.broadcast(lane.rest)  # the ranks go on alike, if the error is caught
        return problem

    def _written_problem(self, lane: Lane, is_full: bool) -> StateError | None:
        """The same on all ranks."""
        comm, tag = self.comm, self.comm.tag(lane.unit, "writes of forward")
        if lane.is_exact:
            flags = lane.differing_pieces(is_full, tag)
            what = "with different values on different ranks"
        else:
            flags = lane.changed_pieces() if is_full else [False] * len(lane.parameters)
            what = f"where it is a copy in {lane.dtypes.compute} of {lane.dtypes.rest} values"
        digest = _checksum(lane.own.clone()) if is_full and comm.replicas > 1 else 0
        table = comm.all_gather_ints([comm.rank, digest, *map(int, flags)], "writes of forward")
        by_place: dict[int, set[int]] = {}
        for place, theirs in table[:, :2].tolist():
            by_place.setdefault(place, set()).add(theirs)
        bad = table[:, 2:].amax(0).tolist()
        if lane.is_exact and any(len(digests) > 1 for digests in by_place.values()):
            bad = [1, *bad[1:]]  # replicas differ, in some parameter
        if not any(bad):
            return None
        names = [piece.name for piece, flag in zip(lane.layout.pieces, bad, strict=True) if flag]
        return StateError(
            f"{unit_label(lane.unit)}: parameter {names[0]!r} was written while its module computed, {what}",
            _WRITE_BETWEEN_STEPS,
        )

    def _refuse_write_in_inference(self, unit: LiveUnit) -> None:
        for lane in unit.lanes:
            changed = lane.changed_pieces() if lane.writes.seen() and not lane.permanent else []
            lane.writes.forget()
            for piece, flag in zip(lane.layout.pieces, changed, strict=False):
                if flag:
                    raise StateError(
                        f"{unit_label(unit.name)}: parameter {piece.name!r} was written while its module "
                        "computed inside fs.inference",
                        _WRITE_BETWEEN_STEPS,
                    )

    def _refuse_written_again(self, unit: LiveUnit, before: Sequence[torch.Tensor]) -> None:
        for lane, values in zip(unit.lanes, before, strict=True):
            lane.take_replaced_compute()
            for piece, flag in zip(lane.layout.pieces, lane.changed_pieces(values), strict=True):
                if flag:
                    raise StateError(
                        f"{unit_label(unit.name)}: parameter {piece.name!r}, which its forward writes, was "
                        "written once more when activations were computed again",
                        "Shard without checkpoint_activations, or write it between steps.",
                    )
            lane.writes.forget()

    # ---- penalties on parameters at rest

    @property
    def anchor(self) -> torch.Tensor:
        """What autograd sees instead of the parameters at rest in a penalty."""
        if self._anchor is None:
            self._anchor = torch.zeros((), device=self.comm.device, requires_grad=True)
        return self._anchor

    def penalised(self, terms: Sequence[Penalised], factor: torch.Tensor) -> None:
        """A backward has come to a penalty. Its gradients are added when it is over."""
        self.reduction.penalties.append((factor, terms))
        if self._penalised_task != current_task():
            self._penalised_task = current_task()
            _at_end_of_task(self._end_penalties)

    def _end_penalties(self) -> None:
        """If the model took part in this backward, its end adds them; if not, they are all there is."""
        self._penalised_task = NO_TASK
        if self.gathering.backward is None:
            with torch.no_grad():
                self.reduction.finish_penalties()

    # ---- fs.full

    @contextmanager
    def opened(self, units: Sequence[LiveUnit], writeback: bool = True, warn: bool = True) -> Iterator[None]:
        """Parameters of these units hold unsharded values."""
        if current_task() != NO_TASK or self.gathering.forward is not None:
            raise StateError("fs.full inside a forward or backward", "Open it between steps.")
        if self.initialising is not None:
            self.initialising()
        fresh = [unit for unit in units if not unit.is_unsharded]
        try:
            for unit in fresh:
                unit.is_unsharded = True  # first: a parameter without values yet must not open it once more
                for lane in unit.lanes:
                    lane.unshard(writeback)
        except BaseException:
            for unit in fresh:
                unit.is_unsharded = False
                for lane in unit.lanes:
                    lane.reshard(writeback=False)
            raise
        self.comm.check_agreement()
        try:
            yield
        finally:
            for unit in fresh:
                try:
                    for lane in unit.lanes:
                        if writeback:
                            lane.take_replaced()
                            self._first_ranks_edits(lane, warn)
                        lane.reshard(writeback)
                finally:
                    unit.is_unsharded = False
                unit.release()

    def _first_ranks_edits(self, lane: Lane, warn: bool) -> None:
        """Ranks that edited alike keep their own; where they differ the first rank's values are kept."""
        values = lane.rest if lane.complete else lane.unsharded
        if values is None:
            return
        self.comm.broadcast_in_tp_group(lane.uncut_views(values))
        if self.comm.all_ranks == 1:
            return
        if len(set(self.comm.all_gather_int(_checksum(values), "full"))) > 1:
            if warn:
                warnings.warn(
                    f"ranks left fs.full with different values in {unit_label(lane.unit)}; the first rank's "
                    "are kept",
                    stacklevel=4,
                )
            self.comm.broadcast(values)


def _checksum(values: torch.Tensor) -> int:
    return zlib.crc32(as_bytes(values.detach().cpu()).numpy().data)


def _by_caller() -> str:
    """Which module's code runs, for a message."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not isinstance(module, torch.Tensor):
            return f" by {type(module).__name__}.{frame.f_code.co_name}"
    return ""


def _refuse_double_backward(unit: LiveUnit) -> None:
    if unit.releasable:
        raise NotSupported(
            f"{unit_label(unit.name)}: backward(create_graph=True) keeps references into released values",
            "Use strategy='replicate' with precision='fp32', which never releases.",
        )


def _forward_kind() -> Literal["forward", "recompute"]:
    return "forward" if current_task() == NO_TASK else "recompute"


def _at_end_of_task(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


class Deferred(Protocol):
    """What a module carries under DEFERRED that an integration shards, or the module inside, at first use."""

    def begin(self, used: bool) -> nn.Module:
        """Shard the model unless that was done, and return the module that carries the engine.

        `used` also ends the time in which scripts initialise its values.
        """


def engine_of(module: Any) -> Runtime | None:
    """The engine of this very module, as part of a sharded model. Never starts deferred sharding."""
    return module.__dict__.get("_fullshard") if isinstance(module, nn.Module) else None


def is_sharded(module: Any) -> bool:
    return engine_of(module) is not None


def model_of(model: nn.Module, used: bool = False) -> nn.Module:
    """The module that carries the engine: `model`, or the one inside a wrapper. Starts deferred sharding."""
    deferred: Deferred | None = model.__dict__.get(DEFERRED) if isinstance(model, nn.Module) else None
    return model if deferred is None else deferred.begin(used)


def runtime_of(module: nn.Module, used: bool = True, reads: bool = True) -> Runtime:
    """The engine of a sharded module. `used` as in Deferred.begin; `reads`: values at rest, perhaps."""
    model = model_of(module, used)
    runtime = engine_of(model)
    if runtime is None:
        raise StateError(f"{type(model).__name__} is not sharded", "Call fs.shard(model) first.")
    if used:
        model_of(runtime.model, used)  # `module` may be a part of it that carries no request
    runtime.gathering.forget_interrupted()
    if reads:
        runtime.settle_step()
    return runtime
