"""The flight recorders of all runs of this user on this host, read from outside: running or killed."""

from __future__ import annotations

import contextlib
import os
import tempfile

from fullshard.comm.recorder_files import HEADER, Folder, Peer, record_name

_MOST_FOLDERS, _MOST_RANKS = 50, 64


def standings() -> list[list[str]]:
    """By run: where each rank is or was last, and the line of the script where it stands, if it wrote one."""
    prefix = f"fullshard-{os.geteuid()}-"
    found = []
    for parent in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            names = [name for name in sorted(os.listdir(parent)) if name.startswith(prefix)]
            found += [_of_run(os.path.join(parent, name)) for name in names[:_MOST_FOLDERS]]
    return [run for run in found if run]


def _of_run(path: str) -> list[str]:
    try:
        folder = Folder(path)
    except OSError:  # gone, a link, or another user's
        return []
    try:
        return [text for rank in folder.ranks()[:_MOST_RANKS] for text in _of_rank(folder, rank)]
    finally:
        folder.close()


def _of_rank(folder: Folder, rank: int) -> list[str]:
    file = folder.open(record_name(rank))
    if file is None:
        return []
    try:
        head = os.pread(file, HEADER.size, 0)
    finally:
        os.close(file)
    ranks = HEADER.unpack(head)[5] if len(head) == HEADER.size else 0
    peer = Peer.open(folder, rank, ranks)
    if peer is None:
        return []
    try:
        place, note = peer.place(), peer.note()
    finally:
        peer.close()
    return [] if place is None else [f"{place}{'' if note is None else f'; it stands at {note.at}'}"]
