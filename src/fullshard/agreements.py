"""What ranks say to each other outside a step: objects, errors, who is missing.

A Council has a group of its own, so that a background thread may use it while the step's collectives run.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fullshard.collectives import Comm, new_group, raise_first, spoken
from fullshard.errors import CheckpointError, FullshardError, Stalled
from fullshard.world import launch

T = TypeVar("T")
S = TypeVar("S")
_POLL = timedelta(seconds=1)
_GONE_S = 3.0  # what the data of a rank that left in good order gets to arrive


class Council:
    """All ranks of one model, talking on the host. One thread at a time."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.ranks = comm.all_ranks
        self.index = comm.members.index(comm.world_rank)
        self.is_first = self.index == 0
        self._group: Any = None
        self.host_copy: Any = None  # the buffer of background saves, kept for the next one
        if self.ranks > 1:
            timeout = timedelta(seconds=launch().stall_timeout_s)
            self._group = dist.new_group(
                comm.members, backend="gloo", use_local_synchronization=True, timeout=timeout
            )

    def tell(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if self.ranks == 1:
            return [value]
        return [pickle.loads(said) for said in self._gathered(pickle.dumps(value))]

    def to_first(self, value: T) -> list[T] | None:
        """Every rank's value, by rank, on the first rank alone."""
        if self.ranks == 1:
            return [value]
        everyone = self._gathered(pickle.dumps(value))
        return [pickle.loads(said) for said in everyone] if self.is_first else None

    def from_first(self, value: T) -> T:
        """The first rank's value on every rank."""
        if self.ranks == 1:
            return value
        said = self._gathered(pickle.dumps(value if self.is_first else None))
        return pickle.loads(said[0])  # type: ignore[no-any-return]

    def together(self, work: Callable[[], T], what: str) -> T:
        """Run `work` on every rank. If it raises on any, all raise the same error, with the rank named."""
        return self.share(lambda: (work(), None), what)[0]

    def share(self, work: Callable[[], tuple[T, S]], what: str) -> tuple[T, list[S]]:
        """The same, for work that has something to say: its own result, and what every rank says."""
        result, said, problem = None, None, None
        try:
            result, said = work()
        except FullshardError as error:
            problem = error
        except Exception as error:  # noqa: BLE001  one rank alone must not go its own way
            problem = CheckpointError(f"{type(error).__name__} while {what}: {error}", "See its cause.")
            problem.__cause__ = error
        everyone = self.tell((spoken(problem), said))
        raise_first(problem, self._comm.members, [error for error, _ in everyone])
        return cast(T, result), [cast(S, theirs) for _, theirs in everyone]

    def _gathered(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        sizes = torch.empty(self.ranks, dtype=torch.int64)
        self._gather(sizes, torch.tensor([len(mine)]))
        longest = int(sizes.max())
        rows = torch.empty(self.ranks, longest, dtype=torch.uint8)
        self._gather(rows.view(-1), torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8))
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def _gather(self, rows: torch.Tensor, mine: torch.Tensor) -> None:
        # The group's own call: a background save goes on when the script ends its process groups. And waiting
        # step by step: the backend tells a rank only of neighbours that died, not of ranks behind them.
        work = self._group._allgather_base(rows, mine)
        begun, gone_since = time.monotonic(), 0.0
        while True:
            try:
                work.wait(_POLL)
                return
            except RuntimeError as error:
                now = time.monotonic()
                broken = "imed out" not in str(error) or now - begun > launch().stall_timeout_s
                if broken:
                    time.sleep(0.5)  # a rank that died with the connection is a zombie or gone by then
                gone = self._gone()
                gone_since = (gone_since or now) if gone else 0.0
                if broken or (gone and now - gone_since > _GONE_S):
                    raise Stalled(
                        f"the other ranks do not answer: {'; '.join(gone) or str(error).splitlines()[0]}",
                        "A rank has died or was stopped; look at its own output.",
                    ) from error

    def _gone(self) -> list[str]:
        """Ranks of this host that have died or left."""
        return [str(p) for p in self._comm.records.look() if p is not None and (not p.alive or p.left)]


def council(comm: Comm) -> Council:
    """The council of a model's ranks; made when first asked for, by all ranks together."""
    found = comm.__dict__.get("_council")
    if found is None:
        found = comm.__dict__["_council"] = Council(comm)
    return found


def raise_together_first(error: FullshardError | None, grid: torch.Tensor | None) -> None:
    """Before there are groups of our own: if one rank failed, all that called raise the same exception."""
    ranks = dist.get_world_size()
    members = list(range(ranks)) if grid is None else sorted(int(r) for r in grid.flatten())
    group = None if len(members) == ranks else new_group(members)
    said: list[Any] = [None] * len(members)
    if len(members) > 1:
        dist.all_gather_object(said, spoken(error), group=group)
    raise_first(error, members, said)
