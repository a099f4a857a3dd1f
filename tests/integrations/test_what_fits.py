"""The table of docs/offload.md of what fits on common machines is what the planner computes."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

import documents


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    return runpy.run_path(str(documents.ROOT / "docs" / "what_fits.py"))


@pytest.fixture(scope="module")
def printed() -> dict[tuple[str, str], str]:
    """Cells by devices and column."""
    text = (documents.ROOT / "docs" / "offload.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| devices |") or " GiB | " in line]
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(row[0], column): cell for row in rows for column, cell in zip(head, row, strict=True)}


def check(planned: dict[str, Any], text: str, card: int, ranks: int, request: Any) -> None:
    """The model of this size fits, and the next larger one does not."""
    sizes = ["-", *(planned["shown"](index) for index in range(len(planned["FAMILY"])))]
    index = sizes.index(text) - 1
    assert index < 0 or planned["fits"](index, card, ranks, request)
    assert index + 1 == len(planned["FAMILY"]) or not planned["fits"](index + 1, card, ranks, request)


def test_some_cells_of_the_table_are_what_the_planner_computes(
    planned: dict[str, Any], printed: dict[tuple[str, str], str]
) -> None:
    check(planned, printed["1 x 24 GiB", "`None`"], 24, 1, None)
    check(planned, printed["4 x 24 GiB", "`None`"], 24, 4, None)
    for column, request in enumerate(planned["requests"](64)[:2]):
        check(planned, printed["1 x 24 GiB", "64 GiB"].split(" / ")[column], 24, 1, request)


@pytest.mark.long
def test_the_table_is_what_the_planner_computes(planned: dict[str, Any]) -> None:
    assert planned["page"]() in (documents.ROOT / "docs" / "offload.md").read_text()
