"""Every change that a save makes on disk goes through this module, so that a test can stop it after any one.

Data counts as being on disk after `sync`, and a folder entry after `sync_folder`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError, DamagedCheckpoint

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
_HERE = -100  # AT_FDCWD
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_AHEAD_BYTES = 8 * 2**20
_REMEDIES = {
    errno.ENOSPC: "Free space there, or save elsewhere; existing checkpoints are unchanged.",
    errno.EDQUOT: "Free space there, or save elsewhere; existing checkpoints are unchanged.",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or save elsewhere.",
    errno.EACCES: "Give this user write permission there, or save elsewhere.",
    errno.EPERM: "Give this user write permission there, or save elsewhere.",
    errno.EROFS: "The file system is read-only; save elsewhere.",
    errno.ENOENT: "Create the folder first, and check that every rank sees it.",
}
_READ_REMEDIES = {
    errno.ENOENT: "A file is missing: the checkpoint is damaged; use another one.",
    errno.EACCES: "Give this user read permission.",
    errno.EPERM: "Give this user read permission.",
    errno.EIO: "The disk reports errors; use another copy, and check the disk.",
}


def unreadable(file: str, error: OSError) -> CheckpointError:
    """The error for a file of a checkpoint that cannot be read: damage, unless permission is missing."""
    remedy = _READ_REMEDIES.get(error.errno or 0, "See the system's message, or use another checkpoint.")
    kind = CheckpointError if isinstance(error, PermissionError) else DamagedCheckpoint
    return _caused_by(error, kind(f"cannot read {file}: {error.strerror or error}", remedy))


def failed(what: str, error: OSError) -> CheckpointError:
    """The error for an operation of a save that failed, with a remedy by errno."""
    remedy = _REMEDIES.get(error.errno or 0, "See the system's message.")
    return _caused_by(error, CheckpointError(f"{what}: {error.strerror or error}", remedy))


def _caused_by(cause: OSError, error: CheckpointError) -> CheckpointError:
    error.__cause__ = cause
    return error


# ---- reading


_follows_links: ContextVar[bool] = ContextVar("follows_links", default=False)


@contextlib.contextmanager
def following_links(allowed: bool) -> Iterator[None]:
    """Inside, links may lead out of the folders that are read, if allowed."""
    token = _follows_links.set(allowed)
    try:
        yield
    finally:
        _follows_links.reset(token)


def open_to_read(path: Path, is_named: bool = False) -> int:
    """A descriptor of a file in a checkpoint's folder. A link that leads out of the folder is refused.

    `is_named`: the user gave the path of this file, and so asked for it.
    """
    target = path
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if not is_named:
            refuse_outside(path, target, path.parent)
    # Not blocking: a pipe would wait for a writer forever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(target, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is not a file")
    return descriptor


def opened(path: Path) -> BufferedReader:
    """The same as a file object."""
    return open(open_to_read(path), "rb")


def refuse_outside(link: Path, target: Path, folder: Path) -> None:
    """Raise if a link leads out of a folder. Files of a Hugging Face cache lie beside its snapshots."""
    real = Path(os.path.realpath(folder))
    inside = [real]
    if real.parent.name == "snapshots":
        inside.append(real.parent.parent / "blobs")
    if _follows_links.get() or any(target.is_relative_to(one) for one in inside):
        return
    raise CheckpointError(
        f"{str(link)!r} is a link that leads out of its folder, to {str(target)!r}",
        "Copy the file into the folder; or, if you trust the link, pass follow_links=True to fs.load or "
        "fs.latest, or --follow-links to a command.",
    )


# ---- writing


class OpenFile:
    """A file that several ranks write at the same time, at different offsets."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._begun = self._written = 0  # written, but not yet handed to the disk

    def write_at(self, offset: int, data: memoryview) -> None:
        at = 0
        while at < len(data):
            at += os.pwrite(self._descriptor, data[at:], offset + at)
        if offset != self._written:
            self._begun = offset
        self._written = offset + at
        if self._written - self._begun >= _AHEAD_BYTES and _sync_file_range is not None:
            # Start writing back, so that the disk works during the next checksums; `sync` waits.
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
        """Create a new file of that size, filled with zeros."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    def open(self, path: Path) -> OpenFile:
        return OpenFile(path)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a small file, which is on disk when this returns."""
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
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync implicitly
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def exchange(self, one: Path, other: Path) -> bool:
        """Swap the names of two folders atomically. False if the system does not support it."""
        if _renameat2 is None:
            return False
        return bool(_renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()


def make_parents(disk: Disk, folder: Path) -> None:
    """Create a folder and its missing parents, which are on disk when this returns."""
    if not folder.is_dir():
        make_parents(disk, folder.parent)
        with contextlib.suppress(FileExistsError):  # another save created it at the same time
            disk.make_folder(folder)
        disk.sync_folder(folder.parent)


def remove_tree(disk: Disk, folder: Path, first: str) -> None:
    """Remove a folder, and the file named `first` first: without it the folder is not a checkpoint."""
    if folder.is_symlink():  # its target is not ours
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
    """A lock on a folder while its files are written; the system releases it when the process dies."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path) -> FolderLock | None:
        """None if another process has the lock, or the file system has no locks."""
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

    @staticmethod
    def is_held(folder: Path) -> bool:
        """Whether a process holds the lock; False where the file system has no locks."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """May be called twice: a save that fails after its commit is abandoned as well."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _from_libc(name: str, *arguments: Any) -> Any:
    """A function of the C library that Python does not offer; None where the system lacks it."""
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
