"""From a folder that is being written to a checkpoint, in one rename.

    .step-7.saving-<token>     being written; no manifest yet, or not yet renamed
    step-7                     a checkpoint: it has a manifest, and is never written again
    .step-7.retired-<token>    replaced, or too old; about to be removed

A folder counts from the moment that its manifest is on disk, whole. Between two renames a crash may leave a
complete checkpoint under a hidden name only: `find` sees it there, and the next save puts it in its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint import files
from fullshard.checkpoint.files import FolderLock, failed, make_parents, remove_tree, unreadable
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.manifest import Manifest
from fullshard.errors import CheckpointError

_log = logging.getLogger("fullshard")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|retired)-(?P<token>[0-9a-f]{16})")


@dataclass
class Staging:
    """A save under way: the folder that is written, and where it will go."""

    target: Path
    folder: Path
    token: str
    lock: FolderLock | None
    named: bool = False  # it is a checkpoint now, and `folder` what it replaced


def begin(target: Path) -> Staging:
    """Make the folder to write into. What crashed saves left beside it is put right first."""
    parent, name = target.parent, target.name
    if not name or name.startswith("."):
        raise CheckpointError(
            f"cannot save to {str(target)!r}", "Give a folder name that does not begin with a dot."
        )
    try:
        if not _may_replace(target):
            raise CheckpointError(
                f"{str(target)!r} exists and is not a checkpoint of fullshard; it was left as it is",
                "Save to another folder, or remove this one yourself.",
            )
        make_parents(files.disk, parent)
        settle(parent)
        token = secrets.token_hex(8)
        folder = parent / f".{name}.saving-{token}"
        files.disk.make_folder(folder)
    except OSError as error:
        raise failed(f"cannot make a folder for checkpoint {str(target)!r}", error) from error
    return Staging(target, folder, token, FolderLock.take(folder))


def _may_replace(target: Path) -> bool:
    """Whether there is nothing at a place, or only what a save may replace."""
    if is_checkpoint(target):
        return True
    try:
        return not any(target.iterdir())
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def commit(staging: Staging) -> None:
    """Everything is on disk, the manifest last: give the folder its name."""
    disk, target, folder = files.disk, staging.target, staging.folder
    old: Path | None = None
    disk.sync_folder(folder)
    if not is_checkpoint(target):
        disk.rename(folder, target)
    elif disk.exchange(folder, target):
        old = folder
    else:
        old = target.parent / f".{target.name}.retired-{staging.token}"
        with contextlib.suppress(FileNotFoundError):  # another run's keep_last was faster
            disk.rename(target, old)
        try:
            disk.rename(folder, target)
        except OSError:
            disk.rename(old, target)
            raise
    staging.named = True
    disk.sync_folder(target.parent)
    if old is not None:
        _remove(old)
    if staging.lock is not None:
        staging.lock.release()


def give_up(staging: Staging) -> None:
    """Remove what was written so far, as far as that is possible."""
    if not staging.named:
        with contextlib.suppress(OSError):
            remove_tree(files.disk, staging.folder, manifest.NAME)
    if staging.lock is not None:
        staging.lock.release()


def settle(parent: Path) -> None:
    """Put right what crashed saves left in a folder. Saves that are under way elsewhere are left alone."""
    for hidden, name, kind in _hidden(parent):
        lock = None if _just_made(hidden) else FolderLock.take(hidden)
        if lock is None:
            continue
        try:
            if find(parent / name) == hidden:
                with contextlib.suppress(OSError):  # if its name is taken it stays: `find` knows it
                    files.disk.rename(hidden, parent / name)
            elif kind == "retired" or is_checkpoint(parent / name) or _saved_at(hidden) is None:
                _remove(hidden)
        finally:
            lock.release()


def _just_made(folder: Path) -> bool:
    """Its saver may be about to lock it, or has just given it its name."""
    try:
        return not any(folder.iterdir()) and time.time() - folder.stat().st_mtime < 60
    except OSError:
        return True


def retire_older(target: Path, keep_last: int) -> None:
    """Keep the newest `keep_last` checkpoints beside `target`, itself among them; remove the others."""
    found = sorted(_checkpoints(target.parent), key=lambda item: item[0], reverse=True)
    # One under a hidden name only may be another save's, about to be named; a link is not ours to follow.
    others = [f for _, f in found if f != target and is_checkpoint(f) and not f.is_symlink()]
    for folder in others[keep_last - 1 :]:
        hidden = folder.parent / f".{folder.name}.retired-{secrets.token_hex(8)}"
        lock = FolderLock.take(folder)  # else another run's save could put it back meanwhile
        try:
            files.disk.rename(folder, hidden)
            files.disk.sync_folder(folder.parent)  # else it could lose its manifest under its own name
            _remove(hidden)
        except FileNotFoundError:
            pass  # another run's save removes it at the same time
        except OSError as error:
            _log.warning("old checkpoint %s could not be removed: %s", folder, error)
        finally:
            if lock is not None:
                lock.release()


def _remove(folder: Path) -> None:
    """Remove what counts no more. That this fails is no reason to call a save failed: the next one tries."""
    try:
        remove_tree(files.disk, folder, manifest.NAME)
    except FileNotFoundError:
        pass  # another run's save removes it at the same time
    except OSError as error:
        _log.warning("%s, left by an earlier save, could not be removed: %s", folder, error)


def is_checkpoint(folder: Path) -> bool:
    return (folder / manifest.NAME).is_file()


def find(path: Path) -> Path:
    """The folder that holds the checkpoint of this name: a crash may have left it under a hidden one."""
    if is_checkpoint(path) or not path.parent.is_dir():
        return path
    complete = []
    for folder, name, kind in _hidden(path.parent):
        saved_at_ns = _saved_at(folder) if name == path.name else None
        if saved_at_ns is not None:
            complete.append((kind == "saving", saved_at_ns, folder))
    return max(complete)[2] if complete else path


def _saved_at(folder: Path) -> int | None:
    """When it was saved. None: its manifest is missing, or was only begun."""
    try:
        return read_manifest(folder).saved_at_ns
    except CheckpointError:
        return None


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None. Each rank looks for itself."""
    folder = Path(root)
    if not folder.is_dir():
        return None
    return max(_checkpoints(folder), default=(0, None), key=lambda item: item[0])[1]


def read_manifest(folder: Path) -> Manifest:
    path = folder / manifest.NAME
    try:
        size = path.stat().st_size
        if size > manifest.MAX_BYTES:
            raise CheckpointError(
                f"{str(path)!r} has {size} bytes, too many for a manifest", "Use another checkpoint."
            )
        return manifest.from_bytes(path.read_bytes())
    except OSError as error:
        raise unreadable(repr(str(path)), error) from error


def _checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints of a folder, by the names they are to have, with the time of their save."""
    names = {entry.name for entry in parent.iterdir() if not entry.name.startswith(".")}
    names |= {name for _, name, _ in _hidden(parent)}
    found = []
    for name in sorted(names):
        folder = find(parent / name)
        if not is_checkpoint(folder):
            continue
        try:
            said = read_manifest(folder)
            if "exported_from" not in said.layout:  # a model to hand on: not to resume from, nor to retire
                found.append((said.saved_at_ns, parent / name))
        except CheckpointError as error:
            if is_checkpoint(folder):  # else it was named, or removed, a moment ago
                warnings.warn(f"{str(folder)!r} is passed over: {error.what}", stacklevel=3)
    return found


def _hidden(parent: Path) -> list[tuple[Path, str, str]]:
    found = []
    for entry in sorted(parent.iterdir()):
        match = _HIDDEN.fullmatch(entry.name)
        if match and entry.is_dir():
            found.append((entry, match["name"], match["kind"]))
    return found
