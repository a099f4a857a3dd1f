"""How a folder that is being written becomes a checkpoint, in one rename.

    .step-7.saving-<token>     being written; no manifest yet, or not yet renamed
    step-7                     a checkpoint: it has a manifest, and is never written again
    .step-7.retired-<token>    replaced, or too old; about to be removed

A folder is a checkpoint from the moment that its complete manifest is on disk. A crash between two renames
may leave a complete checkpoint under a hidden name only: `find` returns it, and the next save renames it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fullshard.checkpoint import files, ownership
from fullshard.checkpoint.files import FolderLock, failed, make_parents, remove_tree, unreadable
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.manifest import Manifest, Summary
from fullshard.checkpoint.rollbacks import is_within, passed_over
from fullshard.errors import CheckpointError, DamagedCheckpoint

T = TypeVar("T")
_log = logging.getLogger("fullshard")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|retired)-(?P<token>[0-9a-f]{16})")


@dataclass
class Staging:
    """A save in progress: the folder that is being written, and its final path."""

    target: Path
    folder: Path
    token: str
    lock: FolderLock | None
    named: bool = False  # renamed to `target`; `folder` is what it replaced


def begin(target: Path, check: Callable[[Path], None] | None = None, clean: bool = True) -> Staging:
    """Create the folder to write into.

    `check` raises if the save may not replace what is at `target`: by default anything but a checkpoint or an
    empty folder. With `clean`, what crashed saves left in the parent is cleaned up first.
    """
    parent, name = target.parent, target.name
    if not name or name.startswith("."):
        raise CheckpointError(
            f"cannot save to {str(target)!r}", "Give a folder name that does not begin with a dot."
        )
    try:
        (check or _check_replaceable)(target)
        make_parents(files.disk, parent)
        if clean:
            clean_up(parent)
        token = secrets.token_hex(8)
        folder = parent / f".{name}.saving-{token}"
        files.disk.make_folder(folder)
    except OSError as error:
        raise failed(f"cannot create a folder for checkpoint {str(target)!r}", error) from error
    return Staging(target, folder, token, FolderLock.take(folder))


def _check_replaceable(target: Path) -> None:
    if is_checkpoint(target):
        ownership.refuse_held(target, _layout_of(target))
    elif not is_free(target):
        raise CheckpointError(
            f"{str(target)!r} exists and is not a checkpoint of fullshard; it was left as it is",
            "Save to another folder, or remove this one yourself.",
        )


def _layout_of(folder: Path) -> Mapping[str, Any]:
    try:
        return read_summary(folder).layout
    except CheckpointError:
        return {}


def is_free(target: Path) -> bool:
    """Whether there is nothing at a path, or an empty folder."""
    try:
        return not any(target.iterdir())
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def commit(staging: Staging) -> None:
    """Rename the folder to its final path; all files, the manifest last, are on disk.

    The caller releases the lock, or holds it on: see `ownership`.
    """
    disk, target, folder = files.disk, staging.target, staging.folder
    old: Path | None = None
    disk.sync_folder(folder)
    if not is_checkpoint(target):
        disk.rename(folder, target)
    elif disk.exchange(folder, target):
        old = folder
    else:
        old = target.parent / f".{target.name}.retired-{staging.token}"
        with contextlib.suppress(FileNotFoundError):  # another run's keep_last removed it first
            disk.rename(target, old)
        try:
            disk.rename(folder, target)
        except OSError:
            disk.rename(old, target)
            raise
    staging.named = True
    disk.sync_folder(target.parent)
    if old is not None:
        with contextlib.suppress(OSError):
            ownership.let_go(old)
        _remove(old)


def abandon(staging: Staging) -> None:
    """Remove what was written so far, as far as possible."""
    if not staging.named:
        with contextlib.suppress(OSError):
            remove_tree(files.disk, staging.folder, manifest.NAME)
    release(staging)


def release(staging: Staging) -> None:
    if staging.lock is not None:
        staging.lock.release()


def clean_up(parent: Path) -> None:
    """Rename or remove what crashed saves left in a folder. Saves in progress are not touched."""
    for hidden, name, kind in hidden_folders(parent):
        with contextlib.suppress(OSError):
            ownership.let_go(
                hidden
            )  # complete, and under a hidden name by now: no save of ours is in progress
        lock = None if _just_made(hidden) else FolderLock.take(hidden)
        if lock is None:
            continue
        try:
            if find(parent / name) == hidden:
                with contextlib.suppress(OSError):  # if its name is taken it stays; `find` returns it
                    files.disk.rename(hidden, parent / name)
            elif kind == "retired" or is_checkpoint(parent / name) or saved_at(hidden) is None:
                _remove(hidden)
        finally:
            lock.release()


def _just_made(folder: Path) -> bool:
    """Whether its saver may not have locked it yet, or has just renamed it."""
    try:
        return not any(folder.iterdir()) and time.time() - folder.stat().st_mtime < 60
    except OSError:
        return True


def retire_older(target: Path, keep_last: int) -> None:
    """Keep the newest `keep_last` of this run's checkpoints in the parent of `target`; remove its others."""
    # One under a hidden name only may be another save's, about to be renamed. Links are not followed.
    others = [
        folder
        for folder, saved in newest_first(target.parent)
        if folder != target
        and is_checkpoint(folder)
        and not folder.is_symlink()
        and ownership.owns(folder, saved.id)
    ]
    for folder in others[keep_last - 1 :]:
        hidden = folder.parent / f".{folder.name}.retired-{secrets.token_hex(8)}"
        ownership.let_go(folder)
        lock = FolderLock.take(folder)  # otherwise another run's save could rename it back
        try:
            files.disk.rename(folder, hidden)
            files.disk.sync_folder(folder.parent)  # otherwise it could lose its manifest under its own name
            _remove(hidden)
        except FileNotFoundError:
            pass  # another run's save is removing it
        except OSError as error:
            _log.warning("old checkpoint %s could not be removed: %s", folder, error)
        finally:
            if lock is not None:
                lock.release()


def _remove(folder: Path) -> None:
    """Remove a folder that is no longer needed. An error does not fail the save: the next one tries again."""
    try:
        remove_tree(files.disk, folder, manifest.NAME)
    except FileNotFoundError:
        pass  # another run's save is removing it
    except OSError as error:
        _log.warning("%s, left by an earlier save, could not be removed: %s", folder, error)


def is_checkpoint(folder: Path) -> bool:
    return (folder / manifest.NAME).is_file()


def resolved(path: str | os.PathLike[str]) -> str:
    """The absolute path. A link to a checkpoint stays a link: its target is replaced."""
    absolute = os.path.abspath(path)
    return os.path.realpath(absolute) if os.path.islink(absolute) else absolute


def find(path: Path) -> Path:
    """The folder of the checkpoint with this path, which after a crash may have a hidden name."""
    if is_checkpoint(path) or not path.parent.is_dir():
        return path
    complete = []
    for folder, name, kind in hidden_folders(path.parent):
        saved_at_ns = saved_at(folder) if name == path.name else None
        if saved_at_ns is not None:
            complete.append((kind == "saving", saved_at_ns, folder))
    return max(complete)[2] if complete else path


def saved_at(folder: Path) -> int | None:
    """When it was saved; None if its manifest is missing or incomplete."""
    try:
        return read_summary(folder).saved_at_ns
    except CheckpointError:
        return None


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None. No communication between ranks."""
    folder = Path(root)
    return next((path for path, _ in newest_first(folder)), None) if folder.is_dir() else None


def newest_first(parent: Path) -> list[tuple[Path, Summary]]:
    """The complete checkpoints of a folder. Damaged manifests are skipped, with a warning."""
    rejected = passed_over(parent)
    found = [item for item in _checkpoints(parent) if not is_within(rejected, item[1].saved_at_ns)]
    return sorted(found, key=lambda item: item[1].saved_at_ns, reverse=True)


def read_manifest(folder: Path) -> Manifest:
    return _read(folder, manifest.from_bytes)


def read_summary(folder: Path) -> Summary:
    return _read(folder, manifest.summary_from_bytes)


def _read(folder: Path, parse: Callable[[bytes], T]) -> T:
    path = folder / manifest.NAME
    try:
        with files.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > manifest.MAX_BYTES:
                raise DamagedCheckpoint(
                    f"{str(path)!r} has {size} bytes, too many for a manifest", "Use another checkpoint."
                )
            manifest.check_beginning(file.read(manifest.BEGINNING_BYTES))
            file.seek(0)
            return parse(file.read())
    except OSError as error:
        raise unreadable(repr(str(path)), error) from error


def _checkpoints(parent: Path) -> list[tuple[Path, Summary]]:
    """The complete checkpoints of a folder, under their final names."""
    names = {entry.name for entry in parent.iterdir() if not entry.name.startswith(".")}
    names |= {name for _, name, _ in hidden_folders(parent)}
    complete = []
    for name in sorted(names):
        folder = find(parent / name)
        if not is_checkpoint(folder):
            continue
        try:
            if folder.is_symlink():
                files.refuse_outside(folder, Path(os.path.realpath(folder)), parent)
            saved = read_summary(folder)
            if "exported_from" not in saved.layout:  # an exported model: not to resume from, nor to remove
                complete.append((parent / name, saved))
        except CheckpointError as error:
            if is_checkpoint(folder):  # otherwise it was just renamed or removed
                warnings.warn(f"{str(folder)!r} is skipped: {error.what}", stacklevel=3)
    return complete


def hidden_folders(parent: Path) -> list[tuple[Path, str, str]]:
    """Folders with the hidden names of saves: (folder, name of the checkpoint, 'saving' or 'retired')."""
    matches = [(entry, _HIDDEN.fullmatch(entry.name)) for entry in sorted(parent.iterdir())]
    return [(entry, m["name"], m["kind"]) for entry, m in matches if m and entry.is_dir()]
