"""How much memory the contents of a file may take: a multiple of its size, checked before it is allocated.

A few bytes can describe gigabytes: a list of empty lists, a tensor of stride 0, a record that is listed a
thousand times, a string that is joined to itself. No list of such tricks is complete. So whatever interprets
a file's bytes charges what it is about to allocate to the file's Budget, and a file that asks for more than
files of its size do is refused.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from fullshard.checkpoint.files import opened
from fullshard.errors import DamagedCheckpoint

BASE_BYTES = 32 * 2**20  # for files of any size
_JSON_FACTOR = 6  # headers and manifests that fs.save writes take up to 8 times their size; see _json_bytes
PICKLE_FACTOR = 32  # pickles are dense: `.metadata` of real checkpoints takes about 15 times its size
_REMEDY = "The file is damaged or not what it seems; use another copy of it."
# What Python allocates for one of these, with its place in the container around it.
_LIST, _OBJECT, _ITEM, _QUOTE = 72, 200, 36, 30


class Budget:
    """Bytes that may be allocated for the contents of one file, or of one item in a file."""

    def __init__(self, name: str, size_bytes: int, factor: int, base_bytes: int = BASE_BYTES) -> None:
        self._name, self._size_bytes = name, size_bytes
        self._left = base_bytes + factor * size_bytes

    def charge(self, count: int) -> None:
        """Call before allocating `count` bytes."""
        self._left -= count
        if self._left < 0:
            raise DamagedCheckpoint(
                f"{self._name} of {self._size_bytes} bytes describes far more than files of that size hold; "
                "it was not read further",
                "Do not load it: it may have been made to exhaust memory.",
            )


def _json_bytes(data: bytes) -> int:
    """About what Python allocates for a JSON text and its values. Counts of bytes, so it takes no memory."""
    text = len(data) if data.isascii() else 4 * len(data)
    values = _LIST * data.count(b"[") + _OBJECT * data.count(b"{")
    return len(data) + text + values + _ITEM * data.count(b",") + _QUOTE * data.count(b'"')


def is_within_budget(data: bytes) -> bool:
    """Whether `parse_json` would accept a text of this size and structure."""
    return _json_bytes(data) <= BASE_BYTES + _JSON_FACTOR * len(data)


def read_json(path: Path, most_bytes: int = 64 * 2**20) -> Any:
    """The contents of a small JSON file, in which Python writes NaN; raises OSError or DamagedCheckpoint."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise DamagedCheckpoint(f"{str(path)!r} has {size} bytes, too many for such a file", _REMEDY)
        return parse_json(str(path), file.read(), accepts_nan=True)


def parse_json(file: str, data: bytes, accepts_nan: bool = False) -> Any:
    """Strict JSON: no duplicate names, no NaN, no nesting that overflows the parser, and within a budget."""
    Budget(repr(file), len(data), _JSON_FACTOR).charge(_json_bytes(data))

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise DamagedCheckpoint(f"{file!r} names {twice[:200]!r} twice", _REMEDY)
        return unique

    def refuse(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    constant = float if accepts_nan else refuse
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once, parse_constant=constant)
    except (ValueError, RecursionError) as error:  # including a number with too many digits
        raise DamagedCheckpoint(f"{file!r} is not valid JSON: {str(error)[:200]}", _REMEDY) from None
