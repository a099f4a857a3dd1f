"""Where the tensors of a meta-device model get their values: what a Materializer is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.policy import Initializer, ValueSource

Parents = Mapping[nn.Module, Sequence[nn.Module]]  # of each module of a model; the root has none
Lookup = Callable[[nn.Module, nn.Module, Parents], Initializer | None]  # root, module, parents
swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


class ModuleInitializers(ValueSource):
    """What the modules themselves, or the models around them, provide.

    `lookups` find the initializer that an enclosing model has for a module; after them comes the module's own
    `reset_parameters`. Some models initialise tensors from an enclosing module: GPT-2's attention scales down
    the projection inside it, a mixer sets the bias of its step. So initializers run from the leaves up, and
    those of a module without parameters run once everything inside it has values.
    """

    def __init__(self, model: nn.Module, lookups: Sequence[Lookup]) -> None:
        self._model, self._lookups = model, lookups
        self._positions = {module: position for position, module in enumerate(model.modules())}
        self._parents: dict[nn.Module, list[nn.Module]] = {}
        for module in self._positions:
            for child in module.children():
                self._parents.setdefault(child, []).append(module)

    def order(self, model: nn.Module) -> Iterable[nn.Module]:
        return _leaves_first(model, set())

    def initializers(self, module: nn.Module) -> Sequence[Initializer]:
        enclosing, own = self.of_container(module), getattr(module, "reset_parameters", None)
        return [*([] if enclosing is None else [enclosing]), *([own] if callable(own) else [])]

    def of_container(self, module: nn.Module) -> Initializer | None:
        found = (lookup(self._model, module, self._parents) for lookup in self._lookups)
        return next((initializer for initializer in found if initializer is not None), None)

    def containers(self, fresh: Collection[nn.Module]) -> list[nn.Module]:
        """Only where all modules inside are fresh: others may be sharded by now, or have values already."""
        known: dict[nn.Module, bool] = {}
        pending = sorted(fresh, key=self._positions.__getitem__)
        while pending:
            for parent in self._parents.get(pending.pop(), ()):
                if parent not in known:
                    known[parent] = all(m in fresh or _has_meta_buffers_at_most(m) for m in parent.modules())
                    pending += [parent] if known[parent] else []
        return [m for m, is_complete in known.items() if is_complete and m not in fresh]


class GivenFunction(ValueSource):
    """A function of one module. It often begins with `to_empty`, which affects the modules inside as well."""

    reaches_inside = True

    def __init__(self, function: Callable[[nn.Module], Any]) -> None:
        self._function = function

    def initializers(self, module: nn.Module) -> Sequence[Initializer]:
        return [partial(self._function, module)]


class BlankValues(ValueSource):
    """Memory only. It holds NaN and other markers: what nobody initialises is noticed at the first use."""

    leaves_blank = True

    def initializers(self, module: nn.Module) -> Sequence[Initializer]:
        return ()


class FirstRankValues(ValueSource):
    """The values of a model that is on the meta device on some ranks and not on others.

    `prepare` moves the values of this rank aside, and leaves its model on meta. So the model is the same on
    all ranks, memory is given to one unit at a time, and no device holds all of it. `fallback` initialises
    what has no values here, or the module's own `reset_parameters`. With `discard` that is not needed: the
    first rank has values for all, and this rank's do not count.
    """

    reaches_inside = True

    def __init__(self, model: nn.Module, fallback: ValueSource | None, discard: bool) -> None:
        self._model, self._fallback, self._discard = model, fallback, discard
        self._values: dict[int, torch.Tensor] = {}  # by id of the parameter
        self._buffers: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self._twins: list[tuple[nn.Parameter, nn.Parameter]] = []

    def prepare(self) -> None:
        """The parameters stay the same objects."""
        for module in self._model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.is_meta:
                    empty = torch.empty_like(parameter, device="meta")
                    twin = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    swap(parameter, twin)
                    self._twins.append((parameter, twin))
                    self._values[id(parameter)] = twin.data
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    self._buffers[module, name] = buffer
                    module._buffers[name] = torch.empty_like(buffer, device="meta")

    def restore(self) -> None:
        for parameter, twin in reversed(self._twins):
            swap(parameter, twin)
        for (module, name), buffer in self._buffers.items():
            module._buffers[name] = buffer

    def initializers(self, module: nn.Module) -> Sequence[Initializer]:
        return [partial(self._fill, module)]

    def _fill(self, module: nn.Module) -> None:
        if any(value is None for _, value in self._own(module)):
            for initialize in self._missing(module):
                initialize()
        for tensor, value in self._own(module):
            if value is not None:
                tensor.detach().copy_(value)
            elif self._discard:
                tensor.detach().zero_()

    def _missing(self, module: nn.Module) -> Sequence[Initializer]:
        if self._fallback is not None:
            return self._fallback.initializers(module)
        own = getattr(module, "reset_parameters", None)
        return [own] if callable(own) and not self._discard else []

    def _own(self, module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """A module's own tensors, each with its value, if this rank has one."""
        parameters = [(p, self._values.get(id(p))) for p in module._parameters.values() if p is not None]
        buffers = [(b, self._buffers.get((module, n))) for n, b in module._buffers.items() if b is not None]
        return [*parameters, *buffers]


def _leaves_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Each module after all modules inside it."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _leaves_first(child, seen)
        yield module


def _has_meta_buffers_at_most(module: nn.Module) -> bool:
    buffers = [b for b in module._buffers.values() if b is not None]
    return all(p is None for p in module._parameters.values()) and all(b.is_meta for b in buffers)
