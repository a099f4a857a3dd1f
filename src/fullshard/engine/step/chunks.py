"""The ranges of a lane's shard that an optimizer's step works on one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fullshard.engine.lane import Lane
from fullshard.engine.step import low_bit
from fullshard.engine.step.block_state import BlockState
from fullshard.precision import BLOCK, STATE_DTYPES, STATE_ROW_BYTES

# On an H200 these take less time together than copies for the other one, beside a forward too (8 did not).
NEAR_PER_FETCHED = 3
ALIGN = 256  # elements; CPU kernels compute the last ones of a tensor, without vectors, with other roundings

Key = tuple[str, torch.dtype]  # of a state
Move = tuple[torch.Tensor, torch.Tensor]  # place, values that go there


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
    states: dict[Key, torch.Tensor] = field(default_factory=dict)  # flat, in the home of states
    _block_states: dict[tuple[Key, int], BlockState] = field(default_factory=dict)

    def in_blocks(self, key: Key) -> bool:
        """Whether this state rests in rows of bytes."""
        return self.lane.dtypes.eight_bit_state and key[1] in STATE_DTYPES

    def state(self, key: Key) -> torch.Tensor:
        flat = self.states.get(key)
        if flat is None:
            count, dtype = self.stop - self.start, key[1]
            if self.in_blocks(key):
                count, dtype = low_bit.rows_of(count) * STATE_ROW_BYTES, torch.uint8
            flat = self.states[key] = self.lane.homes.state.zeros(count, dtype)
        return flat

    def at_rest(self, key: Key, index: int) -> torch.Tensor:
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

    def put(self, values: Mapping[Key, torch.Tensor], index: int) -> None:
        """States that were loaded, or made by the constructor, go into their places."""
        move(self.moves(values, index), [self.lane])

    def moves(self, values: Mapping[Key, torch.Tensor], index: int) -> list[Move]:
        """Where those go that are not in their places."""
        pairs = [(self.at_rest(key, index), value) for key, value in values.items()]
        return [(place, value) for place, value in pairs if not _is_same(place, value)]


def move(moves: Sequence[Move], lanes: Iterable[Lane]) -> None:
    """All at once: one may lie where another one goes, of another parameter, too."""
    if not moves:
        return
    for transfers in {lane.homes.transfers for lane in lanes}:
        transfers.synchronize()  # what is on its way is read from here, or stored here
    overwritten = {_plain(place).untyped_storage().data_ptr() for place, _ in moves}
    moves = [(place, value.clone() if _may_lie_in(overwritten, value) else value) for place, value in moves]
    for place, value in moves:
        if isinstance(place, BlockState):
            place.write(value)
        else:
            place.copy_(value)


def _may_lie_in(memory: set[int], value: torch.Tensor) -> bool:
    plain = _plain(value)
    return type(plain) is not torch.Tensor or plain.untyped_storage().data_ptr() in memory


def _plain(state: torch.Tensor) -> torch.Tensor:
    return state.rows if isinstance(state, BlockState) else state


def _is_same(place: torch.Tensor, value: torch.Tensor) -> bool:
    if isinstance(place, BlockState):
        return value is place
    return value.data_ptr() == place.data_ptr()


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


def is_near(chunk: Chunk, on_host: bool) -> bool:
    """Whether all that a step on it needs is where it runs."""
    return not (on_host or chunk.span.lane.homes.streams_steps)


def is_trained(chunk: Chunk) -> bool:
    """Whether a step may find gradients of it."""
    parameters = chunk.span.lane.parameters
    return any(parameters[part.index].requires_grad for part in chunk.parts)


def in_turn(chunks: Sequence[Chunk], on_host: bool) -> list[Chunk]:
    """Between those that are fetched, some that need not be: the link has work from the first moment on."""
    near = deque(chunk for chunk in chunks if is_near(chunk, on_host))
    order: list[Chunk] = []
    for chunk in chunks:
        if not is_near(chunk, on_host):
            order.append(chunk)
            order += [near.popleft() for _ in range(min(NEAR_PER_FETCHED, len(near)))]
    return [*order, *near]
