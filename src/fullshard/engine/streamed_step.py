"""An optimizer's step over values that do not rest on the compute device.

The user's own `step` runs once per chunk, a range of a lane's shard. For its time the parameters of the
chunk, their gradients and their states are on the compute device, and no other parameter has a gradient, so
that the optimizer skips it. An element-wise step is the same for any cut: this one is exact, bit by bit.

    fetch      master, gradients, states: home -> slab        on the stream to the device
    step       the optimizer's own code                       on the compute stream
    store      master, compute shard, states: slab -> home    on the stream to the host

Slabs are allocated once, some sets of each kind (`plan.slab_sets`): while one chunk steps, the next is
fetched and the last is stored. What rests on the compute device is used where it is. What rests on the host
comes as soon as this process asks for it, although the device may still compute gradients.

This process asks late: it waits where a device has a thousand launches before it, most of a backward. So
with `fs.Offload(slabs=...)` it asks when backward begins, for as many chunks as there are slabs. What has
been written at rest since then, by user code or by ours, is fetched again.

With `fs.Offload(step="host")` the chunk is on the host instead, and the streams change places.

With `fs.Offload(overlap=True)` the optimizer's own code runs on a stream of its own, and nobody waits here
for the last chunk. A lane's next gather waits for its own last one; whoever reads values at rest, for all.
Where settings are on the device, or gradients are the user's own, whose memory may be freed behind the step,
the step is over when it returns.

Numbers that an optimizer counts per call, in a parameter's state, in a group or in itself, are set back
before each chunk, so that a step counts once. State that is not one value per element stays where the
optimizer made it.

With `fs.shard(state="8bit")` states rest in 8-bit blocks, wherever that is: they are decoded when they are
fetched and encoded when they are stored, and a slab has them in the optimizer's own dtype. Parameters begin
at multiples of a block in their lane, and so do ranks' intervals: no part, chunk or rank cuts a block.

With `fs.Offload(split_masters=True)` masters on the host rest in two parts (see `split_masters`): they are
joined in a slab before the step, and split behind it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.engine import low_bit
from fullshard.engine.block_state import BlockState
from fullshard.engine.disk_home import DiskHome
from fullshard.engine.gradient_shard import LaneGradients
from fullshard.engine.gradients import plainly
from fullshard.engine.home import Home
from fullshard.engine.lane import Lane
from fullshard.engine.remainders import PER_BYTE, bitmap_bytes, join, split
from fullshard.engine.split_masters import SplitValues
from fullshard.engine.step_numbers import Numbers, Snapshot
from fullshard.engine.transfers import Mark, Transfers
from fullshard.engine.writes import set_data
from fullshard.errors import OffloadError, OptimizerError, unit_label
from fullshard.host_memory import host_zeros
from fullshard.offload import Offload
from fullshard.plan.layout import round_up, shard_shape
from fullshard.precision import BLOCK, STATE_DTYPES, STATE_ROW_BYTES

# On an H200 these take less time together than copies for the other one, beside a forward too (8 did not).
NEAR_PER_FETCHED = 3
ALIGN = 256  # elements; CPU kernels compute the last ones of a tensor, without vectors, with other roundings

_Key = tuple[str, torch.dtype]  # of a state


@dataclass(frozen=True)
class Part:
    """Elements start to stop of a lane's shard: all or some of those of one parameter."""

    index: int  # of the parameter in its lane
    start: int
    stop: int
    is_first: bool
    is_last: bool

    @property
    def is_all(self) -> bool:
        return self.is_first and self.is_last


@dataclass
class Span:
    """Neighbouring parameters of a lane that one optimizer holds, and what it keeps for them."""

    lane: Lane
    start: int
    stop: int
    indices: list[int]
    states: dict[_Key, torch.Tensor] = field(default_factory=dict)  # flat, in the home of states
    _block_states: dict[tuple[_Key, int], BlockState] = field(default_factory=dict)

    def in_blocks(self, key: _Key) -> bool:
        """Whether this state rests in rows of bytes."""
        return self.lane.dtypes.eight_bit_state and key[1] in STATE_DTYPES

    def state(self, key: _Key) -> torch.Tensor:
        flat = self.states.get(key)
        if flat is None:
            count, dtype = self.stop - self.start, key[1]
            if self.in_blocks(key):
                count, dtype = low_bit.rows_of(count) * STATE_ROW_BYTES, torch.uint8
            flat = self.states[key] = self.lane.homes.state.zeros(count, dtype)
        return flat

    def at_rest(self, key: _Key, index: int) -> torch.Tensor:
        """One parameter's state, shaped as its shard is."""
        view = self.lane.shard_views[index]
        start, stop = (place - self.start for place in range_of(self.lane, index))
        if not self.in_blocks(key):
            return self.state(key)[start:stop].as_strided(view.shape, view.stride())
        known = self._block_states.get((key, index))
        if known is None:
            rows = self.state(key).view(-1, STATE_ROW_BYTES)
            rows = rows[start // BLOCK : low_bit.rows_of(stop)] if start < stop else rows[:0]
            known = BlockState.make(rows, key[1], tuple(view.shape), view.stride())
            self._block_states[key, index] = known
        return known

    def put(self, key: _Key, index: int, value: torch.Tensor) -> None:
        """A state that was loaded, or made by the constructor, goes into its place."""
        place = self.at_rest(key, index)
        if isinstance(place, BlockState):
            if value is not place:
                self.lane.homes.transfers.synchronize()
                place.write(value)
        elif value.data_ptr() != place.data_ptr():
            self.lane.homes.transfers.synchronize()  # what is on its way is read from here, or stored here
            place.copy_(value)


@dataclass(frozen=True)
class Chunk:
    span: Span
    start: int
    stop: int
    parts: tuple[Part, ...]

    def within(self, part: Part) -> slice:
        return slice(part.start - self.start, part.stop - self.start)


def range_of(lane: Lane, index: int) -> tuple[int, int]:
    """Where a parameter's elements are in the lane's shard."""
    piece = lane.layout.pieces[index]
    return (piece.start, piece.stop) if lane.replicated else lane.layout.in_shard(piece, lane.comm.rank)


def spans_of(lanes: Sequence[Lane], held: set[int]) -> list[Span]:
    """Of each lane, the parameters with these identities, neighbours together."""
    spans: list[Span] = []
    for lane in lanes:
        last: Span | None = None
        for index, parameter in enumerate(lane.parameters):
            if id(parameter) not in held:
                last = None
                continue
            start, stop = range_of(lane, index)
            if last is None:
                last = Span(lane, start, start, [])
                spans.append(last)
            if start < stop:  # of others this rank has no element
                last.start = start if last.start == last.stop else last.start
                last.stop = stop
            last.indices.append(index)
    return spans


def chunks_of(span: Span, most: int) -> Iterator[Chunk]:
    """Ranges of about `most` elements. A parameter is cut at multiples of ALIGN from its own start."""
    parts: list[Part] = []

    def chunk() -> Chunk:
        made = Chunk(span, parts[0].start, parts[-1].stop, tuple(parts))
        parts.clear()
        return made

    for index in span.indices:
        first, last = range_of(span.lane, index)
        if first == last:  # this rank has no element of it; its state is made all the same
            at = parts[-1].stop if parts else span.start
            parts.append(Part(index, at, at, is_first=True, is_last=True))
            continue
        start = first
        while start < last:
            room = most - (start - parts[0].start if parts else 0)
            stop = last if last - start <= room else start + room // ALIGN * ALIGN
            if stop <= start and parts:
                yield chunk()
                continue
            stop = min(last, max(stop, start + ALIGN))
            parts.append(Part(index, start, stop, is_first=start == first, is_last=stop == last))
            start = stop
    if parts:
        yield chunk()


def _is_near(chunk: Chunk, on_host: bool) -> bool:
    """Whether all that a step on it needs is where it runs."""
    return not (on_host or chunk.span.lane.homes.streams_steps)


def _in_turn(chunks: Sequence[Chunk], on_host: bool) -> list[Chunk]:
    """Between those that are fetched, some that need not be: the link has work from the first moment on."""
    near = deque(chunk for chunk in chunks if _is_near(chunk, on_host))
    order: list[Chunk] = []
    for chunk in chunks:
        if not _is_near(chunk, on_host):
            order.append(chunk)
            order += [near.popleft() for _ in range(min(NEAR_PER_FETCHED, len(near)))]
    return [*order, *near]


def _disk_homes(lane: Lane) -> list[DiskHome]:
    return [home for home in (lane.home, lane.homes.state) if isinstance(home, DiskHome)]


class StreamedStep:
    """The streamed part of the steps of one optimizer."""

    under_way: StreamedStep | None = None  # of this process

    def __init__(
        self,
        optimizer: Optimizer,
        lanes: Sequence[Lane],
        chunk: int,
        sets: int,
        offload: Offload,
    ) -> None:
        on_host = offload.step == "host"
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._reference = weakref.ref(optimizer)  # whoever steps it holds it
        self._lanes = [lane for lane in lanes if lane.streams_steps]
        self._parameters = [p for lane in self._lanes for p in lane.parameters if id(p) in held]
        self._spans = spans_of(self._lanes, held)
        self._chunks = [c for span in self._spans for c in chunks_of(span, chunk)]
        # A disk may fail. What rests there steps first, and counts only if all ranks have stored all of it.
        self._on_disk = [c for c in self._chunks if _disk_homes(c.span.lane)]
        self._in_memory = _in_turn([c for c in self._chunks if c not in self._on_disk], on_host)
        homes = [home for chunk in self._on_disk for home in _disk_homes(chunk.span.lane)]
        self._disk = list({id(home): home for home in homes}.values())
        away = [lane.homes for lane in self._lanes if lane.homes.streams_steps]
        near = [lane.homes for lane in self._lanes]
        self._transfers = (away or near)[0].transfers if near else Transfers(torch.device("cpu"))
        self._places = {span.lane.parameters[i]: (span, i) for span in self._spans for i in span.indices}
        size = max((c.stop - c.start for c in self._chunks), default=0)
        self._site = _Site(self._transfers, on_host)
        self._idle = deque(_Slabs(round_up(size, BLOCK), self._site) for _ in range(sets))
        self._ahead: dict[int, _Staged] = {}  # fetched in backward for the next step, by id of the chunk
        self._near_slabs = _Slabs(round_up(size, BLOCK), self._site)
        self._hidden: dict[nn.Parameter, torch.Tensor] = {}  # gradients, by parameter
        self._states: dict[nn.Parameter, ElementState] = {}
        self._counted: Numbers | None = None
        self._numbers_on_device = False
        self._num_states = 0
        self._begun: Mark | None = None
        self._stored_before: dict[int, Mark | None] = {}  # by lane: what steps before this one have stored
        self._overlap = offload.overlap
        if offload.overlap:
            optimizer.register_state_dict_pre_hook(partial(_settle, self._transfers))
            # Slabs go with this object, and copies from and to them may be on their way.
            weakref.finalize(self, Transfers.wait_for_copies, self._transfers).atexit = False
        if offload.slabs is not None:
            self._transfers.call_in_backward(self.fetch_ahead)

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    @property
    def name(self) -> str:
        return type(self._optimizer).__name__

    def holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        return any(p in self._places for p in parameters)

    def put_state(self, parameter: torch.Tensor, name: str, value: Any) -> Any:
        """A state that was loaded, as it rests between steps: encoded, if it rests in blocks."""
        span, index = self._places.get(parameter, (None, 0))  # type: ignore[call-overload]
        if span is None or not _is_element_wise(value, span.lane.shard_views[index].shape):
            return value
        key = name, value.dtype
        if not span.in_blocks(key):
            return value
        span.put(key, index, value)
        return span.at_rest(key, index)

    def run(self, step: Callable[[], Any]) -> None:
        """`step` on everything that is streamed. That on all other parameters, torch's own call, follows."""
        self._hidden = {p: p.grad for p in self._parameters if p.grad is not None}
        if not self._hidden:
            return
        self._begun = self._transfers.now()  # behind what computed gradients that rest on the device
        self._stored_before = {id(lane): lane.stored for lane in self._lanes}
        before = Numbers(self._optimizer)
        groups = self._optimizer.param_groups
        self._numbers_on_device = any(group.get("fused") or group.get("capturable") for group in groups)
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        others = [(p, p.grad) for p in held if p.grad is not None and p not in self._hidden]
        for parameter in held:
            parameter.grad = None
        for lane in self._lanes:
            lane.follow_edits()
        StreamedStep.under_way = self
        try:
            if self._disk:
                self._run_on_disk(before, step)
            try:
                with self._beside(before):
                    self._run(self._in_memory, before, step)
            except BaseException:
                self._leave(before)
                raise
        finally:
            StreamedStep.under_way = None
            self._idle += [staged.slabs for staged in self._ahead.values()]  # of chunks without gradients
            self._ahead.clear()
            for parameter, gradient in others:
                parameter.grad = gradient
        for lane in self._lanes:
            lane.stepped()
        self._states.clear()
        self._counted = Numbers(self._optimizer)
        before.restore()

    def _run(self, chunks: Sequence[Chunk], before: Numbers, step: Callable[[], Any]) -> None:
        """Fetches run ahead of steps by all slab sets but one."""
        fetched: deque[_Staged] = deque()
        try:
            for chunk in chunks:
                parameters = chunk.span.lane.parameters
                shown = [part for part in chunk.parts if parameters[part.index] in self._hidden]
                if not shown:
                    continue
                if _is_near(chunk, self._site.on_host):
                    self._finish_chunk(self._fetch(_Staged(chunk, shown, self._near_slabs)), before, step)
                    continue
                staged = self._ahead.pop(id(chunk), None)
                if staged is None:
                    while len(self._idle) == 1 and fetched:
                        self._finish_chunk(fetched[0], before, step)
                        self._idle.append(fetched.popleft().slabs)
                    staged = _Staged(chunk, shown, self._idle_slabs())
                staged.shown = shown
                fetched.append(staged)
                self._fetch(staged)
            while fetched:
                self._finish_chunk(fetched[0], before, step)
                self._idle.append(fetched.popleft().slabs)
        finally:
            self._idle += [staged.slabs for staged in fetched]

    def _idle_slabs(self) -> _Slabs:
        if len(self._idle) == 1 and self._ahead:  # they have chunks whose turn comes later
            self._idle.append(self._ahead.popitem()[1].slabs)
        return self._idle.popleft()

    def fetch_ahead(self) -> None:
        """What a chunk has at rest comes into a slab, as long as one is idle, except gradients."""
        if self._ahead or StreamedStep.under_way is not None:
            return
        for chunk in self._in_memory:
            if len(self._idle) == 1:
                return
            is_trained = any(chunk.span.lane.parameters[part.index].requires_grad for part in chunk.parts)
            if is_trained and chunk.span.states and not _is_near(chunk, self._site.on_host):
                staged = self._ahead[id(chunk)] = _Staged(chunk, [], self._idle.popleft())
                self._place(staged)
                staged.written = self._writes_of(staged)
                self._copy(staged, list(staged.places()), staged.slabs.free, chunk.span.lane.stored)

    @staticmethod
    def _writes_of(staged: _Staged) -> tuple[Any, ...]:
        """It is another one when values at rest may have been written."""
        lane, states = staged.chunk.span.lane, staged.chunk.span.states
        seen = [(key, flat._version) for key, flat in states.items()]
        return lane.num_writes, lane.homes.transfers.num_writes, tuple(seen)

    @contextmanager
    def _beside(self, before: Numbers) -> Iterator[None]:
        """Steps in here go on beside computing, where that is wanted and possible."""
        if not self._overlap or before.on_device or self._has_foreign_gradients():
            yield
            self._transfers.synchronize()  # the host may read what rests there
            return
        models = {lane.homes.transfers for lane in self._lanes}  # one optimizer may hold several
        with self._transfers.beside(*(transfers.mark_gathers() for transfers in models)):
            yield
            with self._transfers.down(self._transfers.now()):  # some chunks are stored nowhere
                over = self._transfers.mark_down()
        for transfers in models:
            transfers.pending = over
        for lane in self._lanes:
            if lane.gradients is not None:
                lane.gradients.holder.read_until(lane.updated)

    def _has_foreign_gradients(self) -> bool:
        """Whether user code has set some."""
        held = (lane.gradients for lane in self._lanes if lane.gradients is not None)
        own = {id(view) for gradients in held for view in gradients.views}
        return any(id(gradient) not in own for gradient in self._hidden.values())

    def _run_on_disk(self, before: Numbers, step: Callable[[], Any]) -> None:
        """All of it, on all ranks, or nothing."""
        problem: OffloadError | None = None
        try:
            try:
                self._run(self._on_disk, before, step)
                self._transfers.synchronize()
                for home in self._disk:
                    home.complete()
            except OffloadError as error:
                problem = error
            self._on_disk[0].span.lane.comm.raise_together(problem)
        except BaseException:
            self._undo(before)
            raise
        for home in self._disk:
            home.commit()

    def _undo(self, before: Numbers) -> None:
        for home in self._disk:
            home.abandon()
        for chunk in self._on_disk:
            if chunk.span.lane.compute_shard is not None:
                chunk.span.lane.compute_shard.master_written()
        for state in self._states.values():
            state.undo()
        self._states.clear()
        before.restore()
        self.finish()

    def _leave(self, before: Numbers) -> None:
        """The step has raised in between. Parameters whose last chunk was stored have stepped, and the states
        of the others rest as they do."""
        self._transfers.synchronize()
        for chunk in self._in_memory:
            if chunk.span.lane.compute_shard is not None:
                chunk.span.lane.compute_shard.master_written()
            chunk.span.lane.stepped()
        for state in self._states.values():
            if not state.rests:
                state.undo()
        self._states.clear()
        before.restore()
        self.finish()

    def finish(self) -> None:
        """Torch's own call is over. Gradients are there again, and what both have counted counts once."""
        for parameter, gradient in self._hidden.items():
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden = {}
        if self._counted is not None:
            self._counted.restore()
            self._counted = None
            self._sort_states()

    def _sort_states(self) -> None:
        """States are in the order of parameters, as after any step, and not in that of this rank's chunks."""
        states = self._optimizer.state
        if len(states) != self._num_states:
            held = [p for group in self._optimizer.param_groups for p in group["params"] if p in states]
            states.update([(p, states.pop(p)) for p in held])
            self._num_states = len(states)

    # ---- one chunk

    def _fetch(self, staged: _Staged) -> _Staged:
        chunk, lane, slabs = staged.chunk, staged.chunk.span.lane, staged.slabs
        for part in staged.shown:
            if part.is_first:
                parameter = lane.parameters[part.index]
                state = ElementState(self._optimizer, chunk.span, part.index, parameter)
                if self._numbers_on_device:
                    state.move_numbers(self._site.device)
                self._states[parameter] = state
        gradients, landed = lane.gradients, None
        if self._site.on_host:
            self._site.wait(slabs.free)
            if gradients is not None:
                gradients.settle()
        is_here = staged.written is not None and staged.written == self._writes_of(staged)
        self._place(staged)  # in the same slabs, if it is here; what is used where it rests may have moved
        places = [] if is_here else list(staged.places())
        if gradients is not None:
            landed = gradients.landed
            gradients.take_memory()  # where the user has set all of a lane's, it has none
            given = slabs.place(chunk, ".gradients", gradients.home, gradients.flat, chunk.start)
            staged.gradients = given
            places.append(given)
        # Only what rests on the compute device may have been written there.
        written = self._site.on_host or any(place.is_copy and place.home.kind == "device" for place in places)
        after = slabs.free, self._stored_before[id(lane)], landed, self._begun if written else None
        self._copy(staged, places, *after)
        return staged

    @staticmethod
    def _place(staged: _Staged) -> None:
        """Where the values of a chunk are while it steps, but for gradients."""
        chunk, span, slabs = staged.chunk, staged.chunk.span, staged.slabs
        lane = span.lane
        staged.parts = None
        if isinstance(lane.rest, SplitValues):
            staged.parts = slabs.parts(chunk, lane, lane.rest)
            staged.master = slabs.joined(chunk, lane)
        else:
            staged.master = slabs.place(chunk, ".master", lane.home, lane.rest, chunk.start)
        staged.states = {key: staged.place_of_state(key) for key in span.states}

    def _copy(self, staged: _Staged, places: Sequence[_Place], *after: Mark | None) -> None:
        copied = [place for place in places if place.is_copy]
        if not copied:
            staged.fetched = staged.fetched or staged.slabs.free
            return
        with self._site.inbound(*after):
            for place in copied:
                if place.is_on_disk:
                    place.read_ahead()
                else:
                    place.fetch()
            staged.fetched = self._site.mark_inbound()

    def _fetch_from_disk(self, staged: _Staged) -> None:
        """Reads ran ahead as far as there are buffers."""
        with self._site.inbound(staged.slabs.free, staged.fetched):
            for place in staged.places():
                if place.is_on_disk:
                    place.fetch()
            staged.fetched = self._site.mark_inbound()

    def _finish_chunk(self, staged: _Staged, before: Numbers, step: Callable[[], Any]) -> None:
        before.restore()
        self._transfers.turn()
        if any(place.is_on_disk for place in staged.places()):
            self._fetch_from_disk(staged)
        self._site.wait(staged.fetched)
        self._step(staged, step)
        self._store(staged)
        lane = staged.chunk.span.lane
        for part in staged.shown:
            if part.is_last:
                self._states[lane.parameters[part.index]].rest()

    def _step(self, staged: _Staged, step: Callable[[], Any]) -> None:
        chunk, shown = staged.chunk, staged.shown
        lane = chunk.span.lane
        gradients = self._gradients(staged)
        if staged.parts is not None:
            compute, low, ties = staged.parts
            join(compute.values, low.values, ties.values, staged.master.values)
        try:
            for part in shown:
                parameter, own = lane.parameters[part.index], chunk.within(part)
                set_data(parameter, _shaped(staged.master.values[own], lane, part))
                parameter.grad = _shaped(gradients[own], lane, part)
                states = {k: _shaped(place.values[own], lane, part) for k, place in staged.states.items()}
                self._states[parameter].show(states, part.is_first)
            step()
            for part in shown:
                self._take_states(staged, part)
        finally:
            for part in shown:
                parameter = lane.parameters[part.index]
                parameter.grad = None
                set_data(parameter, lane.shard_views[part.index])

    def _store(self, staged: _Staged) -> None:
        chunk, lane = staged.chunk, staged.chunk.span.lane
        places = [staged.master, *staged.states.values()]
        shard = lane.compute_shard
        if staged.parts is not None:
            compute, low, ties = staged.parts
            compute.values.copy_(staged.master.values)
            split(staged.master.values, compute.values, low.values, ties.values)
            places += staged.parts
        elif shard is not None:
            cast = staged.slabs.place(chunk, ".compute", shard.home, shard.values, chunk.start)
            cast.values.copy_(staged.master.values)
            places.append(cast)
        stepped = self._transfers.now()
        if any(place.is_copy for place in places):
            with self._site.outbound(stepped):
                for place in places:
                    place.store()
                staged.slabs.free = lane.stored = self._site.mark_outbound()
        if self._overlap:
            lane.updated = stepped if lane.sends_from_device else lane.stored

    def _take_states(self, staged: _Staged, part: Part) -> None:
        """What the step has made or replaced for one parameter goes into its place."""
        chunk, lane = staged.chunk, staged.chunk.span.lane
        for key, value in self._states[lane.parameters[part.index]].take(part).items():
            if key not in staged.states:  # the first step makes it
                chunk.span.state(key)
                staged.states[key] = place = staged.place_of_state(key)
                with self._site.inbound(self._transfers.now()):
                    place.fetch()
                    fetched = self._site.mark_inbound()
                self._site.wait(fetched)
            shaped = _shaped(staged.states[key].values[chunk.within(part)], lane, part)
            if shaped.data_ptr() != value.data_ptr():
                shaped.copy_(value)

    def _gradients(self, staged: _Staged) -> torch.Tensor:
        """Where the step runs, with the factors that clipping has left, and what user code has set."""
        chunk, lane = staged.chunk, staged.chunk.span.lane
        own, given = lane.gradients, staged.gradients
        if given is not None and own is not None:
            values = given.values
            if own.as_computed:
                values = staged.slabs.slab(chunk, ".given", lane.rest.dtype).copy_(values)
            foreign = [
                p for p in staged.shown if self._hidden[lane.parameters[p.index]] is not own.views[p.index]
            ]
            self._multiply(values, staged, own)
            if not foreign:
                return values
            if not own.as_computed:
                values = staged.slabs.slab(chunk, ".given", lane.rest.dtype).copy_(values)
        else:
            foreign = staged.shown
            values = staged.slabs.slab(chunk, ".given", lane.rest.dtype)
        for part in foreign:
            self._take_given(values[chunk.within(part)], lane, part)
        return values

    @staticmethod
    def _multiply(values: torch.Tensor, staged: _Staged, gradients: LaneGradients) -> None:
        """By the factors that were kept: at once, where they are the same ones for all of the chunk."""
        factors = [gradients.factors(part.index) for part in staged.shown]
        alike = all(list(map(id, each)) == list(map(id, factors[0])) for each in factors)
        if alike and len(factors) == len(staged.chunk.parts):
            for factor in factors[0]:
                values.mul_(factor)
            return
        for part, each in zip(staged.shown, factors, strict=True):
            for factor in each:
                values[staged.chunk.within(part)].mul_(factor)

    def _take_given(self, place: torch.Tensor, lane: Lane, part: Part) -> None:
        """A gradient that user code has set."""
        with plainly():
            given = self._hidden[lane.parameters[part.index]].detach()
            if part.is_all:
                _shaped(place, lane, part).copy_(given)
                return
            start, _ = range_of(lane, part.index)
            flat = (
                torch.empty_like(lane.shard_views[part.index]).copy_(given).as_strided((given.numel(),), (1,))
            )
            place.copy_(flat[part.start - start : part.stop - start])


class _Site:
    """Where steps run, and how values come there and go back."""

    def __init__(self, transfers: Transfers, on_host: bool) -> None:
        self.transfers, self.on_host = transfers, on_host
        self.device = torch.device("cpu") if on_host else transfers.device
        self.kind = "host" if on_host else "device"  # values in this home are used where they are

    def inbound(self, *after: Mark | None) -> AbstractContextManager[Any]:
        return self.transfers.down(*after) if self.on_host else self.transfers.up(*after)

    def outbound(self, *after: Mark | None) -> AbstractContextManager[Any]:
        return self.transfers.up(*after) if self.on_host else self.transfers.down(*after)

    def mark_inbound(self) -> Mark:
        return self.transfers.mark_down() if self.on_host else self.transfers.mark_up()

    def mark_outbound(self) -> Mark:
        return self.transfers.mark_up() if self.on_host else self.transfers.mark_down()

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            (mark.synchronize if self.on_host else mark.wait)()

    def memory(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        if self.on_host:
            return host_zeros(num_elements, dtype, self.transfers.device)
        return torch.empty(num_elements, dtype=dtype, device=self.device)


@dataclass
class _Place:
    """Where a step has the values of one kind of a chunk."""

    home: Home
    at_rest: torch.Tensor
    start: int
    values: torch.Tensor  # where the step runs
    is_copy: bool

    @property
    def is_on_disk(self) -> bool:
        return self.home.kind == "disk"

    def read_ahead(self) -> None:
        self.home.read_ahead(self.at_rest, self.start, len(self.values))

    def fetch(self) -> None:
        if self.is_copy:
            self.home.fetch(self.at_rest, self.start, self.values)

    def store(self) -> None:
        if self.is_copy:
            self.home.store(self.at_rest, self.start, self.values)


@dataclass
class _BlockPlace(_Place):
    """Of a state in 8-bit blocks: `at_rest` is bytes, `start` the first of them, and values fill all rows."""

    @property
    def _num_bytes(self) -> int:
        return low_bit.rows_of(len(self.values)) * STATE_ROW_BYTES

    def _rows_here(self) -> torch.Tensor | None:
        """The rows themselves, where they rest on the device of the values."""
        if self.is_on_disk or self.at_rest.device != self.values.device:
            return None
        return self.at_rest.data[self.start : self.start + self._num_bytes].view(-1, STATE_ROW_BYTES)

    def read_ahead(self) -> None:
        self.home.read_ahead(self.at_rest, self.start, self._num_bytes)

    def fetch(self) -> None:
        rows = self._rows_here()
        if rows is None:
            rows = self._staging()
            self.home.fetch(self.at_rest, self.start, rows.view(-1))
            if self._leaves_the_device:  # a processor does not wait for a copy by itself
                torch.cuda.current_stream(self.at_rest.device).synchronize()
        low_bit.decode(rows, self.values)

    def store(self) -> None:
        rows = self._rows_here()
        if rows is not None:
            low_bit.encode(self.values, rows)
            return
        rows = self._staging()
        low_bit.encode(self.values, rows)
        self.home.store(self.at_rest, self.start, rows.view(-1))

    def _staging(self) -> torch.Tensor:
        """On the stream of the copy, which alone uses it."""
        rows = torch.empty(self._num_bytes, dtype=torch.uint8, device=self.values.device)
        return rows.view(-1, STATE_ROW_BYTES)

    @property
    def _leaves_the_device(self) -> bool:
        return self.at_rest.is_cuda and not self.values.is_cuda


class _Slabs:
    """Memory for the values of one chunk at a time, where it steps."""

    def __init__(self, num_elements: int, site: _Site) -> None:
        self._num_elements, self._site = num_elements, site
        self._slabs: dict[_Key, torch.Tensor] = {}
        self.free: Mark | None = None  # the last chunk is stored

    def slab(self, chunk: Chunk, kind: str, dtype: torch.dtype, multiple: int = 1) -> torch.Tensor:
        return self._slab(kind, dtype, self._num_elements)[: round_up(chunk.stop - chunk.start, multiple)]

    def _slab(self, kind: str, dtype: torch.dtype, length: int) -> torch.Tensor:
        slab = self._slabs.get((kind, dtype))
        if slab is None:
            self._site.wait(self.free)
            slab = self._slabs[kind, dtype] = self._site.memory(length, dtype)
            self.free = self._site.transfers.now()  # the memory may have been used on the compute stream
        return slab

    def joined(self, chunk: Chunk, lane: Lane) -> _Place:
        """Where a split master is joined."""
        values = self.slab(chunk, ".master", lane.rest.dtype)
        return _Place(lane.home, lane.rest, chunk.start, values, is_copy=False)

    def parts(self, chunk: Chunk, lane: Lane, rest: SplitValues) -> tuple[_Place, _Place, _Place]:
        """A chunk begins where a byte of the bitmap does: parameters, and what they are cut at, do."""
        halves, start = rest.split_values, chunk.start
        compute = self.place(chunk, ".compute", lane.homes.compute, halves.compute, start)
        low = self.place(chunk, ".low", lane.home, halves.low, start)
        first, count = start // PER_BYTE, bitmap_bytes(chunk.stop - start)
        is_copy = lane.home.kind != self._site.kind
        bits = halves.ties[first : first + count]
        if is_copy:
            bits = self._slab(".ties", torch.uint8, bitmap_bytes(self._num_elements))[:count]
        return compute, low, _Place(lane.home, halves.ties, first, bits, is_copy)

    def place(self, chunk: Chunk, kind: str, home: Home, at_rest: torch.Tensor, start: int) -> _Place:
        """Where `chunk`'s values of one kind are while it steps; they rest from element `start` on."""
        if home.kind == self._site.kind:
            values = at_rest.data[start : start + chunk.stop - chunk.start]
            return _Place(home, at_rest, start, values, is_copy=False)
        return _Place(home, at_rest, start, self.slab(chunk, kind, at_rest.dtype), is_copy=True)


@dataclass
class _Staged:
    """A chunk that is where it steps, or on its way there."""

    chunk: Chunk
    shown: list[Part]
    slabs: _Slabs
    parts: tuple[_Place, _Place, _Place] | None = None  # of a split master: compute shard, 16 bits, bitmap
    master: _Place = field(init=False)
    states: dict[_Key, _Place] = field(init=False)
    gradients: _Place | None = None
    fetched: Mark | None = None
    written: tuple[Any, ...] | None = None  # what was seen of values at rest when they came ahead of the step

    def places(self) -> Iterator[_Place]:
        yield self.master
        yield from self.parts or ()
        yield from self.states.values()
        if self.gradients is not None:
            yield self.gradients

    def place_of_state(self, key: _Key) -> _Place:
        chunk, span = self.chunk, self.chunk.span
        home, at_rest, start = span.lane.homes.state, span.states[key], chunk.start - span.start
        if not span.in_blocks(key):
            return self.slabs.place(chunk, key[0], home, at_rest, start)
        values = self.slabs.slab(chunk, key[0], key[1], multiple=BLOCK)
        return _BlockPlace(home, at_rest, start // BLOCK * STATE_ROW_BYTES, values, is_copy=True)


def _shaped(flat: torch.Tensor, lane: Lane, part: Part) -> torch.Tensor:
    """Shaped as the parameter's shard is, if all of it is there, or as a smaller one would be."""
    view = lane.shard_views[part.index]
    if part.is_all:
        return flat.as_strided(view.shape, view.stride())
    return flat.view(shard_shape(tuple(view.shape), len(flat)))


class _Keeping(Protocol):
    """What a state needs of the span that its parameter is in."""

    @property
    def lane(self) -> Any: ...
    def at_rest(self, key: _Key, index: int) -> torch.Tensor: ...
    def put(self, key: _Key, index: int, value: torch.Tensor) -> None: ...


class ElementState:
    """What an optimizer keeps for one parameter, during a step that runs in chunks."""

    def __init__(self, optimizer: Optimizer, span: _Keeping, index: int, parameter: nn.Parameter) -> None:
        self._all, self._span, self._index, self._parameter = optimizer.state, span, index, parameter
        known = dict(optimizer.state.get(parameter) or {})
        shape = span.lane.shard_views[index].shape
        self._keys = {k: (k, v.dtype) for k, v in known.items() if _is_element_wise(v, shape)}
        for name, key in self._keys.items():
            span.put(key, index, known[name])
        self._keys_before = self._keys
        self._numbers = Snapshot({k: v for k, v in known.items() if k not in self._keys})
        self._is_new = not known
        self.rests = False  # the step on all parts is over

    def move_numbers(self, device: torch.device) -> None:
        """Fused steps count on the device that computes; `load_state_dict` follows the parameter's."""
        state = self._all.get(self._parameter) or {}
        moved = {
            k: v.to(device)
            for k, v in state.items()
            if isinstance(v, torch.Tensor) and v.dim() == 0 and v.device != device
        }
        if moved:
            state.update(moved)
            self._numbers = Snapshot({k: v for k, v in state.items() if k not in self._keys})

    def show(self, staged: Mapping[_Key, torch.Tensor], is_first: bool = False) -> None:
        if self._is_new:
            self._all.pop(self._parameter, None)  # for each of its parts the optimizer makes it anew
            return
        state = self._all[self._parameter]
        self._numbers.restore(state, unless_as_it_was=is_first)
        state.update({name: staged[key] for name, key in self._keys.items()})

    def take(self, part: Part) -> dict[_Key, torch.Tensor]:
        """The values of one part, after the step on it."""
        shape = self._parameter.shape
        state = self._all.get(self._parameter) or {}
        made = {name: value for name, value in state.items() if _is_element_wise(value, shape)}
        foreign = next((k for k, v in state.items() if hasattr(type(v), "__tensor_flatten__")), None)
        if foreign is not None:
            raise OptimizerError(
                f"{unit_label(self._span.lane.unit)}: state {foreign!r} of parameter "
                f"{self._span.lane.layout.pieces[self._index].name!r} is a {type(state[foreign]).__name__}, "
                "which a step in chunks (offload=, state='8bit') cannot keep",
                "Use torch's own optimizer with state='8bit', or leave out offload.",
            )
        strange = next((k for k, v in state.items() if k not in made and _numel(v) > 1), None)
        if strange is not None and not part.is_all:
            raise OptimizerError(
                f"{unit_label(self._span.lane.unit)}: state {strange!r} of parameter "
                f"{self._span.lane.layout.pieces[self._index].name!r} is not one value per element, and the "
                f"parameter is too large for one chunk of an offloaded step",
                "Use an optimizer whose state has the parameter's shape, or leave out offload.",
            )
        self._keys = {name: (name, value.dtype) for name, value in made.items()}
        return {(name, value.dtype): value for name, value in made.items()}

    def undo(self) -> None:
        """As it was before the step."""
        if self._is_new:
            self._all.pop(self._parameter, None)
            return
        self._keys = self._keys_before
        self._numbers.restore(self._all[self._parameter])
        self.rest()

    def rest(self) -> None:
        """The step on all its parts is over."""
        self.rests = True
        if self._keys:
            at_rest = {name: self._span.at_rest(key, self._index) for name, key in self._keys.items()}
            self._all[self._parameter].update(at_rest)


def _settle(transfers: Transfers, _: Optimizer) -> None:
    transfers.settle()


def _is_element_wise(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape


def _numel(value: Any) -> int:
    """Of the largest tensor in a state."""
    if isinstance(value, dict | list | tuple):
        return max(map(_numel, value.values() if isinstance(value, dict) else value), default=1)
    return value.numel() if isinstance(value, torch.Tensor) else 1
