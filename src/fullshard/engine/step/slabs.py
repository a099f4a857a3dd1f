"""Where the chunks of a streamed step are while it runs: slabs of memory, and copies from homes and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.engine.homes.home import Home
from fullshard.engine.homes.remainders import PER_BYTE, bitmap_bytes
from fullshard.engine.homes.split_masters import SplitValues
from fullshard.engine.homes.transfers import Mark, Transfers
from fullshard.engine.lane import Lane
from fullshard.engine.step import low_bit
from fullshard.engine.step.chunks import Chunk, Key, Part
from fullshard.host_memory import host_zeros
from fullshard.plan.layout import round_up, shard_shape
from fullshard.precision import BLOCK, STATE_ROW_BYTES


class Site:
    """Where steps run, and how values come there and go back."""

    def __init__(self, transfers: Transfers, on_host: bool) -> None:
        self.transfers, self.on_host = transfers, on_host
        self.device = torch.device("cpu") if on_host else transfers.device
        self.kind = "host" if on_host else "device"  # values in this home are used where they are

    def inbound(self, *after: Mark | None) -> AbstractContextManager[Any]:
        return self.transfers.down(*after) if self.on_host else self.transfers.up(*after)

    def outbound(self, *after: Mark | None) -> AbstractContextManager[Any]:
        return self.transfers.up(*after) if self.on_host else self.transfers.down(*after)

    def mark_inbound(self) -> Mark:
        return self.transfers.mark_down() if self.on_host else self.transfers.mark_up()

    def mark_outbound(self) -> Mark:
        return self.transfers.mark_up() if self.on_host else self.transfers.mark_down()

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            (mark.synchronize if self.on_host else mark.wait)()

    def memory(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        if self.on_host:
            return host_zeros(num_elements, dtype, self.transfers.device)
        return torch.empty(num_elements, dtype=dtype, device=self.device)


@dataclass
class Place:
    """Where a step has the values of one kind of a chunk."""

    home: Home
    at_rest: torch.Tensor
    start: int
    values: torch.Tensor  # where the step runs
    is_copy: bool

    @property
    def is_on_disk(self) -> bool:
        return self.home.kind == "disk"

    def read_ahead(self) -> None:
        self.home.read_ahead(self.at_rest, self.start, len(self.values))

    def fetch(self) -> None:
        if self.is_copy:
            self.home.fetch(self.at_rest, self.start, self.values)

    def encode(self) -> None:
        """Before it is stored, in the order of the copy."""

    def store(self) -> None:
        if self.is_copy:
            self.home.store(self.at_rest, self.start, self.values)


@dataclass
class BlockPlace(Place):
    """Of a state in 8-bit blocks: `at_rest` is bytes, `start` the first of them, and values fill all rows."""

    _encoded: torch.Tensor | None = None

    @property
    def _num_bytes(self) -> int:
        return low_bit.rows_of(len(self.values)) * STATE_ROW_BYTES

    def _rows_here(self) -> torch.Tensor | None:
        """The rows themselves, where they rest on the device of the values."""
        if self.is_on_disk or self.at_rest.device != self.values.device:
            return None
        return self.at_rest.data[self.start : self.start + self._num_bytes].view(-1, STATE_ROW_BYTES)

    def read_ahead(self) -> None:
        self.home.read_ahead(self.at_rest, self.start, self._num_bytes)

    def fetch(self) -> None:
        rows = self._rows_here()
        if rows is None:
            rows = self._staging()
            self.home.fetch(self.at_rest, self.start, rows.view(-1))
            if self._leaves_the_device:  # a processor does not wait for a copy by itself
                torch.cuda.current_stream(self.at_rest.device).synchronize()
        low_bit.decode(rows, self.values)

    def encode(self) -> None:
        if self._rows_here() is None:
            self._encoded = self._staging()
            low_bit.encode(self.values, self._encoded)

    def store(self) -> None:
        rows = self._rows_here()
        if rows is not None:
            low_bit.encode(self.values, rows)
            return
        assert self._encoded is not None
        self.home.store(self.at_rest, self.start, self._encoded.view(-1))
        self._encoded = None

    def _staging(self) -> torch.Tensor:
        """On the stream of the copy, which alone uses it."""
        rows = torch.empty(self._num_bytes, dtype=torch.uint8, device=self.values.device)
        return rows.view(-1, STATE_ROW_BYTES)

    @property
    def _leaves_the_device(self) -> bool:
        return self.at_rest.is_cuda and not self.values.is_cuda


class Slabs:
    """Memory for the values of one chunk at a time, where it steps."""

    def __init__(self, num_elements: int, site: Site) -> None:
        self._num_elements, self._site = num_elements, site
        self._slabs: dict[Key, torch.Tensor] = {}
        self.free: Mark | None = None  # the last chunk is stored

    def slab(self, chunk: Chunk, kind: str, dtype: torch.dtype, multiple: int = 1) -> torch.Tensor:
        return self._slab(kind, dtype, self._num_elements)[: round_up(chunk.stop - chunk.start, multiple)]

    def _slab(self, kind: str, dtype: torch.dtype, length: int) -> torch.Tensor:
        slab = self._slabs.get((kind, dtype))
        if slab is None:
            self._site.wait(self.free)
            slab = self._slabs[kind, dtype] = self._site.memory(length, dtype)
            self.free = self._site.transfers.now()  # the memory may have been used on the compute stream
        return slab

    def joined(self, chunk: Chunk, lane: Lane) -> Place:
        """Where a split master is joined."""
        values = self.slab(chunk, ".master", lane.rest.dtype)
        return Place(lane.home, lane.rest, chunk.start, values, is_copy=False)

    def parts(self, chunk: Chunk, lane: Lane, rest: SplitValues) -> tuple[Place, Place, Place]:
        """A chunk begins where a byte of the bitmap does: parameters, and what they are cut at, do."""
        halves, start = rest.split_values, chunk.start
        compute = self.place(chunk, ".compute", lane.homes.compute, halves.compute, start)
        low = self.place(chunk, ".low", lane.home, halves.low, start)
        first, count = start // PER_BYTE, bitmap_bytes(chunk.stop - start)
        is_copy = lane.home.kind != self._site.kind
        bits = halves.ties[first : first + count]
        if is_copy:
            bits = self._slab(".ties", torch.uint8, bitmap_bytes(self._num_elements))[:count]
        return compute, low, Place(lane.home, halves.ties, first, bits, is_copy)

    def place(self, chunk: Chunk, kind: str, home: Home, at_rest: torch.Tensor, start: int) -> Place:
        """Where `chunk`'s values of one kind are while it steps; they rest from element `start` on."""
        if home.kind == self._site.kind:
            values = at_rest.data[start : start + chunk.stop - chunk.start]
            return Place(home, at_rest, start, values, is_copy=False)
        return Place(home, at_rest, start, self.slab(chunk, kind, at_rest.dtype), is_copy=True)


@dataclass
class Staged:
    """A chunk that is where it steps, or on its way there."""

    chunk: Chunk
    shown: list[Part]
    slabs: Slabs
    parts: tuple[Place, Place, Place] | None = None  # of a split master: compute shard, 16 bits, bitmap
    master: Place = field(init=False)
    states: dict[Key, Place] = field(init=False)
    gradients: Place | None = None
    fetched: Mark | None = None
    written: tuple[Any, ...] | None = None  # what was seen of values at rest when they came ahead of the step

    def places(self) -> Iterator[Place]:
        yield self.master
        yield from self.parts or ()
        yield from self.states.values()
        if self.gradients is not None:
            yield self.gradients

    def place_of_state(self, key: Key) -> Place:
        chunk, span = self.chunk, self.chunk.span
        home, at_rest, start = span.lane.homes.state, span.states[key], chunk.start - span.start
        if not span.in_blocks(key):
            return self.slabs.place(chunk, key[0], home, at_rest, start)
        values = self.slabs.slab(chunk, key[0], key[1], multiple=BLOCK)
        return BlockPlace(home, at_rest, start // BLOCK * STATE_ROW_BYTES, values, is_copy=True)


def shaped(flat: torch.Tensor, lane: Lane, part: Part) -> torch.Tensor:
    """Shaped as the parameter's shard is, if all of it is there, or as a smaller one would be."""
    view = lane.shard_views[part.index]
    if part.is_all:
        return flat.as_strided(view.shape, view.stride())
    return flat.view(shard_shape(tuple(view.shape), len(flat)))
