"""Values for a model that was marked on the meta device, after `to_empty`.

torch's users initialise after `to_empty`, with shards that know their whole shape. Here a parameter rests as
a flat piece, and `kaiming_uniform_` of a piece takes its bounds from the wrong shape; two ranks with one seed
would even write the same numbers. So until the model is first used its parameters are of a class that
notices when it is touched: the unit is opened, the code sees whole values, and what it leaves counts. One
unit is whole at a time. With one seed on all ranks the values are bit for bit those of an unsharded model.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.engine.hooks import MethodGuard
from fullshard.engine.lane import Lane
from fullshard.engine.runtime import Runtime
from fullshard.engine.tensors import tensors_in
from fullshard.engine.unit import LiveUnit

_about = """
requires_grad grad is_leaf device dtype is_meta layout _version grad_fn _grad_fn _backward_hooks is_cuda
is_cpu ndim is_sparse is_quantized output_nr _post_accumulate_grad_hooks names is_mps is_xpu dim
is_floating_point is_complex element_size register_hook register_post_accumulate_grad_hook requires_grad_
__hash__ ndimension get_device is_nested
"""
_ABOUT = frozenset(_about.split())  # answered by the piece as well as by the whole
_windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()  # by id of a parameter


class Uninitialised(nn.Parameter):
    """A parameter without values yet. Touching it makes its unit whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        with torch._C.DisableTorchFunctionSubclass():
            if name not in _ABOUT:
                touched = [t for t in tensors_in([args, kwargs]) if isinstance(t, Uninitialised)]
                if name in ("shape", "size", "numel", "nelement") and len(touched) == 1:
                    return _measure(touched[0], func, args, kwargs)
                for parameter in touched:
                    window = _windows.get(id(parameter))
                    if window is not None:
                        window.touch(parameter)
            return func(*args, **kwargs)


def _measure(parameter: Uninitialised, func: Any, args: Any, kwargs: Any) -> Any:
    """A shape needs no gather, so one rank alone may ask for it."""
    window = _windows.get(id(parameter))
    if window is None:
        return func(*args, **kwargs)
    shape = window.global_shape(parameter)
    return func(torch.empty(shape, device="meta"), *args[1:], **kwargs)


class Window:
    """From `to_empty` to the first use of the model."""

    def __init__(self, runtime: Runtime, model: nn.Module, blanks: Blanks) -> None:
        self._runtime, self._blanks = runtime, blanks
        self._places: dict[int, tuple[LiveUnit, Lane, int]] = {}
        self._open: AbstractContextManager[None] | None = None
        self._busy = False
        self._sites: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        self._guards: list[tuple[nn.Module, str, MethodGuard]] = []
        for module in model.modules():
            # `reset_parameters` and the like of a module at rest are refused otherwise.
            self._guards += [(module, n, v) for n, v in vars(module).items() if isinstance(v, MethodGuard)]
        for module, name, _ in self._guards:
            del module.__dict__[name]
        runtime.__dict__["opened"] = self._opened
        for unit in runtime.units:
            for module, attribute in unit.sites:
                shown = module._parameters[attribute]
                assert shown is not None
                self._sites.setdefault(shown, []).append((module, attribute))
            for lane in unit.lanes:
                for index, parameter in enumerate(lane.parameters):
                    self._begin(unit, lane, index, parameter)

    def _begin(self, unit: LiveUnit, lane: Lane, index: int, parameter: nn.Parameter) -> None:
        if parameter in self._blanks.parameters and parameter.is_floating_point():
            parameter.data.fill_(float("nan"))  # what nobody initialises shows in the first loss
        self._places[id(parameter)] = unit, lane, index
        if type(parameter) is nn.Parameter:
            _turn(parameter, Uninitialised)
            _windows[id(parameter)] = self

    def global_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        _, lane, index = self._places[id(parameter)]
        return lane.layout.pieces[index].shape

    def touch(self, parameter: nn.Parameter) -> None:
        unit, _, _ = self._places[id(parameter)]
        if self._busy or unit.is_unsharded:
            return
        self.take_over()
        self._close()
        opened = self._opened([unit], warn=False)
        opened.__enter__()
        self._open = opened

    @contextmanager
    def _opened(self, units: Sequence[LiveUnit], writeback: bool = True, warn: bool = True) -> Iterator[None]:
        """The engine's `opened`, whose own work is no touch. `apply` and fs.full come here too."""
        self.take_over()
        self._close()  # a unit left open by a touch would be closed under the caller's feet when this ends
        with ExitStack() as inside:
            with self._at_work():
                inside.enter_context(Runtime.opened(self._runtime, units, writeback, warn))
            try:
                yield
            finally:
                with self._at_work():
                    inside.close()

    def take_over(self) -> None:
        """Where code has put another Parameter, the one that is sharded takes its values and its place."""
        replaced = self._replaced()
        for parameter, _ in replaced:  # all of them first: a touch looks for replaced ones again
            for module, name in self._sites[parameter]:
                module._parameters[name] = parameter
        for parameter, put in replaced:
            self.touch(parameter)
            with torch.no_grad(), self._at_work():
                parameter.copy_(put)
            parameter.requires_grad_(put.requires_grad)

    def _replaced(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """With what was put there. What does not fit, or ties what was not tied, the first use refuses."""
        found = []
        for parameter, sites in self._sites.items():
            shown = {id(p): p for p in (module._parameters.get(name) for module, name in sites)}
            put = next(iter(shown.values()))
            if len(shown) > 1 or put is None or put in self._sites:
                continue
            if put.shape == self.global_shape(parameter):
                found.append((parameter, put))
        times = Counter(id(put) for _, put in found)
        return [(parameter, put) for parameter, put in found if times[id(put)] == 1]

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def end(self) -> None:
        """The model is used: its values are what they are now."""
        self.take_over()
        self._close()
        del self._runtime.__dict__["opened"]
        for unit in self._runtime.units:
            for lane in unit.lanes:
                for parameter in lane.parameters:
                    if type(parameter) is Uninitialised:
                        _turn(parameter, nn.Parameter)
                        _windows.pop(id(parameter), None)
        for module, name, guard in self._guards:
            module.__dict__.setdefault(name, guard)


def _turn(parameter: Any, into: type[nn.Parameter]) -> None:
    parameter.__class__ = into  # as torch's lazy parameters do


@dataclass(frozen=True)
class Blanks:
    """What lies on the meta device. Others, such as adapters initialised by themselves, keep their values."""

    parameters: frozenset[nn.Parameter]
    buffers: frozenset[tuple[nn.Module, str]]

    @staticmethod
    def of(model: nn.Module) -> Blanks:
        parameters = [p for m in model.modules() for p in m._parameters.values() if p is not None]
        buffers = [
            (m, n) for m in model.modules() for n, b in m._buffers.items() if b is not None and b.is_meta
        ]
        return Blanks(frozenset(p for p in parameters if p.is_meta), frozenset(buffers))

    def zero(self, module: nn.Module) -> None:
        """Memory for a module's own tensors; the window marks what nobody initialises."""
        for parameter in module._parameters.values():
            if parameter in self.parameters:
                parameter.detach().zero_()
        for name, buffer in module._buffers.items():
            if (module, name) in self.buffers:
                buffer.detach().zero_()  # type: ignore[union-attr]
