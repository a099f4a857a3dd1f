"""A copy of a rank's values in host memory, so that training continues while they are written.

The buffer is reused by the next save: allocating fresh memory costs as much as copying into it, and
page-locking it, so that a device copies at full speed, costs far more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from fullshard.checkpoint.saving.contents import LocalSlice
from fullshard.plan.layout import round_up

_ALIGN_BYTES = 64


class HostCopy:
    """The host buffer of one rank's background saves."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, slices: Sequence[LocalSlice]) -> None:
        """Replace the values of these slices by copies, in the dtype in which they are stored."""
        sizes = [round_up((s.stop - s.start) * s.tensor.dtype.itemsize, _ALIGN_BYTES) for s in slices]
        devices = {s.values.device for s in slices if s.values.device.type == "cuda"}
        self._reserve(sum(sizes), locked=bool(devices))
        at = 0
        for s, size in zip(slices, sizes, strict=True):
            place = self._buffer[at : at + (s.stop - s.start) * s.tensor.dtype.itemsize].view(s.tensor.dtype)
            s.values = place.copy_(s.values, non_blocking=True)
            at += size
        for device in devices:
            torch.cuda.synchronize(device)

    def _reserve(self, size_bytes: int, locked: bool) -> None:
        if self._buffer.numel() >= size_bytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is allocated
        self._buffer = torch.from_numpy(np.empty(size_bytes, np.uint8))  # numpy requests huge pages
        if locked:
            # Not torch's pin_memory: it rounds up to a power of two, up to twice what is needed.
            cuda, place = torch.cuda.cudart(), self._buffer.data_ptr()  # type: ignore[no-untyped-call]
            if (
                int(cuda.cudaHostRegister(place, size_bytes, 0)) == 0
            ):  # otherwise copies are slower, but correct
                weakref.finalize(self._buffer, cuda.cudaHostUnregister, place)
