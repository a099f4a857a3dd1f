"""The layout holds for any shapes, strides, dtypes and rank counts; real tensors are laid by its integers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullshard.engine.pieces import in_memory_order, piece_view
from fullshard.plan.layout import (
    ALIGN_BYTES,
    Box,
    Layout,
    Piece,
    align_elements,
    boxes,
    laid_out_elements,
    lay_out,
    memory_order,
    round_up,
    shard_shape,
)

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.bool,
)
RANKS = st.integers(1, 17)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)

# The same examples every time: a failure in CI is a failure here.
repeatable = settings(deadline=None, max_examples=100, derandomize=True)


@dataclass(frozen=True)
class Example:
    """A lane: parameters with values that tell every element from every other, and where they lie."""

    values: list[Tensor]
    layout: Layout
    itemsize: int

    @property
    def align(self) -> int:
        return align_elements(self.itemsize)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A parameter of any shape, dense in any order of its dimensions, or with gaps in memory."""
    shape = draw(SHAPES)
    order = draw(st.permutations(range(len(shape))))
    dense = torch.arange(torch.Size(shape).numel()).view([shape[d] for d in order])
    value = dense.permute([order.index(d) for d in range(len(shape))])
    if shape and draw(st.booleans()):
        value = torch.stack([value, -value], dim=-1)[..., 0]  # every other element: not dense
    return value


@st.composite
def lanes(draw: st.DrawFn) -> Example:
    values = draw(st.lists(tensors(), max_size=6))
    itemsize = draw(st.sampled_from(DTYPES)).itemsize
    named = [
        (f"p{i}", tuple(v.shape), memory_order(tuple(v.shape), tuple(v.stride())))
        for i, v in enumerate(values)
    ]
    return Example(values, lay_out(named, draw(RANKS), align_elements(itemsize)), itemsize)


@repeatable
@given(lanes())
def test_every_element_is_kept_by_exactly_one_rank(example: Example) -> None:
    layout = example.layout
    for piece in layout.pieces:
        owners = torch.zeros(piece.num_elements, dtype=torch.int64)
        for rank in range(layout.ranks):
            start, stop = layout.kept(piece, rank)
            assert 0 <= start <= stop <= piece.num_elements
            owners[start:stop] += 1
        assert owners.eq(1).all(), piece
        sizes = [stop - start for start, stop in (layout.kept(piece, rank) for rank in range(layout.ranks))]
        assert layout.shard_sizes(piece) == tuple(size for size in sizes if size)


@repeatable
@given(lanes())
def test_no_two_parameters_share_a_place_in_a_shard(example: Example) -> None:
    layout = example.layout
    for rank in range(layout.ranks):
        taken = torch.zeros(layout.interval, dtype=torch.int64)
        for piece in layout.pieces:
            start, stop = layout.in_shard(piece, rank)
            assert 0 <= start <= stop <= layout.interval
            assert stop - start == layout.kept(piece, rank)[1] - layout.kept(piece, rank)[0]
            taken[start:stop] += 1
        assert taken.le(1).all()


@repeatable
@given(lanes())
def test_starts_and_intervals_are_aligned_to_16_bytes(example: Example) -> None:
    for offset in [piece.start for piece in example.layout.pieces] + [example.layout.interval]:
        assert offset * example.itemsize % ALIGN_BYTES == 0


@repeatable
@given(lanes())
def test_padding_is_alignment_and_nothing_more(example: Example) -> None:
    layout = example.layout
    padding = layout.total - layout.num_elements
    assert 0 <= padding < example.align * (len(layout.pieces) + layout.ranks)


@repeatable
@given(lanes())
def test_the_ranks_shards_end_to_end_are_the_values_again(example: Example) -> None:
    layout = example.layout
    shards = [torch.full((layout.interval,), -7) for _ in range(layout.ranks)]
    for rank, shard in enumerate(shards):
        for piece, value in zip(layout.pieces, example.values, strict=True):
            start, stop = layout.in_shard(piece, rank)
            shard[start:stop] = in_memory_order(value, piece)[slice(*layout.kept(piece, rank))]
    full = torch.cat(shards)
    for piece, value in zip(layout.pieces, example.values, strict=True):
        view = piece_view(full, piece)
        assert view.shape == value.shape
        assert torch.equal(view, value)


@repeatable
@given(tensors())
def test_a_dense_value_comes_back_with_its_own_strides(value: Tensor) -> None:
    value = value.clone(memory_format=torch.preserve_format)  # dense, in the same order where it had one
    shape = tuple(value.shape)
    piece = Piece("p", shape, memory_order(shape, tuple(value.stride())), 0)
    view = piece_view(in_memory_order(value, piece).clone(), piece)
    for d in range(value.dim()):
        if value.numel() and shape[d] != 1:  # a stride that is never taken may be any number
            assert view.stride(d) == value.stride(d), (shape, value.stride(), view.stride())


def test_a_channels_last_weight_comes_back_channels_last() -> None:
    value = torch.arange(2.0 * 3 * 5 * 7).view(2, 3, 5, 7).to(memory_format=torch.channels_last)
    piece = Piece("p", (2, 3, 5, 7), memory_order((2, 3, 5, 7), value.stride()), 0)
    view = piece_view(in_memory_order(value, piece).clone(), piece)
    assert view.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(view, value)


def test_a_value_with_gaps_in_memory_is_laid_in_plain_order() -> None:
    gaps = torch.arange(24).view(4, 6).t()[:3]
    assert memory_order(tuple(gaps.shape), gaps.stride()) == (0, 1)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Piece, int, int]:
    shape = draw(SHAPES)
    piece = Piece("p", shape, tuple(draw(st.permutations(range(len(shape))))), draw(st.integers(0, 64)))
    start = draw(st.integers(0, piece.num_elements))
    return piece, start, draw(st.integers(start, piece.num_elements))


@repeatable
@given(cuts())
def test_boxes_tile_exactly_the_elements_of_an_interval(cut: tuple[Piece, int, int]) -> None:
    piece, start, stop = cut
    numbers = piece_view(torch.arange(piece.start + piece.num_elements), piece) - piece.start
    seen: list[int] = []
    for box in boxes(piece, start, stop):
        seen += box_of(numbers, box).permute(piece.order).flatten().tolist()
    assert seen == list(range(start, stop))  # each once, none outside, and box after box in memory order


@repeatable
@given(cuts())
def test_an_interval_needs_few_boxes(cut: tuple[Piece, int, int]) -> None:
    piece, start, stop = cut
    assert len(boxes(piece, start, stop)) <= max(1, 2 * len(piece.shape) - 1)
    assert all(box.num_elements for box in boxes(piece, start, stop))


def box_of(value: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        value = value.narrow(dim, offset, size)
    return value


@repeatable
@given(lanes())
def test_the_ranks_boxes_cover_a_parameter_once(example: Example) -> None:
    layout = example.layout
    for piece in layout.pieces:
        count = torch.zeros(piece.shape, dtype=torch.int64)
        for rank in range(layout.ranks):
            for box in boxes(piece, *layout.kept(piece, rank)):
                box_of(count, box).add_(1)
        assert count.eq(1).all()


@repeatable
@given(SHAPES, st.integers(0, 9))
def test_at_rest_a_parameter_keeps_its_number_of_dimensions(shape: tuple[int, ...], kept: int) -> None:
    resting = shard_shape(shape, kept)
    assert torch.Size(resting).numel() == kept
    assert len(resting) == max(1, len(shape))  # a scalar's elements need one dimension to be counted in


@repeatable
@given(st.integers(0, 1000), st.integers(1, 64))
def test_rounding_up_gives_the_next_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


def test_alignment_is_of_bytes_for_every_dtype() -> None:
    for a, b in itertools.pairwise(sorted({dtype.itemsize for dtype in DTYPES})):
        assert align_elements(a) * a == align_elements(b) * b == ALIGN_BYTES


@repeatable
@given(st.lists(st.integers(0, 1000), max_size=8), RANKS, st.sampled_from((4, 16, 256)))
def test_elements_of_a_layout_are_known_without_laying_it_out(
    sizes: list[int], ranks: int, align: int
) -> None:
    named = [(str(i), (size,), (0,)) for i, size in enumerate(sizes)]
    assert laid_out_elements(sizes, ranks, align) == lay_out(named, ranks, align).total
