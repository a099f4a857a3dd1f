"""Checkpoints that a script writes while the doctor runs it go to a folder of the doctor's.

A run of a few steps must not replace what the user has trained. What is read is taken from there if the
script has written it in this examination, else from where it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Overlay:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def place(self, path: Any) -> Path:
        """Where something is written instead."""
        full = Path(os.path.abspath(os.fspath(path)))
        if full.is_relative_to(self._folder):
            return full
        place = self._folder / full.relative_to(full.anchor)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def place_if_there(self, path: Any) -> Any:
        place = self.place(path)
        return place if place.exists() else path

    def named(self, path: Any) -> Path:
        """The path as the script would write it."""
        full = Path(os.path.abspath(os.fspath(path)))
        return Path("/") / full.relative_to(self._folder) if full.is_relative_to(self._folder) else full

    def latest(self, original: Any) -> Any:
        def latest(root: Any, *args: Any, **kwargs: Any) -> Any:
            written = original(self.place(root), *args, **kwargs)
            return original(root, *args, **kwargs) if written is None else written

        return latest

    def torch_save(self, original: Any) -> Any:
        def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            place = self.place(file) if isinstance(file, str | os.PathLike) else file
            return original(value, place, *args, **kwargs)

        return save

    def torch_load(self, original: Any) -> Any:
        def load(file: Any, *args: Any, **kwargs: Any) -> Any:
            place = self.place_if_there(file) if isinstance(file, str | os.PathLike) else file
            return original(place, *args, **kwargs)

        return load
