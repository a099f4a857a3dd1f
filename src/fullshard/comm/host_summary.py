"""What the ranks of one host do, in less than a kilobyte, and a rank of another host as read from that.

A summary is JSON, compressed and signed: nothing in it is run, and what does not carry the run's signature is
not read. Texts are written once, rows refer to them by number:

    {"v": 1, "host": name, "clock": seconds, "texts": [...], "rows": [row, ...]}
    row      rank, pid, state, flags, events, seconds in its place, place, channels, processor time, note
    place    channel, number, phase, unit, step: the operation that it is in, or was in last
    channel  name, members, newest number, which of the last 16 have ended, hashes of the last 4

Eight ranks take about 400 bytes while they train. Notes (the line of the script of a rank that stands still)
are added as long as there is room.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fullshard.comm.recorder_files import RING, Entry, Note, Peer, Place, cpu_time, process_state

VERSION = 1
ROOM = 1000  # bytes for up to eight ranks, signature included
SILENT_S = 3.0  # a host that has written nothing for so long is not heard of; it writes once per second
_SETTLED_S = 4.0  # see is_settled
_STANDS_S = 2.0
_MOST_BYTES = 2**20  # of a summary that is read, when it is unpacked
_SIGNATURE = 16
_ENDED, _HASHES = 16, 4
_ALIVE, _LEFT, _WAITING = 1, 2, 4
_AT = 160  # characters of a script's line in a note


class Row(NamedTuple):
    """One rank. What is at hand of it, before it is written and after it is read."""

    place: Place
    state: str  # as in /proc; empty: not known
    used_s: float  # processor time, of a rank that stands still
    channels: dict[str, Channel]
    note: Note | None


class Channel(NamedTuple):
    members: int
    newest: int
    ended: int  # bit i: operation newest - i is complete
    hashes: bytes  # eight per operation, the newest last


@dataclass(frozen=True)
class Summary:
    host: str
    clock_s: float  # of the host that wrote it
    rows: list[Row]


def row_of(peer: Peer) -> Row | None:
    """What is to be known of a rank of this host. Alive or not is read first: a dead rank begins nothing."""
    place = peer.place()
    if place is None:
        return None
    channels = {name: _channel(peer, name, entries) for name, entries in peer.recent().items()}
    note, used_s = None, 0.0
    if place.alive and not place.left and place.since_s >= _STANDS_S:
        used_s, note = cpu_time(place.pid), peer.note()
        if note is not None and note.written_ns < time.monotonic_ns() - place.since_s * 1e9:
            note = None  # of an earlier time
    return Row(place, process_state(place.pid) if place.alive else "", used_s, channels, note)


def _channel(peer: Peer, name: str, entries: list[Entry]) -> Channel:
    newest = entries[-1].number
    ended = sum(1 << newest - e.number for e in entries if e.ended and newest - e.number < _ENDED)
    last = [entry for entry in entries[-_HASHES:] if newest - entry.number < _HASHES]
    return Channel(peer.members(name), newest, ended, b"".join(entry.label[16:] for entry in last))


# ---- to bytes and back


class _Texts:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def pack(summary: Summary, key: bytes, purpose: str) -> bytes:
    """With as many notes as there is room for: first of ranks that are not in an operation."""
    room = ROOM * max(1, -(-len(summary.rows) // 8))
    order = sorted(
        (row.place.waiting, -row.place.since_s, index)
        for index, row in enumerate(summary.rows)
        if row.note is not None
    )
    kept: set[int] = set()
    packed = _pack(summary, kept, key, purpose)
    for _, _, index in order:
        fuller = _pack(summary, {*kept, index}, key, purpose)
        if len(fuller) > room:
            break
        kept.add(index)
        packed = fuller
    return packed


def _pack(summary: Summary, notes: set[int], key: bytes, purpose: str) -> bytes:
    text = _Texts()
    rows = [_row(row, index in notes, text) for index, row in enumerate(summary.rows)]
    data = {"v": VERSION, "host": summary.host, "clock": round(summary.clock_s, 2), "rows": rows}
    return sign(as_json({**data, "texts": list(text.numbers)}), key, purpose)


def _row(row: Row, with_note: bool, text: _Texts) -> list[Any]:
    place = row.place
    flags = place.alive * _ALIVE + place.left * _LEFT + place.waiting * _WAITING
    operation = [text(place.channel), place.number, text(place.phase), text(place.unit), place.step]
    channels = [
        [text(name), text(hex(c.members)), c.newest, c.ended, c.hashes.hex()]
        for name, c in row.channels.items()
    ]
    note: list[Any] | None = None
    if with_note and row.note is not None:
        ages = [(time.monotonic_ns() - ns) // 10**6 for ns in (row.note.since_ns, row.note.written_ns)]
        at, members = row.note.at[:_AT], hex(row.note.members)
        note = [at, row.note.collective, text(members), list(row.note.waits), *ages]
    since_s, used_s = round(place.since_s, 1), round(row.used_s, 1)
    head = [place.rank, place.pid, row.state, flags, place.sequence, since_s]
    return [*head, operation, channels, used_s, note]


def unpack(data: bytes, key: bytes, purpose: str) -> Summary | None:
    """None for anything that was not signed with this key, or is not a summary."""
    text = verified(data, key, purpose)
    return None if text is None else parse(text)


def parse(text: bytes) -> Summary | None:
    """A summary from its JSON; None if it is none."""
    try:
        found = json.loads(text)
        if found["v"] != VERSION:
            return None
        host, texts = str(found["host"])[:80], [str(each) for each in found["texts"]]
        return Summary(host, float(found["clock"]), [_read_row(row, texts, host) for row in found["rows"]])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None


def _read_row(row: list[Any], texts: list[str], host: str) -> Row:
    rank, pid, state, flags, events, since_s, operation, channels, used_s, note = row
    channel, number, phase, unit, step = operation
    place = Place(
        int(rank), int(number), texts[channel], texts[phase], texts[unit], int(step), bool(flags & _WAITING),
        float(since_s), bool(flags & _ALIVE), bool(flags & _LEFT), int(pid), host, int(events),
    )  # fmt: skip
    known = {
        texts[name]: Channel(int(texts[mask], 16), int(newest), int(ended), bytes.fromhex(hashes))
        for name, mask, newest, ended, hashes in channels
    }
    return Row(place, str(state), float(used_s), known, None if note is None else _read_note(note, texts))


def _read_note(note: list[Any], texts: list[str]) -> Note:
    at, collective, members, waits, since_ms, written_ms = note
    now_ns = time.monotonic_ns()
    named = tuple((str(key), str(channel), int(number)) for key, channel, number in waits)
    times_ns = (now_ns - int(since_ms) * 10**6, now_ns - int(written_ms) * 10**6)
    return Note(str(at), str(collective), int(texts[members], 16), named, *times_ns)


def as_json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def sign(text: bytes, key: bytes, purpose: str) -> bytes:
    """Compressed, behind a signature that also holds what it is for: it cannot be used as something else."""
    packed = zlib.compress(text, 9)
    return _signature(packed, key, purpose) + packed


def verified(data: bytes, key: bytes, purpose: str) -> bytes | None:
    """The text that `sign` was given, or None."""
    packed = data[_SIGNATURE:]
    if not hmac.compare_digest(data[:_SIGNATURE], _signature(packed, key, purpose)):
        return None
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(packed, _MOST_BYTES)
        return None if stream.unconsumed_tail else text
    except zlib.error:
        return None


def _signature(packed: bytes, key: bytes, purpose: str) -> bytes:
    return hmac.new(key, purpose.encode() + b"\0" + packed, hashlib.sha256).digest()[:_SIGNATURE]


# ---- a rank of another host


class RemotePeer:
    """A rank of another host, by its host's last summary. Answers what `Peer` does; None is unknown.

    read_at: when the summary was read. age_s: how old it was then, as far as that is known.
    """

    def __init__(
        self,
        summary: Summary,
        row: Row,
        age_s: float,
        read_at: float,
        lookup: Callable[[bytes], tuple[str, str, str] | None] = lambda _: None,
        unreachable: str = "",
        stack: str = "",
    ) -> None:
        self.host, self.row, self.clock_s = summary.host, row, summary.clock_s
        self._age_s, self._read_at, self._lookup = age_s, read_at, lookup
        self.unreachable = unreachable  # why nothing newer can be known: the store does not answer
        self.stack = stack

    @property
    def silent_s(self) -> float:
        """How long nothing has been heard of the rank's host."""
        return self._age_s + time.monotonic() - self._read_at

    @property
    def is_fresh(self) -> bool:
        return self.silent_s < SILENT_S

    @property
    def is_settled(self) -> bool:
        """It had been in its place for longer than its summary is old."""
        return self.is_fresh and self.row.place.since_s >= _SETTLED_S

    @property
    def is_silent(self) -> bool:
        """Its host is not heard of any more, and it had not left before."""
        place = self.row.place
        return not self.is_fresh and place.alive and not place.left

    def place(self) -> Place:
        place = self.row.place
        return replace(place, since_s=place.since_s + self.silent_s)

    def note(self) -> Note | None:
        return self.row.note

    def ring(self, channel: str) -> bytes:
        del channel
        return b""

    @staticmethod
    def agrees(ring: bytes, number: int, label_hash: bytes) -> bool:
        del ring, number, label_hash
        return False  # not known: see entry

    def entry(self, channel: str, number: int) -> Entry | None:
        found = self.row.channels.get(channel)
        if found is None:
            return Entry(0, b"", 0, False)
        behind = found.newest - number
        if behind < 0:
            return Entry(found.newest, b"", 0, False)
        if behind >= _ENDED:
            return Entry(number + RING, b"", 0, True)
        hashes = found.hashes[::-1][8 * behind : 8 * behind + 8][::-1]
        label = bytes(16) + hashes if len(hashes) == 8 else b""
        return Entry(number, label, self.row.place.step, bool(found.ended >> behind & 1))

    def place_in(self, entry: Entry) -> Place | None:
        place = self.place()
        channel, phase, unit = self._lookup(entry.label[16:]) or ("?", "?", "?")
        if (place.channel, place.number) == (channel, entry.number):
            return place
        there = replace(place, channel=channel, phase=phase, unit=unit, waiting=False)
        return replace(there, number=entry.number, step=entry.step)

    def has_member(self, channel: str, rank: int) -> bool:
        found = self.row.channels.get(channel)
        return found is not None and bool(found.members >> rank & 1)


def ranks_on(ranks: Sequence[int], host: str) -> str:
    """As errors name them; the first sixteen."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:16]))} on {host}"


def silent_hosts(peers: Iterable[RemotePeer]) -> list[str]:
    """In a sentence each: the hosts of these ranks that are not heard of, with their ranks."""
    by_host: dict[str, list[RemotePeer]] = {}
    for peer in peers:
        if peer.is_silent:
            by_host.setdefault(peer.host, []).append(peer)
    texts = []
    for host, silent in sorted(by_host.items(), key=lambda item: item[1][0].row.place.rank)[:8]:
        seconds = max(peer.silent_s for peer in silent)
        last = silent[0].row.place
        ranks = [peer.row.place.rank for peer in silent]
        texts.append(
            f"{ranks_on(ranks, host)}: this host was not heard of for {seconds:.0f} s "
            f"(it is down, its processes are stopped or gone, or the link is cut); "
            f"at last rank {last.rank} was {last.doing}"
        )
    if len(by_host) > 8:
        texts.append(f"and {len(by_host) - 8} more hosts")
    reasons = {peer.unreachable for peers in by_host.values() for peer in peers if peer.unreachable}
    return [*sorted(reasons), *texts]
