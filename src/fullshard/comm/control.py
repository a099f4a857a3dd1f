"""What ranks say to each other outside a step: objects, errors, who is missing.

A ControlGroup has a process group of its own: a background thread may use it while a step's collectives run.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fullshard.comm import groups
from fullshard.comm.groups import Comm, as_bytes, error_fields, new_group, raise_first_error
from fullshard.environment import launch
from fullshard.errors import CheckpointError, FullshardError, Stalled

T = TypeVar("T")
S = TypeVar("S")
_POLL = timedelta(seconds=1)
_GONE_S = 3.0  # what the data of a rank that left in good order gets to arrive


class ControlGroup:
    """All ranks of one model, talking on the host. One thread at a time."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        members = comm.world.members
        self.ranks = len(members)
        self.index = members.index(comm.world_rank)
        self.is_first = self.index == 0
        self._group: Any = None
        self.host_copy: Any = None  # the buffer of background saves, kept for the next one
        if self.ranks > 1:
            timeout = timedelta(seconds=launch().stall_timeout_s)
            self._group = new_group(members, backend="gloo", timeout=timeout)

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if self.ranks == 1:
            return [value]
        return [pickle.loads(said) for said in self._gathered(pickle.dumps(value))]

    def gather_object(self, value: T) -> list[T] | None:
        """Every rank's value, by rank, on the first rank alone."""
        if self.ranks == 1:
            return [value]
        everyone = self._gathered(pickle.dumps(value))
        return [pickle.loads(said) for said in everyone] if self.is_first else None

    def broadcast_object(self, value: T) -> T:
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
        everyone = self.all_gather_object((error_fields(problem), said))
        raise_first_error(problem, self._comm.world.members, [error for error, _ in everyone])
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
        return [str(p) for p in self._comm.recorder.look() if p is not None and (not p.alive or p.left)]


class World:
    """All ranks of a model that is tensor-parallel as well: its Comm's, with the group of each beside it."""

    def __init__(self, comm: Comm, ranks: list[int]) -> None:
        self._rows = dict(zip(comm.members, comm.all_gather_object(ranks), strict=True))
        self.members = self.tp_ranks_of(comm.members)
        self._group = new_group(self.members, backend="gloo")

    def tp_ranks_of(self, ranks: Sequence[int]) -> list[int]:
        """The tensor-parallel groups of these ranks, together."""
        return sorted({r for rank in ranks for r in self._rows[rank]})

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's plain object, by rank."""
        gathered: list[Any] = [None] * len(self.members)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def broadcast(self, values: torch.Tensor) -> None:
        """The first rank's values, in place, on every rank."""
        if values.numel():
            target = values.cpu().contiguous()
            dist.broadcast(as_bytes(target), src=self.members[0], group=self._group)
            values.copy_(target)


def control_group(comm: Comm) -> ControlGroup:
    """The council of a model's ranks; made when first asked for, by all ranks together."""
    found = comm.__dict__.get("_control_group_object")
    if found is None:
        found = comm.__dict__["_control_group_object"] = ControlGroup(comm)
    return found


def start() -> None:
    """The default process group, if there is none.

    One that we started ends with the process. So does a script's own of gloo, if the script does not end it:
    our groups beside it have threads of their own, which would abort the exit now and then.
    """
    if groups.start() or dist.get_backend() == "gloo":
        end_groups_at_exit()


_leavers: set[int] = set()  # processes, and not those that they fork: these have no part in the groups


def end_groups_at_exit() -> None:
    """For groups that the script did not start, and so does not end."""
    _leavers.add(os.getpid())


@atexit.register  # with the import, and so early: what a script does at exit comes before it
def _end_unless_failed() -> None:
    failed = hasattr(sys, "last_value")  # then ranks may still be in a collective, and NCCL would wait for it
    if os.getpid() in _leavers and not failed:
        end_groups()


def end_groups() -> None:
    """Left open, gloo's threads may abort the exit of a process that did all its work."""
    if dist.is_initialized():
        dist.destroy_process_group()


def raise_together_first(
    error: FullshardError | None, grid: torch.Tensor | None, beside: list[int] | None = None
) -> None:
    """Before there are groups of our own: if one rank failed, all that called raise the same exception.

    In a tensor-parallel model the ranks of the grid tell each other first, then each its group beside it.
    """
    ranks = dist.get_world_size()
    members = list(range(ranks)) if grid is None else sorted(int(r) for r in grid.flatten())
    rounds = [members] if beside is None or grid is None else [members, beside]
    for among in rounds:
        group = None if len(among) == ranks else new_group(among)
        said: list[Any] = [None] * len(among)
        if len(among) > 1:
            dist.all_gather_object(said, error_fields(error), group=group)
        try:
            raise_first_error(error, among, said)
        except FullshardError as found:
            error = found
    if error is not None:
        raise error


def all_gather_object_first(value: T, grid: torch.Tensor) -> list[T]:
    """Before there are groups of our own: what every rank of the grid says, by rank."""
    members = sorted(int(r) for r in grid.flatten())
    said: list[Any] = [value] * len(members)
    if len(members) > 1:
        group = None if len(members) == dist.get_world_size() else new_group(members)
        dist.all_gather_object(said, value, group=group)
    return said
