"""`fs.latest`: the newest checkpoint of a folder, and on request the newest that is right."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from fullshard.checkpoint import commit
from fullshard.checkpoint.files import following_links
from fullshard.checkpoint.format.manifest import Summary
from fullshard.checkpoint.loading.peer_copies import damage
from fullshard.checkpoint.peer_reports import Described, in_memory, root_of, steps
from fullshard.checkpoint.rollbacks import is_within, passed_over
from fullshard.checkpoint.saving.background import finish_earlier
from fullshard.checkpoint.tools.verifying import first_problem
from fullshard.comm.control import all_gather_object_first, start
from fullshard.comm.groups import own_rank, rank_count
from fullshard.comm.messages import record
from fullshard.elastic.keeper_places import Places, own_places
from fullshard.errors import DamagedCheckpoint
from fullshard.keywords import checked_keywords

T = TypeVar("T")


@checked_keywords(dict.fromkeys(("path", "folder", "directory", "run"), "Write root=..."))
def latest(root: str | os.PathLike[str], *, verify: bool = False, follow_links: bool = False) -> Path | None:
    """The newest complete checkpoint in a folder, or None if there is none.

    In a run of `fullshard launch --elastic` every rank must call it: copies in the memory of peers count as
    well (see `peers` of fs.save), and ranks agree on what is left of them. Where all copies of a rank's state
    are lost, it falls back to the newest checkpoint on disk, with a warning.

    verify: check every byte of it first, and fall back to the newest checkpoint that is right; a warning
        names those that were passed over, and why. For runs that restart unattended: without it, a
        checkpoint that was damaged on disk is handed out again after every restart. Every rank must call it:
        they share the work, and agree. Nothing is removed. If there are checkpoints and none is right, it
        raises: the run would begin from scratch.
    follow_links: also return checkpoints whose folder or files are links that lead out of their folder.
    """
    with following_links(follow_links):
        places = own_places()
        if places is not None:
            return _of_memory_or_disk(Path(root), places, verify)
        return _verified(Path(root)) if verify else commit.latest(root)


@record
@dataclass(frozen=True)
class _Known:
    """What one rank knows of a folder's checkpoints."""

    copies: list[Described]
    on_disk: list[tuple[str, int]]  # names, the newest first, and when each was saved; on the first rank
    rejected: list[tuple[int, int]]  # between which times a state was saved that is passed over


def _of_memory_or_disk(folder: Path, places: Places, verify: bool) -> Path | None:
    ranks = rank_count()
    if ranks > 1:
        start()
    finish_earlier()
    root = os.path.realpath(folder)
    copies = in_memory(places, lambda path: root_of(path) == root)
    if verify:
        copies = _without_damaged(copies, places, ranks)
    newest = [(path.name, saved.saved_at_ns) for path, saved in _on_disk(folder)]
    rows = _exchanged(_Known(copies, newest, passed_over(folder)), ranks)
    rejected, on_disk = rows[0].rejected, rows[0].on_disk
    reports = [[one for one in row.copies if not is_within(rejected, one.saved_at_ns)] for row in rows]
    chosen = choose(reports, on_disk[0] if on_disk else None)
    if verify and not chosen.in_memory and on_disk:
        try:
            verified = _verified(folder)
        except DamagedCheckpoint:
            chosen = choose(reports, None)
            if chosen.name is None:
                raise
        else:
            chosen = choose(reports, next((one for one in on_disk if folder / one[0] == verified), None))
    _warn(chosen.losses)
    return None if chosen.name is None else folder / chosen.name


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, and what was newer and is lost."""

    name: str | None
    in_memory: bool
    losses: list[str]


def choose(reports: Sequence[list[Described]], on_disk: tuple[str, int] | None) -> Choice:
    """The newest that is complete: in memory, as the hosts of all ranks report, or on disk. Pure."""
    name, saved_at_ns = on_disk or (None, -1)
    in_memory, lost = False, []
    for step in steps(reports):
        if step.saved_at_ns < saved_at_ns:
            break
        if not step.missing:
            name, in_memory = os.path.basename(step.path), True
            break
        if step.confirmed:  # otherwise its save was interrupted: it never counted
            lost.append(step.loss())
    goes_on = "There is no checkpoint on disk: training begins anew."
    if name is not None:
        goes_on = f"Training goes on from {name!r}, which is {'in memory' if in_memory else 'on disk'}."
    return Choice(name, in_memory, [f"{loss}. {goes_on}" for loss in lost])


def _on_disk(folder: Path) -> list[tuple[Path, Summary]]:
    return commit.newest_first(folder) if own_rank() == 0 and folder.is_dir() else []


def _without_damaged(copies: list[Described], places: Places, ranks: int) -> list[Described]:
    """Check every byte of this host's copies, and free the damaged ones: another host may have them."""
    words = _exchanged(places.word, ranks)
    sharing = [rank for rank, word in enumerate(words) if word == places.word]
    mine = copies[sharing.index(own_rank()) :: len(sharing)]
    problems = {copy.place: problem for copy in mine if (problem := _damage(places, copy))}
    rows = _exchanged((places.word, problems), ranks)
    _warn([text for _, of_rank in rows for text in of_rank.values()])
    damaged = {place for word, of_rank in rows if word == places.word for place in of_rank}
    return [copy for copy in copies if copy.place not in damaged]


def _damage(places: Places, copy: Described) -> str:
    place = places.open(copy.place)
    try:
        problem = damage(place, copy)
        if problem and place.lock():
            place.free()
    finally:
        place.close()
    return problem and f"the copy of rank {copy.rank} of {copy.path!r} in memory is left out: {problem}"


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
    return [path for path, _ in _on_disk(folder)]


def _problem(path: Path, index: int, count: int) -> str:
    try:
        return first_problem(commit.find(path), index, count)
    except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
        return str(getattr(error, "what", f"{type(error).__name__}: {error}"))


def _warn(passed_over: list[str]) -> None:
    if passed_over and own_rank() == 0:
        for text in passed_over:
            warnings.warn(text, stacklevel=4)
