"""A checkpoint's bytes, read in blocks, each of which is checked before it is used.

A reader first announces what it will need (`want`), then everything is read and checked (`verify`), and
only then is anything returned (`read_into`), which reads and checks it once more. Rejected: keeping what
was checked. It took as much memory as the shards, and as long, since the second read is served from the
system's cache.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from fullshard.checkpoint.files import open_to_read, unreadable
from fullshard.checkpoint.format import headers
from fullshard.checkpoint.format.checksums import checksum
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.manifest import FileRecord
from fullshard.comm.groups import as_bytes
from fullshard.engine.homes.split_masters import SplitValues
from fullshard.errors import CheckpointError, DamagedCheckpoint

CHUNK_BYTES = 16 * 2**20  # read at a time
_OPEN_FILES = 64
_CHECKED_BYTES = 4 * 2**20  # read, then checked, at a time
_RECENT_BLOCKS = 8  # cached: one block may hold many small tensors
DAMAGED = "The checkpoint is damaged; use another one."
_REMEDY = "The checkpoint is damaged; use another one, and check the disk."


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a tensor, which are in `file` from byte `begin` on."""

    start: int
    stop: int
    file: str
    begin: int


@dataclass(frozen=True)
class Stored:
    """A tensor and where its elements are: contiguous spans from 0 to its last element."""

    tensor: Tensor
    spans: tuple[Span, ...]

    def ranges(self, start: int, stop: int) -> Iterable[tuple[Span, int, int]]:
        """The spans that overlap elements [start, stop), each with its overlap."""
        for span in self.spans:
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                yield span, low, high


class Blocks:
    """The files of one folder. With `records`, every block that is read is checked against them."""

    def __init__(self, folder: Path, records: Mapping[str, FileRecord] | None, block_bytes: int) -> None:
        self.folder, self._records, self.block_bytes = folder, records, block_bytes
        self.named = ""  # the file that the user gave the path of, if any
        self._open: OrderedDict[str, int] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._wanted: dict[str, list[tuple[int, int]]] = defaultdict(list)  # half-open ranges of blocks
        self._recent: OrderedDict[tuple[str, int], np.ndarray[Any, Any]] = OrderedDict()

    def close(self) -> None:
        self._recent.clear()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def size(self, file: str) -> int:
        """The size of a file, checked against its record."""
        if file not in self._sizes:
            try:
                size = self._file_size(file)
            except OSError as error:
                raise unreadable(self.name(file), error) from error
            record = self._records.get(file) if self._records is not None else None
            if self._records is not None and record is None:
                raise DamagedCheckpoint(f"the manifest does not name {self.name(file)}", _REMEDY)
            if record is not None and record.size_bytes != size:
                what = "cut short" if size < record.size_bytes else "appended to"
                raise DamagedCheckpoint(
                    f"{self.name(file)} has {size} bytes and must have {record.size_bytes}: it was {what}",
                    _REMEDY,
                )
            self._sizes[file] = size
        return self._sizes[file]

    def name(self, file: str) -> str:
        return repr(str(self.folder / file))

    # ---- in order of use

    def want(self, file: str, begin: int, end: int) -> None:
        if begin < end:
            size = self.block_bytes
            self._wanted[file].append((begin // size, -(-end // size)))

    def verify(self) -> None:
        """Read and check every announced block."""
        wanted, self._wanted = self._wanted, defaultdict(list)
        scratch = np.empty(_CHECKED_BYTES, np.uint8)
        for file, runs in sorted(wanted.items()):
            size = self.size(file)
            if self._records is None:
                continue  # there are no checksums
            for first, last in merged(runs):
                begin, end = first * self.block_bytes, min(last * self.block_bytes, size)
                for at, stop in self._steps(begin, end):
                    self._fill_checked(file, at, scratch[: stop - at])

    def read_into(self, file: str, begin: int, end: int, out: np.ndarray[Any, Any]) -> None:
        """Read bytes [begin, end) of a file. Complete blocks are read in place, and checked there."""
        if self._records is None:
            self._fill(file, begin, out)
            return
        size, at = self.block_bytes, begin
        while at < end:
            blocks_end = end if end == self.size(file) else end // size * size
            if at % size == 0 and at < blocks_end:
                for step, stop in self._steps(at, blocks_end):
                    self._fill_checked(file, step, out[step - begin : stop - begin])
                at = blocks_end
                continue
            block = self._block(file, at // size)
            stop = min(end, (at // size + 1) * size)
            out[at - begin : stop - begin] = block[at % size : at % size + stop - at]
            at = stop

    def bytes(self, file: str, begin: int, end: int) -> bytes:
        if self.size(file) < end:
            raise DamagedCheckpoint(f"{self.name(file)} ends before byte {end}", _REMEDY)
        out = np.empty(end - begin, np.uint8)
        self.read_into(file, begin, end, out)
        return out.tobytes()

    # ---- inside

    def _steps(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        """Ranges of complete blocks, each small enough to be in the processor's cache when it is checked."""
        step = max(1, _CHECKED_BYTES // self.block_bytes) * self.block_bytes
        return ((at, min(at + step, end)) for at in range(begin, end, step))

    def _block(self, file: str, index: int) -> np.ndarray[Any, Any]:
        if (file, index) in self._recent:
            self._recent.move_to_end((file, index))
            return self._recent[file, index]
        begin = index * self.block_bytes
        data = np.empty(min(self.block_bytes, self.size(file) - begin), np.uint8)
        self._fill_checked(file, begin, data)
        self._recent[file, index] = data
        if len(self._recent) > _RECENT_BLOCKS:
            self._recent.popitem(last=False)
        return data

    def _fill_checked(self, file: str, begin: int, out: np.ndarray[Any, Any]) -> None:
        """Read complete blocks from `begin` on, and check them."""
        assert self._records is not None
        self._fill(file, begin, out)
        size, expected = self.block_bytes, self._records[file].blocks
        for at in range(0, len(out), size):
            if checksum(out[at : at + size]) != expected[(begin + at) // size]:
                raise DamagedCheckpoint(
                    f"{self.name(file)}: bytes {begin + at} to {begin + min(at + size, len(out))} are not "
                    "those that were written: their checksum differs",
                    _REMEDY,
                )

    def _fill(self, file: str, begin: int, out: np.ndarray[Any, Any]) -> None:
        try:
            self._read(file, begin, memoryview(out.data))
        except OSError as error:
            raise unreadable(self.name(file), error) from error

    def _file_size(self, file: str) -> int:
        return os.fstat(self._descriptor(file)).st_size

    def _read(self, file: str, begin: int, out: memoryview) -> None:
        descriptor, at = self._descriptor(file), 0
        while at < len(out):
            count = os.preadv(descriptor, [out[at:]], begin + at)
            if count == 0:
                raise OSError(None, "it was truncated while it was read")
            at += count

    def _descriptor(self, file: str) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[file] = descriptor = open_to_read(self.folder / file, file == self.named)
        return descriptor


def merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same half-open ranges in order, without overlaps."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


class Source:
    """A checkpoint opened for reading: the tensors of the model and of the optimizer by name."""

    may_lack: frozenset[str] = frozenset()  # names of the model that need not be there

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        self.folder, self.blocks = folder, blocks
        self.model: dict[str, Stored] = {}
        self.optimizer: dict[str, Stored] = {}

    def close(self) -> None:
        self.blocks.close()

    def want(self, stored: Stored, start: int, stop: int) -> None:
        for span, low, high in stored.ranges(start, stop):
            begin, end = _bytes_of(stored, span, low, high)
            self.blocks.want(span.file, begin, end)

    def read(self, stored: Stored, start: int, stop: int, out: torch.Tensor) -> None:
        """Read elements [start, stop) into `out`: flat, on any device, cast to its dtype."""
        is_memory = out.device.type == "cpu" and not isinstance(out, SplitValues)
        same = is_memory and out.dtype == stored.tensor.dtype and out.is_contiguous()
        itemsize = stored.tensor.dtype.itemsize
        for span, low, high in stored.ranges(start, stop):
            if same:
                begin, end = _bytes_of(stored, span, low, high)
                place = as_bytes(out[low - start : high - start]).numpy()
                self.blocks.read_into(span.file, begin, end, place)
                continue
            step = max(1, CHUNK_BYTES // itemsize)
            locked = out.device.type == "cuda"  # page-locked, so that the device copies at full speed
            staged = torch.empty(min(step, high - low), dtype=stored.tensor.dtype, pin_memory=locked)
            for at in range(low, high, step):
                stop_at = min(at + step, high)
                begin, end = _bytes_of(stored, span, at, stop_at)
                part = staged[: stop_at - at]
                self.blocks.read_into(span.file, begin, end, as_bytes(part).numpy())
                out[at - start : stop_at - start].copy_(part)

    def read_tensor(self, stored: Stored) -> torch.Tensor:
        """All elements, in host memory."""
        value = torch.empty(stored.tensor.num_elements, dtype=stored.tensor.dtype)
        self.read(stored, 0, stored.tensor.num_elements, value)
        return value.view(stored.tensor.shape)


class Foreign(Source):
    """A checkpoint of another library: it has no manifest, so only what it holds can be checked."""

    tied: Mapping[str, str] = MappingProxyType({})

    def fingerprint(self) -> str:
        """A digest of names and locations: if hosts have copies of the files, these must be equal."""
        kinds = (sorted(kind.items()) for kind in (self.model, self.optimizer))
        return hashlib.sha256(repr([*kinds]).encode()).hexdigest()

    def fit(self, model: nn.Module, names: set[str]) -> None:
        """Rename the tensors in `self.model` to the names of this model, where they differ in a known way."""

    def optimizer_load(self, runtime: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        """An object that plans and applies the optimizer's state, as OptimizerLoad does."""
        raise CheckpointError(
            f"{str(self.folder)!r} holds no optimizer state", "Load it without the optimizer."
        )

    def others(self, work: Any, model: nn.Module) -> dict[str, Any]:
        """Other values than the model's tensors. Adds the reads for modules to `work`, returns the rest."""
        return {}


def _bytes_of(stored: Stored, span: Span, start: int, stop: int) -> tuple[int, int]:
    itemsize = stored.tensor.dtype.itemsize
    return span.begin + (start - span.start) * itemsize, span.begin + (stop - span.start) * itemsize


def tensors_in(blocks: Blocks, file: str) -> dict[str, Stored]:
    """The tensors of a safetensors file."""
    return tensors_and_needs(blocks, file)[0]


def tensors_and_needs(blocks: Blocks, file: str) -> tuple[dict[str, Stored], str]:
    """The same, and the file without which this one should not be trusted, if it names one."""
    header = headers.read(str(blocks.folder / file), blocks.size(file), partial(blocks.bytes, file))
    stored = {
        name: Stored(tensor, (Span(0, tensor.num_elements, file, header.begins[name]),))
        for name, tensor in header.tensors.items()
    }
    return stored, header.needs


def add_unique(into: dict[str, Stored], tensors: Mapping[str, Stored], file: str) -> None:
    """Add the tensors of a file; raises if one is there already."""
    for name, stored in tensors.items():
        if name in into:
            other = into[name].spans[0].file if into[name].spans else "another file"
            raise DamagedCheckpoint(f"tensor {name!r} is in {file!r} and in {other!r}", _REMEDY)
        into[name] = stored
