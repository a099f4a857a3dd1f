"""The records of a run on this host, for tools that look at it from outside. Loads no torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator

from fullshard.comm import host_summary
from fullshard.comm.host_summary import RemotePeer, Row
from fullshard.comm.recorder_files import (
    HEADER,
    SHARED,
    WORD,
    Folder,
    Peer,
    Place,
    record_name,
    records_parent,
    records_prefix,
)
from fullshard.environment import host_name

_MOST_FOLDERS, _MOST_RANKS = 50, 64


def newest_run() -> str | None:
    """The folder of this user's records in which a rank has done something last."""
    found: list[tuple[int, float, str]] = []
    for records in _runs_in(records_parent()):
        try:
            rows = records.rows()
        except OSError:
            continue
        living = [row.place for row in rows if row.place.alive and not row.place.left]
        if living:  # a model's records before those of the agreements around it, which have one channel
            moved = min(place.since_s for place in living)
            found.append((max(len(row.channels) for row in rows) > 1, -moved, records.path))
    return max(found, default=(0, 0.0, None))[2]


def standings() -> list[list[str]]:
    """By run of this user: where each rank is or was last, and the line of the script where it stands, if it
    wrote one."""
    found = []
    for parent in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        for records in itertools.islice(_runs_in(parent), _MOST_FOLDERS):
            with contextlib.suppress(OSError):
                peers = itertools.islice(records.peers().values(), _MOST_RANKS)
                found.append([text for peer in peers if (text := _standing(peer))])
    return [run for run in found if run]


def places_of(pids: set[int]) -> dict[int, Place]:
    """Where these processes of this host are, or were last; of several records, that with most operations."""
    found: dict[int, Place] = {}
    for records in _runs_in(records_parent()) if pids else ():
        for peer in records.peers().values():
            place = peer.place()
            if place is not None and place.pid in pids:
                known = found.get(place.pid)
                if known is None or (place.step, place.sequence) > (known.step, known.sequence):
                    found[place.pid] = place
    return found


def _standing(peer: Peer) -> str:
    place, note = peer.place(), peer.note()
    return "" if place is None else f"{place}{'' if note is None else f'; it stands at {note.at}'}"


def _runs_in(parent: str) -> Iterator[RunRecords]:
    """Each is closed when the next one comes."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(parent)):
            if name.startswith(records_prefix()):
                with contextlib.suppress(OSError):  # gone, a link, or another user's
                    records = RunRecords(os.path.join(parent, name))
                    try:
                        yield records
                    finally:
                        records.close()


class RunRecords:
    """All ranks that have a record in a folder, and those of other hosts that its ranks know of."""

    def __init__(self, path: str) -> None:
        self._folder = Folder(path)
        self.host, self.path = host_name(), path
        self._peers: dict[int, Peer] = {}
        self._silent_s: dict[int, float] = {}

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._folder.close()

    def peers(self) -> dict[int, Peer]:
        for rank in self._folder.ranks():
            if rank not in self._peers and (ranks := self._ranks(rank)):
                peer = Peer.open(self._folder, rank, ranks)
                if peer is not None:
                    self._peers[rank] = peer
        return dict(sorted(self._peers.items()))

    def _ranks(self, rank: int) -> int:
        """How many ranks the run has, by the header of a record."""
        file = self._folder.open(record_name(rank))
        if file is None:
            return 0
        try:
            data = os.pread(file, HEADER.size, 0)
            return int(HEADER.unpack(data)[5]) if len(data) == HEADER.size else 0
        finally:
            os.close(file)

    def rows(self) -> list[Row]:
        """Of this host, then of others."""
        own = [row for peer in self.peers().values() if (row := host_summary.row_of(peer)) is not None]
        here = {row.place.rank for row in own}
        remote = [peer for peer in self._remote() if peer.row.place.rank not in here]
        self._silent_s = {peer.row.place.rank: peer.silent_s for peer in remote}
        return own + [peer.row._replace(place=peer.place()) for peer in remote]

    def silent_s(self, rank: int) -> float:
        """Of a rank of another host in the last rows: how old what is known of it is."""
        return self._silent_s.get(rank, 0.0)

    def _remote(self) -> list[RemotePeer]:
        file = self._folder.open(SHARED)
        if file is None:
            return []
        try:
            data = os.pread(file, 2**26, 0)[HEADER.size + WORD.size :]
        finally:
            os.close(file)
        found: dict[int, RemotePeer] = {}
        try:
            for text, age_s, read_at in json.loads(data or b"{}").get("hosts", []):
                summary = host_summary.parse(text.encode())
                if summary is None:
                    continue
                for row in summary.rows:
                    peer = RemotePeer(summary, row, age_s, min(read_at, time.monotonic()))
                    rank = row.place.rank
                    if rank not in found or peer.silent_s < found[rank].silent_s:
                        found[rank] = peer
        except (ValueError, TypeError, AttributeError):
            return []
        return [found[rank] for rank in sorted(found)]
