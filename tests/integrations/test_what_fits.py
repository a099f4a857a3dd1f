"""The table and the picture of docs/offload.md are what the planner computes."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

import documents
from fullshard.engine.homes.transfers import HELD
from fullshard.offload import Offload
from fullshard.plan.homes import (
    AUTO_SHARE,
    CHUNKS,
    LARGE_CHUNK,
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    chunk_of,
    slab_sets,
)
from fullshard.planning.transfers import Rates


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


def test_the_page_has_the_numbers_of_the_engine() -> None:
    text = " ".join((documents.ROOT / "docs" / "offload.md").read_text().split())
    chunk, large, largest = (size // 2**20 for size in (SMALLEST_CHUNK, LARGE_CHUNK, LARGEST_CHUNK))
    sets = slab_sets(SMALLEST_CHUNK)
    slabs = 18 * sets * chunk
    assert f"{sets} sets of a chunk of each kind" in text
    assert f"{sets} · {chunk} Mi · 18 bytes = {slabs} MiB" in text
    assert f"or {slab_sets(LARGEST_CHUNK)} of larger chunks" in text
    assert f"from {chunk} Mi to {large} Mi, or to {largest} Mi with `overlap=True`" in text
    assert f"a rank has at most {CHUNKS} chunks" in text
    of_8b = chunk_of(Offload(overlap=True), 8_030_000_000)
    assert f"an 8B on one rank {of_8b // 2**20} Mi elements" in text
    assert f"in {18 * slab_sets(of_8b) * of_8b // 2**20:,} MiB of slabs" in text
    assert HELD == 2
    assert "at most three gradient" in text
    assert f"{AUTO_SHARE:.0%}".replace("%", " %") + " of what is free" in text
    seconds = Rates().link_s(16, 14) * 1e9
    assert f"takes at least {seconds:.2f} s per billion parameters" in text


@pytest.mark.long
def test_the_table_is_what_the_planner_computes(planned: dict[str, Any]) -> None:
    assert planned["page"]() in (documents.ROOT / "docs" / "offload.md").read_text()


def test_the_picture_has_the_numbers_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(documents.ROOT / "docs" / "pictures"))
    picture = runpy.run_path(str(documents.ROOT / "docs" / "pictures" / "offload.py"))
    assert picture["FILE"].read_text() == picture["draw"](), "run python docs/pictures/offload.py"
