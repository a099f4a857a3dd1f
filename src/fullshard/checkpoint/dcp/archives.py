"""The items of `*.distcp` files: one after another, each an archive that torch.save wrote.

A tensor's archive holds a pickle, which is not unpickled into a tensor: it is read for shape, strides and
location only, and the numbers are then read from the file directly. So a part of an item can be read
without the rest. An archive has a CRC-32 of its contents; torch's own reader ignores it, this one checks
it.
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
from fullshard.checkpoint.loading.reading import CHUNK_BYTES, DAMAGED, Blocks
from fullshard.comm.groups import as_bytes
from fullshard.errors import CheckpointError, DamagedCheckpoint

_MAX_PICKLE_BYTES = 2**16  # of one tensor's description, which has about 200
_PAGE_BYTES = 4096  # smallest read; an archive's directory is much smaller
_END_BYTES = 22  # of an archive's last record


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

    def item(self, name: str, place: Place) -> bytes:
        """The bytes of an item that is not a tensor."""
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


class View(io.RawIOBase):
    """An item's bytes as a file object."""

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
    """The value of an item that is not a tensor: numbers, strings, lists, dicts. Nothing that runs code."""
    data = io.BytesIO(files.item(name, place))
    try:
        _check_end(data.getvalue()[-_END_BYTES:])
        with zipfile.ZipFile(data) as archive:
            records = archive.infolist()
            if any(info.compress_type != zipfile.ZIP_STORED for info in records):
                raise ValueError("it is compressed, which torch.save does not do")
            has_checksums = any(info.CRC for info in records)  # all zero if torch was set to write none
            bad = archive.testzip() if has_checksums else None
    except Exception as error:  # noqa: BLE001  a damaged archive raises anything
        why = f"not an archive that can be read ({type(error).__name__}: {str(error)[:200]})"
        raise damaged(files, name, place, why) from None
    if bad is not None:
        raise damaged(files, name, place, "its checksum differs")
    data.seek(0)
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch raises several kinds
        raise NotPlain(str(error).splitlines()[0][:200]) from None


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


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype | None  # None: given by the tensor
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
    """Replaces torch's _rebuild_tensor_v2, and _v3, which also has a dtype and metadata."""
    dtype = storage.dtype
    if dtype is None:
        dtype, *more = more  # type: ignore[assignment]
    if any(more) or not isinstance(dtype, torch.dtype) or not is_count(offset):
        raise ValueError("a tensor that is not plain")
    tensor = _Described(storage, dtype, offset, counts(sizes), counts(strides))
    if len(tensor.sizes) != len(tensor.strides):
        raise ValueError("a tensor with more strides than sizes")
    return tensor


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
    """Reads the description of a tensor without building it."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        builder = _BUILDERS.get((module, name))
        if builder is None:
            raise refused("a tensor's archive", f"{module}.{name}")
        return builder

    def persistent_load(self, description: Any) -> Any:
        kind, dtype, key, _, count = description
        if kind != "storage" or not isinstance(key, str) or not is_count(count):
            raise ValueError("a storage without a valid description")
        return _Storage(key, dtype, count)


def _check_end(tail: bytes) -> None:
    """Raise unless the archive ends with its end record; Python's reader would search further up."""
    if tail[:4] != b"PK\5\6" or tail[-2:] != b"\0\0":
        raise ValueError("it does not end like an archive")


def _read_archive(blocks: Blocks, place: Place) -> tuple[Strided, tuple[int, ...]]:
    end = place.begin + place.length
    _check_end(blocks.bytes(place.file, max(place.begin, end - _END_BYTES), end))
    with zipfile.ZipFile(View(blocks, place)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        pickled = records["data.pkl"]
        if pickled.file_size > _MAX_PICKLE_BYTES or pickled.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its description is too long")
        has_checksums = pickled.CRC != 0  # zeros after torch.serialization.set_crc32_options(False)
        data = _record(blocks, place, pickled, has_checksums)
        tensor = _TensorReader(io.BytesIO(data)).load()
        if not isinstance(tensor, _Described):
            raise ValueError(f"it holds a {type(tensor).__name__}")
        if (
            "byteorder" in records
            and _record(blocks, place, records["byteorder"], has_checksums) != b"little"
        ):
            raise ValueError("its numbers are big-endian")
        numbers = records[f"data/{tensor.storage.key}"]
    width = 1 if tensor.storage.dtype is None else tensor.dtype.itemsize
    if numbers.compress_type != zipfile.ZIP_STORED or numbers.file_size != tensor.storage.count * width:
        raise ValueError(f"its storage has {numbers.file_size} bytes, for {tensor.storage.count} elements")
    begin = _begin(blocks, place, numbers)
    crc = numbers.CRC if has_checksums else None
    where = Strided(place.file, begin, numbers.file_size, tensor.dtype, tensor.offset, tensor.strides, crc)
    return where, tensor.sizes


def _record(blocks: Blocks, place: Place, info: zipfile.ZipInfo, check: bool) -> bytes:
    begin = _begin(blocks, place, info)
    data = blocks.bytes(place.file, begin, begin + info.file_size)
    if check and crc32(data) != info.CRC:
        raise ValueError(f"the checksum of {info.filename!r} differs")
    return data


def _begin(blocks: Blocks, place: Place, info: zipfile.ZipInfo) -> int:
    """The first byte of a record, after its local header, which has its own name and padding."""
    header = place.begin + info.header_offset
    signature, name, padding = struct.unpack("<4s22xHH", blocks.bytes(place.file, header, header + 30))
    begin = header + 30 + int(name) + int(padding)
    if signature != b"PK\3\4" or begin + info.file_size > place.begin + place.length:
        raise ValueError(f"{info.filename!r} is not where it should be")
    return begin
