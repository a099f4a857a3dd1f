"""How long a step takes: the schedule that the engine executes, walked with the rates of a machine. Pure.

The compute stream and the links are followed from event to event, as the simulator's links are: a unit's
gather is issued when the unit before it begins, between nodes CROSS_AHEAD units earlier; a unit waits for its
gather; gradients are sent when they are complete, and as many exchanges are in flight as the engine allows;
the optimizer's step waits for the last of them. Messages take the time that the network's model gives them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

from fullshard.options import Options
from fullshard.plan.homes import LaneBytes, LaneHomes
from fullshard.plan.plan import LanePlan, Plan
from fullshard.plan.schedule import CROSS_AHEAD, across_limit, in_flight_limit
from fullshard.planning.machines import Device, Machine
from fullshard.planning.needs import Step
from fullshard.planning.network import Load, Network, Placement
from fullshard.planning.times import Times
from fullshard.planning.tracing import Trace, direct_weights
from fullshard.planning.transfers import transfers_of, waited_s

# Bytes that an optimizer's step reads and writes per element, fp32. Those that torch runs as lists of tensors
# pass over them several times.
OPTIMIZER_BYTES = {
    "adamw": 72,
    "adam": 72,
    "fused-adamw": 28,
    "rmsprop": 48,
    "adagrad": 40,
    "sgd-momentum": 28,
    "sgd": 12,
}

# Host time in launches of a kernel, see `Device.launch_s`: of the engine, and of the optimizer and the loop.
# Fitted to steps on an H200's host, at 41 us per launch: 24.5 ms for 489 kernels, 7 gathers and 4 reduces,
# 56 ms for 1,006, 35 and 19; 6 ms less where no unit is gathered twice.
GATHER_LAUNCHES, REDUCE_LAUNCHES, STEP_LAUNCHES = 8, 8, 40


class _Line:
    """A link: messages pass one after the other, each in the first gap after it became ready."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []
        self.used_s = 0.0

    def hold(self, ready: float, seconds: float) -> float:
        """When a message that needs the link for so long is through."""
        if seconds <= 0:
            return ready
        start = ready
        for begin, end in self._busy:
            if start + seconds <= begin:
                break
            start = max(start, end)
        insort(self._busy, (start, start + seconds))
        self.used_s += seconds
        return start + seconds

    def forget(self, before: float) -> None:
        """Nothing becomes ready before that time any more."""
        self._busy = [interval for interval in self._busy if interval[1] > before]


class _Links:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.inside, self.across, self.up, self.down = _Line(), _Line(), _Line(), _Line()
        self._groups: dict[str, float] = {}

    def send(self, group: str, ready: float, load: Load) -> float:
        """When a message is over. Those of one group pass one after the other."""
        start = max(ready, self._groups.get(group, 0.0))
        over = max(self.inside.hold(start, load.inside_s), self.across.hold(start, load.across_s))
        self._groups[group] = over + load.latency_s
        return over + load.latency_s

    def load(self, kind: str, size_bytes: float, placement: Placement) -> Load:
        return self.network.load(kind, size_bytes, placement)


@dataclass(frozen=True)
class _LaneMessages:
    """What one lane sends, and what the device does for it."""

    gather: Load  # inside a node, or the only one
    gather_across: Load | None
    exchange: Load
    across: Load | None
    back: Load | None
    cast_s: float
    pack_s: float
    sum_s: float  # of what the first exchange brought
    sum_across_s: float
    packed_bytes: int
    crossing_bytes: int
    trainable: bool
    up_s: float = 0.0  # from host memory, per gather
    down_s: float = 0.0  # gradients, to host memory


class Timer:
    """Durations of a traced step's moments on a device: the same for all strategies."""

    def __init__(self, step: Step, device: Device) -> None:
        self.step, self.device = step, device
        self.moment_s, self.flop, self.kernels = durations(step.trace, device)

    def of(self, step: Step) -> Timer:
        """The same trace with another optimizer."""
        other = copy(self)
        other.step = step
        return other

    def times(self, plan: Plan, options: Options, machine: Machine, network: Network) -> Times:
        return _Walked(self, plan, options, machine, network).times()


def durations(trace: Trace, device: Device) -> tuple[list[float], float, int]:
    """By moment; with the floating point operations and kernels of all."""
    known: dict[object, float] = {}
    seconds, flop, kernels = [], 0.0, 0
    for moment in trace.moments:
        total = 0.0
        for work in moment.work:
            if work not in known:
                known[work] = device.seconds(work)
            total += known[work]
            flop += work.flop
        kernels += len(moment.work)
        seconds.append(total)
    return seconds, flop, kernels


class _Walked:
    def __init__(
        self, timer: Timer, plan: Plan, options: Options, machine: Machine, network: Network
    ) -> None:
        self._timer, self._step, self._device = timer, timer.step, timer.device
        self._plan, self._options, self._machine = plan, options, machine
        self._schedule = plan.schedule
        self._links = _Links(network)
        self._two_level = plan.nodes > 1 and plan.strategy != "hybrid"
        self._lanes = self._messages(network)
        self._now = 0.0
        self._engine_s = 0.0  # kernels of the engine: they count as computing
        self._full: dict[int, float] = {}  # unit: when its gather is over
        self._crossed: dict[int, float] = {}  # unit: when its gather between nodes is over
        self._copies: set[int] = set()
        self._flying: list[tuple[float, float, int]] = []  # end, sum, bytes: exchanges of the first leg
        self._crossing: list[tuple[float, float, int]] = []
        self._last = 0.0  # when the last message of all is over

    # ---- messages

    def _messages(self, network: Network) -> list[list[_LaneMessages]]:
        plan, moved = self._plan, self._moved()
        direct = direct_weights(self._step.units)
        found = []
        for index, unit in enumerate(plan.units):
            members = self._step.units[index].members
            direct_bytes = sum(
                member.parameter.numel() * member.parameter.element_size()
                for member in members
                if id(member.parameter) in direct[index]
            )
            lanes = []
            for lane in unit.lanes:
                lanes.append(self._of_lane(lane, network, direct_bytes, *next(moved)))
                direct_bytes = 0
            found.append(lanes)
        return found

    def _moved(self) -> Iterator[tuple[float, float]]:
        """By lane, seconds of its host link per gather and per reduce."""
        resting, rates = self._plan.resting, self._machine.host
        if resting is None:
            for unit in self._plan.units:
                yield from [(0.0, 0.0)] * len(unit.lanes)
            return
        for lane, homes in zip(resting.lanes, resting.homes, strict=True):
            yield _per_gather(lane, homes) / rates.link_one_way, _leaving(lane, homes) / rates.link_each_way

    def _of_lane(
        self, lane: LanePlan, network: Network, direct_bytes: int, up_s: float, down_s: float
    ) -> _LaneMessages:
        plan = self._plan
        inner, nodes = plan.node_ranks, plan.nodes
        hybrid = plan.strategy == "hybrid"
        load, layout, dtypes = self._links.load, lane.layout, lane.dtypes
        if nodes > 1:
            first = Placement(inner, inner if network.inside is not None else 1)
        else:
            first = Placement(plan.ranks, min(network.node_ranks or 1, plan.ranks))
        other = Placement(nodes, 1)
        scatters = self._options.reduce == "scatter"
        sums = layout.total * dtypes.sum.itemsize
        kind, sent = ("reduce-scatter", sums) if scatters else ("all-to-all", lane.wire_bytes)
        exchange = load(kind, sent, first)
        gather_across = across = back = None
        received = sums / plan.ranks if scatters else lane.wire_bytes
        if self._two_level:
            gather_across = load("gather", lane.gather_across_bytes / inner, other)
        if nodes > 1:
            across = load("all-to-all", lane.across_bytes / inner, other)
        if hybrid and nodes > 1:
            back = load("gather", lane.back_bytes / inner, other)
        shard = layout.total / plan.ranks
        cast = shard * (dtypes.rest.itemsize + dtypes.compute.itemsize)
        cast = cast if dtypes.rest != dtypes.compute else 0.0
        if dtypes.eight_bit_gather:
            cast += lane.gather_bytes + lane.full_bytes
        packed = layout.total * dtypes.packed.itemsize
        if dtypes.eight_bit_wire:
            received += packed
        return _LaneMessages(
            gather=load("gather", lane.gather_bytes, first),
            gather_across=gather_across,
            exchange=exchange,
            across=across,
            back=back,
            cast_s=self._kernel(cast),
            pack_s=self._kernel(2.0 * max(0, packed - direct_bytes)),
            sum_s=self._kernel(received + sums / max(1, inner if nodes > 1 else plan.ranks)),
            sum_across_s=self._kernel(lane.across_bytes / inner + shard * 4) if nodes > 1 else 0.0,
            packed_bytes=packed,
            crossing_bytes=round(lane.across_bytes / inner),
            trainable=lane.trainable,
            up_s=up_s,
            down_s=down_s,
        )

    def _kernel(self, size_bytes: float) -> float:
        return self._device.kernel_s + size_bytes / self._device.memory_bytes_s if size_bytes else 0.0

    # ---- gathers

    def _compute(self, seconds: float) -> None:
        self._now += seconds
        self._engine_s += seconds

    def _gather(self, unit: int, again: bool) -> None:
        """Issued now. `again`: in backward."""
        if unit in self._full:
            return
        over = self._now
        if not self._options.replicated or self._plan.ranks == 1:
            self._cross(unit, again)
            for lane in self._lanes[unit]:
                ready = max(self._now, self._crossed.get(unit, 0.0))
                if gather_is_first(lane):
                    ready = self._staged(lane)
                over = max(over, self._links.send("gather", ready, lane.gather))
        self._crossed.pop(unit, None)
        self._full[unit] = over

    def _staged(self, lane: _LaneMessages) -> float:
        """The rank's own part is cast, or comes from host memory."""
        self._compute(lane.cast_s)
        return self._links.up.hold(self._now, lane.up_s)

    def _cross(self, unit: int, again: bool) -> None:
        if not self._two_level or unit in self._crossed or unit in self._full:
            return
        if again and unit in self._schedule.node_copies:
            self._crossed[unit] = 0.0
            return
        over = 0.0
        for lane in self._lanes[unit]:
            if lane.gather_across is not None:
                ready = self._staged(lane)
                over = max(over, self._links.send("gather across", ready, lane.gather_across))
        self._crossed[unit] = over

    def _need(self, unit: int, walk: list[int], again: bool) -> None:
        """As `engine.gather.need`: pass the walk up to the unit, wait for it, and gather the next one."""
        while unit not in self._full and walk:
            self._pass(walk, again)
        if unit not in self._full:
            self._gather(unit, again)
        self._now = max(self._now, self._full[unit])
        if self._schedule.prefetch and walk and not any(u in self._full for u in walk[:1]):
            self._pass(walk, again)

    def _pass(self, walk: list[int], again: bool) -> None:
        self._gather(walk.pop(0), again)
        if self._two_level and self._schedule.prefetch:
            for unit in walk[:CROSS_AHEAD]:
                if unit in self._schedule.crossed_ahead:
                    self._cross(unit, again)

    # ---- reduces

    def _reduce(self, unit: int) -> None:
        for lane in (lane for lane in self._lanes[unit] if lane.trainable):
            self._compute(lane.pack_s)
            self._throttle(lane)
            over = self._links.send("reduce", self._now, lane.exchange)
            if lane.across is None:
                self._flying.append((over, lane.sum_s, lane.packed_bytes))
            else:
                self._flying.append((over, 0.0, lane.packed_bytes))
                over = self._links.send("reduce across", over + lane.sum_s, lane.across)
                if lane.back is not None:
                    over = self._links.send("reduce back", over + lane.sum_across_s, lane.back)
                self._crossing.append((over, lane.sum_across_s, lane.crossing_bytes))
            if lane.down_s:
                over = self._links.down.hold(over, lane.down_s)
            self._last = max(self._last, over)

    def _throttle(self, lane: _LaneMessages) -> None:
        while self._flying and len(self._flying) >= in_flight_limit(lane.packed_bytes):
            self._finish(self._flying)
        while self._crossing and len(self._crossing) >= across_limit(self._crossing[0][2]):
            self._finish(self._crossing)

    def _finish(self, flights: list[tuple[float, float, int]]) -> None:
        over, sum_s, _ = flights.pop(0)
        self._now = max(self._now, over)
        self._compute(sum_s)

    # ---- a step

    def times(self) -> Times:
        schedule, step = self._schedule, self._step
        forward, backward = list(schedule.forward), list(schedule.backward)
        again = set(schedule.backward) | schedule.kept | {0}
        last_call = {m.call.unit: at for at, m in enumerate(step.trace.moments) if m.call.phase == "forward"}
        rounds = dict.fromkeys(range(len(step.units)), 0)
        turned = False
        self._need(0, forward, False)
        for at, (moment, seconds) in enumerate(zip(step.trace.moments, self._timer.moment_s, strict=True)):
            phase, unit, done = moment.call
            if phase == "backward" and not turned:
                turned = True
                self._full = {u: self._now for u in self._full if u in schedule.kept or not schedule.releases}
                self._full[0] = self._now
            if unit and (phase == "forward" or unit in again):
                self._need(unit, forward if phase == "forward" else backward, phase == "backward")
            self._now += seconds
            if phase == "forward" and unit:
                rounds[unit] += 1
                self._leave(unit, rounds[unit], last_call[unit] == at)
            if done:
                self._reduce(unit)
                if schedule.releases and unit:
                    self._full.pop(unit, None)
            for line in (self._links.inside, self._links.across, self._links.up, self._links.down):
                line.forget(self._now)
        return self._ended()

    def _leave(self, unit: int, calls: int, is_last: bool) -> None:
        """Released after its forward, unless it stays."""
        schedule, live = self._schedule, self._step.units[unit]
        stays = not schedule.releases or unit in schedule.kept
        stays = stays or (unit in schedule.returning | schedule.held and not is_last)
        if live.merged and calls % len(live.modules):
            return
        if not stays:
            self._full.pop(unit, None)

    def _ended(self) -> Times:
        for flights in (self._flying, self._crossing):
            while flights:
                self._finish(flights)
        self._now = max(self._now, self._last) + self._inputs_of_blocks()
        self._regather()
        optimizer_s, moving_s = self._optimizer()
        self._now += max(optimizer_s, self._waited_s(moving_s))
        device, links = self._device, self._links
        compute_s = sum(self._timer.moment_s) + self._engine_s + optimizer_s
        host_s = self._launches() * device.launch_s
        flat = links.network.inside is None
        return Times(
            step_s=max(self._now, host_s),
            compute_s=compute_s,
            inside_s=links.across.used_s if flat else links.inside.used_s,
            across_s=0.0 if flat else links.across.used_s,
            moving_s=moving_s + max(links.up.used_s, links.down.used_s),
            optimizer_s=optimizer_s,
            host_s=host_s,
            flop=self._timer.flop,
        )

    def _launches(self) -> int:
        """What the host issues in a step, in kernels."""
        engine = GATHER_LAUNCHES * sum(self._schedule.gathers) + REDUCE_LAUNCHES * len(self._plan.units)
        return self._timer.kernels + engine + STEP_LAUNCHES

    def _inputs_of_blocks(self) -> float:
        """Where they wait in host memory: how much longer moving them takes than computing, each way."""
        moved_s = self._step.trace.host_bytes / self._machine.host.link_one_way
        self._links.up.used_s += moved_s
        self._links.down.used_s += moved_s
        forward_s, backward_s = self._computing()
        return max(0.0, moved_s - forward_s) + max(0.0, moved_s - backward_s)

    def _computing(self) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        spent: dict[str, float] = {"forward": 0.0, "backward": 0.0}
        for moment, seconds in zip(self._step.trace.moments, self._timer.moment_s, strict=True):
            spent[moment.call.phase] += seconds
        return spent["forward"], spent["backward"]

    def _regather(self) -> None:
        """With replicate every rank gets all sums."""
        plan, links = self._plan, self._links
        if not self._options.replicated or plan.ranks == 1:
            return
        network = links.network
        inner = plan.node_ranks if plan.nodes > 1 else min(network.node_ranks or 1, plan.ranks)
        placement = Placement(plan.ranks, inner if network.inside is not None else 1)
        over = self._now
        for unit in plan.units:
            for lane in (lane for lane in unit.lanes if lane.trainable):
                size = lane.layout.total * lane.dtypes.rest.itemsize
                over = max(over, links.send("regather", self._now, links.load("gather", size, placement)))
        self._now = over

    def _waited_s(self, moving_s: float) -> float:
        resting = self._plan.resting
        return moving_s if resting is None else waited_s(moving_s, resting, *self._computing())

    def _optimizer(self) -> tuple[float, float]:
        """Seconds of computing, and of moving what rests elsewhere."""
        plan, resting = self._plan, self._plan.resting
        elements = plan.trained_bytes / 4
        rate = self._device.optimizer_bytes_s
        seconds = elements * OPTIMIZER_BYTES[self._step.optimizer] / rate
        if resting is None:
            return seconds, 0.0
        moved = transfers_of(resting, [0] * len(resting.lanes))
        return seconds, moved.step_s(self._machine.host, resting.budget.node_ranks)


def gather_is_first(lane: _LaneMessages) -> bool:
    """Nothing went between nodes before it, for which the rank's own part was made."""
    return lane.gather_across is None


def _per_gather(lane: LaneBytes, homes: LaneHomes) -> int:
    """Bytes from host memory to the device for one gather."""
    at = homes.master if lane.master else homes.compute
    if homes.compute == "device" or at == "device":
        return 0
    return lane.compute or lane.master


def _leaving(lane: LaneBytes, homes: LaneHomes) -> int:
    return lane.gradients if homes.gradients != "device" and homes.streams_steps else 0
