"""The file format of the flight recorder, and reading another rank's file. See `flight_recorder`."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import stat
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

SETTLED_S = 2.0  # a mutual wait is reported only after both sides have stood still this long
RING = 64  # operations remembered per channel; a power of two
MAX_CHANNELS = 32

MAGIC = b"FSREC-02"
HEADER = struct.Struct("=8sQqqqqq")
LEFT_WORD = 6
SEQUENCE_OFFSET = 64
# Sixteen events, not one behind a lock: the event a reader copies is not overwritten before 15 more are
# published, so a reader never starves, and a writer that is killed half-way leaves the previous one intact.
EVENTS = 16
EVENT = struct.Struct("=qqq24sqqq")  # sequence, waiting, number, label, step, time_ns, sequence
NAMES_OFFSET = SEQUENCE_OFFSET + 8 + EVENTS * EVENT.size
NAME_SIZE = 32
CHANNELS_OFFSET = NAMES_OFFSET + MAX_CHANNELS * NAME_SIZE
WORD = struct.Struct("=q")
LABEL = struct.Struct("=qqQ")  # channel index, offset of the text, hash of the text
ENTRY = struct.Struct("=q24sqqq")  # number, label, step, ended, number
ENDED_WORD = 5  # of an entry
LABELS_SIZE = 256 * 1024  # about 5000 labels; a later label keeps its hash, so it is still compared
NOTE = struct.Struct("=qQ")  # length, hash; then the text
NOTE_SIZE = 8 * 1024
SHARED = "hosts.seen"  # what the ranks of this host know of other hosts: see host_watch
_MAX_FOLDERS = 10_000  # looked at for abandoned ones: anybody may create folders next to ours


@dataclass(frozen=True)
class Place:
    """Where a rank is, or was last. `number` 0: it has not begun any operation."""

    rank: int
    number: int
    channel: str
    phase: str
    unit: str
    step: int
    waiting: bool
    since_s: float
    alive: bool
    left: bool = False  # it closed its recorder: it takes part in no more operations
    pid: int = 0
    host: str = ""  # of a rank on another host: that host's name
    sequence: int = field(default=0, compare=False)  # events of this rank up to now

    @property
    def operation(self) -> str:
        unit = f"unit '{self.unit}'" if self.unit else "the root unit"
        return f"{self.channel} of {unit} ({self.phase}, step {self.step}, operation {self.number})"

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.who}: {self.doing}"

    @property
    def doing(self) -> str:
        last = f"last was {self.operation}" if self.number else "it had not begun any operation"
        if not self.alive:
            return f"process has exited; {last}"
        if self.left:
            return f"has left the run {self.since_s:.1f} s ago; {last}"
        if self.waiting:
            return f"waiting in {self.operation} for {self.since_s:.1f} s"
        return f"outside any operation for {self.since_s:.1f} s; {last}"


class Entry(NamedTuple):
    """One operation in a ring. Not a frozen dataclass, which takes three times as long to create."""

    number: int
    label: bytes
    step: int
    ended: bool


class Event(NamedTuple):
    """One of the last events of a rank: from then on it waited in the operation, or did not."""

    time_ns: int
    waiting: bool
    entry: Entry
    now_ns: int  # when it was read


class Note(NamedTuple):
    """What a rank that has stood still for seconds wrote about itself."""

    at: str  # the line of its script
    collective: str  # of torch.distributed, called by the script: its name; empty if it is in none
    members: int  # ranks that this collective needs, as a mask of ranks of the world
    waits: tuple[tuple[str, str, int], ...]  # records, channel and number of our operations it is blocked in
    since_ns: int  # how long it has been there
    written_ns: int
    stack: str = ""  # of its threads, as far as there is room for it


def note_text(note: Note) -> bytes:
    """As stored: JSON. Ranks of a mask are hexadecimal, so that thousands of them fit."""
    return json.dumps([*note[:2], hex(note.members), *note[3:]]).encode()


def read_note(text: bytes) -> Note:
    at, collective, members, waits, since_ns, written_ns, stack = json.loads(text)
    named = tuple((str(key), str(channel), int(number)) for key, channel, number in waits)
    return Note(str(at), str(collective), int(members, 16), named, int(since_ns), int(written_ns), str(stack))


def record_name(rank: int) -> str:
    return f"rank-{rank}.record"


class Folder:
    """A folder of records that belongs to this user. Nothing in it is followed, waited for or trusted.

    Its parent may be writable for everybody. All files are named relative to the folder that was opened and
    checked, so one that is put in its place later is not used.
    """

    def __init__(self, path: str, parent: int | None = None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, dir_fd=parent)
        self.path, self.name = path, os.path.basename(path)
        self.key = self.name.rpartition("-")[2]  # the same for these records on all hosts
        if os.fstat(self._file).st_uid != os.geteuid():
            self.close()
            raise PermissionError(f"{path!r} belongs to another user")

    def open(self, name: str) -> int | None:
        """A file for reading; None unless it is a regular file of this user. A FIFO would block."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(name, flags, dir_fd=self._file)
        except OSError:
            return None
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            return file
        os.close(file)
        return None

    def create(self, name: str) -> int:
        """A new file for reading and writing; one of this name, which only this user can have made, goes."""
        self.remove(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._file)

    def rename(self, name: str, new: str) -> None:
        os.replace(name, new, src_dir_fd=self._file, dst_dir_fd=self._file)

    def remove(self, name: str, inode: int | None = None) -> None:
        """With `inode`: only if the file is still that one."""
        with contextlib.suppress(OSError):
            found = os.stat(name, dir_fd=self._file, follow_symlinks=False)
            if inode is None or found.st_ino == inode:
                os.unlink(name, dir_fd=self._file)

    def names(self) -> list[str]:
        try:
            return os.listdir(self._file)
        except OSError:
            return []

    def ranks(self) -> list[int]:
        """The ranks that have a record here: those of this host."""
        parts = (name.split(".") for name in self.names())
        numbers = (part[0].removeprefix("rank-") for part in parts if part[1:] == ["record"])
        return sorted(int(number) for number in numbers if number.isdecimal())

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def mask_size(ranks: int) -> int:
    return (ranks + 63) // 64 * 8


def channel_offset(index: int, ranks: int) -> int:
    return CHANNELS_OFFSET + index * (mask_size(ranks) + RING * ENTRY.size)


def labels_offset(ranks: int) -> int:
    return channel_offset(MAX_CHANNELS, ranks)


def note_offset(ranks: int) -> int:
    return labels_offset(ranks) + LABELS_SIZE


def digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@cache
def host() -> int:
    """Identifies this boot and pid namespace: elsewhere neither pids nor clocks can be compared."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return digest(file.read() + os.readlink("/proc/self/ns/pid").encode())
    except OSError:
        return digest(os.uname().nodename.encode())


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks; None: it is gone or a zombie; 0: not known on this system."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()  # the name may hold spaces and brackets
        return None if after_name[0] in (b"Z", b"X") else int(after_name[19])
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    return 0


def cpu_time(pid: int, depth: int = 0) -> float:
    """Seconds of processor time of a process and its descendants; 0 where it is not known."""
    total = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
        total = sum(map(int, after_name[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in os.listdir(f"/proc/{pid}/task") if depth < 8 else ():
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                total += sum(cpu_time(int(child), depth + 1) for child in file.read().split())
    return total


def process_state(pid: int) -> str:
    """One letter, as in /proc: R computes, S sleeps, D waits for a disk, T is stopped. Empty: not known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


class Peer:
    """Reads one rank's file. By pread: reading a mapped file that was truncated would kill the process."""

    is_fresh = True  # what is read is as it is now

    def __init__(self, file: int, rank: int, ranks: int) -> None:
        self._file, self._rank, self._ranks = file, rank, ranks
        self.inode = os.fstat(file).st_ino
        self._channels: dict[str, tuple[int, int]] = {}  # name: ring offset, mask of members
        self._texts: dict[bytes, tuple[str, str, str]] = {}

    @classmethod
    def open(cls, folder: Folder, rank: int, ranks: int) -> Peer | None:
        file = folder.open(record_name(rank))
        return None if file is None else cls(file, rank, ranks)

    def close(self) -> None:
        os.close(self._file)

    def _read(self, offset: int, size: int) -> bytes | None:
        try:
            data = os.pread(self._file, size, offset)
        except (OSError, ValueError, OverflowError):
            return None
        return data if len(data) == size else None

    def place(self) -> Place | None:
        for _ in range(100):
            data, again = self._read(0, NAMES_OFFSET), self._read(SEQUENCE_OFFSET, 8)
            if data is None or again is None:
                return None
            magic, at_host, pid, start, rank, ranks, left_ns = HEADER.unpack_from(data)
            if (magic, at_host, rank, ranks) != (MAGIC, host(), self._rank, self._ranks):
                return None
            (sequence,), (now,) = WORD.unpack_from(data, SEQUENCE_OFFSET), WORD.unpack(again)
            slot = SEQUENCE_OFFSET + 8 + (sequence & (EVENTS - 1)) * EVENT.size
            first, waiting, number, label, step, time_ns, last = EVENT.unpack_from(data, slot)
            if first == last == sequence and now - sequence < EVENTS - 1:
                break
        else:
            return None
        try:
            alive = pid > 0 and start_time(pid) == start
        except (OSError, OverflowError):
            alive = True  # not known, for instance with no file descriptor left: no false alarm
        channel, phase, unit = self._text(label) if number else ("", "", "")
        since_s = max(0, time.monotonic_ns() - (left_ns or time_ns)) / 1e9
        return Place(
            rank,
            number,
            channel,
            phase,
            unit,
            step,
            bool(waiting and not left_ns),
            since_s,
            alive,
            left_ns != 0,
            pid,
            sequence=sequence,
        )

    def note(self) -> Note | None:
        """What the rank wrote about where it stands; None if it has not, or if that cannot be read."""
        for _ in range(3):
            head = self._read(note_offset(self._ranks), NOTE.size)
            length, expected = NOTE.unpack(head) if head else (0, 0)
            if not 0 < length <= NOTE_SIZE - NOTE.size:
                return None
            text = self._read(note_offset(self._ranks) + NOTE.size, length)
            if text and digest(text) == expected:  # otherwise it is being written
                try:
                    return read_note(text)
                except (ValueError, TypeError):
                    return None
        return None

    def place_in(self, entry: Entry) -> Place | None:
        """The rank's place in one of its operations."""
        now, (channel, phase, unit) = self.place(), self._text(entry.label)
        if now is None or (now.channel, now.number) == (channel, entry.number):
            return now
        there = replace(now, channel=channel, phase=phase, unit=unit, waiting=False)
        return replace(there, number=entry.number, step=entry.step)

    def ring(self, channel: str) -> bytes:
        """The rank's recent operations of a channel as they are now, in one read; empty if not known."""
        found = self._channels.get(channel)
        return (self._read(found[0], RING * ENTRY.size) if found else None) or b""

    @staticmethod
    def agrees(ring: bytes, number: int, label_hash: bytes) -> bool:
        """A fast check that the rank began this operation. False means unknown."""
        if not ring:
            return False
        first, label, _, _, last = ENTRY.unpack_from(ring, (number & (RING - 1)) * ENTRY.size)
        return bool(first == last == number and label[16:] == label_hash)

    def entry(self, channel: str, number: int) -> Entry | None:
        """The operation in the ring's place of `number`: an older number means that it has not begun, a newer
        one that it has. None: not known."""
        found = self._channel(channel)
        if found is None:
            return Entry(0, b"", 0, False)
        for _ in range(100):
            data = self._read(offset := found[0] + (number & (RING - 1)) * ENTRY.size, ENTRY.size)
            if data is None:
                return None
            first, label, step, ended, last = ENTRY.unpack(data)
            if first == last and data == self._read(offset, ENTRY.size):  # twice the same: not torn
                return Entry(first, label, step, bool(ended))
        return None

    def events(self) -> list[Event]:
        """The last events of the rank, oldest first."""
        data, now_ns = self._read(0, NAMES_OFFSET) or b"", time.monotonic_ns()
        found = []
        for first, waiting, number, label, step, time_ns, last in EVENT.iter_unpack(
            data[SEQUENCE_OFFSET + 8 :]
        ):
            if first == last and number > 0:
                entry = Entry(number, label, step, not waiting)
                found.append((first, Event(time_ns, bool(waiting), entry, now_ns)))
        return [event for _, event in sorted(found)]

    def recent(self) -> dict[str, list[Entry]]:
        """The newest operations of every channel that was used, oldest first."""
        found = {}
        for name in filter(None, self._names()):
            entries = ENTRY.iter_unpack(self.ring(name) or b"") if self._channel(name) else ()
            begun = [Entry(n, label, step, bool(ended)) for n, label, step, ended, m in entries if n == m > 0]
            if begun:
                found[name] = sorted(begun)
        return found

    def members(self, channel: str) -> int:
        """The ranks that take part in a channel, as a mask."""
        found = self._channel(channel)
        return found[1] if found else 0

    def text(self, entry: Entry) -> tuple[str, str, str]:
        """Channel, phase and unit of one of the rank's operations."""
        return self._text(entry.label)

    def has_member(self, channel: str, rank: int) -> bool:
        found = self._channel(channel)
        return found is not None and bool(found[1] >> rank & 1)

    def _channel(self, channel: str) -> tuple[int, int] | None:
        if (found := self._channels.get(channel)) is None:
            names, width = self._names(), mask_size(self._ranks)
            if channel in names:
                offset = channel_offset(names.index(channel), self._ranks)
                mask = int.from_bytes(self._read(offset, width) or b"", "little")
                self._channels[channel] = found = offset + width, mask
        return found

    def _names(self) -> list[str]:
        data = self._read(NAMES_OFFSET, MAX_CHANNELS * NAME_SIZE) or b""
        names = (data[start : start + NAME_SIZE] for start in range(0, len(data), NAME_SIZE))
        return [name.rstrip(b"\0").decode(errors="replace") for name in names]

    def _text(self, label: bytes) -> tuple[str, str, str]:
        if label not in self._texts:
            index, offset, expected = LABEL.unpack(label)
            start = labels_offset(self._ranks) + offset
            size = self._read(start, 2) if offset > 0 else None
            text = self._read(start + 2, int.from_bytes(size, sys.byteorder)) if size else None
            parts = text.decode(errors="replace").split("\0", 2) if text and digest(text) == expected else []
            if len(parts) != 3:  # no room in the table, or garbage: the channel is still known
                names = self._names()
                return names[index] if 0 <= index < len(names) else "?", "?", "?"
            self._texts[label] = parts[0], parts[1], parts[2]
        return self._texts[label]


def remove_abandoned(parent: str, prefix: str) -> None:
    """Remove folders of runs whose processes are all gone: they were killed and could not do it."""
    with contextlib.suppress(OSError):
        above = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(above) as entries:
                for entry in itertools.islice(entries, _MAX_FOLDERS):
                    if entry.name.startswith(prefix):
                        _remove_if_abandoned(above, entry.name)
        finally:
            os.close(above)


def _remove_if_abandoned(above: int, name: str) -> None:
    try:
        folder = Folder(name, parent=above)
    except OSError:
        return  # a link, a file, or another user's
    try:
        names = folder.names()
        if names and all(_abandoned(folder, each) for each in names):
            for each in names:
                folder.remove(each)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=above)
    finally:
        folder.close()


def _abandoned(folder: Folder, name: str) -> bool:
    file = folder.open(name)
    if file is None:
        return False
    try:
        data = os.pread(file, HEADER.size, 0)
    except OSError:
        return False
    finally:
        os.close(file)
    if len(data) < HEADER.size:
        return False
    magic, at_host, pid, start, *_ = HEADER.unpack(data)
    ours = magic[:6] == MAGIC[:6] and at_host == host()  # of any version of the format
    return bool(ours and start_time(pid) != start)


def records_parent() -> str:
    """Memory, where there is such a folder: written pages of a disk could stall the hot path."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def records_prefix() -> str:
    """With which the names of this user's folders of records begin."""
    return f"fullshard-{os.geteuid()}-"


def remove_if_empty(path: str) -> None:
    """Remove a folder of records, if no rank has one in it."""
    with contextlib.suppress(OSError):
        if os.listdir(path) == [SHARED]:
            os.unlink(os.path.join(path, SHARED))
        os.rmdir(path)  # not through links, and only if it is empty


def folder_for(parent: str, name: str) -> Folder:
    """Open a folder of this user, and create it if there is none."""
    path = os.path.join(parent, name)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode=0o700)
    return Folder(path)
