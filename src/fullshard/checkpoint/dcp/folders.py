"""Writes a folder of torch.distributed.checkpoint: files of items, then `.metadata`, then the rename.

Every rank writes one file, `__<rank>_0.distcp`, one item at a time, so that a save needs memory for its
largest item only. The first rank then writes `.metadata`, with the locations of all items of all ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fullshard.checkpoint import commit, files
from fullshard.checkpoint.dcp.format import METADATA, Place
from fullshard.checkpoint.files import failed, remove_tree
from fullshard.comm.messages import record
from fullshard.errors import CheckpointError, RankMismatch
from fullshard.plan.layout import Box

_OURS = re.compile(r"\.metadata|__\d+_\d+\.distcp")
_BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class Leaf:
    """A tensor of unsharded shape, and the rectangles of it that this rank writes, one at a time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterable[tuple[Box, torch.Tensor]]]


record(Box)  # of `plan`, which knows no ranks


@record
@dataclass
class Written:
    """What a rank has written to its file, and where."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, list[tuple[Box, Place]]]] = field(
        default_factory=dict
    )
    values: dict[str, Place] = field(default_factory=dict)


class _Stream:
    """A file of the save for torch.save to write to; small writes are buffered."""

    def __init__(self, path: Path) -> None:
        files.disk.create(path, 0)
        self._file, self._small, self._written = files.disk.open(path), bytearray(), 0

    @property
    def at(self) -> int:
        return self._written + len(self._small)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) + len(self._small) < _BUFFER_BYTES:
            self._small += view
        else:
            self._put(memoryview(self._small))
            self._small = bytearray()
            self._put(view)
        return len(view)

    def flush(self) -> None:
        """torch.save calls this after every item; flushing in `close` is enough."""

    def close(self) -> None:
        try:
            self._put(memoryview(self._small))
            self._file.sync()
        finally:
            self._file.close()

    def _put(self, view: memoryview) -> None:
        self._file.write_at(self._written, view)
        self._written += len(view)


def _flat(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Dotted names and their paths, by torch's own rule, which its reader follows as well."""
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    planner.set_up_planner(tree)
    return planner.state_dict, planner.mappings


def write(folder: Path, rank: int, tree: dict[str, Any], is_first: bool) -> Written:
    """Write this rank's file: its rectangles, and on the first rank also what every rank has in full."""
    file = f"__{rank}_0.distcp"
    written = Written()
    try:
        stream = _Stream(folder / file)
        try:
            for name, value in _flat(tree)[0].items():
                if isinstance(value, torch.Tensor):
                    value = _replicated_leaf(value, is_first)
                if isinstance(value, Leaf):
                    places = [(box, _put(stream, file, _own(part))) for box, part in value.parts()]
                    written.tensors[name] = (value.shape, value.dtype, places)
                elif is_first:
                    written.values[name] = _put(stream, file, value)
        finally:
            stream.close()
    except OSError as error:
        raise failed(f"cannot write {str(folder / file)!r}", error) from error
    return written


def _replicated_leaf(value: torch.Tensor, mine: bool) -> Leaf:
    shape = tuple(value.shape)
    parts = [(Box((0,) * len(shape), shape), value)] if mine and value.numel() else []
    return Leaf(shape, value.dtype, lambda: parts)


def _own(part: torch.Tensor) -> torch.Tensor:
    """A row-major copy in host memory, if needed: torch.save writes the complete storage of a view."""
    if part.device.type == "cpu" and part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes:
        return part.detach()
    return torch.empty(part.shape, dtype=part.dtype).copy_(part.detach())


def _put(stream: _Stream, file: str, value: Any) -> Place:
    begin = stream.at
    torch.save(value, stream)  # type: ignore[arg-type]
    return Place(file, begin, stream.at - begin)


def finish(staging: commit.Staging, by_rank: list[Written], tree: Any, tied: dict[str, str]) -> None:
    """On the first rank: check that every element was written, write `.metadata`, rename the folder."""
    metadata = _metadata(by_rank, _flat(tree)[1], {f"model.{a}": f"model.{n}" for a, n in tied.items()})
    try:
        files.disk.write_file(staging.folder / METADATA, pickle.dumps(metadata))
        _commit(staging)
    except OSError as error:
        raise failed(f"cannot finish checkpoint {str(staging.target)!r}", error) from error


def _metadata(by_rank: list[Written], paths: dict[str, Any], tied: dict[str, str]) -> Metadata:
    first = by_rank[0]
    described: dict[str, Any] = {name: BytesStorageMetadata() for name in first.values}
    where = {MetadataIndex(name): _info(place) for name, place in first.values.items()}
    for rank, written in enumerate(by_rank):
        differing = sorted(written.tensors.keys() ^ first.tensors.keys())
        if differing:
            raise RankMismatch(
                f"rank {rank} has other tensors than the first rank: {differing[:4]}",
                "Give every rank the same model and optimizer, after the same steps.",
            )
    for name, (shape, dtype, _) in first.tensors.items():
        parts = [part for written in by_rank for part in written.tensors[name][2]]
        count = sum(box.num_elements for box, _ in parts)
        if count != prod(shape):
            raise CheckpointError(
                f"ranks wrote {count} elements of {name!r} of shape {shape}",
                "This is a bug in fullshard; the save was abandoned. Please report it.",
            )
        for known in (name, *(alias for alias, stored in tied.items() if stored == name)):
            chunks = [
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in parts
            ]
            described[known] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
            where |= {
                MetadataIndex(known, torch.Size(box.offsets), index): _info(place)
                for index, (box, place) in enumerate(parts)
            }
    paths = paths | {alias: ("model", alias.removeprefix("model.")) for alias in tied}
    metadata = Metadata(described, {name: paths[name] for name in described}, where, StorageMeta())
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # not in every torch
    if version is not None:
        metadata.version = version
    return metadata


def _info(place: Place) -> filesystem._StorageInfo:
    return filesystem._StorageInfo(place.file, place.begin, place.length)


# ---- creating and renaming the folder


def _is_ours(target: Path) -> bool:
    """Whether a folder holds such a checkpoint and nothing else."""
    return (target / METADATA).is_file() and all(_OURS.fullmatch(entry.name) for entry in target.iterdir())


def check_replaceable(target: Path) -> None:
    if not commit.is_free(target) and not _is_ours(target):
        raise CheckpointError(
            f"{str(target)!r} exists and holds other files than such a checkpoint; it was left as it is",
            "Save to another folder, or remove this one yourself.",
        )


def _commit(staging: commit.Staging) -> None:
    """Rename the folder to its final path, or swap it with an existing checkpoint; all files are on disk."""
    disk, target, folder = files.disk, staging.target, staging.folder
    disk.sync_folder(folder)
    replaces = not commit.is_free(target)
    if replaces and (not _is_ours(target) or not disk.exchange(folder, target)):
        # Rejected: two renames. A crash between them would leave no checkpoint under the name.
        raise CheckpointError(
            f"{str(target)!r} cannot be replaced in one step here; it was left as it is",
            "Save to another folder, or remove this one first.",
        )
    if not replaces:
        disk.rename(folder, target)
    staging.named = True
    disk.sync_folder(target.parent)
    if replaces:
        with contextlib.suppress(OSError):  # a later save tries again
            remove_tree(disk, folder, METADATA)
    if staging.lock is not None:
        staging.lock.release()
