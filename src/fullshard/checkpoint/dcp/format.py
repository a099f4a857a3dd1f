"""Reads `.metadata` of torch.distributed.checkpoint, from files that may be hostile.

It lists the rectangles of every tensor, and the locations of these and all other values. It is a pickle,
which can run code; so it is read by an unpickler that accepts only the classes of such a file, and every
number and name in it is checked.
"""

from __future__ import annotations

import collections
import hashlib
import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed._shard.sharded_tensor import metadata as older
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from fullshard.checkpoint.files import unreadable
from fullshard.checkpoint.format.headers import Tensor, is_count
from fullshard.checkpoint.loading.reading import DAMAGED, Stored
from fullshard.comm.messages import record
from fullshard.errors import CheckpointError, DamagedCheckpoint
from fullshard.plan.layout import Box

METADATA = ".metadata"
_MAX_METADATA_BYTES = 2**30
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


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
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise DamagedCheckpoint(
                f"{str(path)!r} is too large to be read safely", "Use another copy of it."
            )
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(repr(str(path)), error) from error
    try:
        loaded = _MetadataReader(io.BytesIO(data)).load()
        if not isinstance(loaded, metadata.Metadata):
            raise ValueError(f"it holds a {type(loaded).__name__}")
        return _index(loaded, hashlib.sha256(data).hexdigest())
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged pickle raises anything
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise DamagedCheckpoint(
            f"{str(path)!r} is not metadata of torch.distributed.checkpoint, or is damaged ({reason})",
            DAMAGED,
        ) from None


def _layout(name: Any) -> torch.layout:
    """The layout of a tensor from its name in the file."""
    if name != "torch.strided":
        raise ValueError(f"a tensor of layout {str(name)[:40]}")
    return torch.strided


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


_CLASSES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("pathlib._local", "WindowsPath"): _path,
    ("collections", "OrderedDict"): collections.OrderedDict,
}
for _module, _names in (
    (
        metadata,
        "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties _MEM_FORMAT_ENCODING",
    ),
    (filesystem, "_StorageInfo _StoragePrefix"),
    (older, "TensorProperties MEM_FORMAT_ENCODING"),
):
    _CLASSES |= {(_module.__name__, n): getattr(_module, n) for n in _names.split() if hasattr(_module, n)}


_OPERATIONS = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE "
    "BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS "
    "GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET BINPERSID"
)


_InPython: Any = pickle._Unpickler


class Unpickler(_InPython):  # type: ignore[misc]
    """Supports only the operations of such files. The C version may allocate gigabytes for one wrong byte."""

    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: _InPython.dispatch[getattr(pickle, name)[0]] for name in _OPERATIONS.split()
    }

    def build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type) or callable(target):  # a file must not change a class
            raise refused("a pickle", f"a change of {target}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = build


class _MetadataReader(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        known = _CLASSES.get((module, name))
        if known is None:
            raise refused(METADATA, f"{module}.{name}")
        return known


def refused(where: str, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{where!r} refers to {what[:200]}, which no checkpoint needs; none of it was run",
        "Do not load it: it may have been made to run code.",
    )


def _index(loaded: metadata.Metadata, digest: str) -> Index:
    tensors: dict[str, Tiled] = {}
    values: dict[str, Place] = {}
    for name, kind in loaded.state_dict_metadata.items():
        if not isinstance(name, str):
            raise ValueError(f"the name {str(name)[:200]!r}")
        if isinstance(kind, TensorStorageMetadata):
            tensors[name] = _tiled(name, kind, loaded.storage_data)
        elif isinstance(kind, BytesStorageMetadata):
            values[name] = _place(name, loaded.storage_data.get(MetadataIndex(name)))
        else:
            raise ValueError(f"{name[:200]!r} is a {type(kind).__name__}")
    paths = loaded.planner_data if isinstance(loaded.planner_data, dict) else {}
    return Index(tensors, values, {name: path for name, path in paths.items() if _is_path(path)}, digest)


def _is_path(path: Any) -> bool:
    return isinstance(path, tuple) and bool(path) and all(type(part) in (str, int) for part in path)


def _tiled(name: str, kind: TensorStorageMetadata, places: Any) -> Tiled:
    shape, dtype = counts(kind.size), kind.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name[:200]!r} has no dtype")
    chunks: dict[Box, Chunk] = {}  # a replicated tensor may be listed once per rank
    for chunk in kind.chunks:
        box = Box(counts(chunk.offsets), counts(chunk.sizes))
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            offset + size <= full for offset, size, full in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{name[:200]!r} of shape {shape} has a part at {box.offsets} of {box.sizes}")
        if box.num_elements:
            place = _place(name, places.get(MetadataIndex(name, torch.Size(box.offsets))))
            chunks[box] = Chunk(name, box, place)
    return Tiled(Tensor(name, dtype, shape), (), tuple(chunks.values()))


def counts(values: Any) -> tuple[int, ...]:
    checked = tuple(values)
    if len(checked) > 64 or not all(map(is_count, checked)):
        raise ValueError("a shape that is not a list of counts")
    return checked


def _place(name: str, info: Any) -> Place:
    if not isinstance(info, filesystem._StorageInfo):
        raise ValueError(f"it has no location for {name[:200]!r}")
    file, begin, length = info.relative_path, info.offset, info.length
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        raise DamagedCheckpoint(
            f"{METADATA!r} names a file {str(file)[:200]!r}, which is not a plain file name",
            "Do not load it: it may have been made to read elsewhere.",
        )
    if not is_count(begin) or not is_count(length):
        raise ValueError(f"{name[:200]!r} has no valid location in {file!r}")
    transforms = getattr(info, "transform_descriptors", None)
    if transforms:
        raise CheckpointError(
            f"{name[:200]!r} in {file!r} was written through {str(transforms)[:100]}, which fullshard does "
            "not read",
            "Load it with torch.distributed.checkpoint and save it again without extensions.",
        )
    return Place(file, begin, length)
