"""What is sent between ranks: codecs that write the elements of a lane as rows, one row per rank.

A codec has no state and runs no collective. Gathers and reduces use it the same way:

    gather    encode this rank's shard into its row, all-gather the rows, decode them into the full buffer
    reduce    encode one row per receiving rank, exchange the rows, sum the received ones

`PlainWire` sends values as they are, cast to one dtype: its rows are the flat buffer itself, so a gather is
in place and nothing is decoded. `BlockWire` sends blocks of int8 with one scale each. To add a codec,
implement `Wire`, return it from `parameter_wire` or `gradient_wire`, and let `LaneDtypes` count its bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch

from fullshard.engine.quantize import add_rows, pack, unpack
from fullshard.precision import LaneDtypes, packed_bytes


class Wire(Protocol):
    in_place: bool  # rows are the flat buffer of values itself: nothing is decoded

    def rows(self, num_rows: int, num_elements: int, device: torch.device) -> torch.Tensor:
        """Memory for encoded rows of so many elements each."""
        ...

    def encode(self, values: torch.Tensor, rows: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Write rows of values. With a residual, what rounding leaves out is kept there for the next time."""
        ...

    def decode(self, rows: torch.Tensor, values: torch.Tensor) -> None: ...

    def mean(self, rows: torch.Tensor, divisor: float, out: torch.Tensor) -> torch.Tensor:
        """The sum of received rows divided by `divisor`, accumulated in the dtype of `out` or a wider one."""
        ...

    def rounds_once(self, rows: torch.Tensor, divisor: float) -> bool:
        """Whether `mean` into a narrower dtype is the mean in fp32, rounded."""
        ...


class PlainWire:
    in_place = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def rows(self, num_rows: int, num_elements: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_rows, num_elements, dtype=self.dtype, device=device)

    def encode(self, values: torch.Tensor, rows: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        rows.copy_(values)

    def decode(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        pass

    def mean(self, rows: torch.Tensor, divisor: float, out: torch.Tensor) -> torch.Tensor:
        if len(rows) == 1:
            out.copy_(rows[0])
        elif divisor == len(rows):
            return torch.mean(rows, 0, dtype=out.dtype, out=out)  # one kernel instead of two
        else:
            torch.sum(rows, 0, dtype=out.dtype, out=out)
        return out if divisor == 1 else out.mul_(1.0 / divisor)

    def rounds_once(self, rows: torch.Tensor, divisor: float) -> bool:
        return rows.is_cuda and divisor == len(rows)  # one kernel; a CPU rounds the sum, then the quotient


class BlockWire:
    """8-bit blocks, see `quantize`. A block with a value that is not finite arrives as NaN."""

    in_place = False

    def rows(self, num_rows: int, num_elements: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_rows, packed_bytes(num_elements), dtype=torch.uint8, device=device)

    def encode(self, values: torch.Tensor, rows: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        pack(values, rows, residual)

    def decode(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        unpack(rows, values)

    def mean(self, rows: torch.Tensor, divisor: float, out: torch.Tensor) -> torch.Tensor:
        add_rows(rows, out, 1.0 / divisor)
        return out

    def rounds_once(self, rows: torch.Tensor, divisor: float) -> bool:
        return False


def parameter_wire(dtypes: LaneDtypes) -> Wire:
    return BlockWire() if dtypes.eight_bit_gather else PlainWire(dtypes.compute)


def gradient_wire(dtypes: LaneDtypes) -> Wire:
    return BlockWire() if dtypes.eight_bit_wire else PlainWire(dtypes.packed)


def parameter_wire_across(dtypes: LaneDtypes) -> Wire | None:
    """Between nodes, where it is another than inside them; what arrives is decoded before it goes on."""
    return BlockWire() if dtypes.eight_bit_gather_across else None


def gradient_wire_across(dtypes: LaneDtypes) -> Wire:
    """Between nodes, for the sums of each."""
    return BlockWire() if dtypes.eight_bit_across else PlainWire(dtypes.packed_across)


def gradient_wire_back(dtypes: LaneDtypes) -> Wire:
    """Of the sum over nodes, on its way back to replicas."""
    return BlockWire() if dtypes.eight_bit_across else PlainWire(dtypes.packed_back)
