"""What a rank of an elastic run reports to the agent of its host, through files in the agent's folder.

A rank writes where it is: the step that it begins, the checkpoint that it loaded, the newest one that it has
saved. The agent reads that at any time, also after the rank was killed. The other way there is one request:
to leave after the next save, so that a run can grow without losing a step.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path

from fullshard.environment import agent_folder, launch
from fullshard.text_files import replace_text

_WORD = 8
_REQUEST = "leave"


@dataclass(frozen=True)
class Reported:
    """What is known of one rank."""

    step: int | None = None
    loaded: str = ""
    saved: str = ""
    left: bool = False


class LeftForRound(SystemExit):
    """Ends a rank after a save: the run goes on in another round, with another number of ranks."""


class Report:
    """The side of the rank."""

    def __init__(self, folder: Path, place: int) -> None:
        self._folder, self._place, self._known = folder, place, Reported()
        with open(_step_file(folder, place), "wb+") as file:
            file.write((-1).to_bytes(_WORD, "little", signed=True))
            file.flush()
            self._word = memoryview(mmap.mmap(file.fileno(), _WORD)).cast("q")

    def begins(self, step: int) -> None:
        """One store into memory: this is called once per step."""
        self._word[0] = step

    def loaded(self, path: str) -> None:
        self._write(replace(self._known, loaded=path))

    def saved(self, path: str) -> None:
        self._write(replace(self._known, saved=path))

    @property
    def asked_to_leave(self) -> bool:
        return (self._folder / _REQUEST).exists()

    def leave(self) -> None:
        """Raises: the exit status does not matter, because the report has the reason."""
        self._write(replace(self._known, left=True))
        raise LeftForRound(0)

    def _write(self, known: Reported) -> None:
        self._known = known
        target = _text_file(self._folder, self._place)
        with contextlib.suppress(OSError):  # the agent is gone, and this process with it
            replace_text(target, json.dumps([known.loaded, known.saved, known.left]))


_own: tuple[int, Report | None] = (0, None)


def own() -> Report | None:
    """This rank's; None outside an elastic run. A forked process is not a rank."""
    global _own
    if _own[0] == 0:
        folder, report = agent_folder(), None
        with contextlib.suppress(OSError):  # the folder of an agent that is gone
            report = Report(Path(folder), launch().local_rank) if folder else None
        _own = os.getpid(), report
    return _own[1] if _own[0] == os.getpid() else None


# ---- the side of the agent


def clear(folder: Path) -> None:
    """Before a round."""
    for file in folder.iterdir():
        file.unlink()


def request_to_leave(folder: Path) -> None:
    (folder / _REQUEST).touch()


def read(folder: Path, place: int) -> Reported:
    step: int | None = None
    known: list[object] = ["", "", False]
    with contextlib.suppress(OSError):
        number = int.from_bytes(_step_file(folder, place).read_bytes()[:_WORD], "little", signed=True)
        step = number if number >= 0 else None
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(_text_file(folder, place).read_text())
    return Reported(step, str(known[0]), str(known[1]), bool(known[2]))


def _step_file(folder: Path, place: int) -> Path:
    return folder / f"rank-{place}.step"


def _text_file(folder: Path, place: int) -> Path:
    return folder / f"rank-{place}.json"
