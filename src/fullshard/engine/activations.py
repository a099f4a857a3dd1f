"""Inputs of blocks whose activations are computed again in backward: held on the device, or in host memory.

A block's call holds its arguments until backward (`Held`). With a `HostKeeper`, large activations among them
are copied to host memory while the block computes, and leave the device two calls later. In backward they
come back one call ahead: when a block is computed again, the inputs of the call before it start to move.

Streams. Device memory is allocated and freed on the compute stream alone. Copies down and up have a stream
each, which waits for the compute stream before it starts. The compute stream waits for a copy down before it
frees the original, and for a copy up before it reads the result or frees it. A host buffer is written again
on the downward stream, after the last copy up that read it. The host waits for nothing.
"""

from __future__ import annotations

import bisect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.engine.graph_tasks import NO_TASK, current_task
from fullshard.engine.homes.transfers import Mark, Transfers, has_streams
from fullshard.engine.saved_tensors import Saved
from fullshard.engine.tensors import snapshot, tensors_in
from fullshard.engine.writes import set_data
from fullshard.errors import StateError
from fullshard.host_memory import page_locked, unlocked

MIN_BYTES = 2**20  # smaller inputs stay: a copy each way would take longer to start than to run
_STAY = 2  # calls whose inputs have not left the device: backward starts with them

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def checkpointed(
    compute: Callable[[bool, Any, Any], Any],
    held: Held,
    marker: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preserve_rng_state: bool = True,
) -> Any:
    """`compute(first, args, kwargs)`, which backward calls again instead of keeping what it saves.

    Torch's checkpoint gets a tensor without elements in place of the arguments. It would hold them itself,
    would not notice that one given by keyword was written to, and would keep the state of a device's random
    numbers only where an argument by position is on that device.
    """
    now = [(args, kwargs)]

    def call(_marker: torch.Tensor) -> Any:
        return compute(True, *now.pop()) if now else compute(False, *held.arguments())

    return checkpoint(call, marker, use_reentrant=False, preserve_rng_state=preserve_rng_state)


class Keeper(Protocol):
    """Where the arguments of a call are until backward needs them."""

    def hold(self, block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Held: ...


class Held:
    """Arguments of one call as they were: lists, dicts and plain objects (a cache, say) are held as copies.

    Like what autograd saves, a tensor must not be written to before backward. That counts for all that are
    given by position, and for activations wherever they are.
    """

    def __init__(self, block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block = block  # for errors
        self._given: Arguments = snapshot((args, kwargs))
        self._watched = [(tensor, tensor._version) for tensor in _watched(args, kwargs)]

    def arguments(self) -> Arguments:
        """For one more computation."""
        self._refuse_written()
        return snapshot(self._given)  # type: ignore[no-any-return]

    def _refuse_written(self) -> None:
        if any(tensor._version != version for tensor, version in self._watched):
            raise StateError(
                f"an input of {self._block} was modified in place after its forward began, and backward "
                "computes activations again from it",
                "Write x = x + y instead of x += y, or give the block x.clone().",
            )


def _watched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for tensor in tensors_in((args, kwargs)):
        by_position = any(tensor is given for given in args)
        activation = tensor.requires_grad and not isinstance(tensor, nn.Parameter)
        if (by_position or activation) and not tensor.is_inference():
            yield tensor


class DeviceKeeper:
    """Arguments stay where they are."""

    def hold(self, block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Held:
        return Held(block, args, kwargs)


class HostKeeper:
    """Large activations among the arguments wait in host memory. One keeper serves all blocks of a model."""

    def __init__(self, device: torch.device, link: Link | None = None) -> None:
        self.device = device
        self.link = Link(device) if link is None else link
        self._on_device: deque[weakref.ref[_HeldInHost]] = deque()
        self._last: weakref.ref[_HeldInHost] | None = None
        self._copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()  # by id

    def __deepcopy__(self, memo: dict[int, Any]) -> HostKeeper:
        twin = memo[id(self)] = HostKeeper(self.device)
        return twin

    def hold(self, block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Held:
        # What a computation inside backward holds is needed at once.
        large = [] if current_task() != NO_TASK else self._large(args, kwargs)
        if not large:
            return Held(block, args, kwargs)
        held = _HeldInHost(block, args, kwargs, {id(t): t for t in large}, self._copy, self._last)
        self._last = weakref.ref(held)
        self._on_device.append(self._last)
        if len(self._on_device) > _STAY and (earlier := self._on_device.popleft()()) is not None:
            earlier.leave()
        return held

    def _large(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        return [t for t in tensors_in((args, kwargs)) if t.device == self.device and _moves(t)]

    def _copy(self, tensor: torch.Tensor) -> _Copy:
        """One for all blocks that get the same tensor: what an encoder hands to each block of a decoder."""
        known = self._copies.get(id(tensor))
        if known is not None and known.is_of(tensor):
            known.shared = True
            return known
        copy = self._copies[id(tensor)] = _Copy(tensor, self.link)
        return copy


def _moves(tensor: torch.Tensor) -> bool:
    """Whether it is an activation that is worth moving, and of which a copy can have the same strides."""
    if type(tensor) is not torch.Tensor or not tensor.requires_grad or not tensor.is_floating_point():
        return False
    return tensor.layout is torch.strided and tensor.nbytes >= MIN_BYTES and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """No gaps and no overlaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _HeldInHost(Held):
    """Arguments of one call, some of them in host memory."""

    def __init__(
        self,
        block: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        large: dict[int, torch.Tensor],
        copy: Callable[[torch.Tensor], _Copy],
        previous: weakref.ref[_HeldInHost] | None,
    ) -> None:
        self._block = block
        places = {key: torch.empty(0) for key in large}  # in the place of tensors that leave
        self._places = [id(place) for place in places.values()]
        self._given = snapshot((args, kwargs), lambda tensor: places.get(id(tensor), tensor))
        self._watched = [
            (_version_of(tensor) if id(tensor) in large else tensor, tensor._version)
            for tensor in _watched(args, kwargs)
        ]
        self._copies = [copy(tensor) for tensor in large.values()]
        self._saved = _hold(list(large.values()), self._copies)
        self._previous = previous

    def arguments(self) -> Arguments:
        self._refuse_written()
        back = dict(zip(self._places, self._saved.tensors, strict=True))
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.prefetch()
        return snapshot(self._given, lambda tensor: back.get(id(tensor), tensor))  # type: ignore[no-any-return]

    def prefetch(self) -> None:
        for copy in self._copies:
            copy.prefetch()

    def leave(self) -> None:
        for copy in self._copies:
            copy.leave()


def _version_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that has the version counter of another one."""
    alias = tensor.detach()
    set_data(alias, tensor.new_empty(0))
    return alias


def _hold(tensors: list[torch.Tensor], copies: list[_Copy]) -> Saved:
    """A node that has these copies for its saved tensors; until torch 2.12 it keeps them."""
    left = iter(copies)
    with torch.autograd.graph.saved_tensors_hooks(lambda _: next(left), _Copy.fetch):
        return Saved(*tensors)


class _Copy:
    """One tensor in host memory, and until it has left, or when it is fetched, on the device."""

    def __init__(self, tensor: torch.Tensor, link: Link) -> None:
        self._of, self._version = weakref.ref(tensor), tensor._version
        self._link = link
        # Kernels may be chosen by strides and by alignment: both are restored.
        self._shape, self._strides, self._numel = tensor.shape, tensor.stride(), tensor.numel()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._offset = tensor.data_ptr() % link.alignment // tensor.element_size()
        self.shared = False  # by several calls: fetched once for all of them
        self._on_device: torch.Tensor | None = tensor.detach()
        self._buffer = link.buffers.take(tensor.nbytes)
        self._done = link.down(self._on_device, self._buffer)  # before which what is on the device must stay

    def is_of(self, tensor: torch.Tensor) -> bool:
        return self._of() is tensor and self._version == tensor._version

    def leave(self) -> None:
        """Only the host has it from here on."""
        if self._on_device is not None:
            self._link.wait(self._done)
            self._on_device = None

    def prefetch(self) -> None:
        if self._on_device is None:
            memory = torch.empty(self._offset + self._numel, dtype=self._dtype, device=self._device)
            self._on_device = memory.as_strided(self._shape, self._strides, self._offset)
            self._done = self._link.up(self._buffer, self._on_device)

    def fetch(self) -> torch.Tensor:
        self.prefetch()
        self._link.wait(self._done)
        tensor = self._on_device
        assert tensor is not None
        if not self.shared:
            self._on_device = None  # the computation has it
        return tensor

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_done"):
            return
        if self._on_device is not None:
            self._link.wait(self._done)
        self._link.buffers.give(self._buffer)


class Buffer:
    """Host memory for one tensor."""

    def __init__(self, memory: torch.Tensor, size_bytes: int) -> None:
        self.memory, self.size_bytes = memory, size_bytes
        self.used = Mark(None)  # behind the last copy from or to it

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.used.synchronize()  # the memory goes with it


class Buffers:
    """Host buffers that steps use again: as many as were in use at once, each as large as something was."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._free: list[Buffer] = []  # by size
        self.allocations = 0

    def take(self, size_bytes: int) -> Buffer:
        at = bisect.bisect_left(self._free, size_bytes, key=_size)
        if at < len(self._free):
            return self._free.pop(at)
        if self._free:
            self._free.pop()  # too small: one that fits replaces it
        self.allocations += 1
        return Buffer(self._allocate(size_bytes), size_bytes)

    def give(self, buffer: Buffer) -> None:
        bisect.insort(self._free, buffer, key=_size)


_size = attrgetter("size_bytes")


class Copying(NamedTuple):
    """A copy that may be on its way: where it is over, and where its device memory was allocated."""

    mark: Mark
    allocated: torch.cuda.Stream | None


class Link:
    """Copies between a device and host buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device, on_gpu = device, has_streams(device)
        self.alignment = 512 if on_gpu else 64  # of new device memory, in bytes
        self.buffers = Buffers(page_locked if on_gpu else unlocked)
        self._transfers = Transfers(device)

    def down(self, tensor: torch.Tensor, buffer: Buffer) -> Copying:
        flat = _flat(tensor)
        with self._transfers.down(self._transfers.now(), buffer.used):
            _in(buffer, flat).copy_(flat, non_blocking=True)
            buffer.used = self._transfers.mark_down()
        return Copying(buffer.used, self._compute())

    def up(self, buffer: Buffer, tensor: torch.Tensor) -> Copying:
        flat = _flat(tensor)
        with self._transfers.up(self._transfers.now(), buffer.used):
            flat.copy_(_in(buffer, flat), non_blocking=True)
            buffer.used = self._transfers.mark_up()
        return Copying(buffer.used, self._compute())

    def wait(self, copying: Copying) -> None:
        """Computing waits, and so does whoever gets the device memory next."""
        copying.mark.wait()
        if copying.allocated is not None and copying.allocated != self._compute():
            copying.mark.hold_up(copying.allocated)  # other code drops a graph than that which computes

    def _compute(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if has_streams(self.device) else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _in(buffer: Buffer, flat: torch.Tensor) -> torch.Tensor:
    return buffer.memory[: flat.nbytes].view(flat.dtype)
