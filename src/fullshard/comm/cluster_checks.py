"""Do the ranks of a job exchange what they should, and how fast? For `fullshard doctor --cluster`.

Every function is collective: all ranks call it, in one order. Works with gloo on hosts and NCCL on GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.probe import job_device

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# What is summed by the backend, and what is only sent (as bytes, so any dtype).
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
SENT = (*SUMMED, torch.uint8, torch.int8)
_ELEMENTS = 1024  # per rank
_PAIR_BYTES = {"cpu": 2**21, "cuda": 2**26}


def wrong_collectives() -> list[str]:
    """Collectives whose result is not the known one on this rank: 'all-reduce of bfloat16', for example."""
    device, rank, ranks = job_device(), dist.get_rank(), dist.get_world_size()
    wrong = []
    for name, dtype, run, expected in _cases(device, rank, ranks):
        try:
            right = bool(torch.equal(run(), expected))
        except RuntimeError as error:  # not implemented by this backend: the same on all ranks
            if "not" not in str(error).lower() and "unsupported" not in str(error).lower():
                raise
            continue
        if not right:
            wrong.append(f"{name} of {str(dtype).removeprefix('torch.')}")
    return wrong


def _cases(
    device: torch.device, rank: int, ranks: int
) -> Iterator[tuple[str, torch.dtype, Callable[[], torch.Tensor], torch.Tensor]]:
    """Values are small integers, which every dtype sums exactly up to 2048 = 2^11 (fp16) or 256 (bf16)."""
    base = torch.arange(_ELEMENTS, device=device) % 3
    few = min(ranks, 40)  # of many ranks, the others add zeros: sums stay exact

    def own(dtype: torch.dtype, index: int) -> torch.Tensor:
        return (base + index % 2 if index < few else base * 0).to(dtype)

    def total(dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([own(torch.int64, index) for index in range(ranks)]).sum(0).to(dtype)

    def all_reduced(dtype: torch.dtype) -> torch.Tensor:
        values = own(dtype, rank)
        dist.all_reduce(values)
        return values

    def gathered(dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(ranks * _ELEMENTS, dtype=dtype, device=device)
        _all_gather(values, own(dtype, rank))
        return values

    def exchanged(dtype: torch.dtype) -> torch.Tensor:
        sent = torch.cat([own(dtype, rank + other) for other in range(ranks)])
        values = torch.empty_like(sent)
        dist.all_to_all_single(values, sent)
        return values

    def scattered(dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(_ELEMENTS, dtype=dtype, device=device)
        _reduce_scatter(values, own(dtype, rank).repeat(ranks))
        return values

    def broadcast(dtype: torch.dtype) -> torch.Tensor:
        values = own(dtype, rank)
        dist.broadcast(values, 0)
        return values

    for dtype in SUMMED:
        yield "all-reduce", dtype, partial(all_reduced, dtype), total(dtype)
        yield "reduce-scatter", dtype, partial(scattered, dtype), total(dtype)
    for dtype in SENT:
        parts = [own(dtype, index) for index in range(ranks)]
        yield "all-gather", dtype, partial(gathered, dtype), torch.cat(parts)
        swapped = torch.cat([own(dtype, other + rank) for other in range(ranks)])
        yield "all-to-all", dtype, partial(exchanged, dtype), swapped
        yield "broadcast", dtype, partial(broadcast, dtype), own(dtype, 0)


def rounds(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of ranks, such that each pair comes once and no rank twice in a round. Pure."""
    seats = list(range(ranks + ranks % 2))  # with an odd number, one pauses in each round
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < ranks]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def pair_rates(enough_s: float = 30.0) -> dict[tuple[int, int], float]:
    """By pair of ranks, bytes per second each way, of the pairs that this rank is in."""
    device, rank = job_device(), dist.get_rank()
    size = _PAIR_BYTES[device.type]
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    begun = time.perf_counter()
    found: dict[tuple[int, int], float] = {}
    for pairs in rounds(dist.get_world_size()):
        mine = next((pair for pair in pairs if rank in pair), None)
        best = min(_swap_s(mine, rank, sent, received, device) for _ in range(4))
        if mine is not None:
            found[mine] = size / max(best, 1e-9)
        late = torch.tensor(float(time.perf_counter() - begun > enough_s), device=device)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if bool(late):
            break
    return found


def _swap_s(
    pair: tuple[int, int] | None, rank: int, sent: torch.Tensor, received: torch.Tensor, device: torch.device
) -> float:
    """Seconds in which the two ranks of a pair have sent to each other."""
    meet(device)
    begun = time.perf_counter()
    if pair is not None:
        other = pair[1] if rank == pair[0] else pair[0]
        works = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(works):
            work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def meet(device: torch.device) -> None:
    """All ranks leave it at about the same time."""
    dist.all_reduce(torch.zeros((), device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_skew_s() -> float:
    """How far this host's clock is from the first rank's, give or take the time of a small exchange."""
    device = job_device()
    best = float("inf")
    for _ in range(5):
        meet(device)
        now = torch.tensor(time.time(), dtype=torch.float64, device=device)
        first = now.clone()
        dist.broadcast(first, 0)
        best = min(best, float(now - first), key=abs)
    return best
