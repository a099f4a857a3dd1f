"""Agreement between ranks on the host, outside a step: objects, errors, and which ranks are missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fullshard.comm import groups, monitor
from fullshard.comm.ending import end_now_if_needed, never_destroy
from fullshard.comm.groups import Comm, as_bytes, error_fields, in_flight, raise_first_error
from fullshard.comm.host_group import HostGroup, first_group, forget_first_groups, peers_are_absent
from fullshard.comm.tags import OpTag
from fullshard.comm.watchdog import Watchdog
from fullshard.errors import CheckpointError, FullshardError
from fullshard.leaving import at_the_end

T = TypeVar("T")
S = TypeVar("S")


class ControlGroup:
    """Collectives of plain values on the host, over all ranks of one model. For the script's thread."""

    def __init__(self, group: HostGroup, training: Watchdog) -> None:
        self._group, self._training, self._members = group, training, group.members
        self.ranks, self.index = group.ranks, group.index
        self.is_first = self.index == 0
        self.host_copy: Any = None  # buffer of background saves, reused by the next one
        self.notes: set[str] = set()  # warnings that were given, of those that are given once
        self._beside: ControlGroup | None = None

    def beside_training(self) -> ControlGroup:
        """For a thread that exchanges messages while the script does. All ranks must make the first call
        together."""
        if self._beside is None:
            group = HostGroup(self._members, "save", training=self._training)
            self._beside = ControlGroup(group, self._training)
        return self._beside

    def all_gather_object(self, value: T, what: str = "agreeing") -> list[T]:
        """Every rank's value, by rank, on every rank."""
        return self._group.all_gather_object(value, OpTag("agreement", what, 0))

    def gather_object(self, value: T) -> list[T] | None:
        """Every rank's value, by rank, on the first rank only."""
        return self._group.gather_object(value, OpTag("agreement", "agreeing", 0))

    def broadcast_object(self, value: T) -> T:
        """The first rank's value on every rank."""
        return cast(T, self._group.broadcast_object(value, OpTag("agreement", "agreeing", 0)))

    def connect_pairs(self) -> None:
        """Before the first `exchange_bytes`. All ranks must call it together."""
        self._group.connect_pairs()

    def exchange_bytes(
        self,
        sizes: Mapping[tuple[int, int], int],
        outgoing: Callable[[int, int, int], torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        what: str,
    ) -> None:
        """Bytes from rank to rank: see HostGroup."""
        self._group.exchange_bytes(sizes, outgoing, incoming, OpTag("values", what, 0))

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
        rows = self.all_gather_object((error_fields(problem), shared), what)
        raise_first_error(problem, self._members, [error for error, _ in rows])
        return cast(T, result), [cast(S, theirs) for _, theirs in rows]


class World:
    """All ranks of a model that is tensor-parallel as well: those of its Comm and of their tensor-parallel
    groups."""

    def __init__(self, comm: Comm, ranks: list[int]) -> None:
        self._rows = dict(zip(comm.members, comm.all_gather_object(ranks), strict=True))
        self.members = self.tp_ranks_of(comm.members)
        self.host_group = HostGroup(self.members, "tensor parallel")

    def tp_ranks_of(self, ranks: Sequence[int]) -> list[int]:
        """The ranks of the tensor-parallel groups of these ranks."""
        return sorted({r for rank in ranks for r in self._rows[rank]})

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's plain value, by rank."""
        return self.host_group.all_gather_object(value, OpTag("agreement", "between steps", 0))

    def broadcast(self, values: torch.Tensor) -> None:
        """The first rank's values, in place, on every rank."""
        if values.numel():
            target = values.cpu().contiguous()
            self.host_group.broadcast(as_bytes(target), OpTag("values", "between steps", 0))
            values.copy_(target)


def control_group(comm: Comm) -> ControlGroup:
    """The control group of a model's ranks."""
    group: ControlGroup | None = comm.__dict__.get("_control_group_object")
    if group is None:
        group = comm.__dict__["_control_group_object"] = ControlGroup(comm.world.host_group, comm.watchdog)
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


def end_unless_failed() -> None:
    """At exit. Registered when the package is imported, and so run last, after the script's own functions."""
    failed = hasattr(sys, "last_value")  # then ranks may still be in a collective, which nothing would end
    if os.getpid() not in _leavers:
        return
    if dist.is_initialized() and (failed or in_flight()):
        never_destroy(())
    else:
        end_groups()
    end_now_if_needed()


at_the_end(end_unless_failed)


def end_groups() -> None:
    """Destroy all process groups: threads of open gloo groups may abort the exit of a finished process."""
    forget_first_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    monitor.forget_world()


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
        if len(among) > 1:
            sent = first_group(among).all_gather_object(error_fields(error), OpTag("errors", "shard", 0))
        else:
            sent = [None]
        try:
            raise_first_error(error, among, sent)
        except FullshardError as first:
            error = first
    if error is not None:
        raise error


def gather_from_world(value: T, what: str) -> list[T]:
    """Every rank's value, by rank of the world. The first call starts the process group, if there is none."""
    if groups.rank_count() == 1:
        return [value]
    start()
    if peers_are_absent():
        return [value]
    members = list(range(dist.get_world_size()))
    return first_group(members).all_gather_object(value, OpTag("agreement", what, 0))


def all_gather_object_first(value: T, grid: torch.Tensor) -> list[T]:
    """Before there are groups of our own: every rank's value, by rank of the grid."""
    members = sorted(int(r) for r in grid.flatten())
    if len(members) == 1:
        return [value]
    return first_group(members).all_gather_object(value, OpTag("agreement", "shard", 0))
