"""Every call of torch.distributed, tagged with the unit it serves.

Gathers and reduces have a group each, so each kind needs one agreed order only among itself:
a rank that skips a unit may issue a gather before a reduce where another does the opposite.
A third group, always on the host, carries small agreements.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, HashStore, ReduceScatterOptions

from fullshard import errors
from fullshard.comm import gloo_rows
from fullshard.comm.group_leases import lease_groups
from fullshard.comm.host_group import HostGroup, first_group, open_recorder
from fullshard.comm.step_report import StepReport
from fullshard.comm.tags import CommObserver, OpTag
from fullshard.comm.topology import Arrangement
from fullshard.comm.watchdog import Operation, Watchdog
from fullshard.environment import host_name, launch, refuse_tasks_without_ranks, stall_timeout_s
from fullshard.errors import FullshardError, report_errors_as

_GATHER, _EXCHANGE, _SCATTER = AllgatherOptions(), AllToAllOptions(), ReduceScatterOptions()
_GATHER.asyncOp = _EXCHANGE.asyncOp = _SCATTER.asyncOp = True
_LEAVING_S = 2.0  # how long the last messages of a run may take at exit


class ShardGroup:
    """Ranks among which a buffer is cut in equal rows. Gathers and reduces have a group each.

    crosses_nodes: whether its messages go between nodes, over links that may be slow.
    """

    def __init__(self, comm: Comm, ranks: list[int], name: str, crosses_nodes: bool) -> None:
        self._comm, self._watchdog = comm, comm.watchdog
        self.rank, self.ranks = ranks.index(comm.world_rank), len(ranks)
        self._gather_name, self._reduce_name = f"gather{name}", f"reduce{name}"
        for channel in (self._gather_name, self._reduce_name):
            comm.recorder.declare(channel, [comm.members.index(r) for r in ranks])
        self.gather_group, self.reduce_group = comm.lease.group(ranks), comm.lease.group(ranks)
        self._in_messages = crosses_nodes and gloo_rows.is_gloo(self.gather_group)

    def gather(self, full: torch.Tensor, own: torch.Tensor, tag: OpTag) -> Operation | None:
        """All ranks' rows into `full`, as bytes; this rank's own is written already."""
        if self.ranks == 1:
            return None
        return self._gather(self.gather_group, self._gather_name, full, own, tag)

    def gather_sums(self, full: torch.Tensor, own: torch.Tensor, tag: OpTag) -> Operation:
        """The same in the group of reduces, for what these have summed."""
        return self._gather(self.reduce_group, self._reduce_name, full, own, tag)

    def _gather(
        self, group: Any, channel: str, full: torch.Tensor, own: torch.Tensor, tag: OpTag
    ) -> Operation:
        number = self._comm.begin(channel, tag)
        if not self._comm.staged:
            work = self._all_gather(group, full, own)
            return Operation(self._watchdog, work, channel, number, None)
        host = torch.empty(full.shape, dtype=full.dtype)
        mine = host.view(self.ranks, -1)[self.rank]
        mine.copy_(own)
        work = self._all_gather(group, host, mine)
        return Operation(self._watchdog, work, channel, number, lambda: full.copy_(host))

    def _all_gather(self, group: Any, full: torch.Tensor, own: torch.Tensor) -> Any:
        if self._in_messages and (pieces := gloo_rows.cuts(own.numel(), self.ranks)):
            rows = full.view(self.ranks, -1)
            if rows[self.rank].data_ptr() != own.data_ptr():
                rows[self.rank].copy_(own)
            return gloo_rows.exchange(group, self.rank, rows, [own] * self.ranks, pieces)
        # The group's own call: torch.distributed's wrapper costs more than the rest of our gather.
        return group._allgather_base(full, own, _GATHER)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, tag: OpTag) -> Operation:
        """Row r of `sent` goes to rank r; what each rank sent to this one arrives in rows. As bytes."""
        comm, channel = self._comm, self._reduce_name
        number = comm.begin(channel, tag)
        if not comm.staged:
            return Operation(self._watchdog, self._exchange(received, sent), channel, number, None)
        host = torch.empty(received.shape, dtype=received.dtype)
        work = self._exchange(host, sent.cpu())
        return Operation(self._watchdog, work, channel, number, lambda: received.copy_(host))

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor) -> Any:
        if self._in_messages and (pieces := gloo_rows.cuts(sent.numel() // self.ranks, self.ranks)):
            rows, sent_rows = received.view(self.ranks, -1), sent.view(self.ranks, -1)
            rows[self.rank].copy_(sent_rows[self.rank])
            return gloo_rows.exchange(self.reduce_group, self.rank, rows, list(sent_rows), pieces)
        return self.reduce_group.alltoall_base(received, sent, [], [], _EXCHANGE)

    def scatter(self, own: torch.Tensor, sent: torch.Tensor, tag: OpTag) -> Operation:
        """Row r of every rank's `sent`, summed on the way, arrives at rank r."""
        comm, channel = self._comm, self._reduce_name
        number = comm.begin(channel, tag)
        if not comm.staged:
            work = self.reduce_group._reduce_scatter_base(own, sent, _SCATTER)
            return Operation(self._watchdog, work, channel, number, None)
        host = torch.empty(own.shape, dtype=own.dtype)
        work = self.reduce_group._reduce_scatter_base(host, sent.cpu(), _SCATTER)
        return Operation(self._watchdog, work, channel, number, lambda: own.copy_(host))


class CrossingGather:
    """A gather over two levels: between nodes, then inside each, from `share` into `full`, both as bytes.

    Where the host waits for collectives, the second leg is issued when the first is over, or is waited for:
    always in the order in which these gathers were made, on every rank.
    """

    __slots__ = ("_between", "_comm", "_full", "_inside", "_share", "_tag", "across", "entered")

    def __init__(
        self,
        comm: Comm,
        across: Operation | None,
        full: torch.Tensor,
        share: torch.Tensor,
        tag: OpTag,
        between: Callable[[], None] | None = None,
    ) -> None:
        self._comm, self.across, self._full, self._share, self._tag = comm, across, full, share, tag
        self._between = between  # what is to be done with what came between nodes
        self._inside: Operation | None = None
        self.entered = False

    def enter(self) -> None:
        """Issue the second leg: the current stream, or the host, waits for the first."""
        if self.across is not None:
            self.across.wait()
        if self._between is not None:
            self._between()
        self._inside = self._comm.shard_group.gather(self._full, self._share, self._tag)
        self.entered = True

    def over(self) -> bool:
        return self.entered and (self._inside is None or self._inside.over())

    def wait(self) -> None:
        self._comm.enter_up_to(self)
        if self._inside is not None:
            self._inside.wait()


class Comm:
    """This rank's connections for one sharded model.

    Units are gathered in `shard_group`; `cross_node_group` joins the ranks of one column of the grid. These
    hold replicas of one shard, or with `two_level` shards of their own: interval s * rows + j then belongs to
    the rank in row j, column s, so a row's ranks together keep complete columns.
    """

    def __init__(self, device: torch.device, arrangement: Arrangement) -> None:
        self.device, grid = device, arrangement.grid
        self.world_rank = dist.get_rank()
        self.members = sorted(int(r) for r in grid.flatten())
        row, column = (int(v[0]) for v in torch.where(grid == self.world_rank))
        inner, outer = grid[row].tolist(), grid[:, column].tolist()
        self.all_ranks = len(self.members)
        self.two_level = arrangement.two_level and len(outer) > 1
        self.replica = 0 if self.two_level else row
        if self.two_level:
            self.rank, self.ranks, self.replicas = column * len(outer) + row, self.all_ranks, 1
        else:
            self.rank, self.ranks, self.replicas = column, len(inner), len(outer)
        # The intervals of the ranks among which shards are cut, in the order of their groups.
        self.intervals = list(range(self.ranks))
        if self.two_level:
            flat = [int(r) for r in grid.T.flatten()]  # by interval, the rank that keeps it
            self.intervals = [flat.index(r) for r in self.members]
        # Ranks in the order in which their rows arrive, row after row of the grid: which member each is.
        self.grid_order = [self.members.index(int(r)) for r in grid.flatten()]
        self.fixed_sums = False  # reduce='fixed': sums do not depend on how elements are cut into shards
        # gloo moves host memory: device tensors are staged through it.
        self.staged = device.type != "cpu" and dist.get_backend() == "gloo"
        self.step = 0
        self.observer: CommObserver | None = None
        self._source = self.members[0]
        self.recorder = open_recorder(self.members, "model")
        self.recorder.declare("replica", [self.members.index(r) for r in outer])
        weakref.finalize(self, self.recorder.close)
        host_waits = device.type == "cpu" or self.staged
        self.watchdog = Watchdog(self.recorder, host_waits, stall_timeout_s())
        # Groups of a model that is gone, where there is one: connections are not kept per model.
        self.lease = lease_groups((str(grid.tolist()), self.two_level), first_group(self.members))
        self.lease.begin(self, self.recorder)
        with first_group(self.members).blocking("shard"):
            self._create_groups(inner, outer, arrangement.rows_cross_nodes)
        # On the device the first rank's values go down its column of the grid, then along every row.
        self._row_source, self._column_source = inner[0], outer[0]
        cross = self.cross_node_group
        self._column_group = None if cross is None else cross.gather_group
        self._first_column = column == 0
        self._by_device = device.type != "cpu" and int(grid[0, 0]) == self._source
        self._streams: dict[str, Any] = {}
        self._crossing: deque[CrossingGather] = deque()  # whose second leg is not issued yet
        self.report = StepReport(self)
        _comms.add(self)

    def _create_groups(self, inner: list[int], outer: list[int], rows_cross_nodes: bool) -> None:
        self.host_group = HostGroup(self.members, "agreement", self.watchdog)
        self.shard_group = ShardGroup(self, inner, "", rows_cross_nodes)
        self.cross_node_group = ShardGroup(self, outer, " across", True) if len(outer) > 1 else None
        self._small_group, self._small_ranks = self.shard_group.reduce_group, self.ranks
        if self.two_level:
            self._small_group = self.lease.group(self.members)
        self._shard_members = self.members if self.two_level else inner
        self._joined: Any = None
        self._replica_group = None
        if self.replicas > 1 and self.cross_node_group is not None:
            self._replica_group = self.cross_node_group.reduce_group

    def tag(self, unit: str, phase: str) -> OpTag:
        return OpTag(unit, phase, self.step)

    def begin(self, channel: str, tag: OpTag) -> int:
        """Note an operation that is about to be issued; returns its running number."""
        number = self.recorder.begin(channel, tag.phase, tag.unit, tag.step)
        if self.observer is not None:
            self.observer.issued(channel, number, tag)
        return number

    def observe(self, observer: CommObserver | None) -> None:
        self.observer = self.watchdog.observer = observer

    # ---- hot path

    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        return self  # copies of a model, and of the values of its state dict, use the same groups

    def gather(self, full: torch.Tensor, own: torch.Tensor, tag: OpTag) -> Operation | CrossingGather | None:
        """All ranks' intervals into `full`, as bytes; this rank's own is written already."""
        if not self.two_level:
            return self.shard_group.gather(full, own, tag)
        assert self.cross_node_group is not None
        share = full.view(self.shard_group.ranks, -1)[self.shard_group.rank]
        across = self.cross_node_group.gather(share, own, tag)
        return self.enter(CrossingGather(self, across, full, share, tag))

    def enter(self, gather: CrossingGather) -> CrossingGather:
        """Let a gather whose first leg is in flight go on inside the node."""
        if self.watchdog.host_waits:
            self._crossing.append(gather)
            self.progress()
        else:
            with self.beside("gather"):
                gather.enter()
        return gather

    def progress(self) -> None:
        """Issue the second legs of gathers whose first leg is over. Never waits."""
        while self._crossing and (self._crossing[0].across is None or self._crossing[0].across.over()):
            self._crossing[0].enter()
            self._crossing.popleft()

    def enter_up_to(self, gather: CrossingGather) -> None:
        """Issue second legs up to this gather's, waiting for the first ones."""
        while not gather.entered:
            self._crossing[0].enter()
            self._crossing.popleft()

    def enter_all(self) -> None:
        """Issue all second legs, waiting for the first ones: no rank waits for this one's any more."""
        while self._crossing:
            self._crossing[0].enter()
            self._crossing.popleft()

    def beside(self, purpose: str) -> Any:
        """A stream that may wait for the wire while the current one, behind which it begins, computes.

        Its kernels are few and small, and a link is idle until they have run: they go first.
        """
        if self.watchdog.host_waits:
            return contextlib.nullcontext()
        stream = self._streams.get(purpose)
        if stream is None:
            made = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            stream = self._streams[purpose] = made
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)

    def regather_gradients(
        self, flat: torch.Tensor, own: torch.Tensor, tag: OpTag
    ) -> Operation | CrossingGather | None:
        """Summed gradient intervals back to every rank (strategy replicate)."""
        if self.ranks == 1:
            return None
        if self.two_level:
            return self.gather(as_bytes(flat), as_bytes(own), tag)
        return self.shard_group.gather_sums(as_bytes(flat), as_bytes(own), tag)

    def exchange_parts(
        self, received: torch.Tensor, sent: torch.Tensor, sizes: tuple[list[int], list[int]], tag: OpTag
    ) -> Operation:
        """Parts of `sent`, one per rank that keeps other shards, in the order of `intervals`, go to these
        ranks, and theirs arrive in that order. As bytes: `sizes` are those received and those sent."""
        number = self.begin("reduce", tag)
        if not self.staged:
            work = self._small_group.alltoall_base(received, sent, *sizes, _EXCHANGE)
            return Operation(self.watchdog, work, "reduce", number, None)
        host = torch.empty(received.shape, dtype=received.dtype)
        work = self._small_group.alltoall_base(host, sent.cpu(), *sizes, _EXCHANGE)
        return Operation(self.watchdog, work, "reduce", number, lambda: received.copy_(host))

    # ---- once a step

    def sum_shards(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold different shards; returns the summed tensor."""
        return self._small(values, dist.ReduceOp.SUM)

    def mean_everywhere(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over all members, replicas included."""
        self.sum_shards(values)
        if self._replica_group is not None:
            self._all_reduce(values, dist.ReduceOp.SUM, self._replica_group)
        return values.div_(self.all_ranks)

    def max_everywhere(self, values: torch.Tensor) -> None:
        """Maximum over all members, replicas included, in place."""
        self.max_shards(values)
        if self._replica_group is not None:
            self._all_reduce(values, dist.ReduceOp.MAX, self._replica_group)

    def start_max(self, values: torch.Tensor) -> Operation:
        """Maximum over the ranks that hold different shards, in place, when the operation is over."""
        tag = self.tag("gradients", "backward")
        return self._start_all_reduce(values, dist.ReduceOp.MAX, self._small_group, tag)

    def max_shards(self, values: torch.Tensor) -> torch.Tensor:
        """A NaN on one rank is a NaN on all: the backends' own maximum may drop it."""
        if self._small_ranks == 1 or not values.is_floating_point():
            return self._small(values, dist.ReduceOp.MAX)
        nan = torch.isnan(values)
        both = torch.stack([values.masked_fill(nan, float("-inf")), nan.to(values.dtype)])
        largest, flags = self._small(both, dist.ReduceOp.MAX)
        return values.copy_(largest.masked_fill(flags > 0, float("nan")))

    def min_shards(self, values: torch.Tensor) -> torch.Tensor:
        if values.is_floating_point():
            return self.max_shards(values.neg_()).neg_()
        return self._small(values, dist.ReduceOp.MIN)

    def _small(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        if self._small_ranks > 1:
            self._all_reduce(values, op, self._small_group)
        return values

    def _all_reduce(self, values: torch.Tensor, op: Any, group: Any) -> None:
        self._start_all_reduce(values, op, group, self.tag("gradients", "backward")).wait()

    def _start_all_reduce(self, values: torch.Tensor, op: Any, group: Any, tag: OpTag) -> Operation:
        channel = "replica" if group is self._replica_group else "reduce"
        number = self.begin(channel, tag)
        flat = torch.view_as_real(values) if values.is_complex() else values
        # What is computed of a gradient on the host is there, too, and NCCL carries nothing from there.
        target = flat.to("cpu" if self.staged else self.device)
        work = dist.all_reduce(target, op=op, group=group, async_op=True)
        after = None if target is flat else (lambda: flat.copy_(target))
        return Operation(self.watchdog, work, channel, number, after)

    # ---- agreements on the host, over all members

    def all_gather_int(self, value: int, phase: str = "between steps") -> list[int]:
        """Every rank's number, by rank."""
        return list(map(int, self.all_gather_ints([value], phase)[:, 0].tolist()))

    def all_gather_ints(self, values: Sequence[int], phase: str = "between steps") -> torch.Tensor:
        """Every rank's numbers, one row per rank."""
        mine = torch.tensor(values, dtype=torch.int64)
        return self.host_group.all_gather_ints(mine, self.tag("agreement", phase))

    def barrier(self, phase: str) -> None:
        """Every rank must call this now: one that waits for this one elsewhere is an error."""
        if self.all_ranks > 1:
            self.all_gather_ints([0], phase)
            self.check_agreement()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's plain value, by rank. Not for the hot path."""
        return self.host_group.all_gather_object(value, self.tag("agreement", "between steps"))

    def broadcast(self, values: torch.Tensor) -> None:
        """The first rank's values, in place, on every rank."""
        if self.all_ranks == 1 or not values.numel():
            return
        if self._by_device and not self.staged and values.device == self.device and values.is_contiguous():
            if self._column_group is not None and self._first_column:
                dist.broadcast(as_bytes(values), src=self._column_source, group=self._column_group)
            if self.shard_group.ranks > 1:
                dist.broadcast(as_bytes(values), src=self._row_source, group=self.shard_group.gather_group)
            return
        direct = values.device.type == "cpu" and values.is_contiguous()
        target = values if direct else values.cpu().contiguous()
        self.host_group.broadcast(as_bytes(target), self.tag("values", "between steps"))
        if target is not values:
            values.copy_(target)

    def raise_together(self, error: FullshardError | None) -> None:
        """If any rank failed, every rank raises the same exception, which names the ranks at fault."""
        raise_first_error(error, self.world.members, self.world.all_gather_object(error_fields(error)))

    def join(self, world: Any) -> None:
        """The tensor-parallel groups of these ranks hold other parts: sums of shards go over them, too."""
        small = world.tp_ranks_of(self._shard_members)
        self._small_group = self.lease.wider_group(small, world.all_gather_object)
        self._small_ranks, self._joined = len(small), world

    @property
    def world(self) -> Any:
        """All ranks of the model: more than these if it is tensor-parallel as well."""
        return self if self._joined is None else self._joined

    def broadcast_in_tp_group(self, values: Sequence[torch.Tensor]) -> None:
        """What tensor parallelism has not cut is the first rank's on all its ranks, too."""
        if self._joined is not None and values:
            flat = torch.cat([as_bytes(v.contiguous()) for v in values])
            self._joined.broadcast(flat)
            sizes = [v.numel() * v.element_size() for v in values]
            for value, part in zip(values, torch.split(flat, sizes), strict=True):
                value.copy_(part.view(value.dtype).view(value.shape))

    @property
    def stalled(self) -> bool:
        """Whether an operation was given up: nothing more can run over these groups."""
        return self.watchdog.stalled is not None

    def check_agreement(self) -> None:
        """At the end of each pass: were all ranks of this host in the same operations?"""
        self.watchdog.check_agreement()


_comms: weakref.WeakSet[Comm] = weakref.WeakSet()


def in_flight() -> bool:
    """At exit: whether operations of a model are in flight that the other ranks may never complete."""
    deadline = time.monotonic() + _LEAVING_S
    for comm in list(_comms):
        if comm.stalled:
            return True
        if comm.watchdog.host_waits:
            unfinished, report = comm.recorder.unfinished(), comm.report.operation
            while report is not None and not report.over() and time.monotonic() < deadline:
                time.sleep(0.01)
            if report is not None and report.over():
                unfinished = unfinished - {(report.channel, report.number)}
            if unfinished:
                return True
    return False


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as bytes, of any dtype: bool, complex and 8-bit floats included."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(-1).view(torch.uint8)


def start() -> bool:
    """Start the default process group if there is none: from the launcher, or as a world of one."""
    if dist.is_initialized():
        report_errors_as(dist.get_rank())
        return False
    launched = launch()
    report_errors_as(launched.rank)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if launched.rendezvous:
        if torch.cuda.is_available():
            torch.cuda.set_device(launched.local_rank % torch.cuda.device_count())
        dist.init_process_group(backend)
    else:
        refuse_tasks_without_ranks()
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return True


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else launch().rank


def rank_count() -> int:
    return dist.get_world_size() if dist.is_initialized() else launch().ranks


def error_fields(error: FullshardError | None) -> tuple[str, str, str, str] | None:
    """An error as it is sent to other ranks, with the host where it happened."""
    return None if error is None else (type(error).__name__, error.what, error.remedy, host_name())


def raise_first_error(error: FullshardError | None, members: list[int], received: list[Any]) -> None:
    """If any rank sent an error, raise it: this rank's own, or the first."""
    if error is not None:
        raise error
    for rank, other in zip(members, received, strict=True):
        if other is not None:
            name, what, remedy, host = other
            where = f" on {host}" if host != host_name() else ""
            kind = getattr(errors, name, None)
            if not (isinstance(kind, type) and issubclass(kind, FullshardError)):
                kind = FullshardError  # one that a plugin defined
            raise kind(f"rank {rank}{where} reports: {what}", remedy)
