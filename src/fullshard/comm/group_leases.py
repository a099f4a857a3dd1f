"""The process groups of a model, taken over from a model that is gone where there is one.

Groups outlive their model: gloo's destructor may wait, and NCCL's is a collective. A process that shards many
models, one after the other, would keep the connections of all of them. So a model holds its groups as a
lease, which ends with it, and the next model over the same grid of ranks takes the oldest lease that ended
on all ranks. Models end at different times on different ranks (Python's collector), so the ranks agree on
which; and only one in which all ranks have issued the same operations may be used again.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from fullshard.comm.flight_recorder import FlightRecorder
from fullshard.comm.host_group import HostGroup, leases_by_grid, new_group
from fullshard.comm.tags import OpTag

# Numbers of sets of groups at which it is worth looking for models that are gone but not collected. Not at
# all from the first on: where the models are alive, that took half a second of each fs.shard.
_MANY = frozenset(4 * 2**doublings for doublings in range(20))


class Lease:
    """Groups in the order in which a model asks for them: made at the first time, then used again."""

    # Of this process, by their ranks; the same on all of these.
    _groups_made: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(self) -> None:
        self._groups: list[tuple[list[int], Any, int]] = []  # with how many were made of these ranks by then
        self._taken = 0
        self._ended: dict[str, int] | None = None  # operations by channel, once its model is gone

    def group(self, ranks: list[int]) -> Any:
        if self._taken < len(self._groups) and self._groups[self._taken][0] != ranks:
            del self._groups[self._taken :]  # another tensor-parallel mesh beside the same grid
        if self._taken == len(self._groups):
            made = self._groups_made[tuple(ranks)] = self._groups_made[tuple(ranks)] + 1
            self._groups.append((list(ranks), new_group(ranks), made))
        self._taken += 1
        return self._groups[self._taken - 1][1]

    def wider_group(self, ranks: list[int], agree: Callable[[int], Sequence[int]]) -> Any:
        """A group with ranks of other leases, which need not have ended when this one has: it is used again
        only if all of them have it, as `agree` shows."""
        following = self._groups[self._taken :][:1]
        known = following[0][2] if following and following[0][0] == ranks else 0
        if {*agree(known)} != {known} or not known:
            del self._groups[self._taken :]
        return self.group(ranks)

    def begin(self, owner: Any, recorder: FlightRecorder) -> None:
        """It lasts as long as `owner`, whose operations are in this recorder."""
        self._taken, self._ended = 0, None
        weakref.finalize(owner, self._end, recorder).atexit = False

    def _end(self, recorder: FlightRecorder) -> None:
        if not recorder.stalled:
            self._ended = {channel: recorder.newest(channel) or 0 for channel in recorder.channels()}

    @property
    def free(self) -> dict[str, int] | None:
        """The operations that were issued in it, if it has ended and may be used again."""
        return self._ended


def lease_groups(grid: Hashable, agreement: HostGroup) -> Lease:
    """For a new model over this grid of ranks. All of them must call it."""
    world, leases = leases_by_grid.setdefault(grid, (dist.group.WORLD, []))
    if world is not dist.group.WORLD:
        leases = []
        leases_by_grid[grid] = dist.group.WORLD, leases
    lease = _free_on_all(leases, agreement) if leases else None
    if lease is None and len(leases) in _MANY:
        for _ in range(2):  # a model is part of cycles; the first time frees the graph that holds it
            gc.collect()
        lease = _free_on_all(leases, agreement)
    if lease is None:
        lease = Lease()
        leases.append(lease)
    return lease


def _free_on_all(leases: list[Lease], agreement: HostGroup) -> Lease | None:
    """The ranks have made the same leases in the same order, so they know them by their place."""
    mine = {str(place): lease.free for place, lease in enumerate(leases) if lease.free is not None}
    by_rank = agreement.all_gather_object(mine, OpTag("process groups", "shard", 0))
    for place, lease in enumerate(leases):
        counts = by_rank[0].get(str(place))
        if counts is not None and all(theirs.get(str(place)) == counts for theirs in by_rank):
            return lease
    return None
