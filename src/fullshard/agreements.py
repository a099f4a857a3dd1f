"""What ranks say to each other outside a step: objects, errors, who is missing.

A Council has a group of its own, so that a background thread may use it while the step's collectives run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.collectives import Comm, new_group, raise_first, spoken
from fullshard.errors import CheckpointError, FullshardError, Stalled
from fullshard.world import launch

T = TypeVar("T")


class Council:
    """All ranks of one model, talking on the host. One thread at a time."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.ranks = comm.all_ranks
        self.index = comm.members.index(comm.world_rank)
        self.is_first = self.index == 0
        self._group: Any = None
        self.under_way: Any = None  # a background save
        if self.ranks > 1:
            timeout = timedelta(seconds=launch().stall_timeout_s)
            self._group = dist.new_group(
                comm.members, backend="gloo", use_local_synchronization=True, timeout=timeout
            )

    def tell(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if self.ranks == 1:
            return [value]
        gathered: list[Any] = [None] * self.ranks
        self._talk(lambda: dist.all_gather_object(gathered, value, group=self._group))
        return gathered

    def to_first(self, value: T) -> list[T] | None:
        """Every rank's value, by rank, on the first rank alone."""
        if self.ranks == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.ranks if self.is_first else None
        first = self._comm.members[0]
        self._talk(lambda: dist.gather_object(value, gathered, dst=first, group=self._group))
        return gathered

    def from_first(self, value: T) -> T:
        """The first rank's value on every rank."""
        if self.ranks == 1:
            return value
        box: list[Any] = [value]
        first = self._comm.members[0]
        self._talk(lambda: dist.broadcast_object_list(box, src=first, group=self._group))
        return box[0]  # type: ignore[no-any-return]

    def together(self, work: Callable[[], T], what: str) -> T:
        """Run `work` on every rank. If it raises on any, all raise the same error, with the rank named."""
        result, problem = None, None
        try:
            result = work()
        except FullshardError as error:
            problem = error
        except Exception as error:  # noqa: BLE001  one rank alone must not go its own way
            problem = CheckpointError(f"{type(error).__name__} while {what}: {error}", "See its cause.")
            problem.__cause__ = error
        raise_first(problem, self._comm.members, self.tell(spoken(problem)))
        return result  # type: ignore[return-value]

    def _talk(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            time.sleep(0.5)  # a rank that died with the connection is a zombie or gone by then
            gone = [str(p) for p in self._comm.records.look() if p is not None and (not p.alive or p.left)]
            raise Stalled(
                f"the other ranks do not answer: {'; '.join(gone) or str(error).splitlines()[0]}",
                "A rank has died or was stopped; look at its own output.",
            ) from error


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
