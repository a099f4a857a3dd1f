"""Short previews of the values in a manifest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fullshard.checkpoint.format import values
from fullshard.errors import CheckpointError

_PREVIEW_CHARS = 72
_PREVIEW_ITEMS = 8


def preview(tree: Any) -> Any:
    """A number as it is, anything else as a short string."""
    if tree is None or isinstance(tree, (bool, int, float)):
        return tree
    if isinstance(tree, str):
        return _cut(tree, 4 * _PREVIEW_CHARS)
    try:
        return _cut(_text(tree, 0))
    except Exception:  # noqa: BLE001  a tree from a file may be anything
        return "a value that cannot be read"


def preview_text(value: Any) -> str:
    """A preview for one line of text."""
    return _cut(value) if isinstance(value, str) else repr(value)


def _cut(text: str, chars: int = _PREVIEW_CHARS) -> str:
    return text if len(text) <= chars else text[:chars] + "..."


def _text(tree: Any, depth: int) -> str:
    if depth > 4:
        return "..."
    if isinstance(tree, list):
        return f"[{_items(tree, depth)}]"
    if not isinstance(tree, dict):
        return repr(tree)
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return "{" + _joined((f"{k!r}: {_text(v, depth + 1)}" for k, v in tree.items()), len(tree)) + "}"
    content = tree[tag]
    if tag == "$tuple":
        return f"({_items(content, depth)}{',' if len(content) == 1 else ''})"
    if tag in ("$set", "$frozenset"):
        return "{" + _items(content, depth) + "}"
    if tag in ("$dict", "$counter"):
        pairs = (f"{_text(k, depth + 1)}: {_text(v, depth + 1)}" for k, v in content)
        return "{" + _joined(pairs, len(content)) + "}"
    if tag in ("$tensor", "$array", "$scalar"):
        return _array_text(tag, tree)
    return "bytes" if tag == "$bytes" else str(content)


def _items(content: list[Any], depth: int) -> str:
    return _joined((_text(v, depth + 1) for v in content), len(content))


def _joined(texts: Iterable[str], count: int) -> str:
    shown = [text for text, _ in zip(texts, range(_PREVIEW_ITEMS), strict=False)]
    return ", ".join(shown + ["..."] * (count > _PREVIEW_ITEMS))


def _array_text(tag: str, tree: dict[str, Any]) -> str:
    entry = tree[tag]
    if not entry["shape"] and "data" in entry:  # one number: a learning rate that is a tensor, say
        return repr(values.decode(tree, _in_file).item())
    return f"{tag.removeprefix('$')} of {entry['dtype']} {entry['shape']}"


def _in_file(name: str) -> Any:
    raise CheckpointError(f"{name!r} is in a file", "")
