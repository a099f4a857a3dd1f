"""Values that rest on disk: two slots per value, of which one is current.

A step reads the current slot and writes the other one. When all of it is written, on all ranks, the slots
change roles (`commit`); before that nothing has changed (`abandon`). The tensor of a value is the current
slot, mapped into memory at an address that stays: reading it outside a step reads the file. What a step has
written is checked by its CRC-32 when it is read again, and so is what the engine has put there by the tensor
(`seal`), unless other code has written the tensor since.

Reads and writes run at once, or in the background by a few threads (`start_read`, `start_write`). Where the
file system has direct I/O, entire pages bypass the page cache, if they lie in memory as they do in the file:
all writes, and reads of ranges that a step has written. Other ranges may be dirty in the mapping. A direct
write invalidates cached pages of its range, so the mapping shows what was written; `commit` drops what may be
left of them.

Files lie in a folder per rank, locked while its process lives. Whoever starts next in the same place removes
folders that are not locked any more: those of processes that were killed.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import mmap
import os
import re
import resource
import secrets
import shutil
import socket
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

from fullshard.crc import crc32
from fullshard.errors import OffloadError
from fullshard.plan.homes import DISK_COPY_BYTES

_NAME = re.compile(r"fullshard-offload-[0-9a-f]{16}")
_LOCK = "lock"
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_sync_file_range: Any = getattr(_libc, "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2  # start to write what is dirty, and do not wait
_SEALED_BYTES = 2**20  # of a checksum, where no step has written
_SKIMMED_BYTES = 2**16  # of a file at once, where they are read for their checksum alone
_PIECE_BYTES = 2**23  # of a read or write: its checksum is taken while it is in the processor's cache
_UNSEEN = (
    " Or your code has written there through NumPy, DLPack or `.data`, which moves no version counter: use "
    "methods of the parameter or of the state itself, or fs.full."
)
ALIGNMENT = 4096  # of memory and offsets in direct I/O: the largest logical block of common disks
# Each moves a piece, then takes its checksum, which with zlib may take longer than the disk needs for it: 4
# left a disk idle for a fifth of the time. They wait most of it, so that they may be more than the cores.
_THREADS = 16


class DiskFolder:
    """This process's own folder. It is removed when the last of its values is, or with the process."""

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            parent = parent.resolve()  # the process may change its directory, and a link may go
            with _opened(parent, os.O_DIRECTORY) as place:
                fcntl.flock(place, fcntl.LOCK_EX)  # nobody takes the new folder for an abandoned one
                remove_abandoned(parent)
                self.path = parent / f"fullshard-offload-{secrets.token_hex(8)}"
                self.path.mkdir(mode=0o700)
                try:
                    self._lock = _locked(self.path / _LOCK)
                except OSError:
                    _remove_folder(self.path)
                    raise
        except OSError as error:
            raise OffloadError(
                f"{parent} cannot be used: {error}", "Give another folder to fs.Offload(disk=...)."
            ) from error
        self._numbers = itertools.count()
        self._end = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def new_file(self) -> Path:
        return self.path / f"value-{next(self._numbers):05d}"


def _locked(path: Path) -> IO[bytes]:
    file = open(path, "xb", buffering=0)  # noqa: SIM115  held as long as the process lives
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write(f"host {socket.gethostname()}, process {os.getpid()}\n".encode())
    return file


def _remove(path: Path, lock: IO[bytes], process: int) -> None:
    if os.getpid() != process:
        return  # a fork of it ends
    with contextlib.suppress(OSError):
        _remove_folder(path)
    lock.close()


def _remove_folder(path: Path | str) -> None:
    """The lock goes last: this process may be killed, and what is left is known by it."""
    with _opened(Path(path), os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
        for name in os.listdir(folder):
            if name != _LOCK:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
    if os.listdir(path) in ([], [_LOCK]):
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path) -> list[str]:
    """Remove folders here that processes of this user have left, while `parent` is locked; their names."""
    removed = []
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):  # it may go at any time
            if _is_abandoned(entry):
                _remove_folder(entry.path)
                removed.append(entry.name)
    return removed


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """A folder of this user whose lock nobody holds, or an empty one: its process was killed before it had a
    lock, or behind the removal of it."""
    if not _NAME.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
        return False
    if entry.stat(follow_symlinks=False).st_uid != os.getuid():
        return False
    if not os.listdir(entry.path):
        return True
    with _opened(Path(entry.path) / _LOCK, os.O_NOFOLLOW) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
        return stat.S_ISREG(os.fstat(lock).st_mode)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Of a process: a fork has none of its parent's."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix=f"fullshard-disk-{process}")


class Pending:
    """A read or write in the background. Its memory must be left alone until `wait` or `settle`."""

    def __init__(self, start: int, stop: int, future: Future[None]) -> None:
        self.start, self.stop, self._future = start, stop, future

    def wait(self) -> None:
        """Until it is over; raises its error.

        As another object: one that is raised refers to the frames that it passes, and to the model by them.
        This one is kept, by buffers for one, and a model in such a cycle is not freed.
        """
        error = self._future.exception()
        if isinstance(error, OffloadError):
            raise OffloadError(error.what, error.remedy) from error.__cause__
        self._future.result()

    def settle(self) -> None:
        """Until it is over, however it ended."""
        self._future.exception()

    @property
    def is_over(self) -> bool:
        return self._future.done()


class DiskBuffers:
    """A bounded number of aligned buffers, allocated once.

    `register` gets address and size of all of them, to page-lock them, and returns what unlocks them before
    this memory goes. A buffer that is given back with `until` (a write's `Pending.settle`, say) is free when
    that returns: who takes it first calls it.
    """

    def __init__(
        self,
        count: int,
        size_bytes: int,
        register: Callable[[int, int], Callable[[], Any] | None] | None = None,
    ) -> None:
        self.size_bytes = -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = memoryview(mmap.mmap(-1, count * self.size_bytes))
        self._free: deque[memoryview] = deque(
            memory[i * self.size_bytes : (i + 1) * self.size_bytes] for i in range(count)
        )
        self._busy: deque[tuple[Callable[[], Any], memoryview]] = deque()
        unlock = None if register is None else register(_address(memory), len(memory))
        if unlock is not None:
            weakref.finalize(self, _unlock, self._busy, unlock).atexit = False

    def settle(self) -> None:
        """Until all that were given back are free."""
        while self._busy:
            until, buffer = self._busy.popleft()
            until()
            self._free.append(buffer)

    @property
    def num_left(self) -> int:
        """That `take` would return."""
        return len(self._free) + len(self._busy)

    def take(self) -> memoryview:
        if self._free:
            return self._free.popleft()
        if not self._busy:
            raise AssertionError("all buffers are in use")
        until, buffer = self._busy.popleft()
        until()
        return buffer

    def give(self, buffer: memoryview, until: Callable[[], Any] | None = None) -> None:
        if until is None:
            self._free.append(buffer)
        else:
            self._busy.append((until, buffer))


def _unlock(busy: Iterable[tuple[Callable[[], Any], memoryview]], unlock: Callable[[], Any]) -> None:
    for until, _ in busy:
        until()
    unlock()


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _has_entire_blocks(memory: memoryview, offset: int) -> bool:
    """Whether blocks of a file lie in memory as blocks."""
    if memory.readonly or len(memory) < 2 * ALIGNMENT:
        return False
    return (_address(memory) - offset) % ALIGNMENT == 0


class _Descriptor:
    """An open file. It is closed when that was asked for and no operation uses it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._uses, self._closing = 0, False
        self._lock = threading.RLock()  # a finalizer may close it at any moment, in any thread

    def enter(self) -> None:
        with self._lock:
            self._uses += 1

    def leave(self) -> None:
        with self._lock:
            self._uses -= 1
            self._close_if_unused()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closing and not self._uses:
            self._closing = False
            os.close(self.number)


_Known = tuple[int, int, int | None]  # first byte, number of bytes, checksum


@functools.cache
def _checksum_of_zeros(size_bytes: int) -> int:
    return crc32(bytes(size_bytes))


def _create(path: Path) -> int:
    """A new file, open as long as its value lives: a large model has thousands.

    The usual limit of 1,024 open files is a soft one, which a process may raise for itself.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, flags, 0o600)


class DiskValue:
    """One flat value in a file of two slots."""

    def __init__(self, path: Path, num_elements: int, dtype: torch.dtype) -> None:
        self.path, self.dtype, self._process = path, dtype, os.getpid()
        self.size_bytes = num_elements * dtype.itemsize
        self._slot_bytes = -(-max(self.size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._current = 0
        self._checksums: dict[tuple[int, int], int] = {}  # of ranges of bytes in the current slot
        self._order: list[tuple[int, int]] = []  # of these ranges
        self._is_sealed = False  # no step has written them: they may be dirty in the mapping
        self._written: dict[tuple[int, int], int] = {}  # the same for the other one, in this step
        self.version = 0  # of its tensor, when the checksums were taken
        self._reads: list[Pending] = []  # in the background, perhaps over
        self._writes: list[Pending] = []
        self._has_direct = hasattr(os, "O_DIRECT")
        self._wrote_directly = False  # in this step
        try:
            number = _create(path)
            self._file = _Descriptor(number)
            try:
                os.posix_fallocate(number, 0, 2 * self._slot_bytes)
            except OSError:
                self._file.close()
                path.unlink()
                raise
        except OSError as error:
            needs = f"{2 * self._slot_bytes / 2**30:.2f} GiB"
            remedy = "Free space on this disk, or give another folder."
            if error.errno == errno.EMFILE:
                remedy = "Every value on disk is an open file: raise the limit of this process (ulimit -n)."
            raise OffloadError(f"{path} cannot be made, which needs {needs}: {error}", remedy) from error
        try:
            self.address = self._map(None, 0)
        except OffloadError:
            self._file.close()
            path.unlink(missing_ok=True)
            raise

    def _map(self, address: int | None, slot: int) -> int:
        flags = mmap.MAP_SHARED | (0 if address is None else _MAP_FIXED)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        where = _libc.mmap(
            address, self._slot_bytes, access, flags, self._file.number, slot * self._slot_bytes
        )
        if where is None or where == ctypes.c_void_p(-1).value:
            raise OffloadError(
                f"{self.path} cannot be mapped: {os.strerror(ctypes.get_errno())}",
                "Each value on disk is a mapping: raise their limits (ulimit -v, vm.max_map_count).",
            )
        return int(where)

    def tensor(self) -> torch.Tensor:
        """The current slot. When the last view of it is gone the file is removed."""
        memory = (ctypes.c_char * max(self.size_bytes, 1)).from_address(self.address)
        weakref.finalize(memory, self._close).atexit = False  # other code may still read it then
        if not self.size_bytes:
            return torch.zeros(0, dtype=self.dtype)
        return torch.frombuffer(memory, dtype=self.dtype)

    def _close(self) -> None:
        _libc.munmap(self.address, self._slot_bytes)
        self._file.close()
        if os.getpid() != self._process:
            return  # a fork drops its views: the file is its parent's
        with contextlib.suppress(OSError):
            self.path.unlink()

    # ---- a step

    def read(self, start: int, out: memoryview) -> None:
        """Bytes of the current slot."""
        self._read(self._current, self._known(start, len(out)), start, out)

    def write(self, start: int, data: memoryview) -> None:
        """Bytes of the other slot."""
        self._write(1 - self._current, None, start, data)

    def ranges(self) -> list[tuple[int, int]]:
        """All its bytes as (start, length): what was written together, and between that small ranges."""
        found = []
        for first, size, checksum in self._known(0, self.size_bytes):
            step = DISK_COPY_BYTES if checksum is None else size
            found += [(at, min(step, first + size - at)) for at in range(first, first + size, step)]
        return found

    def _sealed_ranges(self) -> list[tuple[int, int]]:
        starts = range(0, self.size_bytes, _SEALED_BYTES)
        return [(at, min(_SEALED_BYTES, self.size_bytes - at)) for at in starts]

    def _know(self, checksums: dict[tuple[int, int], int], is_sealed: bool) -> None:
        self._checksums, self._order, self._is_sealed = checksums, sorted(checksums), is_sealed

    @property
    def is_known(self) -> bool:
        """Whether there are checksums of what it holds."""
        return bool(self._checksums)

    def seal_new(self) -> None:
        """Nobody has written it: both slots are zero."""
        self._know({at: _checksum_of_zeros(at[1]) for at in self._sealed_ranges()}, is_sealed=True)

    def seal(self) -> None:
        """The current slot holds what was just put there through the tensor."""
        memory = (ctypes.c_char * self.size_bytes).from_address(self.address)
        values = memoryview(memory).cast("B")
        ranges = self._sealed_ranges()
        self._know({at: crc32(values[at[0] : sum(at)]) for at in ranges}, is_sealed=True)

    def _known(self, start: int, length: int) -> list[_Known]:
        """Ranges that cover this one, with the checksums of those that were written together. The first and
        the last may go beyond it."""
        exact = self._checksums.get((start, length))
        if exact is not None:
            return [(start, length, exact)]
        at, stop = start, start + length
        parts: list[_Known] = []
        for index in range(max(0, bisect.bisect(self._order, (start,)) - 1), len(self._order)):
            first, size = self._order[index]
            if first >= stop:
                break
            if first + size > at:
                parts += [(at, first - at, None)] if at < first else []
                parts.append((first, size, self._checksums[first, size]))
                at = first + size
        return [*parts, (at, stop - at, None)] if at < stop else parts

    def start_read(self, start: int, out: memoryview) -> Pending:
        """`read` in the background."""
        self._reads = [p for p in self._reads if not p.is_over]
        known = self._known(start, len(out))
        self._reads.append(self._started(self._read, self._current, known, start, out))
        return self._reads[-1]

    def start_write(self, start: int, data: memoryview, after: Callable[[], Any] | None = None) -> Pending:
        """`write` in the background, where `after` is called first: it returns when the data is there.
        `complete` waits for the write, and raises its error."""
        for earlier in self._writes:
            if earlier.start < start + len(data) and start < earlier.stop:
                earlier.settle()
        self._writes.append(self._started(self._write, 1 - self._current, after, start, data))
        return self._writes[-1]

    def _started(self, function: Callable[..., None], *args: Any) -> Pending:
        start, memory = args[-2:]
        future: Future[None] = Future()
        self._file.enter()
        try:
            _threads(os.getpid()).submit(self._run, future, function, *args)
        except RuntimeError as error:  # no thread could be started
            _threads.cache_clear()  # it counts too many threads as idle now, and would start fewer
            # Threads that there are may have begun it all the same.
            if future.cancel():
                self._file.leave()
                raise OffloadError(
                    f"cannot use {self.path}: {error}",
                    "Model and optimizer are as before this step. Allow more threads (ulimit -u).",
                ) from error
        return Pending(start, start + len(memory), future)

    def _run(self, future: Future[None], function: Callable[..., None], *args: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            future.set_exception(error)
        else:
            future.set_result(None)
        finally:
            self._file.leave()

    def _read(self, slot: int, known: list[_Known], start: int, out: memoryview) -> None:
        self._require_file()
        for one in known:
            begin, end = max(one[0], start), min(one[0] + one[1], start + len(out))
            with self._checked(slot, one, begin, end) as reading:
                reading.take(begin, out[begin - start : end - start])

    @contextlib.contextmanager
    def _checked(self, slot: int, known: _Known, begin: int, end: int) -> Iterator[_Reading]:
        """Inside, bytes `begin` to `end` of a range are read. Those beside them are, for the checksum."""
        first, size, expected = known
        reading = _Reading(self, slot, directly=expected is not None and not self._is_sealed)
        if expected is not None:
            reading.skim(first, begin)
        yield reading
        if expected is not None:
            reading.skim(end, first + size)
            if reading.checksum != expected:
                why = f"bytes {first} to {first + size} are not those that were written"
                raise self._failed("read", why, _UNSEEN)

    def read_at(self, slot: int, start: int, out: memoryview, directly: bool, checksum: int) -> int:
        """Its checksum, behind what `checksum` is of."""
        offset = slot * self._slot_bytes + start
        return self._transfer("read", os.preadv, out, offset, directly, checksum)

    def _write(self, slot: int, after: Callable[[], Any] | None, start: int, data: memoryview) -> None:
        if after is not None:
            after()
        self._require_file()
        offset = slot * self._slot_bytes + start
        self._written[start, len(data)] = self._transfer("write", os.pwritev, data, offset, directly=True)

    def _transfer(
        self, verb: str, function: Any, memory: memoryview, offset: int, directly: bool, checksum: int = 0
    ) -> int:
        """Move all of it; the checksum of it, behind what `checksum` is of."""
        at = 0
        with self._direct(directly and _has_entire_blocks(memory, offset)) as direct:
            while at < len(memory):
                piece = memory[at : at + _PIECE_BYTES]
                through = self._file.number
                if direct is not None and self._has_direct:
                    before = -(offset + at) % ALIGNMENT  # bytes up to the next block
                    if before:
                        piece = piece[:before]
                    elif len(piece) >= ALIGNMENT:
                        through, piece = direct, piece[: len(piece) // ALIGNMENT * ALIGNMENT]
                try:
                    count = int(function(through, [piece], offset + at))
                except OSError as error:
                    if through == direct and error.errno == errno.EINVAL:
                        self._has_direct = False  # it can be opened so, and not used so
                        continue
                    raise self._failed(verb, str(error.strerror)) from error
                if not count:
                    raise self._failed(verb, f"it ends {len(memory) - at} bytes too early")
                checksum = crc32(memory[at : at + count], checksum)
                self._note_written(verb, through == direct, offset + at, count)
                at += count
        return checksum

    def _note_written(self, verb: str, directly: bool, offset: int, count: int) -> None:
        if verb == "write" and directly:
            self._wrote_directly = True
        elif verb == "write" and count >= DISK_COPY_BYTES and _sync_file_range is not None:
            # The disk begins now, and not when memory is full of pages to write. This is a hint: it may fail.
            _sync_file_range(self._file.number, offset, count, _SYNC_FILE_RANGE_WRITE)

    @contextlib.contextmanager
    def _direct(self, wanted: bool) -> Iterator[int | None]:
        """A descriptor for direct I/O, where there is any. It is not kept: processes may hold few."""
        number = None
        if wanted and self._has_direct:
            try:
                number = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_DIRECT)
            except OSError as error:
                self._has_direct = error.errno != errno.EINVAL
        try:
            if number is not None and not os.path.samestat(os.fstat(number), os.fstat(self._file.number)):
                raise self._failed("use", "another file is in its place")
            yield number
        finally:
            if number is not None:
                os.close(number)

    def commit(self) -> None:
        """The other slot becomes current."""
        if not self._written:
            return
        self._know(self._written, is_sealed=False)
        self._written = {}
        self._current = 1 - self._current
        if self._wrote_directly:
            self._wrote_directly = False
            at = self._current * self._slot_bytes
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file.number, at, self._slot_bytes, os.POSIX_FADV_DONTNEED)
        self._map(self.address, self._current)

    def complete(self) -> None:
        """Writes are over; what the step has not written goes into the other slot as it is."""
        for pending in self._writes:
            pending.wait()
        self._writes.clear()
        at = 0
        for start, length in [*sorted(self._written), (self.size_bytes, 0)] if self._written else []:
            if at < start:
                self._copy(at, start)
            at = max(at, start + length)

    def _copy(self, start: int, stop: int) -> None:
        """From the current slot to the other one."""
        for known in self._known(start, stop - start):
            begin, end = max(known[0], start), min(known[0] + known[1], stop)
            with self._checked(self._current, known, begin, end) as reading:
                for at in range(begin, end, DISK_COPY_BYTES):
                    block = memoryview(bytearray(min(DISK_COPY_BYTES, end - at)))
                    reading.take(at, block)
                    self.write(at, block)

    def abandon(self) -> None:
        """The step counts for nothing. Nothing of it runs on."""
        for pending in (*self._reads, *self._writes):
            pending.settle()
        self._reads.clear()
        self._writes.clear()
        self._written = {}
        self._wrote_directly = False

    def forget_checksums(self) -> None:
        self._know({}, is_sealed=False)

    def _require_file(self) -> None:
        try:
            links = os.fstat(self._file.number).st_nlink
        except OSError as error:  # other code has closed it; or the file system is gone
            raise self._failed("use", str(error.strerror)) from error
        if not links:
            raise self._failed("use", "it was removed")

    def _failed(self, verb: str, why: str, otherwise: str = "") -> OffloadError:
        return OffloadError(
            f"cannot {verb} {self.path}: {why}",
            "Model and optimizer are as before this step. Look at the disk, then resume from a checkpoint."
            + otherwise,
        )


class _Reading:
    """Reads the bytes of a range one after the other, with the checksum of all of them."""

    def __init__(self, value: DiskValue, slot: int, directly: bool) -> None:
        self._value, self._slot, self._directly, self.checksum = value, slot, directly, 0

    def take(self, start: int, out: memoryview) -> None:
        self.checksum = self._value.read_at(self._slot, start, out, self._directly, self.checksum)

    def skim(self, start: int, stop: int) -> None:
        for at in range(start, stop, _SKIMMED_BYTES):
            out = memoryview(bytearray(min(_SKIMMED_BYTES, stop - at)))
            self.checksum = self._value.read_at(self._slot, at, out, False, self.checksum)
