"""The items of `*.distcp` files: one behind the other, each an archive of its own that torch.save wrote.

A tensor's archive holds a pickle, but it is not unpickled into a tensor: its few lines are read for shape,
strides and place, and the numbers are then read from the file like those of any other. So a part of an item
can be read without the rest. An archive carries the CRC-32 of what it holds; torch's own reader does not look
at it, this one does.
"""

from __future__ import annotations

import collections
import io
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from fullshard.checkpoint.dcp.format import DTYPES, Chunk, Place, Unpickler, counts, refused
from fullshard.checkpoint.format import headers
from fullshard.checkpoint.format.headers import is_count
from fullshard.checkpoint.reading import CHUNK_BYTES, Blocks
from fullshard.comm.groups import as_bytes
from fullshard.errors import CheckpointError

_MAX_PICKLE_BYTES = 2**16  # of one tensor's description; it has some 200
_PAGE_BYTES = 4096  # read at least; an archive's directory is much smaller
_END_BYTES = 22  # of an archive's last record
_REMEDY = "The checkpoint is damaged; use another one."


@dataclass(frozen=True)
class Strided:
    """The numbers of a chunk in its file: the storage's first byte, the first element, how far apart."""

    file: str
    begin: int
    size_bytes: int
    dtype: torch.dtype
    offset: int
    strides: tuple[int, ...]
    crc: int | None  # of the whole storage; None: it was written without checksums


class ItemFiles(Blocks):
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None, _PAGE_BYTES)
        self._found: dict[tuple[Place, str], Strided] = {}
        self._headers: dict[tuple[str, int], headers.Header] = {}
        self._needed: dict[tuple[Place, str], tuple[Chunk, torch.dtype]] = {}

    def want_chunk(self, chunk: Chunk, dtype: torch.dtype) -> None:
        """Some of it will be read."""
        self._needed[chunk.place, chunk.name] = (chunk, dtype)

    def verify(self) -> None:
        """Look at the head and at all numbers of every item of which some will be read; keep none of them.

        What this cannot find is an item that was replaced by another of the same shape and dtype, or was
        damaged after it was written without checksums: by torch.serialization.set_crc32_options(False), or
        in SerializationFormat.SAFETENSORS.
        """
        needed = sorted(self._needed.values(), key=lambda item: (item[0].place.file, item[0].place.begin))
        for chunk, dtype in needed:  # in the order of the files
            self._check_numbers(chunk, self.look(chunk, dtype))
        self._needed.clear()

    def look(self, chunk: Chunk, dtype: torch.dtype) -> Strided:
        key = (chunk.place, chunk.name)
        if key not in self._found:
            check_place(self, chunk.name, chunk.place)
            plain = chunk.place.length == chunk.box.num_elements * dtype.itemsize
            self._found[key] = self._plain(chunk, dtype) if plain else read_strided(self, chunk, dtype)
        return self._found[key]

    def read_region(
        self, where: Strided, low: Sequence[int], sizes: Sequence[int], out: torch.Tensor
    ) -> None:
        """A rectangle of an item, from `low` on, into `out` of that shape; a few megabytes at a time."""
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

    def item(self, name: str, place: Place) -> bytes:
        """All of an item that is no tensor."""
        check_place(self, name, place)
        return self.bytes(place.file, place.begin, place.begin + place.length)

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
        """In a file that was written with SerializationFormat.SAFETENSORS: behind one header, by name."""
        file, begin = chunk.place.file, chunk.place.begin
        if (file, begin) not in self._headers:
            self._headers[file, begin] = headers.read(
                self.name(file),
                self.size(file) - begin,
                lambda first, last: self.bytes(file, begin + first, begin + last),
            )
        tensors, begins, _ = self._headers[file, begin]
        found = tensors.get(chunk.name)
        if found is None or (found.shape, found.dtype) != (chunk.box.sizes, dtype):
            raise damaged(self, chunk.name, chunk.place, "not there in that shape and dtype")
        strides = torch.empty(found.shape, device="meta").stride()
        return Strided(file, begin + begins[chunk.name], found.size_bytes, dtype, 0, strides, None)


class View(io.RawIOBase):
    """An item's bytes as a file."""

    def __init__(self, blocks: Blocks, place: Place) -> None:
        super().__init__()
        self._blocks, self._place, self._at = blocks, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._place.length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._place.length - self._at))
        begin = self._place.begin + self._at
        self._blocks.read_into(
            self._place.file, begin, begin + count, np.frombuffer(buffer, np.uint8)[:count]
        )
        self._at += count
        return count


class NotPlain(Exception):
    """A value that cannot be read without running code."""


def read_value(files: ItemFiles, name: str, place: Place) -> Any:
    """An item that is no tensor: numbers, texts, lists, dicts. Anything that needs code is refused."""
    data = io.BytesIO(files.item(name, place))
    try:
        _check_end(data.getvalue()[-_END_BYTES:])
        with zipfile.ZipFile(data) as archive:
            records = archive.infolist()
            if any(info.compress_type != zipfile.ZIP_STORED for info in records):
                raise ValueError("it is compressed, which torch.save does not do")
            has_checksums = any(info.CRC for info in records)  # or torch was told to write zeros
            bad = archive.testzip() if has_checksums else None
    except Exception as error:  # noqa: BLE001  a damaged archive raises anything
        why = f"not an archive that can be read ({type(error).__name__}: {str(error)[:200]})"
        raise damaged(files, name, place, why) from None
    if bad is not None:
        raise damaged(files, name, place, "its checksum differs")
    data.seek(0)
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch refuses in several ways
        raise NotPlain(str(error).splitlines()[0][:200]) from None


def check_place(blocks: Blocks, name: str, place: Place) -> None:
    size = blocks.size(place.file)
    if place.begin + place.length > size:
        raise CheckpointError(
            f"{blocks.name(place.file)} has {size} bytes, and {name!r} lies in it up to byte "
            f"{place.begin + place.length}: it was cut short",
            _REMEDY,
        )


def damaged(blocks: Blocks, name: str, place: Place, why: str) -> CheckpointError:
    return CheckpointError(
        f"{blocks.name(place.file)}: what lies at bytes {place.begin} to {place.begin + place.length} is not "
        f"{name!r}: {why}",
        _REMEDY,
    )


def read_strided(blocks: Blocks, chunk: Chunk, dtype: torch.dtype) -> Strided:
    """Where in its archive a chunk's numbers are. Nothing is believed: shape, dtype, sizes are compared."""
    check_place(blocks, chunk.name, chunk.place)
    try:
        found, sizes = _read_archive(blocks, chunk.place)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged archive raises anything
        why = f"not an archive of one plain tensor ({type(error).__name__}: {str(error)[:200]})"
        raise damaged(blocks, chunk.name, chunk.place, why) from None
    if sizes != chunk.box.sizes or found.dtype != dtype:
        why = f"it has shape {sizes} and {found.dtype}, and should have {chunk.box.sizes} and {dtype}"
        raise damaged(blocks, chunk.name, chunk.place, why)
    last = found.offset + sum((n - 1) * s for n, s in zip(sizes, found.strides, strict=True))
    if prod(sizes) and (last + 1) * dtype.itemsize > found.size_bytes:
        raise damaged(blocks, chunk.name, chunk.place, "its numbers reach beyond its end")
    return found


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype | None  # None: the tensor says
    count: int


@dataclass(frozen=True)
class _Described:
    storage: _Storage
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild(
    storage: Any, offset: Any, sizes: Any, strides: Any, _grad: Any, _hooks: Any, *more: Any
) -> _Described:
    """In place of torch's function of six arguments, and of the one that has a dtype and more besides."""
    dtype = storage.dtype
    if dtype is None:
        dtype, *more = more  # type: ignore[assignment]
    if any(more) or not isinstance(dtype, torch.dtype) or not is_count(offset):
        raise ValueError("a tensor that is not plain")
    found = _Described(storage, dtype, offset, counts(sizes), counts(strides))
    if len(found.sizes) != len(found.strides):
        raise ValueError("a tensor with more strides than sizes")
    return found


def _rebuild_parameter(data: _Described, _grad: Any, _hooks: Any) -> _Described:
    return data


_BUILDERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): collections.OrderedDict,
}
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip


class _TensorReader(Unpickler):
    """Reads how a tensor is made, and makes none."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        found = _BUILDERS.get((module, name))
        if found is None:
            raise refused("a tensor's archive", f"{module}.{name}")
        return found

    def persistent_load(self, said: Any) -> Any:
        kind, dtype, key, _, count = said
        if kind != "storage" or not isinstance(key, str) or not is_count(count):
            raise ValueError("a storage that is not described")
        return _Storage(key, dtype, count)


def _check_end(tail: bytes) -> None:
    """An archive of torch.save ends with its end record; Python's reader would look for one further up."""
    if tail[:4] != b"PK\5\6" or tail[-2:] != b"\0\0":
        raise ValueError("it does not end as an archive does")


def _read_archive(blocks: Blocks, place: Place) -> tuple[Strided, tuple[int, ...]]:
    end = place.begin + place.length
    _check_end(blocks.bytes(place.file, max(place.begin, end - _END_BYTES), end))
    with zipfile.ZipFile(View(blocks, place)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        told = records["data.pkl"]
        if told.file_size > _MAX_PICKLE_BYTES or told.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its description is too long")
        has_checksums = told.CRC != 0  # torch.serialization.set_crc32_options(False) writes zeros everywhere
        data = _record(blocks, place, told, has_checksums)
        found = _TensorReader(io.BytesIO(data)).load()
        if not isinstance(found, _Described):
            raise ValueError(f"it holds a {type(found).__name__}")
        if (
            "byteorder" in records
            and _record(blocks, place, records["byteorder"], has_checksums) != b"little"
        ):
            raise ValueError("its numbers are big-endian")
        numbers = records[f"data/{found.storage.key}"]
    width = 1 if found.storage.dtype is None else found.dtype.itemsize
    if numbers.compress_type != zipfile.ZIP_STORED or numbers.file_size != found.storage.count * width:
        raise ValueError(f"its storage has {numbers.file_size} bytes, for {found.storage.count} elements")
    begin = _begin(blocks, place, numbers)
    crc = numbers.CRC if has_checksums else None
    where = Strided(place.file, begin, numbers.file_size, found.dtype, found.offset, found.strides, crc)
    return where, found.sizes


def _record(blocks: Blocks, place: Place, info: zipfile.ZipInfo, check: bool) -> bytes:
    begin = _begin(blocks, place, info)
    data = blocks.bytes(place.file, begin, begin + info.file_size)
    if check and crc32(data) != info.CRC:
        raise ValueError(f"the checksum of {info.filename!r} differs")
    return data


def _begin(blocks: Blocks, place: Place, info: zipfile.ZipInfo) -> int:
    """The first byte of a record: behind its local header, which has a name and padding of its own."""
    header = place.begin + info.header_offset
    signature, name, padding = struct.unpack("<4s22xHH", blocks.bytes(place.file, header, header + 30))
    begin = header + 30 + int(name) + int(padding)
    if signature != b"PK\3\4" or begin + info.file_size > place.begin + place.length:
        raise ValueError(f"{info.filename!r} is not where it should be")
    return begin
