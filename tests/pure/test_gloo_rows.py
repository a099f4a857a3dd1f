"""Where large rows are cut into messages."""

from __future__ import annotations

import itertools

import pytest

from fullshard.comm import gloo_rows


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 9, 10, 64])
@pytest.mark.parametrize("size", [0, 1, 1000, 2**16, 2**17 + 5, 10**6, 10**9 + 7])
def test_pieces_cover_a_row_once_and_are_neither_many_nor_small(size: int, ranks: int) -> None:
    pieces = gloo_rows.cuts(size, ranks)
    if pieces:
        assert pieces[0][0] == 0
        assert pieces[-1][1] == size
        assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
        assert min(stop - start for start, stop in pieces) >= 2**16
        assert 2 <= len(pieces) * (ranks - 1) <= 8
    else:
        assert ranks > 9 or size < 2**17
