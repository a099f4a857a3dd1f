"""What restores an fp32 master from its bf16 value: 16 bits per element, and one more where it was a tie.

As integers, the bits of a master differ from those of its rounded value, moved up by 16, by -0x8000 to
0x8000. Both ends are ties, which round to the even neighbour: as 16 bits they are the same, so that a bitmap
holds the upper one. The bits come back exactly, those of zeros, subnormals and infinities too; a NaN comes
back as some NaN, because rounding drops its payload.

    bf16    r r r r r r r r                            the compute shard
    low                     d d d d d d d d            master - (r << 16), 16 bits
    ties                                     t         a bit: the difference is +0x8000, not -0x8000

The bf16 value is the rounded one, because forward and backward compute with it: cutting fp32 into its upper
and lower 16 bits instead would truncate.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fullshard.engine.triton_kernels import compile_kernels, launch

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

PER_BYTE = 8  # elements, in the bitmap
_TIE = 0x8000
_AT_ONCE = 2**18  # elements, on a processor: what is computed on the way stays in its cache


def bitmap_bytes(num_elements: int) -> int:
    return -(-num_elements // PER_BYTE)


@torch.no_grad()
def split(masters: Tensor, compute: Tensor, low: Tensor, ties: Tensor) -> None:
    """`low` and `ties` of flat masters, of which `compute` has the rounded values."""
    _check(masters, compute, low, ties)
    if not _by_kernel("split", masters, compute, low, ties):
        for start in range(0, len(masters), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            _split(masters[part], compute[part], low[part], ties[_bytes(part)])


def _split(masters: Tensor, compute: Tensor, low: Tensor, ties: Tensor) -> None:
    difference = masters.view(torch.int32) - _moved_up(compute)
    low.copy_(difference)
    upper = difference == _TIE
    if not upper.is_cuda:
        ties.copy_(torch.from_numpy(np.packbits(upper.numpy(), bitorder="little")))
        return
    bits = torch.zeros(len(ties) * PER_BYTE, dtype=torch.uint8, device=upper.device)
    bits[: len(upper)] = upper
    ties.copy_((bits.view(-1, PER_BYTE) << _places(bits.device)).sum(1))


@torch.no_grad()
def join(compute: Tensor, low: Tensor, ties: Tensor, masters: Tensor) -> None:
    """The inverse of `split`."""
    _check(masters, compute, low, ties)
    if not _by_kernel("join", masters, compute, low, ties):
        for start in range(0, len(masters), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            _join(compute[part], low[part], ties[_bytes(part)], masters[part])


def _join(compute: Tensor, low: Tensor, ties: Tensor, masters: Tensor) -> None:
    difference = low.int()
    if ties.is_cuda or ties.any():
        bits = (ties[:, None] >> _places(ties.device)) & 1
        difference.masked_fill_(bits.view(-1)[: len(low)].bool(), _TIE)
    masters.view(torch.int32).copy_(difference.add_(_moved_up(compute)))


def _moved_up(compute: Tensor) -> Tensor:
    return compute.view(torch.int16).int().bitwise_left_shift_(16)


def _bytes(part: slice) -> slice:
    return slice(part.start // PER_BYTE, part.stop // PER_BYTE)


def _places(device: torch.device) -> Tensor:
    return torch.arange(PER_BYTE, dtype=torch.uint8, device=device)


def _check(masters: Tensor, compute: Tensor, low: Tensor, ties: Tensor) -> None:
    given = [(t.dtype, t.shape, t.device) for t in (masters, compute, low, ties)]
    count, at = masters.numel(), masters.device
    dtypes = torch.float32, torch.bfloat16, torch.int16, torch.uint8
    sizes = count, count, count, bitmap_bytes(count)
    if given != [(dtype, (size,), at) for dtype, size in zip(dtypes, sizes, strict=True)]:
        raise ValueError(f"masters, compute values, 16 bits and bitmap do not belong together: {given}")


def _by_kernel(name: str, masters: Tensor, compute: Tensor, low: Tensor, ties: Tensor) -> bool:
    """Whether that was all: on a GPU, by a kernel, or because there is nothing to do."""
    if not len(masters):
        return True
    if not masters.is_cuda or (kernels := _kernels()) is None:
        return False
    values = masters.view(torch.int32), compute.view(torch.int16), low, ties
    launch(getattr(kernels, name), (-(-len(ties) // _TILE),), _OPTIONS, *values, len(masters))
    return True


# With triton, which is imported when the first CUDA tensor comes. One launch per call, and the same bits.

_TILE = 256  # bytes of the bitmap per program
_OPTIONS = {"num_warps": 4}


class _Kernels(NamedTuple):
    split: Any
    join: Any


@functools.cache
def _kernels() -> _Kernels | None:
    """None where triton is missing."""
    compiled = compile_kernels(globals(), _split_kernel, _join_kernel)
    return None if compiled is None else _Kernels(*compiled)


def _split_kernel(
    masters: tl.tensor,
    compute: tl.tensor,
    low: tl.tensor,
    ties: tl.tensor,
    count: tl.tensor,
    TILE: tl.constexpr = _TILE,
    PER_BYTE: tl.constexpr = PER_BYTE,
) -> None:
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, PER_BYTE)
    element = byte[:, None] * PER_BYTE + place[None, :]
    inside = element < count
    moved_up = tl.load(compute + element, mask=inside, other=0).to(tl.int32) << 16
    difference = tl.load(masters + element, mask=inside, other=0) - moved_up
    tl.store(low + element, difference.to(tl.int16), mask=inside)
    upper = (difference == 0x8000).to(tl.int32) << place[None, :]
    tl.store(ties + byte, tl.sum(upper, axis=1).to(tl.uint8), mask=byte * PER_BYTE < count)


def _join_kernel(
    masters: tl.tensor,
    compute: tl.tensor,
    low: tl.tensor,
    ties: tl.tensor,
    count: tl.tensor,
    TILE: tl.constexpr = _TILE,
    PER_BYTE: tl.constexpr = PER_BYTE,
) -> None:
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, PER_BYTE)
    element = byte[:, None] * PER_BYTE + place[None, :]
    inside = element < count
    upper = tl.load(ties + byte, mask=byte * PER_BYTE < count, other=0).to(tl.int32)
    is_upper = ((upper[:, None] >> place[None, :]) & 1) != 0
    difference = tl.load(low + element, mask=inside, other=0).to(tl.int32)
    difference = tl.where(is_upper, 0x8000, difference)
    moved_up = tl.load(compute + element, mask=inside, other=0).to(tl.int32) << 16
    tl.store(masters + element, moved_up + difference, mask=inside)
