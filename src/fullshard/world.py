"""Who we are: the only reader of the environment."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from fullshard.errors import OptionError


@dataclass(frozen=True)
class Launch:
    """What the launcher said about this process; a world of one when it said nothing."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    rendezvous: bool = False
    stall_timeout_s: float = 600.0


def launch() -> Launch:
    """Read torchrun's variables. A half-set environment is an error, not a guess."""
    stall = _number("FULLSHARD_STALL_TIMEOUT_S", 600.0)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if os.environ.get(name)]
    if not ({"RANK", "WORLD_SIZE"} & set(given)):
        return Launch(stall_timeout_s=stall)  # an address alone says nothing about ranks
    missing = [name for name in names if name not in given]
    rank, ranks = int(_number("RANK", 0)), int(_number("WORLD_SIZE", 1))
    if missing and not ("WORLD_SIZE" in given and ranks == 1):
        raise OptionError(
            f"the environment sets {', '.join(given)} but not {', '.join(missing)}",
            "Launch with torchrun, which sets all four, or unset them to run as a world of one.",
        )
    if not 0 <= rank < ranks:
        raise OptionError(
            f"the environment sets RANK={rank} and WORLD_SIZE={ranks}",
            "Launch with torchrun; ranks count from 0 to WORLD_SIZE - 1.",
        )
    return Launch(
        rank=rank,
        ranks=ranks,
        local_rank=int(_number("LOCAL_RANK", rank)),
        local_ranks=int(_number("LOCAL_WORLD_SIZE", ranks)),
        rendezvous=not missing,
        stall_timeout_s=stall,
    )


def compute_device(model_device: torch.device) -> torch.device:
    """Where shards live: the model's own device; a meta model goes to this rank's GPU, or the CPU."""
    if model_device.type == "meta":
        if torch.cuda.is_available():
            return torch.device("cuda", launch().local_rank % torch.cuda.device_count())
        return torch.device("cpu")
    if model_device.type == "cuda" and model_device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return model_device


def let_segments_grow() -> None:
    """Have CUDA's allocator grow its segments instead of adding new ones, unless the user decided himself.

    Full values, gradients and activations of different sizes come and go in turns, which leaves holes in
    segments of fixed size. With this, 2 to 22 % above the allocated peak was reserved (docs/benchmarks.md).
    """
    said = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if not said and change is not None and torch.cuda.is_available():
        change("expandable_segments:True")


def return_memory_to_system() -> None:
    """Give released host buffers back to the system (glibc; elsewhere nothing happens).

    Aligned blocks that come and go leave holes that older glibc does not use again: a run that held 25 MiB
    of tensors grew to 1500 MiB of resident memory. Asking for direct mappings instead (M_MMAP_THRESHOLD)
    made a step a quarter slower; a trim every few passes costs nothing that shows.
    """
    if _libc is not None:
        _libc.malloc_trim(0)


def _load_libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "malloc_trim") else None
    except OSError:
        return None


_libc = _load_libc()


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise OptionError(
            f"the environment variable {name} is {text!r}, not a number", "Launch with torchrun, or unset it."
        ) from None
