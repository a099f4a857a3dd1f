"""Ranks of other hosts, as ranks of this one see them: through summaries in the run's store.

Of the ranks of a host, one publishes: it reads all their records once per second and writes one summary for
other hosts. While a rank of this host has waited for two seconds, the same rank reads the summaries of the
other hosts and leaves them in a file for its neighbours. So at any number of ranks a host costs the store one
small write per second, and reads only while something is stuck.

    records of this host --> summary --> store --> summaries of other hosts --> file --> recorder.remote

The publisher is whoever has written the file last; where that process is gone or stopped, the lowest rank
that lives takes over. Everything in the store is signed (`run_secrets`), and read as data only. Under
`watch/KEY`, where KEY names the records:

    hosts      how many publishers there have been
    I          the summary of publisher I
    I/ask      ranks of publisher I whose stacks another host would like to see
    stack/R    the stack of rank R
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections import deque
from typing import Any

from fullshard.comm import host_summary, run_secrets
from fullshard.comm.flight_recorder import FlightRecorder
from fullshard.comm.host_summary import RemotePeer, Row, Summary
from fullshard.comm.recorder_files import HEADER, MAGIC, SHARED, WORD, Peer, host, process_state, start_time
from fullshard.comm.store_link import Job, StoreLink
from fullshard.environment import host_name

WAITED_S = 2.0  # of any rank of this host: then the others are read
_TAKE_OVER_S = 2.5  # after the last sign of a publisher
_FIRST_READ_S, _SELDOM_S = 1.0, 60.0  # while nothing is stuck: to know who is where, and how clocks differ
_MOST_PUBLISHERS = 10_000
_MOST_STACKS = 4
_CLOCK_SAMPLES = 16
_LEAVING_S = 1.0
_UNABLE = ("T", "t", "Z", "X")  # states of a process that publishes nothing


class _Seen:
    """One publisher of another host, as last read."""

    def __init__(self) -> None:
        self.summary: Summary | None = None
        self.text = b""
        self.read_at = self.age_s = 0.0
        self._differences: deque[float] = deque(maxlen=_CLOCK_SAMPLES)

    def read(self, text: bytes) -> None:
        """Clocks of hosts differ by an unknown amount. The smallest difference between the times of writing
        and of reading was one of a summary that was just written."""
        summary = host_summary.parse(text)
        if summary is None or (self.summary is not None and summary.clock_s < self.summary.clock_s):
            return  # an older one, put back
        now = time.monotonic()
        self._differences.append(now - summary.clock_s)
        self.summary, self.text, self.read_at = summary, text, now
        self.age_s = now - summary.clock_s - min(self._differences)


class HostWatch:
    """Of one recorder: publishes for its host if that falls to this rank, and keeps `recorder.remote`."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._reference, self._base = weakref.ref(recorder), f"watch/{recorder.folder.key}"
        self._left = False
        self._peers: dict[int, Peer] = {}
        self._index = 0
        self._leads = False
        self._rows: list[Row] = []
        self._waits = False
        self._seen: dict[int, _Seen] = {}
        self._next_read, self._read_every = 0.0, _FIRST_READ_S
        self._asked: dict[int, str] = {}  # ranks of other hosts, with their stacks once these have come
        self._key: bytes | None = None

    @property
    def spans_hosts(self) -> bool:
        recorder = self._reference()
        return recorder is not None and not self._left and recorder.spans_hosts

    # ---- once per second, by the monitor

    def job(self) -> Job | None:
        """What is to be done with the store now; None where all ranks are on this host, or another rank of
        it publishes."""
        recorder = self._reference()
        if recorder is None or self._left or not recorder.spans_hosts:
            return None
        self._open_peers(recorder)
        self._key = run_secrets.secret(recorder.members)
        if self._key is None:
            return None
        self._leads = self._should_lead(recorder)
        if not self._leads:
            return None
        self._rows = self._own_rows()
        waits = any(row.place.waiting and row.place.since_s >= WAITED_S for row in self._rows)
        self._waits = waits or recorder.stuck_on_device is not None
        now = time.monotonic()
        reads = self._waits or now >= self._next_read
        if reads and not self._waits:
            self._next_read, self._read_every = now + self._read_every, min(2 * self._read_every, _SELDOM_S)
        summary = Summary(host_name(), now, self._rows)
        return lambda store: self._exchange(store, summary, reads)

    def settle(self, link: StoreLink) -> None:
        """After the job: hand on what is known of other hosts, to neighbours and to this rank if it waits."""
        recorder = self._reference()
        if recorder is None or self._left or not recorder.spans_hosts:
            return
        if self._leads:
            self._write_shared(recorder, link)
        waits = recorder.blocked_in is not None and recorder.quiet_s() >= WAITED_S
        if not (waits or recorder.stuck_on_device):
            if recorder.remote:
                recorder.remote = {}
            self._asked.clear()
            recorder.store_unreachable = ""
            return
        recorder.remote = self._remote(recorder, link)

    def leave(self, recorder: FlightRecorder, link: StoreLink | None) -> None:
        """This rank closes its records. The last rank of a host publishes that; others leave it to it."""
        self._left = True
        shared = self._shared_by(recorder)
        if shared is not None and shared[0] == os.getpid():
            recorder.folder.remove(SHARED)
        rows: list[Row] = []
        self._key = run_secrets.secret(recorder.members)
        if self._key is not None and recorder.spans_hosts:
            self._open_peers(recorder)
            rows = self._own_rows()
        if link is not None and rows and not any(row.place.alive and not row.place.left for row in rows):
            summary = Summary(host_name(), time.monotonic(), rows)
            job: Job = lambda store: self._exchange(store, summary, False)  # noqa: E731
            link.submit([job], wait_s=_LEAVING_S, queue_s=_LEAVING_S)
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()

    # ---- which ranks are here, and who publishes

    def _open_peers(self, recorder: FlightRecorder) -> None:
        """Before they leave and remove their files: what is open can still be read."""
        for rank in recorder.folder.ranks():
            if rank not in self._peers and (peer := Peer.open(recorder.folder, rank, recorder.ranks)):
                self._peers[rank] = peer

    def _own_rows(self) -> list[Row]:
        return [row for _, peer in sorted(self._peers.items()) if (row := host_summary.row_of(peer))]

    def _should_lead(self, recorder: FlightRecorder) -> bool:
        shared = self._shared_by(recorder)
        if shared is not None:
            pid, written_ns = shared
            if pid == os.getpid():
                return True
            if (time.monotonic_ns() - written_ns) / 1e9 < _TAKE_OVER_S and process_state(pid) not in _UNABLE:
                return False
        return recorder.rank == min(filter(self._able, self._peers), default=-1)

    def _able(self, rank: int) -> bool:
        place = self._peers[rank].place()
        if place is None or not place.alive or place.left:
            return False
        return process_state(place.pid) not in _UNABLE

    # ---- the file that the ranks of this host share

    def _shared_by(self, recorder: FlightRecorder) -> tuple[int, int] | None:
        """Who wrote the file, and when; None if nobody has, or the writer is gone."""
        data = self._read_shared(recorder, HEADER.size + WORD.size)
        if len(data) < HEADER.size + WORD.size:
            return None
        magic, at_host, pid, start, *_ = HEADER.unpack_from(data)
        if (magic, at_host) != (MAGIC, host()) or start_time(pid) != start:
            return None
        return pid, WORD.unpack_from(data, HEADER.size)[0]

    @staticmethod
    def _read_shared(recorder: FlightRecorder, size: int = 2**26) -> bytes:
        file = recorder.folder.open(SHARED)
        if file is None:
            return b""
        try:
            return os.pread(file, size, 0)
        except OSError:
            return b""
        finally:
            os.close(file)

    def _write_shared(self, recorder: FlightRecorder, link: StoreLink) -> None:
        folder, pid = recorder.folder, os.getpid()
        head = HEADER.pack(MAGIC, host(), pid, start_time(pid) or 0, recorder.rank, recorder.ranks, 0)
        known: dict[str, Any] = {}
        if self._waits:
            known = {
                "store": link.silent_s,
                "hosts": [
                    [seen.text.decode(), seen.age_s, seen.read_at]
                    for seen in self._seen.values()
                    if seen.summary
                ],
                "stacks": {str(rank): stack for rank, stack in self._asked.items() if stack},
            }
        new = f"{SHARED}.{pid}"
        with open(folder.create(new), "wb") as file:
            file.write(head + WORD.pack(time.monotonic_ns()) + host_summary.as_json(known))
        folder.rename(new, SHARED)

    def _remote(self, recorder: FlightRecorder, link: StoreLink) -> dict[int, RemotePeer]:
        """Ranks of other hosts, by the newest summary that has them."""
        if self._leads:
            hosts = [(s.summary, s.age_s, s.read_at) for s in self._seen.values() if s.summary]
            silent_s, stacks = link.silent_s, self._asked
        else:
            text = self._read_shared(recorder)[HEADER.size + WORD.size :]
            try:
                known = json.loads(text or b"{}")
                found = [(host_summary.parse(t.encode()), a, r) for t, a, r in known.get("hosts", [])]
                hosts = [(summary, age, read) for summary, age, read in found if summary]
                stacks = {int(rank): str(stack) for rank, stack in known.get("stacks", {}).items()}
                silent_s = float(known.get("store", 0.0))
            except (ValueError, TypeError, AttributeError):
                return {}
        reason = ""
        if silent_s >= host_summary.SILENT_S:
            reason = (
                f"the store of this run ({link.address}, on the host of rank 0 or of its launcher) "
                f"has not answered for {silent_s:.0f} s"
            )
        recorder.store_unreachable = reason
        peers: dict[int, RemotePeer] = {}
        for summary, age_s, read_at in hosts:
            for row in summary.rows:
                rank = row.place.rank
                stack = stacks.get(rank, "")
                peer = RemotePeer(summary, row, age_s, read_at, recorder.label_text, reason, stack)
                newer = rank not in peers or peer.silent_s < peers[rank].silent_s
                if rank not in self._peers and newer:
                    peers[rank] = peer
        return peers

    # ---- on the thread of the store

    def _exchange(self, store: Any, summary: Summary, reads: bool) -> None:
        assert self._key is not None
        if not self._index:
            self._index = store.add(f"{self._base}/hosts", 1)
        own = f"{self._base}/{self._index}"
        store.set(own, host_summary.pack(summary, self._key, own))
        if store.check([f"{own}/ask"]):  # an answer of the store, too: `set` does not wait for one
            self._answer(store, f"{own}/ask")
        if reads:
            self._read(store)

    def _read(self, store: Any) -> None:
        count = min(store.add(f"{self._base}/hosts", 0), _MOST_PUBLISHERS)
        keys = {f"{self._base}/{index}": index for index in range(1, count + 1) if index != self._index}
        if not keys:
            return
        complete = store.check(list(keys))
        there = list(keys) if complete else [key for key in keys if store.check([key])]
        assert self._key is not None
        for key, value in zip(there, store.multi_get(there) if there else (), strict=True):
            text = host_summary.verified(value, self._key, key)
            if text is not None:
                self._seen.setdefault(keys[key], _Seen()).read(text)
        if self._waits:
            self._ask(store)

    def _ask(self, store: Any) -> None:
        """The stacks of ranks that are in no operation, or that hold one up: the first few."""
        assert self._key is not None
        for index, seen in self._seen.items():
            rows = seen.summary.rows if seen.summary else []
            ranks = [
                row.place.rank
                for row in rows
                if row.place.alive and not row.place.waiting and row.place.since_s >= WAITED_S
            ]
            new = [rank for rank in ranks if rank not in self._asked][: _MOST_STACKS - len(self._asked)]
            if new:
                key = f"{self._base}/{index}/ask"
                store.set(key, host_summary.sign(host_summary.as_json(new), self._key, key))
                self._asked.update(dict.fromkeys(new, ""))
        for rank in [rank for rank, stack in self._asked.items() if not stack]:
            key = f"{self._base}/stack/{rank}"
            if store.check([key]):
                text = host_summary.verified(store.get(key), self._key, key)
                if text is not None:
                    self._asked[rank] = str(json.loads(text))

    def _answer(self, store: Any, key: str) -> None:
        assert self._key is not None
        text = host_summary.verified(store.get(key), self._key, key)
        store.delete_key(key)
        for rank in json.loads(text)[:_MOST_STACKS] if text is not None else ():
            note = self._peers[rank].note() if rank in self._peers else None
            if note is not None and note.stack:
                target = f"{self._base}/stack/{rank}"
                store.set(target, host_summary.sign(host_summary.as_json(note.stack), self._key, target))
