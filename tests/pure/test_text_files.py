"""Text files are there complete, or as they were before."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fullshard.text_files import replace_text


def test_a_reader_beside_writers_never_sees_a_part(tmp_path: Path) -> None:
    path, texts = tmp_path / "plan.json", [letter * 300_000 for letter in "ab"]
    replace_text(path, texts[0])
    writers = [
        threading.Thread(target=lambda text=text: [replace_text(path, text) for _ in range(20)])
        for text in texts
    ]
    for one in writers:
        one.start()
    while any(one.is_alive() for one in writers):
        assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["plan.json"]


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "record"
    replace_text(path, "before")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "\udc80")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["record"]
