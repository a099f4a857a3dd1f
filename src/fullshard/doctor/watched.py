"""One sharded model under examination: every call, backward and step beside the unsharded copy.

Each stage is compared from what it really began with: forward from the parameters and buffers of that moment,
gradients from those before the backward, a step from the gradients that the optimizer got. So one stage that
is off does not make those after it look wrong, and Adam's first steps do not turn rounding into differences.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.comm.plain_group import PlainGroup
from fullshard.doctor import tolerances
from fullshard.doctor.fingerprints import RandomState, described, fingerprint, is_varied
from fullshard.doctor.reference import (
    Computed,
    Reference,
    cloned,
    results_in_attributes,
)
from fullshard.doctor.unsharded import Values, gradient_values, parameter_values
from fullshard.engine.runtime import Runtime, runtime_of
from fullshard.engine.tensors import tensors_in

Note = Callable[..., None]
_REPEATED_CALLS = 2  # that are computed twice, to see whether the same inputs give the same numbers
_POINTS = 200


@dataclass
class Call:
    """One call of the model, or of a part of it, by the script."""

    name: str
    args: Any
    kwargs: Any
    state: RandomState
    inputs: list[tuple[torch.Tensor, str, int]]
    inner: list[tuple[str, list[torch.Tensor]]] = field(default_factory=list)
    alive: list[tuple[str, weakref.ref[torch.Tensor], str, int]] = field(default_factory=list)
    computed: Computed | None = None
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    results: list[tuple[torch.Tensor, int, Any, int, Callable[[torch.Tensor], None]]] = field(
        default_factory=list
    )
    attributes: list[torch.Tensor] = field(default_factory=list)  # results that modules kept before it
    words: str = ""  # its arguments that are texts, flags and integers
    nodes: list[Any] = field(default_factory=list)  # of autograd, that made its results
    went_back: bool = False  # some backward has reached it
    is_step: bool = False  # a step of the script's that runs in place of the forward: not the model's own

    def follow_writes(self) -> None:
        """Writing into an output that is a view (`loss *= 2`) drops its hook: its base has the gradient."""
        for result, version, node, place, note in self.results:
            if result._version != version:
                node.register_prehook(_noting_gradient(place, result.shape, note))
        self.results.clear()


class Watched:
    def __init__(
        self,
        model: nn.Module,
        copied: nn.Module | None,
        group: PlainGroup,
        note: Note,
        index: int = 0,
        others: Callable[[], Sequence[Watched]] = tuple,
    ) -> None:
        self.model, self._group, self.index, self._others = model, group, index, others
        self.note: Note = partial(note, model=index)
        self.runtime: Runtime = runtime_of(model, used=False)
        self.values = Values(self.runtime, group)
        self.names = {module: name for name, module in model.named_modules()}
        self.points = self._points()
        self.reference = None if copied is None else Reference(copied, self.runtime, self.points)
        self.call: Call | None = None
        self.depth = 0
        self.calls: list[Call] = []  # since the last step
        self.optimizers: dict[int, Any] = {}
        self._base: dict[str, torch.Tensor | None] | None = None
        self._contributions: dict[str, torch.Tensor | None] = {}
        self._frozen: dict[str, torch.Tensor] = {}
        self._at_rest: dict[str, str] = {}
        self._num_calls = 0
        self._before_step: dict[str, torch.Tensor | None] = {}
        self._readings = 0  # of the gradients that a step gets: each call of its closure makes others
        self._second_order = False  # gradients of gradients since the last step
        depth = max(1, len(self.points))
        lanes = [lane.dtypes for lane in self.runtime.lanes]
        device = self.runtime.comm.device
        self.exact_tolerance = tolerances.tolerance(tolerances.rounding(torch.float32), depth)
        self.forward_tolerance = tolerances.tolerance(tolerances.coarsest(lanes, device, False), depth)
        self.gradient_tolerance = tolerances.tolerance(
            tolerances.coarsest(lanes, device, True), depth + self._group.ranks
        )
        for point in self.points:
            module = dict(model.named_modules())[point]
            module.register_forward_hook(self._inner_hook(point))

    # ---- places

    def _points(self) -> list[str]:
        """Where outputs are compared: units, the model's children, and the blocks of its containers."""
        names = {
            self.names[module]
            for unit in self.runtime.units
            for module in unit.modules
            if module in self.names
        }
        children = [self.model]
        for child in list(self.model.children()):
            held = [child, *(child.children() if isinstance(child, nn.ModuleList | nn.Sequential) else ())]
            children += held
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList):
                children += list(module.children())
        names |= {self.names[module] for module in children}
        known = [name for module, name in self.names.items() if name in names]
        return [
            name for name in known if not isinstance(dict(self.model.named_modules())[name], nn.ModuleList)
        ][:_POINTS]

    def unit_of(self, name: str) -> str:
        """The unit in which a module or parameter is."""
        held = [u.name for u in self.runtime.units if u.name and f"{name}.".startswith(f"{u.name}.")]
        return max(held, key=len, default="")

    def unit_of_parameter(self, name: str) -> str:
        for _, lane, piece in self.values.places:
            if piece.name == name:
                return lane.unit
        return self.unit_of(name)

    # ---- forward

    def _inner_hook(self, name: str) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            if self.call is not None and not torch._C._current_graph_task_id() >= 0:
                tensors = list(tensors_in(output))
                self.call.inner.append((name, [t.detach().clone() for t in tensors]))
                self.call.alive += [
                    (name, weakref.ref(t), fingerprint(t), t._version) for t in tensors if t.requires_grad
                ]

        return note

    def begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self.names[module]
        if torch.is_grad_enabled() and name == "":
            self.synchronise()
        step = getattr(module.__dict__.get("forward"), "arguments", None)  # of Lightning
        args, kwargs = (args, kwargs) if step is None else step
        inputs = [(t, fingerprint(t), t._version) for t in tensors_in((args, kwargs))]
        self.call = Call(name, cloned(args), cloned(kwargs), RandomState(self.model), inputs)
        self.call.is_step = step is not None
        if step is None:  # otherwise one is the number of the batch
            self.call.words = str([one for one in (*args, *kwargs.items()) if _is_word(one)])
        self.call.attributes = results_in_attributes(self.model)
        if self.reference is not None:
            self.reference.follow(self.model)

    def synchronise(self) -> None:
        """The copy gets the values at rest. Frozen parameters that changed, and edits, are noted."""
        values = self.values.read(parameter_values)
        changed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for parameter, _, piece in self.values.places:
            value = values[piece.name]
            if value is None:
                continue
            before = self._frozen.pop(piece.name, None)
            if before is not None and not torch.equal(before, value):
                changed[piece.name] = before, value
            if not parameter.requires_grad:
                self._frozen[piece.name] = value.clone()
        for name in self._no_averages(changed, values) if changed else ():
            self.note("frozen parameter changed", parameter=name, unit=self.unit_of_parameter(name))
        if self.reference is not None:
            self.reference.set_parameters(values)

    def _no_averages(
        self,
        changed: dict[str, tuple[torch.Tensor, torch.Tensor]],
        values: dict[str, torch.Tensor | None],
    ) -> list[str]:
        """Frozen parameters that did not move towards other ones, as a teacher or a target network does.

        All of these move by the same share of their way. A parameter whose way says little (towards zeros,
        or by one number for all elements) is such an average only beside another one of that share."""
        others = [watched.values.read(parameter_values) for watched in self._others() if watched is not self]
        found: dict[str, list[tuple[float, bool]]] = {}
        for name, (before, after) in changed.items():
            own = [value for other, value in values.items() if other != name]
            targets = [*own, *(value for read in others for value in read.values())]
            found[name] = [
                (share, is_varied(target) and is_varied(target - before))
                for target in targets
                if target is not None
                and (share := tolerances.share_of_way(before, after, target)) is not None
            ]
        clear = [share for shares in found.values() for share, is_clear in shares if is_clear]
        return [
            name
            for name, shares in found.items()
            if not any(
                share == 0.0 or is_clear or any(abs(share - other) <= 0.01 * other for other in clear)
                for share, is_clear in shares
            )
        ]

    def note_edits(self, where: str) -> None:
        """Parameters whose elements changed since the last look, outside of an optimizer's step."""
        now = {piece.name: fingerprint(p) for p, _, piece in self.values.places}
        changed = [name for name, value in self._at_rest.items() if now[name] != value]
        self._at_rest = now
        if changed:
            self.note("edited", where=where, parameters=changed, unit=self.unit_of_parameter(changed[0]))

    def end_call(self, output: Any) -> None:
        call, self.call = self.call, None
        assert call is not None
        trains = torch.is_grad_enabled() and self.model.training
        after = RandomState(self.model)
        self.note(
            "call",
            module=call.name,
            trains=trains,
            grad=torch.is_grad_enabled(),
            inputs=described((call.args, call.kwargs)),
            random=call.state.digest(),
            draws_random=call.state.digest() != after.digest(),
            draws=call.state.has_drawn(),
        )
        if not torch.is_grad_enabled():
            return
        if self.reference is not None and call.is_step:
            self.reference = None
            self.note("not compared", why="a training step that runs inside the model's forward")
        if self.reference is not None:
            self._compute_beside(call, output)
        own = [t for t in tensors_in(output) if t.requires_grad]
        earlier = {id(t) for t in call.attributes}
        beside = [t for t in results_in_attributes(self.model) if id(t) not in earlier]
        call.nodes = [t.grad_fn for t in own + beside]
        call.attributes = []
        self._watch_gradients(call, own + beside)
        self.calls.append(call)

    def _compute_beside(self, call: Call, output: Any) -> None:
        """The same call of the copy, and its outputs and buffers beside ours."""
        assert self.reference is not None
        before = self.reference.state()
        try:
            computed = self.reference.compute(
                call.name, cloned(call.args), cloned(call.kwargs), call.state, True
            )
        except Exception as error:  # noqa: BLE001  what runs in a forward is not always the model's own
            self.reference = None
            what = (
                f"{call.name or 'the model'} does not run without sharding: {type(error).__name__}: {error}"
            )
            self.note("not compared", why=what)
            return
        call.computed = computed
        alike = self._compare_outputs(call, computed, output)
        self._compare_buffers()
        if self.reference.note_custom_functions(computed):
            custom = {name: sorted(found) for name, found in self.reference.custom.items()}
            self.note("custom functions", modules=custom)
        if self._num_calls < _REPEATED_CALLS or not alike:
            self._repeat(call, computed, before)
        self._num_calls += 1

    def penalised(self, value: torch.Tensor, term: Callable[[str, torch.Tensor], Any]) -> None:
        """A penalty on the parameters that the script adds to its loss: the copy's own goes back with it."""
        if self.reference is None or not value.requires_grad:
            return
        names = [name for name, _ in self.model.named_parameters() if name in self.reference.parameters]
        own = self.reference.penalty(term, names)
        call = Call("", (), {}, RandomState(), [], computed=Computed(own, [], [], [own]))
        self._watch_gradients(call, [value])
        self.calls.append(call)

    def _watch_gradients(self, call: Call, results: list[torch.Tensor]) -> None:
        call.gradients = [None] * len(results)

        def noting(index: int) -> Callable[[torch.Tensor], None]:
            def note(gradient: torch.Tensor) -> None:
                held = call.gradients[index]
                call.gradients[index] = gradient.detach().clone() if held is None else held + gradient

            return note

        for index, result in enumerate(results):
            if result.grad_fn is None:
                result.register_hook(noting(index))  # type: ignore[no-untyped-call]
            else:  # after the hooks of the script's own, which may change the gradient
                look = _noting_gradient(result.output_nr, result.shape, noting(index))
                result.grad_fn.register_prehook(look)
            base = result._base if result._is_view() else None
            if base is not None and base.grad_fn is not None and base.numel() == result.numel():
                # By its node now: writing into a view gives its base another one.
                call.results.append((result, result._version, base.grad_fn, base.output_nr, noting(index)))

    def _compare_outputs(self, call: Call, computed: Computed, output: Any) -> bool:
        """Whether all of them are as close as they should be."""
        pairs = list(zip(call.inner, computed.inner, strict=False))
        alike = [name for name, _ in call.inner] == [name for name, _ in computed.inner]
        if not alike:
            self.note("path", here=[n for n, _ in call.inner], there=[n for n, _ in computed.inner])
        close = []
        for (name, here), (other, there) in pairs if alike else ():
            assert name == other
            close.append(self._compare_tensors("output", name, here, there))
        last = list(tensors_in(output)), list(tensors_in(computed.outputs))
        close.append(self._compare_tensors("output", call.name, *last))
        return all(close)

    def _compare_tensors(
        self, stage: str, name: str, here: list[torch.Tensor], there: list[torch.Tensor]
    ) -> bool:
        apart = float("inf") if len(here) != len(there) else 0.0
        for a, b in zip(here, there, strict=False):
            apart = max(apart, tolerances.difference(a, b))
        self._compared(stage, name, self.unit_of(name), apart, self.forward_tolerance)
        return apart <= self.forward_tolerance

    def _compared(self, stage: str, tensor: str, unit: str, apart: float, allowed: float) -> None:
        self.note("compared", stage=stage, tensor=tensor, unit=unit, apart=apart, allowed=allowed)

    def _compare_buffers(self) -> None:
        assert self.reference is not None
        own = dict(self.reference.module.named_buffers(remove_duplicate=False))
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if name in own and own[name].device == buffer.device:
                apart = tolerances.difference(buffer, own[name])
                self._compared("buffer", name, self.unit_of(name), apart, self.forward_tolerance)

    def _repeat(self, call: Call, computed: Computed, before: Callable[[], None]) -> None:
        """The same call of the copy once more: whatever differs is not determined by its inputs."""
        assert self.reference is not None
        after = self.reference.state()
        before()
        again = self.reference.compute(call.name, cloned(call.args), cloned(call.kwargs), call.state, False)
        after()
        for (name, first), (_, second) in zip(computed.inner, again.inner, strict=False):
            if not all(_same(a, b) for a, b in zip(first, second, strict=False)):
                self.note("not repeatable", module=name, unit=self.unit_of(name))
                return

    # ---- backward

    def begin_backward(self) -> bool:
        """Whether it begins a sum of gradients, and does not add to one."""
        for call in self.calls:
            call.follow_writes()
            if not call.went_back and call.computed is not None:
                self._look_for_edits(call)
        if self.reference is None:
            return not self.runtime.reduction.postponed and not self._has_local_gradients()
        if self._base is not None:
            return False
        self._base = self.values.read(gradient_values)
        return not any(value is not None and bool(value.any()) for value in self._base.values())

    def _has_local_gradients(self) -> bool:
        local = (gradient_values(parameter) for parameter, _, _ in self.values.places)
        return any(value is not None and bool(value.any()) for value in local)

    def reached(self) -> list[list[int]]:
        """Shapes of the results to which the backward that just ran gave gradients."""
        return [list(g.shape) for call in self.calls for g in call.gradients if g is not None]

    def ways_of_calling(self) -> list[str]:
        """Of the calls that the last backward reached: which modules, with which words (a task)."""
        calls = [call for call in self.calls if any(g is not None for g in call.gradients)]
        return sorted({f"{call.name}({call.words})" for call in calls})

    def rows_in_the_loss(self) -> int | None:
        """Samples of the batch to which the last backward gave a gradient, where outputs are per sample.

        Results of one element, such as a router's loss, are not; unless there are no others."""
        counts = [
            int(gradient.detach().reshape(len(gradient), -1).any(1).sum())
            for call in self.calls
            for gradient in call.gradients
            if gradient is not None and gradient.dim() and gradient.numel()
        ]
        return min([count for count in counts if count > 1] or counts, default=None)

    def set_aside(self) -> Callable[[], bool]:
        """For a differentiation that adds nothing to gradients of parameters (autograd.grad).

        Calling the result forgets what results have got since; True if they have got something."""
        held = [(call, list(call.gradients)) for call in self.calls]

        def forget() -> bool:
            got = any(
                now is not before
                for call, gradients in held
                for now, before in zip(call.gradients, gradients, strict=True)
            )
            for call, gradients in held:
                call.gradients = gradients
            return got

        return forget

    def goes_beyond_first_order(self, why: str) -> None:
        """The copy's graph ends at its outputs: gradients of gradients do not pass it."""
        if self.reference is not None and not self._second_order:
            self.note("not compared", why=why)
        self._second_order = True

    def _look_for_edits(self, call: Call) -> None:
        for index, (tensor, before, version) in enumerate(call.inputs):
            if tensor._version == version and fingerprint(tensor) != before:
                self.note(
                    "kept value edited",
                    what=f"input {index} of {call.name or 'the model'}",
                    unit=self.unit_of(call.name),
                )
        for name, reference, before, version in call.alive:
            alive = reference()
            if alive is not None and alive._version == version and fingerprint(alive) != before:
                self.note(
                    "kept value edited", what=f"the output of {name or 'the model'}", unit=self.unit_of(name)
                )
        for where in dict.fromkeys(call.computed.edited() if call.computed else ()):
            self.note("kept value edited", what=f"a tensor that autograd keeps from {where}", unit="")

    def end_backward(self) -> None:
        """The copy's backward from the same gradients of the outputs, and the mean over ranks beside ours."""
        compares = self.reference is not None
        self.runtime.settle_step()
        gone = []
        for call in self.calls:
            if compares and (found := self._backward_of(call)) is not None:
                gone.append(found)
            call.gradients = [None for _ in call.gradients]
        reduction = self.runtime.reduction
        if reduction.postponing or reduction.postponed:
            return
        base, self._base = self._base or {}, None
        added = self._mean_contributions() if compares else {}
        actual = self.values.read(gradient_values)
        if compares and not self._second_order and not self._compare_gradients(actual, base, added):
            self._repeat_backward(gone)
        norms = [v.double().norm() ** 2 for v in actual.values() if v is not None]
        norm = float(torch.stack(norms).sum().sqrt()) if norms else 0.0
        self.note("gradients", norm=norm, without=[name for name, value in actual.items() if value is None])

    def _backward_of(self, call: Call) -> _Gone | None:
        if self.reference is None or call.computed is None:
            return None
        there = call.computed.results
        pairs = [
            (result, gradient.to(result.dtype))
            for result, gradient in zip(there, call.gradients, strict=False)
            if gradient is not None and result.requires_grad
        ]
        if len(there) != len(call.gradients):
            self.note("not compared", why=f"{call.name or 'the model'} gives other results without sharding")
        if pairs:
            call.went_back = True
            self.reference.backward([r for r, _ in pairs], [g for _, g in pairs])
        weight = self.runtime.reduction.weight
        taken = self.reference.take_gradients()
        for name, gradient in taken.items():
            held = self._contributions.get(name)
            if gradient is not None:
                gradient = gradient if weight == 1.0 else gradient * weight
                self._contributions[name] = gradient if held is None else held + gradient
        return _Gone(pairs, taken) if pairs else None

    def _repeat_backward(self, gone: list[_Gone]) -> None:
        """Once more, after gradients differed: whether the copy's own are the same the second time."""
        assert self.reference is not None
        for one in gone:
            self.reference.backward([r for r, _ in one.pairs], [g for _, g in one.pairs])
            for name, again in self.reference.take_gradients().items():
                first = one.taken[name]
                if first is None or again is None or tolerances.difference(again, first) == 0.0:
                    continue
                unit = self.unit_of_parameter(name)
                self.note("not repeatable", module="", unit=unit, what=f"the gradient of {name}")
                return

    def _mean_contributions(self) -> dict[str, torch.Tensor | None]:
        taken, self._contributions = self._contributions, {}
        reduction = self.runtime.reduction
        ranks = reduction.active_ranks
        flat, sizes, there = [], [], []
        for _, _, piece in self.values.places:
            gradient = None if reduction.absent else taken.get(piece.name)
            there.append(float(gradient is not None))
            value = torch.zeros(piece.shape) if gradient is None else gradient
            flat.append(value.detach().reshape(-1).to("cpu", torch.float64))
            sizes.append(piece.num_elements)
        sums = self._group.sum(torch.cat([*flat, torch.tensor(there, dtype=torch.float64)]))
        used = sums[len(sums) - len(sizes) :]
        parts = torch.split(sums[: len(sums) - len(sizes)], sizes)
        return {
            piece.name: part.view(piece.shape) / self._divisor(lane, ranks) if bool(has) else None
            for (_, lane, piece), part, has in zip(self.values.places, parts, used, strict=True)
        }

    def _divisor(self, lane: Any, ranks: int) -> float:
        policies = [u.policy.divisor for u in self.runtime.units if lane in u.lanes]
        return policies[0] if policies and policies[0] is not None else float(ranks)

    def _compare_gradients(
        self,
        actual: dict[str, torch.Tensor | None],
        base: dict[str, torch.Tensor | None],
        added: dict[str, torch.Tensor | None],
    ) -> bool:
        """Whether all of them are as close as they should be."""
        expected, close = {}, True
        norms: dict[str, float] = {}
        for name, value in added.items():
            before = base.get(name)
            total = value if before is None else before.double() if value is None else value + before
            expected[name] = total
            if total is not None:
                unit = self.unit_of_parameter(name)
                norms[unit] = max(norms.get(unit, 0.0), float(total.norm()))
        largest = max(norms.values(), default=0.0)
        for name, total in expected.items():
            here, unit = actual[name], self.unit_of_parameter(name)
            if total is None and here is None:
                continue
            there = torch.zeros(()) if total is None else total
            if here is None or total is None:
                here = torch.zeros_like(there) if here is None else here
                there = torch.zeros_like(here) if total is None else there
            floor = tolerances.FLOOR * max(norms.get(unit, 0.0), tolerances.FLOOR * largest)
            apart = tolerances.difference(here, there, floor)
            if float(here.norm()) == 0.0 == float(there.norm()):
                apart = 0.0
            self._compared("gradient", name, unit, apart, self.gradient_tolerance)
            close = close and apart <= self.gradient_tolerance
        return close

    # ---- clipping and steps

    def norm_of(self, parameters: list[nn.Parameter], kind: float) -> float | None:
        """The norm of gradients as they are now; None where some of them are not this model's."""
        own = {id(p): piece.name for p, _, piece in self.values.places}
        if not parameters or any(id(p) not in own for p in parameters):
            return None
        values = self.values.read(gradient_values)
        held = [values[own[id(p)]] for p in parameters]
        flat = [value.double().reshape(-1) for value in held if value is not None]
        return float(torch.cat(flat).norm(kind)) if flat else 0.0

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        own = {id(p) for p, _, _ in self.values.places}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def begin_step(self) -> None:
        self.synchronise()
        self._readings = 0

    def read_step(self) -> None:
        """The gradients that the step gets: before it begins, or after each call of its closure."""
        self._readings += 1
        self._before_step = self.values.read(gradient_values)
        norms = [v.double().norm() ** 2 for v in self._before_step.values() if v is not None]
        self.note("step begins", norm=float(torch.stack(norms).sum().sqrt()) if norms else 0.0)

    def end_step(self, optimizer: torch.optim.Optimizer, own: torch.optim.Optimizer | None) -> None:
        """`own` is the copy of the optimizer, which holds the copy's parameters."""
        self._base, self._contributions, self._second_order = None, {}, False
        self.calls.clear()
        readings, self._readings = self._readings, 0
        values = self.values.read(parameter_values)
        self._at_rest = {piece.name: fingerprint(p) for p, _, piece in self.values.places}
        if self.reference is None or own is None:
            return
        if readings != 1:
            raise NotImplementedError(f"it calls its closure {readings} times")
        for name, gradient in self._before_step.items():
            parameter = self.reference.parameters[name]
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype).to(parameter.device)
        try:
            own.step()
        finally:
            self.reference.take_gradients()  # also of a step that fails: they are none of the next backward's
        held = {id(p) for group in own.param_groups for p in group["params"]}
        for name, value in values.items():
            parameter = self.reference.parameters[name]
            if value is not None and id(parameter) in held:
                apart = tolerances.difference(value, parameter)
                unit = self.unit_of_parameter(name)
                self._compared("parameter", name, unit, apart, self.exact_tolerance)

    def state_of_copies(self) -> dict[str, list[Any]]:
        """Of each parameter: the range of elements that this rank holds, and their fingerprint."""
        return {name: [a, b, fingerprint(t)] for name, (a, b, t) in self.values.copies().items()}

    def forget(self) -> None:
        self.calls.clear()


@dataclass(frozen=True)
class _Gone:
    """One backward of the copy: results with the gradients they got, and what parameters got from it."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    taken: dict[str, torch.Tensor | None]


def _noting_gradient(
    place: int, shape: torch.Size, note: Callable[[torch.Tensor], None]
) -> Callable[[Any], None]:
    def look(gradients: Any) -> None:
        if gradients[place] is not None:
            note(gradients[place].reshape(shape))

    return look


def _is_word(value: Any) -> bool:
    return isinstance(value[1] if isinstance(value, tuple) and len(value) == 2 else value, str | int)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and fingerprint(a) == fingerprint(b)
