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

What the optimizer raises on one owner is raised on all ranks. That owner goes on with the exchange, which has
a flag from every rank to every other one, and texts are exchanged if any is set. On a GPU, where nobody waits
for what comes back, others learn of it when the process ends.

With `gathered`, every rank gathers all values and repeats the step: for optimizers that look at all
parameters together. It costs the memory of an unsharded model, its gradients and its state.
"""

from __future__ import annotations

import traceback
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.comm.groups import Comm, as_bytes, own_rank
from fullshard.comm.watchdog import Operation
from fullshard.engine.gradients import plainly
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import in_memory_order, piece_view
from fullshard.engine.step.numbers import Numbers
from fullshard.engine.writes import set_data
from fullshard.errors import OptimizerError
from fullshard.plan.layout import Piece
from fullshard.plan.ownership import bytes_by_owner, deal, in_buckets, load_of

# Of one owner's tensors in a bucket; a larger tensor is a bucket of its own. A few buckets are enough to hide
# most of the exchange, and small ones would cost more messages than they hide.
MOST_BYTES, LEAST_BYTES, BUCKETS = 64 * 2**20, 4 * 2**20, 4
NOBODY = -1  # the owner of what is not dealt yet


@dataclass(frozen=True, eq=False)
class Owned:
    """A sharded parameter of an optimizer, or one of the matrices that it holds, and the rank of its shard
    group that steps on it."""

    parameter: nn.Parameter
    lane: Lane
    index: int
    owner: int
    part: Piece | None = None  # of the parameter: one of its matrices

    @property
    def piece(self) -> Piece:
        return self.lane.layout.pieces[self.index] if self.part is None else self.part

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
            return self.of(gradient.detach().as_subclass(torch.Tensor).reshape(-1))

    def of(self, kept: torch.Tensor) -> torch.Tensor:
        """Of all elements of the parameter that this rank keeps, those of this part."""
        if self.part is None:
            return kept
        layout, rank, entire = self.lane.layout, self.lane.comm.rank, self.lane.layout.pieces[self.index]
        first = entire.start + layout.kept(entire, rank)[0]
        start, stop = layout.kept(self.part, rank)
        return (
            kept[self.part.start + start - first : self.part.start + stop - first]
            if stop > start
            else kept[:0]
        )

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """All elements, in the tensor's shape and memory order."""
        return piece_view(flat, replace(self.piece, start=0))

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        return in_memory_order(value.detach(), self.piece)

    def replaced(self) -> str | None:
        """What the optimizer gave the entire tensor, if that does not fit in its place any more."""
        value, rest = self.parameter.detach(), self.lane.rest
        given = value.shape, value.dtype, value.device.type
        before = torch.Size(self.piece.shape), rest.dtype, self.lane.comm.device.type
        if given == before:
            return None
        return " and ".join(f"{new} for {old}" for new, old in zip(given, before, strict=True) if new != old)


Place = tuple[nn.Parameter, Lane, int]


def deal_owners(places: Sequence[Place], before: dict[int, int] | None = None) -> list[Owned]:
    """Every parameter with its owner, the same on all ranks; those with an owner `before`, by identity, keep
    it. Owners are dealt among the ranks of each model."""
    known = before or {}
    return with_owners([Owned(p, lane, i, known.get(id(p), NOBODY)) for p, lane, i in places])


def with_owners(items: Sequence[Owned]) -> list[Owned]:
    """The same, with owners for those that have none."""
    dealt: dict[int, int] = {}
    for comm in {id(item.lane.comm): item.lane.comm for item in items}.values():
        own = [item for item in items if item.lane.comm is comm]
        loads = [load_of(item.piece.shape, item.lane.rest.element_size()) for item in own]
        owners = deal(loads, comm.ranks, [None if item.owner == NOBODY else item.owner for item in own])
        dealt |= {id(item): owner for item, owner in zip(own, owners, strict=True)}
    return [replace(item, owner=dealt[id(item)]) for item in items]


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
    def send_back(self, failed: bool) -> None: ...
    def finish(self) -> bool: ...  # whether any owner has failed


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

    def send_back(self, failed: bool) -> None:
        for item in self.items:
            value = item.parameter.detach()
            if value.data_ptr() != item.shard().data_ptr() and not item.replaced():
                item.shard().copy_(item.flat(value))

    def finish(self) -> bool:
        self._entire = []
        return False


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

    def send_back(self, failed: bool) -> None:
        for item in self.items:
            start, stop = item.lane.layout.kept(item.piece, item.lane.comm.rank)
            if not item.replaced():
                item.shard().copy_(item.flat(item.parameter)[start:stop])

    def finish(self) -> bool:
        self._flat.clear()
        return False


class Routes:
    """Which elements of which tensors go from where to where, in one bucket: an all-to-all to the owners, and
    one back.

    Between two ranks go, for each tensor of the receiver (on the way back, of the sender), the elements that
    the other one keeps: `width` values of each, one after the other. On the way back, where the host waits,
    they are followed by one element that is not zero if the sender's optimizer failed.
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
        # By rank to which they go, in the order of sending: tensor, start, stop.
        self._back: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        at = 0
        for to, number, sender, start, stop in sorted(parts):
            self._parts[number].append((sender, at, stop - start))
            self._back[to].append((number, start, stop))
            self._from_ranks[to] += stop - start
            at += stop - start
        for of_tensor in self._parts:
            of_tensor.sort()  # over several nodes the order of intervals is not that of ranks
        names = "\0".join(f"{item.piece.name} {item.owner}" for item in items)
        checksum = zlib.crc32(names.encode())
        self._label = f"{items[0].lane.unit} ({len(items)} tensors, {checksum:08x})"
        self._flags = int(ranks > 1 and self._comm.watchdog.host_waits)
        self._split_sizes: list[int] = []
        for to in range(ranks):
            self._split_sizes += [num_kept(item) for item in self.kept if place[item.owner] == to]
            self._split_sizes += [1] * self._flags
        ends = [sum(place[item.owner] <= to for item in self.kept) + to for to in range(ranks)]
        self._flag_places = set(ends if self._flags else ())
        self.failed: set[int] = set()  # owners whose optimizer failed, of what came back last
        self._operation: Operation | None = None
        self._received = self._sent = torch.empty(0, dtype=dtype, device=self._comm.device)

    @property
    def in_flight(self) -> bool:
        return bool(len(self._received))

    def to_owners(self, parts: list[torch.Tensor], width: int) -> None:
        """Send `width` parts for each tensor of `kept`."""
        into, out = [width * n for n in self._from_ranks], [width * n for n in self._to_owners]
        self._exchange(parts, into, out, "optimizer step")

    def back(self, flat: list[torch.Tensor], failed: bool) -> None:
        """Send all elements of each tensor of `mine` to where they are kept."""
        flag: list[torch.Tensor] = []
        if self._flags:
            flag.append(torch.full((1,), failed, dtype=self._dtype, device=self._comm.device))
        parts = []
        for of_rank in self._back:
            parts += [flat[number][start:stop] for number, start, stop in of_rank] + flag
        into, out = ([n + self._flags for n in sizes] for sizes in (self._to_owners, self._from_ranks))
        self._exchange(parts, into, out, "after the optimizer step")

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
        """What came back, for each tensor of `kept`; `failed` is known afterwards."""
        parts = torch.split(received, self._split_sizes)
        if not self._flags:
            return list(parts)
        flags = torch.cat([parts[at] for at in sorted(self._flag_places)]).tolist()
        self.failed = {rank for rank, flag in zip(self._comm.intervals, flags, strict=True) if flag}
        return [part for at, part in enumerate(parts) if at not in self._flag_places]


class _Dealt:
    """One bucket: values and gradients go to owners, new values come back."""

    def __init__(self, items: list[Owned]) -> None:
        self.items = items
        self._routes = Routes(items, items[0].lane.rest.dtype)
        self._fetched: list[torch.Tensor] = []  # the memory that the optimizer was shown
        self._returns = False

    def fetch(self) -> None:
        parts = [part for item in self._routes.kept for part in (item.shard(), item.gradient())]
        self._routes.to_owners(parts, 2)

    def arrived(self) -> list[tuple[Owned, torch.Tensor, torch.Tensor]]:
        received, routes = self._routes.received(), self._routes
        self._fetched = [item.shaped(routes.joined(received, n, 0, 2)) for n, item in enumerate(routes.mine)]
        return [
            (item, value, item.shaped(routes.joined(received, n, 1, 2)))
            for n, (item, value) in enumerate(zip(routes.mine, self._fetched, strict=True))
        ]

    def send_back(self, failed: bool) -> None:
        values = [
            item.flat(fetched if item.replaced() else item.parameter)
            for item, fetched in zip(self._routes.mine, self._fetched, strict=True)
        ]
        self._fetched = []
        self._routes.back(values, failed)
        self._returns = True

    def finish(self) -> bool:
        if not self._returns:
            return False
        self._returns = False
        values = self._routes.split(self._routes.received())
        if values:
            torch._foreach_copy_([item.shard() for item in self._routes.kept], values)
        return bool(self._routes.failed)


def num_kept(item: Owned) -> int:
    """How many elements of it this rank keeps."""
    start, stop = item.lane.layout.kept(item.piece, item.lane.comm.rank)
    return stop - start


class Failure:
    """What an optimizer raised on this rank, and at which of the tensors that it owns."""

    def __init__(self, error: Exception, items: list[Owned]) -> None:
        self.error = error
        at = _tensor_in_hand(error, items)
        names = [repr(item.piece.name) for item in (items if at is None else [at])]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        text = str(error).strip()
        reason = type(error).__name__ + (f": {text[:400]}" if text else "")
        self.text = (
            f"rank {own_rank()} failed in its step on {', '.join(names[:4]) or 'no tensor'}{more} ({reason})"
        )


def _tensor_in_hand(error: Exception, items: list[Owned]) -> Owned | None:
    """That which a variable of the innermost function that has one holds, or its gradient."""
    held = {id(item.parameter): item for item in items}
    held |= {id(g): item for item in items if (g := item.parameter.grad) is not None}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            if id(value) in held:
                return held[id(value)]
    return None


def raise_together(kind: str, comms: Iterable[Comm], failure: Failure | None, failed: bool) -> None:
    """On all ranks, if any has failed, which those that waited know; where nobody waits, on that rank."""
    texts, failed = [] if failure is None else [failure.text], failed or failure is not None
    for comm in comms:
        if not comm.watchdog.host_waits:
            continue
        if comm.replicas > 1:  # each group of shards has owners of its own
            flag = torch.tensor([failed], dtype=torch.uint8)
            comm.max_everywhere(flag)
            failed = bool(flag)
        if failed:
            texts = [
                text for text in comm.all_gather_object(None if failure is None else failure.text) if text
            ]
    if texts:
        raise OptimizerError(
            f"{kind}: {'; '.join(texts)}",
            "Tensors that stepped before the error, or on other ranks, have their new values and state, the "
            "others their old ones. Correct the cause; load a checkpoint unless training may go on as it is.",
        ) from (None if failure is None else failure.error)


class OwnedStep:
    """The steps of one optimizer on entire tensors."""

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
        self.inside = 0  # calls of the optimizer's own code that run now
        self.waits_for_closure = False  # gradients are shown when that has run
        self._failure: Failure | None = None  # of this rank, in this step
        self._failed = False  # whether any owner has failed

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
        self._failure, self._failed = None, False
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
                if self._failure is None and any(item.is_here for item in bucket.items):
                    self._attempt(step)
                    assert before is not None
                    before.restore()
                self._return()
            if self._failure is not None:
                self.finish()  # with the last bucket as it is
        except BaseException:
            self._restore()
            raise
        finally:
            for parameter, gradient in others:
                parameter.grad = gradient

    def finish(self) -> None:
        """Torch's own call is over: shards have the new values, and are shown again.

        If any owner's optimizer has failed, all ranks raise that.
        """
        if self._shown is None:
            return
        try:
            self._return()
            for exchange in self._returning:
                self._failed |= exchange.finish()
        finally:
            self._restore()
        failure, self._failure = self._failure, None
        comms = {id(lane.comm): lane.comm for lane in self._lanes}.values() if not self.gathered else ()
        raise_together(type(self._optimizer).__name__, comms, failure, self._failed)

    def fail(self, error: Exception) -> None:
        """Torch's own call has raised it: it is raised on all ranks, when this one has sent its values."""
        assert self._shown is not None
        self._failure = Failure(error, [item for item in self._shown.items if self.owns(item.parameter)])
        self.finish()

    def _attempt(self, step: Callable[[], Any]) -> None:
        assert self._shown is not None
        self.inside += 1
        try:
            step()
        except Exception as error:  # noqa: BLE001  raised on all ranks
            self._failure = Failure(error, [item for item in self._shown.items if item.is_here])
        finally:
            self.inside -= 1

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
        self._refuse_replaced()
        with torch.no_grad():
            self._shown.send_back(self._failure is not None)
        self._returning.append(self._shown)
        self._show_shards()
        while len(self._returning) > 1:
            with torch.no_grad():
                self._failed |= self._returning.pop(0).finish()

    def _refuse_replaced(self) -> None:
        """A tensor of another shape or dtype than its shards have is a failure of the step."""
        assert self._shown is not None
        for item in self._shown.items:
            if self._failure is None and self.owns(item.parameter) and (given := item.replaced()):
                self._failure = Failure(TypeError(f"the step gave it {given}"), [item])

    def _show_shards(self) -> None:
        assert self._shown is not None
        for item in self._shown.items:
            item.parameter.grad = None
            set_data(item.parameter, item.lane.shard_views[item.index])
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._shown = None
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

    def send_back(self, failed: bool) -> None:
        for exchange in self._exchanges:
            exchange.send_back(failed)

    def finish(self) -> bool:
        failed = [exchange.finish() for exchange in self._exchanges]
        return any(failed)
