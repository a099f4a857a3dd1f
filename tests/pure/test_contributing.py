"""CONTRIBUTING.md names files and make targets that exist, and answers each question by one file."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_path_that_is_named_exists() -> None:
    named = set(re.findall(r"`((?:src|tests|docs|bench|examples)/[\w./]*)`", TEXT))
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert len(named) > 20
    assert not missing, missing


def test_every_make_target_that_is_named_exists() -> None:
    named = set(re.findall(r"`make ([a-z-]+)`", TEXT))
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets, named - targets


def test_ten_questions_are_answered_by_one_file_each() -> None:
    rows = [
        line for line in TEXT.split("## Ten questions")[1].splitlines() if line.startswith(("| W", "| H"))
    ]
    files = [re.findall(r"`(src/fullshard/[\w/]+\.py)`", row) for row in rows]
    assert [len(named) for named in files] == [1] * 10


def test_only_reduce_sets_gradients_of_sharded_parameters_where_the_table_says_so() -> None:
    setting = re.compile(r"\bparameter\.grad = (?!None)")
    engine = ROOT / "src" / "fullshard" / "engine"
    assert {path.stem for path in engine.rglob("*.py") if setting.search(path.read_text())} <= {
        "reduce",
        "reduce_buffers",
        *("streamed", "owned", "muon"),  # for the time of a step, and back
        "split_masters",  # the one that it has, when its contents are exchanged
    }
