"""Large rows between ranks over gloo, as several messages in flight, which use both directions of a link.

gloo's all-gather and all-to-all do not: two hosts that sent each other 4 MB at 100 Mbit/s each way did so at
57 to 75 and at 48 Mbit/s, in eight pieces at 95. A piece is an all-to-all in which every rank sends to one
other and receives from one. Not messages from rank to rank, which are as fast in one piece: gloo does not
report when these are over, so nobody could watch the other ranks while waiting. Not inside a node, where a
message costs 0.1 ms and hides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions

_MESSAGES = 8  # in flight per row, as many as were needed; over all peers
_SMALLEST_BYTES = 2**16  # of a piece: below it, another message takes longer than it hides
_OPTIONS = AllToAllOptions()
_OPTIONS.asyncOp = True


class Messages:
    """Operations of a group, waited for as one."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> None:
        """A timeout counts for each of them. Those that are over are not waited for again."""
        while self._works:
            self._works[-1].wait(*(() if timeout is None else (timeout,)))
            self._works.pop()


def is_gloo(group: Any) -> bool:
    return str(dist.get_backend(group)) == "gloo"


def cuts(row_bytes: int, ranks: int) -> list[tuple[int, int]]:
    """Where each row is cut into pieces; empty if one collective of all ranks serves as well. Pure."""
    pieces = min(_MESSAGES // (ranks - 1), row_bytes // _SMALLEST_BYTES)
    if pieces * (ranks - 1) < 2:
        return []
    bounds = [row_bytes * piece // pieces for piece in range(pieces + 1)]
    return list(itertools.pairwise(bounds))


def exchange(
    group: Any, rank: int, received: torch.Tensor, sent: Sequence[torch.Tensor], pieces: list[tuple[int, int]]
) -> Messages:
    """`sent[r]` goes to rank r, whose row for this one arrives in `received[r]`; as bytes. Own rows stay."""
    ranks, works = len(received), []
    for start, stop in pieces:
        for distance in range(1, ranks):
            target, source = (rank + distance) % ranks, (rank - distance) % ranks
            incoming, outgoing = ([0] * ranks for _ in range(2))
            incoming[source] = outgoing[target] = stop - start
            works.append(
                group.alltoall_base(
                    received[source][start:stop], sent[target][start:stop], incoming, outgoing, _OPTIONS
                )
            )
    works.reverse()  # the first is waited for first
    return Messages(works)
