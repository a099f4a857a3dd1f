"""Steps that were rejected (`fs.Guard`): a record beside a run's checkpoints, which its later starts read.

One line of JSON per decision, in `rejected.jsonl`: the step and the reason, which batches are left out from
then on, and which checkpoints are passed over, by the times at which they were saved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fullshard.text_files import replace_text

NAME = "rejected.jsonl"


@dataclass(frozen=True)
class Rejected:
    """One step that was rejected, and what followed."""

    step: int
    why: str
    action: str  # skip, rollback
    time: float = 0.0
    # The checkpoint was suspect: both steps after it were rejected. Then everything saved in this interval is
    # passed over, and no batch from where the older checkpoint begins to this step is used.
    suspect: bool = False
    saved_from_ns: int = 0
    saved_to_ns: int = -1

    def __str__(self) -> str:
        follows = {"skip": "its batch is left out", "rollback": "the run goes back to its newest checkpoint"}
        text = f"step {self.step} is rejected, because {self.why}; {follows[self.action]}"
        if self.suspect:
            return f"{text} before the one that was loaded, and leaves out what lies between"
        return text if self.action == "skip" else f"{text}, and leaves out the batch"


def read(root: Path) -> list[Rejected]:
    """In the order of the decisions. Lines that are none are passed over."""
    try:
        lines = (root / NAME).read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(Rejected(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def add(root: Path, rejected: Rejected) -> None:
    """By one rank. The file is there with all lines, or as it was."""
    os.makedirs(root, exist_ok=True)
    lines = [*read(root), rejected]
    replace_text(root / NAME, "".join(json.dumps(asdict(one)) + "\n" for one in lines))


def passed_over(root: Path) -> list[tuple[int, int]]:
    """The times between which checkpoints were saved to which the run does not go back."""
    return [(one.saved_from_ns, one.saved_to_ns) for one in read(root) if one.suspect]


def is_within(intervals: Sequence[tuple[int, int]], saved_at_ns: int) -> bool:
    return any(first <= saved_at_ns <= last for first, last in intervals)


_loaded_at_ns: int | None = None  # when the state from which this process went on was saved


def note_loaded(saved_at_ns: int) -> None:
    global _loaded_at_ns
    _loaded_at_ns = saved_at_ns


def loaded_at_ns() -> int | None:
    return _loaded_at_ns
