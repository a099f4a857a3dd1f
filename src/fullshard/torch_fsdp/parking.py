"""A model that only rank 0 has read, the others being on the meta device, with `sync_module_states=True`.

The engine is shown a meta-device model. It gives memory to one unit at a time, and asks for values: they are
copied from where they were parked. So no device holds the whole model, and no host but the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.comm import control

_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


class Parked:
    """What was taken out of a model, and how it comes back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values: dict[int, torch.Tensor] = {}  # by id of the parameter
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}  # by module and name
        self._twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._given: Callable[[nn.Module], Any] | None = None
        self._zeros = False  # this rank's values do not count
        self.materialize: Callable[[nn.Module], Any] | None = None

    def place(self, grid: torch.Tensor | None, initialize: Callable[[nn.Module], Any] | None) -> None:
        """Make the model ready for the engine: as it is, or on meta with values to come.

        `grid` is the ranks of the model, if the first one's values go to those that are on meta.
        """
        self._given = self.materialize = initialize
        if grid is None:
            return
        on_meta = any(t.is_meta for t in (*self._module.parameters(), *self._module.buffers()))
        flags = control.all_gather_object_first(on_meta, grid)
        if any(flags) and not all(flags):
            self._zeros = on_meta and not flags[0]
            self._park()

    def _park(self) -> None:
        """The model as if built on meta; the parameters stay the objects they are."""
        for module in self._module.modules():
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.is_meta:
                    empty = torch.empty_like(parameter, device="meta")
                    twin = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    _swap(parameter, twin)
                    self._twins.append((parameter, twin))
                    self._values[id(parameter)] = twin.data
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    self._buffers[id(module), name] = buffer
                    module._buffers[name] = torch.empty_like(buffer, device="meta")
        self.materialize = self._fill

    def _fill(self, module: nn.Module) -> None:
        """The values of one module's own tensors; the engine has given them memory."""
        if any(value is None for _, value in self._own(module)):
            if self._given is not None:
                self._given(module)  # may give new memory itself, as torch asks of it
            elif not self._zeros and callable(getattr(module, "reset_parameters", None)):
                module.reset_parameters()  # type: ignore[operator]
        for tensor, value in self._own(module):
            if value is not None:
                tensor.detach().copy_(value)
            elif self._zeros:  # what memory happened to hold could be taken for a missing value
                tensor.detach().zero_()

    def _own(self, module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """A module's own tensors, each with what was parked of it."""
        found = [(p, self._values.get(id(p))) for p in module._parameters.values() if p is not None]
        buffers = ((n, b) for n, b in module._buffers.items() if b is not None)
        return [*found, *((b, self._buffers.get((id(module), n))) for n, b in buffers)]

    def restore(self) -> None:
        for parameter, twin in reversed(self._twins):
            _swap(parameter, twin)
        for module in self._module.modules():
            for name in module._buffers:
                if (id(module), name) in self._buffers:
                    module._buffers[name] = self._buffers[id(module), name]


def initialise_from_meta(module: nn.Module, given: Callable[[nn.Module], Any]) -> None:
    """Run a `param_init_fn` on one module, to whose own tensors the engine has given memory.

    torch shows it a module on meta, and many look for that before they call `to_empty`, which makes new
    tensors. So it is shown one, and what it made is copied. One that fills what is there, and so leaves
    something on meta, is asked again with the memory itself.
    """
    held = [(kept, name, t) for kept in _kept(module) for name, t in kept.items() if t is not None]
    for kept, name, tensor in held:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = kept is module._parameters
        kept[name] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    if not _made(module, given, held):
        _made(module, given, held)


def _made(
    module: nn.Module, given: Callable[[nn.Module], Any], held: list[tuple[dict[str, Any], str, torch.Tensor]]
) -> bool:
    """Whether the function left nothing on meta; what it made is copied to where the engine looks."""
    try:
        given(module)
        made = [kept.get(name) for kept, name, _ in held]
    finally:
        for kept, name, tensor in held:
            kept[name] = tensor
    for value, (_, _, tensor) in zip(made, held, strict=True):
        if value is not None and not value.is_meta and value is not tensor:
            tensor.detach().copy_(value.detach())
    return not any(value is None or value.is_meta for value in made)


def _kept(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers
