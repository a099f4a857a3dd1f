"""Streams for ranks that compute on the host, and a check that what runs on them is ordered as a GPU needs.

    with streams.watched() as watch:
        train()                       # fs.Transfers gets streams, as on a GPU
    assert not watch.races

Operators still run one after another, so all values are right. What is checked is whether they would be if
every stream ran on its own: each stream, and the host, has a vector clock, which waits for events and
synchronizations carry over. An access to memory, byte by byte, must come behind the last write there, and a
write behind the last reads, in the clock of the stream that makes it. Memory is given out and taken back in
the order of the stream that allocates it, as torch's allocator does: what another stream still does with it
when that one goes on is a race as well.

Torch's own sanitizer looks for the same on a GPU, but knows neither host memory nor parts of a tensor.

Memory of the host is what fullshard allocates as such, and what operators on it alone return. These run on
the host, at once. Everything else is memory of the device, and runs on the current stream. Memory that no
operator has returned, numpy's for one, belongs to the stream that uses it first. A collective runs on the
stream of its channel, behind what the current one was given, and its `wait` makes the current one wait, as
with NCCL. Files are not watched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fullshard.engine.activations
import fullshard.engine.homes.home
import fullshard.engine.homes.transfers
import fullshard.engine.step.slabs
from fullshard.comm.groups import Comm
from fullshard.comm.watchdog import Watchdog
from fullshard.host_memory import host_zeros, unlocked

MOST_STREAMS = 64
_FRAMES = ("fullshard/", "tests/ranks", "tests/pure")


@dataclass(eq=False)
class Stream:
    """A stream, or the host."""

    watch: Watch
    name: str
    index: int
    device: torch.device
    clock: np.ndarray = field(default_factory=lambda: np.zeros(MOST_STREAMS, np.int64))

    def record_event(self, _: Any = None) -> Event:
        self.watch.forget_freed()
        return Event(self.watch, self.clock.copy())

    def wait_event(self, event: Event) -> None:
        self.watch.forget_freed()
        np.maximum(self.clock, event.clock, out=self.clock)

    def synchronize(self) -> None:
        self.watch.forget_freed()
        host = self.watch.host.clock
        np.maximum(host, self.clock, out=host)

    def knows(self, operation: Operation) -> bool:
        host = self.watch.host.clock[operation.stream.index]  # what the host has waited for is over
        return bool(max(self.clock[operation.stream.index], host) >= operation.number)


@dataclass(eq=False)
class Event:
    watch: Watch
    clock: np.ndarray

    def query(self) -> bool:
        return bool((self.watch.host.clock >= self.clock).all())

    def synchronize(self) -> None:
        self.watch.forget_freed()
        np.maximum(self.watch.host.clock, self.clock, out=self.watch.host.clock)


@dataclass(frozen=True)
class Operation:
    name: str
    stream: Stream
    number: int  # in its stream
    where: str

    def __str__(self) -> str:
        return f"{self.name} on {self.stream.name} ({self.where})"


class Memory:
    """Of one storage: by byte, which operation wrote it last, and which one of each stream read it last."""

    def __init__(self, storage: torch.UntypedStorage, owner: Stream, allocated: int) -> None:
        self.reference, self.size = StorageWeakRef(storage), storage.nbytes()
        self.owner = owner
        self.writes = np.full(self.size, allocated, np.int32)
        self.reads: dict[int, np.ndarray] = {}

    def read(self, stream: Stream, region: Any, operation: int) -> None:
        reads = self.reads.get(stream.index)
        if reads is None:
            reads = self.reads[stream.index] = np.zeros(self.size, np.int32)
        reads[region] = operation


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._streams: list[Stream] = []
        self.host, self.compute = self.stream(name="host"), self.stream(name="compute")
        self.current = self.compute
        self.races: list[str] = []
        self.num_operations = 0
        self._operations = [Operation("before", self.host, 0, "")]
        self._memory: dict[int, Memory] = {}
        self._on_host: dict[int, StorageWeakRef] = {}
        self._ranges: dict[int, StorageWeakRef] = {}  # torch.arange, for whoever uses them
        self._channels: dict[str, Stream] = {}
        self._channel = ""  # of the next collective
        self._freed: dict[int, list[tuple[Operation, int]]] = {}  # by stream, while others use it

    def stream(self, *_: Any, name: str | None = None, **__: Any) -> Stream:
        index = len(self._streams)
        made = Stream(self, name or f"stream {index}", index, torch.device("cpu"))
        self._streams.append(made)
        return made

    def current_stream(self, *_: Any) -> Stream:
        return self.current

    # ---- collectives: each channel has a stream, as each communicator of NCCL has

    def begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(comm: Comm, channel: str, tag: Any) -> Any:
            self._channel = channel
            return original(comm, channel, tag)

        return begin

    def wait_for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait_for(watchdog: Watchdog, work: Any, channel: str, *args: Any, **kwargs: Any) -> Any:
            np.maximum(self.current.clock, self._stream_of(channel).clock, out=self.current.clock)
            return original(watchdog, work, channel, *args, **kwargs)

        return wait_for

    def _stream_of(self, channel: str) -> Stream:
        if channel not in self._channels:
            self._channels[channel] = self.stream(name=f"channel {channel}")
        return self._channels[channel]

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Its first operand is its result."""
        self.forget_freed()
        out = func(*args, **kwargs)
        if "tree.py" in _where():  # an agreement between hosts
            return out
        self.num_operations += 1
        stream = self._stream_of(self._channel)
        np.maximum(stream.clock, self.current.clock, out=stream.clock)
        operation = self._operation(func.__name__, stream)
        results = [id(t) for t in tree_leaves(args[0])]
        for tensor in (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
            self._memory_of(tensor.untyped_storage(), self.current)
            self._access(tensor, operation, is_write=id(tensor) in results)
        return out

    # ---- memory

    def host_memory(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocated(*args: Any) -> torch.Tensor:
            tensor = allocate(*args)
            storage = tensor.untyped_storage()
            self._mark_host(storage)
            self._memory.pop(storage._cdata, None)
            return tensor

        return allocated

    def _mark_host(self, storage: torch.UntypedStorage) -> None:
        self._on_host[storage._cdata] = StorageWeakRef(storage)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_host

    def _memory_of(self, storage: torch.UntypedStorage, stream: Stream, is_new: bool = False) -> Memory:
        """`stream` allocates it, if `is_new`; else it was there before, if it is not known."""
        known = self._memory.get(storage._cdata)
        if known is None or known.size != storage.nbytes():
            owner = self.host if storage._cdata in self._on_host else stream
            allocated = self._operation("allocation", owner) if is_new else 0
            known = self._memory[storage._cdata] = self._new_memory(storage, owner, allocated)
        return known

    def _new_memory(self, storage: torch.UntypedStorage, owner: Stream, allocated: int) -> Memory:
        return Memory(storage, owner, allocated)

    def forget_freed(self) -> None:
        for key, memory in list(self._memory.items()):
            if memory.reference.expired():
                del self._memory[key]
                self._free(memory)
        for known in (self._on_host, self._ranges):
            for key in [key for key, reference in known.items() if reference.expired()]:
                del known[key]

    def _free(self, memory: Memory) -> None:
        """It may be given out again to what its stream does next."""
        used = [self._operations[i] for i in np.unique([memory.writes, *memory.reads.values()])]
        busy = [(each, memory.size) for each in used if not memory.owner.knows(each)]
        self._freed.setdefault(memory.owner.index, []).extend(busy)

    def resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            self.forget_freed()
            old = self._memory.pop(storage._cdata, None)
            if old is not None and old.size:
                self._free(old)
            result = original(storage, size)
            if size:
                self._memory_of(storage, self.current, is_new=True)
            return result

        return resize_

    # ---- operators

    def _operation(self, name: str, stream: Stream) -> int:
        if stream is not self.host:
            np.maximum(stream.clock, self.host.clock, out=stream.clock)  # the host has launched it by now
        stream.clock[stream.index] += 1
        self._operations.append(Operation(name, stream, int(stream.clock[stream.index]), _where()))
        for earlier, size in self._freed.pop(stream.index, ()):
            if not stream.knows(earlier):
                self._report("is freed, and given out to", earlier, self._operations[-1], size)
        return len(self._operations) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # what it computes with comes here
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        self.forget_freed()
        reads, writes = _accesses(func, args, kwargs)
        operands = [t for t in tree_leaves((args, kwargs)) if _has_memory(t)]
        numbers = [] if func is torch.ops.aten.copy_.default else self._numbers(operands)
        reads, writes = ([t for t in ts if not any(t is n for n in numbers)] for ts in (reads, writes))
        others = [t for t in operands if not any(t is number for number in numbers)]
        placed = [t for t in others if t.untyped_storage()._cdata not in self._ranges]
        on_host = bool(placed) and all(map(self._is_host, placed)) and "device" not in kwargs
        before = {t.untyped_storage()._cdata for t in operands}
        out = func(*args, **kwargs)
        if func._schema.name == "aten::arange":
            self._ranges[out.untyped_storage()._cdata] = StorageWeakRef(out.untyped_storage())
            return out
        self.num_operations += 1
        stream = self.host if on_host else self.current
        operation = self._operation(func.__name__, stream)
        made = [t for t in tree_leaves(out) if _has_memory(t) and t.untyped_storage()._cdata not in before]
        for tensor in made:
            if on_host:
                self._mark_host(tensor.untyped_storage())
            if func is not torch.ops.aten.detach.default:
                self._memory_of(tensor.untyped_storage(), stream, is_new=True)
        for tensor in (t for t in reads if t.untyped_storage()._cdata not in self._ranges):
            self._access(tensor, operation, is_write=False)
        for tensor in (*writes, *(made if not _is_factory(func) else ())):
            self._access(tensor, operation, is_write=True)
        if func is torch.ops.aten.copy_.default and self._waits(args, kwargs):
            stream.synchronize()
        return out

    def _numbers(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of the device, beside host memory: the host has copied them, and waited. `number.cpu()` is the
        number itself here."""
        if not any(self._is_host(t) and t.numel() > 1 for t in operands):
            return []
        alone = [t for t in operands if t.untyped_storage().nbytes() == t.element_size()]
        found = [t for t in alone if not self._is_host(t)]
        if found:
            self.current.synchronize()
        return found

    def _waits(self, args: Any, kwargs: Any) -> bool:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return not non_blocking and self._is_host(args[0]) != self._is_host(args[1])

    def _access(self, tensor: torch.Tensor, index: int, is_write: bool) -> None:
        if not _has_memory(tensor):
            return
        operation = self._operations[index]
        stream = operation.stream
        memory, region = self._memory_of(tensor.untyped_storage(), stream), _region(tensor)
        found = [memory.writes]
        if is_write:
            found += [reads for by, reads in memory.reads.items() if by != stream.index]
        for earlier in {int(i) for each in found for i in np.unique(each[region])} - {index}:
            if not stream.knows(self._operations[earlier]):
                what = "is written by" if is_write else "is read by"
                self._report(what, self._operations[earlier], operation, memory.size)
        if is_write:
            memory.writes[region] = index
        else:
            memory.read(stream, region, index)

    def _report(self, what: str, earlier: Operation, later: Operation, size: int) -> None:
        self.races.append(
            f"memory of {size} bytes, used by {earlier}, {what} {later}, which does not wait for it"
        )


def _where() -> str:
    """The innermost lines of ours, and of a test's."""
    ours: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(ours) < 5:
        code = frame.f_code
        if any(part in code.co_filename for part in _FRAMES):
            ours.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(ours)


def _has_memory(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.numel() > 0
    )


def _is_factory(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("empty") or name in ("new_empty", "new_empty_strided")


def _accesses(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors whose values are read, and those whose values are written."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    schema = func._schema
    if _is_factory(func) or schema.name in ("aten::_unsafe_view", "aten::detach", "aten::alias"):
        return reads, writes
    returns_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors
            if schema.name not in ("aten::copy_", "aten::zero_", "aten::fill_"):
                reads += tensors
        elif not returns_view:
            reads += tensors
    return reads, writes


def _region(tensor: torch.Tensor) -> Any:
    """The bytes of its storage that a tensor has."""
    size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    if tensor.is_contiguous():
        return slice(start, start + tensor.numel() * size)
    offsets = np.zeros(1, np.int64)
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(length if stride else 1) * stride).reshape(-1)
    return (start + offsets[:, None] * size + np.arange(size)).reshape(-1)


@contextmanager
def watched(watch: Watch | None = None) -> Iterator[Watch]:
    watch = Watch() if watch is None else watch
    engine = fullshard.engine

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        previous, watch.current = watch.current, stream
        try:
            yield
        finally:
            watch.current = previous

    def become(stream: Stream) -> None:
        watch.current = stream

    storage = torch.UntypedStorage
    patches = [
        mock.patch.object(engine.homes.transfers, "has_streams", return_value=True),
        mock.patch.object(engine.activations, "has_streams", return_value=True),
        mock.patch.object(torch.cuda, "Stream", watch.stream),
        mock.patch.object(torch.cuda, "stream", on),
        mock.patch.object(torch.cuda, "set_stream", become),
        mock.patch.object(torch.cuda, "current_stream", watch.current_stream),
        mock.patch.object(storage, "resize_", watch.resize(storage.resize_), create=True),
        mock.patch.object(Comm, "begin", watch.begin(Comm.begin)),
        mock.patch.object(Watchdog, "wait_for", watch.wait_for(Watchdog.wait_for)),
        mock.patch.object(engine.homes.home, "host_zeros", watch.host_memory(host_zeros)),
        mock.patch.object(engine.step.slabs, "host_zeros", watch.host_memory(host_zeros)),
        mock.patch.object(engine.activations, "page_locked", watch.host_memory(unlocked)),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield stack.enter_context(watch)
