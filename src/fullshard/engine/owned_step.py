"""An optimizer's step on entire tensors: each by its owner, or all of them by every rank.

The user's own, unmodified optimizer runs where it finds tensors of their true shape. For its time a parameter
that this rank owns *is* the entire tensor, with its entire gradient; those of other owners have no gradient,
so that the optimizer skips them, as it skips any parameter that was not used. State is kept under the
user's parameter as always: entire tensors, on the owner alone.

    fetch      parts of values and gradients -> owners      one all-to-all per bucket
    step       the optimizer's own code, on entire tensors
    send back  parts of new values -> shards                one all-to-all per bucket

The exchange of the next bucket is in flight while this one steps. The optimizer's own call of `step`, which
torch makes, is the last bucket's; those before it are called here, with what the optimizer counts set back in
between, so that a step counts once. An optimizer for which that is not right, or that has a closure, gets one
bucket.

With `gathered`, every rank gathers all values and repeats the step: for optimizers that look at all
parameters together. It costs the memory of an unsharded model, its gradients and its state.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.comm.groups import Comm, as_bytes
from fullshard.comm.watchdog import Operation
from fullshard.engine.gradients import plainly
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import in_memory_order, piece_view
from fullshard.engine.step_numbers import Numbers
from fullshard.engine.writes import set_data
from fullshard.plan.layout import Piece
from fullshard.plan.ownership import bytes_by_owner, deal, in_buckets, load_of

# Of one owner's tensors in a bucket; a larger tensor is a bucket of its own. A few buckets are enough to hide
# most of the exchange, and small ones would cost more messages than they hide.
MOST_BYTES, LEAST_BYTES, BUCKETS = 64 * 2**20, 4 * 2**20, 4


@dataclass(frozen=True, eq=False)
class Owned:
    """A sharded parameter of an optimizer, and the rank of its shard group that steps on it."""

    parameter: nn.Parameter
    lane: Lane
    index: int
    owner: int

    @property
    def piece(self) -> Piece:
        return self.lane.layout.pieces[self.index]

    @property
    def is_here(self) -> bool:
        return self.owner == self.lane.comm.rank

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(rank, start, stop) of the tensor's elements, in their order."""
        layout, piece = self.lane.layout, self.piece
        if piece.num_elements:
            first, last = piece.start // layout.interval, (piece.stop - 1) // layout.interval
            for rank in range(first, last + 1):
                yield rank, *layout.kept(piece, rank)

    def shard(self) -> torch.Tensor:
        """This rank's elements of the value, flat."""
        start, stop = self.lane.layout.in_shard(self.piece, self.lane.comm.rank)
        return self.lane.rest.data[start:stop]

    def gradient(self) -> torch.Tensor:
        """This rank's elements of the gradient, flat."""
        with plainly():
            gradient = self.parameter.grad
            assert gradient is not None
            return gradient.detach().as_subclass(torch.Tensor).reshape(-1)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """All elements, in the tensor's shape and memory order."""
        return piece_view(flat, replace(self.piece, start=0))

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        return in_memory_order(value.detach(), self.piece)


def deal_owners(
    places: Sequence[tuple[nn.Parameter, Lane, int]], before: dict[int, int] | None = None
) -> list[Owned]:
    """Every parameter with its owner, the same on all ranks; those with an owner `before`, by identity, keep
    it. Owners are dealt among the ranks of each model."""
    known = before or {}
    dealt: dict[int, int] = {}
    for comm in {id(lane.comm): lane.comm for _, lane, _ in places}.values():
        own = [(p, lane, index) for p, lane, index in places if lane.comm is comm]
        loads = [load_of(lane.layout.pieces[i].shape, lane.rest.element_size()) for _, lane, i in own]
        owners = deal(loads, comm.ranks, [known.get(id(p)) for p, _, _ in own])
        dealt |= {id(p): owner for (p, _, _), owner in zip(own, owners, strict=True)}
    return [Owned(p, lane, index, dealt[id(p)]) for p, lane, index in places]


def by_kind(items: Iterable[Owned]) -> list[list[Owned]]:
    """One list per model and dtype."""
    kinds: dict[tuple[int, torch.dtype], list[Owned]] = {}
    for item in items:
        kinds.setdefault((id(item.lane.comm), item.lane.rest.dtype), []).append(item)
    return list(kinds.values())


def bucketed(items: list[Owned], most_bytes: int | None) -> list[list[Owned]]:
    """Buckets in the order of steps, the same on all ranks."""
    loads = [load_of(i.piece.shape, i.lane.rest.element_size()) for i in items]
    owners = [i.owner for i in items]
    if most_bytes is None:
        most_bytes = min(MOST_BYTES, max(LEAST_BYTES, max(bytes_by_owner(loads, owners)) // BUCKETS))
    return [[items[n] for n in bucket] for bucket in in_buckets(loads, owners, most_bytes)]


class _Exchange(Protocol):
    """How entire tensors come, and how new values go back."""

    items: list[Owned]

    def fetch(self) -> None: ...
    def arrived(self) -> list[tuple[Owned, torch.Tensor, torch.Tensor]]: ...
    def send_back(self) -> None: ...
    def finish(self) -> None: ...


class _Alone:
    """One rank: its shards are the entire tensors."""

    def __init__(self, items: list[Owned]) -> None:
        self.items = items
        self._entire: list[tuple[Owned, torch.Tensor, torch.Tensor]] = []

    def fetch(self) -> None:
        shaped = [(item, item.shaped(item.shard()), item.shaped(item.gradient())) for item in self.items]
        self._entire = shaped

    def arrived(self) -> list[tuple[Owned, torch.Tensor, torch.Tensor]]:
        return self._entire

    def send_back(self) -> None:
        for item in self.items:
            value = item.parameter.detach()
            if value.data_ptr() != item.shard().data_ptr():
                item.shard().copy_(item.flat(value))

    def finish(self) -> None:
        self._entire = []


class _Gathered:
    """Every rank gets every tensor, and keeps its own elements of what it has computed."""

    def __init__(self, items: list[Owned]) -> None:
        self.items = items
        self._flat: list[tuple[list[Owned], torch.Tensor, torch.Tensor]] = []

    def fetch(self) -> None:
        for _, members in groupby(self.items, key=lambda item: id(item.lane)):
            items = list(members)
            lane = items[0].lane
            tag = lane.comm.tag(lane.unit, "optimizer step")
            values = lane.gather_pieces({i.index: i.shard() for i in items}, lane.rest.dtype, tag)
            gradients = lane.gather_pieces({i.index: i.gradient() for i in items}, lane.rest.dtype, tag)
            self._flat.append((items, values, gradients))

    def arrived(self) -> list[tuple[Owned, torch.Tensor, torch.Tensor]]:
        return [
            (item, piece_view(values, item.piece), piece_view(gradients, item.piece))
            for items, values, gradients in self._flat
            for item in items
        ]

    def send_back(self) -> None:
        for item in self.items:
            start, stop = item.lane.layout.kept(item.piece, item.lane.comm.rank)
            item.shard().copy_(item.flat(item.parameter)[start:stop])

    def finish(self) -> None:
        self._flat.clear()


class Routes:
    """Which elements of which tensors go from where to where, in one bucket: an all-to-all to the owners, and
    one back.

    Between two ranks go, for each tensor of the receiver (on the way back, of the sender), the elements that
    the other one keeps: `width` values of each, one after the other.
    """

    def __init__(self, items: list[Owned], dtype: torch.dtype) -> None:
        self._comm: Comm = items[0].lane.comm
        self._dtype = dtype
        self.mine = [item for item in items if item.is_here]
        ranks = self._comm.ranks
        place = {interval: at for at, interval in enumerate(self._comm.intervals)}
        # What this rank keeps, by owner; what each rank keeps of this rank's tensors, in the tensors' order.
        self.kept = sorted((item for item in items if num_kept(item)), key=lambda item: place[item.owner])
        self._to_owners, self._from_ranks = [0] * ranks, [0] * ranks
        for item in self.kept:
            self._to_owners[place[item.owner]] += num_kept(item)
        parts = [
            (place[sender], number, sender, start, stop)
            for number, item in enumerate(self.mine)
            for sender, start, stop in item.parts()
        ]
        self._parts: list[list[tuple[int, int, int]]] = [[] for _ in self.mine]  # sender, offset, count
        self._back: list[tuple[int, int, int]] = []  # tensor, start, stop: in the order of sending
        at = 0
        for to, number, sender, start, stop in sorted(parts):
            self._parts[number].append((sender, at, stop - start))
            self._back.append((number, start, stop))
            self._from_ranks[to] += stop - start
            at += stop - start
        for of_tensor in self._parts:
            of_tensor.sort()  # over several nodes the order of intervals is not that of ranks
        names = "\0".join(f"{item.piece.name} {item.owner}" for item in items)
        checksum = zlib.crc32(names.encode())
        self._label = f"{items[0].lane.unit} ({len(items)} tensors, {checksum:08x})"
        self._operation: Operation | None = None
        self._received = self._sent = torch.empty(0, dtype=dtype, device=self._comm.device)

    @property
    def in_flight(self) -> bool:
        return bool(len(self._received))

    def to_owners(self, parts: list[torch.Tensor], width: int) -> None:
        """Send `width` parts for each tensor of `kept`."""
        into, out = [width * n for n in self._from_ranks], [width * n for n in self._to_owners]
        self._exchange(parts, into, out, "optimizer step")

    def back(self, flat: list[torch.Tensor]) -> None:
        """Send all elements of each tensor of `mine` to where they are kept."""
        parts = [flat[number][start:stop] for number, start, stop in self._back]
        self._exchange(parts, self._to_owners, self._from_ranks, "after the optimizer step")

    def _exchange(self, parts: list[torch.Tensor], into: list[int], out: list[int], phase: str) -> None:
        # Kept until the operation is over.
        self._sent = torch.cat(parts).to(self._dtype) if parts else self._received.new_empty(0)
        if self._comm.ranks == 1:
            self._received = self._sent
            return
        self._received = torch.empty(sum(into), dtype=self._dtype, device=self._comm.device)
        size = self._received.element_size()
        sizes = [n * size for n in into], [n * size for n in out]
        received, sent = as_bytes(self._received), as_bytes(self._sent)
        self._operation = self._comm.exchange_parts(received, sent, sizes, self._comm.tag(self._label, phase))

    def received(self) -> torch.Tensor:
        """What has arrived; it is waited for."""
        if self._operation is not None:
            self._operation.wait()
            self._operation = None
        received = self._received
        self._sent = self._received = received.new_empty(0)
        return received

    def joined(self, received: torch.Tensor, number: int, which: int, width: int) -> torch.Tensor:
        """One of `mine`: all elements of its value `which` of those that were sent, flat."""
        slices = [
            received[width * at + which * count : width * at + (which + 1) * count]
            for _, at, count in self._parts[number]
        ]
        return torch.cat(slices) if slices else received[:0]

    def split(self, received: torch.Tensor) -> list[torch.Tensor]:
        """What came back, for each tensor of `kept`."""
        return list(torch.split(received, [num_kept(item) for item in self.kept]))


class _Dealt:
    """One bucket: values and gradients go to owners, new values come back."""

    def __init__(self, items: list[Owned]) -> None:
        self.items = items
        self._routes = Routes(items, items[0].lane.rest.dtype)
        self._returns = False

    def fetch(self) -> None:
        parts = [part for item in self._routes.kept for part in (item.shard(), item.gradient())]
        self._routes.to_owners(parts, 2)

    def arrived(self) -> list[tuple[Owned, torch.Tensor, torch.Tensor]]:
        received, routes = self._routes.received(), self._routes
        return [
            (
                item,
                item.shaped(routes.joined(received, n, 0, 2)),
                item.shaped(routes.joined(received, n, 1, 2)),
            )
            for n, item in enumerate(routes.mine)
        ]

    def send_back(self) -> None:
        self._routes.back([item.flat(item.parameter) for item in self._routes.mine])
        self._returns = True

    def finish(self) -> None:
        if self._returns and self._routes.kept:
            shards = [item.shard() for item in self._routes.kept]
            torch._foreach_copy_(shards, self._routes.split(self._routes.received()))
        elif self._returns:
            self._routes.received()
        self._returns = False


def num_kept(item: Owned) -> int:
    """How many elements of it this rank keeps."""
    start, stop = item.lane.layout.kept(item.piece, item.lane.comm.rank)
    return stop - start


class OwnedStep:
    """The steps of one optimizer on entire tensors."""

    num_shown = 0  # optimizers of this process that step so now

    def __init__(
        self,
        optimizer: Optimizer,
        items: list[Owned],
        gathered: bool,
        bucketed: bool,
        most_bytes: int | None = None,
    ) -> None:
        self._most_bytes = most_bytes
        self._reference = weakref.ref(optimizer)  # whoever steps it holds it
        self.items, self.gathered, self._bucketed = items, gathered, bucketed
        self.by_parameter = {id(item.parameter): item for item in items}
        self._lanes = list({id(item.lane): item.lane for item in items}.values())
        self._plans: dict[tuple[bool, ...], list[_Exchange]] = {}
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}  # of shards, while entire tensors are shown
        self._shown: _Exchange | None = None
        self._returning: list[_Exchange] = []  # sent back, not arrived yet

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    @property
    def is_shown(self) -> bool:
        return self._shown is not None

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this rank keeps the parameter's state."""
        item = self.by_parameter[id(parameter)]
        return self.gathered or item.is_here

    def run(self, step: Callable[[], Any], in_one: bool) -> None:
        """Step on all buckets but the last, and show that. Torch's own call follows, then `finish`.

        `in_one`: all of it is one bucket.
        """
        self.recover()
        for lane in self._lanes:
            lane.take_assigned()
        used = tuple(item.parameter.grad is not None for item in self.items)
        buckets = self._plan(used, in_one or not self._bucketed)
        if not buckets:
            return
        self._gradients = {i.parameter: i.parameter.grad for i in self.items if i.parameter.grad is not None}
        others = self._hide_others() if len(buckets) > 1 else []
        before = Numbers(self._optimizer) if len(buckets) > 1 else None
        try:
            self._fetch(buckets[0])
            for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
                if following is not None:
                    self._fetch(following)
                self._show(bucket)
                if following is None:
                    break
                if any(item.is_here for item in bucket.items):
                    step()
                    assert before is not None
                    before.restore()
                self._return()
        except BaseException:
            self._restore()
            raise
        finally:
            for parameter, gradient in others:
                parameter.grad = gradient

    def finish(self) -> None:
        """Torch's own call is over: shards have the new values, and are shown again."""
        if self._shown is None:
            return
        try:
            self._return()
            for exchange in self._returning:
                exchange.finish()
        finally:
            self._restore()

    def recover(self) -> None:
        """After a step that raised: the shards are shown again, as they were before its last bucket."""
        if self._shown is not None:
            self._restore()

    # ---- plans

    def _plan(self, used: tuple[bool, ...], in_one: bool) -> list[_Exchange]:
        """The exchanges for the parameters that have gradients: the same on all ranks."""
        key = (*used, in_one)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 8:
                self._plans.clear()
            items = [item for item, has in zip(self.items, used, strict=True) if has]
            plan = self._plans[key] = list(self._exchanges(items, in_one))
        return plan

    def _exchanges(self, items: list[Owned], in_one: bool) -> Iterator[_Exchange]:
        if not items:
            return
        buckets = [items]
        if not (in_one or self.gathered):
            buckets = bucketed(items, self._most_bytes)
        for bucket in buckets:
            yield _Together(list(self._alike(bucket)))

    def _alike(self, bucket: list[Owned]) -> Iterator[_Exchange]:
        for alike in by_kind(bucket):
            if alike[0].lane.comm.ranks == 1:
                yield _Alone(alike)
            elif self.gathered:
                yield _Gathered(sorted(alike, key=lambda item: self._lanes.index(item.lane)))
            else:
                yield _Dealt(alike)

    # ---- what the optimizer sees

    def _hide_others(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Parameters of this rank alone step in torch's own call."""
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        others = [(p, p.grad) for p in held if p.grad is not None and id(p) not in self.by_parameter]
        for parameter, _ in others:
            parameter.grad = None
        return others

    def _fetch(self, bucket: _Exchange) -> None:
        """While entire tensors of another bucket are not shown: gradients are those of shards."""
        with torch.no_grad():
            bucket.fetch()

    def _show(self, bucket: _Exchange) -> None:
        self._shown = bucket
        OwnedStep.num_shown += 1
        for lane in self._lanes:
            lane.recover = self.recover
        for parameter in self._gradients:
            parameter.grad = None
        with torch.no_grad():
            for item, value, gradient in bucket.arrived():
                set_data(item.parameter, value)
                item.parameter.grad = gradient

    def _return(self) -> None:
        assert self._shown is not None
        with torch.no_grad():
            self._shown.send_back()
        self._returning.append(self._shown)
        self._show_shards()
        while len(self._returning) > 1:
            with torch.no_grad():
                self._returning.pop(0).finish()

    def _show_shards(self) -> None:
        assert self._shown is not None
        for item in self._shown.items:
            item.parameter.grad = None
            set_data(item.parameter, item.lane.shard_views[item.index])
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._shown = None
        OwnedStep.num_shown -= 1
        for lane in self._lanes:
            lane.recover = None

    def _restore(self) -> None:
        if self._shown is not None:
            self._show_shards()
        self._gradients = {}
        self._returning = []


class _Together:
    """Exchanges of one bucket: one per dtype and per model."""

    def __init__(self, exchanges: list[_Exchange]) -> None:
        self._exchanges = exchanges
        self.items = [item for exchange in exchanges for item in exchange.items]

    def fetch(self) -> None:
        for exchange in self._exchanges:
            exchange.fetch()

    def arrived(self) -> list[tuple[Owned, torch.Tensor, torch.Tensor]]:
        return [entire for exchange in self._exchanges for entire in exchange.arrived()]

    def send_back(self) -> None:
        for exchange in self._exchanges:
            exchange.send_back()

    def finish(self) -> None:
        for exchange in self._exchanges:
            exchange.finish()
