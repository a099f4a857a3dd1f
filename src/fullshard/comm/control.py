"""Agreement between ranks on the host, outside a step: objects, errors, and which ranks are missing.

A ControlGroup has a process group of its own, so a background thread may use it while collectives of a step
run.
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
_GONE_S = 3.0  # how long data of a rank that left normally may still be in flight


class ControlGroup:
    """Collectives of objects on the host, over all ranks of one model. One thread at a time."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        members = comm.world.members
        self.ranks = len(members)
        self.index = members.index(comm.world_rank)
        self.is_first = self.index == 0
        self._group: Any = None
        self.host_copy: Any = None  # buffer of background saves, reused by the next one
        if self.ranks > 1:
            timeout = timedelta(seconds=launch().stall_timeout_s)
            self._group = new_group(members, backend="gloo", timeout=timeout)

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if self.ranks == 1:
            return [value]
        return [pickle.loads(row) for row in self._all_gather_bytes(pickle.dumps(value))]

    def gather_object(self, value: T) -> list[T] | None:
        """Every rank's value, by rank, on the first rank only."""
        if self.ranks == 1:
            return [value]
        rows = self._all_gather_bytes(pickle.dumps(value))
        return [pickle.loads(row) for row in rows] if self.is_first else None

    def broadcast_object(self, value: T) -> T:
        """The first rank's value on every rank."""
        if self.ranks == 1:
            return value
        rows = self._all_gather_bytes(pickle.dumps(value if self.is_first else None))
        return pickle.loads(rows[0])  # type: ignore[no-any-return]

    def together(self, work: Callable[[], T], what: str) -> T:
        """Run `work` on every rank. If it raises on any, all raise the same error, which names the rank."""
        return self.share(lambda: (work(), None), what)[0]

    def share(self, work: Callable[[], tuple[T, S]], what: str) -> tuple[T, list[S]]:
        """As `together`, for work that returns (result, shared): the result, and every rank's `shared`."""
        result, shared, problem = None, None, None
        try:
            result, shared = work()
        except FullshardError as error:
            problem = error
        except Exception as error:  # noqa: BLE001  the other ranks wait for this one
            problem = CheckpointError(f"{type(error).__name__} while {what}: {error}", "See its cause.")
            problem.__cause__ = error
        rows = self.all_gather_object((error_fields(problem), shared))
        raise_first_error(problem, self._comm.world.members, [error for error, _ in rows])
        return cast(T, result), [cast(S, theirs) for _, theirs in rows]

    def _all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        sizes = torch.empty(self.ranks, dtype=torch.int64)
        self._gather(sizes, torch.tensor([len(mine)]))
        longest = int(sizes.max())
        rows = torch.empty(self.ranks, longest, dtype=torch.uint8)
        self._gather(rows.view(-1), torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8))
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def _gather(self, rows: torch.Tensor, mine: torch.Tensor) -> None:
        # The group's own method: a background save continues when the script ends its process groups. Waiting
        # in intervals: the backend reports only neighbours that died, not the ranks beyond them.
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
                        f"the other ranks do not respond: {'; '.join(gone) or str(error).splitlines()[0]}",
                        "A rank has died or was stopped; look at its output.",
                    ) from error

    def _gone(self) -> list[str]:
        """Descriptions of the ranks of this host that have died or left."""
        return [str(p) for p in self._comm.recorder.look() if p is not None and (not p.alive or p.left)]


class World:
    """All ranks of a model that is tensor-parallel as well: those of its Comm and of their tensor-parallel
    groups."""

    def __init__(self, comm: Comm, ranks: list[int]) -> None:
        self._rows = dict(zip(comm.members, comm.all_gather_object(ranks), strict=True))
        self.members = self.tp_ranks_of(comm.members)
        self._group = new_group(self.members, backend="gloo")

    def tp_ranks_of(self, ranks: Sequence[int]) -> list[int]:
        """The ranks of the tensor-parallel groups of these ranks."""
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
    """The control group of a model's ranks. All ranks must make the first call together, which creates it."""
    group: ControlGroup | None = comm.__dict__.get("_control_group_object")
    if group is None:
        group = comm.__dict__["_control_group_object"] = ControlGroup(comm)
    return group


def start() -> None:
    """Start the default process group, if there is none.

    It is destroyed at exit. So is a gloo group that the script started and does not destroy: our groups have
    threads, which would abort the exit now and then.
    """
    if groups.start() or dist.get_backend() == "gloo":
        end_groups_at_exit()


_leavers: set[int] = set()  # processes; not those that they fork, which are no members of the groups


def end_groups_at_exit() -> None:
    """Destroy the process groups at exit: for groups that the script did not start, and so does not end."""
    _leavers.add(os.getpid())


@atexit.register  # registered at import, and so run last, after the script's own functions
def _end_unless_failed() -> None:
    failed = hasattr(sys, "last_value")  # then ranks may still be in a collective, and NCCL would wait for it
    if os.getpid() in _leavers and not failed:
        end_groups()


def end_groups() -> None:
    """Destroy all process groups: threads of open gloo groups may abort the exit of a finished process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def raise_together_first(
    error: FullshardError | None, grid: torch.Tensor | None, tp_ranks: list[int] | None = None
) -> None:
    """Before there are groups of our own: if one rank failed, all that called raise the same exception.

    In a tensor-parallel model the ranks of the grid exchange errors first, then each tensor-parallel group.
    """
    ranks = dist.get_world_size()
    members = list(range(ranks)) if grid is None else sorted(int(r) for r in grid.flatten())
    rounds = [members] if tp_ranks is None or grid is None else [members, tp_ranks]
    for among in rounds:
        group = None if len(among) == ranks else new_group(among)
        errors: list[Any] = [None] * len(among)
        if len(among) > 1:
            dist.all_gather_object(errors, error_fields(error), group=group)
        try:
            raise_first_error(error, among, errors)
        except FullshardError as first:
            error = first
    if error is not None:
        raise error


def all_gather_object_first(value: T, grid: torch.Tensor) -> list[T]:
    """Before there are groups of our own: every rank's value, by rank of the grid."""
    members = sorted(int(r) for r in grid.flatten())
    values: list[Any] = [value] * len(members)
    if len(members) > 1:
        group = None if len(members) == dist.get_world_size() else new_group(members)
        dist.all_gather_object(values, value, group=group)
    return values
