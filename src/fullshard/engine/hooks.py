"""The module stays a module: hooks, stand-ins and guards that a sharded module carries.

Everything attached here copies itself when the model is deep-copied, and refuses to be pickled.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.engine import direct, transforms
from fullshard.engine.activations import DeviceKeeper, HostKeeper, Keeper, checkpointed
from fullshard.engine.autograd_inputs import used_at_rest, watch_inputs
from fullshard.engine.data_parallel_guard import refuse_ddp_around
from fullshard.engine.direct import Place, linear
from fullshard.engine.late_changes import watch_changes
from fullshard.engine.norms import watch_constructors
from fullshard.engine.parameters_at_rest import mark, watch_parameters
from fullshard.engine.runtime import Runtime
from fullshard.engine.tensors import tensors_in
from fullshard.engine.unit import LiveUnit
from fullshard.engine.writes import watch_data
from fullshard.errors import AtRestError, NotSupported, StateError, unit_label
from fullshard.plan.units import has_forward

_QUIET = {"forward", "extra_repr"}
_RESETS = {"reset_parameters", "_reset_parameters"}  # fans and bounds come from full shapes


class Attached:
    """Something a module carries for a unit of a runtime."""

    def __init__(self, runtime: Runtime, unit: LiveUnit) -> None:
        self.runtime, self.unit = runtime, unit

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupported(
            "a sharded model cannot be pickled: every rank holds a part",
            "Save model.state_dict() inside `with fs.full(model):`.",
        )


class Eager(Attached):
    """A call that torch.compile must not look into: its graph breaks here, and goes on behind."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _run_eagerly[type(self)](self, *args, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


_run_eagerly: dict[type, Callable[..., Any]] = {}


class BeforeForward(Eager):
    last: int  # id of our AfterForward hook

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        hooks: OrderedDict[int, Any] = module._forward_hooks  # type: ignore[assignment]
        if next(reversed(hooks)) != self.last:
            hooks.move_to_end(self.last)  # hooks registered since then see full parameters too
        if self.unit is self.runtime.root:
            _refuse_other_device(self.runtime.comm.device, args, kwargs)
            refuse_ddp_around(p for lane in self.runtime.lanes for p in lane.parameters)
        if self.unit.is_unsharded and not self.unit.cast:
            return None
        return self.runtime.before_forward(self.unit, module, args, kwargs)


class AfterForward(Eager):
    def run(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.unit.is_unsharded:
            _refuse_backward(self.unit, output)
            if not self.unit.cast:
                return None
        return self.runtime.after_forward(self.unit, module, output)


def _refuse_other_device(device: torch.device, args: Any, kwargs: Any) -> None:
    """All inputs elsewhere is a mistake; some (lengths on the host, say) is not."""
    found = {t.device for t in tensors_in((args, kwargs))}
    if found and device not in found:
        remedy = f"Move the batch: batch.to({str(device)!r})."
        if device.type == "cpu" and "cuda" in {other.type for other in found}:
            remedy = "Give fs.shard device='cuda', or move the batch: batch.to('cpu')."
        raise StateError(
            f"forward got inputs on {', '.join(map(str, found))}, but the model computes on {device}", remedy
        )


def _refuse_backward(unit: LiveUnit, output: Any) -> None:
    """Inside fs.full a gradient may flow to the inputs, not to the parameters."""

    def refuse(_: Any) -> None:
        for lane in unit.lanes:
            for parameter in lane.parameters:
                if parameter.requires_grad and torch._C._will_engine_execute_node(_accumulator(parameter)):
                    raise StateError(
                        "backward through a forward that ran inside fs.full",
                        "Run training forwards outside fs.full.",
                    )

    for tensor in (p for t in tensors_in(output) for p in transforms.plain_tensors(t)):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(refuse)


def _accumulator(parameter: torch.Tensor) -> Any:
    """The node through which autograd would give this parameter its gradient."""
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]


class DirectLinear(Attached):
    """`forward` of a large Linear while its unit is full: see `direct`."""

    def __init__(self, runtime: Runtime, unit: LiveUnit, module: nn.Linear, place: Place) -> None:
        super().__init__(runtime, unit)
        self.module, self.place = module, place
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.module, x, self.place)


class StandIn(Eager):
    """`forward` of a module inside a unit, while the unit is at rest: open the unit around it."""

    def __init__(self, runtime: Runtime, unit: LiveUnit, module: nn.Module) -> None:
        super().__init__(runtime, unit)
        self.module, self.original = module, module.forward
        self.replaced = module.__dict__.get("forward")  # the user's own, shown while the unit is full
        functools.update_wrapper(self, module.forward, updated=())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.unit.is_unsharded and not self.unit.cast:
            return self.original(*args, **kwargs)
        args, kwargs = self.runtime.before_forward(self.unit, self.module, args, kwargs)
        output = None
        try:
            output = self.original(*args, **kwargs)
        finally:
            output = self.runtime.after_forward(self.unit, self.module, output)
        return output


class Recomputed(Eager):
    """`forward` of a block whose activations are computed again in backward.

    The recomputation gets buffers and inputs as the first forward found them, on copies: otherwise BatchNorm
    would count every batch twice, spectral_norm would differentiate another weight than it computed with,
    and a key-value cache would grow a second time.
    """

    def __init__(self, runtime: Runtime, unit: LiveUnit, module: nn.Module, keeper: Keeper) -> None:
        super().__init__(runtime, unit)
        self.module, self.original, self.keeper = module, module.forward, keeper
        self.marker = torch.empty(0, device=runtime.comm.device)
        self.changing: list[tuple[nn.Module, str]] | None = None  # buffers a forward writes, once known
        functools.update_wrapper(self, module.forward, updated=())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.unit.is_unsharded or not torch.is_grad_enabled() or transforms.running() is not None:
            return self.original(*args, **kwargs)  # transforms of torch.func cannot be checkpointed
        places = self._buffers() if self.changing is None else self.changing
        before = [(module, name, _copy_of(module, name)) for module, name in places]
        compute = functools.partial(self._compute, before)
        held = self.keeper.hold(unit_label(self.unit.name), args, kwargs)
        output = checkpointed(compute, held, self.marker, args, kwargs)
        if self.changing is None and self.module.training:
            self.changing = [(m, n) for m, n, value in before if not torch.equal(_copy_of(m, n), value)]
        return output

    def _buffers(self) -> list[tuple[nn.Module, str]]:
        modules = self.module.modules()
        return [(m, name) for m in modules for name, buffer in m._buffers.items() if buffer is not None]

    def _compute(
        self, before: list[tuple[nn.Module, str, torch.Tensor]], first: bool, args: Any, kwargs: Any
    ) -> Any:
        now: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        if not first:
            now = [(module, name, module._buffers[name]) for module, name, _ in before]
            for module, name, value in before:
                module._buffers[name] = value.clone()  # swapped, not written: saved tensors stay as they are
        try:
            with self.runtime.shown(self.unit):
                return self.original(*args, **kwargs)
        finally:
            for module, name, kept in now:
                module._buffers[name] = kept


def _copy_of(module: nn.Module, name: str) -> torch.Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer.detach().clone()


class Compiled(Attached):
    """`forward` of a unit's module, compiled; our hooks stay outside the compiled region."""

    def __init__(self, runtime: Runtime, unit: LiveUnit, original: Any, options: tuple[Any, Any]) -> None:
        super().__init__(runtime, unit)
        self.original, self.options = original, options
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Made when first called, and again by a copy: a compiled function is bound to its own module.
        if "call" not in self.__dict__:
            self.__dict__["call"] = torch.compile(self.original, *self.options[0], **self.options[1])
        return self.__dict__["call"](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.__dict__.pop("call", None)
        return super().__deepcopy__(memo)


class Compile(Attached):
    """`module.compile()`: torch's own would compile the call with our hooks in it."""

    def __init__(self, runtime: Runtime, unit: LiveUnit, module: nn.Module) -> None:
        super().__init__(runtime, unit)
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        forward = self.module.forward
        if isinstance(forward, Recomputed):
            forward.original = Compiled(self.runtime, self.unit, forward.original, (args, kwargs))
        else:
            self.module.__dict__["forward"] = Compiled(self.runtime, self.unit, forward, (args, kwargs))


class MethodGuard(Attached):
    """A method other than forward that reads parameters of its own module."""

    def __init__(self, runtime: Runtime, unit: LiveUnit, method: types.MethodType, reads: list[str]) -> None:
        super().__init__(runtime, unit)
        self.method, self.reads = method, reads
        self.__func__, self.__self__ = method.__func__, method.__self__
        functools.update_wrapper(self, method, updated=())

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return types.MethodType  # Fabric and inspect ask whether a method is one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shows_all = self.runtime.options.replicated and self.method.__name__ not in _RESETS
        shows_all |= self.runtime.initialising is not None  # gathers a unit when its values are touched
        shows_all |= self.runtime.computes()  # so does a Reading
        if self.unit.pass_state.depth or self.unit.is_unsharded or shows_all:
            return self.method(*args, **kwargs)
        raise AtRestError(
            f"method {self.method.__name__!r} of {type(self.method.__self__).__name__} reads "
            f"{', '.join(self.reads)} while {unit_label(self.unit.name)} is at rest, a part only",
            "Call it from forward, or inside `with fs.full(model):`.",
        )


class ApplyGuard(Attached):
    """`_apply`, behind to(), half(), cuda(), ...: no-ops pass, anything that moves or casts is refused."""

    def __init__(self, runtime: Runtime, unit: LiveUnit, module: nn.Module) -> None:
        super().__init__(runtime, unit)
        self.module = module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        method = sys._getframe(1).f_code.co_name
        device = self.runtime.comm.device  # where it computes, wherever its shards rest
        for lane in self.runtime.lanes:
            probe = fn(torch.empty(1, dtype=lane.dtypes.rest, device=device))
            if (probe.dtype, probe.device) != (lane.dtypes.rest, device):
                raise NotSupported(
                    f"{method}() on a sharded model would turn its {lane.dtypes.rest} parameters on "
                    f"{device} into {probe.dtype} on {probe.device}",
                    "Move or cast the model before fs.shard; for mixed precision pass precision=.",
                )
        for module in self.module.modules() if recurse else (self.module,):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
            own: Any = type(module)._apply
            if own is not nn.Module._apply and next(module.parameters(recurse=False), None) is None:
                own(module, fn)  # a metric's states are no buffers, and move here
        for parameter in self.runtime.ignored:
            parameter.data = fn(parameter.data)
        return self.module


class Apply(Attached):
    """`apply`: the function sees unsharded values of each module's own parameters, and its edits count."""

    def __init__(self, runtime: Runtime, unit: LiveUnit, module: nn.Module) -> None:
        super().__init__(runtime, unit)
        self.module = module

    def __call__(self, fn: Callable[[nn.Module], Any]) -> nn.Module:
        for child in self.module.children():
            child.apply(fn)
        own = {id(p) for p in self.module._parameters.values() if p is not None}
        holding = [u for u in self.runtime.units if any(id(p) in own for x in u.lanes for p in x.parameters)]
        with self.runtime.opened(holding, warn=False):
            fn(self.module)
        return self.module


class RefuseScript(Attached):
    """torch.jit.script asks a module for what it should compile instead of it."""

    def __call__(self) -> nn.Module:
        raise NotSupported(
            "torch.jit.script of a sharded module: hooks that gather its parameters cannot be compiled",
            "Script it before fs.shard, or a model that is not sharded; block.compile() works here.",
        )


class RestGuard:
    """Fires when autograd hands a gradient to a parameter at rest: it was computed with as a shard."""

    is_fullshard_guard = True

    def __init__(self, unit: str, name: str) -> None:
        self.unit, self.name = unit, name

    def __call__(self, parameter: torch.Tensor) -> None:
        parameter.grad = None
        raise used_at_rest(self.unit, self.name)


def attach(runtime: Runtime, model: nn.Module) -> None:
    """Everything a freshly sharded model carries."""
    for kind in (BeforeForward, AfterForward, StandIn, Recomputed):
        # Not at import: this brings in torch's compiler, which costs a second.
        _run_eagerly.setdefault(kind, torch.compiler.disable(kind.run))  # type: ignore[no-untyped-call]
    for hook in (BeforeForward, AfterForward):
        # A block compiled before it was sharded, fullgraph=True too: behind a hook that is disabled itself,
        # and not behind one that calls something disabled, the compiler goes on with forward.
        hook.__call__ = _run_eagerly[hook]  # type: ignore[method-assign]
    recompute = runtime.options.checkpoint_activations
    keeper: Keeper = HostKeeper(runtime.comm.device) if recompute == "offload" else DeviceKeeper()
    for unit in runtime.units:
        for module in unit.modules:
            if recompute and unit is not runtime.root and any(module.children()):
                module.__dict__["forward"] = Recomputed(runtime, unit, module, keeper)
            module.__dict__["compile"] = Compile(runtime, unit, module)
            before, after = BeforeForward(runtime, unit), AfterForward(runtime, unit)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            before.last = module.register_forward_hook(after, always_call=True).id
        _attach_inside(runtime, unit)
    watch_data()
    watch_constructors()
    watch_inputs()
    watch_parameters()
    watch_changes()
    mark(runtime.lanes)
    runtime.watch_sites()
    runtime.guard = guard
    guard(runtime)
    for module in model.modules():
        module.__dict__["_apply"] = ApplyGuard(runtime, runtime.root, module)
        module.__dict__["apply"] = Apply(runtime, runtime.root, module)
        module.__dict__["_fullshard"] = runtime
        module.__dict__["__prepare_scriptable__"] = RefuseScript(runtime, runtime.root)


def guard(runtime: Runtime) -> None:
    """A RestGuard on every parameter that trains and has none yet."""
    for lane in runtime.lanes:
        for parameter, piece in zip(lane.parameters, lane.layout.pieces, strict=True):
            hooks = (parameter._post_accumulate_grad_hooks or {}).values()
            if parameter.requires_grad and not any(isinstance(hook, RestGuard) for hook in hooks):
                hook = RestGuard(lane.unit, piece.name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _attach_inside(runtime: Runtime, unit: LiveUnit) -> None:
    owners: dict[nn.Module, list[str]] = {}
    for module, attribute in unit.sites:
        owners.setdefault(module, []).append(attribute)
    places, called = _places(unit), set(unit.modules)
    for module, attributes in owners.items():
        if isinstance(module, nn.Linear) and module in places:
            module.__dict__["forward"] = DirectLinear(runtime, unit, module, places[module])
        if module not in called and has_forward(module):
            unit.slots.add_forward(module, StandIn(runtime, unit, module))
        for name, reads in _reading_methods(module, attributes).items():
            module.__dict__[name] = MethodGuard(runtime, unit, getattr(module, name), reads)


def _places(unit: LiveUnit) -> dict[nn.Linear, Place]:
    """Linears as torch wrote them, large enough, whose weight is theirs alone."""
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for module, attribute in unit.sites:
        sites.setdefault(id(module._parameters[attribute]), []).append((module, attribute))
    found: dict[nn.Linear, Place] = {}
    least = direct.MIN_BYTES if unit.policy.direct_bytes is None else unit.policy.direct_bytes
    for lane in unit.lanes:
        for index, (parameter, piece) in enumerate(zip(lane.parameters, lane.layout.pieces, strict=True)):
            module, attribute = sites[id(parameter)][0]
            large = piece.num_elements * lane.dtypes.packed.itemsize >= least
            alone = parameter.requires_grad and attribute == "weight" and len(sites[id(parameter)]) == 1
            alone &= not lane.specs  # tensor-parallel ones compute on DTensors
            if large and alone and type(module) is nn.Linear and "forward" not in vars(module):
                found[module] = lane.places[index] = Place()
    return found


def _reading_methods(module: nn.Module, attributes: list[str]) -> dict[str, list[str]]:
    """Methods of the user's own classes whose code names a parameter of the module."""
    found: dict[str, list[str]] = {}
    for cls in type(module).__mro__:
        of_torch = cls.__module__.split(".")[0] == "torch"
        for name, function in vars(cls).items():
            relevant = name in _RESETS if of_torch else name not in _QUIET and not name.startswith("__")
            if not relevant or not isinstance(function, types.FunctionType):
                continue
            reads = [a for a in attributes if a in function.__code__.co_names]
            if reads and name not in module.__dict__ and getattr(type(module), name, None) is function:
                found.setdefault(name, reads)
    return found
