"""The package uses the words of the field: a private word that was replaced does not come back.

Identifiers count by their parts (`_said`, `WholeState`), and so do docstrings, comments and error texts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fullshard"

# The word, and what is written instead.
REPLACED = {
    "whole": "full (the gathered buffer), or unsharded value (every element at the resting dtype)",
    "wholes": "full, or unsharded value",
    "wholly": "fully",
    "said": "options, request, or the name of the thing",
    "wish": "request",
    "wishes": "requests",
    "pile": "accumulation buffer; accumulate",
    "piles": "accumulates",
    "piled": "accumulated",
    "piling": "accumulating",
    "council": "control group",
    "talk": "all_gather_object, broadcast_object, barrier; communicate",
    "talks": "communicates",
    "talking": "communicating",
    "speak": "communicate",
    "speaks": "communicates",
    "tell": "broadcast_object; report, show",
    "tells": "reports, shows",
    "told": "given, set, reported",
    "travel": "is in flight, is sent",
    "travels": "is in flight, is sent",
    "travelling": "in flight",
    "traveling": "in flight",
    "everyone": "world",
}

# (file, word) where the word is not ours to change, with the reason.
ALLOWED: dict[tuple[str, str], str] = {
    ("checkpoint/format/torch_archives.py", "tell"): "a method that zipfile calls",
    ("hugging_face/checkpoints.py", "everyone"): "accelerate's wait_for_everyone",
    ("training/report.py", "whole"): "a key of summary.json, which runs have written before",
    ("training/reporter.py", "whole"): "the same key",
}

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def rooms() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        found.setdefault(path.relative_to(SOURCE).parts[0], []).append(path)
    return found


def replaced_words(path: Path) -> list[str]:
    """'file:line: word (what to write)' of every use."""
    name = str(path.relative_to(SOURCE))
    return [
        f"{name}:{number}: {word} ({REPLACED[word]})"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word in dict.fromkeys(part.lower() for part in _PARTS.findall(line))
        if word in REPLACED and (name, word) not in ALLOWED
    ]


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_room_uses_the_words_of_the_field(room: str) -> None:
    found = [use for path in rooms()[room] for use in replaced_words(path)]
    assert not found, "\n".join(found)


def test_words_are_seen_in_identifiers_and_not_inside_other_words() -> None:
    text = "class WholeState: _said = 'untold, retell, wholesale'  # piles up\n"
    seen = [part.lower() for part in _PARTS.findall(text) if part.lower() in REPLACED]
    assert seen == ["whole", "said", "piles"]
