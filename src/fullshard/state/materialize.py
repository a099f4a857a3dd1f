"""Meta-device models: memory and values unit by unit, so that no rank ever holds the entire model.

Every tensor gets memory that is filled with a marker, a ValueSource sets it, and what still holds the marker
was not initialised: an error lists it. A non-persistent buffer that only `__init__` computes (a rotary table,
a mask) is found that way instead of silently being garbage.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.errors import Uninitialised
from fullshard.plan.tensor_parallel import local_of, spec_of
from fullshard.policy import ValueSource
from fullshard.state.value_sources import swap

_NEITHER = 0xFF  # a byte that is no truth value: the marker of a bool


class Materializer:
    """Gives meta tensors memory and values, and can undo everything."""

    def __init__(self, model: nn.Module, device: torch.device, source: ValueSource) -> None:
        self._model, self._device, self._source = model, device, source
        self._names = {module: name for name, module in model.named_modules()}
        self._places = {module: place for place, module in enumerate(source.order(model))}
        self._on_meta = [m for m in self._names if any(t.is_meta for t in _direct(m))]  # last one first
        self._on_meta.reverse()
        self._twins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id of the first
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._done: set[int] = set()
        self._made: set[int] = set()
        self._set: set[int] = set()  # parameters that one of their modules has initialised
        self._refuse_hopeless()

    @property
    def needed(self) -> bool:
        """Whether any tensor is still on meta. Modules that have values are not looked at again."""
        while self._on_meta and not any(t.is_meta for t in _direct(self._on_meta[-1])):
            self._on_meta.pop()
        return bool(self._on_meta)

    def _refuse_hopeless(self) -> None:
        """Before anything changes: modules that nothing can initialise."""
        hopeless = [
            f"{self._names[m] or type(self._model).__name__}.{name}"
            for m in self._model.modules()
            if not self._source.leaves_blank and not self._source.initializers(m)
            for name, t in _named_direct(m)
            if t.is_meta
        ]
        if hopeless:
            raise _uninitialised(hopeless)

    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Memory and values for these modules' own tensors."""
        fresh = {m: None for m in modules if id(m) not in self._done and any(t.is_meta for t in _direct(m))}
        containers = self._source.containers(fresh)
        fresh |= {m: None for outer in containers for m in outer.modules() if _direct(m)}
        self._done.update(map(id, fresh))
        for module in fresh:
            self._give_memory(module)
        for module in sorted({*fresh, *containers}, key=self._places.__getitem__):
            if module in fresh:
                with self._others_on_meta(module, fresh):
                    self._initialize(module)
            elif (initialize := self._source.of_container(module)) is not None:
                with torch.no_grad():
                    initialize()
        missing = [
            f"{self._names[module]}.{name}".lstrip(".")
            for module in fresh
            for name, t in _named_direct(module)
            if not self._source.leaves_blank and _holds_marker(t)
        ]
        if missing:
            raise _uninitialised(missing)

    def _initialize(self, module: nn.Module) -> None:
        """A tied parameter keeps what its first module gave it, and any one what it had before."""
        own = [p for p in module._parameters.values() if p is not None]
        kept = [(p, p.detach().clone()) for p in own if self._has_value(p)]
        for initialize in self._source.initializers(module):
            with torch.no_grad():
                initialize()
            if not any(map(_holds_marker, _direct(module))):
                break
        for parameter, value in kept:
            parameter.detach().copy_(value)
        self._set.update(map(id, own))

    @contextmanager
    def _others_on_meta(self, module: nn.Module, fresh: Container[nn.Module]) -> Iterator[None]:
        """For a source that reaches into the modules inside: what has values there looks as on meta, and so
        does what is not given memory yet.

        Some of it is sharded by now, and what is written there would be taken for values.
        """
        inside = [m for m in module.modules() if m is not module] if self._source.reaches_inside else []
        held: list[tuple[nn.Module, dict[str, Any]]] = [
            (m, own) for m in inside for own in (m._parameters, m._buffers)
        ]
        hidden = [
            (own, name, tensor)
            for m, own in held
            for name, tensor in own.items()
            if tensor is not None and (m not in fresh or self._has_value(tensor))
        ]
        for own, name, tensor in hidden:
            _, original = self._twins.get(id(tensor), (None, tensor))
            own[name] = on_meta(original)
        try:
            yield
        finally:
            for own, name, tensor in hidden:
                own[name] = tensor

    def _has_value(self, tensor: torch.Tensor) -> bool:
        """Of a parameter: a module that it is tied to was initialised before, or it never was on meta."""
        return isinstance(tensor, nn.Parameter) and (id(tensor) in self._set or not self.made(tensor))

    def _give_memory(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                swap(parameter, twin := self._twin(parameter))  # the user's own object, now with memory
                self._twins[id(parameter)] = parameter, twin
                self._made.add(id(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                self._buffers.append((module, name, buffer))
                spec, local = spec_of(buffer), local_of(buffer)
                value = self._memory(local, is_marked=True)
                module._buffers[name] = value if spec is None else spec.wrap(value)

    def _twin(self, parameter: nn.Parameter) -> Any:
        spec = spec_of(parameter)
        is_marked = not self._source.leaves_blank or parameter.is_floating_point()
        if spec is None:
            return nn.Parameter(self._memory(parameter, is_marked), requires_grad=parameter.requires_grad)
        from fullshard.engine.dtensors import sharded_parameter

        # Of the global shape, and plain: initializers draw the numbers that they would draw in one process,
        # and the part is cut from them. On the DTensor, ranks with one seed would fill all parts alike.
        empty = torch.empty(spec.shape, dtype=parameter.dtype, device="meta")
        return sharded_parameter(self._memory(empty, is_marked), parameter.requires_grad, spec)

    def _memory(self, like: torch.Tensor, is_marked: bool) -> torch.Tensor:
        value = torch.empty_like(like, device=self._device, requires_grad=False)
        return _mark(value) if is_marked else value.zero_()

    def made(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._made

    def undo(self) -> None:
        for parameter, twin in reversed(self._twins.values()):
            swap(parameter, twin)
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer


def on_meta(tensor: Any) -> Any:
    """A meta tensor like this one; for a parameter a parameter."""
    empty = torch.empty_like(local_of(tensor), device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _named_direct(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    both = [*module._parameters.items(), *module._buffers.items()]
    return [(name, t) for name, t in both if t is not None]


def _direct(module: nn.Module) -> list[torch.Tensor]:
    return [t for _, t in _named_direct(module)]


def _mark(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point() or value.is_complex():
        return value.fill_(float("nan"))
    if value.dtype is torch.bool:
        value.view(torch.uint8).fill_(_NEITHER)
        return value
    return value.fill_(torch.iinfo(value.dtype).max)


def _holds_marker(value: torch.Tensor) -> bool:
    value = local_of(value)
    if value.is_meta:
        return True
    if not value.numel():
        return False
    if value.dtype is torch.bool:
        return bool((value.view(torch.uint8) == _NEITHER).any())
    if value.is_floating_point() or value.is_complex():
        return bool(torch.isnan(value).any())
    return bool((value == torch.iinfo(value.dtype).max).any())


def is_untouched(value: torch.Tensor) -> bool:
    """Whether every element still is the marker that it got with its memory."""
    local = local_of(value)
    if local.is_meta or not local.numel():
        return local.is_meta
    if local.dtype is torch.bool:
        return bool((local.view(torch.uint8) == _NEITHER).all())
    if local.is_floating_point() or local.is_complex():
        return bool(torch.isnan(local).all())
    return bool((local == torch.iinfo(local.dtype).max).all())


def _uninitialised(names: list[str]) -> Uninitialised:
    return Uninitialised(
        f"the model is on the meta device and nothing initialises {', '.join(repr(n) for n in names)}",
        "Give these modules a reset_parameters() that sets their parameters and buffers, pass "
        "materialize=function_of_a_module, or build the model on a real device.",
    )
