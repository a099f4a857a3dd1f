"""Each rank's flight recorder: its collectives, in a file that outlives the process.

Every rank writes its operations into a small mapped file; ranks of one host read each other's. The kernel
keeps the file when the process is stopped, killed or stuck in C, so the others can always see where it was.

    begin        this rank issued the operation (several may be in flight on a channel: prefetch)
    wait_begin   this rank is blocked until the operation is done
    wait_end     it continues
    end          the operation is known to be complete on this rank

File, in native 8-byte words:

    header    magic, host, pid, start time, rank, ranks, left
    events    a sequence number, then the last 16 events: what this rank did last, and when
    channels  32 names; for each a mask of its member ranks and a ring of its last 64 operations
    labels    texts of (channel, phase, unit), append-only; an operation points at its text
    note      where the rank stands, in its own words: written by `monitor` after seconds without an event

One thread at a time writes. No lock: collectives issued by two threads at once have no order to record.
Nothing here raises because of another rank's file: what cannot be read is unknown (None).
"""

from __future__ import annotations

import atexit
import mmap
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fullshard.comm.host_summary import RemotePeer
from fullshard.comm.recorder_files import (
    ENDED_WORD,
    ENTRY,
    EVENT,
    EVENTS,
    HEADER,
    LABEL,
    LEFT_WORD,
    MAGIC,
    MAX_CHANNELS,
    NAME_SIZE,
    NAMES_OFFSET,
    NOTE,
    NOTE_SIZE,
    RING,
    SEQUENCE_OFFSET,
    SETTLED_S,
    Folder,
    Note,
    Peer,
    Place,
    channel_offset,
    digest,
    host,
    labels_offset,
    mask_size,
    note_offset,
    note_text,
    record_name,
    start_time,
)
from fullshard.environment import launch

_ELSEWHERE_S = 4.0  # both sides have stood still this long: see _elsewhere
_FRESH_S = 10.0  # of a note: its writer looks every second
MUTUAL = ": none of them can continue"  # how the verdict on ranks that wait for each other ends


@dataclass
class Channel:  # this rank's side of a channel
    index: int
    ring_offset: int
    others: set[int]  # the other ranks that take part
    number: int = 0
    recent: list[tuple[bytes, int]] = field(default_factory=lambda: [(b"", 0)] * RING)


_open: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()  # of this process


class FlightRecorder:
    """Writes this rank's file and reads the others'. Ranks of one run on one host share the folder.

    members: the ranks of the world that these ranks are, by index; by default the same numbers.
    """

    def __init__(
        self, folder: Folder | str, rank: int, ranks: int, members: Sequence[int] | None = None
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks} ranks")
        self.rank, self.ranks, self.members = rank, ranks, list(members or range(ranks))
        self.folder = Folder(folder) if isinstance(folder, str) else folder
        self._name, self._pid = record_name(rank), os.getpid()
        self.thread = threading.get_ident()  # the one that uses it, last known
        self.stalled = False  # an operation of it was given up
        self._spans_hosts: bool | None = None  # not known yet
        self.store_unreachable = (
            ""  # in words, if the store through which other hosts are seen does not answer
        )
        self.stuck_on_device: tuple[str, int] | None = None  # an operation that the device does not complete
        self._channels: dict[str, Channel] = {}
        self._labels: dict[tuple[str, str, str], tuple[Channel, bytes]] = {}
        self._sequence, self._waiting, self._closed = 0, False, False
        self._blocked_in = ("", 0)
        self._unfinished: set[tuple[str, int]] = set()
        self._created_ns = time.monotonic_ns()
        self.on_close: Callable[[], None] = lambda: None
        self.before_leaving: Callable[[FlightRecorder], None] = lambda _: None
        self._map = self._create()
        self._words = memoryview(self._map).cast("q")
        self._labels_end = labels_offset(ranks) + 8  # offset 0 in the table means "no room for the text"
        self._peers: dict[int, Peer] = {}  # those whose files are open
        self.remote: dict[int, RemotePeer] = {}  # of other hosts; replaced while this rank waits
        self._agreed: dict[tuple[str, int], int] = {}  # (channel, peer): compared up to this number
        self._peers_opened = False
        atexit.register(self.close)
        _open.add(self)

    def _create(self) -> mmap.mmap:
        size_bytes = note_offset(self.ranks) + NOTE_SIZE
        new = f"{self._name}.{self._pid}"
        started = start_time(self._pid) or 0
        header = HEADER.pack(MAGIC, host(), self._pid, started, self.rank, self.ranks, 0)
        event = EVENT.pack(0, 0, 0, bytes(24), 0, self._created_ns, 0)
        with open(self.folder.create(new), "w+b") as file:
            # Zeros, not a hole in the file: a full disk is an error here, not a SIGBUS in the hot path.
            file.write((header.ljust(SEQUENCE_OFFSET + 8, b"\0") + event).ljust(size_bytes, b"\0"))
            file.flush()
            mapped = mmap.mmap(file.fileno(), size_bytes)
            self._inode = os.fstat(file.fileno()).st_ino
        self.folder.rename(
            new, self._name
        )  # peers see a complete file or none; a stale one of an earlier run goes
        return mapped

    def channels(self) -> list[str]:
        """Those of this rank, in the order in which they were first named."""
        return list(self._channels)

    def declare(self, channel: str, members: Iterable[int]) -> None:
        """Only `members` take part in this channel of this rank (default: all). Before its first use."""
        if channel in self._channels:
            raise ValueError(f"channel '{channel}' was already used or declared")
        self._add_channel(channel, sorted({self.rank, *members}))

    def begin(self, channel: str, phase: str, unit: str, step: int) -> int:
        """Record that this rank issues an operation; its running number on the channel, from 1."""
        try:
            state, label = self._labels[channel, phase, unit]
        except KeyError:
            state, label = self._add_label(channel, phase, unit)
        state.number = number = state.number + 1
        slot = number & (RING - 1)
        state.recent[slot] = (label, step)
        ENTRY.pack_into(self._map, state.ring_offset + slot * ENTRY.size, number, label, step, 0, number)
        if not self._waiting:  # a begin from another thread must not hide that this rank is blocked
            self._event(0, number, label, step)
        return number

    def end(self, channel: str, number: int) -> None:
        """Record that the operation is complete here. Not after a failed wait, nor for one only queued on
        a stream: to the others, a rank that ended an operation and then exits has done its part in it."""
        state = self._channels[channel]
        if not 0 < number <= state.number:
            raise ValueError(f"operation {number} of '{channel}' has not begun on rank {self.rank}")
        if number > state.number - RING:
            slot = number & (RING - 1)
            self._words[(state.ring_offset + slot * ENTRY.size) // 8 + ENDED_WORD] = 1
            if not self._waiting:
                label, step = state.recent[slot]
                self._event(0, number, label, step)

    def wait_begin(self, channel: str, number: int) -> None:
        """Record that this rank is blocked until operation `number` of `channel` is done."""
        state = self._channels[channel]
        if state.number - RING < number <= state.number:
            label, step = state.recent[number & (RING - 1)]
        else:
            label, step = LABEL.pack(state.index, 0, 0), -1
        self.thread = threading.get_ident()
        self._waits_for = (number, label, step)
        self._blocked_in = (channel, number)
        self._waiting = True
        self._event(1, number, label, step)

    def wait_end(self) -> None:
        """Record that this rank continues."""
        if self._waiting:
            self._waiting = False
            self._event(0, *self._waits_for)
            if not self._peers_opened:
                # The first operation is over, so its members have all created their files: open them now. A
                # rank that leaves removes its file, and one never opened would look as if on another host.
                self._peers_opened = True
                self.places()

    @property
    def sequence(self) -> int:
        """Grows with every event of this rank."""
        return self._sequence

    @property
    def blocked_in(self) -> tuple[str, int] | None:
        """The channel and number of the operation that this rank is blocked in."""
        return self._blocked_in if self._waiting else None

    def others(self, channel: str) -> set[int]:
        """The other ranks that take part in a channel of this rank."""
        return self._channels[channel].others

    def newest(self, channel: str) -> int | None:
        """The number of the newest operation that this rank began on a channel; None if it has none such."""
        state = self._channels.get(channel)
        return state.number if state else None

    def unfinished(self) -> set[tuple[str, int]]:
        """Operations, by channel and number, that this rank began and does not know to be complete."""
        if not self._closed:
            self._unfinished = {
                (channel, number)
                for channel, state in self._channels.items()
                for number in range(max(1, state.number - RING + 1), state.number + 1)
                if not self._words[(state.ring_offset + (number & (RING - 1)) * ENTRY.size) // 8 + ENDED_WORD]
            }
        return self._unfinished

    def write_note(self, note: Note) -> None:
        """Where this rank stands. From another thread than the one that records operations."""
        text, offset = note_text(note), note_offset(self.ranks)
        if self._closed or len(text) > NOTE_SIZE - NOTE.size:
            return
        self._map[offset + NOTE.size : offset + NOTE.size + len(text)] = text
        NOTE.pack_into(self._map, offset, len(text), digest(text))

    def trail(self, channels: Iterable[str]) -> int:
        """A checksum of the operations that this rank has begun on these channels: how many, and which were
        the last. For ranks that take part in the same operations it is the same."""
        total = 0
        for channel in channels:
            if (state := self._channels.get(channel)) is not None:
                labels = b"".join([label[16:] for label, _ in state.recent])
                total = zlib.crc32(labels, zlib.crc32(f"{channel} {state.number}".encode(), total))
        return total

    def last_operations(self, channels: Iterable[str]) -> dict[str, tuple[int, list[str]]]:
        """By channel, the newest number and the last operations up to it, in words."""
        texts = {
            label: f"{phase} of {unit or 'the root unit'}"
            for (_, phase, unit), (_, label) in self._labels.items()
        }
        found = {}
        for channel in channels:
            if (state := self._channels.get(channel)) is not None:
                numbers = range(max(1, state.number - RING + 1), state.number + 1)
                words = [texts.get(state.recent[number & (RING - 1)][0], "?") for number in numbers]
                found[channel] = (state.number, words)
        return found

    def operation(self, channel: str, number: int) -> str:
        """One of this rank's last operations, in words. For any thread."""
        state = self._channels[channel]
        label, step = state.recent[number & (RING - 1)] if number > state.number - RING else (b"", -1)
        _, phase, unit = self.label_text(label[16:]) or (channel, "?", "?")
        return Place(self.rank, number, channel, phase, unit, step, False, 0.0, True).operation

    def label_text(self, label_hash: bytes) -> tuple[str, str, str] | None:
        """Channel, phase and unit of an operation that this rank has begun at some time, by its hash."""
        for text, (_, label) in list(self._labels.items()):
            if label[16:] == label_hash:
                return text
        return None

    def _event(self, waiting: int, number: int, label: bytes, step: int) -> None:
        self._sequence = sequence = self._sequence + 1
        EVENT.pack_into(
            self._map,
            SEQUENCE_OFFSET + 8 + (sequence & (EVENTS - 1)) * EVENT.size,
            sequence, waiting, number, label, step, time.monotonic_ns(), sequence,
        )  # fmt: skip
        # One aligned 8-byte store; pack_into would first fill with zeros and show them to readers.
        self._words[SEQUENCE_OFFSET // 8] = sequence

    def _add_channel(self, channel: str, members: Sequence[int]) -> Channel:
        index, name = len(self._channels), channel.encode().ljust(NAME_SIZE, b"\0")
        if index == MAX_CHANNELS or len(name) > NAME_SIZE or not channel:
            limits = f"at most {MAX_CHANNELS}, with names of 1 to {NAME_SIZE} bytes"
            raise ValueError(f"cannot add channel '{channel}': {limits}")
        offset, width = channel_offset(index, self.ranks), mask_size(self.ranks)
        mask = sum(1 << member for member in members)
        self._map[offset : offset + width] = mask.to_bytes(width, "little")
        start = NAMES_OFFSET + index * NAME_SIZE
        self._map[start : start + NAME_SIZE] = name  # last: readers ignore a channel without a name
        others = set(members) - {self.rank}
        self._channels[channel] = state = Channel(index, offset + width, others)
        return state

    def _add_label(self, channel: str, phase: str, unit: str) -> tuple[Channel, bytes]:
        state = self._channels.get(channel) or self._add_channel(channel, range(self.ranks))
        text = "\0".join((channel, phase, unit)).encode("utf-8", "backslashreplace")
        start, stop = self._labels_end, self._labels_end + 2 + len(text)
        room = len(text) < 65536 and stop <= note_offset(self.ranks)
        if room:
            self._map[start:stop] = struct.pack("=H", len(text)) + text
            self._labels_end = stop
        label = LABEL.pack(state.index, start - labels_offset(self.ranks) if room else 0, digest(text))
        self._labels[channel, phase, unit] = state, label
        return state, label

    def places(self) -> list[Place | None]:
        """Where every rank is; None for one that is not known: not started, with an unreadable file, or on
        another host while no rank here waits for long."""
        known = self._known()
        return [self._place(rank) if rank in known else None for rank in range(self.ranks)]

    def _known(self) -> set[int]:
        """Ranks of this host, whose files may be read, and of others whose summaries have come."""
        return {*self._peers, *self.folder.ranks(), *self.remote}

    def _peer(self, rank: int) -> Peer | RemotePeer | None:
        return self._peers.get(rank) or self.remote.get(rank)

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks are on other hosts: by what the launcher has set, or because they have no files here
        after the first operation."""
        if self._spans_hosts is None:
            if len({*self._peers, *self.folder.ranks()}) >= self.ranks:
                self._spans_hosts = False
            elif self._peers_opened or launch().local_ranks < launch().ranks:
                self._spans_hosts = True
        return bool(self._spans_hosts)

    def quiet_s(self) -> float:
        """How long ago the last event of this rank was. For any thread."""
        if self._closed:
            return 0.0
        slot = SEQUENCE_OFFSET + 8 + (self._sequence & (EVENTS - 1)) * EVENT.size
        time_ns = EVENT.unpack_from(self._map, slot)[5]
        return max(0, time.monotonic_ns() - time_ns) / 1e9 if time_ns else 0.0

    def _place(self, rank: int) -> Place | None:
        remote = self.remote.get(rank)
        if remote is not None and rank not in self._peers:
            return remote.place()
        peer = self._peers.get(rank)
        place = peer.place() if peer else None
        if self._closed or (place and place.alive and not place.left):
            return place
        # Absent or gone: look again by name, the rank may have (re)started since.
        found = Peer.open(self.folder, rank, self.ranks)
        if found is None:
            return place
        new = found.place()
        age_s = (time.monotonic_ns() - self._created_ns) / 1e9
        # Dead before this rank began: it cannot be distinguished from the file of an earlier run.
        stale = new and (new.left or not new.alive) and new.since_s > age_s
        if new is None or (stale if peer is None else peer.inode == found.inode):
            found.close()
            return place
        if peer:
            peer.close()
        self._peers[rank] = found
        return new

    def disagreement(self, channel: str) -> list[Place]:
        """Every peer that began another operation than this rank under the same number of this channel.

        Compares all operations not compared before (not the newest alone: with prefetch a peer may not have
        begun the newest yet); a place returned is the peer's place in the operation that differs.
        """
        state = self._channels.get(channel)
        return self._differences(channel, state.number) if state else []

    def _differences(self, channel: str, newest: int) -> list[Place]:
        state, found = self._channels[channel], []
        # After the first operation, only files that are open: this runs in every pass, and most ranks of a
        # large run are on other hosts.
        for rank in [*self._peers, *self.remote] if self._peers_opened else sorted(self._known()):
            if rank not in state.others or not (rank in self._peers or self._place(rank)):
                continue
            peer = self._peer(rank)
            if peer is None:
                continue
            number = max(self._agreed.get((channel, rank), 0), state.number - RING)
            ring = peer.ring(channel)
            while number < newest:
                # Equal texts have equal hashes; offsets and channel indices are each process's own.
                mine = state.recent[(number + 1) & (RING - 1)][0][16:]
                if not peer.agrees(ring, number + 1, mine):
                    theirs = peer.entry(channel, number + 1)
                    if theirs is None or theirs.number <= number:
                        break  # not begun, or not known
                    if theirs.number == number + 1 and theirs.label and theirs.label[16:] != mine:
                        if place := peer.place_in(theirs):
                            found.append(place)
                        break
                number += 1
            self._agreed[channel, rank] = number
        return sorted(found, key=lambda place: place.rank)

    def verdict(self, channel: str, number: int) -> str | None:
        """Why operation `number` of `channel` can never complete, or None while it still may."""
        if channel not in self._channels:
            return None
        for theirs in self._differences(channel, number):
            mine = self._own(channel, theirs.number)
            return (
                f"{theirs.who} began {theirs.operation} where rank {self.rank} began "
                f"{mine.operation if mine else 'another operation'}"
            )
        ranks = sorted(self._channels[channel].others & self._known())
        missing = [place for rank in ranks if (place := self._missing(rank, channel, number))]
        if missing:  # one that was killed has not left because another was
            return str(min(missing, key=lambda place: place.alive))
        return self._mutual_wait(channel, number) or self._elsewhere(channel, number)

    def _elsewhere(self, channel: str, number: int) -> str | None:
        """A rank that waits in another place for this one, which is blocked here.

        That is a collective of torch.distributed that the script called and that needs this rank, or an
        operation of another sharded model that this rank has not begun. Definite: this rank's thread does
        nothing but wait here, and takes part in neither.
        """
        me = self._place(self.rank)
        if me is None or not me.waiting or me.since_s < _ELSEWHERE_S:
            return None
        for rank in sorted(self._channels[channel].others & self._known()):
            place, peer = self._place(rank), self._peer(rank)
            entry = peer.entry(channel, number) if peer else None
            if place is None or not place.alive or peer is None or entry is None or entry.number >= number:
                continue
            note = peer.note()
            if note is not None and peer.is_fresh and (where := self._needs_this_rank(note)):
                return (
                    f"{place.who} waits in {where} (at {note.at}), which rank {self.rank} has not called, "
                    f"and rank {self.rank} in {me.operation}, which rank {rank} has not begun{MUTUAL}"
                )
        return None

    def _needs_this_rank(self, note: Note) -> str | None:
        now_ns = time.monotonic_ns()
        if now_ns - note.written_ns > _FRESH_S * 1e9 or now_ns - note.since_ns < _ELSEWHERE_S * 1e9:
            return None
        me = self.members[self.rank]
        if note.collective and note.members >> me & 1:
            return f"torch.distributed.{note.collective}"
        for key, channel, number in note.waits:
            for other in list(_open):
                same = other.folder.key == key and other.members[other.rank] == me
                if same and other is not self and other.thread == self.thread:
                    newest = other.newest(channel)
                    if newest is not None and newest < number:
                        return f"an operation of another model ({channel}, operation {number})"
        return None

    def _own(self, channel: str, number: int) -> Place | None:
        self._place(self.rank)
        own = self._peers.get(self.rank)
        entry = own.entry(channel, number) if own else None
        return own.place_in(entry) if own and entry and entry.number == number else None

    def _missing(self, rank: int, channel: str, number: int) -> Place | None:
        place, peer = self._place(rank), self._peer(rank)
        if place is None or peer is None or (place.alive and not place.left):
            return None
        entry = peer.entry(channel, number)
        begun = entry is not None and entry.number >= number
        if entry is not None and begun and (entry.number > number or entry.ended):
            return None  # its part is complete: it may leave while others still forward its data
        if begun and place.left and place.since_s < SETTLED_S:
            return None  # it left normally with the operation in flight, which may still complete
        return place

    def _mutual_wait(self, channel: str, number: int) -> str | None:
        """A cycle of ranks, each waiting in an operation that the next, itself waiting, has not begun.

        Definite: an edge is looked up after all places were read, and a rank whose edge is still there has
        not left its wait. Ranks that compute are in no cycle, however slow they are. A summary of
        another host is seconds old: its ranks count if they had waited for longer, so that all waits overlap.
        """
        stuck = {
            place.rank: place
            for place in self.places()
            if place and place.waiting and place.alive and place.since_s >= SETTLED_S
            if place.rank not in self.remote or self.remote[place.rank].is_settled
        }
        me = stuck.get(self.rank)
        if me is None or (me.channel, me.number) != (channel, number):
            return None
        cycle = self._cycle([self.rank], stuck, set())
        sentences = (
            f"{stuck[rank].who} waits in {stuck[rank].operation}, which rank {after} has not begun"
            for rank, after in zip(cycle, cycle[1:] + cycle[:1], strict=True)
        )
        return "; ".join(sentences) + MUTUAL if cycle else None

    def _cycle(self, path: list[int], stuck: dict[int, Place], seen: set[int]) -> list[int]:
        seen.add(path[-1])
        for rank in self._not_begun_by(stuck[path[-1]], stuck):
            if rank in path:
                return path[path.index(rank) :]
            if rank not in seen and (cycle := self._cycle([*path, rank], stuck, seen)):
                return cycle
        return []

    def _not_begun_by(self, place: Place, stuck: dict[int, Place]) -> list[int]:
        waiting, missing = self._peer(place.rank), []
        for rank in stuck:
            peer = self._peer(rank)
            if rank != place.rank and peer and waiting and waiting.has_member(place.channel, rank):
                entry = peer.entry(place.channel, place.number)
                if entry is not None and entry.number < place.number:
                    missing.append(rank)
        return missing

    def close(self) -> None:
        """Mark this rank as having left, for peers with the file open, and remove it. May be called twice."""
        if self._closed or os.getpid() != self._pid:  # a forked child must not remove its parent's file
            return
        self.unfinished()
        self._closed = True
        atexit.unregister(self.close)
        self._words[LEFT_WORD] = time.monotonic_ns()
        self.before_leaving(self)
        self._words.release()
        self._map.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self.folder.remove(self._name, self._inode)
        self.folder.close()
        self.on_close()
