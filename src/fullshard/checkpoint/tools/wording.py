"""How the commands put things: sizes, times, names from files, and a glance at a value."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fullshard.checkpoint.format import values
from fullshard.errors import CheckpointError

_SHOWN_CHARS = 72
_SHOWN_ITEMS = 8


def as_bytes_text(count: int) -> str:
    """1234567 as '1.2 MB'."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.95 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def as_time(saved_at_ns: int) -> str:
    return datetime.fromtimestamp(saved_at_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """A text from a file, which may hold anything: nothing in it may steer the terminal."""
    return text if text.isprintable() else repr(text)[1:-1]


def listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def plain(tree: Any) -> Any:
    """A value of the manifest for people: a number or a text as it is, everything else as a short text."""
    if tree is None or isinstance(tree, (bool, int, float)):
        return tree
    if isinstance(tree, str):
        return cut(tree, 4 * _SHOWN_CHARS)
    try:
        return cut(_spoken(tree, 0))
    except Exception:  # noqa: BLE001  a tree from a file may be anything, and this is only a glance at it
        return "a value that cannot be read"


def shown(value: Any) -> str:
    return cut(value) if isinstance(value, str) else repr(value)


def cut(text: str, chars: int = _SHOWN_CHARS) -> str:
    return text if len(text) <= chars else text[:chars] + "..."


def _spoken(tree: Any, depth: int) -> str:
    if depth > 4:
        return "..."
    if isinstance(tree, list):
        return f"[{_items(tree, depth)}]"
    if not isinstance(tree, dict):
        return repr(tree)
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        pairs = [f"{k!r}: {_spoken(v, depth + 1)}" for k, v in list(tree.items())[:_SHOWN_ITEMS]]
        return "{" + ", ".join(pairs + ["..."] * (len(tree) > _SHOWN_ITEMS)) + "}"
    content = tree[tag]
    if tag == "$tuple":
        return f"({_items(content, depth)}{',' if len(content) == 1 else ''})"
    if tag in ("$set", "$frozenset"):
        return "{" + _items(content, depth) + "}"
    if tag in ("$dict", "$counter"):
        pairs = [f"{_spoken(k, depth + 1)}: {_spoken(v, depth + 1)}" for k, v in content[:_SHOWN_ITEMS]]
        return "{" + ", ".join(pairs + ["..."] * (len(content) > _SHOWN_ITEMS)) + "}"
    if tag in ("$tensor", "$array", "$scalar"):
        return _spoken_block(tag, tree)
    return "bytes" if tag == "$bytes" else str(content)


def _items(content: list[Any], depth: int) -> str:
    items = [_spoken(v, depth + 1) for v in content[:_SHOWN_ITEMS]]
    return ", ".join(items + ["..."] * (len(content) > _SHOWN_ITEMS))


def _spoken_block(tag: str, tree: dict[str, Any]) -> str:
    said = tree[tag]
    if not said["shape"] and "data" in said:  # one number: a learning rate that is a tensor, say
        return repr(values.decode(tree, _no_file).item())
    return f"{tag.removeprefix('$')} of {said['dtype']} {said['shape']}"


def _no_file(name: str) -> Any:
    raise CheckpointError(f"{name!r} is in a file", "")
