"""Optimizer state at rest in 8-bit blocks.

A block is 256 elements of one parameter, counted from its start: 4 bytes of scale, then a byte for each. Its
largest magnitude is the scale and comes back exactly. The bytes of the others are steps of a root, so that
small values keep some of their relative precision: a linear code would round most second moments to zero.

    a block without negative values    x = scale * (q / 255) ** 4              q in 0 .. 255
    any other                          x = +-scale * (q / 127) ** 2            q in 0 .. 127; scale is negated

    value / scale       1       0.1     0.01    0.001    1e-4    the smallest that is not zero
    step, unsigned      1.6 %   2.8 %   5 %     9 %      16 %    2.4e-10
    step, signed        1.6 %   5 %     16 %    50 %     -       6e-5

Rounding is up or down at random, with the right value on average: changes of a moment are mostly smaller
than a step, and rounding to the nearest would lose all of them. The randomness is a hash of the value itself
and of its place in the block, so the bits depend on nothing else, the number of ranks included. Decoded
values are encoded as what they were (a block with negative values keeps a sign, if only that of a zero).

A positive value does not become zero where no value of its block is negative: a second moment of zero would
make the next update of its element arbitrarily large.

Magnitudes below 2 ** -90 become zero. A block with a value that is not finite decodes to values that are not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fullshard.engine.triton_kernels import compile_kernels, launch
from fullshard.precision import BLOCK, STATE_DTYPES, STATE_ROW_BYTES

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_SCALE_BYTES = STATE_ROW_BYTES - BLOCK
_FLOOR = 2.0**-90
_UNSIGNED, _SIGNED = 255, 127  # largest codes
_SIGNED_AT = 256  # where the magnitudes of signed codes begin in the table
_MIX_1, _MIX_2, _PLACE = 0x7FEB352D, -0x7B935975, 0x68E31DA5  # odd numbers, of a hash
# Chances are odd multiples of 2 ** -11: a value that is a code but for rounding becomes that code. Those of
# bf16, whose roundings are up to an eighth of a step, are in the middle half.
_CHANCE_BITS = 0x3FF
_AT_ONCE = 256  # blocks, on a processor: what is computed on the way stays in its cache


def rows_of(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


@torch.no_grad()
def encode(values: Tensor, rows: Tensor) -> None:
    """Flat values, a multiple of BLOCK, into rows of STATE_ROW_BYTES bytes."""
    if not _by_kernel("encode", values, rows):
        for some, into in _parts_at_once(values, rows):
            _encode(some, into)


def _encode(values: Tensor, rows: Tensor) -> None:
    x = values.float()
    magnitude, negative = x.abs(), torch.signbit(x)
    scale = magnitude.amax(1, keepdim=True)
    signed = negative.any(1, keepdim=True)
    scale.masked_fill_(scale < _FLOOR, 0)
    ratio = magnitude.div_(scale).nan_to_num_(0, 0, 0)
    root = ratio.sqrt()
    root = torch.where(signed, root * _SIGNED, root.sqrt().mul_(_UNSIGNED))
    code = root.int().clamp_(max=torch.where(signed, _SIGNED - 1, _UNSIGNED - 1).int())
    at = code + torch.where(signed, _SIGNED_AT, 0).int()
    table = _table(values.device)
    low, high = table.take(at.long()), table.take(at.long().add_(1))
    code += ratio - low > _chances(x, values.dtype).mul_(high.sub_(low))
    code += (code == 0).logical_and_(ratio > 0).logical_and_(~signed)
    code += negative * 128
    scales, codes = _parts(rows)
    codes.copy_(code)
    scales.copy_(torch.where(signed, -scale, scale))


@torch.no_grad()
def decode(rows: Tensor, values: Tensor) -> None:
    """The inverse of `encode`."""
    if not _by_kernel("decode", values, rows):
        for into, some in _parts_at_once(values, rows):
            _decode(some, into)


def _decode(rows: Tensor, values: Tensor) -> None:
    scales, codes = _parts(rows)
    signed = torch.signbit(scales)
    code = codes.long()
    at = torch.where(signed, (code & _SIGNED) + _SIGNED_AT, code)
    out = _table(values.device).take(at).mul_(scales.abs())
    values.copy_(torch.where(signed & (code > _SIGNED), -out, out))


def _by_kernel(name: str, values: Tensor, rows: Tensor) -> bool:
    """Whether that was all: on a GPU, by a kernel, or because there is nothing to do."""
    _check(values, rows)
    if not len(rows):
        return True
    if not values.is_cuda or (kernels := _kernels()) is None:
        return False
    grid = (-(-len(rows) // _TILE),)
    launch(getattr(kernels, name), grid, _OPTIONS, values, rows, _table(values.device), len(rows))
    return True


def _parts_at_once(values: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(values.view(-1, BLOCK), _AT_ONCE), torch.split(rows, _AT_ONCE), strict=True)


def _check(values: Tensor, rows: Tensor) -> None:
    if rows.dtype is not torch.uint8 or rows.dim() != 2 or rows.shape[1] != STATE_ROW_BYTES:
        raise ValueError(f"rows must be bytes of shape (blocks, {STATE_ROW_BYTES}), not {tuple(rows.shape)}")
    if (
        values.dtype not in STATE_DTYPES
        or values.shape != (len(rows) * BLOCK,)
        or values.device != rows.device
    ):
        raise ValueError(f"{len(rows)} rows do not hold {values.dtype} of shape {tuple(values.shape)}")


def _parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :_SCALE_BYTES].view(torch.float32), rows[:, _SCALE_BYTES:]


def _chances(x: Tensor, dtype: torch.dtype) -> Tensor:
    place = torch.arange(BLOCK, dtype=torch.int32, device=x.device) * _PLACE
    mixed = (x.view(torch.int32) ^ place) * _MIX_1
    mixed = (mixed ^ (mixed >> 15)) * _MIX_2
    chance = ((mixed >> 16) & _CHANCE_BITS).float() * 2**-10 + 2**-11
    return chance * 0.5 + 0.25 if dtype == torch.bfloat16 else chance


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Magnitudes relative to the scale: of unsigned codes, then of signed ones."""
    unsigned = (torch.arange(_UNSIGNED + 1, dtype=torch.float64) / _UNSIGNED) ** 4
    signed = (torch.arange(_SIGNED + 1, dtype=torch.float64) / _SIGNED) ** 2
    return torch.cat([unsigned, signed]).float().to(device)


# With triton, which is imported when the first CUDA tensor comes. One launch per call, and the same bits.

_TILE = 8  # blocks per program
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class _Kernels(NamedTuple):
    encode: Any
    decode: Any


@functools.cache
def _kernels() -> _Kernels | None:
    """None where triton is missing."""
    compiled = compile_kernels(globals(), _encode_kernel, _decode_kernel)
    return None if compiled is None else _Kernels(*compiled)


def _encode_kernel(
    values: tl.tensor,
    rows: tl.tensor,
    table: tl.tensor,
    num_rows: tl.tensor,
    TILE: tl.constexpr = _TILE,
    BLOCK: tl.constexpr = BLOCK,
    ROW: tl.constexpr = STATE_ROW_BYTES,
    FLOOR: tl.constexpr = _FLOOR,
    MIX_1: tl.constexpr = _MIX_1,
    MIX_2: tl.constexpr = _MIX_2,
    PLACE: tl.constexpr = _PLACE,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None]
    given = tl.load(values + row[:, None] * BLOCK + place[None, :], mask=inside, other=0.0)
    x = given.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    negative = bits < 0
    # As integers, floats without a sign keep their order, and what is not finite comes last.
    largest = tl.max(bits & 0x7FFFFFFF, axis=1)
    signed = tl.max(negative.to(tl.int32), axis=1) > 0
    scale = largest.to(tl.float32, bitcast=True)
    scale = tl.where(scale < FLOOR, 0.0, scale)
    usable = (scale > 0.0) & (largest < 0x7F800000)
    ratio = tl.div_rn(tl.abs(x), tl.where(usable, scale, 1.0)[:, None])
    ratio = tl.where(usable[:, None], ratio, 0.0)
    root = tl.sqrt_rn(ratio)
    wide = signed[:, None]
    root = tl.where(wide, root * 127.0, tl.sqrt_rn(root) * 255.0)
    code = tl.minimum(root.to(tl.int32), tl.where(wide, 126, 254))
    at = table + code + tl.where(wide, 256, 0)
    low = tl.load(at)
    high = tl.load(at + 1)
    mixed = (bits ^ (place * PLACE)[None, :]) * MIX_1
    mixed = (mixed ^ (mixed >> 15)) * MIX_2
    chance = ((mixed >> 16) & 0x3FF).to(tl.float32) * 0.0009765625 + 0.00048828125
    if values.dtype.element_ty == tl.bfloat16:
        chance = chance * 0.5 + 0.25
    code += (ratio - low > chance * (high - low)).to(tl.int32)
    code = tl.where((code == 0) & (ratio > 0.0) & (wide == 0), 1, code)
    code += tl.where(negative, 128, 0)
    tl.store(rows + 4 + row[:, None] * ROW + place[None, :], code.to(tl.uint8), mask=inside)
    scales = rows.to(tl.pointer_type(tl.float32)) + row * (ROW // 4)
    tl.store(scales, tl.where(signed, -scale, scale), mask=row < num_rows)


def _decode_kernel(
    values: tl.tensor,
    rows: tl.tensor,
    table: tl.tensor,
    num_rows: tl.tensor,
    TILE: tl.constexpr = _TILE,
    BLOCK: tl.constexpr = BLOCK,
    ROW: tl.constexpr = STATE_ROW_BYTES,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None]
    scales = rows.to(tl.pointer_type(tl.float32)) + row * (ROW // 4)
    scale = tl.load(scales, mask=row < num_rows, other=0.0)
    signed = (scale.to(tl.int32, bitcast=True) < 0)[:, None]
    code = tl.load(rows + 4 + row[:, None] * ROW + place[None, :], mask=inside, other=0).to(tl.int32)
    magnitude = tl.load(table + tl.where(signed, (code & 127) + 256, code))
    out = magnitude * tl.abs(scale)[:, None]
    out = tl.where(signed & (code > 127), -out, out)
    to = values + row[:, None] * BLOCK + place[None, :]
    tl.store(to, out.to(values.dtype.element_ty), mask=inside)
