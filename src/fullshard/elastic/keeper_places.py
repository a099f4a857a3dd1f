"""A rank's side of the keeper: places in memory that are taken, filled and found again.

    page 0               lead: state, and where the description is
    page 1 ...           the files of one rank's part of a checkpoint, as they would be on disk
    after them           the description, as JSON: which checkpoint, which rank, where each file begins

A place is locked while a rank fills it. The system releases the lock when that rank dies, so that a place
which is being filled and not locked is one to use again. The state is written last: a place is complete, or
it does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fullshard.crc import crc32
from fullshard.elastic.keeper import FREE, LEAD, LEAD_BYTES, MAGIC
from fullshard.environment import keeper
from fullshard.errors import CheckpointError, StateError

FILLING, COMPLETE, CONFIRMED = 1, 2, 3  # confirmed: every rank has completed its places of this checkpoint
_ALIGN = 64
_MOST_DESCRIBED = 64 * 2**20


class Place:
    """One place, open in this process."""

    def __init__(self, descriptor: int, index: int, word: str) -> None:
        self._descriptor, self.index, self._word = descriptor, index, word
        self.end = LEAD_BYTES

    def close(self) -> None:
        """Also unlocks it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def lock(self) -> bool:
        """Whether no other process has it. Until `close`, or this process dies."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def state(self) -> int:
        return self._lead()[0]

    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def description(self) -> dict[str, Any] | None:
        """What is here, if it is complete."""
        state, checksum, begin, size = self._lead()
        if state not in (COMPLETE, CONFIRMED) or size > _MOST_DESCRIBED:
            return None
        text = os.pread(self._descriptor, size, begin)
        with contextlib.suppress(ValueError):  # it was taken while it was read
            described = json.loads(text) if crc32(text) == checksum else None
            return described if isinstance(described, dict) else None
        return None

    # ---- filling

    def begin(self) -> None:
        self._set_lead(FILLING)
        self.end = LEAD_BYTES

    def reserve(self, size_bytes: int) -> int:
        """Where so many bytes begin, which are there from now on."""
        begin = -(-self.end // _ALIGN) * _ALIGN
        self.end = begin + size_bytes
        held = self.size_bytes()
        if self.end > held:
            os.posix_fallocate(self._descriptor, held, self.end - held)  # fails now, not at the first write
        return begin

    def write(self, begin: int, data: memoryview) -> None:
        at = 0
        while at < len(data):
            at += os.pwrite(self._descriptor, data[at:], begin + at)

    def read_into(self, begin: int, out: memoryview) -> None:
        at = 0
        while at < len(out):
            count = os.preadv(self._descriptor, [out[at:]], begin + at)
            if count == 0:
                raise OSError(None, "it ends before that")
            at += count

    def mapped(self) -> mmap.mmap:
        """The memory from the first page to the end of what was reserved."""
        return mmap.mmap(self._descriptor, self.end)

    def complete(self, description: dict[str, Any]) -> None:
        """From here on the place counts, whatever becomes of this process."""
        text = json.dumps(description, separators=(",", ":")).encode()
        begin = self.reserve(len(text))
        self.write(begin, memoryview(text))
        os.ftruncate(self._descriptor, self.end)
        self._set_lead(COMPLETE, crc32(text), begin, len(text))

    def confirm(self) -> None:
        _, *described = self._lead()
        self._set_lead(CONFIRMED, *described)

    def free(self, keeps_memory: bool = False) -> None:
        """Nothing is here any more; the memory may be kept for the next one."""
        self._set_lead(FREE)
        if not keeps_memory:
            os.ftruncate(self._descriptor, LEAD_BYTES)

    def _lead(self) -> tuple[int, int, int, int]:
        magic, word, *fields = LEAD.unpack(os.pread(self._descriptor, LEAD.size, 0).ljust(LEAD.size, b"\0"))
        if magic != MAGIC or word != self._word.encode():
            raise StateError("a place in memory is not the agent's", "Start the run again.")
        state, checksum, begin, size = fields
        return state, checksum, begin, size

    def _set_lead(self, state: int, checksum: int = 0, begin: int = 0, size: int = 0) -> None:
        lead = LEAD.pack(MAGIC, self._word.encode(), state, checksum, begin, size)
        os.pwrite(self._descriptor, lead, 0)


@dataclass
class Places:
    """The places of this host, which its agent holds."""

    word: str  # of the keeper: ranks with the same one share its memory
    _process: int
    _numbers: list[int] = field(default_factory=list)

    def open(self, index: int) -> Place:
        path = f"/proc/{self._process}/fd/{self._numbers[index]}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StateError(
                f"the memory that process {self._process} keeps for its ranks cannot be opened: "
                f"{error.strerror}",
                "Ranks must be started by `fullshard launch --elastic`, as the same user, while it runs.",
            ) from error
        place = Place(descriptor, index, self.word)
        try:
            place.state()  # raises if it is another process by now
        except BaseException:
            place.close()
            raise
        return place

    def each(self) -> Iterator[Place]:
        for index in range(len(self._numbers)):
            place = self.open(index)
            try:
                yield place
            finally:
                place.close()

    def held(self) -> list[tuple[int, bool, dict[str, Any]]]:
        """What is complete here: (index of the place, whether it is confirmed, description)."""
        found = []
        for place in self.each():
            described = place.description()
            if described is not None:
                found.append((place.index, place.state() == CONFIRMED, described))
        return found

    def take(self, size_bytes: int) -> Place:
        """A place to fill, locked: the one whose memory fits best."""
        sizes = [
            (place.size_bytes(), place.index) for place in self.each() if place.state() in (FREE, FILLING)
        ]
        fitting = sorted(one for one in sizes if one[0] >= size_bytes)
        for _, index in fitting + sorted((one for one in sizes if one[0] < size_bytes), reverse=True):
            place = self.open(index)
            if place.lock() and place.state() in (FREE, FILLING):
                place.begin()
                return place
            place.close()
        raise CheckpointError(
            f"all {len(self._numbers)} places that the agent of this host keeps are taken",
            "Use fewer peers; or save all models of a run under one folder, whose older copies are replaced.",
        )

    def free_older(self, is_older: Callable[[dict[str, Any]], bool]) -> None:
        """After a save: its copies have replaced older ones, whose memory is kept for the next save, once."""
        for place in self.each():
            if not place.lock():
                continue
            described = place.description()
            if described is None:
                place.free()
            elif is_older(described):
                place.free(keeps_memory=True)


def own_places() -> Places | None:
    """The places of this rank's host; None where no agent keeps any."""
    process, _, rest = keeper().partition(":")
    word, _, numbers = rest.partition(":")
    if not numbers:
        return None
    return Places(word, int(process), [int(number) for number in numbers.split(",")])
