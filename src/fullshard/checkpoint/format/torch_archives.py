"""Archives that torch.save wrote, read without torch.load: no code runs, and memory is bounded by a Budget.

An archive is a zip of `data.pkl` and the bytes of every storage, none of it compressed. A tensor in the
pickle is only a description: where its numbers are, of what shape. So a part of a tensor can be read without
the rest, and a value of the user's is rebuilt from the few types that are plain data. `torch.load` with
`weights_only=True` also runs no code, but allocates whatever a pickle of 400 bytes asks for.
"""

from __future__ import annotations

import collections
import io
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from fullshard.checkpoint.files import opened
from fullshard.checkpoint.format import pickles
from fullshard.checkpoint.format.budget import PICKLE_FACTOR, Budget
from fullshard.checkpoint.format.headers import is_count
from fullshard.checkpoint.format.pickles import Name, Pairs, Record, Stored, Stream
from fullshard.errors import CheckpointError, DamagedCheckpoint
from fullshard.precision import DTYPES

_END_BYTES = 22  # of an archive's last record
_ENTRY_FACTOR = 16  # Python's zipfile makes an object of 700 bytes for an entry of 50
_NODE_BYTES = 64  # of a value that is rebuilt, with its place in the container around it
_MAX_DEPTH = 100
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_UNTYPED = Name("torch.storage", "UntypedStorage")
_TENSORS = {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")}
_PARAMETER = ("torch._utils", "_rebuild_parameter")
_ORDERED = ("collections", "OrderedDict")


class NotPlain(Exception):
    """A value that cannot be read without running code."""


@dataclass(frozen=True)
class Extent:
    """The bytes of an archive: a file, a part of one, or bytes in memory."""

    name: str
    size_bytes: int
    read_at: Callable[[int, int], bytes]

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> Extent:
        view = memoryview(data)
        return cls(name, len(data), lambda begin, end: bytes(view[begin:end]))

    def budget(self) -> Budget:
        return Budget(self.name, self.size_bytes, PICKLE_FACTOR)


class _View(io.RawIOBase):
    """An extent as a file object for zipfile, which reads only the directory of the archive from it."""

    def __init__(self, extent: Extent, budget: Budget) -> None:
        super().__init__()
        self._extent, self._budget, self._at = extent, budget, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._extent.size_bytes)[whence])
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        rest = max(0, self._extent.size_bytes - self._at)
        count = rest if count is None or count < 0 else min(count, rest)
        self._budget.charge(_ENTRY_FACTOR * count)
        data = self._extent.read_at(self._at, self._at + count)
        self._at += count
        return data


@dataclass(frozen=True)
class Described:
    """A tensor in an archive: the record that holds its numbers, and where in it they are."""

    key: str
    count: int  # of elements in its storage; of bytes, if it is untyped
    is_untyped: bool
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def storage_bytes(self) -> int:
        return self.count * (1 if self.is_untyped else self.dtype.itemsize)

    def check_inside(self) -> None:
        """Raise if its numbers reach beyond its storage."""
        last = self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        if prod(self.sizes) and (last + 1) * self.dtype.itemsize > self.storage_bytes:
            raise ValueError("its numbers reach beyond its end")


@dataclass(frozen=True)
class Numbers:
    """The bytes of a storage in its extent."""

    begin: int
    size_bytes: int
    crc: int | None  # None if the archive was written without checksums


class Archive:
    """The directory and the pickle of an archive."""

    def __init__(self, extent: Extent, budget: Budget, allows: Callable[[str, str], bool]) -> None:
        self._extent, self._budget = extent, budget
        end = extent.size_bytes
        _check_end(extent.read_at(max(0, end - _END_BYTES), end))
        with zipfile.ZipFile(_View(extent, budget)) as archive:
            self._records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        pickled = self._record("data.pkl")
        self._has_checksums = pickled.CRC != 0  # zeros after torch.serialization.set_crc32_options(False)
        self._check_crc(pickled)
        if "byteorder" in self._records and self._read("byteorder", 16) != b"little":
            raise ValueError("its numbers are big-endian")
        begin = self._begin(pickled)
        stream = Stream(lambda a, b: extent.read_at(begin + a, begin + b), pickled.file_size)
        self.root = pickles.read(stream, budget, allows)

    def numbers(self, tensor: Described) -> Numbers:
        info = self._record(f"data/{tensor.key}")
        if info.file_size != tensor.storage_bytes:
            raise ValueError(f"its storage has {info.file_size} bytes, for {tensor.count} elements")
        return Numbers(self._begin(info), info.file_size, info.CRC if self._has_checksums else None)

    def storage(self, tensor: Described) -> bytearray:
        """The bytes of a storage, in memory."""
        numbers = self.numbers(tensor)
        self._budget.charge(2 * numbers.size_bytes)
        data = bytearray(self._extent.read_at(numbers.begin, numbers.begin + numbers.size_bytes))
        if numbers.crc is not None and crc32(data) != numbers.crc:
            raise ValueError(f"the checksum of 'data/{tensor.key}' differs")
        return data

    def _record(self, name: str) -> zipfile.ZipInfo:
        info = self._records[name]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError("it is compressed, which torch.save does not do")
        return info

    def _read(self, name: str, most: int) -> bytes:
        info = self._record(name)
        if info.file_size > most:
            raise ValueError(f"{name!r} is too long")
        self._check_crc(info)
        begin = self._begin(info)
        return self._extent.read_at(begin, begin + info.file_size)

    def _check_crc(self, info: zipfile.ZipInfo) -> None:
        if not self._has_checksums:
            return
        crc, begin = 0, self._begin(info)
        for at in range(0, info.file_size, 2**20):
            crc = crc32(self._extent.read_at(begin + at, begin + min(at + 2**20, info.file_size)), crc)
        if crc != info.CRC:
            raise ValueError(f"the checksum of {info.filename[:200]!r} differs")

    def _begin(self, info: zipfile.ZipInfo) -> int:
        """The first byte of a record, after its local header, which has its own name and padding."""
        header = info.header_offset
        if header + 30 > self._extent.size_bytes:
            raise ValueError(f"{info.filename[:200]!r} is not where it should be")
        signature, name, padding = struct.unpack("<4s22xHH", self._extent.read_at(header, header + 30))
        begin = header + 30 + int(name) + int(padding)
        if signature != b"PK\3\4" or begin + info.file_size > self._extent.size_bytes:
            raise ValueError(f"{info.filename[:200]!r} is not where it should be")
        return begin


def _check_end(tail: bytes) -> None:
    """Raise unless the archive ends with its end record; Python's reader would search further up."""
    if tail[:4] != b"PK\5\6" or tail[-2:] != b"\0\0":
        raise ValueError("it does not end like an archive")


# ---- tensors


def counts(values: Any) -> tuple[int, ...]:
    """A shape, or strides, from the records of a pickle."""
    if isinstance(values, Record) and values.of == Name("torch", "Size") and len(values.args) == 1:
        values = values.args[0]
    if not isinstance(values, (tuple, list)) or len(values) > 64 or not all(map(is_count, values)):
        raise ValueError("a shape that is not a list of counts")
    return tuple(values)


def dtype_of(value: Any) -> torch.dtype | None:
    known = isinstance(value, Name) and value.module == "torch" and value.name in DTYPES
    return DTYPES[value.name] if known else None


def described(record: Any) -> Described:
    """The tensor that a record of torch's _rebuild_tensor_v2, or _v3, stands for."""
    while isinstance(record, Record) and (record.of.module, record.of.name) == _PARAMETER:
        record = record.args[0]
    if not isinstance(record, Record) or (record.of.module, record.of.name) not in _TENSORS:
        raise ValueError(f"it holds a {kind_of(record)}")
    storage, offset, sizes, strides, _, _, *more = record.args
    kind, storage_type, key, _, count = _parts(storage)
    if kind != "storage" or not isinstance(key, str) or not is_count(count):
        raise ValueError("a storage without a valid description")
    dtype: torch.dtype | None = None
    if storage_type == _UNTYPED:
        dtype, more = dtype_of(more[0]), more[1:]
    elif isinstance(storage_type, Name) and storage_type.module == "torch":
        dtype = _STORAGES.get(storage_type.name)
    if dtype is None or any(_is_something(one) for one in more) or not is_count(offset):
        raise ValueError("a tensor that is not plain")
    tensor = Described(key, count, storage_type == _UNTYPED, dtype, offset, counts(sizes), counts(strides))
    if len(tensor.sizes) != len(tensor.strides):
        raise ValueError("a tensor with more strides than sizes")
    return tensor


def _parts(storage: Any) -> tuple[Any, ...]:
    if not isinstance(storage, Stored) or not isinstance(storage.description, tuple):
        raise ValueError("a tensor without a storage")
    return storage.description


def _is_something(value: Any) -> bool:
    return bool(value) if not isinstance(value, Record) else bool(value.args or value.items or value.state)


def kind_of(value: Any) -> str:
    if isinstance(value, Record):
        return str(value.of)
    return {Pairs: "dict", Name: "class", Stored: "storage"}.get(type(value), type(value).__name__)


def allows_tensor(module: str, name: str) -> bool:
    """Whether a class or function occurs in the archive of one plain tensor."""
    if module == "torch":
        return name in _STORAGES or name in DTYPES or name == "Size"
    return (module, name) in {*_TENSORS, _PARAMETER, _ORDERED, (_UNTYPED.module, _UNTYPED.name)}


# ---- values


_BUILTINS = ("builtins", "__builtin__")
_CONTAINERS: dict[str, Any] = {"set": set, "frozenset": frozenset}


def _allows_all(_module: str, _name: str) -> bool:
    """What is not plain becomes a record, too, and is refused if the value is made of it."""
    return True


def read_plain(extent: Extent, budget: Budget, make: Callable[[str], Exception]) -> Any:
    """The value in an archive: numbers, strings, containers, tensors. NotPlain for anything else.

    `make(why)` is the exception for an archive that is damaged.
    """
    try:
        archive = Archive(extent, budget, _allows_all)
        return _Values(archive, budget).of(archive.root, 0)
    except (CheckpointError, NotPlain):
        raise
    except Exception as error:  # noqa: BLE001  a damaged archive raises anything
        raise make(f"not an archive that can be read ({type(error).__name__}: {str(error)[:200]})") from None


def read_bytes(name: str, data: bytes) -> Any:
    """The plain value in bytes that torch.save wrote."""
    extent = Extent.of_bytes(name, data)
    remedy = "The checkpoint is damaged; use another one."
    return read_plain(extent, extent.budget(), lambda why: DamagedCheckpoint(f"{name} is {why}", remedy))


def read_file(path: Path) -> Any:
    """The plain value in a file that torch.save wrote."""
    with opened(path) as file:

        def read_at(begin: int, end: int) -> bytes:
            file.seek(begin)
            return file.read(end - begin)

        extent = Extent(repr(str(path)), path.stat().st_size, read_at)

        def damaged(why: str) -> CheckpointError:
            return DamagedCheckpoint(f"{str(path)!r} is {why}", "Use another copy of it.")

        try:
            return read_plain(extent, extent.budget(), damaged)
        except NotPlain as error:
            raise CheckpointError(
                f"{str(path)!r} holds more than plain data and tensors: {error}",
                "Reading it could run code; convert it with the program that wrote it.",
            ) from None


@dataclass
class _Values:
    """Rebuilds values from records. Every visit is charged: what is shared in a pickle is visited again."""

    archive: Archive
    budget: Budget
    storages: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, node: Any, depth: int) -> Any:
        self.budget.charge(_NODE_BYTES)
        if depth > _MAX_DEPTH:
            raise NotPlain("a value that is nested too deep")
        if node is None or isinstance(node, (bool, int, float, str, bytes)):
            return node
        if isinstance(node, Pairs):
            return self._dict(node, depth)
        if isinstance(node, (list, tuple)):
            items = [self.of(item, depth + 1) for item in node]
            return items if isinstance(node, list) else tuple(items)
        if isinstance(node, Record):
            return self._record(node, depth)
        dtype = dtype_of(node)
        if dtype is None:
            raise NotPlain(f"it refers to {node if isinstance(node, Name) else kind_of(node)}")
        return dtype

    def _dict(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        rebuilt = {}
        for key, value in pairs:
            if isinstance(key, Record) or isinstance(plain := self.of(key, depth + 1), (list, dict)):
                raise NotPlain("a dict with keys that are not plain")
            rebuilt[plain] = self.of(value, depth + 1)
        return rebuilt

    def _record(self, record: Record, depth: int) -> Any:
        path, args = (record.of.module, record.of.name), record.args
        if path in _TENSORS or path == _PARAMETER:
            return self._tensor(record)
        if path == _ORDERED and not args:
            return self._ordered_dict(record, depth)
        if record.state is not None and _is_something(record.state):
            raise NotPlain(f"it refers to {record.of}, with a state")
        if record.items:
            raise NotPlain(f"it refers to {record.of}, with items")
        if path == ("collections", "Counter") and len(args) == 1 and isinstance(args[0], Pairs):
            return collections.Counter(self._dict(args[0], depth))
        if path == ("torch", "Size"):
            return torch.Size(counts(record))
        if path == ("torch", "device"):
            return torch.device(*self._scalars(record))
        if path == ("_codecs", "encode") and len(args) == 2 and args[1] == "latin1":
            return self._scalars(record)[0].encode("latin1")
        if path[0] in _BUILTINS:
            return self._builtin(record, depth)
        raise NotPlain(f"it refers to {record.of}")

    def _ordered_dict(self, record: Record, depth: int) -> Any:
        """With the attributes that torch gives to a state dict: the versions of its modules."""
        value: Any = collections.OrderedDict(self._dict(record.items, depth))
        if isinstance(record.state, Pairs):
            vars(value).update(
                {name: one for name, one in self._dict(record.state, depth).items() if name == "_metadata"}
            )
        return value

    def _builtin(self, record: Record, depth: int) -> Any:
        name, args = record.of.name, record.args
        if name in _CONTAINERS and len(args) == 1 and type(args[0]) is list:
            return _CONTAINERS[name](self.of(item, depth + 1) for item in args[0])
        if name == "complex" and len(args) == 2:
            return complex(*self._scalars(record))
        if name == "bytearray" and len(args) == 1:
            content = self.of(args[0], depth + 1)
            if isinstance(content, bytes):  # a number would be a length
                self.budget.charge(len(content))
                return bytearray(content)
        raise NotPlain(f"it refers to {record.of}")

    def _scalars(self, record: Record) -> list[Any]:
        if not all(type(one) in (str, int, float) for one in record.args):
            raise NotPlain(f"it refers to {record.of}, with arguments that are not plain")
        for one in record.args:
            self.budget.charge(4 * len(one) if isinstance(one, str) else _NODE_BYTES)
        return list(record.args)

    def _tensor(self, record: Record) -> torch.Tensor:
        tensor = described(record)
        tensor.check_inside()
        size_bytes = prod(tensor.sizes) * tensor.dtype.itemsize
        self.budget.charge(size_bytes)  # strides of 0 may repeat few bytes many times
        if tensor.key not in self.storages:
            data = self.archive.storage(tensor)
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            self.storages[tensor.key] = flat
        storage = self.storages[tensor.key].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype)
        value = empty.set_(storage, tensor.offset, tensor.sizes, tensor.strides)
        value = value.contiguous() if size_bytes > tensor.storage_bytes else value
        if (record.of.module, record.of.name) != _PARAMETER:
            return value
        return torch.nn.Parameter(value, requires_grad=record.args[1] is True and value.is_floating_point())
