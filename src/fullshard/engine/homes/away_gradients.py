"""Gradients that do not rest where their parameters do, are on their way there, or rest in another dtype.

Torch wants `p.grad` on the device of `p`. An AwayGradient is there by name only: it has no memory, and
whatever is computed with it is computed with the values of its gradient shard, wherever these lie. Clipping
does not wait for values that have left for the host: norms were computed on the device before they left, and
factors are kept until an optimizer's step has the values on the device again.

Those that rest as they were computed (`fs.Offload(one_backward=True)`) are fp32 by name and bf16 in memory.
They are read in fp32, from a copy. So aliases of one are AwayGradients as well, and views are refused: what
is written into a view of the copy would be lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map

from fullshard.comm.groups import Comm
from fullshard.engine.cuts import Cut
from fullshard.engine.gradients import (
    HANDLERS,
    GradShard,
    Holder,
    gradients_in,
    name_of,
    plainly,
    refuse,
    reshape,
)
from fullshard.engine.homes.no_memory import WithoutMemory, storages, without_memory
from fullshard.engine.tensors import note_writes_of, written_by
from fullshard.errors import GradientError

Factor = torch.Tensor | float
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_DIVIDES = (torch._foreach_div_, torch.Tensor.div_, torch.Tensor.__itruediv__)
_SCALES = (torch._foreach_mul_, torch.Tensor.mul_, torch.Tensor.__imul__, *_DIVIDES)
_ATEN_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_OTHER_MEMORY = (torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_)
_ALIASES = {
    *(torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__, torch.Tensor.as_subclass),  # type: ignore[attr-defined]
    *(torch.ops.aten.detach, torch.ops.aten.alias, *_ATEN_ALIASES),
}


class Divisor(float):
    """A factor to divide by. Multiplying by its inverse rounds otherwise, where a device divides."""


class Source(Protocol):
    """The gradient shard behind a lane's AwayGradients."""

    on_host: bool  # its values rest in host memory

    def settle(self) -> None:
        """Values are where they rest, and factors are multiplied in, when this returns."""
        ...

    def postpone_factor(self, index: int, factor: Factor) -> bool:
        """Multiply later, if values are on their way. False: nothing was done."""
        ...

    def known_norm(self, index: int) -> torch.Tensor | None:
        """Of this rank's part, on the compute device, if it was computed before the values left."""
        ...

    def in_dtype(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """Values that rest, as the gradient has them: themselves, or a copy in its dtype."""
        ...

    def require_room(self, index: int, place: torch.Tensor, values: torch.Tensor) -> None:
        """Raise if these cannot rest."""
        ...

    def write(self, index: int, place: torch.Tensor, values: torch.Tensor) -> None:
        """User code has written these: known norms are not true any more."""
        ...

    def lend(self) -> None:
        """User code is given plain tensors over these values. What it writes there is not seen: nothing that
        is known of them, or kept for later, would be true."""
        ...


class AwayGradient(WithoutMemory, GradShard):
    source: Source
    parameter: int  # its index in the lane
    values_at_rest: torch.Tensor
    part_at_rest: torch.Tensor
    original: AwayGradient | None = None  # of an alias: as long as it is held, its values are not overwritten
    _factor: tuple[Any, int, torch.Tensor] | None = None  # the last one: object, version, values

    @staticmethod
    def of(
        source: Source,
        index: int,
        values: torch.Tensor,
        like: torch.Tensor,
        comm: Comm,
        part: torch.Tensor | None,
        holder: Holder,
        answers: bool,
        cut: Cut,
    ) -> AwayGradient:
        gradient = without_memory(AwayGradient, values, like.dtype, like.device)
        gradient.comm, gradient.holder, gradient.answers, gradient.cut = comm, holder, answers, cut
        gradient.replicated = part is not None
        gradient.source, gradient.parameter, gradient.values_at_rest = source, index, values
        gradient.part_at_rest = values if part is None else part
        if not answers:
            gradient.part_at_rest = gradient.part_at_rest.reshape(-1)[:0]
        return gradient

    def alias(self) -> AwayGradient:
        """Another object for the same gradient."""
        with plainly():
            made = without_memory(AwayGradient, self, self.dtype, self.device)
        made.__dict__.update(self.__dict__)
        made.original = self
        return made

    def __copy__(self) -> AwayGradient:
        return self.alias()

    @staticmethod
    def refuse_memory(name: str) -> NoReturn:
        raise GradientError(
            f"{name!r} of a gradient that rests on another device, or in another dtype, than its "
            "parameter: it has no memory there",
            "Take p.grad.clone() first to read it; write it with functions of torch.",
        )

    def elements(self) -> torch.Tensor:
        self.source.settle()
        self.source.lend()
        return self.readable()

    @property
    def data(self) -> torch.Tensor:
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Where `__torch_function__` is switched off, torch would give it memory of its own."""
        self.copy_(value)

    def untyped_storage(self) -> torch.UntypedStorage:
        with plainly():
            return _storage(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Not to be written: known norms would not be true any more."""
        if not self.replicated:
            return refuse(torch.Tensor.numpy, (self,), {})
        array = self.elements().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array.astype(dtype or array.dtype, copy=bool(copy))

    def tolist(self) -> Any:
        return self.elements().tolist() if self.replicated else refuse(torch.Tensor.tolist, (self,), {})

    @property
    def part(self) -> torch.Tensor:  # type: ignore[override]
        """On the compute device, for reading: there sums have the bits of a gradient that never left it."""
        self.source.settle()
        return self.source.in_dtype(self.parameter, self.part_at_rest.to(self.comm.device))

    @property
    def known_norm(self) -> torch.Tensor | None:
        return self.source.known_norm(self.parameter)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _SCALES and len(args) == 2 and not kwargs and _is_factor(func, args[1]):
            many = name_of(func).startswith("_foreach_")
            scaled = args[0] if many else [args[0]]
            if not any(isinstance(g, GradShard) and g.holder.postponed for g in scaled):
                near = [g for g in scaled if not isinstance(g, AwayGradient)]
                if near:  # together: in one call for those on the device
                    func(near, args[1])
                factor = _kept(args[1]) if isinstance(args[1], torch.Tensor) else args[1]
                factor = Divisor(factor) if func in _DIVIDES else factor
                for gradient in scaled:
                    if isinstance(gradient, AwayGradient):
                        gradient.scale(factor)
                return None if many else args[0]
        first = args[0] if args else None
        if isinstance(first, AwayGradient) and first.rests_as_computed:
            if func in _ALIASES or (name_of(func) == "__getitem__" and args[1] is ...):
                return first.alias()
            if HANDLERS.get(func) is reshape:
                _refuse_view(func)
        return super().__torch_function__(func, types, args, kwargs)

    def readable(self) -> torch.Tensor:
        """Its values at rest, or a copy of them in its dtype."""
        return self.source.in_dtype(self.parameter, self.values_at_rest)

    @property
    def rests_as_computed(self) -> bool:
        with plainly():
            return self.values_at_rest.dtype != self.dtype

    def scale(self, factor: Factor) -> None:
        values = self.values_at_rest
        if isinstance(factor, torch.Tensor):
            factor = factor.to(values.device if values.is_cuda else self.comm.device)
        if not self.source.postpone_factor(self.parameter, factor):
            self.holder.await_update()
            self.source.settle()
            multiply(values, factor, self.comm.device)
            self.source.write(self.parameter, values, values)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes with the values at rest. What is written in place is the gradient itself."""
        kwargs = kwargs or {}
        found = [g for g in gradients_in(args, kwargs.values()) if isinstance(g, AwayGradient)]
        for gradient in found:
            gradient.source.settle()
        if func is _UNSCALE:
            return _unscale(*args)
        if func.overloadpacket in _OTHER_MEMORY:
            cls.refuse_memory(name_of(func))
        if func in _ATEN_ALIASES and found[0].rests_as_computed:
            return found[0].alias()
        makes_view = func not in _ATEN_ALIASES and any(r.alias_info for r in func._schema.returns)
        changes = func._schema.is_mutable
        if makes_view and not changes and any(g.rests_as_computed for g in found):
            _refuse_view(func)
        if makes_view or func in _ATEN_ALIASES:
            for gradient in found:
                gradient.source.lend()
        values = {id(g): g.readable() for g in found}

        def at_rest(value: Any) -> Any:
            return values[id(value)] if isinstance(value, AwayGradient) else value

        out = func(*tree_map(at_rest, args), **tree_map(at_rest, kwargs))
        if changes:
            written = written_by(func, args, kwargs, AwayGradient)
            _write([(gradient, values[id(gradient)]) for gradient in written])
            note_writes_of(func, args, kwargs)
        return args[0] if changes and args and isinstance(out, torch.Tensor) else out


def _unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """GradScaler's: its numbers are on the compute device, and gradients rest there or on the host."""
    values = [g.readable() if isinstance(g, AwayGradient) else g for g in gradients]
    by_home: dict[tuple[torch.device, bool], list[torch.Tensor]] = {}
    for gradient, value in zip(gradients, values, strict=True):
        on_host = isinstance(gradient, AwayGradient) and gradient.source.on_host
        by_home.setdefault((value.device, on_host), []).append(value)
    for together in by_home.values():
        found = found_inf.to(together[0].device)
        _UNSCALE(together, found, inv_scale.to(together[0].device))
        if found is not found_inf:
            found_inf.copy_(found)
    pairs = zip(gradients, values, strict=True)
    _write([(gradient, value) for gradient, value in pairs if isinstance(gradient, AwayGradient)])


def _write(written: list[tuple[AwayGradient, torch.Tensor]]) -> None:
    """All of them, or none."""
    for gradient, value in written:
        gradient.source.require_room(gradient.parameter, gradient.values_at_rest, value)
    for gradient, value in written:
        gradient.source.write(gradient.parameter, gradient.values_at_rest, value)


def _kept(factor: torch.Tensor) -> torch.Tensor:
    """Its value now, until it is multiplied in. One object for all gradients that it is given to in turn."""
    last = AwayGradient._factor
    if last is None or last[0]() is not factor or last[1] != factor._version:
        last = AwayGradient._factor = weakref.ref(factor), factor._version, factor.detach().clone()
    return last[2]


_storage = storages(AwayGradient.refuse_memory)


def _refuse_view(func: Any) -> Any:
    raise GradientError(
        f"{name_of(func)!r} of a gradient that rests in bf16, as it was computed, would be a view of a copy",
        "Take p.grad.clone() first to read it, or leave out fs.Offload(one_backward=True).",
    )


def multiply(values: torch.Tensor, factor: Factor, device: torch.device) -> None:
    """With the bits that it has on this device, for gradients that never left it."""
    if isinstance(factor, torch.Tensor):
        values.mul_(factor.to(values.device))
    elif type(factor) is not Divisor:
        values.mul_(factor)
    elif device.type == "cuda" and not values.is_cuda:  # there a division by a number is this
        values.mul_(float(torch.tensor(factor, dtype=torch.float64).reciprocal()))
    else:
        values.div_(factor)


def _is_factor(func: Any, value: Any) -> bool:
    if type(value) is torch.Tensor:  # how a division rounds depends on where its divisor is
        return value.dim() == 0 and func not in _DIVIDES
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- clipping

_GROUP = "_group_tensors_by_device_and_dtype"


def _grouped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's groups of gradients by device: AwayGradients are in that of the device that computes."""

    def group(tensors: Any, with_indices: bool = False) -> Any:
        rows: dict[Any, list[tuple[Any, ...]]] = {}
        for (device, dtype), (lists, indices) in original(tensors, True).items():
            for index, *row in zip(indices, *lists, strict=True):
                first = row[0]
                key = (first.comm.device if isinstance(first, AwayGradient) else device, dtype)
                rows.setdefault(key, []).append((index, *row))
        groups = {}
        for key, found in rows.items():
            found.sort(key=lambda row: row[0])  # norms are summed in the order of parameters
            indices, *lists = map(list, zip(*found, strict=True))
            groups[key] = (lists, indices if with_indices else [])
        return groups

    return group


def watch_clipping() -> None:
    """From now on `clip_grad_norm_` leaves its factor on the device: moving it to the host would wait."""
    original = getattr(clip_grad, _GROUP, None)
    if original is not None and original.__module__ != __name__:
        setattr(clip_grad, _GROUP, _grouped(original))


# Torch then asks for all norms in one call, and multiplies by the factor in another.
_supported = getattr(_foreach_utils, "_foreach_supported_types", None)
if isinstance(_supported, list) and AwayGradient not in _supported:
    _supported.append(AwayGradient)
