"""Every change that a save makes on disk goes through here, so that a test can stop it after any of them.

Nothing is believed to be on disk before `sync`, and no folder entry before `sync_folder`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

from fullshard.errors import CheckpointError

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
_HERE = -100  # AT_FDCWD
_REMEDIES = {
    errno.ENOSPC: "Free space there, or save elsewhere; what was there before is untouched.",
    errno.EDQUOT: "Free space there, or save elsewhere; what was there before is untouched.",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or save elsewhere.",
    errno.EACCES: "Give this user the right to write there, or save elsewhere.",
    errno.EPERM: "Give this user the right to write there, or save elsewhere.",
    errno.EROFS: "The file system is read-only; save elsewhere.",
    errno.ENOENT: "Make the folder first, and check that every rank sees it.",
}


def failed(what: str, error: OSError) -> CheckpointError:
    """An error of the system's, with the file and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, "See the system's message.")
    found = CheckpointError(f"{what}: {error.strerror or error}", remedy)
    found.__cause__ = error
    return found


class OpenFile:
    """A file that several ranks write at once, each at offsets of its own."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write_at(self, offset: int, data: memoryview) -> None:
        at = 0
        while at < len(data):
            at += os.pwrite(self._descriptor, data[at:], offset + at)

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


def remove_tree(disk: Disk, folder: Path, first: str) -> None:
    """Remove a folder; the file named `first` goes first, for without it the rest counts for nothing."""
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
        os.close(self._descriptor)


def _load_renameat2() -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
    try:
        return getattr(ctypes.CDLL(None), "renameat2", None)
    except OSError:
        return None


_renameat2 = _load_renameat2()
disk = Disk()
