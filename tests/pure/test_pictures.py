"""The picture of the rooms in docs/design.md shows the arrows that the structure test checks."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from test_structure import ARROWS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rooms() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "pictures" / "rooms.py"))


def test_picture_of_the_rooms_is_the_one_of_the_checked_arrows(rooms: dict[str, Any]) -> None:
    assert rooms["arrows"]() == ARROWS
    assert rooms["FILE"].read_text() == rooms["draw"](ARROWS), "run python docs/pictures/rooms.py"


def test_picture_changes_when_an_arrow_does(rooms: dict[str, Any]) -> None:
    more = {**ARROWS, "tools": ARROWS["tools"] | {"lightning"}}
    assert rooms["draw"](more) != rooms["draw"](ARROWS)


def test_every_arrow_is_drawn_or_follows_from_drawn_ones(rooms: dict[str, Any]) -> None:
    drawn: dict[str, set[str]] = {room: set() for room in ARROWS}
    for room, other in rooms["drawn_arrows"](ARROWS):
        drawn[room].add(other)
    for room, imports in ARROWS.items():
        assert imports <= rooms["reachable"](drawn, room)


def test_how_it_works_begins_with_the_picture() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    assert "(pictures/rooms.svg)" in text.split("\n## ")[1]
