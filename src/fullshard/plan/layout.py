"""Where each element of a lane is, as plain integers.

A lane lays its parameters end to end and is cut into equal intervals, element by element:

    lane      [a a a a|b b b . . .|c c . .]      '.' is padding, so that each start is aligned
    rank 0    [a a a a b b b]                    interval 0
    rank 1    [. . . c c . .]                    interval 1

A parameter may be on several ranks; every element is on exactly one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

ALIGN_BYTES = 16  # unaligned all-gathers were reported twelve times slower


@dataclass(frozen=True)
class Region:
    """A rectangle of a tensor that a group of ranks holds, where tensor parallelism has cut it.

    `first` is whether this rank is the first of those that hold the same rectangle.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: bool

    @property
    def is_cut(self) -> bool:
        return self.sizes != self.global_shape

    @property
    def in_rows(self) -> bool:
        """Complete rows only: one interval of the tensor's elements."""
        return self.sizes[1:] == self.global_shape[1:]

    @property
    def begin(self) -> int:
        """Where the rows begin, in elements of the tensor."""
        return self.offsets[0] * prod(self.global_shape[1:]) if self.global_shape else 0


@dataclass(frozen=True)
class Piece:
    """One parameter's place in a lane. `order` lists its dimensions from slowest to fastest in memory.

    With a `region` the parameter is that part of a tensor: `shape` is the part's.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    start: int
    region: Region | None = None

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shape if self.region is None else self.region.global_shape

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.num_elements

    @property
    def memory_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.order)


@dataclass(frozen=True)
class Box:
    """A rectangle of a parameter: its offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)


@dataclass(frozen=True)
class Layout:
    """Where every element of a lane is: rank r keeps [r * interval, (r + 1) * interval)."""

    pieces: tuple[Piece, ...]
    ranks: int
    interval: int
    align: int

    @property
    def total(self) -> int:
        return self.interval * self.ranks

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for piece in self.pieces)

    def on(self, ranks: int) -> Layout:
        """The same parameters on another number of ranks."""
        end = round_up(max((piece.stop for piece in self.pieces), default=0), self.align)
        return replace(self, ranks=ranks, interval=round_up(-(-end // ranks), self.align))

    def kept(self, piece: Piece, rank: int) -> tuple[int, int]:
        """The elements of a parameter that a rank keeps, as [start, stop) of the parameter."""
        low, high = rank * self.interval, (rank + 1) * self.interval
        start = min(max(piece.start, low), piece.stop)
        stop = max(min(piece.stop, high), start)
        return start - piece.start, stop - piece.start

    def shard_sizes(self, piece: Piece) -> tuple[int, ...]:
        """How many elements of a parameter each rank that has any keeps, by rank."""
        if not piece.num_elements:
            return ()
        first, last = piece.start // self.interval, (piece.stop - 1) // self.interval
        if first == last:
            return (piece.num_elements,)
        between = (self.interval,) * (last - first - 1)
        return ((first + 1) * self.interval - piece.start, *between, piece.stop - last * self.interval)

    def written(self, piece: Piece, rank: int, replica: int, replicas: int) -> tuple[int, int]:
        """The part of `kept` that this rank saves: replicas keep the same elements and divide the work.

        Of the tensor-parallel ranks that hold the same elements, the first saves them.
        """
        low = rank * self.interval
        first, last = (low + self.interval * i // replicas - piece.start for i in (replica, replica + 1))
        start, stop = self.kept(piece, rank)
        start = min(max(start, first), stop)
        if piece.region is not None and not piece.region.first:
            return start, start
        return start, max(min(stop, last), start)

    def in_shard(self, piece: Piece, rank: int) -> tuple[int, int]:
        """The same elements as [start, stop) of the rank's interval."""
        start, stop = self.kept(piece, rank)
        if start == stop:
            return 0, 0
        shift = piece.start - rank * self.interval
        return start + shift, stop + shift


def lay_out(
    parameters: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], ranks: int, align: int
) -> Layout:
    """Lay (name, shape, order) end to end, each start and each interval a multiple of `align` elements."""
    pieces, offset = [], 0
    for name, shape, order in parameters:
        piece = Piece(name, tuple(shape), tuple(order), offset)
        pieces.append(piece)
        offset = round_up(piece.stop, align)
    return Layout(tuple(pieces), ranks, round_up(-(-offset // ranks), align), align)


def laid_out_elements(sizes: Sequence[int], ranks: int, align: int) -> int:
    """Elements of the layout that `lay_out` makes for parameters of these sizes, padding included."""
    return ranks * round_up(-(-sum(round_up(size, align) for size in sizes) // ranks), align)


def with_regions(layout: Layout, regions: Sequence[Region | None]) -> Layout:
    """The same layout, with its pieces marked as parts of larger tensors."""
    pairs = zip(layout.pieces, regions, strict=True)
    return replace(layout, pieces=tuple(replace(piece, region=region) for piece, region in pairs))


def align_elements(narrowest_bytes: int) -> int:
    return max(1, ALIGN_BYTES // narrowest_bytes)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def shard_shape(shape: tuple[int, ...], num_elements: int) -> tuple[int, ...]:
    """Elements in dim 0, ones after, so that `p.dim() >= 2` still distinguishes matrices from vectors."""
    return (num_elements,) + (1,) * (len(shape) - 1)


def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions from slowest to fastest, for a dense tensor; plain order for any other."""
    order = tuple(sorted(range(len(shape)), key=lambda d: (-stride[d], d)))
    expected = 1
    for d in reversed(order):
        if shape[d] != 1 and stride[d] != expected:
            return tuple(range(len(shape)))
        expected *= shape[d]
    return order


def boxes(piece: Piece, start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a parameter, in memory order, as rectangles of the tensor."""
    memory = _boxes(piece.memory_shape, start, stop)
    back = {d: i for i, d in enumerate(piece.order)}
    axes = [back[d] for d in range(len(piece.shape))]
    begin = (0,) * len(piece.shape) if piece.region is None else piece.region.offsets
    return [
        Box(
            tuple(b.offsets[i] + begin[d] for d, i in enumerate(axes)),
            tuple(b.sizes[i] for i in axes),
        )
        for b in memory
    ]


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _in_row(shape, first, start - first * row, stop - first * row)
    parts: list[Box] = []
    if start % row:
        parts += _in_row(shape, first, start - first * row, row)
        first += 1
    complete = stop // row
    if complete > first:
        parts.append(Box((first,) + (0,) * (len(shape) - 1), (complete - first, *shape[1:])))
    if stop % row:
        parts += _in_row(shape, complete, 0, stop - complete * row)
    return parts


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *b.offsets), (1, *b.sizes)) for b in _boxes(shape[1:], start, stop)]
