"""Gradients on their way from full to shard: pack, exchange, sum, and `p.grad`.

One Reduction serves one model. In a backward it
    begin   looks once at every `p.grad`: fresh, to be added to, or set by somebody else
    done    packs a finished unit's gradients and sends them, in the agreed order
    finish  waits, agrees on which parameters anybody used, and hands out `p.grad`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter

import torch

from fullshard.comm.groups import Comm, as_bytes
from fullshard.engine.lane import Lane
from fullshard.engine.reduce_buffers import (
    InFlight,
    LaneReduction,
    SendBuffer,
    check_repeated,
    copy_into,
    look_at,
    mean_of_rows,
    packed_gradients,
    unpackable,
)
from fullshard.engine.tensor_parallel import local_gradients
from fullshard.engine.unit import LiveUnit
from fullshard.errors import GradientError, StateError, unit_label
from fullshard.options import Options

_IN_FLIGHT = 4
_LARGE_BYTES = 128 * 2**20
_grad = attrgetter("grad")
_GRAD, _NONE = repeat("grad"), repeat(None)  # for C-speed loops over parameters


def _nothing(_: int) -> None:
    pass


class Reduction:
    def __init__(self, units: Sequence[LiveUnit], comm: Comm, options: Options) -> None:
        self._units = [[LaneReduction(lane, unit) for lane in unit.lanes] for unit in units]
        self._training: list[list[LaneReduction]] = [[] for _ in self._units]  # those that train now
        self._comm, self._options = comm, options
        self.in_flight: list[InFlight] = []  # exchanges under way, the oldest first
        self._line: list[int] = []
        self._at = 0
        self._waiting: set[int] = set()
        self._sent: set[int] = set()
        self.diverges = False  # ranks take different paths through the model
        self.before_send: Callable[[int], None] = _nothing
        self.postponing = False  # inside fs.accumulate
        self.absent = False  # this rank has run out of data: it sends zeros
        self.active_ranks = comm.all_ranks
        self.postponed = False
        self._bad: list[str] = []  # parameters whose local gradients are not finite

    # ---- begin

    def begin(self, line: Sequence[int]) -> None:
        self._training = [[r for r in unit if any(r.lane.trainable)] for unit in self._units]
        self._line = [unit for unit in line if self._training[unit]]
        self._at = 0
        self._waiting.clear()
        self._sent.clear()
        for unit in self._line:
            for reduction in self._training[unit]:
                self._check_accumulated(reduction)
                look_at(reduction.lane)

    def prepare(self, unit: int) -> None:
        """A unit's backward begins: large products may write their gradients where they are sent from."""
        for reduction in self._training[unit]:
            lane = reduction.lane
            waiting = reduction.has_accumulated or (self.postponing and self._options.accumulates_locally)
            if not lane.places or waiting or self.absent or lane.dtypes.packed != lane.dtypes.compute:
                continue
            if not any(flight.reduction is reduction for flight in self.in_flight):
                self._buffer(reduction).invite()

    # ---- done

    def done(self, unit: int, called: Callable[[int], bool]) -> None:
        """A unit has all the gradients of this backward; units nobody called here wait for nothing."""
        if not self._training[unit]:
            return
        if unit in self._sent:
            self._send(unit)  # called again in the same backward: one reduce more
            return
        self._waiting.add(unit)
        while self._at < len(self._line):
            head = self._line[self._at]
            if head not in self._waiting and called(head):
                return
            self._at += 1
            self._send(head)

    def skip_to(self, unit: int, inner: frozenset[int], called: Callable[[int], bool]) -> None:
        """This rank's backward has come to `unit`: units before it, and before those inside it, that this
        rank never called go now."""
        while self._at < len(self._line):
            head = self._line[self._at]
            if head == unit or called(head) or head in inner:
                return
            self._at += 1
            self._send(head)

    def flush(self) -> None:
        """The backward is over: whatever has not been sent goes now, in order."""
        for unit in self._line[self._at :]:
            self._send(unit)
        self._at = len(self._line)
        for unit in sorted(self._sent):
            if any(g.grad is not None for r in self._training[unit] for g in r.lane.compute_parameters):
                self._send(unit)

    def _send(self, unit: int) -> None:
        self.before_send(unit)
        self._sent.add(unit)
        self._waiting.discard(unit)
        for reduction in self._training[unit]:
            gradients = list(map(_grad, reduction.lane.compute_parameters))
            deque(map(setattr, reduction.lane.compute_parameters, _GRAD, _NONE), maxlen=0)
            if self.absent:
                gradients = [None] * len(gradients)
            elif reduction.lane.specs:
                gradients = local_gradients(gradients, reduction.lane.specs)
            reduction.note([g is not None for g in gradients])
            if self._options.check_gradients:
                self._bad += _not_finite(reduction.lane, gradients)
            from_accumulation = reduction.has_accumulated
            try:
                sending = self._pack(reduction, gradients)
            except (RuntimeError, NotImplementedError) as error:
                raise unpackable(reduction.lane, gradients, error) from error
            if sending is not None:
                self._exchange(reduction, sending, from_accumulation)

    def _pack(self, reduction: LaneReduction, gradients: Sequence[torch.Tensor | None]) -> SendBuffer | None:
        lane = reduction.lane
        if self.postponing and self._options.accumulates_locally:
            self._accumulate(reduction, gradients)
            return None
        while any(flight.reduction is reduction for flight in self.in_flight):
            self._finish_oldest()  # its buffers are still on the way
        if reduction.has_accumulated:
            accumulation = self._accumulate(reduction, gradients)
            reduction.has_accumulated = False
            if lane.dtypes.packed == accumulation.flat.dtype:
                return accumulation
            send_buffer = self._outgoing(reduction)
            send_buffer.flat.copy_(accumulation.flat)
            accumulation.close()
            return send_buffer
        send_buffer = self._outgoing(reduction)
        copy_into(send_buffer, gradients)
        return send_buffer

    def _buffer(self, reduction: LaneReduction) -> SendBuffer:
        if reduction.send_buffer is None:
            reduction.send_buffer = SendBuffer(reduction.lane, reduction.lane.dtypes.packed)
        return reduction.send_buffer

    def _outgoing(self, reduction: LaneReduction) -> SendBuffer:
        send_buffer = self._buffer(reduction)
        send_buffer.open()  # where it was opened for products already, nothing happens
        return send_buffer

    def _accumulate(self, reduction: LaneReduction, gradients: Sequence[torch.Tensor | None]) -> SendBuffer:
        """Add to what waits for the last micro-batch, weighted so that every rank counts alike."""
        if reduction.accumulation is None:
            reduction.accumulation = SendBuffer(reduction.lane, reduction.lane.dtypes.sum)
        accumulation = reduction.accumulation
        if not reduction.has_accumulated:
            accumulation.open()
            accumulation.flat.zero_()
            reduction.has_accumulated = True
        weight = self._comm.all_ranks / self.active_ranks if self.active_ranks else 1.0
        there = [(v, g) for v, g in zip(accumulation.views, gradients, strict=True) if g is not None]
        if there:
            views, values = zip(*there, strict=True)
            torch._foreach_add_(list(views), [v.to(accumulation.flat.dtype) for v in values], alpha=weight)
        return accumulation

    def _exchange(self, reduction: LaneReduction, sent: SendBuffer, from_accumulation: bool) -> None:
        ranks = self._comm.all_ranks if from_accumulation else max(1, self.active_ranks)
        own_divisor = reduction.unit.policy.divisor
        divisor = ranks if own_divisor is None else own_divisor
        line, unit = self._comm.shard_group, reduction.lane.unit
        self._throttle(sent.size_bytes)
        if self._comm.ranks == 1:
            self.in_flight.append(InFlight(reduction, sent, sent.flat[None], None, divisor))
        elif reduction.lane.dtypes.eight_bit_wire:
            feedback = self._options.precision.error_feedback and not self.absent
            packed = packed_gradients(reduction, sent, line.ranks, feedback)
            received = torch.empty_like(packed)
            operation = line.exchange(received.view(-1), packed.view(-1), unit)
            self.in_flight.append(InFlight(reduction, packed, received, operation, divisor))
        elif self._options.reduce == "scatter":
            received = torch.empty_like(sent.flat.view(line.ranks, -1)[:1])
            operation = line.scatter(received.view(-1), sent.flat, unit)
            self.in_flight.append(InFlight(reduction, sent, received, operation, divisor))
        else:
            received = torch.empty_like(sent.flat).view(line.ranks, -1)
            operation = line.exchange(as_bytes(received), sent.as_bytes, unit)
            self.in_flight.append(InFlight(reduction, sent, received, operation, divisor))

    def _throttle(self, size_bytes: int) -> None:
        """Before another exchange: a few may be under way, a large one alone.

        gloo uses a link both ways at once only while several are.
        Ranks on different paths finish units in different orders: there, waiting could close a circle.
        """
        limit = 1 if size_bytes > _LARGE_BYTES else _IN_FLIGHT
        while len(self.in_flight) >= limit and (not self.diverges or self.in_flight[0].over()):
            self._finish_oldest()

    def _drain(self) -> None:
        """Bring home everything in flight."""
        while self.in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        flight = self.in_flight[0]
        flight.wait()
        del self.in_flight[0]  # not before: if waiting raises, `drop` must still know of its buffers
        lane, rows, divisor = flight.reduction.lane, flight.received, flight.divisor
        gradients = lane.gradients
        assert gradients is not None
        if not flight.crossed and self._comm.cross_node_group is not None and flight.operation is not None:
            self._cross(flight)
            return
        if not flight.crossed and self._comm.replicas > 1:
            self._sum_replicas(flight)
            return
        if gradients.live or lane.dtypes.sum != lane.dtypes.rest:
            total = mean_of_rows(rows, divisor, torch.empty_like(gradients.own, dtype=lane.dtypes.sum))
            (gradients.own.add_ if gradients.live else gradients.own.copy_)(total)
        else:
            mean_of_rows(rows, divisor, gradients.own)
        gradients.live = True
        if isinstance(flight.sent, SendBuffer):
            flight.sent.close()

    def _total(self, flight: InFlight, divisor: float) -> torch.Tensor:
        """What arrived on the line, added up, for a second leg; its buffer is free."""
        lane = flight.reduction.lane
        share = lane.layout.total // self._comm.shard_group.ranks
        total = torch.empty(share, dtype=lane.dtypes.sum, device=lane.rest.device)
        mean_of_rows(flight.received, divisor, total)
        if isinstance(flight.sent, SendBuffer):
            flight.sent.close()
        return total

    def _cross(self, flight: InFlight) -> None:
        """The node's sum is there: now between nodes, in the dtype of the sum."""
        across, lane = self._comm.cross_node_group, flight.reduction.lane
        assert across is not None
        total = self._total(flight, divisor=1)
        received = torch.empty_like(total).view(across.ranks, -1)
        operation = across.exchange(as_bytes(received), as_bytes(total), lane.unit)
        self.in_flight.append(InFlight(flight.reduction, total, received, operation, flight.divisor, True))

    def _sum_replicas(self, flight: InFlight) -> None:
        """This row's mean is there: now the sum over replicas, unless it is postponed."""
        reduction = flight.reduction
        total = self._total(flight, flight.divisor)
        if reduction.accumulated_shard is not None:
            total.add_(reduction.accumulated_shard)
            reduction.accumulated_shard = None
        if self.postponing:
            reduction.accumulated_shard = total
            return
        operation = self._comm.sum_replicas(total, reduction.lane.unit)
        self.in_flight.append(InFlight(reduction, total, total[None], operation, 1, True))

    # ---- finish

    def finish(self) -> None:
        """Hand out `p.grad`, or postpone it to the last micro-batch."""
        self._drain()
        postponed = self.postponing and (self._options.accumulates_locally or self._comm.replicas > 1)
        if postponed:
            self._postpone()
            return
        self.postponed = False
        reductions = [r for unit in self._line for r in self._training[unit]]
        used = self._agree_on_used(reductions)
        for reduction in reductions:
            reduction.used = None
        if self._options.check_gradients:
            self._check_finite(reductions)
            check_repeated(self._comm, reductions)
        if self._options.replicated:
            self._regather(reductions)
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
        """Every rank's sums on all ranks: all under way before the first is waited for."""
        under_way = []
        for reduction in reductions:
            lane = reduction.lane
            assert lane.gradients is not None
            under_way.append(
                self._comm.regather_gradients(lane.gradients.flat, lane.gradients.own, lane.unit)
            )
        for operation in under_way:
            if operation is not None:
                operation.wait()

    def _postpone(self) -> None:
        """`p.grad` becomes a token: it refuses to be read, and taking it away drops what has postponed up."""
        self.postponed = True
        for unit in self._line:
            for reduction in self._training[unit]:
                gradients = reduction.lane.gradients
                assert gradients is not None
                gradients.holder.postponed = True
                for parameter, view in zip(reduction.lane.parameters, gradients.views, strict=True):
                    if parameter.requires_grad:
                        parameter.grad = view

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
                flags_of[i] |= not trains  # frozen since: nothing to ask the others about
        flat = [flag for flags in local for flag in flags]
        if self._comm.all_ranks == 1 or not flat:
            return local
        if all(flat):
            self._comm.report_all_used(len(flat))  # nothing that the others say would change it
            return local
        flags = torch.tensor(flat, dtype=torch.uint8).to(self._comm.device, non_blocking=True)
        self._comm.max_everywhere(flags)
        agreed = iter(flags.tolist())
        return [[bool(next(agreed)) for _ in flags_of] for flags_of in local]

    def _check_finite(self, reductions: Sequence[LaneReduction]) -> None:
        """Named by the rank whose batch made them; those that only the sum made, by the rank that summed."""
        bad, self._bad = self._bad, []
        said = [f"rank {r} made one in {line}" for r, line in self._tell(bad)]
        if not said:
            summed = []
            for reduction in reductions:
                gradients = reduction.lane.gradients
                assert gradients is not None
                summed += _not_finite(reduction.lane, [view.part for view in gradients.views])
            said = [f"rank {r} found one in the sum for {line}" for r, line in self._tell(summed)]
        if said:
            raise GradientError(
                f"gradients are not finite (step {self._comm.step}): {'; '.join(said)}",
                "Look at the loss scale, the learning rate and this step's batch; p.grad was not set.",
            )

    def _tell(self, lines: list[str]) -> list[tuple[int, str]]:
        members, said = self._comm.world.members, self._comm.world.all_gather_object(lines[:4])
        return [(rank, line) for rank, theirs in zip(members, said, strict=True) for line in theirs]

    def require_nothing_postponed(self) -> None:
        if self.postponed:
            raise StateError(
                "optimizer.step() while gradients are still postponed by fs.accumulate",
                "Run the last micro-batch's forward and backward outside `with fs.accumulate(model):`.",
            )

    def drop(self) -> None:
        """Forget everything in flight, after a backward that failed."""
        for flight in self.in_flight:
            flight.wait()
        self.in_flight.clear()
        for lanes in self._units:
            for reduction in lanes:
                reduction.drop_accumulated()
                if reduction.send_buffer is not None:
                    reduction.send_buffer.close()
                for computing in reduction.lane.compute_parameters:
                    computing.grad = None
        self.postponed = False


def _not_finite(lane: Lane, gradients: Sequence[torch.Tensor | None]) -> list[str]:
    return [
        f"parameter {piece.name!r} of {unit_label(lane.unit)}"
        for piece, gradient in zip(lane.layout.pieces, gradients, strict=True)
        if gradient is not None and not bool(torch.isfinite(gradient).all())
    ]
