"""A checkpoint in the memory of agents, read as one on disk is.

What this host has is read from there. What only other hosts have comes from them in messages: first the
headers of their files, by which tensors are found, and, once it is known which blocks this rank needs, those.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullshard.checkpoint import commit
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.manifest import SHARED_FILE, Manifest, rank_file
from fullshard.checkpoint.loading.opening import Checkpoint
from fullshard.checkpoint.loading.reading import Blocks, merged
from fullshard.checkpoint.peer_reports import Described, Step, in_memory, steps
from fullshard.checkpoint.saving.background import finish_earlier
from fullshard.comm.control import ControlGroup
from fullshard.comm.messages import record
from fullshard.elastic.keeper_places import Place, Places
from fullshard.errors import CheckpointError

_HEADER = struct.Struct("<Q")  # at the beginning of a safetensors file: how long its header is
Run = tuple[str, int, int]  # a file, and a half-open range of its blocks


class CopiedBlocks(Blocks):
    """The files of one checkpoint in memory: of this host, or of another one after `fetch`."""

    def __init__(self, folder: Path, saved: Manifest, step: Step, index: int) -> None:
        super().__init__(folder, saved.files, saved.block_bytes)
        self._step, self._index = step, index
        self._rank_of = {name: rank for rank, copy in step.copies.items() for name in copy.files}
        self._here: dict[str, tuple[Place, int]] = {}  # the place of a file, and where it begins there
        self._fetched: dict[tuple[str, int], np.ndarray[Any, Any]] = {}  # blocks of files of other hosts

    def add_place(self, place: Place, files: dict[str, tuple[int, int]]) -> None:
        self._here |= {name: (place, begin) for name, (begin, _) in files.items()}

    def name(self, file: str) -> str:
        return f"{super().name(file)} (in the memory of agents)"

    def want_headers(self, sizes: dict[str, int]) -> None:
        """Announce what is needed of other hosts' files before their tensors are known."""
        at_once = (SHARED_FILE, rank_file(0), rank_file(self._index))  # read while reads are still planned
        for file in sorted(set(self._rank_of) - set(self._here)):
            if file in at_once or file in sizes:
                self.want(file, 0, self._file_size(file) if file in at_once else sizes[file])

    def fetch(self, control: ControlGroup) -> None:
        """Have other hosts send what was announced and is not here. All ranks must call it."""
        asked: dict[int, list[Run]] = defaultdict(list)
        for file, runs in sorted(self._wanted.items()):
            if file not in self._here:
                asked[self._holder(file)] += self._lacking(file, runs)
        asked = {holder: runs for holder, runs in asked.items() if runs}
        requests = control.all_gather_object(asked)
        sizes = {
            (holder, target): sum(map(self._run_bytes, runs))
            for target, of_target in enumerate(requests)
            for holder, runs in of_target.items()
        }
        if not sizes:
            return
        control.connect_pairs()
        sent = {
            to: _Sent(self, runs[control.index]) for to, runs in enumerate(requests) if control.index in runs
        }
        received = {holder: torch.empty(sizes[holder, control.index], dtype=torch.uint8) for holder in asked}
        control.exchange_bytes(
            sizes, lambda target, begin, end: sent[target].read(begin, end), received, "peer copies"
        )
        for holder, data in received.items():
            self._add(asked[holder], data.numpy())

    def _holder(self, file: str) -> int:
        """The rank to ask: those that have it share the work."""
        holders = self._step.holders[self._rank_of[file]]
        return holders[self._index % len(holders)]

    def _lacking(self, file: str, runs: list[tuple[int, int]]) -> list[Run]:
        blocks = [
            (block, block + 1)
            for first, last in merged(runs)
            for block in range(first, last)
            if (file, block) not in self._fetched
        ]
        return [(file, first, last) for first, last in merged(blocks)]

    def bounds(self, run: Run) -> tuple[int, int]:
        """The bytes of a run of blocks."""
        file, first, last = run
        return first * self.block_bytes, min(last * self.block_bytes, self._file_size(file))

    def _run_bytes(self, run: Run) -> int:
        begin, end = self.bounds(run)
        return end - begin

    def _add(self, runs: list[Run], data: np.ndarray[Any, Any]) -> None:
        at = 0
        for file, first, last in runs:
            for block in range(first, last):
                size = self._run_bytes((file, block, block + 1))
                self._fetched[file, block] = data[at : at + size]
                at += size

    def _file_size(self, file: str) -> int:
        return self._step.copies[self._rank_of[file]].files[file][1]

    def _read(self, file: str, begin: int, out: memoryview) -> None:
        if file in self._here:
            place, base = self._here[file]
            place.read_into(base + begin, out)
            return
        at = 0
        while at < len(out):
            block, skipped = divmod(begin + at, self.block_bytes)
            data = self._fetched.get((file, block))
            if data is None:
                raise OSError(None, f"block {block} was not asked for")
            part = data[skipped : skipped + len(out) - at]
            out[at : at + len(part)] = part.data
            at += len(part)


class _Sent:
    """The blocks that another rank asked for, one after the other."""

    def __init__(self, blocks: CopiedBlocks, runs: list[Run]) -> None:
        self._blocks, self._runs = blocks, runs

    def read(self, begin: int, end: int) -> torch.Tensor:
        out, at = np.empty(end - begin, np.uint8), 0
        for run in self._runs:
            first, last = self._blocks.bounds(run)
            low, high = max(begin, at), min(end, at + last - first)
            if low < high:
                self._blocks._read(run[0], first + low - at, memoryview(out[low - begin : high - begin].data))
            at += last - first
        return torch.from_numpy(out)


class CopiedCheckpoint(Checkpoint):
    """A checkpoint in the memory of agents."""

    blocks: CopiedBlocks

    def __init__(
        self, saved: Manifest, manifest_bytes: int, blocks: CopiedBlocks, places: list[Place]
    ) -> None:
        super().__init__(blocks.folder, saved, manifest_bytes, blocks)
        self._places = places

    def close(self) -> None:
        super().close()
        for place in self._places:
            place.close()


@dataclass
class Found:
    """A step in memory, and what this rank's host has of it."""

    step: Step
    here: list[Described]
    places: Places


@record
@dataclass(frozen=True)
class _Answer:
    """What the host of one rank has of a path."""

    copies: list[Described]
    on_disk_ns: int  # when the checkpoint on disk was saved; -1 without one


def find(control: ControlGroup, path: Path, places: Places) -> Found | None:
    """The newest checkpoint of this path in memory; None if that on disk is newer. All ranks must call it."""

    def look() -> tuple[list[Described], _Answer]:
        finish_earlier()
        target = commit.resolved(path)
        copies = in_memory(places, lambda other: other == target)
        on_disk = commit.saved_at(commit.find(path)) if control.is_first else None
        return copies, _Answer(copies, -1 if on_disk is None else on_disk)

    copies, answers = control.share(look, "looking for a checkpoint")
    known = steps([answer.copies for answer in answers])
    complete = next((step for step in known if not step.missing), None)
    on_disk_ns = answers[0].on_disk_ns
    if complete is None and known and on_disk_ns < 0:
        raise CheckpointError(
            f"{known[0].loss()}, and it is not on disk",
            "fs.latest(root) returns the newest that is complete.",
        )
    if complete is None or on_disk_ns > complete.saved_at_ns:
        return None
    return Found(complete, [copy for copy in copies if copy.id == complete.id], places)


def open_copied(control: ControlGroup, path: Path, found: Found) -> CopiedCheckpoint:
    """All ranks must call it."""
    opened: list[Place] = []
    try:
        return _open(control, path, found, opened)
    except BaseException:
        for place in opened:
            place.close()
        raise


def _open(control: ControlGroup, path: Path, found: Found, opened: list[Place]) -> CopiedCheckpoint:
    step = found.step

    def look() -> tuple[None, tuple[bytes, dict[str, int]]]:
        text, sizes = b"", {}
        for copy in found.here:
            opened.append(place := found.places.open(copy.place))
            if step.holders[copy.rank][0] != control.index:
                continue  # another rank of this host, or of another one, answers
            if copy.rank == 0:
                text = _bytes(place, *copy.manifest)
            for name, (begin, size) in copy.files.items():
                if name.endswith(".safetensors") and size >= _HEADER.size:
                    sizes[name] = min(
                        size, _HEADER.size + _HEADER.unpack(_bytes(place, begin, _HEADER.size))[0]
                    )
        return None, (text, sizes)

    _, answers = control.share(look, "opening a checkpoint")
    text = next(text for text, _ in answers if text)
    saved = control.together(lambda: manifest.from_bytes(text), "reading a manifest")
    blocks = CopiedBlocks(path, saved, step, control.index)
    for place, copy in zip(opened, found.here, strict=True):
        blocks.add_place(place, copy.files)
    blocks.want_headers({name: size for _, sizes in answers for name, size in sizes.items()})
    blocks.fetch(control)
    return CopiedCheckpoint(saved, len(text), blocks, opened)


def _bytes(place: Place, begin: int, size: int) -> bytes:
    out = bytearray(size)
    place.read_into(begin, memoryview(out))
    return bytes(out)


def damage(place: Place, copy: Described) -> str:
    """What is wrong with a copy of a rank's files, or ''. Every byte is checked."""
    step = Step(copy.path, copy.id, copy.saved_at_ns, copy.ranks, copies={copy.rank: copy})
    try:
        saved = manifest.from_bytes(_bytes(place, *copy.manifest))
        blocks = CopiedBlocks(Path(copy.path), saved, step, copy.rank)
        blocks.add_place(place, copy.files)
        for file in copy.files:
            blocks.want(file, 0, blocks.size(file))
        blocks.verify()
    except (CheckpointError, OSError) as error:
        return str(getattr(error, "what", error))
    return ""
