"""A copy of a rank's values in host memory, so that training may go on while they are written.

The buffer is kept from one save to the next: memory that was never touched costs as much to get as to copy
into, and page-locked memory, which a device copies into at full speed, far more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from fullshard.checkpoint.contents import Held
from fullshard.plan.layout import round_up

_ALIGN_BYTES = 64


class HostCopy:
    """One rank's buffer for background saves."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, held: Sequence[Held]) -> None:
        """From here on these values are copies, in the dtype that they are stored in."""
        sizes = [round_up((h.stop - h.start) * h.tensor.dtype.itemsize, _ALIGN_BYTES) for h in held]
        devices = {h.values.device for h in held if h.values.device.type == "cuda"}
        self._throttle(sum(sizes), locked=bool(devices))
        at = 0
        for h, size in zip(held, sizes, strict=True):
            place = self._buffer[at : at + (h.stop - h.start) * h.tensor.dtype.itemsize].view(h.tensor.dtype)
            h.values = place.copy_(h.values, non_blocking=True)
            at += size
        for device in devices:
            torch.cuda.synchronize(device)

    def _throttle(self, size_bytes: int, locked: bool) -> None:
        if self._buffer.numel() >= size_bytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
        self._buffer = torch.from_numpy(np.empty(size_bytes, np.uint8))  # numpy asks for huge pages
        if locked:
            # Not torch's pin_memory: it rounds up to a power of two, up to twice what is needed.
            cuda, place = torch.cuda.cudart(), self._buffer.data_ptr()  # type: ignore[no-untyped-call]
            if int(cuda.cudaHostRegister(place, size_bytes, 0)) == 0:  # else the copy is slower, and right
                weakref.finalize(self._buffer, cuda.cudaHostUnregister, place)
