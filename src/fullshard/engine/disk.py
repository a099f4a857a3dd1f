"""Values that rest on disk: two slots per value, of which one is current.

A step reads the current slot and writes the other one. When all of it is written, on all ranks, the slots
change roles (`commit`); before that nothing has changed (`abandon`). The tensor of a value is the current
slot, mapped into memory at an address that stays: reading it outside a step reads the file. What a step has
written is checked by its CRC-32 when it is read again, unless the tensor was written since.

Files lie in a folder per rank, locked while its process lives. Whoever starts next in the same place removes
folders that are not locked any more: those of processes that were killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import re
import secrets
import shutil
import socket
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from fullshard.crc import crc32
from fullshard.errors import OffloadError

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
_COPY_BYTES = 2**22


class DiskFolder:
    """This process's own folder. It is removed when the last of its values is, or with the process."""

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with _opened(parent, os.O_DIRECTORY) as place:
                fcntl.flock(place, fcntl.LOCK_EX)  # nobody takes the new folder for an abandoned one
                remove_abandoned(parent)
                self.path = parent / f"fullshard-offload-{secrets.token_hex(8)}"
                self.path.mkdir(mode=0o700)
                self._lock = _locked(self.path / _LOCK)
            self._lock.write(f"host {socket.gethostname()}, process {os.getpid()}\n".encode())
            self._lock.flush()
        except OSError as error:
            raise OffloadError(
                f"{parent} cannot be used: {error}", "Give another folder to fs.Offload(disk=...)."
            ) from error
        self._numbers = itertools.count()
        self._end = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def new_file(self) -> Path:
        return self.path / f"value-{next(self._numbers):05d}"


def _locked(path: Path) -> IO[bytes]:
    file = open(path, "xb")  # noqa: SIM115  held as long as the process lives
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _remove(path: Path, lock: IO[bytes], process: int) -> None:
    if os.getpid() != process:
        return  # a fork of it ends
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def remove_abandoned(parent: Path) -> list[str]:
    """Remove folders here that processes of this user have left; the names of those removed."""
    removed = []
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):  # it may go at any time
            if _is_abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.name)
    return removed


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """A folder of this user whose lock nobody holds."""
    if not _NAME.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
        return False
    if entry.stat(follow_symlinks=False).st_uid != os.getuid():
        return False
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


class DiskValue:
    """One flat value in a file of two slots."""

    def __init__(self, path: Path, num_elements: int, dtype: torch.dtype) -> None:
        self.path, self.dtype = path, dtype
        self.size_bytes = num_elements * dtype.itemsize
        self._slot_bytes = -(-max(self.size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._current = 0
        self._checksums: dict[tuple[int, int], int] = {}  # of ranges of bytes in the current slot
        self._written: dict[tuple[int, int], int] = {}  # the same for the other one, in this step
        self.version = 0  # of its tensor, when the checksums were taken
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            os.posix_fallocate(self._descriptor, 0, 2 * self._slot_bytes)
        except OSError as error:
            needs = f"{2 * self._slot_bytes / 2**30:.2f} GiB"
            raise OffloadError(
                f"{path} cannot be made, which needs {needs}: {error}",
                "Free space on this disk, or give another folder.",
            ) from error
        self.address = self._map(None, 0)

    def _map(self, address: int | None, slot: int) -> int:
        flags = mmap.MAP_SHARED | (0 if address is None else _MAP_FIXED)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        where = _libc.mmap(
            address, self._slot_bytes, access, flags, self._descriptor, slot * self._slot_bytes
        )
        if where is None or where == ctypes.c_void_p(-1).value:
            raise OffloadError(f"{self.path} cannot be mapped: {os.strerror(ctypes.get_errno())}")
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
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self.path.unlink()

    # ---- a step

    def read(self, start: int, out: memoryview) -> None:
        """Bytes of the current slot."""
        self._require_file()
        at = 0
        while at < len(out):
            count = self._call("read", os.preadv, [out[at:]], self._current * self._slot_bytes + start + at)
            if not count:
                raise self._failed("read", f"it ends {len(out) - at} bytes too early")
            at += count
        known = self._checksums.get((start, len(out)))
        if known is not None and known != crc32(out):
            raise self._failed("read", f"bytes {start} to {start + len(out)} are not those that were written")

    def write(self, start: int, data: memoryview) -> None:
        """Bytes of the other slot."""
        self._require_file()
        at, offset = 0, (1 - self._current) * self._slot_bytes + start
        while at < len(data):
            at += self._call("write", os.pwritev, [data[at:]], offset + at)
        self._written[start, len(data)] = crc32(data)

    def commit(self) -> None:
        """The other slot becomes current."""
        if not self._written:
            return
        self._checksums, self._written = self._written, {}
        self._current = 1 - self._current
        self._map(self.address, self._current)

    def complete(self) -> None:
        """What the step has not written goes into the other slot as it is."""
        at = 0
        for start, length in [*sorted(self._written), (self.size_bytes, 0)] if self._written else []:
            while at < start:
                block = bytearray(min(_COPY_BYTES, start - at))
                self.read(at, memoryview(block))
                known = self._written.copy()
                self.write(at, memoryview(block))
                self._written = known
                at += len(block)
            at = max(at, start + length)

    def abandon(self) -> None:
        self._written = {}

    def forget_checksums(self) -> None:
        self._checksums = {}

    def _require_file(self) -> None:
        if not os.fstat(self._descriptor).st_nlink:
            raise self._failed("use", "it was removed")

    def _call(self, verb: str, function: Any, *args: Any) -> int:
        try:
            return int(function(self._descriptor, *args))
        except OSError as error:
            raise self._failed(verb, str(error.strerror)) from error

    def _failed(self, verb: str, why: str) -> OffloadError:
        return OffloadError(
            f"cannot {verb} {self.path}: {why}",
            "Model and optimizer are as before this step. Look at the disk, then resume from a checkpoint.",
        )
