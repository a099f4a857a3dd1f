"""Tables of cases of which the normal suite takes a part; the rest is marked `long`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some(name: str, values: Iterable[Any], *taken: Any) -> pytest.MarkDecorator:
    """Parametrise over `values`; those that are not `taken` are long."""
    return pytest.mark.parametrize(name, [_param(v in taken, v) for v in values])


def in_turn(
    names: tuple[str, str], rows: Iterable[Any], columns: Sequence[Any], always: int = 0
) -> pytest.MarkDecorator:
    """Parametrise over all pairs. Each row has its first `always` columns and one other, in turn; the rest is
    long: it brings neither a new row nor a new column."""
    pairs = []
    for number, row in enumerate(rows):
        turn = always + number % (len(columns) - always)
        for at, column in enumerate(columns):
            pairs.append(_param(at < always or at == turn, row, column, label=f"{row}-{column}"))
    return pytest.mark.parametrize(names, pairs)


def _param(taken: bool, *values: Any, label: str | None = None) -> Any:
    return pytest.param(*values, id=label, marks=[] if taken else pytest.mark.long)
