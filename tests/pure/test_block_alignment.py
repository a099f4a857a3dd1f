"""Parameters start at multiples of 256 elements where that costs under 1 % of a unit, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fullshard.options import parse
from fullshard.plan.layout import Layout, align_elements
from fullshard.plan.plan import BLOCK_PADDING, make_plan
from fullshard.precision import BLOCK, Precision

RANKS = (1, 2, 3, 5, 8)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width - 1), nn.Linear(width, width - 1)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale[0]


def _layouts(width: int, ranks: int, precision: str | Precision = "fp32") -> list[Layout]:
    with torch.device("meta"):
        model = nn.ModuleList(Block(width) for _ in range(2))
    plan = make_plan(model, ranks, parse(units=Block, precision=precision))
    return [lane.layout for unit in plan.units for lane in unit.lanes]


def _blocks(layout: Layout) -> dict[tuple[str, int], set[int]]:
    """For each block of a parameter's elements, the ranks that keep any of it."""
    found: dict[tuple[str, int], set[int]] = {}
    for piece in layout.pieces:
        for rank in range(layout.ranks):
            start, stop = layout.kept(piece, rank)
            for block in range(start // BLOCK, -(-stop // BLOCK) if stop > start else start // BLOCK):
                found.setdefault((piece.name, block), set()).add(rank)
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_no_block_of_a_large_units_parameter_is_on_two_ranks(ranks: int) -> None:
    for layout in _layouts(1024, ranks):
        assert all(piece.start % BLOCK == 0 for piece in layout.pieces)
        assert layout.interval % BLOCK == 0
        assert all(len(holders) == 1 for holders in _blocks(layout).values())


@pytest.mark.parametrize("strategy", ["zero3", "hybrid"])
@pytest.mark.parametrize("precision", [Precision(wire=torch.int8), Precision(across=torch.int8)])
def test_parameters_share_no_block_where_gradients_are_sent_in_blocks(
    strategy: str, precision: Precision
) -> None:
    with torch.device("meta"):
        model = nn.ModuleList(Block(33) for _ in range(2))
    options = replace(parse(units=Block, precision=precision, strategy=strategy), nodes=2)
    for unit in make_plan(model, 2, options).units:
        for lane in unit.lanes:
            assert all(piece.start % BLOCK == 0 for piece in lane.layout.pieces)
            assert lane.layout.interval % BLOCK == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_padding_of_a_unit_stays_under_the_limit_however_small_it_is(ranks: int) -> None:
    for width in (2, 8, 33, 65, 129, 257, 700):
        frozen, trained = _layouts(width, ranks)[:2]
        packed = sum(align_elements(4) * (len(x.pieces) + ranks) + x.num_elements for x in (trained, frozen))
        assert trained.total + frozen.total <= (1 + BLOCK_PADDING) * packed


@pytest.mark.parametrize("ranks", RANKS)
def test_small_units_are_packed_as_tightly_as_messages_allow(ranks: int) -> None:
    layout = _layouts(8, ranks)[1]
    assert layout.interval % align_elements(4) == 0
    assert layout.total < layout.num_elements + (len(layout.pieces) + ranks) * align_elements(4)
    assert any(piece.start % BLOCK for piece in layout.pieces)


def test_a_small_lane_of_a_large_unit_is_aligned_with_it() -> None:
    frozen, trained = _layouts(1024, 4)[:2]
    assert (frozen.num_elements, frozen.total) == (3, 4 * BLOCK)
    assert trained.interval % BLOCK == 0


def test_eight_bit_blocks_are_aligned_in_small_units_too() -> None:
    layout = _layouts(8, 3, Precision(compute=torch.bfloat16, gather=torch.int8))[1]
    assert all(piece.start % BLOCK == 0 for piece in layout.pieces)
