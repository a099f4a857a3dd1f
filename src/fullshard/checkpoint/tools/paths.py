"""What a path is, and which files are there: for `fullshard inspect`, `verify` and `export`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint import commit, dcp
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.manifest import Manifest
from fullshard.checkpoint.hugging_face import folders
from fullshard.checkpoint.loading.reading import Foreign
from fullshard.errors import CheckpointError


@dataclass(frozen=True)
class Subject:
    """A path and what is there: 'checkpoint', 'unfinished', 'model', 'dcp' or 'root'."""

    kind: str
    folder: Path


def identify(path: Path) -> Subject:
    """What is at a path. No file is read except manifests."""
    try:
        subject = _identify(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot access {str(path)!r}: {error.strerror or error}", "Check the path and its permissions."
        ) from error
    if subject is None:
        raise CheckpointError(
            f"{str(path)!r} is not a checkpoint, and contains none",
            "Give a folder that fs.save wrote, a folder of these, a Hugging Face model or a DCP folder.",
        )
    return subject


def identify_one(path: Path) -> Subject:
    """The same, for commands that work on a single checkpoint: a folder of checkpoints raises an error."""
    subject = identify(path)
    if subject.kind == "root":
        newest = commit.latest(path)
        hint = "" if newest is None else f"; the newest is {str(newest)!r}"
        raise CheckpointError(
            f"{str(path)!r} contains checkpoints and is not one itself",
            f"Name one of them{hint}; fullshard inspect lists them.",
        )
    return subject


def _identify(path: Path) -> Subject | None:
    here = Path(os.path.abspath(path))  # '.' may be such a folder as well
    hidden = any(folder == here for folder, _, _ in hidden_folders(here.parent))
    if hidden and not has_manifest(path):
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
        raise CheckpointError(f"{str(path)!r} is not a folder", "Give the folder that contains it.")
    if dcp.is_dcp(path):
        return Subject("dcp", path)
    if folders.is_model(path):
        return Subject("model", path)
    return Subject("root", path) if checkpoints_in(path) else None


def hidden_folders(parent: Path) -> list[tuple[Path, str, str]]:
    return commit.hidden_folders(parent) if parent.is_dir() else []


def has_manifest(folder: Path) -> bool:
    """Whether the manifest is there and intact."""
    try:
        commit.read_manifest(folder)
    except CheckpointError:
        return False
    return True


def checkpoints_in(root: Path) -> list[Path]:
    """Folders that are checkpoints, and those with the hidden names of saves."""
    plain = [entry for entry in sorted(root.iterdir()) if not entry.name.startswith(".")]
    hidden = [folder for folder, _, _ in hidden_folders(root)]
    return [entry for entry in plain if commit.is_checkpoint(entry)] + hidden


def open_foreign(subject: Subject) -> Foreign:
    return dcp.open_dcp(subject.folder) if subject.kind == "dcp" else folders.open_model(subject.folder)


def file_problems(folder: Path, of: Manifest) -> list[str]:
    """Files that are missing or do not have the size that the manifest lists."""
    problems = []
    for name, record in of.files.items():
        size = size_of(folder / name)
        if size is None:
            problems.append(f"{name} is missing")
        elif size != record.size_bytes:
            verb = "cut short" if size < record.size_bytes else "appended to"
            problems.append(f"{name} was {verb}: it has {size} bytes and must have {record.size_bytes}")
    return problems


def size_of(path: Path) -> int | None:
    """A file's size; None if there is no such file."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def folder_files(folder: Path) -> dict[str, int]:
    """The files of a folder, or the one file that was given, with their sizes."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    sizes = {entry.name: size_of(entry) for entry in entries}
    return {name: size for name, size in sizes.items() if size is not None}


def not_in_manifest(folder: Path, of: Manifest) -> list[str]:
    """Files in the folder that the manifest does not list, which are never checked."""
    return [name for name in folder_files(folder) if name not in of.files and name != manifest.NAME]
