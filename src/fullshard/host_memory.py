"""Host memory that a GPU copies from and to at full speed."""

from __future__ import annotations

import warnings
import weakref

import numpy as np
import torch

_PAGE = 4096
_warned: list[int] = []  # sizes that could not be locked


def unlocked(size_bytes: int) -> torch.Tensor:
    """Bytes of ordinary memory, not initialized."""
    return torch.from_numpy(np.empty(size_bytes, np.uint8))  # numpy requests huge pages


def page_locked(size_bytes: int) -> torch.Tensor:
    """Bytes of page-locked memory, all zero.

    Not torch's pin_memory, which rounds up to a power of two and takes four times as long. Where pages cannot
    be locked, copies are slower, but correct.
    """
    array = np.empty(size_bytes + _PAGE, np.uint8)  # numpy requests huge pages
    start = -array.ctypes.data % _PAGE  # devices copy fastest from the start of a page
    memory = torch.from_numpy(array[start : start + size_bytes])
    if not size_bytes:
        return memory
    memory.fill_(0)  # by all threads: locking pages that exist is fast
    cuda, place = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    if int(cuda.cudaHostRegister(place, size_bytes, 0)) == 0:
        # The array lives as long as any view of the memory.
        weakref.finalize(array, cuda.cudaHostUnregister, place).atexit = False
    elif not _warned:
        _warned.append(size_bytes)
        warnings.warn(
            f"{size_bytes} bytes of host memory could not be page-locked: copies to the GPU are slower. "
            "Raise the limit of locked memory (ulimit -l).",
            stacklevel=2,
        )
    return memory
