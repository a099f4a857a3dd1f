"""Traces what a conversion does to stored tensors, by running it on labels instead of values.

A conversion stacks tensors, concatenates or splits them, or reorders their rows. It is run on small
integers, a few per row; where they end up shows which bytes of the files make up each resulting tensor,
without reading any. A conversion that computes, or changes the inside of rows, is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch

from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.loading.reading import Span, Stored

_WIDTH = 4  # labels per row: enough to detect a change inside rows


class NotMoved(Exception):
    """The conversion does more than move rows."""


def _others(labels: torch.Tensor) -> torch.Tensor:
    """Other labels for the same elements: sums, means and maxima do not commute with this mapping."""
    changed = labels * -31
    changed += 17
    changed *= labels
    return changed


class Rows:
    """The rows of some stored tensors, numbered from the first tensor to the last."""

    def __init__(self, sources: Sequence[Stored]) -> None:
        tensors = [source.tensor for source in sources]
        self._sources, self._dtype = sources, tensors[0].dtype
        self._flat = len(tensors[0].shape) < 2  # then each element counts as a row
        self._length = 1 if self._flat else tensors[0].shape[-1]
        self._width = min(_WIDTH, self._length)
        lengths = {None if len(t.shape) < 2 else t.shape[-1] for t in tensors}
        if len(lengths) > 1:
            raise NotMoved("their last dimensions differ")
        if any(t.dtype != self._dtype for t in tensors):
            raise NotMoved("their dtypes differ")
        counts = [prod(t.shape if self._flat else t.shape[:-1]) for t in tensors]
        self._firsts = list(accumulate(counts, initial=0))

    def labelled(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the labels of such a tensor."""
        return shape if self._flat or not shape else (*shape[:-1], self._width)

    def follow(self, convert: Callable[[list[torch.Tensor]], Mapping[str, Any]]) -> dict[str, Stored]:
        """The tensors that `convert` makes, each with the locations of its elements in the files."""
        count = self._firsts[-1] * self._width
        plain = torch.arange(count, dtype=torch.int32 if count < 2**31 else torch.int64)
        # A second run with other labels: only a conversion that moves them gives the same result.
        made, again = (convert(self._labels(labels)) for labels in (plain, _others(plain)))
        stored: dict[str, Stored] = {}
        for name, value in made.items():
            moved, other = [v[0] if isinstance(v, list) else v for v in (value, again[name])]
            if moved.dtype != plain.dtype or not torch.equal(_others(moved), other):
                raise NotMoved("values would be computed, not only moved")
            stored[name] = self._stored(name, moved)
        return stored

    def _labels(self, labels: torch.Tensor) -> list[torch.Tensor]:
        return [
            labels[first * self._width : last * self._width].view(self.labelled(source.tensor.shape))
            for source, (first, last) in zip(self._sources, pairwise(self._firsts), strict=True)
        ]

    def _stored(self, name: str, moved: torch.Tensor) -> Stored:
        shape = tuple(moved.shape)
        if not self._flat:
            inside = moved.reshape(-1, shape[-1]) if shape else moved
            in_rows = len(shape) > 1 and shape[-1] == self._width
            if not in_rows or not torch.equal(inside, inside[:, :1] + torch.arange(self._width)):
                raise NotMoved("the inside of rows would be changed")
            moved, shape = inside[:, 0] // self._width, (*shape[:-1], self._length)
        return Stored(Tensor(name, self._dtype, shape), tuple(self._spans(moved.flatten())))

    def _spans(self, rows: torch.Tensor) -> list[Span]:
        """Merge rows that are contiguous in one file."""
        begins = torch.ones(len(rows), dtype=torch.bool)
        begins[1:] = (rows[1:] != rows[:-1] + 1) | torch.isin(
            rows[1:], torch.tensor(self._firsts, dtype=rows.dtype)
        )
        edges = [*begins.nonzero().flatten().tolist(), len(rows)]
        spans: list[Span] = []
        for edge, stop in pairwise(edges):
            row = int(rows[edge])
            source = bisect_right(self._firsts, row) - 1
            low = (row - self._firsts[source]) * self._length
            at = edge * self._length
            for span, start, end in self._sources[source].ranges(low, low + (stop - edge) * self._length):
                begin = span.begin + (start - span.start) * self._dtype.itemsize
                spans.append(Span(at, at + end - start, span.file, begin))
                at += end - start
        return spans
