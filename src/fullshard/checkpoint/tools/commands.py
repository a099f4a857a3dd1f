"""What `fullshard inspect`, `verify` and `export` share: what a path is, and what they answer.

The commands return what they found; only the command line prints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint import commit, dcp
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.manifest import Manifest
from fullshard.checkpoint.hugging_face import folders
from fullshard.checkpoint.reading import Foreign
from fullshard.errors import CheckpointError

# Of a model, or of a checkpoint whose manifest is gone; not a lone adapter, nor a pickle.
_WHOLE = re.compile(r"(model|optimizer|part|rank|extra)(-[\w-]+)?\.safetensors(\.index\.json)?")
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def quiet(_done: int, _total: int) -> None:
    """A progress that nobody looks at."""


class Damaged(CheckpointError):
    """A checkpoint that cannot be trusted, where another error is about what was asked."""


@dataclass(frozen=True)
class Report:
    """What a command found: lines for people, `data` for programs, and whether anything is damaged."""

    lines: tuple[str, ...]
    data: dict[str, Any]
    damaged: bool = False


@dataclass(frozen=True)
class Subject:
    """A path and what is there: 'checkpoint', 'unfinished', 'model', 'dcp' or 'root'."""

    kind: str
    folder: Path


def identify(path: Path) -> Subject:
    """What a path leads to. Nothing is opened yet."""
    try:
        found = _identify(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot look at {str(path)!r}: {error.strerror or error}", "Check the path and its rights."
        ) from error
    if found is None:
        raise CheckpointError(
            f"{str(path)!r} is no checkpoint, and holds none",
            "Give a folder that fs.save wrote, a folder of such, a Hugging Face model or a DCP folder.",
        )
    return found


def _identify(path: Path) -> Subject | None:
    here = Path(os.path.abspath(path))  # '.', too, may be such a folder
    hidden = any(folder == here for folder, _, _ in hidden_folders(here.parent))
    if hidden and not is_whole(path):
        return Subject("unfinished", path)
    folder = commit.find(path)
    if commit.is_checkpoint(folder):
        return Subject("checkpoint", folder)
    if not path.exists():
        unfinished = [str(hidden) for hidden, name, _ in hidden_folders(path.parent) if name == path.name]
        remedy = f"A save of it was not finished: {unfinished[0]!r}." if unfinished else "Check the path."
        raise CheckpointError(f"there is no {str(path)!r}", remedy)
    if path.is_file() and folders.is_model(path):
        return Subject("model", path)
    if not path.is_dir():
        raise CheckpointError(f"{str(path)!r} is not a folder", "Give the folder that it is in.")
    if dcp.is_dcp(path):
        return Subject("dcp", path)
    if folders.is_model(path):
        return Subject("model", path)
    return Subject("root", path) if checkpoints_in(path) else None


def hidden_folders(parent: Path) -> list[tuple[Path, str, str]]:
    """Folders under the hidden names of saves: (folder, name of the checkpoint, 'saving' or 'retired')."""
    return commit._hidden(parent) if parent.is_dir() else []


def is_whole(folder: Path) -> bool:
    """Whether a folder under a hidden name has its manifest, all of it."""
    try:
        commit.read_manifest(folder)
    except CheckpointError:
        return False
    return True


def checkpoints_in(root: Path) -> list[Path]:
    """Folders that are checkpoints, or are becoming or ceasing to be one."""
    plain = [entry for entry in sorted(root.iterdir()) if not entry.name.startswith(".")]
    hidden = [folder for folder, _, _ in hidden_folders(root)]
    return [entry for entry in plain if commit.is_checkpoint(entry)] + hidden


def read_manifest(folder: Path) -> Manifest:
    """The manifest. A file that is damaged is told from one that cannot be read or is newer than we are."""
    try:
        return commit.read_manifest(folder)
    except CheckpointError as error:
        raise as_damage(error) from error


def as_damage(error: CheckpointError) -> CheckpointError:
    """An error met while reading a checkpoint: damage, unless rights are missing or it is a newer format."""
    cause = error.__cause__
    if isinstance(error, Damaged) or isinstance(cause, PermissionError) or "format version" in error.what:
        return error
    return Damaged(error.what, error.remedy)


def open_foreign(path: Path, kind: str) -> Foreign:
    """A checkpoint of others. What claims to be whole and cannot be opened is damaged."""
    try:
        return dcp.open_dcp(path) if kind == "dcp" else folders.open_model(path)
    except CheckpointError as error:
        claims = kind == "dcp" or any(_WHOLE.fullmatch(name) for name in folder_files(path))
        raise (as_damage(error) if claims else error) from error


def file_problems(folder: Path, said: Manifest) -> dict[str, str]:
    """By file, what its size alone tells to be wrong."""
    found: dict[str, str] = {}
    for name, record in said.files.items():
        size = size_of(folder / name)
        if size is None:
            found[name] = "is missing"
        elif size != record.size_bytes:
            verb = "cut short" if size < record.size_bytes else "appended to"
            found[name] = f"was {verb}: it has {size} bytes and must have {record.size_bytes}"
    return found


def size_of(path: Path) -> int | None:
    """A file's size; None if there is no file."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def folder_files(folder: Path) -> dict[str, int]:
    """Files of a folder, or the one file that was named, and their sizes."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    sizes = {entry.name: size_of(entry) for entry in entries}
    return {name: size for name, size in sizes.items() if size is not None}


def strangers(folder: Path, said: Manifest) -> list[str]:
    """Files in the folder that the manifest does not name; nothing is known about them."""
    return [name for name in folder_files(folder) if name not in said.files and name != manifest.NAME]
