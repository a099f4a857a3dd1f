"""One rank's part of the files of a save: which files there are, and this rank's bytes in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fullshard.checkpoint import files
from fullshard.checkpoint.contents import Held
from fullshard.checkpoint.files import OpenFile, failed
from fullshard.checkpoint.format import headers
from fullshard.checkpoint.format.checksums import BLOCK_BYTES, Pieces, Tally
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.manifest import NAME, Part
from fullshard.comm.groups import as_bytes

FILE_BYTES = 5 * 10**9  # of one safetensors file; a larger tensor has a file for itself
_STAGED_BYTES = 32 * 2**20  # copied from a device at once


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
    """The files for these tensors: `model.safetensors`, or several, numbered as transformers expects."""
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
    # Wide dtypes first: readers that map the file need each tensor aligned to its own width.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    head, begins = headers.build(ordered, needs)
    return FilePlan(name, head, len(head) + sum(t.size_bytes for t in ordered), begins)


def index_of(plans: Sequence[FilePlan]) -> bytes:
    """`model.safetensors.index.json`, for a model in several files."""
    total = sum(plan.size_bytes - len(plan.head) for plan in plans)
    where = {name: plan.name for plan in plans for name in plan.begins}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1).encode()


@dataclass
class Written:
    """What a rank has written: pieces of files' blocks, files of its own, and elements by kind."""

    pieces: dict[str, Pieces] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # of files that only this rank wrote
    parts: dict[str, list[Part]] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)


class RankWriter:
    """Writes one rank's bytes into the folder of a save, and keeps their checksums."""

    def __init__(self, folder: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self._folder, self._block_bytes = folder, block_bytes
        self.written = Written()

    def create(self, plans: Iterable[FilePlan]) -> None:
        """Make the files that all ranks write into, with their headers. The first rank does this."""
        for plan in plans:
            self._create(plan.name, plan.size_bytes)
            self._write(
                plan.name, [(0, torch.frombuffer(bytearray(plan.head), dtype=torch.uint8), torch.uint8)]
            )

    def write_shared(self, plans: Iterable[FilePlan], held: Sequence[Held], kind: str) -> None:
        """This rank's elements, each at its own place."""
        mine = {h.tensor.name: h for h in held}
        for plan in plans:
            places = []
            for name, begin in plan.begins.items():
                h = mine[name]
                if h.start < h.stop:
                    places.append((begin + h.start * h.tensor.dtype.itemsize, h.values, h.tensor.dtype))
            if places:
                self._write(plan.name, sorted(places, key=lambda place: place[0]))
        self._count(kind, held)

    def write_parts(self, name: str, kinds: Mapping[str, Sequence[Held]]) -> None:
        """This rank's elements in a file of its own, one flat tensor for each."""
        held = [(f"{kind}/{h.tensor.name}", h) for kind, values in kinds.items() for h in values]
        held = [(label, h) for label, h in held if h.start < h.stop or not h.tensor.num_elements]
        flat = [Tensor(label, h.tensor.dtype, (h.stop - h.start,)) for label, h in held]
        self._write_file(name, plan_file(name, flat), {label: h.values for label, h in held}, flat)
        self.written.parts[name] = [Part(label, h.start, h.stop, h.tensor.shape) for label, h in held]
        for kind, values in kinds.items():
            self._count(kind, values)

    def write_whole(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """A file of whole tensors that only this rank writes; none if there are no tensors."""
        if tensors:
            described = [Tensor(label, t.dtype, tuple(t.shape)) for label, t in tensors.items()]
            values = {label: t.reshape(-1) for label, t in tensors.items()}
            self._write_file(name, plan_file(name, described), values, described)

    def write_small(self, name: str, data: bytes) -> None:
        try:
            files.disk.write_file(self._folder / name, data)
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
            files.disk.create(self._folder / name, size_bytes)
        except OSError as error:
            raise failed(f"cannot make {str(self._folder / name)!r}", error) from error

    def _write(self, name: str, places: Sequence[tuple[int, torch.Tensor, torch.dtype]]) -> None:
        path, tally = self._folder / name, Tally(self._block_bytes)
        try:
            file = files.disk.open(path)
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
                # Block by block: what the checksum has just read is still in the cache when it is written.
                stop = min(len(data), at + self._block_bytes - (offset + at) % self._block_bytes)
                tally.add(offset + at, data[at:stop])
                file.write_at(offset + at, data[at:stop])
                at = stop
            offset += len(data)

    def _count(self, kind: str, held: Iterable[Held]) -> None:
        count = sum(h.stop - h.start for h in held)
        self.written.elements[kind] = self.written.elements.get(kind, 0) + count


def _host_bytes(values: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of flat values in host memory, cast, a piece at a time where they must be copied."""
    if values.device.type == "cpu" and values.dtype == dtype and values.is_contiguous():
        yield as_bytes(values).numpy().data
        return
    step = max(1, _STAGED_BYTES // max(dtype.itemsize, values.dtype.itemsize))
    for at in range(0, values.numel(), step):
        part = values[at : at + step].to(dtype).cpu().contiguous()
        yield as_bytes(part).numpy().data
