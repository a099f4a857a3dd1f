"""Memory that outlives a rank: the process that starts the ranks of a host keeps copies of their state.

    with Keeper(run_id) as keeper:
        start_ranks(environment | keeper.variables())

The keeper is a number of anonymous files in memory (memfd_create), its places. It does nothing with them:
ranks open them by way of /proc, where the system admits this user alone, and write and read on their own.
So there is no socket that accepts commands, and no thread. A place has no name in any file system: when the
keeper's process ends, however it ends, and no rank has it open, the memory is free.

A place begins with a page for its lead; `keeper_places` is the ranks' side.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import struct
import sys
from types import TracebackType

from fullshard.environment import KEEPER
from fullshard.errors import NotSupported

LEAD = struct.Struct(
    "<8s32sIIQQ"
)  # magic, the keeper's word, state, checksum, begin and size of what is there
LEAD_BYTES = 4096  # contents begin at the next page
MAGIC = b"fs-place"
FREE = 0
PLACES = 128  # of 16 ranks: their own copies and two of peers, of two steps
_OTHER_DESCRIPTORS = 128  # that the agent needs for itself, at least


class Keeper:
    """The places of one host, held by the process that starts its ranks. A context manager."""

    def __init__(self, run_id: str, places: int = PLACES) -> None:
        self._name, self._places = f"fullshard {run_id}"[:200], places
        self._word = secrets.token_hex(16)
        self._descriptors: list[int] = []

    def __enter__(self) -> Keeper:
        if not hasattr(os, "memfd_create"):
            raise NotSupported(f"{sys.platform} has no files in memory", "Run on Linux.")
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = self._places if most < 0 else min(self._places, max(8, most - _OTHER_DESCRIPTORS))
        try:
            for _ in range(count):
                self._descriptors.append(os.memfd_create(self._name, os.MFD_CLOEXEC))
                lead = LEAD.pack(MAGIC, self._word.encode(), FREE, 0, 0, 0)
                os.pwrite(self._descriptors[-1], lead, 0)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The copies are gone, as soon as no rank has them open."""
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop())

    def variables(self) -> dict[str, str]:
        """Environment variables by which ranks of this host find the places."""
        numbers = ",".join(map(str, self._descriptors))
        return {KEEPER: f"{os.getpid()}:{self._word}:{numbers}"}

    def size_bytes(self) -> int:
        """Memory that the copies take on this host."""
        return sum(os.fstat(descriptor).st_blocks * 512 for descriptor in self._descriptors)
