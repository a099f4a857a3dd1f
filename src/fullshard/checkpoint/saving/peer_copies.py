"""A save into the memory of this host's agent and of peers on other hosts: `fs.save(..., peers=1)`.

Each rank writes the files of its part into a place of its host's keeper, byte for byte as it would on disk
with files='parts', and its peers write what they receive of it into places of theirs. The first rank makes
the manifest from everybody's checksums. With it a place is complete, and only when all are, the copies of an
earlier step are given up: a rank that is killed at any moment leaves one step or the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.files import Disk, OpenFile, failed
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.peer_reports import Described, is_older
from fullshard.checkpoint.saving.job import Job
from fullshard.checkpoint.saving.writing import RankWriter, Written
from fullshard.comm.messages import record
from fullshard.elastic import reports
from fullshard.elastic.keeper import LEAD_BYTES
from fullshard.elastic.keeper_places import FILLING, Place, Places
from fullshard.elastic.peer_ring import Ring, Spot


class _PlaceFile(OpenFile):
    """A file of a checkpoint inside a place."""

    def __init__(self, place: Place, begin: int) -> None:
        self._place, self._file_begin = place, begin

    def write_at(self, offset: int, data: memoryview) -> None:
        self._place.write(self._file_begin + offset, data)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class _PlaceDisk(Disk):
    """What a save writes goes into a place."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.files: dict[str, tuple[int, int]] = {}  # begin and size, by name

    def create(self, path: Path, size_bytes: int) -> None:
        self.files[path.name] = self._place.reserve(size_bytes), size_bytes

    def open(self, path: Path) -> OpenFile:
        return _PlaceFile(self._place, self.files[path.name][0])

    def write_file(self, path: Path, data: bytes) -> None:
        self.create(path, len(data))
        self.open(path).write_at(0, memoryview(data))


@record
@dataclass(frozen=True)
class _Part:
    """What one rank has written into its place."""

    files: dict[str, tuple[int, int]]
    end: int


class PeerJob(Job):
    """A save into memory; runs in a background thread."""

    def keep_in(self, places: Places, spots: Sequence[Spot], ring: Ring) -> None:
        """Where the copies go. Called before `run`, on every rank with the same spots."""
        self._places, self._ring = places, ring
        words = [word for _, word in spots]
        self._settles = words.index(places.word) == self._control.index  # one rank per keeper
        self._taken: dict[int, Place] = {}  # by the rank whose part is in it
        if ring.pairs():
            self._control.connect_pairs()

    def run(self) -> None:
        try:
            self._run()
        except BaseException:
            for place in self._taken.values():
                if (
                    place.state() == FILLING
                ):  # one that is complete may be needed: others have given up theirs
                    place.free()
            raise
        finally:
            for place in self._taken.values():
                place.close()

    def _run(self) -> None:
        control = self._control
        written, parts = control.share(self._write_own, "copying to memory")
        control.together(lambda: self._take_for_peers(parts), "taking memory for peers")
        self._send(parts)
        results = control.gather_object((written, self._values.own))
        text = control.together(lambda: self._text(results), "describing copies")
        text = control.broadcast_object(text)
        control.together(lambda: self._complete(text, parts), "completing copies")
        # All places of this step are complete: earlier steps are not needed any more.
        for place in self._taken.values():
            place.confirm()
        if self._settles:
            self._places.free_older(is_older(self.target, manifest.summary_from_bytes(text).id))
        if (report := reports.own()) is not None:
            report.saved(str(self.target))

    def _write_own(self) -> tuple[Written, _Part]:
        slices = [*self._contents.model, *self._contents.optimizer]
        place = self._take(
            self._control.index, sum((s.stop - s.start) * s.tensor.dtype.itemsize for s in slices)
        )
        disk = _PlaceDisk(place)
        writer = RankWriter(self.target, disk=disk)
        self._write(writer, shared=False)
        return writer.written, _Part(disk.files, place.end)

    def _take(self, rank: int, size_bytes: int) -> Place:
        try:
            self._taken[rank] = place = self._places.take(size_bytes)
        except OSError as error:
            raise failed(f"cannot keep a copy of rank {rank} in memory", error) from error
        return place

    def _take_for_peers(self, parts: list[_Part]) -> None:
        for source, target in self._ring.pairs():
            if target == self._control.index:
                place = self._take(source, parts[source].end)
                try:
                    place.reserve(parts[source].end - place.end)
                except OSError as error:
                    raise failed(f"cannot keep a copy of rank {source} in memory", error) from error

    def _send(self, parts: list[_Part]) -> None:
        sizes = {(source, target): parts[source].end - LEAD_BYTES for source, target in self._ring.pairs()}
        if not sizes:
            return
        memory = {rank: _contents_of(place) for rank, place in self._taken.items()}
        own = memory.pop(self._control.index)
        self._control.exchange_bytes(sizes, lambda _, begin, end: own[begin:end], memory, "peer copies")

    def _text(self, results: list[tuple[Written, Any]] | None) -> bytes:
        """The manifest, on the first rank."""
        if results is None:
            return b""
        by_rank = [written for written, _ in results]
        return manifest.to_bytes(self._manifest(by_rank, [own for _, own in results], secrets.token_hex(8)))

    def _complete(self, text: bytes, parts: list[_Part]) -> None:
        summary = manifest.summary_from_bytes(text)
        for rank, place in self._taken.items():
            begin = place.reserve(len(text))
            place.write(begin, memoryview(text))
            described = Described(
                path=str(self.target),
                id=summary.id,
                saved_at_ns=summary.saved_at_ns,
                rank=rank,
                ranks=len(parts),
                files=parts[rank].files,
                manifest=(begin, len(text)),
            )
            place.complete(described.to_json())


def _contents_of(place: Place) -> torch.Tensor:
    return torch.frombuffer(place.mapped(), dtype=torch.uint8)[LEAD_BYTES:]
