"""From a folder that is being written to a checkpoint, in one rename.

    .step-7.saving-<token>     being written; no manifest yet, or not yet renamed
    step-7                     a checkpoint: it has a manifest, and is never written again
    .step-7.retired-<token>    replaced, or too old; about to be removed

A folder counts from the moment that its manifest is on disk. Between two renames a crash may leave a complete
checkpoint under a hidden name only: `find` sees it there, and the next save puts it in its place.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint import files, manifest
from fullshard.checkpoint.files import FolderLock, failed, remove_tree
from fullshard.checkpoint.manifest import Manifest
from fullshard.errors import CheckpointError

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|retired)-(?P<token>[0-9a-f]{16})")


@dataclass
class Staging:
    """A save under way: the folder that is written, and where it will go."""

    target: Path
    folder: Path
    token: str
    lock: FolderLock | None


def begin(target: Path) -> Staging:
    """Make the folder to write into. What crashed saves left beside it is put right first."""
    parent, name = target.parent, target.name
    if not name or name.startswith("."):
        raise CheckpointError(
            f"cannot save to {str(target)!r}", "Give a folder name that does not begin with a dot."
        )
    try:
        if target.exists() and not is_checkpoint(target) and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(
                f"{str(target)!r} exists and is not a checkpoint of fullshard; it was left as it is",
                "Save to another folder, or remove this one yourself.",
            )
        parent.mkdir(parents=True, exist_ok=True)
        settle(parent)
        token = secrets.token_hex(8)
        folder = parent / f".{name}.saving-{token}"
        files.disk.make_folder(folder)
    except OSError as error:
        raise failed(f"cannot make a folder for checkpoint {str(target)!r}", error) from error
    return Staging(target, folder, token, FolderLock.take(folder))


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
        disk.rename(target, old)
        disk.rename(folder, target)
    disk.sync_folder(target.parent)
    if old is not None:
        remove_tree(disk, old, manifest.NAME)
    if staging.lock is not None:
        staging.lock.release()


def give_up(staging: Staging) -> None:
    """Remove what was written so far, as far as that is possible."""
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
            if is_checkpoint(hidden) and find(parent / name) == hidden:
                files.disk.rename(hidden, parent / name)
            elif kind == "retired" or is_checkpoint(parent / name) or not is_checkpoint(hidden):
                remove_tree(files.disk, hidden, manifest.NAME)
        finally:
            lock.release()


def _just_made(folder: Path) -> bool:
    """Its saver may be about to lock it."""
    return not any(folder.iterdir()) and time.time() - folder.stat().st_mtime < 60


def retire_older(target: Path, keep_last: int) -> None:
    """Keep the newest `keep_last` checkpoints beside `target`, itself among them; remove the others."""
    found = sorted(_checkpoints(target.parent), key=lambda item: item[0], reverse=True)
    for _, folder in [item for item in found if item[1] != target][keep_last - 1 :]:
        hidden = folder.parent / f".{folder.name}.retired-{secrets.token_hex(8)}"
        files.disk.rename(folder, hidden)
        remove_tree(files.disk, hidden, manifest.NAME)


def is_checkpoint(folder: Path) -> bool:
    return (folder / manifest.NAME).is_file()


def find(path: Path) -> Path:
    """The folder that holds the checkpoint of this name: a crash may have left it under a hidden one."""
    if is_checkpoint(path) or not path.parent.is_dir():
        return path
    hidden = [(kind == "saving", folder) for folder, name, kind in _hidden(path.parent) if name == path.name]
    complete = [(new, folder) for new, folder in hidden if is_checkpoint(folder)]
    return max(complete)[1] if complete else path


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
        raise failed(f"cannot read {str(path)!r}", error) from error


def _checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints of a folder with the time of their save, those under hidden names included."""
    names = {entry.name for entry in parent.iterdir() if not entry.name.startswith(".")}
    names |= {name for _, name, _ in _hidden(parent)}
    found = []
    for name in sorted(names):
        folder = find(parent / name)
        if not is_checkpoint(folder):
            continue
        try:
            found.append((read_manifest(folder).saved_at_ns, folder))
        except CheckpointError as error:
            warnings.warn(f"{str(folder)!r} is passed over: {error.what}", stacklevel=3)
    return found


def _hidden(parent: Path) -> list[tuple[Path, str, str]]:
    found = []
    for entry in sorted(parent.iterdir()):
        match = _HIDDEN.fullmatch(entry.name)
        if match and entry.is_dir():
            found.append((entry, match["name"], match["kind"]))
    return found
