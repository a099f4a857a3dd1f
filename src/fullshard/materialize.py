"""Meta-device models: values unit by unit, so that no rank ever holds the whole.

Every tensor gets memory filled with a mark, the module's own initializer runs, and what still shows
the mark was not initialised: an error lists it. A non-persistent buffer that only `__init__` computes
(a rotary table, a mask) is found that way instead of being silently garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fullshard.errors import ModelError
from fullshard.tensor_parallel import local_of, resting, spec_of

_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


class Materializer:
    """Gives meta tensors memory and values, and can take everything back."""

    def __init__(
        self, model: nn.Module, device: torch.device, initialize: Callable[[nn.Module], Any] | None
    ) -> None:
        self._model, self._device, self._given = model, device, initialize
        self._names = {module: name for name, module in model.named_modules()}
        self._twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._done: set[int] = set()
        self._made: set[int] = set()
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
        found: list[Callable[[], Any]] = []
        of_model = getattr(self._model, "_init_weights", None)  # Hugging Face
        if callable(of_model):
            found.append(lambda: of_model(module))
        own = getattr(module, "reset_parameters", None)
        if callable(own):
            found.append(own)
        return found

    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Memory and values for these modules' own tensors."""
        missing: list[str] = []
        for module in modules:
            if id(module) in self._done or not any(t.is_meta for t in _direct(module)):
                continue
            self._done.add(id(module))
            self._give_memory(module)
            marked = [name for name, _ in _named_direct(module)]
            for initialize in self._initializers(module):
                with torch.no_grad():
                    initialize()
                marked = [name for name, t in _named_direct(module) if _shows_mark(t)]
                if not marked:
                    break
            missing += [f"{self._names[module]}.{name}".lstrip(".") for name in marked]
        if missing:
            raise _uninitialised(missing)

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


def _named_direct(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    both = [*module._parameters.items(), *module._buffers.items()]
    return [(name, t) for name, t in both if t is not None]


def _direct(module: nn.Module) -> list[torch.Tensor]:
    return [t for _, t in _named_direct(module)]


def _marked(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = torch.empty_like(like, device=device, requires_grad=False)
    if value.is_floating_point() or value.is_complex():
        return value.fill_(float("nan"))
    if value.dtype is torch.bool:
        return value.fill_(False)
    return value.fill_(torch.iinfo(value.dtype).max)


def _shows_mark(value: torch.Tensor) -> bool:
    value = local_of(value)
    if value.is_meta:
        return True
    if value.dtype is torch.bool or not value.numel():
        return False
    if value.is_floating_point() or value.is_complex():
        return bool(torch.isnan(value).any())
    return bool((value == torch.iinfo(value.dtype).max).any())


def _uninitialised(names: list[str]) -> ModelError:
    return ModelError(
        f"the model is on the meta device and nothing initialises {', '.join(repr(n) for n in names)}",
        "Give these modules a reset_parameters() that sets their parameters and buffers, pass "
        "materialize=function_of_a_module, or build the model on a real device.",
    )
