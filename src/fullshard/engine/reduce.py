"""Gradients from full to shard: pack, exchange, sum, and `p.grad`.

One Reduction serves one model. In a backward pass

    begin      takes over what is on `p.grad`: nothing, a sum to add to, or a value that the user set
    done       packs the gradients of a finished unit and sends them, in the agreed order
    finish     drains what is in flight, agrees on which parameters any rank used, and sets `p.grad`

Nobody else sets `p.grad`. A unit's gradients go through these states:

    compute_parameter.grad -> send buffer -> rows of the wire -> received rows -> gradient shard -> p.grad
                   (inside fs.accumulate, with replicate and zero1: -> accumulation buffer, until the last
                    micro-batch; with hybrid: -> accumulated shard, which is not yet summed over replicas)

Sums are made in fp32 in the order of ranks, so every strategy makes the same sum. On several nodes a reduce
has legs: gradients are exchanged inside each node and summed there; these sums are exchanged between nodes,
by ranks of equal place, and summed in the order of nodes; with replicas, every node needs every sum, and they
are gathered back. Each leg is issued in the order of the first ones, in a group of its own. A leg is waited
for only where every rank has issued it, or will without waiting for this one (`plan.schedule.host_limit`): no
circle of waits can close.

Where the loop over `fs.Batches` gives ranks shares of different weights (`shares`), the largest of them is
part of the divisor, and a rank that has less multiplies what it packs.

With reduce='fixed' nothing is summed on the way. The rows that ranks send, the gradients of one micro-batch
each, go into one tree of sums per lane (`summation_tree`), which is complete with the last micro-batch of the
global batch. Until then gradients are postponed, as inside fs.accumulate. With replicas the rows of all of
them are gathered, in a second leg.

On a GPU nothing here waits for the device: `Operation.wait` makes the compute stream wait. A send buffer is
freed (its storage resized on the compute stream) after that wait; before it the exchange may still read it.
Later legs are issued at once: a stream of their own waits for the first one, and sums. All their memory is
allocated and freed on the compute stream, which waits for that stream before it frees what that has read.
On a CPU a later leg is issued when the one before it is over, or must be waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter

import torch

from fullshard import shares
from fullshard.comm.groups import Comm, as_bytes
from fullshard.comm.tags import OpTag
from fullshard.engine.homes.transfers import Mark
from fullshard.engine.lane import Lane
from fullshard.engine.observer import Observer
from fullshard.engine.reduce_buffers import (
    InFlight,
    LaneReduction,
    Leg,
    Penalised,
    SendBuffer,
    check_repeated,
    copy_into,
    encode_rows,
    take_over_grads,
    unpackable,
)
from fullshard.engine.summation_tree import SummationTree
from fullshard.engine.tensor_parallel import local_gradients
from fullshard.engine.unit import LiveUnit
from fullshard.engine.wire import PlainWire, Wire
from fullshard.errors import FullshardError, GradientError, NotSupported, RankMismatch, StateError, unit_label
from fullshard.options import Options
from fullshard.plan.schedule import across_limit, host_limit, in_flight_limit
from fullshard.precision import BLOCK

_PLAIN = PlainWire(torch.float32)  # sums rows of any dtype
_grad = attrgetter("grad")
_GRAD, _NONE = repeat("grad"), repeat(None)  # for C-speed loops over parameters


def _nothing(_: int) -> None:
    pass


class Reduction:
    def __init__(self, units: Sequence[LiveUnit], comm: Comm, options: Options) -> None:
        self._units = [[LaneReduction(lane, unit) for lane in unit.lanes] for unit in units]
        self._training: list[list[LaneReduction]] = [[] for _ in self._units]  # those that train now
        self._comm, self._options = comm, options
        self._fixed = comm.fixed_sums = options.reduce == "fixed"
        self._accumulates = options.accumulates_locally and not self._fixed
        self._share: shares.Share | None = None  # of this backward, where ranks have different weights
        self._order_of_rows: tuple[int, int] | None = None  # of the share, when ranks agreed on their order
        self._rows_in_order: list[int] = []  # with reduce='fixed': the received row of each rank of the share
        shares.forget_lost()
        self.observer: Observer | None = None
        self._legs: dict[Leg, list[InFlight]] = {leg: [] for leg in Leg}  # in flight, the oldest first
        self._order: list[int] = []  # in which units are sent
        self._modes = 0
        self._at = 0
        self._waiting: set[int] = set()
        self._sent: set[int] = set()
        self.diverges = False  # ranks take different paths through the model
        self.before_send: Callable[[int], None] = _nothing
        self.postponing = False  # inside fs.accumulate
        self.absent = False  # this rank has run out of data: it sends zeros
        self.active_ranks = comm.all_ranks
        self.postponed = False  # gradients wait for the last micro-batch
        self.penalties: list[tuple[torch.Tensor, Sequence[Penalised]]] = []  # of this backward
        self._penalised: list[LaneReduction] = []  # lanes with gradients of penalties
        self._not_finite: list[str] = []  # parameters whose local gradients are not finite

    @property
    def in_flight(self) -> bool:
        return any(self._legs.values())

    # ---- begin

    def begin(self, order: Sequence[int], modes: int) -> None:
        """modes: a checksum of the units in training mode, which the ranks compare."""
        self._modes = modes
        self._share = shares.current(self._comm.all_ranks)
        if self._fixed:
            self._require_micro_batches()
        if self.postponed:
            self._refuse_frozen_since()
        self._training = [[r for r in unit if any(r.lane.trainable)] for unit in self._units]
        self._order = [unit for unit in order if self._training[unit]]
        self._at = 0
        self._waiting.clear()
        self._sent.clear()
        for unit in self._order:
            for reduction in self._training[unit]:
                self._check_accumulated(reduction)
                take_over_grads(reduction.lane)

    def _require_micro_batches(self) -> None:
        share = self._share
        if share is None or not share.micro_batches:
            raise StateError(
                "reduce='fixed' sums micro-batches of the global batch in one order, and this backward is "
                "over none",
                "Loop over batches.steps(loader) of fs.Batches(..., micro_batch_size=N).",
            )
        place = share.rank, share.ranks
        if self._order_of_rows == place:
            return
        ranks = self._comm.all_gather_int(share.rank)
        if sorted(ranks) != list(range(share.ranks)):
            raise RankMismatch(
                f"fs.Batches has given the shares of ranks {ranks} to ranks {self._comm.members}",
                "Give each rank of the model its own, from 0 on.",
            )
        by_row = [ranks[member] for member in self._comm.grid_order]
        self._rows_in_order = [by_row.index(rank) for rank in range(share.ranks)]
        self._order_of_rows = place

    @property
    def _sends_zeros(self) -> bool:
        return self.absent or (self._share is not None and not self._share.factor)

    @property
    def weight(self) -> float:
        """So much do this rank's gradients of this backward count in a mean over ranks."""
        return 1.0 if self._share is None else self._share.weight

    def prepare(self, unit: int) -> None:
        """A unit's backward begins: large products may write their gradients into the send buffer."""
        for reduction in self._training[unit]:
            lane = reduction.lane
            waiting = reduction.has_accumulated or (self.postponing and self._accumulates)
            if not lane.places or waiting or self._sends_zeros or lane.dtypes.packed != lane.dtypes.compute:
                continue
            if not self._is_in_flight(reduction):
                self._buffer(reduction).invite()

    # ---- done

    def done(self, unit: int, called: Callable[[int], bool]) -> None:
        """A unit has all the gradients of this backward; units this rank did not call do not hold it up."""
        if not self._training[unit]:
            return
        if unit in self._sent:
            self._send(unit)  # called again in the same backward: one reduce more
            return
        self._waiting.add(unit)
        while self._at < len(self._order):
            head = self._order[self._at]
            if head not in self._waiting and called(head):
                return
            self._at += 1
            self._send(head)

    def skip_to(self, unit: int, inner: frozenset[int], called: Callable[[int], bool]) -> None:
        """This rank's backward has come to `unit`: units before it, and before those inside it, that this
        rank never called are sent now."""
        while self._at < len(self._order):
            head = self._order[self._at]
            if head == unit or called(head) or head in inner:
                return
            self._at += 1
            self._send(head)

    def flush(self) -> None:
        """The backward is over: what has not been sent is sent now, in order."""
        for unit in self._order[self._at :]:
            self._send(unit)
        self._at = len(self._order)
        for unit in sorted(self._sent):
            if any(g.grad is not None for r in self._training[unit] for g in r.lane.compute_parameters):
                self._send(unit)

    def _send(self, unit: int) -> None:
        self.before_send(unit)
        self._sent.add(unit)
        self._waiting.discard(unit)
        observer, training = self.observer, self._training[unit]
        if observer is not None and training:
            observer.begin("send", training[0].lane.unit)
        for reduction in training:
            gradients = list(map(_grad, reduction.lane.compute_parameters))
            deque(map(setattr, reduction.lane.compute_parameters, _GRAD, _NONE), maxlen=0)
            if self._sends_zeros:
                gradients = [None] * len(gradients)
            elif reduction.lane.specs:
                gradients = local_gradients(gradients, reduction.lane.specs)
            reduction.note([g is not None for g in gradients])
            if self._options.check_gradients:
                self._not_finite += _not_finite(reduction.lane, gradients)
            from_accumulation = reduction.has_accumulated
            if (
                reduction.lane.dtypes.as_computed
                and not from_accumulation
                and all(g is None for g in gradients)
            ):
                continue  # nobody waits for it, and gradients that come later are still the only ones
            try:
                buffer = self._pack(reduction, gradients)
            except FullshardError:  # of a reduce that was drained
                raise
            except (RuntimeError, NotImplementedError) as error:
                raise unpackable(reduction.lane, gradients, error) from error
            if buffer is not None:
                self._exchange(reduction, buffer, from_accumulation)
        if observer is not None and training:
            observer.end("send", training[0].lane.unit)

    def _pack(self, reduction: LaneReduction, gradients: Sequence[torch.Tensor | None]) -> SendBuffer | None:
        lane = reduction.lane
        if self.postponing and self._accumulates:
            self._accumulate(reduction, gradients)
            return None
        while self._is_in_flight(reduction):
            self._finish_oldest(Leg.INSIDE)  # its buffers are still read or written
        if reduction.has_accumulated:
            accumulation = self._accumulate(reduction, gradients)
            reduction.has_accumulated = False
            if lane.dtypes.packed == accumulation.flat.dtype:
                return accumulation
            buffer = self._opened_buffer(reduction)
            buffer.flat.copy_(accumulation.flat)
            accumulation.close()
            return buffer
        buffer = self._opened_buffer(reduction)
        copy_into(buffer, gradients)
        share = self._share
        if share is not None and share.factor not in (0.0, 1.0) and not self._fixed:
            buffer.flat.mul_(share.factor)
        return buffer

    def _is_in_flight(self, reduction: LaneReduction) -> bool:
        return any(flight.reduction is reduction for flight in self._legs[Leg.INSIDE])

    def _buffer(self, reduction: LaneReduction) -> SendBuffer:
        if reduction.send_buffer is None:
            reduction.send_buffer = SendBuffer(reduction.lane, reduction.lane.dtypes.packed)
        return reduction.send_buffer

    def _opened_buffer(self, reduction: LaneReduction) -> SendBuffer:
        buffer = self._buffer(reduction)
        buffer.open()  # where it was opened for products already, nothing happens
        return buffer

    def _accumulate(self, reduction: LaneReduction, gradients: Sequence[torch.Tensor | None]) -> SendBuffer:
        """Add to what waits for the last micro-batch, weighted so that all samples count alike."""
        if reduction.accumulation is None:
            reduction.accumulation = SendBuffer(reduction.lane, reduction.lane.dtypes.sum)
        accumulation = reduction.accumulation
        if not reduction.has_accumulated:
            accumulation.open()
            accumulation.flat.zero_()
            reduction.has_accumulated = True
        weight = self._comm.all_ranks / self.active_ranks if self.active_ranks else 1.0
        weight *= self.weight
        pairs = zip(accumulation.views, gradients, strict=True)
        present = [(view, gradient) for view, gradient in pairs if gradient is not None]
        if present:
            views, values = zip(*present, strict=True)
            torch._foreach_add_(list(views), [v.to(accumulation.flat.dtype) for v in values], alpha=weight)
        return accumulation

    def _exchange(self, reduction: LaneReduction, buffer: SendBuffer, from_accumulation: bool) -> None:
        ranks = self._comm.all_ranks if from_accumulation else max(1, self.active_ranks)
        own_divisor = reduction.unit.policy.divisor
        divisor: float = ranks if own_divisor is None else own_divisor
        if self._share is not None and not from_accumulation:
            divisor /= self._share.scale
        divisor /= self._options.nodes  # the rest is divided by when the sums of nodes are added up
        group, wire, tag = self._comm.shard_group, reduction.wire, self._tag(reduction.lane)
        self._throttle(buffer.size_bytes)
        held: SendBuffer | torch.Tensor = buffer
        operation = None
        if group.ranks == 1:
            received, wire = buffer.flat[None], _PLAIN
        elif self._options.reduce == "scatter" and wire.in_place:
            received, wire = torch.empty_like(buffer.flat.view(group.ranks, -1)[:1]), _PLAIN
            operation = group.scatter(received.view(-1), buffer.flat, tag)
        else:
            rows = encode_rows(reduction, buffer, group.ranks, self._feeds_back)
            received = torch.empty_like(rows)
            sent_bytes = buffer.as_bytes if wire.in_place else as_bytes(rows)
            operation = group.exchange(as_bytes(received), sent_bytes, tag)
            held = buffer if wire.in_place else rows  # read until the exchange is over
        flight = InFlight(Leg.INSIDE, reduction, held, received, operation, divisor, wire)
        if self._fixed:
            flight.part = reduction.next_part(self._share)
        self._legs[Leg.INSIDE].append(flight)
        if not self._comm.watchdog.host_waits:
            self._issue_following(flight)

    @property
    def _feeds_back(self) -> bool:
        return self._options.precision.error_feedback and not self._sends_zeros

    def _throttle(self, size_bytes: int) -> None:
        """Before another exchange: a few may be in flight, a large one alone.

        gloo uses a link both ways at once only while several are.
        Ranks on different paths finish units in different orders: there, waiting could close a circle.
        """
        self.progress()
        inside = self._legs[Leg.INSIDE]
        while len(inside) >= in_flight_limit(size_bytes) and (not self.diverges or inside[0].over()):
            self._finish_oldest(Leg.INSIDE)
        for leg in (Leg.ACROSS, Leg.BACK):
            later = self._legs[leg]
            while later and len(later) >= self._limit(leg, later[0]):
                if self.diverges and not later[0].over():
                    return
                self._finish_oldest(leg)

    def _limit(self, leg: Leg, oldest: InFlight) -> int:
        if self._comm.watchdog.host_waits:
            return host_limit(leg.value)
        return across_limit(oldest.received.nbytes)

    def progress(self) -> None:
        """Where the host waits for collectives: issue or sum what follows those that are over."""
        if self._options.nodes > 1 and self._comm.watchdog.host_waits:
            for leg, legs in self._legs.items():
                while legs and legs[0].over():
                    self._finish_oldest(leg)

    def _drain(self) -> None:
        for leg, legs in self._legs.items():
            while legs:
                self._finish_oldest(leg)

    def _finish_oldest(self, leg: Leg) -> None:
        flight = self._legs[leg][0]
        flight.wait()
        del self._legs[leg][0]  # not before: if waiting raises, `drop` must still know of its buffers
        observer = self.observer
        if observer is not None:
            observer.begin("sum", flight.reduction.lane.unit)
        if self._comm.watchdog.host_waits and self._continues(flight):
            flight.following = self._next_leg(flight)
        if flight.following is not None:
            self._legs[flight.following.leg].append(flight.following)
        elif not self._continues(flight):
            self._sum_into_shard(flight)
        flight.close()
        if observer is not None:
            observer.end("sum", flight.reduction.lane.unit)

    def _continues(self, flight: InFlight) -> bool:
        """Whether another leg follows."""
        if flight.leg is Leg.INSIDE:
            return self._options.nodes > 1
        return flight.leg is Leg.ACROSS and self._comm.replicas > 1 and not self._fixed

    def _issue_following(self, flight: InFlight) -> None:
        if self._continues(flight):
            flight.following = self._next_leg(flight)
            if flight.following is not None:
                self._issue_following(flight.following)

    def _next_leg(self, flight: InFlight) -> InFlight | None:
        if self._fixed:
            return self._gather_rows(flight)
        return self._cross_nodes(flight) if flight.leg is Leg.INSIDE else self._gather_back(flight)

    def _sum_into_shard(self, flight: InFlight) -> None:
        lane = flight.reduction.lane
        gradients = lane.gradients
        assert gradients is not None
        if self._fixed:
            self._sum_in_tree(flight)
            return
        gradients.require_no_sum(flight.divisor)
        own = gradients.staged()
        if flight.leg is Leg.BACK:
            total = self._gathered_back(flight)[: len(own)]
            (own.add_ if gradients.live else own.copy_)(total)
        elif gradients.live or lane.dtypes.sum != lane.dtypes.rest:
            total = torch.empty_like(own, dtype=lane.dtypes.sum)
            flight.wire.mean(flight.received, flight.divisor, total)
            if gradients.live:
                gradients.add(own, total)
            else:
                own.copy_(total)
        else:
            flight.wire.mean(flight.received, flight.divisor, own)
        gradients.put_back(own)
        gradients.live = True

    def _sum_in_tree(self, flight: InFlight) -> None:
        """One leaf per micro-batch, in their order, whichever rank computed it."""
        reduction, share = flight.reduction, self._share
        lane, gradients = reduction.lane, reduction.lane.gradients
        assert share is not None
        assert gradients is not None
        tree = reduction.trees.setdefault(flight.part, SummationTree())
        if tree.leaves != share.first:
            raise StateError(
                f"{unit_label(lane.unit)}: gradients of micro-batch {share.first} of {share.micro_batches} "
                f"follow those of {tree.leaves}: one had no backward, or more of them than others",
                "Call backward equally often for each of batches.steps' micro-batches; p.grad was not set.",
            )
        rows = flight.received.view(share.ranks, -1)
        for row, weight in zip(self._rows_in_order, share.weights[share.first :], strict=False):
            leaf = torch.empty(rows.shape[1], dtype=lane.dtypes.sum, device=rows.device)
            tree.add(leaf.copy_(rows[row]).mul_(weight))
        if tree.leaves < share.micro_batches:
            return
        own = gradients.staged()
        total, own_divisor = tree.total(), reduction.unit.policy.divisor
        if own_divisor is not None:
            total.mul_(share.ranks / own_divisor)
        (own.add_ if gradients.live else own.copy_)(total)
        gradients.put_back(own)
        gradients.live = True

    def _gather_rows(self, flight: InFlight) -> InFlight:
        """With replicas and reduce='fixed': the rows that every replica's ranks have sent for this shard."""
        comm, reduction = self._comm, flight.reduction
        group, received = comm.cross_node_group, flight.received
        assert group is not None
        rows = torch.empty(group.ranks, received.numel(), dtype=received.dtype, device=received.device)
        with comm.beside("sums of replicas"):
            if flight.operation is not None:
                flight.operation.wait()
            rows[group.rank].copy_(received.view(-1))
            operation = group.gather(as_bytes(rows), as_bytes(rows[group.rank]), self._tag(reduction.lane))
            self._mark_read(flight)
        return InFlight(Leg.ACROSS, reduction, rows, rows, operation, 1, flight.wire, part=flight.part)

    def _cross_nodes(self, flight: InFlight) -> InFlight | None:
        """The node's sum goes between nodes, in the dtype of the wire between them.

        With replicas it is added to what was postponed, and may be postponed itself.
        """
        comm, reduction, wire = self._comm, flight.reduction, flight.reduction.across
        group, lane = comm.cross_node_group, reduction.lane
        assert group is not None
        device = lane.home.compute_device
        shape = group.ranks, self._row_elements(lane, wire)
        if self.postponing and comm.replicas > 1:
            self._postpone_sum(flight, torch.empty(shape, dtype=lane.dtypes.sum, device=device).view(-1))
            return None
        postponed, reduction.accumulated_shard = reduction.accumulated_shard, None
        values = rows = wire.rows(*shape, device)
        sums_into_rows = (
            wire.in_place and postponed is None and flight.wire.rounds_once(flight.received, flight.divisor)
        )
        if not sums_into_rows and rows.dtype != lane.dtypes.sum:
            values = torch.empty(shape, dtype=lane.dtypes.sum, device=device)
        received = torch.empty_like(rows)
        residual = reduction.residual(Leg.ACROSS, values) if self._keeps_residual(wire) else None
        with comm.beside("sums of nodes"):
            self._sum_of_node(flight, values.view(-1), postponed)
            if rows is not values:
                wire.encode(values, rows, residual)
            operation = group.exchange(as_bytes(received), as_bytes(rows), self._tag(lane))
            self._mark_read(flight, values, *(() if postponed is None else (postponed,)))
        return InFlight(Leg.ACROSS, reduction, rows, received, operation, group.ranks, wire)

    def _postpone_sum(self, flight: InFlight, total: torch.Tensor) -> None:
        """The node's sum stays here until the last micro-batch."""
        reduction = flight.reduction
        postponed, reduction.accumulated_shard = reduction.accumulated_shard, total
        with self._comm.beside("sums of nodes"):
            self._sum_of_node(flight, total, postponed)
            self._mark_read(flight, total, *(() if postponed is None else (postponed,)))

    def _sum_of_node(self, flight: InFlight, total: torch.Tensor, postponed: torch.Tensor | None) -> None:
        share = flight.reduction.lane.layout.total // self._comm.shard_group.ranks
        if flight.operation is not None:
            flight.operation.wait()
        flight.wire.mean(flight.received, flight.divisor, total[:share])
        total[share:].zero_()
        if postponed is not None:
            total.add_(postponed)

    def _gather_back(self, flight: InFlight) -> InFlight:
        """With replicas: this rank's part of the sum over nodes goes to all of them."""
        comm, reduction, wire = self._comm, flight.reduction, flight.reduction.back
        group, lane = comm.cross_node_group, reduction.lane
        assert group is not None
        num_elements, device = self._row_elements(lane, wire), lane.home.compute_device
        total = torch.empty(1, num_elements, dtype=lane.dtypes.sum, device=device)
        rows = wire.rows(group.ranks, num_elements, device)
        own = rows[group.rank : group.rank + 1]
        residual = reduction.residual(Leg.BACK, total) if self._keeps_residual(wire) else None
        with comm.beside("sums of replicas"):
            if flight.operation is not None:
                flight.operation.wait()
            flight.wire.mean(flight.received, flight.divisor, total[0])
            wire.encode(total, own, residual)
            operation = group.gather(as_bytes(rows), as_bytes(own), self._tag(lane))
            self._mark_read(flight, total)
        return InFlight(Leg.BACK, reduction, rows, rows, operation, 1, wire)

    def _gathered_back(self, flight: InFlight) -> torch.Tensor:
        if flight.wire.in_place:
            return flight.received.view(-1)
        elements = self._row_elements(flight.reduction.lane, flight.wire)
        total = torch.empty(len(flight.received), elements, device=flight.received.device)
        flight.wire.decode(flight.received, total)
        return total.view(-1)

    def _row_elements(self, lane: Lane, wire: Wire) -> int:
        """Between nodes, elements per row: with replicas, a shard need not divide by nodes, and is padded."""
        share, multiple = lane.layout.total // self._comm.shard_group.ranks, 1 if wire.in_place else BLOCK
        return -(-share // (self._options.nodes * multiple)) * multiple

    def _keeps_residual(self, wire: Wire) -> bool:
        return not wire.in_place and self._feeds_back

    def _mark_read(self, flight: InFlight, *held: torch.Tensor) -> None:
        """On a device: from here on the compute stream may free what this leg has received, and these."""
        if not self._comm.watchdog.host_waits:
            flight.read = Mark(torch.cuda.current_stream(self._comm.device))
            flight.held += held

    def _tag(self, lane: Lane) -> OpTag:
        return self._comm.tag(lane.unit, "backward")

    # ---- finish

    def finish(self) -> None:
        """Set `p.grad`, or postpone it to the last micro-batch."""
        try:
            self._finish()
        except BaseException:
            self._forget_penalties()  # they would join the gradients of a later backward
            raise

    def _finish(self) -> None:
        self._drain()
        self._take_penalties()
        if self._fixed:
            assert self._share is not None
            waits = not self._share.last
        else:
            waits = self.postponing and (self._accumulates or self._comm.replicas > 1)
        if waits:
            self._postpone()
            return
        self.postponed = False
        reductions = [r for unit in self._order for r in self._training[unit]]
        used = self._agree_on_used(reductions)
        for reduction in reductions:
            reduction.used = None
        if self._options.check_gradients:
            self._check_finite(reductions)
            check_repeated(self._comm, reductions)
        if self._options.replicated:
            self._regather(reductions)
        for reduction in self._penalised:
            if any(reduction is other for other in reductions):
                reduction.add_penalties()
            else:
                reduction.assign_penalties()
        self._penalised.clear()
        listeners = []
        for reduction, flags in zip(reductions, used, strict=True):
            lane = reduction.lane
            assert lane.gradients is not None
            for parameter, view, flag in zip(lane.parameters, lane.gradients.views, flags, strict=True):
                if flag and parameter.requires_grad:
                    parameter.grad = view
                    if len(parameter._post_accumulate_grad_hooks or ()) > 1:  # ours is one
                        listeners.append(parameter)
        for parameter in listeners:
            for hook in list(parameter._post_accumulate_grad_hooks.values()):
                if not getattr(hook, "is_fullshard_guard", False):
                    hook(parameter)

    def _regather(self, reductions: Sequence[LaneReduction]) -> None:
        """Every rank's sums on all ranks: all in flight before the first is waited for."""
        in_flight = []
        for reduction in reductions:
            lane, gradients = reduction.lane, reduction.lane.gradients
            assert gradients is not None
            flat = gradients.staged_flat()
            own = flat.view(self._comm.ranks, -1)[self._comm.rank]
            in_flight.append((gradients, flat, self._comm.regather_gradients(flat, own, self._tag(lane))))
        for gradients, flat, operation in in_flight:
            if operation is not None:
                operation.wait()
            gradients.put_back_flat(flat)

    def finish_penalties(self) -> None:
        """The backward of a penalty alone is over."""
        self._share = shares.current(self._comm.all_ranks)
        try:
            self._take_penalties()
            waiting = [r for r in self._penalised if r.lane.gradients and r.lane.gradients.holder.postponed]
            for reduction in self._penalised:
                if reduction not in waiting:
                    reduction.assign_penalties()
        except BaseException:
            self._forget_penalties()
            raise
        self._penalised = waiting

    def _forget_penalties(self) -> None:
        self.penalties.clear()
        for reduction in self._penalised:
            reduction.penalties.clear()
        self._penalised.clear()

    def _take_penalties(self) -> None:
        """What this backward brought, each times the mean of its factor over ranks: a collective."""
        if not self.penalties:
            return
        if self._fixed:
            raise NotSupported(
                "fs.penalty with reduce='fixed': its gradients are summed over ranks, not over micro-batches",
                "Leave out reduce='fixed', or add the penalty's gradient to p.grad after the last backward.",
            )
        factors = torch.stack([factor for factor, _ in self.penalties]).to(torch.float64)
        if self._share is not None:
            factors.mul_(self._share.weight)
        by_lane = {id(r.lane): r for unit in self._units for r in unit}
        for factor, (_, terms) in zip(self._comm.mean_everywhere(factors), self.penalties, strict=True):
            for lane, index, gradient in terms:
                by_lane[id(lane)].add_penalty(index, gradient * factor.to(gradient))
        self._penalised = [r for r in by_lane.values() if r.penalties]
        self.penalties.clear()

    def _postpone(self) -> None:
        """`p.grad` becomes a token: it refuses to be read, and removing it drops what has accumulated."""
        self.postponed = True
        for unit in self._order:
            for reduction in self._training[unit]:
                gradients = reduction.lane.gradients
                assert gradients is not None
                gradients.holder.postponed = True
                for parameter, view in zip(reduction.lane.parameters, gradients.views, strict=True):
                    if parameter.requires_grad:
                        parameter.grad = view

    def _refuse_frozen_since(self) -> None:
        """A postponed gradient is set where its parameter trains: one frozen meanwhile would lose its own.

        Not where older gradients are added to: those of frozen parameters are kept, and get the sum as well.
        """
        for reduction in (r for unit in self._units for r in unit):
            lane, gradients = reduction.lane, reduction.lane.gradients
            if gradients is None or not gradients.holder.postponed:
                continue
            if gradients.was_live and any(lane.trainable):
                continue
            named = zip(lane.layout.pieces, lane.parameters, gradients.views, strict=True)
            for piece, parameter, view in named:
                if not parameter.requires_grad and parameter.grad is view:
                    raise StateError(
                        f"parameter {piece.name!r} of {unit_label(lane.unit)} was frozen between the "
                        "micro-batches of one step, and fs.accumulate has postponed its gradient",
                        "Freeze parameters between steps, after optimizer.step() and zero_grad(); or leave "
                        "out fs.accumulate in this step.",
                    )

    def _check_accumulated(self, reduction: LaneReduction) -> None:
        gradients = reduction.lane.gradients
        if gradients is None or not gradients.holder.postponed:
            return
        gradients.holder.postponed = False
        training = [p for p in reduction.lane.parameters if p.requires_grad]
        if gradients.holder.zeroed or all(p.grad is None for p in training):
            reduction.drop_accumulated()  # zero_grad() between micro-batches
        gradients.holder.zeroed = False
        if not gradients.was_live:
            for parameter, view in zip(reduction.lane.parameters, gradients.views, strict=True):
                if parameter.grad is view:
                    parameter.grad = None

    def _agree_on_used(self, reductions: Sequence[LaneReduction]) -> list[list[bool]]:
        """Which parameters any rank used. Read back only by a rank that did not use them all itself."""
        local = [r.used or [False] * len(r.lane.parameters) for r in reductions]
        for flags_of, reduction in zip(local, reductions, strict=True):
            for i, trains in enumerate(reduction.lane.trainable):
                flags_of[i] |= not trains  # frozen since: the other ranks' answers do not matter
        flat = [flag for flags in local for flag in flags]
        if self._comm.all_ranks == 1 or not flat:
            return local
        agreed = iter(self._comm.report.exchange(flat, self.postponing, self._modes))
        return [[bool(next(agreed)) for _ in flags_of] for flags_of in local]

    def _check_finite(self, reductions: Sequence[LaneReduction]) -> None:
        """Named by the rank whose batch made them; those that only the sum made, by the rank that summed."""
        local, self._not_finite = self._not_finite, []
        places = [f"rank {r} made one in {where}" for r, where in self._gather_texts(local)]
        if not places:
            summed = []
            for reduction in reductions:
                gradients = reduction.lane.gradients
                assert gradients is not None
                summed += _not_finite(reduction.lane, [view.part for view in gradients.views])
            places = [f"rank {r} found one in the sum for {where}" for r, where in self._gather_texts(summed)]
        if places:
            raise GradientError(
                f"gradients are not finite (step {self._comm.step}): {'; '.join(places)}",
                "Look at the loss scale, the learning rate and this step's batch; p.grad was not set.",
            )

    def _gather_texts(self, texts: list[str]) -> list[tuple[int, str]]:
        """The first texts of every rank, each with its rank."""
        world = self._comm.world
        gathered = zip(world.members, world.all_gather_object(texts[:4]), strict=True)
        return [(rank, text) for rank, theirs in gathered for text in theirs]

    def require_nothing_postponed(self) -> None:
        if self.postponed and self._fixed:
            raise StateError(
                "optimizer.step() before the last micro-batch of the global batch",
                "Call backward for each micro-batch of the step first.",
            )
        if self.postponed:
            raise StateError(
                "optimizer.step() while gradients are still postponed by fs.accumulate",
                "Run the last micro-batch's forward and backward outside `with fs.accumulate(model):`.",
            )
        if self._fixed and any(r.trees_incomplete for unit in self._units for r in unit):
            raise StateError(
                "optimizer.step() while backwards of some micro-batches of the global batch are missing",
                "Call backward equally often for each of batches.steps' micro-batches.",
            )

    def drop(self) -> None:
        """Forget everything in flight, after a backward that failed. After a stall it stays in flight."""
        if self._comm.stalled:
            return
        for legs in self._legs.values():
            for flight in legs:
                flight.drop()
            legs.clear()
        for lanes in self._units:
            for reduction in lanes:
                reduction.drop_accumulated()
                if reduction.send_buffer is not None:
                    reduction.send_buffer.close()
                for parameter in reduction.lane.compute_parameters:
                    parameter.grad = None
        self._forget_penalties()
        self.postponed = False


def _not_finite(lane: Lane, gradients: Sequence[torch.Tensor | None]) -> list[str]:
    return [
        f"parameter {piece.name!r} of {unit_label(lane.unit)}"
        for piece, gradient in zip(lane.layout.pieces, gradients, strict=True)
        if gradient is not None and not bool(torch.isfinite(gradient).all())
    ]
