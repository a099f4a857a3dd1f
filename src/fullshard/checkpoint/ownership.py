"""Which checkpoints of a folder belong to this run: those that it wrote, and those that it resumed from.

A run has an id, which its checkpoints carry in their manifest. A process that loads a checkpoint with its
optimizer continues that run: it takes over the id, and the run's checkpoints up to the one that was loaded.
So a restart after a crash, on another host or on other ranks, goes on removing old checkpoints, and a run
that was started from scratch in a used folder leaves the others' alone. Ids are known without locks, and so
on every file system.

While a process lives it also holds a lock on its newest checkpoints. Two processes that resumed the same run
do not remove each other's that way, and do not replace them under one name. The system releases the locks
when the process dies, however it dies. Locks on the checkpoints themselves were preferred to a lock file:
there is nothing that could become stale.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.checkpoint.files import FolderLock
from fullshard.checkpoint.format.manifest import Manifest, Summary
from fullshard.errors import CheckpointError

RUN, WRITER = "run", "writer"  # in a manifest's layout


@dataclass
class _Run:
    """What this process knows of its run in one folder."""

    id: str
    checkpoints: set[str] = field(default_factory=set)  # ids of those that it wrote or took over
    newest_ns: int = 0  # when its newest checkpoint was saved


class _Owner:
    """The runs of this process by folder, and the locks on its newest checkpoints."""

    def __init__(self) -> None:
        self._own_id = ""
        self._runs: dict[str, _Run] = {}
        self._held: OrderedDict[tuple[int, int], FolderLock] = OrderedDict()

    def run(self, parent: Path) -> _Run:
        self._own_id = self._own_id or secrets.token_hex(8)
        return self._runs.setdefault(os.path.realpath(parent), _Run(self._own_id))

    def adopt(self, parent: Path, run: _Run) -> None:
        self._runs[os.path.realpath(parent)] = run

    def hold(self, folder: Path, lock: FolderLock | None, most: int) -> None:
        """Keep a lock as long as the process lives, of the newest `most` in all."""
        if lock is not None:
            with contextlib.suppress(OSError):  # it may be gone by now
                self._held[_inode(folder)] = lock
        while len(self._held) > most:
            self._held.popitem(last=False)[1].release()

    def let_go(self, folder: Path) -> None:
        lock = self._held.pop(_inode(folder), None)
        if lock is not None:
            lock.release()

    def holds(self, folder: Path) -> bool:
        return _inode(folder) in self._held

    def forget(self) -> None:
        """In a process that was forked: it is no part of the run, and a lock must not outlive its process."""
        for lock in self._held.values():
            lock.release()
        self._held.clear()
        self._runs.clear()
        self._own_id = ""


_owner = _Owner()
os.register_at_fork(after_in_child=_owner.forget)


def _inode(folder: Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def description(parent: Path) -> dict[str, Any]:
    """For the manifest's layout: the run, and the process that saves."""
    return {RUN: _owner.run(parent).id, WRITER: f"process {os.getpid()} on {socket.gethostname()}"}


def moment_ns(parent: Path) -> int:
    """When a checkpoint is saved: later than the run's others, even where hosts' clocks differ."""
    run = _owner.run(parent)
    run.newest_ns = max(time.time_ns(), run.newest_ns + 1)
    return run.newest_ns


def wrote(target: Path, checkpoint_id: str) -> None:
    _owner.run(target.parent).checkpoints.add(checkpoint_id)


def hold(target: Path, lock: FolderLock | None, most: int) -> None:
    """Keep the lock on a checkpoint that this process has just written."""
    _owner.hold(target, lock, most)


def let_go(folder: Path) -> None:
    """Before this process removes one of its own."""
    _owner.let_go(folder)


def owns(folder: Path, checkpoint_id: str) -> bool:
    """Whether this run may remove a checkpoint: it is one of its own, and no other process holds it."""
    is_own = checkpoint_id in _owner.run(folder.parent).checkpoints
    return is_own and not _is_held_elsewhere(folder)


def resumed(folder: Path, loaded: Manifest, siblings: list[tuple[Path, Summary]]) -> None:
    """This process continues the run of a checkpoint. `siblings` are the checkpoints of the same folder."""
    known = loaded.layout.get(RUN)
    run = _Run(known if isinstance(known, str) else secrets.token_hex(8), newest_ns=loaded.saved_at_ns)
    for _, other in siblings:
        # Later ones were passed over, or are another branch's: they are nobody's to remove.
        if other.layout.get(RUN) == known and other.saved_at_ns <= loaded.saved_at_ns:
            run.checkpoints.add(other.id)
    _owner.adopt(folder.parent, run)


def refuse_held(target: Path, layout: Any) -> None:
    """Raise if the checkpoint at a path is that of another process which is still running."""
    if _is_held_elsewhere(target):
        writer, run = layout.get(WRITER, "another process"), layout.get(RUN, "unknown")
        raise CheckpointError(
            f"{str(target)!r} was written by {writer} (run {run}), which is still running",
            "Save to another folder, or end that process first.",
        )


def _is_held_elsewhere(folder: Path) -> bool:
    try:
        return not _owner.holds(folder) and FolderLock.is_held(folder)
    except OSError:
        return False
