"""Which elements of an unsharded tensor a rank holds, and what of an operand belongs to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fullshard.plan.layout import Layout, Piece, Region
from fullshard.plan.tensor_parallel import part_of


@dataclass(frozen=True)
class Cut:
    """A rank holds the elements [start, stop) of an unsharded tensor, in memory order.

    `order` lists dimensions from slowest to fastest. Without it the positions are unknown, as in a
    concatenation of shards: sums and norms are right there, and nothing else is.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    start: int = 0
    stop: int = 0
    region: Region | None = None  # of tensor parallelism

    @staticmethod
    def of(piece: Piece, kept: tuple[int, int]) -> Cut:
        region = piece.region if piece.region is not None and piece.region.is_cut else None
        return Cut(piece.global_shape, piece.order, *kept, region)

    @staticmethod
    def of_rank(layout: Layout, piece: Piece, rank: int) -> Cut:
        return Cut.of(piece, layout.kept(piece, rank))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def in_rows(self) -> bool:
        return self.region is None and self.order == tuple(range(len(self.shape)))

    def reshaped(self, shape: Sequence[int]) -> Cut:
        """The same sequence of elements under another shape."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        return replace(self, shape=shape, order=tuple(range(len(shape))) if self.in_rows else None)

    def permuted(self, dims: Sequence[int]) -> Cut:
        shape = tuple(self.shape[d] for d in dims)
        known = self.order is not None and self.region is None
        order = tuple(list(dims).index(d) for d in self.order or ()) if known else None
        return replace(self, shape=shape, order=order)

    def broadcasts(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape, in an element-wise function, stands for one of the unsharded."""
        pairs = zip(reversed(shape), reversed(self.shape), strict=False)
        known = self.order is not None and len(shape) <= len(self.shape)
        return known and all(n in (1, m) for n, m in pairs)

    def take(self, unsharded: torch.Tensor) -> torch.Tensor:
        """This rank's elements, end to end, of a tensor that broadcasts to the unsharded shape."""
        assert self.order is not None
        part = part_of(unsharded.expand(self.shape), self.region)
        return part.permute(self.order).reshape(-1)[self.start : self.stop]


def is_everything(key: Any) -> bool:
    """Whether `tensor[key]` is all of any tensor."""
    return key is Ellipsis or (isinstance(key, slice) and key == slice(None))


def operand(cut: Cut | None, local: tuple[int, ...], value: torch.Tensor) -> torch.Tensor | str:
    """This rank's elements of an operand of an element-wise function, or why they are unknown.

    It has the unsharded shape, or broadcasts to it, or is of this rank's elements (`local`) already.
    """
    shape = tuple(value.shape)
    if value.numel() == 1 and len(shape) <= len(local):
        return value
    if cut is not None and cut.broadcasts(shape):
        if shape == local and shape != cut.shape:
            return "may be this rank's elements or stand for all columns"
        part = part_of(value.expand(cut.shape), cut.region)
        return part if part.shape == local else cut.take(value).view(local)
    return value if shape == local else "fits neither"
