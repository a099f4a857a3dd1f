"""The files of a save and this rank's bytes in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fullshard.checkpoint import files
from fullshard.checkpoint.files import Disk, OpenFile, failed
from fullshard.checkpoint.format import headers
from fullshard.checkpoint.format.checksums import BLOCK_BYTES, Pieces, Tally
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.manifest import NAME, Part
from fullshard.checkpoint.saving.contents import LocalSlice
from fullshard.comm.groups import as_bytes
from fullshard.comm.messages import record
from fullshard.engine.homes.split_masters import SplitValues, restored

FILE_BYTES = 5 * 10**9  # per safetensors file; a larger tensor gets a file of its own
_STAGED_BYTES = 32 * 2**20  # copied from a device at a time


@dataclass(frozen=True)
class FilePlan:
    """A safetensors file: its header, its size, and where each tensor's bytes begin."""

    name: str
    head: bytes
    size_bytes: int
    begins: dict[str, int]


def plan_files(
    kind: str, tensors: Sequence[Tensor], file_bytes: int | None = None, needs: str = NAME
) -> list[FilePlan]:
    """The files for these tensors: `model.safetensors`, or several numbered files as transformers expects."""
    groups: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.size_bytes > room:
            groups.append([])
            room = file_bytes or FILE_BYTES
        groups[-1].append(tensor)
        room -= tensor.size_bytes
    many = len(groups) > 1
    numbers = [f"-{i:05}-of-{len(groups):05}" if many else "" for i in range(1, len(groups) + 1)]
    return [
        plan_file(f"{kind}{number}.safetensors", group, needs)
        for number, group in zip(numbers, groups, strict=True)
    ]


def plan_file(name: str, tensors: Sequence[Tensor], needs: str = "") -> FilePlan:
    # Wide dtypes first: readers that map the file need each tensor aligned to its element size.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    head, begins = headers.build(ordered, needs)
    return FilePlan(name, head, len(head) + sum(t.size_bytes for t in ordered), begins)


def index_of(plans: Sequence[FilePlan]) -> bytes:
    """`model.safetensors.index.json`, for a model in several files."""
    total = sum(plan.size_bytes - len(plan.head) for plan in plans)
    where = {name: plan.name for plan in plans for name in plan.begins}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1).encode()


@record
@dataclass
class Written:
    """What a rank has written: checksums of pieces, sizes of its own files, and elements per kind."""

    pieces: dict[str, Pieces] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # of the files that this rank alone wrote
    parts: dict[str, list[Part]] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)


class RankWriter:
    """Writes one rank's bytes into the folder of a save, and keeps their checksums."""

    def __init__(self, folder: Path, block_bytes: int = BLOCK_BYTES, disk: Disk | None = None) -> None:
        self._folder, self._block_bytes, self._disk = folder, block_bytes, disk or files.disk
        self.written = Written()

    def create(self, plans: Iterable[FilePlan]) -> None:
        """Create the files that all ranks write into, with their headers. Only the first rank does this."""
        for plan in plans:
            self._create(plan.name, plan.size_bytes)
            self._write(
                plan.name, [(0, torch.frombuffer(bytearray(plan.head), dtype=torch.uint8), torch.uint8)]
            )

    def write_shared(self, plans: Iterable[FilePlan], slices: Sequence[LocalSlice], kind: str) -> None:
        """Write this rank's elements at their offsets in the shared files."""
        by_name = {s.tensor.name: s for s in slices}
        for plan in plans:
            places = []
            for name, begin in plan.begins.items():
                s = by_name[name]
                if s.start < s.stop:
                    places.append((begin + s.start * s.tensor.dtype.itemsize, s.values, s.tensor.dtype))
            if places:
                self._write(plan.name, sorted(places, key=lambda place: place[0]))
        self._count(kind, slices)

    def write_parts(self, name: str, kinds: Mapping[str, Sequence[LocalSlice]]) -> None:
        """Write this rank's elements to a file of its own, one flat tensor per slice."""
        labelled = {
            f"{kind}/{s.tensor.name}": s
            for kind, slices in kinds.items()
            for s in slices
            if s.start < s.stop or not s.tensor.num_elements
        }
        flat = [Tensor(label, s.tensor.dtype, (s.stop - s.start,)) for label, s in labelled.items()]
        self._write_file(
            name, plan_file(name, flat), {label: s.values for label, s in labelled.items()}, flat
        )
        self.written.parts[name] = [
            Part(label, s.start, s.stop, s.tensor.shape) for label, s in labelled.items()
        ]
        for kind, slices in kinds.items():
            self._count(kind, slices)

    def write_tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a file of complete tensors, by this rank alone; without tensors there is no file."""
        if tensors:
            described = [Tensor(label, t.dtype, tuple(t.shape)) for label, t in tensors.items()]
            values = {label: t.reshape(-1) for label, t in tensors.items()}
            self._write_file(name, plan_file(name, described), values, described)

    def write_small(self, name: str, data: bytes) -> None:
        try:
            self._disk.write_file(self._folder / name, data)
        except OSError as error:
            raise failed(f"cannot write {str(self._folder / name)!r}", error) from error
        tally = Tally(self._block_bytes)
        tally.add(0, memoryview(data))
        self.written.pieces[name], self.written.sizes[name] = tally.pieces(), len(data)

    def _write_file(
        self, name: str, plan: FilePlan, values: dict[str, torch.Tensor], tensors: Sequence[Tensor]
    ) -> None:
        self._create(name, plan.size_bytes)
        dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        head = torch.frombuffer(bytearray(plan.head), dtype=torch.uint8)
        places = [(begin, values[label], dtypes[label]) for label, begin in plan.begins.items()]
        self._write(name, [(0, head, torch.uint8), *places])
        self.written.sizes[name] = plan.size_bytes

    def _create(self, name: str, size_bytes: int) -> None:
        try:
            self._disk.create(self._folder / name, size_bytes)
        except OSError as error:
            raise failed(f"cannot create {str(self._folder / name)!r}", error) from error

    def _write(self, name: str, places: Sequence[tuple[int, torch.Tensor, torch.dtype]]) -> None:
        path, tally = self._folder / name, Tally(self._block_bytes)
        try:
            file = self._disk.open(path)
            try:
                for offset, values, dtype in places:
                    self._write_values(file, tally, offset, values, dtype)
                file.sync()
            finally:
                file.close()
        except OSError as error:
            raise failed(f"cannot write {str(path)!r}", error) from error
        before = self.written.pieces.get(name)
        pieces = tally.pieces()
        self.written.pieces[name] = pieces if before is None else np.concatenate([before, pieces])

    def _write_values(
        self, file: OpenFile, tally: Tally, offset: int, values: torch.Tensor, dtype: torch.dtype
    ) -> None:
        for data in _host_bytes(values, dtype):
            at = 0
            while at < len(data):
                # Block by block: the bytes are still in the processor's cache after the checksum.
                stop = min(len(data), at + self._block_bytes - (offset + at) % self._block_bytes)
                tally.add(offset + at, data[at:stop])
                file.write_at(offset + at, data[at:stop])
                at = stop
            offset += len(data)

    def _count(self, kind: str, slices: Iterable[LocalSlice]) -> None:
        count = sum(s.stop - s.start for s in slices)
        self.written.elements[kind] = self.written.elements.get(kind, 0) + count


def _host_bytes(values: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of flat values, cast to `dtype`, in host memory; in pieces where they must be copied."""
    is_memory = not isinstance(values, SplitValues) and values.device.type == "cpu"
    if is_memory and values.dtype == dtype and values.is_contiguous():
        yield as_bytes(values).numpy().data
        return
    step = max(1, _STAGED_BYTES // max(dtype.itemsize, values.dtype.itemsize))
    for at in range(0, values.numel(), step):
        part = restored(values[at : at + step]).to(dtype).cpu().contiguous()
        yield as_bytes(part).numpy().data
