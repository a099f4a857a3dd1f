"""Reads `.metadata` of torch.distributed.checkpoint, from files that may be hostile.

It lists the rectangles of every tensor, and the locations of these and all other values. It is a pickle,
which can run code; so it is read by `format.pickles`, which runs none and accepts only the classes of such a
file, and every number and name in it is checked.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.files import opened, unreadable
from fullshard.checkpoint.format import pickles
from fullshard.checkpoint.format.budget import PICKLE_FACTOR, Budget
from fullshard.checkpoint.format.headers import Tensor, is_count
from fullshard.checkpoint.format.pickles import Pairs, Record, Stream, refused
from fullshard.checkpoint.format.torch_archives import counts, dtype_of, kind_of
from fullshard.checkpoint.loading.reading import DAMAGED, Stored
from fullshard.comm.messages import record
from fullshard.errors import CheckpointError, DamagedCheckpoint
from fullshard.plan.layout import Box
from fullshard.precision import DTYPES

METADATA = ".metadata"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_NODE_BYTES = 100  # of a record that was visited, with what is made of it


@record
@dataclass(frozen=True)
class Place:
    """The location of an item."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, and the location of its item."""

    name: str
    box: Box
    place: Place


@dataclass(frozen=True)
class Tiled(Stored):
    """A tensor that was saved as rectangles; it has no spans."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """What a folder holds: tensors and other values by their dotted names, and the path of each name."""

    tensors: dict[str, Tiled]
    values: dict[str, Place]
    paths: dict[str, tuple[str | int, ...]]
    digest: str  # of `.metadata`


def read_index(folder: Path) -> Index:
    path = folder / METADATA
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            return _read(path, file, size)
    except OSError as error:
        raise unreadable(repr(str(path)), error) from error


def _read(path: Path, file: BufferedReader, size: int) -> Index:
    def read_at(begin: int, end: int) -> bytes:
        file.seek(begin)
        return file.read(end - begin)

    budget = Budget(repr(str(path)), size, PICKLE_FACTOR)
    try:
        root = pickles.read(Stream(read_at, size), budget, _allows)
        file.seek(0)
        return _Reader(budget).index(root, hashlib.file_digest(file, "sha256").hexdigest())
    except pickles.NotAllowed as error:
        raise refused(METADATA, str(error)) from None
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # noqa: BLE001  a damaged pickle raises anything
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise DamagedCheckpoint(
            f"{str(path)!r} is not metadata of torch.distributed.checkpoint, or is damaged ({reason})",
            DAMAGED,
        ) from None


_CLASSES: set[tuple[str, str]] = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("collections", "OrderedDict"),
}
_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
for _module, _names in (
    (
        _METADATA,
        "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties _MEM_FORMAT_ENCODING",
    ),
    (_FILESYSTEM, "_StorageInfo _StoragePrefix"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties MEM_FORMAT_ENCODING"),
):
    _CLASSES |= {(_module, name) for name in _names.split()}


def _allows(module: str, name: str) -> bool:
    return (module, name) in _CLASSES or (module == "torch" and name in DTYPES)


class _Reader:
    """Builds the index from the records of the pickle. Every record that is visited is charged."""

    def __init__(self, budget: Budget) -> None:
        self._charge = budget.charge

    def index(self, root: Any, digest: str) -> Index:
        fields = self._fields(root, "Metadata")
        places = self._places(fields["storage_data"])
        tensors: dict[str, Tiled] = {}
        values: dict[str, Place] = {}
        for name, kind in self._pairs(fields["state_dict_metadata"]):
            if not isinstance(name, str):
                raise ValueError("a name that is not a string")
            if _is(kind, "TensorStorageMetadata"):
                tensors[name] = self._tiled(name, kind, places)
            elif _is(kind, "BytesStorageMetadata"):
                values[name] = _place(name, self._info(places.get((name, None))))
            else:
                raise ValueError(f"{name[:200]!r} is a {kind_of(kind)}")
        return Index(tensors, values, dict(self._paths(fields.get("planner_data"))), digest)

    def _paths(self, planner_data: Any) -> Iterator[tuple[str, tuple[str | int, ...]]]:
        for name, path in planner_data if isinstance(planner_data, Pairs) else ():
            self._charge(_NODE_BYTES)
            if isinstance(name, str) and _is_path(path):
                self._charge(_NODE_BYTES * len(path))
                yield name, path

    def _places(self, storage_data: Any) -> dict[tuple[str, tuple[int, ...] | None], Any]:
        """The records of locations by name and offset."""
        places = {}
        for key, info in self._pairs(storage_data):
            fields = self._fields(key, "MetadataIndex")
            name, offset = fields["fqn"], fields.get("offset")
            if not isinstance(name, str):
                raise ValueError("a location without a name")
            places[name, None if offset is None else counts(offset)] = info
        return places

    def _tiled(self, name: str, kind: Any, places: dict[Any, Any]) -> Tiled:
        fields = self._fields(kind, "TensorStorageMetadata")
        shape, dtype = counts(fields["size"]), self._dtype(fields["properties"])
        if dtype is None:
            raise ValueError(f"{name[:200]!r} has no dtype")
        if not isinstance(fields["chunks"], list):
            raise ValueError(f"{name[:200]!r} has no list of parts")
        chunks: dict[Box, Chunk] = {}  # a replicated tensor may be listed once per rank
        for chunk in fields["chunks"]:
            part = self._fields(chunk, "ChunkStorageMetadata")
            box = Box(counts(part["offsets"]), counts(part["sizes"]))
            inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
                offset + size <= full
                for offset, size, full in zip(box.offsets, box.sizes, shape, strict=True)
            )
            if not inside:
                raise ValueError(
                    f"{name[:200]!r} of shape {shape} has a part at {box.offsets} of {box.sizes}"
                )
            if box.num_elements:
                place = _place(name, self._info(places.get((name, box.offsets))))
                chunks[box] = Chunk(name, box, place)
        tensor = Tensor(name, dtype, shape)
        if any(chunk.place.length < chunk.box.num_elements * dtype.itemsize for chunk in chunks.values()):
            raise ValueError(f"{name[:200]!r} has parts that are larger than their items")
        return Tiled(tensor, (), tuple(chunks.values()))

    def _dtype(self, properties: Any) -> torch.dtype | None:
        if not _is(properties, "TensorProperties"):
            return None
        if isinstance(properties.state, tuple):  # (dtype, layout, ...)
            if len(properties.state) > 1 and not _is_strided(properties.state[1]):
                raise ValueError("a tensor that is not dense")
            return dtype_of(properties.state[0]) if properties.state else None
        return dtype_of(self._fields(properties, "TensorProperties").get("dtype"))

    def _info(self, info: Any) -> dict[str, Any]:
        return self._fields(info, "_StorageInfo") if _is(info, "_StorageInfo") else {}

    def _fields(self, record: Any, name: str) -> dict[str, Any]:
        """The attributes of an object of that class."""
        if not _is(record, name):
            raise ValueError(f"it holds a {kind_of(record)}" + f", and no {name}" * (name != "Metadata"))
        return {key: value for key, value in self._pairs(record.state) if isinstance(key, str)}

    def _pairs(self, pairs: Any) -> Pairs:
        if isinstance(pairs, Record) and pairs.of.name == "OrderedDict":
            pairs = Pairs(pairs.items)
        if not isinstance(pairs, Pairs):
            raise ValueError(f"it holds a {kind_of(pairs)}, and no dict")
        self._charge(_NODE_BYTES * (1 + len(pairs)))
        return pairs


def _is(record: Any, name: str) -> bool:
    return isinstance(record, Record) and record.of.name == name


def _is_strided(layout: Any) -> bool:
    return _is(layout, "_get_layout") and layout.args == ("torch.strided",)


def _is_path(path: Any) -> bool:
    return isinstance(path, tuple) and bool(path) and all(type(part) in (str, int) for part in path)


def _place(name: str, info: dict[str, Any]) -> Place:
    if not info:
        raise ValueError(f"it has no location for {name[:200]!r}")
    file, begin, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if isinstance(file, Record) and len(file.args) == 1:  # a path of one part
        file = file.args[0]
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        shown = file[:200] if isinstance(file, str) else kind_of(file)
        raise DamagedCheckpoint(
            f"{METADATA!r} names a file {shown!r}, which is not a plain file name",
            "Do not load it: it may have been made to read elsewhere.",
        )
    if begin is None or length is None or not is_count(begin) or not is_count(length):
        raise ValueError(f"{name[:200]!r} has no valid location in {file!r}")
    transforms = info.get("transform_descriptors")
    if transforms:
        first = transforms[0] if isinstance(transforms, list) else transforms
        through = repr(first[:100]) if isinstance(first, str) else kind_of(first)
        raise CheckpointError(
            f"{name[:200]!r} in {file!r} was written through {through}, which fullshard does not read",
            "Load it with torch.distributed.checkpoint and save it again without extensions.",
        )
    return Place(file, begin, length)
