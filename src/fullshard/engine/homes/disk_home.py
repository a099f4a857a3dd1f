"""The home of values on disk: files, and the buffers between them and the compute device.

A step announces what it is going to fetch: reads run ahead, in the background, into page-locked buffers. What
it stores is copied into other buffers, beside computing, and written behind. Both are bounded in number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from fullshard.engine.homes.disk import ALIGNMENT, DiskBuffers, DiskFolder, DiskValue, Pending
from fullshard.engine.homes.transfers import Mark, Transfers
from fullshard.errors import OffloadError
from fullshard.host_memory import lock_pages, unlock_pages
from fullshard.plan.homes import DISK_BUFFERS

_Range = tuple[int, int, int]  # address of a value, first byte, number of bytes


class DiskHome:
    """Values rest in files, see `disk`."""

    kind: Literal["device", "host", "disk"] = "disk"

    def __init__(self, transfers: Transfers, parent: Path) -> None:
        self.transfers, self.compute_device = transfers, transfers.device
        self._folder = DiskFolder(parent)
        self._values: weakref.WeakValueDictionary[int, DiskValue] = weakref.WeakValueDictionary()
        self._tensors: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._buffers: dict[str, DiskBuffers] = {}
        self._ahead: dict[_Range, tuple[Pending, memoryview, DiskBuffers]] = {}
        self._wanted: dict[_Range, DiskValue] = {}  # announced, in this order, and no buffer was left

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        value = DiskValue(self._folder.new_file(), num_elements, dtype)
        value.seal_new()
        tensor = value.tensor()
        if num_elements:
            self._values[value.address], self._tensors[value.address] = value, tensor
        return tensor

    def stage(self, values: torch.Tensor, after: Mark | None = None) -> torch.Tensor:
        staged = torch.empty_like(values, device=self.compute_device)
        if not values.numel():
            return staged
        with self._dropped_on_error(), self.transfers.up(self.transfers.now(), after):
            for start, length in self._in_turn(values):
                self.fetch(values, start, staged[start : start + length])
            mark = self.transfers.mark_up()
        mark.wait()
        return staged

    def check(self) -> None:
        """Read everything here, and compare what steps have written with its checksums: before it is copied
        from its mappings, where nobody would notice that, and a file that is too short ends the process."""
        with self._dropped_on_error():
            for values in list(self._tensors.values()):
                for start, length in self._in_turn(values):
                    pending, buffer, pool = self._begun(*self._place(values, start, length))
                    pending.settle()
                    pool.give(buffer)
                    pending.wait()

    def seal(self) -> None:
        """What other code has just put here is checked from now on."""
        for values in list(self._tensors.values()):
            value = self._known(values)
            if not value.is_known:
                value.seal()

    def _in_turn(self, values: torch.Tensor) -> Iterator[tuple[int, int]]:
        """All ranges of it, in elements, while the next ones are read ahead."""
        size = values.element_size()
        ranges = [(start // size, length // size) for start, length in self._known(values).ranges()]
        for number, here in enumerate(ranges):
            for later in ranges[number : number + DISK_BUFFERS // 2]:
                self.read_ahead(values, *later)
            yield here

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop_ahead()
            raise

    def put_back(self, values: torch.Tensor, staged: torch.Tensor) -> None:
        values.copy_(staged)
        if values.numel():
            self._known(values).seal()

    # ---- a step

    def read_ahead(self, values: torch.Tensor, start: int, num_elements: int) -> None:
        if not num_elements:
            return
        value, place = self._place(values, start, num_elements)
        if place not in self._ahead:
            self._wanted.setdefault(place, value)
        self._begin_wanted()

    def _begin_wanted(self) -> None:
        """In the order of what was announced, which is that of fetches. One that is passed over because no
        buffer is left would be read while its fetch waits, and the disk would have nothing else to do."""
        while self._wanted:
            place, value = next(iter(self._wanted.items()))
            if not self._pool("read", place[2]).num_left:
                return
            del self._wanted[place]
            self._begin_read(value, place)

    def _begin_read(self, value: DiskValue, place: _Range) -> None:
        pool = self._pool("read", place[2])
        while not pool.num_left:
            self._drop(next(reversed(self._ahead)))  # the last to be needed: it is read when it is
        buffer = pool.take()
        with _given_back_on_error(pool, buffer):
            self._ahead[place] = value.start_read(place[1], _part(buffer, place)), buffer, pool

    def fetch(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        if not staged.numel():
            return
        value, place = self._place(values, start, len(staged))
        pending, buffer, pool = self._begun(value, place)
        with _given_back_on_error(pool, buffer):
            pending.wait()
            staged.copy_(torch.frombuffer(_part(buffer, place), dtype=staged.dtype), non_blocking=True)
        pool.give(buffer, self.transfers.mark_up(sleeping=True).synchronize)

    def _begun(self, value: DiskValue, place: _Range) -> tuple[Pending, memoryview, DiskBuffers]:
        """A read that runs, or is over."""
        self._begin_wanted()
        if place not in self._ahead:
            self._wanted.pop(place, None)
            self._begin_read(value, place)
        return self._ahead.pop(place)

    def store(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        if not staged.numel():
            return
        value, place = self._place(values, start, len(staged))
        pool = self._pool("write", place[2])
        buffer = pool.take()
        part = _part(buffer, place)
        with _given_back_on_error(pool, buffer):
            torch.frombuffer(part, dtype=staged.dtype).copy_(staged, non_blocking=True)
            # Many threads may wait at once, which others need the cores for: of checksums.
            stored = self.transfers.mark_down(sleeping=True)
            written = value.start_write(place[1], part, stored.synchronize)
        pool.give(buffer, written.settle)

    def complete(self) -> None:
        """Make everything ready to count, or raise."""
        for value in list(self._values.values()):
            value.complete()

    def commit(self) -> None:
        for value in list(self._values.values()):
            value.commit()

    def abandon(self) -> None:
        self._drop_ahead()
        for value in list(self._values.values()):
            value.abandon()

    def _drop_ahead(self) -> None:
        self._wanted.clear()
        for place in list(self._ahead):
            self._drop(place)

    def _drop(self, place: _Range) -> None:
        pending, buffer, pool = self._ahead.pop(place)
        pending.settle()
        pool.give(buffer)

    def edited(self, values: torch.Tensor) -> None:
        """User code wrote into views of it."""
        if values.numel():
            self._values[values.data_ptr()].forget_checksums()

    def _place(self, values: torch.Tensor, start: int, num_elements: int) -> tuple[DiskValue, _Range]:
        size = values.element_size()
        return self._known(values), (values.data_ptr(), start * size, num_elements * size)

    def _known(self, values: torch.Tensor) -> DiskValue:
        value = self._values[values.data_ptr()]
        if value.version != values._version:
            value.forget_checksums()
            value.version = values._version
        return value

    def _pool(self, use: str, size_bytes: int) -> DiskBuffers:
        """Buffers of at least this size. Where a larger one is needed than ever before, all are new."""
        pool = self._buffers.get(use)
        size_bytes += ALIGNMENT
        if pool is None or pool.size_bytes < size_bytes:
            if pool is not None:
                pool.settle()
            register = _locked if self.compute_device.type == "cuda" else None
            try:
                pool = self._buffers[use] = DiskBuffers(DISK_BUFFERS, size_bytes, register)
            except OSError as error:
                needs = f"{DISK_BUFFERS * size_bytes / 2**20:.0f} MiB"
                raise OffloadError(
                    f"no memory for buffers of values on disk, which need {needs}: {error}",
                    "Model and optimizer are as before this step. Give a smaller fs.Offload(chunk=...).",
                ) from error
        return pool


def _locked(address: int, size_bytes: int) -> Callable[[], None] | None:
    """A range that stays locked when its memory is gone is taken for what lies there next: a device then
    copies from and to pages that nobody else sees."""
    return partial(unlock_pages, address) if lock_pages(address, size_bytes) else None


def _part(buffer: memoryview, place: _Range) -> memoryview:
    """Where bytes of a file go: blocks of the file are blocks in memory, as direct I/O needs them."""
    _, first, size_bytes = place
    start = first % ALIGNMENT
    return buffer[start : start + size_bytes]


@contextmanager
def _given_back_on_error(pool: DiskBuffers, buffer: memoryview) -> Iterator[None]:
    try:
        yield
    except BaseException:
        pool.give(buffer)
        raise
