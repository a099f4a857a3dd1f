"""CRC-32 of blocks that several ranks write: joined from pieces, against zlib on the whole file."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.checkpoint.format.checksums import BLOCK_BYTES, PIECE, Pieces, Tally, join
from fullshard.errors import CheckpointError

Run = tuple[int, int]  # bytes [start, stop) of the file

quickly = settings(max_examples=150, deadline=None)


def crcs(data: bytes, block_bytes: int) -> list[int]:
    """What the manifest must say, by a plain reader of the whole file."""
    return [zlib.crc32(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]


def written(data: bytes, runs: list[list[Run]], block_bytes: int) -> list[Pieces]:
    """Each rank's pieces, after it wrote its runs in this order."""
    found = []
    for rank in runs:
        tally = Tally(block_bytes)
        for start, stop in rank:
            tally.add(start, memoryview(data)[start:stop])
        found.append(tally.pieces())
    return found


@st.composite
def cut_files(draw: st.DrawFn) -> tuple[bytes, list[list[Run]], int]:
    """A file, cut anywhere into runs, dealt to a few ranks in any order."""
    block_bytes = draw(st.sampled_from([1, 7, 16, 64, 512]))
    size = draw(st.integers(0, 6 * block_bytes + 5))
    data = random.Random(draw(st.integers(0, 2**32))).randbytes(size)
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=20))})
    runs = list(pairwise(cuts))
    ranks: list[list[Run]] = [[] for _ in range(draw(st.integers(1, 5)))]
    for run in draw(st.permutations(runs)):
        ranks[draw(st.integers(0, len(ranks) - 1))].append(run)
    return data, ranks, block_bytes


@given(cut_files())
@quickly
def test_joined_pieces_are_the_checksums_of_the_whole_file(case: tuple[bytes, list[list[Run]], int]) -> None:
    data, runs, block_bytes = case
    assert join("f", written(data, runs, block_bytes), len(data), block_bytes) == crcs(data, block_bytes)


@given(cut_files(), st.data())
@quickly
def test_run_that_nobody_wrote_is_found(
    case: tuple[bytes, list[list[Run]], int], data: st.DataObject
) -> None:
    content, runs, block_bytes = case
    places = [(r, i) for r, rank in enumerate(runs) for i in range(len(rank))]
    if not places:
        return
    rank, index = data.draw(st.sampled_from(places))
    start, stop = runs[rank].pop(index)
    with pytest.raises(CheckpointError, match=f"'f'.* {start} to {stop} were written by no rank"):
        join("f", written(content, runs, block_bytes), len(content), block_bytes)


@given(cut_files(), st.data())
@quickly
def test_byte_that_two_wrote_is_found(case: tuple[bytes, list[list[Run]], int], data: st.DataObject) -> None:
    """Even where both wrote the same: the exclusive or of the two would be the checksum of something else."""
    content, runs, block_bytes = case
    if not content:
        return
    start = data.draw(st.integers(0, len(content) - 1))
    stop = data.draw(st.integers(start + 1, len(content)))
    runs.append([(start, stop)])
    with pytest.raises(CheckpointError, match="written twice"):
        join("f", written(content, runs, block_bytes), len(content), block_bytes)


@given(cut_files(), st.integers(1, 100))
@quickly
def test_file_that_is_longer_or_shorter_than_what_was_written_is_refused(
    case: tuple[bytes, list[list[Run]], int], by: int
) -> None:
    data, runs, block_bytes = case
    pieces = written(data, runs, block_bytes)
    for size in (len(data) + by, len(data) - by):
        if size >= 0:
            with pytest.raises(CheckpointError, match="'f'"):
                join("f", pieces, size, block_bytes)


@given(cut_files(), st.data())
@quickly
def test_changed_byte_changes_the_checksum_of_its_block_alone(
    case: tuple[bytes, list[list[Run]], int], data: st.DataObject
) -> None:
    content, runs, block_bytes = case
    if not content:
        return
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    before = join("f", written(content, runs, block_bytes), len(content), block_bytes)
    after = join("f", written(bytes(changed), runs, block_bytes), len(content), block_bytes)
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [at // block_bytes]


def test_pieces_of_megabyte_blocks_join_to_the_checksums_of_the_whole_file() -> None:
    """The blocks of real checkpoints, in pieces as small as one byte and as large as several blocks."""
    draw = random.Random(0)
    data = draw.randbytes(3 * BLOCK_BYTES + 12345)
    cuts = sorted(
        {0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 1, len(data) - 1, len(data)}
        | {draw.randrange(len(data)) for _ in range(200)}
    )
    runs: list[list[Run]] = [[] for _ in range(8)]
    for run in pairwise(cuts):
        draw.choice(runs).append(run)
    assert join("f", written(data, runs, BLOCK_BYTES), len(data), BLOCK_BYTES) == crcs(data, BLOCK_BYTES)


def test_files_beyond_four_gigabytes_keep_their_offsets() -> None:
    """Pieces say where they are by block: no 32-bit number overflows in a file of a terabyte."""
    block_bytes, blocks = BLOCK_BYTES, 2**20
    content = b"x" * 16
    rows = [(block, 0, block_bytes, 7) for block in range(1000)]
    pieces = np.array(rows, dtype=PIECE)
    with pytest.raises(CheckpointError, match=f"bytes {1000 * block_bytes} to {blocks * block_bytes}"):
        join("f", [pieces], blocks * block_bytes, block_bytes)
    tally = Tally(block_bytes)
    tally.add((blocks - 1) * block_bytes, memoryview(content))
    assert tally.pieces()["block"].tolist() == [blocks - 1]
    assert tally.pieces()["crc"].tolist() == [zlib.crc32(content)]


def test_what_one_rank_writes_in_order_is_one_piece_a_block() -> None:
    """Otherwise a model of many small tensors would send a row for each of them to the first rank."""
    data = random.Random(1).randbytes(4096)
    tally = Tally(1024)
    for at in range(0, len(data), 16):
        tally.add(at, memoryview(data)[at : at + 16])
    assert tally.pieces()["length"].tolist() == [1024] * 4


def test_empty_file_has_no_blocks() -> None:
    assert join("f", [], 0, 512) == []
    assert join("f", [Tally(512).pieces()], 0, 512) == []
