"""Meta-device models: values unit by unit, so that no rank ever holds the whole.

Every tensor gets memory filled with a mark, the module's own initializer runs, and what still shows
the mark was not initialised: an error lists it. A non-persistent buffer that only `__init__` computes
(a rotary table, a mask) is found that way instead of being silently garbage.

Some models initialise tensors from an enclosing module: GPT-2's attention scales down the projection inside
it, a mixer sets the bias of its step. So initializers run from the leaves up, and a module without tensors of
its own has its initializer run, too, once everything inside it has values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard import integrations
from fullshard.errors import Uninitialised
from fullshard.plan.tensor_parallel import local_of, resting, spec_of

_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
_NEITHER = 0xFF  # a byte that is no truth value: the mark of a bool


class Materializer:
    """Gives meta tensors memory and values, and can take everything back."""

    def __init__(
        self, model: nn.Module, device: torch.device, initialize: Callable[[nn.Module], Any] | None
    ) -> None:
        self._model, self._device, self._given = model, device, initialize
        self._names = {module: name for name, module in model.named_modules()}
        # A given function often begins with `to_empty`, which takes modules inside along: they come later.
        in_order = _leaves_first(model, set()) if initialize is None else self._names
        self._places = {module: place for place, module in enumerate(in_order)}
        self._parents: dict[nn.Module, list[nn.Module]] = {}
        for module in self._names:
            for child in module.children():
                self._parents.setdefault(child, []).append(module)
        self._twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._done: set[int] = set()
        self._made: set[int] = set()
        self._set: set[int] = set()  # parameters that one of their modules has initialised
        self._refuse_hopeless()

    @property
    def needed(self) -> bool:
        return any(t.is_meta for m in self._model.modules() for t in _direct(m))

    def _refuse_hopeless(self) -> None:
        """Before anything changes: modules that nothing here can initialise."""
        hopeless = [
            f"{self._names[m] or type(self._model).__name__}.{name}"
            for m in self._model.modules()
            if not self._initializers(m)
            for name, t in _named_direct(m)
            if t.is_meta
        ]
        if hopeless:
            raise _uninitialised(hopeless)

    def _initializers(self, module: nn.Module) -> list[Callable[[], Any]]:
        if self._given is not None:
            given = self._given
            return [lambda: given(module)]
        of_model = self._of_model(module)
        found = [] if of_model is None else [of_model]
        own = getattr(module, "reset_parameters", None)
        if callable(own):
            found.append(own)
        return found

    def _of_model(self, module: nn.Module) -> Callable[[], Any] | None:
        """The initializer that a model library has for a module of its models."""
        return integrations.initializer_of(self._model, module, self._parents)

    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Memory and values for these modules' own tensors."""
        fresh = {m: None for m in modules if id(m) not in self._done and any(t.is_meta for t in _direct(m))}
        around = [] if self._given is not None else self._around(fresh)
        fresh |= {m: None for outer in around for m in outer.modules() if _direct(m)}
        self._done.update(map(id, fresh))
        for module in fresh:
            self._give_memory(module)
        for module in sorted({*fresh, *around}, key=self._places.__getitem__):
            if module in fresh:
                with self._shown_alone(module, fresh):
                    self._initialize(module)
            elif (of_model := self._of_model(module)) is not None:
                with torch.no_grad():
                    of_model()
        missing = [
            f"{self._names[module]}.{name}".lstrip(".")
            for module in fresh
            for name, t in _named_direct(module)
            if _shows_mark(t)
        ]
        if missing:
            raise _uninitialised(missing)

    def _initialize(self, module: nn.Module) -> None:
        """A tied parameter keeps what its first module gave it, and any what it had before it came here."""
        own = [p for p in module._parameters.values() if p is not None]
        kept = [(p, p.detach().clone()) for p in own if self._has_value(p)]
        for initialize in self._initializers(module):
            with torch.no_grad():
                initialize()
            if not any(map(_shows_mark, _direct(module))):
                break
        for parameter, value in kept:
            parameter.detach().copy_(value)
        self._set.update(map(id, own))

    @contextmanager
    def _shown_alone(self, module: nn.Module, fresh: Container[nn.Module]) -> Iterator[None]:
        """A given function may go into the modules inside. What has values there looks as on meta, and so
        does what is not given memory yet.

        Some of it is at rest by now, and what is written there would be taken for values.
        """
        inside = [m for m in module.modules() if m is not module] if self._given is not None else []
        held: list[tuple[nn.Module, dict[str, Any]]] = [
            (m, own) for m in inside for own in (m._parameters, m._buffers)
        ]
        hidden = [
            (own, name, tensor)
            for m, own in held
            for name, tensor in own.items()
            if tensor is not None and (m not in fresh or self._has_value(tensor))
        ]
        originals = {id(parameter): twin for parameter, twin in self._twins} if hidden else {}
        for own, name, tensor in hidden:
            own[name] = _on_meta(originals.get(id(tensor), tensor))
        try:
            yield
        finally:
            for own, name, tensor in hidden:
                own[name] = tensor

    def _has_value(self, tensor: torch.Tensor) -> bool:
        """Of a parameter: its turn was before, in a module that it is tied to, or it never was on meta."""
        return isinstance(tensor, nn.Parameter) and (id(tensor) in self._set or not self.made(tensor))

    def _around(self, fresh: Container[nn.Module]) -> list[nn.Module]:
        """Modules that have no parameters themselves, and in them those of fresh ones alone.

        Where others lie too, they may be at rest by now, or have values that the user has put there.
        """
        known: dict[nn.Module, bool] = {}
        waiting = [m for m in self._names if m in fresh]
        while waiting:
            for parent in self._parents.get(waiting.pop(), ()):
                if parent not in known:
                    known[parent] = all(m in fresh or _has_unset_buffers_at_most(m) for m in parent.modules())
                    waiting += [parent] if known[parent] else []
        return [m for m, is_whole in known.items() if is_whole and m not in fresh]

    def _give_memory(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                _swap(parameter, twin := self._twin(parameter))  # the user's own object, now with memory
                self._twins.append((parameter, twin))
                self._made.add(id(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                self._buffers.append((module, name, buffer))
                spec, marked = spec_of(buffer), _marked(local_of(buffer), self._device)
                module._buffers[name] = marked if spec is None else spec.wrap(marked)

    def _twin(self, parameter: nn.Parameter) -> Any:
        spec = spec_of(parameter)
        if spec is None:
            return nn.Parameter(_marked(parameter, self._device), requires_grad=parameter.requires_grad)
        # Whole, and plain: initializers draw the numbers that they would draw in one process, and the part
        # is cut from them. On the DTensor, ranks with one seed would fill all parts alike.
        whole = torch.empty(spec.shape, dtype=parameter.dtype, device="meta")
        return resting(_marked(whole, self._device), parameter.requires_grad, spec)

    def made(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._made

    def undo(self) -> None:
        for parameter, twin in reversed(self._twins):
            _swap(parameter, twin)
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer


def _on_meta(tensor: Any) -> Any:
    empty = torch.empty_like(local_of(tensor), device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _leaves_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Each module after all that lies in it."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _leaves_first(child, seen)
        yield module


def _named_direct(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    both = [*module._parameters.items(), *module._buffers.items()]
    return [(name, t) for name, t in both if t is not None]


def _has_unset_buffers_at_most(module: nn.Module) -> bool:
    return all(p is None for p in module._parameters.values()) and all(t.is_meta for t in _direct(module))


def _direct(module: nn.Module) -> list[torch.Tensor]:
    return [t for _, t in _named_direct(module)]


def _marked(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = torch.empty_like(like, device=device, requires_grad=False)
    if value.is_floating_point() or value.is_complex():
        return value.fill_(float("nan"))
    if value.dtype is torch.bool:
        value.view(torch.uint8).fill_(_NEITHER)
        return value
    return value.fill_(torch.iinfo(value.dtype).max)


def _shows_mark(value: torch.Tensor) -> bool:
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


def _uninitialised(names: list[str]) -> Uninitialised:
    return Uninitialised(
        f"the model is on the meta device and nothing initialises {', '.join(repr(n) for n in names)}",
        "Give these modules a reset_parameters() that sets their parameters and buffers, pass "
        "materialize=function_of_a_module, or build the model on a real device.",
    )
