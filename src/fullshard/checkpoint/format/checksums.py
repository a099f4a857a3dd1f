"""CRC-32 of fixed blocks of a file that several ranks write.

A block may be written in pieces by different ranks. CRCs are linear: shift the CRC of each piece by the
number of bytes that follow it in the block, and the exclusive or of all is the CRC of the block. So no rank
reads back what others wrote, and gaps and overlaps between pieces are detected before the save completes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.crc import crc32
from fullshard.errors import CheckpointError

BLOCK_BYTES = 2**20
_POLYNOMIAL = np.uint32(0xEDB88320)
PIECE = np.dtype([("block", "<u8"), ("start", "<u4"), ("length", "<u4"), ("crc", "<u4")])
Pieces = npt.NDArray[Any]


def checksum(data: Any) -> int:
    return crc32(data)


class Tally:
    """What one rank wrote into one file: a CRC per block or part of a block."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pieces: list[tuple[int, int, int, int]] = []

    def add(self, offset: int, data: memoryview) -> None:
        size, at = self._block_bytes, 0
        while at < len(data):
            block, start = divmod(offset + at, size)
            length = min(size - start, len(data) - at)
            self._add(block, start, length, data[at : at + length])
            at += length

    def _add(self, block: int, start: int, length: int, data: memoryview) -> None:
        if self._pieces:
            last_block, last_start, last_length, crc = self._pieces[-1]
            if last_block == block and last_start + last_length == start:  # continues the last piece
                self._pieces[-1] = (block, last_start, last_length + length, crc32(data, crc))
                return
        self._pieces.append((block, start, length, crc32(data)))

    def pieces(self) -> Pieces:
        return np.array(self._pieces, dtype=PIECE)


def join(file: str, pieces: Sequence[Pieces], size_bytes: int, block_bytes: int) -> list[int]:
    """The CRC of every block of a file, from the pieces of all ranks, which must cover every byte once."""
    written = np.concatenate([np.empty(0, PIECE), *pieces])
    written = written[np.lexsort((written["start"], written["block"]))]
    starts = written["block"] * np.uint64(block_bytes) + written["start"]
    ends = starts + written["length"]
    expected = np.concatenate([np.zeros(1, np.uint64), ends])
    actual = np.concatenate([starts, np.array([size_bytes], np.uint64)])
    wrong = np.flatnonzero(expected != actual)
    if len(wrong):
        end, start = int(expected[wrong[0]]), int(actual[wrong[0]])
        what = "were written by no rank" if start > end else "were written twice"
        raise CheckpointError(
            f"file {file!r}: bytes {min(end, start)} to {max(end, start)} {what}",
            "This is a bug in fullshard; the save was abandoned. Please report it.",
        )
    block_sizes = np.minimum(
        np.uint64(block_bytes), np.uint64(size_bytes) - written["block"] * np.uint64(block_bytes)
    )
    tails = block_sizes - written["start"] - written["length"]
    shifted = _shift(written["crc"].astype(np.uint32), tails.astype(np.uint64))
    first = np.flatnonzero(np.diff(written["block"], prepend=np.uint64(2**63)) != 0)
    return [int(v) for v in np.bitwise_xor.reduceat(shifted, first)] if len(written) else []


def _shift(crcs: npt.NDArray[np.uint32], zero_bytes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Each CRC as if that many zero bytes followed, without CRC-32's initial and final inversion."""
    shifted, remaining, doublings = crcs.copy(), zero_bytes.copy(), 0
    while remaining.any():
        odd = np.flatnonzero(remaining & np.uint64(1))
        if len(odd):
            shifted[odd] = _multiply(_shift_of(doublings), shifted[odd])
        remaining >>= np.uint64(1)
        doublings += 1
    return shifted


@functools.cache
def _shift_of(doublings: int) -> np.uint32:
    """The factor for 2^doublings zero bytes: x^8 for one byte, squared so many times."""
    if doublings == -3:
        return np.uint32(1 << 30)  # x
    half = _shift_of(doublings - 1)
    return np.uint32(_multiply(half, np.array([half], np.uint32))[0])


def _multiply(factor: np.uint32, values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Products of polynomials modulo that of CRC-32; the highest bit is the coefficient of x^0."""
    product, term = np.zeros_like(values), values.copy()
    for bit in range(31, -1, -1):
        if int(factor) >> bit & 1:
            product ^= term
        term = np.where(term & np.uint32(1), (term >> np.uint32(1)) ^ _POLYNOMIAL, term >> np.uint32(1))
    return product
