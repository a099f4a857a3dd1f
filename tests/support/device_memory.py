"""The memory that steps need on a device, without one.

    with streams.watched(Meter()) as meter:
        train()
        meter.restart()
        train()
    assert meter.peak_bytes <= planned

What is memory of the host, and what of the device, is as in `streams`. Operators are not checked for races.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from streams import Memory, Stream, Watch


class Allocation(Memory):
    """Its size alone."""

    def __init__(self, storage: torch.UntypedStorage, owner: Stream) -> None:
        self.reference, self.size, self.owner = StorageWeakRef(storage), storage.nbytes(), owner


class Meter(Watch):
    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    def restart(self) -> None:
        self.peak_bytes = 0

    def _new_memory(self, storage: torch.UntypedStorage, owner: Stream, allocated: int) -> Memory:
        return Allocation(storage, owner)

    def _memory_of(self, storage: torch.UntypedStorage, stream: Stream, is_new: bool = False) -> Memory:
        found = super()._memory_of(storage, stream, is_new)
        if is_new:
            live = (memory.size for key, memory in self._memory.items() if key not in self._on_host)
            self.peak_bytes = max(self.peak_bytes, sum(live))
        return found

    def _free(self, memory: Memory) -> None:
        pass

    def _access(self, tensor: torch.Tensor, index: int, is_write: bool) -> None:
        pass

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)
