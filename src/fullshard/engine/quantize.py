"""8-bit values on the wire: blocks of int8 with one fp32 scale each.

A row is bytes, so that one collective moves values and scales: n int8 values, then a scale for each block of
256. The scales are padded with zeros to a multiple of four, so that every row begins at a multiple of 16
bytes and a GPU reads it in wide steps.

A scale is absmax / 127 with its last 7 bits cut off. Then q * scale has at most 24 bits and is exact in fp32:
whether a product is fused with a sum does not matter, the CPU and the GPU get the same bits, and packing an
unpacked row gives that row again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fullshard.engine.triton_kernels import compile_kernels, launch
from fullshard.precision import BLOCK, ROW_ALIGN_BYTES, packed_bytes

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_TINY = torch.finfo(torch.float32).tiny  # the smallest scale; its reciprocal is finite
_KEPT_BITS = -128  # a scale without its last 7 bits
_STEP = 8454661 / 2**30  # 1 / 127, rounded up in fp32: scale * 127 * _STEP is not less than scale
_ROUND = 12582912.0  # 1.5 * 2**23: what is added to it keeps no bits behind the point, ties to even
_ROUND_BITS = 0x4B400000  # the same as an integer: a small q added to these bits is a q added to _ROUND
_SENT = (torch.float32, torch.bfloat16, torch.float16)
_KEPT = (torch.float32, torch.bfloat16)
_RECEIVED = (*_SENT, torch.float64)


def pack(values: Tensor, packed: Tensor, residual: Tensor | None = None) -> None:
    """Quantise rows; `residual` is added to them first and then holds what their bytes do not say.

    A block with a value that is not finite becomes NaN throughout and leaves no residual. A block below the
    smallest normal number is sent as zeros and stays in the residual.
    """
    _check("values", values, 2, _SENT)
    rows, elements = values.shape
    row_bytes = _check_packed(packed, rows, elements, values)
    if residual is not None:
        _check("residual", residual, 2, _KEPT)
        if residual.shape != values.shape or residual.device != values.device:
            raise ValueError(f"residual {_described(residual)} does not match values {_described(values)}")
    if not elements:
        return
    if not values.is_cuda or (kernels := _kernels()) is None:
        _pack(values, packed, residual)
    else:
        tile = _PACK_TILE if residual is None else _FEEDBACK_TILE
        grid = (-(-elements // tile), rows)  # triton launches nothing for no rows
        launch(
            kernels.pack, grid, _PACK_OPTIONS, values, packed, residual, elements, row_bytes, tile // BLOCK
        )


def unpack(packed: Tensor, out: Tensor) -> None:
    """Each value q * scale, computed in fp32 and rounded once, to the dtype of `out`."""
    _check("out", out, 2, _RECEIVED)
    rows, elements = out.shape
    row_bytes = _check_packed(packed, rows, elements, out)
    if not elements:
        return
    if not out.is_cuda or (kernels := _kernels()) is None:
        _unpack(packed, out)
    else:
        tile = _UNPACK_BYTES // out.itemsize
        grid = (-(-elements // tile), rows)
        launch(kernels.unpack, grid, _UNPACK_OPTIONS, packed, out, elements, row_bytes, tile // BLOCK)


def add_rows(packed: Tensor, out: Tensor, factor: float) -> None:
    """The sum of all rows times `factor`, added in fp32 from row 0 on: the same bits on every device."""
    _check("out", out, 1, (torch.float32,))
    _check("packed", packed, 2, (torch.uint8,))
    rows, elements = len(packed), len(out)
    row_bytes = _check_packed(packed, rows, elements, out)
    if not elements:
        return
    if not out.is_cuda or (kernels := _kernels()) is None:
        _add_rows(packed, out, factor)
    else:
        grid = (-(-elements // _ADD_TILE),)
        launch(kernels.add_rows, grid, _ADD_OPTIONS, packed, out, float(factor), rows, elements, row_bytes)


def _check(name: str, tensor: Tensor, dimensions: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be one of {', '.join(map(str, dtypes))}, not {_described(tensor)}")
    if tensor.dim() != dimensions or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, with {dimensions} dimensions, not {_described(tensor)}")


def _check_packed(packed: Tensor, rows: int, elements: int, other: Tensor) -> int:
    """The bytes of a row of `packed`, if it holds these rows and is where `other` is."""
    row_bytes = packed_bytes(elements)
    if (
        packed.dtype is not torch.uint8
        or packed.shape != (rows, row_bytes)
        or packed.device != other.device
        or not packed.is_contiguous()
    ):
        raise ValueError(
            f"packed must be a contiguous uint8 tensor of shape {(rows, row_bytes)} on {other.device} for "
            f"{rows} rows of {elements} elements, not {_described(packed)}"
        )
    if packed.data_ptr() % ROW_ALIGN_BYTES:
        raise ValueError(f"packed must begin at a multiple of {ROW_ALIGN_BYTES} bytes")
    return row_bytes


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"


# With torch alone: the CPU, and CUDA without triton. What the kernels below must give, bit by bit.


def _parts(packed: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Views of packed rows: the values in blocks, and the slots for scales with their padding."""
    values = packed[:, :elements].view(torch.int8)
    return values.view(len(packed), elements // BLOCK, BLOCK), packed[:, elements:].view(torch.float32)


@torch.no_grad()
def _pack(values: Tensor, packed: Tensor, residual: Tensor | None) -> None:
    rows, elements = values.shape
    blocks = elements // BLOCK
    y = values.to(torch.float32, copy=True)
    if residual is not None:
        y += residual
    y = y.view(rows, blocks, BLOCK)
    absmax = y.abs().amax(-1, keepdim=True)
    broken = ~absmax.isfinite()
    y.masked_fill_(broken, 0)
    scale = _scale(absmax.masked_fill_(broken, 0))
    inverse = (1.0 / scale).masked_fill_(scale == 0, 0)
    # No clamp: the scale is so near absmax / 127 that absmax, the largest, comes out as 127.
    q = y.mul(inverse).add_(_ROUND).sub_(_ROUND)
    packed_values, packed_scales = _parts(packed, elements)
    packed_values.copy_(q)
    if residual is not None:
        residual.copy_(y.sub_(q.mul_(scale)).view(rows, elements))
    packed_scales[:, :blocks] = scale.masked_fill_(broken, torch.nan).squeeze(-1)
    packed_scales[:, blocks:] = 0


def _scale(absmax: Tensor) -> Tensor:
    scale = (absmax * _STEP).clamp_(min=_TINY)
    scale.view(torch.int32).bitwise_and_(_KEPT_BITS)
    return scale.masked_fill_(absmax < _TINY, 0)


@torch.no_grad()
def _unpack(packed: Tensor, out: Tensor) -> None:
    values, scales = _parts(packed, out.shape[1])
    out.copy_((values * scales[:, : values.shape[1], None]).view(out.shape))


@torch.no_grad()
def _add_rows(packed: Tensor, out: Tensor, factor: float) -> None:
    blocks = len(out) // BLOCK
    out.zero_()
    total = out.view(blocks, BLOCK)
    for values, scales in zip(*_parts(packed, len(out)), strict=True):
        total += values * scales[:blocks, None]
    out *= factor


# With triton, which is imported when the first CUDA tensor comes. One launch a call.

_WARPS = 8
_PACK_TILE = 16 * BLOCK  # 16 elements a thread: one store of 16 bytes
_FEEDBACK_TILE = 8 * BLOCK  # 8 elements a thread: one store of 16 bytes to a residual in bf16
_UNPACK_BYTES = 16 * 32 * _WARPS  # one store of 16 bytes a thread, whatever the dtype
_ADD_TILE = 8 * BLOCK  # with 4 warps: one load of 16 bytes a thread and row
# Not fused: a product inside the sum that rounds would not be rounded before it.
_PACK_OPTIONS = {"num_warps": _WARPS, "enable_fp_fusion": False}
_UNPACK_OPTIONS = {"num_warps": _WARPS}
_ADD_OPTIONS = {"num_warps": 4}


class _Kernels(NamedTuple):
    pack: Any
    unpack: Any
    add_rows: Any


@functools.cache
def _kernels() -> _Kernels | None:
    """None where triton is missing."""
    compiled = compile_kernels(globals(), _pack_kernel, _unpack_kernel, _add_kernel)
    return None if compiled is None else _Kernels(*compiled)


def _pack_kernel(
    values: tl.tensor,
    packed: tl.tensor,
    residual: tl.tensor,
    elements: tl.tensor,
    row_bytes: tl.tensor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    STEP: tl.constexpr = _STEP,
    TINY: tl.constexpr = _TINY,
    ROUND: tl.constexpr = _ROUND,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * TILE
    block = tl.arange(0, TILE)
    inside = (first + block < elements // BLOCK)[:, None]
    spread = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = row * elements + first * BLOCK
    y = tl.load(values + start + spread, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        y += tl.load(residual + start + spread, mask=inside, other=0.0).to(tl.float32)
    # As integers, floats without a sign keep their order, and what is not finite comes last.
    magnitude = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = magnitude < 0x7F800000
    y = tl.where(finite[:, None], y, 0.0)
    absmax = tl.where(finite, magnitude, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(absmax * STEP, TINY)
    scale = (scale.to(tl.int32, bitcast=True) & -128).to(tl.float32, bitcast=True)
    some = absmax >= TINY
    inverse = tl.where(some, tl.div_rn(1.0, scale), 0.0)
    scale = tl.where(some, scale, 0.0)
    shifted = y * inverse[:, None] + ROUND
    to = packed + row * row_bytes
    # The last byte of ROUND + q is q.
    tl.store(to + first * BLOCK + spread, shifted.to(tl.int32, bitcast=True).to(tl.uint8), mask=inside)
    if residual is not None:
        y -= (shifted - ROUND) * scale[:, None]
        tl.store(residual + start + spread, y.to(residual.dtype.element_ty), mask=inside)
    bits = tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000)
    # Blocks outside were read as zeros: their scales are the zeros of the padding.
    scales = (to + elements).to(tl.pointer_type(tl.int32)) + first
    tl.store(scales + block, bits, mask=first + block < (row_bytes - elements) // 4)


def _unpack_kernel(
    packed: tl.tensor,
    out: tl.tensor,
    elements: tl.tensor,
    row_bytes: tl.tensor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    ROUND: tl.constexpr = _ROUND,
    ROUND_BITS: tl.constexpr = _ROUND_BITS,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * TILE
    block = tl.arange(0, TILE)
    inside = first + block < elements // BLOCK
    spread = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = packed + row * row_bytes
    q = tl.load(start + first * BLOCK + spread, mask=inside[:, None], other=0)
    scales = (start + elements).to(tl.pointer_type(tl.float32)) + first
    scale = tl.load(scales + block, mask=inside, other=0.0)
    # A float without the slow conversion from integers: q added to the bits of ROUND, less ROUND.
    value = q.to(tl.int8, bitcast=True).to(tl.int32) + ROUND_BITS
    value = value.to(tl.float32, bitcast=True) - ROUND
    value = (value * scale[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * elements + first * BLOCK + spread, value, mask=inside[:, None])


def _add_kernel(
    packed: tl.tensor,
    out: tl.tensor,
    factor: tl.tensor,
    rows: tl.tensor,
    elements: tl.tensor,
    row_bytes: tl.tensor,
    TILE: tl.constexpr = _ADD_TILE // BLOCK,
    BLOCK: tl.constexpr = BLOCK,
    AHEAD: tl.constexpr = 4,
    ROUND: tl.constexpr = _ROUND,
    ROUND_BITS: tl.constexpr = _ROUND_BITS,
) -> None:
    first = tl.program_id(0).to(tl.int64) * TILE
    block = tl.arange(0, TILE)
    inside = first + block < elements // BLOCK
    spread = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = packed + first * BLOCK
    scales = packed + elements + first * 4
    stride = row_bytes.to(tl.int64)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for row in tl.range(0, rows, AHEAD):
        # All loads come before the first sum, to be under way together. A row too many is read as zeros.
        q = ()  # type: tuple[Any, ...]
        scale = ()  # type: tuple[Any, ...]
        for k in tl.static_range(AHEAD):
            down = (row + k) * stride
            there = inside & (row + k < rows)
            q += (tl.load(values + down + spread, mask=there[:, None], other=0),)
            at = (scales + down).to(tl.pointer_type(tl.float32)) + block
            scale += (tl.load(at, mask=there, other=0.0),)
        for k in tl.static_range(AHEAD):
            value = q[k].to(tl.int8, bitcast=True).to(tl.int32) + ROUND_BITS
            total += (value.to(tl.float32, bitcast=True) - ROUND) * scale[k][:, None]
    tl.store(out + first * BLOCK + spread, total * factor, mask=inside[:, None])
