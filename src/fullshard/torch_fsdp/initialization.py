"""Values for a model that was on the meta device when `fully_shard` was called, after its `to_empty`.

torch's users initialise after `to_empty`, with shards that know their global shape. Here a sharded parameter
is flat, and `kaiming_uniform_` of a flat shard would take its bounds from the wrong shape; two ranks with one
seed would even write the same numbers. So until the model is first used its parameters are of a class that
notices when they are touched: their unit is opened, the code sees unsharded values, and its edits count. One
unit is open at a time. With one seed on all ranks the values are bit for bit those of an unsharded model.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fullshard.engine.runtime import Runtime
from fullshard.engine.tensors import tensors_in
from fullshard.engine.unit import LiveUnit

_about = """
requires_grad grad is_leaf device dtype is_meta layout _version grad_fn _grad_fn _backward_hooks is_cuda
is_cpu ndim is_sparse is_quantized output_nr _post_accumulate_grad_hooks names is_mps is_xpu dim
is_floating_point is_complex element_size register_hook register_post_accumulate_grad_hook requires_grad_
__hash__ ndimension get_device is_nested
"""
_ABOUT = frozenset(_about.split())  # the same for the shard and for the unsharded value
_windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()  # by id of a parameter


class Uninitialised(nn.Parameter):
    """A parameter without values yet. Touching it opens its unit."""

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
    """A shape needs no gather, so one rank alone may read it."""
    window = _windows.get(id(parameter))
    if window is None:
        return func(*args, **kwargs)
    shape = window.shape_of(parameter)
    return func(torch.empty(shape, device="meta"), *args[1:], **kwargs)


class Window:
    """The time from `to_empty` to the first use of the model."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._units: dict[nn.Parameter, LiveUnit] = {}
        self._shapes: dict[nn.Parameter, tuple[int, ...]] = {}  # unsharded
        self._sites: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        self._open: AbstractContextManager[None] | None = None
        for unit in runtime.units_of(runtime.model):
            for module, attribute in unit.sites:
                shown = module._parameters[attribute]
                assert shown is not None
                self._sites.setdefault(shown, []).append((module, attribute))
            for parameter, shape in unit.unsharded_shapes().items():
                self._units[parameter], self._shapes[parameter] = unit, shape
                if type(parameter) is nn.Parameter:
                    _set_class(parameter, Uninitialised)
                    _windows[id(parameter)] = self
        runtime.initialising = self.close

    def shape_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return self._shapes[parameter]

    def touch(self, parameter: nn.Parameter) -> None:
        unit = self._units[parameter]
        if not unit.is_unsharded:
            opened = self._runtime.opened([unit], warn=False)
            opened.__enter__()  # calls `close` first
            self._open = opened

    def close(self) -> None:
        """Shard the unit again that a touch has opened: the next touch would, perhaps inside an fs.full."""
        self.take_over()
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def take_over(self) -> None:
        """Where code has put another Parameter, the sharded one gets its values and is put back."""
        replaced = self._replaced()
        for parameter, _ in replaced:  # all of them first: a touch looks for replaced ones again
            for module, name in self._sites[parameter]:
                module._parameters[name] = parameter
        for parameter, other in replaced:
            self.touch(parameter)
            with torch.no_grad():
                parameter.copy_(other)
            parameter.requires_grad_(other.requires_grad)

    def _replaced(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """With what was put there. What does not fit, or ties what was not tied, the first use refuses."""
        replaced = []
        for parameter, sites in self._sites.items():
            shown = {id(p): p for p in (module._parameters.get(name) for module, name in sites)}
            other = next(iter(shown.values()))
            if len(shown) > 1 or other is None or other in self._sites:
                continue
            if other.shape == self.shape_of(parameter):
                replaced.append((parameter, other))
        times = Counter(id(other) for _, other in replaced)
        return [(parameter, other) for parameter, other in replaced if times[id(other)] == 1]

    def end(self) -> None:
        """The model is used: its values are what they are now."""
        self.close()
        self._runtime.initialising = None
        for parameter in self._units:
            if type(parameter) is Uninitialised:
                _set_class(parameter, nn.Parameter)
                _windows.pop(id(parameter), None)


def _set_class(parameter: Any, to: type[nn.Parameter]) -> None:
    parameter.__class__ = to  # as torch's lazy parameters do
