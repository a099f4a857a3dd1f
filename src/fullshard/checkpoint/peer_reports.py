"""Copies of checkpoints in the memory of agents: what each host has, and what that makes together."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fullshard.comm.messages import record
from fullshard.elastic.keeper_places import Places


@record
@dataclass(frozen=True)
class Described:
    """One rank's part of a checkpoint, complete in a place."""

    path: str
    id: str
    saved_at_ns: int
    rank: int
    ranks: int  # that saved
    files: dict[str, tuple[int, int]]  # where each begins in the place, and its size
    manifest: tuple[int, int]
    place: int = -1
    confirmed: bool = False

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in ("place", "confirmed")}

    @staticmethod
    def from_json(described: dict[str, Any], place: int, confirmed: bool) -> Described:
        begin, size = described["manifest"]
        return Described(
            path=str(described["path"]),
            id=str(described["id"]),
            saved_at_ns=int(described["saved_at_ns"]),
            rank=int(described["rank"]),
            ranks=int(described["ranks"]),
            files={str(name): (int(b), int(s)) for name, (b, s) in described["files"].items()},
            manifest=(int(begin), int(size)),
            place=place,
            confirmed=confirmed,
        )


def in_memory(places: Places, is_asked_for: Callable[[str], bool]) -> list[Described]:
    """What this host's agent keeps, of the paths that are asked for."""
    found = []
    for place, confirmed, described in places.held():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            copy = Described.from_json(described, place, confirmed)
            if is_asked_for(copy.path):
                found.append(copy)
    return found


def root_of(path: str | os.PathLike[str]) -> str:
    return os.path.realpath(os.path.dirname(os.path.abspath(path)))


def is_older(target: Path, checkpoint_id: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a copy is replaced by that of this checkpoint: another one under the same root."""
    root = root_of(target)
    return lambda d: d.get("id") != checkpoint_id and root_of(str(d.get("path"))) == root


@dataclass
class Step:
    """A checkpoint in the memory of agents, as far as it is there."""

    path: str
    id: str
    saved_at_ns: int
    ranks: int
    confirmed: bool = False  # all of it was complete once
    holders: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[int, Described] = field(default_factory=dict)  # by the rank that saved; one of its copies

    @property
    def missing(self) -> list[int]:
        """Ranks that saved and whose copies are gone."""
        return [rank for rank in range(self.ranks) if rank not in self.holders]

    def loss(self) -> str:
        """For a warning: what is gone."""
        shown, more = ", ".join(map(str, self.missing[:8])), len(self.missing) - 8
        ranks = f"rank{'s' if len(self.missing) > 1 else ''} {shown}{f' and {more} more' if more > 0 else ''}"
        return f"{self.path!r} is not complete in memory: all copies of {ranks} (of {self.ranks}) are lost"


def steps(reports: Sequence[list[Described]]) -> list[Step]:
    """The newest first, from what the hosts of all ranks have; holders are numbers of these ranks."""
    found: dict[str, Step] = {}
    for holder, copies in enumerate(reports):
        for copy in copies:
            step = found.setdefault(copy.id, Step(copy.path, copy.id, copy.saved_at_ns, copy.ranks))
            step.confirmed |= copy.confirmed
            step.holders[copy.rank].append(holder)
            step.copies.setdefault(copy.rank, copy)
    return sorted(found.values(), key=lambda step: step.saved_at_ns, reverse=True)
