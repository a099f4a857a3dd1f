"""Values for a model that was on the meta device when `fully_shard` was called, after its `to_empty`.

torch's users initialise after `to_empty`, with shards that know their global shape. Here a sharded parameter
is flat, and `kaiming_uniform_` of a flat shard would take its bounds from the wrong shape; two ranks with one
seed would even write the same numbers. So until the model is first used its parameters are of a class that
notices when they are touched: their unit is opened, the code sees unsharded values, and its edits count. One
unit is open at a time. With one seed on all ranks the values are bit for bit those of an unsharded model.

A buffer that nobody initialises (a rotary table that only `__init__` computes, and that no state dict holds)
would be garbage in torch's FSDP2. Here the first forward refuses it by name, on all ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fullshard.comm.groups import Comm
from fullshard.engine.runtime import Runtime
from fullshard.engine.tensors import tensors_in
from fullshard.engine.unit import LiveUnit
from fullshard.errors import Uninitialised as UninitialisedError
from fullshard.plan.tensor_parallel import local_of
from fullshard.state.materialize import is_untouched
from fullshard.torch_fsdp.dtensors import ShardAnswers

_about = """
requires_grad grad is_leaf device dtype is_meta layout _version grad_fn _grad_fn _backward_hooks is_cuda
is_cpu ndim is_sparse is_quantized output_nr _post_accumulate_grad_hooks names is_mps is_xpu dim
is_floating_point is_complex element_size register_hook register_post_accumulate_grad_hook requires_grad_
__hash__ ndimension get_device is_nested
"""
_ABOUT = frozenset(_about.split())  # the same for the shard and for the unsharded value
_windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()  # by id of a parameter


class Uninitialised(ShardAnswers, nn.Parameter):
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


class BlankBuffers:
    """The buffers of a meta-device model, which get memory but no values with `to_empty`.

    Made before the model is sharded, when they still are on meta.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        ]
        self._versions: dict[str, tuple[int, int]] = {}

    def given_memory(self) -> None:
        self._versions = {name: _state(buffer) for name, buffer in self._current().items()}

    def share_first(self, comm: Comm) -> None:
        """Give every rank the first one's values of those that have any, as `fs.shard` does."""
        blank = set(comm.all_gather_object(self._untouched())[0])
        for name, buffer in self._current().items():
            if name not in blank:
                comm.broadcast_in_tp_group([local_of(buffer)])
                comm.broadcast(local_of(buffer))
        self._places = [place for place in self._places if place[0] in blank]

    def __len__(self) -> int:
        return len(self._places)

    def check(self, comm: Comm) -> None:
        """Raise on every rank if a buffer has no values on any."""
        names = self._untouched()
        problem = None
        if names:
            problem = UninitialisedError(
                f"nothing has initialised {'buffer' if len(names) == 1 else 'buffers'} "
                f"{', '.join(map(repr, names))} since to_empty: a state dict holds only persistent ones",
                "Compute them after to_empty as the module's __init__ does, for example in its "
                "reset_parameters(); or build the model on a real device.",
            )
        comm.raise_together(problem)

    def _untouched(self) -> list[str]:
        return [name for name, buffer in self._current().items() if self._is_untouched(name, buffer)]

    def _is_untouched(self, name: str, buffer: torch.Tensor) -> bool:
        # A byte may well be 255 everywhere; there, only what was never written to counts.
        is_plausible = buffer.element_size() == 1 and buffer.dtype is not torch.bool
        return is_untouched(buffer) and (not is_plausible or self._versions.get(name) == _state(buffer))

    def _current(self) -> dict[str, torch.Tensor]:
        found = ((name, module._buffers.get(key)) for name, module, key in self._places)
        return {name: buffer for name, buffer in found if buffer is not None}


def _state(buffer: torch.Tensor) -> tuple[int, int]:
    return id(buffer), buffer._version


class Window:
    """The time from `to_empty` to the first use of the model."""

    def __init__(self, runtime: Runtime, buffers: BlankBuffers) -> None:
        self._runtime, self._buffers = runtime, buffers
        buffers.given_memory()
        self._units: dict[nn.Parameter, LiveUnit] = {}
        self._shapes: dict[nn.Parameter, tuple[int, ...]] = {}  # unsharded
        self._classes: dict[nn.Parameter, type[nn.Parameter]] = {}
        self._sites: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        self._open: AbstractContextManager[None] | None = None
        for unit in runtime.units_of(runtime.model):
            for module, attribute in unit.sites:
                shown = module._parameters[attribute]
                assert shown is not None
                self._sites.setdefault(shown, []).append((module, attribute))
            for parameter, shape in unit.unsharded_shapes().items():
                self._units[parameter], self._shapes[parameter] = unit, shape
                if issubclass(type(parameter), nn.Parameter):
                    self._classes[parameter] = type(parameter)
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
                _set_class(parameter, self._classes[parameter])
                _windows.pop(id(parameter), None)
        self._buffers.share_first(self._runtime.comm)
        if len(self._buffers):  # a script may load a state dict first, and compute these afterwards
            self._runtime.unfinished = self._check_buffers

    def _check_buffers(self) -> None:
        self._buffers.check(self._runtime.comm)
        self._runtime.unfinished = None


def _set_class(parameter: Any, to: type[nn.Parameter]) -> None:
    parameter.__class__ = to  # as torch's lazy parameters do
