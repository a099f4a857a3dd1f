"""Where each kind of value of each lane rests, under a budget: pure, and the same on all ranks.

Values fill the compute device first, then the host, then the disk, the most expensive to move first: the
shards that gathers send (needed in forward and in backward), then gradients, then masters, then optimizer
state. On disk are masters together with their optimizer state, so that a step which fails can be rolled back.

The engine, `fs.plan` and `fullshard plan` call the same functions, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, Protocol

from fullshard.byte_sizes import size, size_option
from fullshard.errors import OffloadError
from fullshard.offload import Offload
from fullshard.plan.layout import Layout
from fullshard.precision import BLOCK, STATE_ROW_BYTES, LaneDtypes

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")
KINDS = ("compute", "master", "gradients", "state")
# An optimizer's step in chunks. The host issues one in about half a millisecond, in which a link moves 25 MB,
# and a device takes about a thousand launches ahead: many small chunks of a step that goes on beside the next
# forward would keep the host from issuing that forward. In elements; the last with overlap.
SMALLEST_CHUNK, LARGE_CHUNK, LARGEST_CHUNK = 4 * 2**20, 8 * 2**20, 32 * 2**20
CHUNKS = 512  # at most, where they need not be larger than that
SLABS_OF_LARGE, SLAB_BYTES = 8, 18  # sets that large chunks leave room for, and their bytes per element
STATES = 2  # values that an optimizer keeps per element, as Adam does
DISK_SLOTS = 2  # of each value in its file
DISK_BUFFERS = 16  # of a rank in host memory, for chunks that are read, and as many for those written
_PAGE = 4096
DISK_COPY_BYTES = 4 * 2**20  # of a file at once, if a step has not written them
AUTO_SHARE = 0.6  # of what is free: the rest is for activations and for what others take
_MOST_HOSTS = 2**17  # times as many, which an error may propose
_STAYING = ("compute", "gradients", "master", "state")  # the last to leave the device first


@dataclass(frozen=True)
class LaneBytes:
    """Bytes of one lane on one rank, by kind. What is not cast has one shard, which is its `compute`."""

    compute: int
    master: int
    gradients: int
    state: int
    num_elements: int
    stays: bool = False  # on the device, whatever the budget
    in_blocks: bool = False  # state rests in 8-bit blocks, and is brought to its dtype for a step
    remainder: int = 0  # on the host, what restores the master from `compute` rests in its place; 0: itself

    @property
    def total(self) -> int:
        return self.compute + self.master + self.gradients + self.state

    @property
    def rest(self) -> int:
        """What an optimizer updates."""
        return self.master or self.compute

    def master_at(self, place: Place) -> int:
        return self.remainder if place == "host" and self.remainder else self.master

    @property
    def as_computed(self) -> bool:
        """Gradients rest in a narrower dtype than that of the step (`fs.Offload(one_backward=True)`)."""
        return 0 < self.gradients < self.rest


@dataclass(frozen=True)
class LaneHomes:
    """Where the values of one lane rest, by kind."""

    compute: Place = "device"
    master: Place = "device"
    gradients: Place = "device"
    state: Place = "device"

    @property
    def streams_steps(self) -> bool:
        """Whether an optimizer needs values that are not on the compute device."""
        return {self.master, self.gradients, self.state} != {"device"}


@dataclass(frozen=True)
class Free:
    """What one rank may still take, the least of any rank; and the most ranks of any host."""

    device: int
    host: int
    node_ranks: int


@dataclass(frozen=True)
class Budget:
    """Bytes per rank; None: no limit. `node_ranks` ranks share the memory of a host."""

    device: int | None
    host: int | None
    has_disk: bool
    kinds: tuple[str, ...] = KINDS
    node_ranks: int = 1


class _Lane(Protocol):
    @property
    def layout(self) -> Layout: ...
    @property
    def dtypes(self) -> LaneDtypes: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def offload(self) -> bool: ...


def bytes_of(lane: _Lane, replicated: bool, hosts: int = 1) -> LaneBytes:
    """`hosts`: on so many times as many hosts, of as many ranks."""
    layout = lane.layout if hosts == 1 else lane.layout.on(lane.layout.ranks * hosts)
    num_elements = layout.total if replicated else layout.interval
    rest = num_elements * lane.dtypes.rest.itemsize
    trained = num_elements * lane.dtypes.gradients.itemsize if lane.trainable else 0
    stays = not lane.offload
    state = STATES * lane.dtypes.state_bytes(num_elements) if lane.trainable else 0
    in_blocks = lane.dtypes.eight_bit_state
    if lane.dtypes.compute == lane.dtypes.rest:
        return LaneBytes(rest, 0, trained, state, num_elements, stays, in_blocks)
    compute = 0 if packs(layout, lane.dtypes) else num_elements * lane.dtypes.compute.itemsize
    remainder = 2 * num_elements + ceil(num_elements / 8) if splits(layout, lane.dtypes) else 0
    return LaneBytes(compute, rest, trained, state, num_elements, stays, in_blocks, remainder)


def packs(layout: Layout, dtypes: LaneDtypes) -> bool:
    """Whether gathers send 8-bit blocks, which are made of the masters themselves."""
    return dtypes.eight_bit_gather and layout.ranks > 1


def splits(layout: Layout, dtypes: LaneDtypes) -> bool:
    """Whether masters on the host rest in two parts. Tensor parallelism has parameters of its own class."""
    is_plain = all(piece.region is None for piece in layout.pieces)
    return dtypes.split and is_plain and not packs(layout, dtypes)


def budget_of(offload: Offload, lanes: Sequence[LaneBytes], full_bytes: int, free: Free) -> Budget:
    """The budget of a rank. On the device, 'auto' leaves room for full values and for a step's slabs."""
    device, host = offload.device, offload.host
    if device == "auto":
        away = [LaneHomes("host", "host", "host", "host")] * len(lanes)
        chunk = chunk_of(offload, trained_elements(lanes))
        one, count = slab_bytes(lanes, away, chunk, 1), num_chunks(lanes, away, chunk)
        sets = slab_sets(chunk, one, offload.slab_limit, count)
        in_step = slab_bytes(lanes, away, chunk, sets) + block_bytes(lanes, away, chunk)
        slabs = in_step if offload.step == "device" else 0
        room = free.device - full_bytes - slabs
        device = max(0, int(room * AUTO_SHARE))
    if host == "auto":
        host = int(free.host * AUTO_SHARE)
    elif host is not None:
        host = int(host) // free.node_ranks
    return Budget(int(device), host, offload.disk is not None, offload.kinds, free.node_ranks)


def choose(
    lanes: Sequence[LaneBytes], budget: Budget, on_hosts: Callable[[int], list[LaneBytes]] | None = None
) -> list[LaneHomes]:
    """The home of every kind of every lane. If they do not fit, the error says by how much and what would.

    `on_hosts`: the lanes on so many times as many hosts; None: a rank would have as much there.
    """
    homes, over = placed(lanes, budget)
    if over <= 0:
        return homes
    assert budget.host is not None
    ranks, host = budget.node_ranks, budget.host
    who, they = (f"the {ranks} ranks of a host need", "they") if ranks > 1 else ("a rank needs", "it")
    raise OffloadError(
        f"{who} {size((host + over) * ranks)} of host memory for values at rest, {size(over * ranks)} more "
        f"than the {size(host * ranks)} that {they} may take",
        f"Any one of these is enough: {'; '.join(_remedies(lanes, budget, over, on_hosts))}.",
    )


def _remedies(
    lanes: Sequence[LaneBytes],
    budget: Budget,
    over: int,
    on_hosts: Callable[[int], list[LaneBytes]] | None,
) -> Iterator[str]:
    """Changes of a budget that cannot be met, with each of which it can."""
    assert budget.host is not None
    yield f"fs.Offload(host='{size_option((budget.host + over) * budget.node_ranks)}')"
    device = _smallest_device(lanes, budget)
    if device is not None:
        yield f"device='{size_option(device)}', where each rank's device has that much to spare"
    homes, still_over = placed(lanes, replace(budget, has_disk=True))
    if not budget.has_disk and still_over <= 0:
        files = usage(lanes, homes)["disk"] * DISK_SLOTS * budget.node_ranks
        yield f"disk=FOLDER, with {size_option(files)} free for a host"
    if on_hosts is not None:
        times = first_fitting(lambda count: placed(on_hosts(count), budget)[1] <= 0, _MOST_HOSTS)
        if times is not None:
            yield f"{times} times as many hosts, of as many ranks"


def first_fitting(fits: Callable[[int], bool], most: int) -> int | None:
    """A number from 1 to `most` that fits while the one before it does not; None: none was found.

    The larger ones are not tried first: among very many ranks, small lanes are mostly padding.
    """
    low, high = 0, 1
    while not fits(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _smallest_device(lanes: Sequence[LaneBytes], budget: Budget) -> int | None:
    """A device budget with which the host's is enough, at most a thousandth above the smallest."""
    low, high = budget.device, sum(lane.total for lane in lanes)
    if low is None or placed(lanes, replace(budget, device=high))[1] > 0:
        return None
    while high - low > max(1, high // 1024):
        middle = (low + high) // 2
        if placed(lanes, replace(budget, device=middle))[1] > 0:
            low = middle
        else:
            high = middle
    return high


def placed(lanes: Sequence[LaneBytes], budget: Budget) -> tuple[list[LaneHomes], int]:
    """Homes, and the bytes by which a rank then exceeds its share of the host's memory."""
    away: list[list[str]] = [[] for _ in lanes]
    if budget.device is not None:
        _fill(lanes, budget.device, budget.kinds, away)
    homes = [LaneHomes(*("host" if kind in moved else "device" for kind in KINDS)) for moved in away]
    homes = [_consistent(lane, home) for lane, home in zip(lanes, homes, strict=True)]
    return _on_disk(lanes, homes, budget)


def _fill(lanes: Sequence[LaneBytes], room: int, kinds: tuple[str, ...], away: list[list[str]]) -> None:
    """What does not fit on the device, by lane. What may not leave it takes its room first."""
    # Beside a master on the device, what is cast from it has no copy of its own.
    alone = [lane.master and (lane.stays or "master" not in kinds) for lane in lanes]
    lanes = [replace(lane, compute=0) if one else lane for lane, one in zip(lanes, alone, strict=True)]
    for lane in lanes:
        room -= _bytes(lane, [kind for kind in KINDS if lane.stays or kind not in kinds])
    for kind in _STAYING:
        for lane, moved in zip(lanes, away, strict=True):
            if lane.stays or kind not in kinds:
                continue
            needed = _bytes(lane, [kind])
            if kind == "master" and lane.master and "compute" not in moved:
                needed -= lane.compute  # which had its room
            if needed > room:
                moved.append(kind)
            else:
                room -= needed


def _bytes(lane: LaneBytes, kinds: Sequence[str]) -> int:
    return sum(getattr(lane, kind) for kind in kinds)


def _consistent(lane: LaneBytes, homes: LaneHomes) -> LaneHomes:
    if not lane.master:
        return replace(homes, master=homes.compute)
    if homes.master == "device":
        return replace(homes, compute="device")  # it is cast from the master; there is no other copy
    return homes


def _on_disk(
    lanes: Sequence[LaneBytes], homes: list[LaneHomes], budget: Budget
) -> tuple[list[LaneHomes], int]:
    """What the host cannot hold goes to disk, the last lanes first, those with masters on the device last."""
    if budget.host is None:
        return homes, 0
    over = usage(lanes, homes)["host"] - budget.host
    order = sorted(range(len(lanes)), key=lambda index: (homes[index].master == "device", -index))
    for index in order if budget.has_disk else ():
        if over <= 0:
            break
        lane, before = lanes[index], homes[index]
        if lane.stays:
            continue
        after = replace(before, master="disk", state="disk")
        if not lane.master:
            after = replace(after, compute="disk")
        gain = usage([lane], [before])["host"] - usage([lane], [after])["host"]
        if gain > 0:
            homes[index] = after
            over -= gain
    return homes, over


def held(lane: LaneBytes, homes: LaneHomes) -> Iterator[tuple[str, Place, int]]:
    """By kind, where a lane's values rest and their bytes."""
    for kind in KINDS:
        if kind != "compute" or not (lane.master and homes.master == "device"):
            place: Place = getattr(homes, kind)
            yield kind, place, lane.master_at(place) if kind == "master" else getattr(lane, kind)


def usage(lanes: Sequence[LaneBytes], homes: Sequence[LaneHomes]) -> dict[Place, int]:
    """Bytes per home on one rank."""
    totals: dict[Place, int] = dict.fromkeys(PLACES, 0)
    for lane, home in zip(lanes, homes, strict=True):
        for _, place, num_bytes in held(lane, home):
            totals[place] += num_bytes
    return totals


def chunk_of(offload: Offload, num_elements: int) -> int:
    """Elements of a chunk of a step on so many: as requested, or a power of two."""
    if offload.chunk is not None:
        return offload.chunk
    fitting = 1 << (max(1, -(-num_elements // CHUNKS)) - 1).bit_length()
    if offload.slab_limit is not None:  # this process prepares a large chunk as fast as a small one
        room = offload.slab_limit // (SLABS_OF_LARGE * SLAB_BYTES)
        fitting = max(fitting, 1 << max(0, room.bit_length() - 1))
    return min(max(SMALLEST_CHUNK, fitting), LARGEST_CHUNK if offload.overlap else LARGE_CHUNK)


def slab_sets(chunk: int, set_bytes: int = 0, slabs: int | None = None, num_chunks: int | None = None) -> int:
    """Chunks of a streamed step where it runs at once: one is fetched, one steps, one is stored; or as many
    as `slabs` bytes hold. No more than there are."""
    sets = 8 if chunk <= SMALLEST_CHUNK else 4
    if slabs is not None and set_bytes:
        sets = max(sets, slabs // set_bytes)
    if num_chunks is None:
        return sets
    return max(2, min(sets, num_chunks + (slabs is not None)))  # one is free while others wait


def num_chunks(
    lanes: Sequence[LaneBytes], homes: Sequence[LaneHomes], chunk: int, step: str = "device"
) -> int:
    """Chunks of which a step fetches values."""
    pairs = zip(lanes, homes, strict=True)
    fetched = (lane.num_elements for lane, home in pairs if lane.gradients and _in_slabs(lane, home, step))
    return sum(-(-num_elements // chunk) for num_elements in fetched)


def _in_slabs(lane: LaneBytes, homes: LaneHomes, step: str) -> bool:
    """Whether steps on a lane fetch what does not rest where they run."""
    return homes.streams_steps or (step == "host" and (lane.in_blocks or lane.as_computed))


def trained_elements(lanes: Sequence[LaneBytes]) -> int:
    return sum(lane.num_elements for lane in lanes if lane.gradients)


def slab_bytes(
    lanes: Sequence[LaneBytes], homes: Sequence[LaneHomes], chunk: int, sets: int, step: str = "device"
) -> int:
    """Memory of a streamed step where it runs: sets of a chunk of each kind that rests elsewhere.

    State in 8-bit blocks, and gradients that rest as they were computed, have slabs wherever they rest. Lanes
    of which nothing rests elsewhere share one more set.
    """
    fetched: dict[str, float] = {}  # bytes per element
    near: dict[str, float] = {}  # of lanes of which nothing rests elsewhere
    num_elements = 0
    for lane, home in zip(lanes, homes, strict=True):
        if not ((home.streams_steps or lane.in_blocks or lane.as_computed) and lane.gradients):
            continue
        num_elements = max(num_elements, min(chunk, lane.num_elements))
        by_kind = fetched if _in_slabs(lane, home, step) else near
        for kind, place, num_bytes in held(lane, home):
            name = kind if lane.master or kind != "compute" else "master"  # one shard for both
            in_blocks = kind == "state" and lane.in_blocks
            is_split = kind == "master" and num_bytes < lane.master
            if is_split:
                by_kind["master"] = lane.master // lane.num_elements  # joined
                name = "remainder"
            if place != step or in_blocks:
                size_bytes = STATES * lane.rest if in_blocks else num_bytes  # in its own dtype
                each = 2 + 1 / 8 if is_split else size_bytes // lane.num_elements
                by_kind[name] = max(by_kind.get(name, 0), each)
        if lane.as_computed:
            by_kind["cast gradients"] = lane.rest // lane.num_elements
    return int(num_elements * (sets * sum(fetched.values()) + sum(near.values())))


def block_bytes(
    lanes: Sequence[LaneBytes], homes: Sequence[LaneHomes], chunk: int, step: str = "device"
) -> int:
    """Memory beside slabs for state in 8-bit blocks that rests elsewhere: of a chunk, one state on its way in
    and all of them on their way out."""
    away = (
        min(chunk, lane.num_elements)
        for lane, home in zip(lanes, homes, strict=True)
        if lane.gradients and lane.in_blocks and home.state != step
    )
    return (1 + STATES) * ceil(max(away, default=0) / BLOCK) * STATE_ROW_BYTES


def disk_buffer_bytes(lanes: Sequence[LaneBytes], homes: Sequence[LaneHomes], chunk: int) -> int:
    """Host memory of a rank between its files and where it computes: buffers of a chunk of one value each."""
    read = written = 0
    for lane, home in zip(lanes, homes, strict=True):
        for kind, place, num_bytes in held(lane, home):
            if place == "disk" and num_bytes:
                value = ceil(num_bytes / (STATES if kind == "state" else 1))
                in_chunk = ceil(value * min(1, chunk / lane.num_elements))
                read = max(read, in_chunk, min(value, DISK_COPY_BYTES))
                written = max(written, in_chunk)
    # Blocks of a file are blocks in memory, which takes a page more.
    return DISK_BUFFERS * sum((ceil(most / _PAGE) + 1) * _PAGE for most in (read, written) if most)


def most_disk_buffer_bytes(lanes: Sequence[LaneBytes], chunk: int) -> int:
    """The same, if everything were on disk that may be there."""
    movable = [lane for lane in lanes if not lane.stays]
    return disk_buffer_bytes(movable, [LaneHomes("disk", "disk", "host", "disk")] * len(movable), chunk)


@dataclass(frozen=True)
class Resting:
    """Where the values of all lanes rest, in the order of units and lanes."""

    lanes: tuple[LaneBytes, ...]
    homes: tuple[LaneHomes, ...]
    budget: Budget
    chunk: int
    step: str = "device"  # where an optimizer's step runs
    slabs: int | None = None  # bytes for its chunks, if there may be more of them than it needs
    overlap: bool = False  # it goes on beside the next forward

    def bytes_at(self, place: Place, kind: str | None = None) -> int:
        """Of one rank, of one kind or of all."""
        pairs = zip(self.lanes, self.homes, strict=True)
        each = (one for lane, homes in pairs for one in held(lane, homes))
        return sum(
            num_bytes for kind_, place_, num_bytes in each if place_ == place and kind in (None, kind_)
        )

    @property
    def host_bytes(self) -> int:
        """Of all ranks of a host."""
        return self.bytes_at("host") * self.budget.node_ranks

    @property
    def disk_bytes(self) -> int:
        """Files of all ranks of a host."""
        return self.bytes_at("disk") * DISK_SLOTS * self.budget.node_ranks

    @property
    def disk_buffer_bytes(self) -> int:
        """Host memory of each rank for what is read and written, beside what rests there."""
        return disk_buffer_bytes(self.lanes, self.homes, self.chunk)

    @property
    def _set_bytes(self) -> int:
        return slab_bytes(self.lanes, self.homes, self.chunk, 1, self.step)

    @property
    def slab_room(self) -> int:
        """Sets that the requested memory has room for, if there are so many chunks."""
        return slab_sets(self.chunk, self._set_bytes, self.slabs)

    @property
    def slab_sets(self) -> int:
        """Of an optimizer that holds all parameters."""
        return slab_sets(self.chunk, self._set_bytes, self.slabs, self._num_chunks)

    @property
    def _num_chunks(self) -> int:
        return num_chunks(self.lanes, self.homes, self.chunk, self.step)

    @property
    def slab_bytes(self) -> int:
        """Of each rank, where its steps run, from the first one on."""
        slabs = slab_bytes(self.lanes, self.homes, self.chunk, self.slab_sets, self.step)
        return slabs + block_bytes(self.lanes, self.homes, self.chunk, self.step)

    @property
    def share_ahead(self) -> float:
        """Of what a step fetches, the part that comes while backward computes."""
        count = self._num_chunks
        return 0.0 if self.slabs is None or not count else min(1.0, (self.slab_sets - 1) / count)

    def describe(self, index: int) -> str:
        """The homes of one lane: 'host', or 'device; state host'."""
        lane, homes = self.lanes[index], self.homes[index]
        by_place: dict[Place, list[str]] = {}
        for kind, place, num_bytes in held(lane, homes):
            if num_bytes:
                by_place.setdefault(place, []).append(kind)
        if len(by_place) == 1:
            return next(iter(by_place))
        return "; ".join(f"{place}: {', '.join(by_place[place])}" for place in PLACES if place in by_place)


def rest_under(
    offload: Offload, lanes: Sequence[_Lane], full_bytes: int, free: Free, strategy: str
) -> Resting:
    """Where values rest with `offload`. Raises if its budget cannot be met."""
    each = tuple(bytes_of(lane, strategy == "replicate") for lane in lanes)
    budget = budget_of(offload, each, full_bytes, free)

    def on_hosts(times: int) -> list[LaneBytes]:
        return [bytes_of(lane, False, times) for lane in lanes]

    # Of what is copied to each host, a rank has as much on more of them; and one backward is for one rank.
    alike = strategy in ("replicate", "hybrid") or offload.one_backward
    homes = choose(each, budget, None if alike else on_hosts)
    return resting_of(offload, each, homes, budget)


def resting_of(
    offload: Offload, lanes: tuple[LaneBytes, ...], homes: Sequence[LaneHomes], budget: Budget
) -> Resting:
    chunk = chunk_of(offload, trained_elements(lanes))
    return Resting(lanes, tuple(homes), budget, chunk, offload.step, offload.slab_limit, offload.overlap)
