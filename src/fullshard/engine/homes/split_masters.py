"""Masters in host memory as their bf16 values and what restores them, so that a step moves 10 bytes, not 12.

    plain    host: fp32 master 4               compute shard 2 (device or host)
    split    host: remainder 2 and a bit       compute shard 2 (device or host)      master = join(both)

A lane's `rest` is then a SplitValues, and each of its parameters a SplitParameter: a tensor of fp32 values
that has no memory of its own. Whatever reads it computes with the restored masters, and what is written in
place, into a view of any kind too, is split again and is in the compute shard at once. Views share these
values as those of plain tensors do. So nobody reads a part of a value: what needs memory (numpy, a kernel's
pointer) is given a copy, or is refused.

Where memory is needed, in an optimizer's step and inside fs.full, a parameter shows plain tensors (`show`).
It stays the same object: contents and class are exchanged with those of a spare tensor, because `p.data =`
would keep the key by which torch dispatches here. What is at rest again is a SplitParameter again.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fullshard.engine.homes.no_memory import WithoutMemory, storages, without_memory
from fullshard.engine.homes.remainders import PER_BYTE, bitmap_bytes, join, split
from fullshard.engine.homes.transfers import Mark, Transfers
from fullshard.engine.tensors import note_writes_of, written_by
from fullshard.errors import AtRestError, StateError

_AT_ONCE = 2**26  # elements that are brought to the compute device at the same time
_OVERWRITES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)
_LIKE = {
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like"),
    *("ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
}
_OTHER_MEMORY = {"set_", "resize_", "resize_as_", "set_data"}
_data: Any = torch.Tensor.data  # torch's own descriptor
_CLASS = object.__dict__["__class__"]  # what `__class__` is everywhere else
_VALUES, _VIEW = "split_values", "_fullshard_view"


class Halves:
    """The flat values of a lane, in two parts."""

    def __init__(
        self, compute: torch.Tensor, low: torch.Tensor, ties: torch.Tensor, transfers: Transfers
    ) -> None:
        self.compute, self.low, self.ties, self._transfers = compute, low, ties, transfers

    def __len__(self) -> int:
        return len(self.low)

    @functools.cached_property
    def storage(self) -> torch.UntypedStorage:
        """By name only."""
        return _storage(SplitValues.all_of(self))

    def _parts(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Elements from `start`, the first of a byte of the bitmap, to `stop`."""
        bitmap = self.ties[start // PER_BYTE : bitmap_bytes(stop)]
        return self.compute.detach()[start:stop], self.low[start:stop], bitmap

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Masters, in ordinary host memory."""
        self._transfers.settle()
        first = start // PER_BYTE * PER_BYTE
        compute, low, ties = self._parts(first, stop)
        masters = torch.empty(stop - first, dtype=torch.float32, device=low.device)
        join(compute.to(low.device), low, ties, masters)
        return masters[start - first :]

    def write(self, start: int, masters: torch.Tensor) -> None:
        """These masters, from `start` on."""
        self._transfers.synchronize()  # what is on its way may still be read from here
        stop = start + len(masters)
        first, last = start // PER_BYTE * PER_BYTE, min(len(self), -(-stop // PER_BYTE) * PER_BYTE)
        if (first, last) != (start, stop):  # elements that share a byte of the bitmap stay
            masters = torch.cat([self.read(first, start), masters, self.read(stop, last)])
        compute, low, ties = self._parts(first, last)
        cast = masters.to(compute.dtype)
        split(masters, cast, low, ties)
        compute.copy_(cast)

    def stage(self, device: torch.device, after: Mark | None = None) -> torch.Tensor:
        """All masters, on the compute device. They are restored there."""
        staged = torch.empty(len(self), dtype=torch.float32, device=device)
        for start in range(0, len(self), _AT_ONCE):
            stop = min(len(self), start + _AT_ONCE)
            parts = self._parts(start, stop)
            compute, low, ties = here = [torch.empty_like(part, device=device) for part in parts]
            with self._transfers.up(self._transfers.now(), after):
                for place, part in zip(here, parts, strict=True):
                    place.copy_(part, non_blocking=True)
                copied = self._transfers.mark_up()
            copied.wait()
            join(compute, low, ties, staged[start:stop])
        return staged

    def put_back(self, staged: torch.Tensor) -> None:
        """The inverse: all masters, from the compute device."""
        self._transfers.synchronize()
        for start in range(0, len(self), _AT_ONCE):
            stop = min(len(self), start + _AT_ONCE)
            masters = staged[start:stop].float()
            compute, low, ties = self._parts(start, stop)
            cast = masters.to(compute.dtype)
            here = [torch.empty_like(part, device=masters.device) for part in (low, ties)]
            split(masters, cast, *here)
            for place, part in zip((compute, low, ties), (cast, *here), strict=True):
                place.copy_(part)


class SplitValues(WithoutMemory, torch.Tensor):
    split_values: Halves

    @staticmethod
    def all_of(halves: Halves) -> SplitValues:
        values: SplitValues = _like(SplitValues, halves, torch.empty(len(halves), device="meta"))
        return values

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def refuse_memory(name: str) -> NoReturn:
        raise _refusal(name, "has no memory of its own")

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of all values of the lane: views of the same values have the same one."""
        return self.split_values.storage

    def is_pinned(self, device: Any = None) -> bool:
        return self.split_values.low.is_pinned()

    def tolist(self) -> Any:
        return self.restored().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy, which cannot be written."""
        array = self.restored().requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array.astype(dtype or array.dtype, copy=bool(copy))

    def restored(self) -> torch.Tensor:
        """A plain tensor with its values, on the host."""
        return _Range(self.split_values, *self.range).of(self)

    @property
    def range(self) -> tuple[int, int]:
        """Of the elements of its halves, those that it is within."""
        start = int(self.storage_offset())
        if not self.numel():
            return start, start
        return start, start + 1 + sum(
            (n - 1) * int(s) for n, s in zip(self.shape, self.stride(), strict=True)
        )

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Any view, by its place in a flat tensor of the same size."""
        flat = torch.empty(len(self.split_values), dtype=self.dtype, device="meta")
        like = flat.as_strided(self.shape, self.stride(), self.storage_offset())

        def wrapped(view: Any) -> Any:
            if not isinstance(view, torch.Tensor):
                return view
            if view.dtype != self.dtype or view.is_neg():
                raise _refusal(func._schema.name, "shows its bits as another dtype")
            return _like(SplitValues, self.split_values, view)

        return tree_map(wrapped, func(like, *args[1:], **kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func) and isinstance(args[0], SplitValues):
            return args[0]._view(func, args, kwargs)
        library, name = func._schema.name.split("::")
        if name in _OTHER_MEMORY:
            raise _refusal(func._schema.name, "gives it other memory")
        if library == "c10d":  # whatever these write is not in their schema, and may come later
            raise _refusal(func._schema.name, "is written by other ranks")
        if name in _LIKE:
            return func(*tree_map(_unread, args), **tree_map(_unread, kwargs))
        ranges = _ranges(_split_in(args, kwargs), args[0] if func in _OVERWRITES else None)

        def plain(value: Any) -> Any:
            return ranges[id(value)].of(value) if isinstance(value, SplitValues) else value

        # An operator of a library need not declare what it writes.
        before = {} if library == "aten" else {each: each.copy() for each in set(ranges.values())}
        out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        written = {id(plain(value)): value for value in written_by(func, args, kwargs, SplitValues)}
        for value in written.values():
            if plain(value).stride() != value.stride() or plain(value).shape != value.shape:
                raise _refusal(func._schema.name, "changes its shape or its order in place")
        changed = {each for each, known in before.items() if each.differs(known)}
        for each in changed.union(ranges[id(value)] for value in written.values()):
            each.write()
        note_writes_of(func, args, kwargs)
        return tree_map(lambda value: written.get(id(value), value), out) if written else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.restored().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.restored().clone()
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.restored())


class SplitParameter(SplitValues, nn.Parameter):
    """A parameter at rest whose master is in two parts."""

    def module_load(self, other: torch.Tensor, assign: bool = False) -> Any:
        """Where torch exchanges the contents of parameters for what it has loaded: for plain ones."""
        return restored(super().module_load(other, assign))  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(restored(self))


class _Range:
    """Elements as a plain flat tensor, and the tensors within them as views of it."""

    def __init__(self, halves: Halves, start: int, stop: int, is_read: bool = True) -> None:
        self.halves, self.start, self.stop = halves, start, stop
        self.is_read = is_read  # before it is written
        self._flat: torch.Tensor | None = None
        self._views: dict[int, torch.Tensor] = {}

    def of(self, values: SplitValues) -> torch.Tensor:
        view = self._views.get(id(values))
        if view is None:
            flat = self._all()
            place = flat.storage_offset() + values.range[0] - self.start
            view = self._views[id(values)] = flat.as_strided(values.shape, values.stride(), place)
        return view

    def _all(self) -> torch.Tensor:
        if self._flat is None:
            if self.is_read:
                self._flat = self.halves.read(self.start, self.stop)
            else:
                self._flat = torch.empty(self.stop - self.start, dtype=torch.float32)
        return self._flat

    def copy(self) -> torch.Tensor:
        return self._all().clone()

    def differs(self, known: torch.Tensor) -> bool:
        return not torch.equal(known.view(torch.int32), self._all().view(torch.int32))

    def write(self) -> None:
        self.halves.write(self.start, self._all())


def _ranges(values: list[SplitValues], overwritten: Any) -> dict[int, _Range]:
    """By tensor. Those that share elements are in the same one, as views of the same memory."""
    ranges: dict[int, _Range] = {}
    last: _Range | None = None
    for value in sorted(values, key=lambda value: (id(value.split_values), *value.range)):
        start, stop = value.range
        if last is not None and last.halves is value.split_values and start < last.stop:
            last.stop, last.is_read = max(stop, last.stop), True
        else:
            is_read = value is not overwritten or not _covers(value, stop - start)
            last = _Range(value.split_values, start, stop, is_read)
        ranges[id(value)] = last
    return ranges


def _covers(values: SplitValues, count: int) -> bool:
    """Whether it has each of so many neighbours in memory."""
    like = torch.empty_strided(values.shape, values.stride(), device="meta")
    return count == values.numel() and bool(torch.ops.aten.is_non_overlapping_and_dense.default(like))


def _split_in(args: Any, kwargs: Any) -> list[SplitValues]:
    found: list[SplitValues] = []
    tree_map(lambda value: found.append(value) if isinstance(value, SplitValues) else None, (args, kwargs))
    return found


def _unread(value: Any) -> Any:
    """Of the same shape, not initialized."""
    if not isinstance(value, SplitValues):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def restored(value: Any) -> Any:
    """A plain tensor or parameter with the values of split masters, and anything else as it is."""
    if isinstance(value, SplitParameter):
        return nn.Parameter(value.restored(), value.requires_grad)
    return value.restored() if isinstance(value, SplitValues) else value


def address(values: torch.Tensor) -> int:
    """Of memory, that of split values too: the same for the same values."""
    if not isinstance(values, SplitValues):
        return values.data_ptr()
    return values.split_values.low.data_ptr() + 2 * values.range[0] if values.numel() else 0


def show(parameter: torch.Tensor, values: torch.Tensor) -> bool:
    """`parameter.data = values`, where one of them is split. False: neither is, and nothing was done."""
    is_split = isinstance(parameter, SplitParameter)
    if not (is_split or isinstance(values, SplitValues)):
        return False
    if values is parameter:
        return True
    gradient, shape = parameter.grad, parameter.shape
    if gradient is not None:
        parameter.grad = None
    if is_split:
        _exchange(parameter, parameter.__dict__[_VIEW])
        if gradient is not None and not isinstance(values, SplitValues):  # which must fit when it is set
            _data.__set__(parameter, torch.zeros((), dtype=parameter.dtype).expand(shape))
    if isinstance(values, SplitValues):
        _exchange(parameter, values)
    if gradient is not None:
        parameter.grad = gradient
    if not isinstance(values, SplitValues):
        _data.__set__(parameter, values)
    return True


def _exchange(parameter: torch.Tensor, view: SplitValues) -> None:
    """Contents and class of the parameter and of the view's spare tensor."""
    spare = view.__dict__.get("spare")
    if spare is None:
        spare = _like(SplitParameter, view.split_values, view)
    if spare.requires_grad != parameter.requires_grad:
        spare.requires_grad_(parameter.requires_grad)
    hooks, version = parameter._post_accumulate_grad_hooks, parameter._version
    _swap(parameter, spare)
    torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))  # nothing was written
    if isinstance(parameter, SplitParameter):
        _CLASS.__set__(parameter, type(parameter).__bases__[1])
        _CLASS.__set__(spare, SplitParameter)
        spare.__dict__[_VALUES] = parameter.__dict__.pop(_VALUES)
        del parameter.__dict__[_VIEW]
    else:
        _CLASS.__set__(parameter, _split_kind(type(parameter)))
        _CLASS.__set__(spare, nn.Parameter)
        parameter.__dict__[_VALUES] = spare.__dict__.pop(_VALUES)
        parameter.__dict__[_VIEW] = view
        _data.__set__(spare, _instead_of(spare))  # not to keep what the parameter has shown
    view.__dict__["spare"] = spare
    # Hooks are kept by the object, but autograd has them registered for the other contents.
    if parameter._backward_hooks is not None:
        parameter._backward_hooks = parameter._backward_hooks
    if hooks is not None:
        parameter._post_accumulate_grad_hooks = hooks


def _instead_of(shown: torch.Tensor) -> torch.Tensor:
    """What fits nowhere that these values fit: a graph that has saved them fails."""
    if shown.numel() == 1:
        return shown.detach().clone()
    return torch.empty([0 if size > 1 else size for size in shown.shape], dtype=torch.float32)


def shown_before(parameter: torch.Tensor) -> torch.Tensor | None:
    """What is in graphs of a parameter at rest that were built where it has shown plain values."""
    view = parameter.__dict__.get(_VIEW)
    spare: torch.Tensor | None = None if view is None else view.__dict__["spare"]
    return spare


def _swap(parameter: torch.Tensor, spare: torch.Tensor) -> None:
    try:
        torch._C._swap_tensor_impl(parameter, spare)
    except RuntimeError as error:
        raise StateError(
            "torch holds a weak reference to a parameter at rest, whose master is in two parts: it cannot be "
            "shown as a plain tensor",
            "Profile with record_shapes=False; use parameters outside of torch.autocast; or leave out "
            "fs.Offload(split_masters=True).",
        ) from error


@functools.cache
def _split_kind(kind: type) -> type:
    """The class of a parameter at rest; its second base is the class where it shows plain values."""
    if kind is nn.Parameter:
        return SplitParameter
    body = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__slots__": ()}
    return type(kind.__name__, (SplitParameter, kind), body)


def _like(cls: type, halves: Halves, view: torch.Tensor) -> Any:
    """At the same place in the halves as `view` is in its memory."""
    with torch.inference_mode(False):  # it lives on, and writes into it are counted
        values: Any = without_memory(cls, view, torch.float32, halves.low.device)
    values.__dict__[_VALUES] = halves
    return values


def _is_view(func: Any) -> bool:
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    if first is None or first.is_write:
        return False
    return any(out.alias_info is not None for out in func._schema.returns)


_storage = storages(SplitValues.refuse_memory)


def _refusal(name: str, why: str) -> AtRestError:
    return AtRestError(
        f"{name} of a parameter at rest, whose master is in two parts (split_masters): it {why}",
        "Take p.detach().clone() first to read it; or write it inside `with fs.full(model):`.",
    )
