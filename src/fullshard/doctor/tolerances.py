"""How far two right computations of one tensor may lie apart.

Rounding errors of a computation of `depth` steps add up like a random walk, so a tolerance grows with the
square root of the depth, and with the coarsest dtype that values pass on the way.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

from fullshard.precision import LaneDtypes

# Of rounding units. In fp32 kernels may sum in another order; sums of coarser dtypes are fp32 inside kernels,
# and only what is stored rounds.
_MARGIN, _COARSE_MARGIN = 32, 4
_TF32 = 2.0**-11
_EIGHT_BIT = 1 / 254  # half a step of a block of 8-bit values
# A gradient that is zero but for rounding (of an attention's key bias) is compared with its unit's instead.
FLOOR = 1e-2


def rounding(dtype: torch.dtype) -> float:
    """Half a step between two numbers of a dtype, relative to them."""
    if dtype == torch.int8:
        return _EIGHT_BIT
    return float(torch.finfo(dtype).eps) / 2 if dtype.is_floating_point else 0.0


def coarsest(lanes: list[LaneDtypes], device: torch.device, gradients: bool) -> float:
    """The coarsest rounding that values of these lanes meet, with the wire for gradients."""
    dtypes: list[Any] = [dtype for lane in lanes for dtype in (lane.compute, lane.gather, lane.gather_across)]
    if gradients:
        dtypes += [dtype for lane in lanes for dtype in (lane.wire, lane.across, lane.sum)]
    units = [rounding(dtype) for dtype in dtypes if dtype is not None]
    matrices = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return max([*units, _TF32 if matrices else 0.0, rounding(torch.float32)])


def tolerance(unit: float, depth: int) -> float:
    margin = _MARGIN if unit <= rounding(torch.float32) else _COARSE_MARGIN
    return min(0.5, max(_MARGIN * rounding(torch.float32), margin * unit) * sqrt(max(1, depth)))


def difference(here: torch.Tensor, there: torch.Tensor, floor: float = 0.0) -> float:
    """The norm of the difference, relative to what it should be; infinite if only one is finite."""
    if here.shape != there.shape:
        return float("inf")
    if not here.numel():
        return 0.0
    a, b = here.detach().cpu(), there.detach().cpu()
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b.to(a.dtype)) else float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    apart = float(torch.where(same, torch.zeros_like(a), a - b).norm())
    scale = max(float(torch.where(b.isfinite(), b, torch.zeros_like(b)).norm()), floor)
    ratio = apart / scale if scale else float("inf")
    return ratio if ratio == ratio else float("inf")


def share_of_way(before: torch.Tensor, after: torch.Tensor, target: torch.Tensor) -> float | None:
    """How far a tensor has moved on the straight line towards another one, up to rounding; None if it has
    not, 0 if it moved no further than rounding does."""
    if before.shape != target.shape or not before.is_floating_point():
        return None
    moved, way = (after.double() - before.double()), (target.double() - before.double())
    length = float((way * way).sum())
    share = float((moved * way).sum()) / length if length else 0.0
    rounded = 4 * rounding(after.dtype) * float(after.double().norm())
    if float(moved.norm()) <= rounded:
        return 0.0  # an average of equal tensors
    apart = float((moved - share * way).norm())
    is_on_it = 0.0 < share <= 1.0 + 1e-3 and apart <= 1e-3 * float(moved.norm()) + rounded
    return share if is_on_it else None
