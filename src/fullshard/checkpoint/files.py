"""Every change that a save makes on disk goes through here, so that a test can stop it after any of them.

Nothing is believed to be on disk before `sync`, and no folder entry before `sync_folder`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
_HERE = -100  # AT_FDCWD
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_AHEAD_BYTES = 8 * 2**20
_REMEDIES = {
    errno.ENOSPC: "Free space there, or save elsewhere; what was there before is untouched.",
    errno.EDQUOT: "Free space there, or save elsewhere; what was there before is untouched.",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or save elsewhere.",
    errno.EACCES: "Give this user the right to write there, or save elsewhere.",
    errno.EPERM: "Give this user the right to write there, or save elsewhere.",
    errno.EROFS: "The file system is read-only; save elsewhere.",
    errno.ENOENT: "Make the folder first, and check that every rank sees it.",
}
_READ_REMEDIES = {
    errno.ENOENT: "A file is missing: the checkpoint is damaged; use another one.",
    errno.EACCES: "Give this user the right to read it.",
    errno.EPERM: "Give this user the right to read it.",
    errno.EIO: "The disk fails; use another copy, and have the disk looked at.",
}


def unreadable(file: str, error: OSError) -> CheckpointError:
    """A file of a checkpoint that the system does not let us read."""
    remedy = _READ_REMEDIES.get(error.errno or 0, "See the system's message; use another checkpoint.")
    found = CheckpointError(f"cannot read {file}: {error.strerror or error}", remedy)
    found.__cause__ = error
    return found


def failed(what: str, error: OSError) -> CheckpointError:
    """An error of the system's while writing, with the file and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, "See the system's message.")
    found = CheckpointError(f"{what}: {error.strerror or error}", remedy)
    found.__cause__ = error
    return found


class OpenFile:
    """A file that several ranks write at once, each at offsets of its own."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._begun = self._written = 0  # what the system was not yet asked to put on disk

    def write_at(self, offset: int, data: memoryview) -> None:
        at = 0
        while at < len(data):
            at += os.pwrite(self._descriptor, data[at:], offset + at)
        if offset != self._written:
            self._begun = offset
        self._written = offset + at
        if self._written - self._begun >= _AHEAD_BYTES and _sync_file_range is not None:
            # Begin now, so that the disk works while the next checksums are computed; `sync` waits.
            length = self._written - self._begun
            _sync_file_range(self._descriptor, self._begun, length, _BEGIN_WRITING)
            self._begun = self._written

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Disk:
    """The operations of a save."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True)

    def create(self, path: Path, size_bytes: int) -> None:
        """A new file of that size; nobody has written it yet."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    def open(self, path: Path) -> OpenFile:
        return OpenFile(path)

    def write_file(self, path: Path, data: bytes) -> None:
        """A small file, whole and on disk when this returns."""
        self.create(path, 0)
        file = self.open(path)
        try:
            file.write_at(0, memoryview(data))
            file.sync()
        finally:
            file.close()

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (
                errno.EINVAL,
                errno.ENOTSUP,
            ):  # some network file systems sync by themselves
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def exchange(self, one: Path, other: Path) -> bool:
        """Two folders change names in one step. False: this system or file system cannot."""
        if _renameat2 is None:
            return False
        return bool(_renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()


def make_parents(disk: Disk, folder: Path) -> None:
    """Make a folder and those above it, where they are missing, on disk when this returns."""
    if not folder.is_dir():
        make_parents(disk, folder.parent)
        with contextlib.suppress(FileExistsError):  # another save had the same thought
            disk.make_folder(folder)
        disk.sync_folder(folder.parent)


def remove_tree(disk: Disk, folder: Path, first: str) -> None:
    """Remove a folder; the file named `first` goes first, for without it the rest counts for nothing."""
    if folder.is_symlink():  # what it leads to is not ours
        disk.remove(folder)
        return
    if (folder / first).exists():
        disk.remove(folder / first)
        disk.sync_folder(folder)
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(disk, Path(entry.path), first)
        else:
            disk.remove(Path(entry.path))
    disk.remove_folder(folder)


class FolderLock:
    """Held on a folder while its files are written; the system lets it go when the process dies."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path) -> FolderLock | None:
        """None: somebody holds it, or this file system has no locks."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def release(self) -> None:
        """May be called twice: a save that fails after its commit gives up what is no longer held."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _from_libc(name: str, *arguments: Any) -> Any:
    """A function that Python does not offer; None where the system has it not."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    except OSError:
        return None
    if function is not None:
        function.argtypes = arguments
    return function


_renameat2 = _from_libc(
    "renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
)
_sync_file_range = _from_libc("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
disk = Disk()
