"""A copy of a rank's values in host memory, so that training continues while they are written.

The buffer is reused by the next save: allocating fresh memory costs as much as copying into it, and
page-locking it, so that a device copies at full speed, costs far more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.checkpoint.saving.contents import LocalSlice
from fullshard.host_memory import page_locked, unlocked
from fullshard.plan.layout import round_up

_ALIGN_BYTES = 64


class HostCopy:
    """The host buffer of one rank's background saves."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, slices: Sequence[LocalSlice]) -> None:
        """Replace the values of these slices by copies, in the dtype in which they are stored."""
        sizes = _sizes(slices)
        devices = {s.values.device for s in slices if s.values.device.type == "cuda"}
        self._reserve(sum(sizes), locked=bool(devices))
        at = 0
        for s, size in zip(slices, sizes, strict=True):
            place = self._buffer[at : at + (s.stop - s.start) * s.tensor.dtype.itemsize].view(s.tensor.dtype)
            s.values = place.copy_(s.values, non_blocking=True)
            at += size
        for device in devices:
            torch.cuda.synchronize(device)

    def missing_bytes(self, slices: Sequence[LocalSlice]) -> int:
        """What copies of these take beyond the buffer that is there."""
        return max(0, sum(_sizes(slices)) - self._buffer.numel())

    def _reserve(self, size_bytes: int, locked: bool) -> None:
        if self._buffer.numel() >= size_bytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is allocated
        self._buffer = page_locked(size_bytes) if locked else unlocked(size_bytes)


def _sizes(slices: Sequence[LocalSlice]) -> list[int]:
    return [round_up((s.stop - s.start) * s.tensor.dtype.itemsize, _ALIGN_BYTES) for s in slices]
