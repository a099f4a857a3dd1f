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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.engine.gradient_shard import LaneGradients
from fullshard.engine.gradients import Step, plainly
from fullshard.engine.homes.away_gradients import AwayGradient, multiply
from fullshard.engine.homes.remainders import join, split
from fullshard.engine.homes.split_masters import SplitValues
from fullshard.engine.homes.transfers import Mark, Transfers
from fullshard.engine.lane import Lane, disk_homes_of
from fullshard.engine.step.chunks import (
    Chunk,
    Move,
    Part,
    chunks_of,
    in_turn,
    is_near,
    is_trained,
    move,
    range_of,
    spans_of,
)
from fullshard.engine.step.element_state import ElementState, is_element_wise, states_of
from fullshard.engine.step.numbers import Numbers
from fullshard.engine.step.slabs import Place, Site, Slabs, Staged, shaped
from fullshard.engine.writes import set_data
from fullshard.errors import OffloadError
from fullshard.offload import Offload
from fullshard.plan.homes import slab_sets
from fullshard.plan.layout import round_up
from fullshard.precision import BLOCK


class StreamedStep:
    """The streamed part of the steps of one optimizer."""

    under_way: StreamedStep | None = None  # of this process

    def __init__(
        self,
        optimizer: Optimizer,
        lanes: Sequence[Lane],
        chunk: int,
        room: int,
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
        self._on_disk = [c for c in self._chunks if c.span.lane.disk_homes]
        self._in_memory = in_turn([c for c in self._chunks if c not in self._on_disk], on_host)
        self._disk = disk_homes_of(chunk.span.lane for chunk in self._on_disk)
        away = [lane.homes for lane in self._lanes if lane.homes.streams_steps]
        near = [lane.homes for lane in self._lanes]
        self._transfers = (away or near)[0].transfers if near else Transfers(torch.device("cpu"))
        self._places = {span.lane.parameters[i]: (span, i) for span in self._spans for i in span.indices}
        size = max((c.stop - c.start for c in self._chunks), default=0)
        self._site = Site(self._transfers, on_host)
        sets = self._own_sets(room, chunk, offload)
        self._idle = deque(Slabs(round_up(size, BLOCK), self._site) for _ in range(sets))
        self._ahead: dict[int, Staged] = {}  # fetched in backward for the next step, by id of the chunk
        self._near_slabs = Slabs(round_up(size, BLOCK), self._site)
        self._hidden: dict[nn.Parameter, torch.Tensor] = {}  # gradients, by parameter
        self._states: dict[nn.Parameter, ElementState] = {}
        self._counted: Numbers | None = None
        self._numbers_on_device = False
        self._makes_states = False  # since they were last in order
        self._stored_before: dict[int, Mark | None] = {}  # by lane: what steps before this one have stored
        self._overlap = offload.overlap
        if offload.overlap:
            optimizer.register_state_dict_pre_hook(partial(_settle, self._transfers))
            # Slabs go with this object, and copies from and to them may be on their way.
            weakref.finalize(self, Transfers.wait_for_copies, self._transfers).atexit = False
        if offload.slabs is not None:
            self._transfers.call_in_backward(self.fetch_ahead)

    def _own_sets(self, room: int, chunk: int, offload: Offload) -> int:
        """Several optimizers share the memory of `slabs`, in which `room` sets have room."""
        fetched = [c for c in self._chunks if not is_near(c, self._site.on_host) and is_trained(c)]
        if offload.slabs is None or not fetched:
            return slab_sets(chunk, num_chunks=len(fetched))
        lanes = (lane for lane in self._lanes if lane.homes.streams_steps and any(lane.trainable))
        num_elements = sum(lane.rest.numel() for lane in lanes)
        own = sum(c.stop - c.start for c in fetched)
        room = max(slab_sets(chunk), room * own // max(1, num_elements))
        return max(2, min(room, len(fetched) + 1))

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
        if span is None or not is_element_wise(value, span.lane.shard_views[index].shape):
            return value
        key = name, value.dtype
        if not span.in_blocks(key):
            return value
        span.put({key: value}, index)
        return span.at_rest(key, index)

    def run(self, step: Callable[[], Any]) -> None:
        """`step` on everything that is streamed. That on all other parameters, torch's own call, follows."""
        self._hidden = {p: p.grad for p in self._parameters if p.grad is not None}
        if not self._hidden:
            return
        self._stored_before = {id(lane): lane.stored for lane in self._lanes}
        self._settle_given()
        before = Numbers(self._optimizer)
        self._put_states_in_place()  # on the stream that memory of replaced states belongs to
        groups = self._optimizer.param_groups
        self._numbers_on_device = any(group.get("fused") or group.get("capturable") for group in groups)
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        others = [(p, p.grad) for p in held if p.grad is not None and p not in self._hidden]
        for parameter in held:
            parameter.grad = None
        try:
            self._await_readers()
        except BaseException:
            for parameter, gradient in others:
                parameter.grad = gradient
            self.finish()
            raise
        StreamedStep.under_way = self
        Step.on_chunks = True
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
            Step.on_chunks = False
            self._idle += [staged.slabs for staged in self._ahead.values()]  # of chunks without gradients
            self._ahead.clear()
            for parameter, gradient in others:
                parameter.grad = gradient
        self._note_writes()
        self._states.clear()
        self._counted = Numbers(self._optimizer)
        before.restore()

    def _put_states_in_place(self) -> None:
        """Those of parameters without a gradient, too: this step may write where they lie now."""
        moves: list[Move] = []
        for parameter in self._parameters:
            span, index = self._places[parameter]
            states = states_of(self._optimizer, span, index, parameter)
            found = span.moves(states, index)
            if found and parameter not in self._hidden:
                at_rest = {key[0]: span.at_rest(key, index) for key in states}
                self._optimizer.state[parameter].update(at_rest)
            moves += found
        move(moves, self._lanes)

    def _settle_given(self) -> None:
        """A gradient that user code has set may be that of another parameter. Reading it multiplies what
        rests by the factors of clipping: that has to be over before any of it is fetched."""
        for parameter, gradient in self._hidden.items():
            if isinstance(gradient, AwayGradient) and not self._is_own(parameter, gradient):
                gradient.source.settle()

    def _is_own(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        span, index = self._places[parameter]
        gradients = span.lane.gradients
        return gradients is not None and gradient is gradients.views[index]

    def _await_readers(self) -> None:
        for lane in self._lanes:
            lane.follow_edits()
        if self._site.on_host:  # it writes in place what gathers may still read
            for transfers in {lane.homes.transfers for lane in self._lanes}:
                transfers.drain()

    def _note_writes(self) -> None:
        stepped: dict[int, list[int]] = {id(lane): [] for lane in self._lanes}
        for parameter in self._hidden:
            span, index = self._places[parameter]
            stepped[id(span.lane)].append(index)
        for lane in self._lanes:
            lane.stepped(stepped[id(lane)])

    def _run(self, chunks: Sequence[Chunk], before: Numbers, step: Callable[[], Any]) -> None:
        """Fetches run ahead of steps by all slab sets but one."""
        fetched: deque[Staged] = deque()
        try:
            for chunk in chunks:
                parameters = chunk.span.lane.parameters
                shown = [part for part in chunk.parts if parameters[part.index] in self._hidden]
                if not shown:
                    continue
                if is_near(chunk, self._site.on_host):
                    self._finish_chunk(self._fetch(Staged(chunk, shown, self._near_slabs)), before, step)
                    continue
                staged = self._ahead.pop(id(chunk), None)
                if staged is None:
                    while len(self._idle) == 1 and fetched:
                        self._finish_chunk(fetched[0], before, step)
                        self._idle.append(fetched.popleft().slabs)
                    staged = Staged(chunk, shown, self._idle_slabs())
                staged.shown = shown
                fetched.append(staged)
                self._fetch(staged)
            while fetched:
                self._finish_chunk(fetched[0], before, step)
                self._idle.append(fetched.popleft().slabs)
        except BaseException:
            self._transfers.now().synchronize()  # the chunk that has raised may still be stepped on
            raise
        finally:
            self._idle += [staged.slabs for staged in fetched]

    def _idle_slabs(self) -> Slabs:
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
            if is_trained(chunk) and chunk.span.states and not is_near(chunk, self._site.on_host):
                staged = self._ahead[id(chunk)] = Staged(chunk, [], self._idle.popleft())
                self._place(staged)
                written = self._writes_of(staged)
                self._copy(staged, list(staged.places()), staged.slabs.free, chunk.span.lane.stored)
                staged.written = written  # a copy may have raised, and user code may go on
                if staged.fetched is not None:
                    chunk.span.lane.homes.transfers.read_elsewhere(staged.fetched)

    @staticmethod
    def _writes_of(staged: Staged) -> tuple[Any, ...]:
        """It is another one when values at rest may have been written."""
        chunk, lane = staged.chunk, staged.chunk.span.lane
        masters = [lane.num_writes[part.index] for part in chunk.parts]
        states = [(key, flat._version) for key, flat in chunk.span.states.items()]
        return lane.homes.transfers.num_writes, masters, states

    @contextmanager
    def _beside(self, before: Numbers) -> Iterator[None]:
        """Steps in here go on beside computing, where that is wanted and possible."""
        models = {lane.homes.transfers for lane in self._lanes}  # one optimizer may hold several
        # Another one may hold some of them, and step by the streams of a model that this one does not hold.
        earlier = self._transfers.pending_elsewhere(models)
        if not self._overlap or before.on_device or self._has_foreign_gradients():
            for step in earlier:
                step.wait()
            yield
            self._transfers.drain()  # the host may read what rests there
            return
        with self._transfers.beside([transfers.mark_gathers() for transfers in models], earlier):
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
                self._transfers.drain()
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
        try:
            self._transfers.drain()
        finally:  # Ctrl-C again
            for chunk in self._in_memory:
                if chunk.span.lane.compute_shard is not None:
                    chunk.span.lane.compute_shard.master_written()
            self._note_writes()
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
        if self._makes_states:
            states = self._optimizer.state
            held = [p for group in self._optimizer.param_groups for p in group["params"] if p in states]
            states.update([(p, states.pop(p)) for p in held])
            self._makes_states = False

    # ---- one chunk

    def _fetch(self, staged: Staged) -> Staged:
        chunk, lane, slabs = staged.chunk, staged.chunk.span.lane, staged.slabs
        for part in staged.shown:
            if part.is_first:
                parameter = lane.parameters[part.index]
                state = ElementState(self._optimizer, chunk.span, part.index, parameter)
                if self._numbers_on_device:
                    state.move_numbers(self._site.device)
                self._states[parameter] = state
                self._makes_states |= state.is_new
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
        self._copy(staged, places, slabs.free, self._stored_before[id(lane)], landed)
        return staged

    @staticmethod
    def _place(staged: Staged) -> None:
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

    def _copy(self, staged: Staged, places: Sequence[Place], *after: Mark | None) -> None:
        copied = [place for place in places if place.is_copy]
        if not copied:
            staged.fetched = staged.fetched or staged.slabs.free
            return
        # Only what rests on the compute device may have been written there.
        written = self._transfers.now() if any(place.home.kind == "device" for place in copied) else None
        with self._site.inbound(*after, written):
            for place in copied:
                if place.is_on_disk:
                    place.read_ahead()
                else:
                    place.fetch()
            staged.fetched = self._site.mark_inbound()

    def _fetch_from_disk(self, staged: Staged) -> None:
        """Reads ran ahead as far as there are buffers."""
        with self._site.inbound(staged.slabs.free, staged.fetched):
            for place in staged.places():
                if place.is_on_disk:
                    place.fetch()
            staged.fetched = self._site.mark_inbound()

    def _finish_chunk(self, staged: Staged, before: Numbers, step: Callable[[], Any]) -> None:
        before.restore()
        self._transfers.turn()
        if any(place.is_on_disk for place in staged.places()):
            self._fetch_from_disk(staged)
        self._site.wait(staged.fetched)
        self._step(staged, step)
        try:
            self._keep(staged)
        except BaseException:  # some of it may be stored, which is not to be stepped on again
            if not any(place.is_on_disk for place in staged.places()):
                self._keep(staged)
            raise

    def _keep(self, staged: Staged) -> None:
        """The chunk has stepped. Called again, this does the same."""
        self._store(staged)
        lane = staged.chunk.span.lane
        for part in staged.shown:
            if part.is_last:
                self._states[lane.parameters[part.index]].rest()

    def _step(self, staged: Staged, step: Callable[[], Any]) -> None:
        chunk, shown = staged.chunk, staged.shown
        lane = chunk.span.lane
        gradients = self._gradients(staged)
        if staged.parts is not None:
            compute, low, ties = staged.parts
            join(compute.values, low.values, ties.values, staged.master.values)
        try:
            for part in shown:
                parameter, own = lane.parameters[part.index], chunk.within(part)
                set_data(parameter, shaped(staged.master.values[own], lane, part))
                parameter.grad = shaped(gradients[own], lane, part)
                states = {k: shaped(place.values[own], lane, part) for k, place in staged.states.items()}
                self._states[parameter].show(states, part.is_first)
            step()
            for part in shown:
                self._take_states(staged, part)
        finally:
            for part in shown:
                parameter = lane.parameters[part.index]
                parameter.grad = None
                set_data(parameter, lane.shard_views[part.index])

    def _store(self, staged: Staged) -> None:
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
        staged.slabs.free = stepped = self._transfers.now()
        if any(place.is_copy for place in places):
            with self._site.outbound(stepped):
                for place in places:  # what finds no memory does so before any is stored
                    place.encode()
                for place in places:
                    place.store()
                staged.slabs.free = lane.stored = self._site.mark_outbound()
        if self._overlap:
            lane.updated = stepped if lane.sends_from_device else lane.stored

    def _take_states(self, staged: Staged, part: Part) -> None:
        """What the step has made or replaced for one parameter goes into its place."""
        chunk, lane = staged.chunk, staged.chunk.span.lane
        for key, value in self._states[lane.parameters[part.index]].take(part).items():
            if key not in staged.states:  # the first step makes it
                chunk.span.state(key)
                staged.states[key] = staged.place_of_state(key)
                with self._site.inbound(self._transfers.now()):
                    staged.states[key].fetch()
                    fetched = self._site.mark_inbound()
                self._site.wait(fetched)
            place = shaped(staged.states[key].values[chunk.within(part)], lane, part)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)

    def _gradients(self, staged: Staged) -> torch.Tensor:
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

    def _multiply(self, values: torch.Tensor, staged: Staged, gradients: LaneGradients) -> None:
        """By the factors that were kept: at once, where they are the same ones for all of the chunk."""
        factors = [gradients.factors(part.index) for part in staged.shown]
        alike = all(list(map(id, each)) == list(map(id, factors[0])) for each in factors)
        if alike and len(factors) == len(staged.chunk.parts):
            for factor in factors[0]:
                multiply(values, factor, self._transfers.device)
            return
        for part, each in zip(staged.shown, factors, strict=True):
            for factor in each:
                multiply(values[staged.chunk.within(part)], factor, self._transfers.device)

    def _take_given(self, place: torch.Tensor, lane: Lane, part: Part) -> None:
        """A gradient that user code has set."""
        with plainly():
            given = self._hidden[lane.parameters[part.index]].detach()
            if part.is_all:
                shaped(place, lane, part).copy_(given)
                return
            start, _ = range_of(lane, part.index)
            flat = (
                torch.empty_like(lane.shard_views[part.index]).copy_(given).as_strided((given.numel(),), (1,))
            )
            place.copy_(flat[part.start - start : part.stop - start])


def _settle(transfers: Transfers, _: Optimizer) -> None:
    transfers.settle()
