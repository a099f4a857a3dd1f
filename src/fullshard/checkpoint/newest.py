"""`fs.latest`: the newest checkpoint of a folder, and on request the newest that is right."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TypeVar

import torch

from fullshard.checkpoint import commit
from fullshard.checkpoint.files import following_links
from fullshard.checkpoint.tools.verifying import first_problem
from fullshard.comm.control import all_gather_object_first, start
from fullshard.comm.groups import own_rank, rank_count
from fullshard.errors import DamagedCheckpoint
from fullshard.keywords import checked_keywords

T = TypeVar("T")


@checked_keywords(dict.fromkeys(("path", "folder", "directory", "run"), "Write root=..."))
def latest(root: str | os.PathLike[str], *, verify: bool = False, follow_links: bool = False) -> Path | None:
    """The newest complete checkpoint in a folder, or None if there is none.

    verify: check every byte of it first, and fall back to the newest checkpoint that is right; a warning
        names those that were passed over, and why. For runs that restart unattended: without it, a
        checkpoint that was damaged on disk is handed out again after every restart. Every rank must call it:
        they share the work, and agree. Nothing is removed. If there are checkpoints and none is right, it
        raises: the run would begin from scratch.
    follow_links: also return checkpoints whose folder or files are links that lead out of their folder.
    """
    with following_links(follow_links):
        return _verified(Path(root)) if verify else commit.latest(root)


def _verified(folder: Path) -> Path | None:
    ranks = rank_count()
    if ranks > 1:
        start()
    [candidates, *_] = _exchanged([str(path) for path in _candidates(folder)], ranks)
    passed_over: list[str] = []
    for path in map(Path, candidates):
        problems = _exchanged(_problem(path, own_rank(), ranks), ranks)
        problem = next((one for one in problems if one), "")
        if not problem:
            _warn(passed_over)
            return path
        passed_over.append(f"{str(path)!r} is passed over: {problem}")
    if passed_over:
        raise DamagedCheckpoint(
            f"no checkpoint in {str(folder)!r} is right: {'; '.join(passed_over)}",
            "Restore one from a copy, or start again in another folder.",
        )
    return None


def _exchanged(value: T, ranks: int) -> list[T]:
    return [value] if ranks == 1 else all_gather_object_first(value, torch.arange(ranks))


def _candidates(folder: Path) -> list[Path]:
    """The newest first; on ranks other than the first, what they see does not count."""
    return [path for path, _ in commit.newest_first(folder)] if own_rank() == 0 and folder.is_dir() else []


def _problem(path: Path, index: int, count: int) -> str:
    try:
        return first_problem(commit.find(path), index, count)
    except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
        return str(getattr(error, "what", f"{type(error).__name__}: {error}"))


def _warn(passed_over: list[str]) -> None:
    if passed_over and own_rank() == 0:
        for text in passed_over:
            warnings.warn(text, stacklevel=3)
