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

    Not torch's pin_memory, which rounds up to a power of two and takes four times as long.
    """
    array = np.empty(size_bytes + _PAGE, np.uint8)  # numpy requests huge pages
    start = -array.ctypes.data % _PAGE  # devices copy fastest from the start of a page
    memory = torch.from_numpy(array[start : start + size_bytes])
    if not size_bytes:
        return memory
    memory.fill_(0)  # by all threads: locking pages that exist is fast
    if lock_pages(memory.data_ptr(), size_bytes):
        # The array lives as long as any view of the memory.
        weakref.finalize(array, unlock_pages, memory.data_ptr()).atexit = False
    return memory


def host_zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory for copies from and to this device, all zero."""
    if device.type != "cuda":
        return torch.zeros(num_elements, dtype=dtype)
    return page_locked(num_elements * dtype.itemsize).view(dtype)


def lock_pages(address: int, size_bytes: int) -> bool:
    """Whether it worked. Where it does not, copies are slower, but correct."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cuda.cudaHostRegister(address, size_bytes, 0)) == 0:
        return True
    if not _warned:
        _warned.append(size_bytes)
        warnings.warn(
            f"{size_bytes} bytes of host memory could not be page-locked: copies to the GPU are slower. "
            "Raise the limit of locked memory (ulimit -l).",
            stacklevel=3,
        )
    return False


def unlock_pages(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
