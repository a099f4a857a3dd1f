"""The items of `*.distcp` files: one after another, each an archive that torch.save wrote.

A tensor's archive holds a pickle, which is not unpickled into a tensor: it is read for shape, strides and
location only, and the numbers are then read from the file directly. So a part of an item can be read
without the rest. An archive has a CRC-32 of its contents; torch's own reader ignores it, this one checks
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from fullshard.checkpoint.dcp.format import Chunk, Place
from fullshard.checkpoint.format import headers
from fullshard.checkpoint.format.budget import PICKLE_FACTOR, Budget
from fullshard.checkpoint.format.pickles import NotAllowed, refused
from fullshard.checkpoint.format.torch_archives import (
    Archive,
    Extent,
    NotPlain,
    allows_tensor,
    described,
    read_plain,
)
from fullshard.checkpoint.loading.reading import CHUNK_BYTES, DAMAGED, Blocks
from fullshard.comm.groups import as_bytes
from fullshard.errors import CheckpointError, DamagedCheckpoint

__all__ = ["ItemFiles", "NotPlain", "Strided", "read_value"]
_PAGE_BYTES = 4096  # smallest read; an archive's directory is much smaller


@dataclass(frozen=True)
class Strided:
    """The numbers of a chunk in its file: the storage's first byte and size, first element, strides."""

    file: str
    begin: int
    size_bytes: int
    dtype: torch.dtype
    offset: int
    strides: tuple[int, ...]
    crc: int | None  # of the complete storage; None if it was written without checksums


class ItemFiles(Blocks):
    """The `*.distcp` files of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None, _PAGE_BYTES)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        # Of everything that fs.load returns: many names may refer to the same bytes.
        self.values = Budget(f"the folder {str(folder)!r}", size, PICKLE_FACTOR)
        self._located: dict[tuple[Place, str], Strided] = {}
        self._headers: dict[tuple[str, int], headers.Header] = {}
        self._needed: dict[tuple[Place, str], tuple[Chunk, torch.dtype]] = {}

    def want_chunk(self, chunk: Chunk, dtype: torch.dtype) -> None:
        """Announce that some of a chunk will be read."""
        self._needed[chunk.place, chunk.name] = (chunk, dtype)

    def verify(self) -> None:
        """Read and check every item of which some will be read, and keep none of it.

        This does not detect an item that was replaced by another of the same shape and dtype, or one that was
        damaged after it was written without checksums: with torch.serialization.set_crc32_options(False), or
        in SerializationFormat.SAFETENSORS.
        """
        needed = sorted(self._needed.values(), key=lambda item: (item[0].place.file, item[0].place.begin))
        for chunk, dtype in needed:  # in the order of the files
            self._check_numbers(chunk, self.locate(chunk, dtype))
        self._needed.clear()

    def locate(self, chunk: Chunk, dtype: torch.dtype) -> Strided:
        """Where the numbers of a chunk are."""
        key = (chunk.place, chunk.name)
        if key not in self._located:
            check_place(self, chunk.name, chunk.place)
            plain = chunk.place.length == chunk.box.num_elements * dtype.itemsize
            self._located[key] = self._plain(chunk, dtype) if plain else read_strided(self, chunk, dtype)
        return self._located[key]

    def read_region(
        self, where: Strided, low: Sequence[int], sizes: Sequence[int], out: torch.Tensor
    ) -> None:
        """Read a rectangle of an item, from `low` on, into `out` of that shape, a few megabytes at a time."""
        itemsize = where.dtype.itemsize
        reach = [(n - 1) * s for n, s in zip(sizes, where.strides, strict=True)]
        span = 1 + sum(reach)
        if span * itemsize > CHUNK_BYTES and max(reach) > 0:
            dim = reach.index(max(reach))
            half = sizes[dim] // 2
            for first, count in ((0, half), (half, sizes[dim] - half)):
                begin = [at + first * (d == dim) for d, at in enumerate(low)]
                part = [count if d == dim else n for d, n in enumerate(sizes)]
                self.read_region(where, begin, part, out.narrow(dim, first, count))
            return
        start = where.offset + sum(at * s for at, s in zip(low, where.strides, strict=True))
        begin_byte = where.begin + start * itemsize
        values = torch.empty(span, dtype=where.dtype)
        self.read_into(where.file, begin_byte, begin_byte + span * itemsize, as_bytes(values).numpy())
        out.copy_(values.as_strided(tuple(sizes), where.strides))

    def _check_numbers(self, chunk: Chunk, where: Strided) -> None:
        if where.crc is None:
            return
        crc, end = 0, where.begin + where.size_bytes
        for at in range(where.begin, end, CHUNK_BYTES):
            part = np.empty(min(CHUNK_BYTES, end - at), np.uint8)
            self.read_into(where.file, at, at + len(part), part)
            crc = crc32(part.data, crc)
        if crc != where.crc:
            raise damaged(self, chunk.name, chunk.place, "its checksum differs")

    def _plain(self, chunk: Chunk, dtype: torch.dtype) -> Strided:
        """Locate a chunk in a file of SerializationFormat.SAFETENSORS, by its header."""
        file, begin = chunk.place.file, chunk.place.begin
        if (file, begin) not in self._headers:
            self._headers[file, begin] = headers.read(
                self.name(file),
                self.size(file) - begin,
                lambda first, last: self.bytes(file, begin + first, begin + last),
            )
        tensors, begins, _ = self._headers[file, begin]
        tensor = tensors.get(chunk.name)
        if tensor is None or (tensor.shape, tensor.dtype) != (chunk.box.sizes, dtype):
            raise damaged(self, chunk.name, chunk.place, "the header has no tensor of that shape and dtype")
        strides = torch.empty(tensor.shape, device="meta").stride()
        return Strided(file, begin + begins[chunk.name], tensor.size_bytes, dtype, 0, strides, None)


def read_value(files: ItemFiles, name: str, place: Place) -> Any:
    """The value of an item that is not a tensor: numbers, strings, lists, dicts. Nothing that runs code."""
    check_place(files, name, place)
    return read_plain(_extent(files, place), files.values, lambda why: damaged(files, name, place, why))


def _extent(blocks: Blocks, place: Place) -> Extent:
    def read_at(begin: int, end: int) -> bytes:
        return blocks.bytes(place.file, place.begin + begin, place.begin + end)

    name = f"an item at byte {place.begin} of {blocks.name(place.file)}"
    return Extent(name, place.length, read_at)


def check_place(blocks: Blocks, name: str, place: Place) -> None:
    size = blocks.size(place.file)
    if place.begin + place.length > size:
        raise DamagedCheckpoint(
            f"{blocks.name(place.file)} has {size} bytes, and {name!r} ends at byte "
            f"{place.begin + place.length}: it was cut short",
            DAMAGED,
        )


def damaged(blocks: Blocks, name: str, place: Place, why: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{blocks.name(place.file)}: bytes {place.begin} to {place.begin + place.length} are not "
        f"{name!r}: {why}",
        DAMAGED,
    )


def read_strided(blocks: Blocks, chunk: Chunk, dtype: torch.dtype) -> Strided:
    """Where in its archive a chunk's numbers are, after checking shape, dtype and sizes."""
    check_place(blocks, chunk.name, chunk.place)
    try:
        where, sizes = _read_archive(blocks, chunk.place)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged archive raises anything
        why = f"not an archive of one plain tensor ({type(error).__name__}: {str(error)[:200]})"
        raise damaged(blocks, chunk.name, chunk.place, why) from None
    if sizes != chunk.box.sizes or where.dtype != dtype:
        why = f"it has shape {sizes} and {where.dtype}, and should have {chunk.box.sizes} and {dtype}"
        raise damaged(blocks, chunk.name, chunk.place, why)
    last = where.offset + sum((n - 1) * s for n, s in zip(sizes, where.strides, strict=True))
    if prod(sizes) and (last + 1) * dtype.itemsize > where.size_bytes:
        raise damaged(blocks, chunk.name, chunk.place, "its numbers reach beyond its end")
    return where


def _read_archive(blocks: Blocks, place: Place) -> tuple[Strided, tuple[int, ...]]:
    extent = _extent(blocks, place)
    try:
        archive = Archive(extent, Budget(extent.name, 0, 0), allows_tensor)
    except NotAllowed as error:
        raise refused("a tensor's archive", str(error)) from None
    tensor = described(archive.root)
    numbers = archive.numbers(tensor)
    begin = place.begin + numbers.begin
    where = Strided(
        place.file, begin, numbers.size_bytes, tensor.dtype, tensor.offset, tensor.strides, numbers.crc
    )
    return where, tensor.sizes
