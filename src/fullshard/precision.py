"""Dtype at rest, in compute and on the wire.

A lane has four dtypes: `rest` (the shard, what the optimizer sees), `compute` (the full value),
`wire` (gradients between ranks) and `sum` (what gradients are added up in).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.errors import OptionError


@dataclass(frozen=True)
class Precision:
    """How a run computes. None means: as the parameter is.

    compute: dtype of the full value, and of floating point inputs of units.
    wire:    dtype of gradients between ranks; None sends them as computed.
    reduce:  dtype in which gradients are summed; never narrower than fp32 unless said here.
    outputs: dtype of the model's floating point outputs; None leaves them.
    """

    compute: torch.dtype | None = None
    wire: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    outputs: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("compute", "wire", "reduce", "outputs"):
            value = getattr(self, field)
            if value is None and field != "reduce":
                continue
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise OptionError(
                    f"Precision.{field} is {value!r}, which is not a floating point dtype",
                    "Give a torch dtype such as torch.bfloat16.",
                )


@dataclass(frozen=True)
class LaneDtypes:
    """The four dtypes of one lane."""

    rest: torch.dtype
    compute: torch.dtype
    wire: torch.dtype
    sum: torch.dtype

    @property
    def narrowest_bytes(self) -> int:
        return min(dtype.itemsize for dtype in (self.rest, self.compute, self.wire))


PRESETS = {
    "fp32": Precision(),
    "bf16": Precision(compute=torch.bfloat16),
    "fp16": Precision(compute=torch.float16),
}


def parse(precision: str | Precision) -> Precision:
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, str) and precision in PRESETS:
        return PRESETS[precision]
    raise OptionError(
        f"unknown precision {precision!r}",
        f"Choose one of {', '.join(map(repr, PRESETS))}, or give an fs.Precision.",
    )


def lane_dtypes(dtype: torch.dtype, trainable: bool, precision: Precision) -> LaneDtypes:
    """Resolve one lane. Only real floating point values are ever cast.

    Trainable low-precision parameters get fp32 masters under mixed precision: an update smaller
    than half a bf16 step would be lost every time. Frozen ones stay as they are: nothing updates
    them, and an fp32 copy of a frozen base would double its memory.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return LaneDtypes(dtype, dtype, dtype, dtype)
    rest, compute = dtype, precision.compute or dtype
    if precision.compute is not None and trainable and dtype.itemsize < 4:
        rest = torch.float32
    total = torch.float64 if rest == torch.float64 else precision.reduce
    return LaneDtypes(rest, compute, precision.wire or compute, total)
