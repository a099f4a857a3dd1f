"""The memory that one rank needs with a strategy: at rest, and at the worst moment of a step.

At rest it holds parameters, gradients and optimizer state, as `fs.plan` divides them. At a moment of a step
it holds besides: the full values that the schedule has at that moment; buffers of gradients in flight;
activations and temporaries, as `tracing` measured them; on a GPU, cuBLAS's workspaces. With offload it holds
what rests on the device alone, the slabs of a streamed step, and copies of what is on its way to or from the
host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import torch
from torch import nn

from fullshard.engine.homes.transfers import HELD
from fullshard.offload import Offload
from fullshard.options import Options
from fullshard.plan.homes import (
    KINDS,
    STATES,
    Budget,
    LaneBytes,
    Resting,
    bytes_of,
    chunk_of,
    most_disk_buffer_bytes,
    placed,
    resting_of,
    trained_elements,
)
from fullshard.plan.plan import LanePlan, Plan, plan_of
from fullshard.plan.schedule import Call, across_limit, in_flight_limit
from fullshard.plan.units import Unit
from fullshard.planning.times import Times
from fullshard.planning.tracing import Trace, direct_weights
from fullshard.planning.transfers import Transfers, transfers_of

# Values that an optimizer keeps per element of a parameter, and temporaries of its step per element on a GPU,
# where torch works on lists of tensors.
OPTIMIZERS: dict[str, tuple[int, int]] = {
    "adamw": (2, 1),
    "adam": (2, 1),
    "fused-adamw": (2, 0),
    "rmsprop": (1, 1),
    "adagrad": (1, 1),
    "sgd-momentum": (1, 0),
    "sgd": (0, 0),
}
# cuBLAS's workspaces come from torch's allocator, one for the thread that computes forward and one for
# backward's: 32 MiB each on Hopper, 8 on older devices.
WORKSPACE_BYTES = 2 * 32 * 2**20


@dataclass(frozen=True)
class Need:
    """Bytes of one rank. `full`, `sending` and `activations` are those of the worst moment, and so are
    gradients that come and go (`fs.Offload(one_backward=True)`)."""

    strategy: str
    ranks: int
    parameters: int
    gradients: int
    optimizer: int
    full: int
    sending: int
    activations: int
    moment: str
    sent_bytes: int  # between ranks, per step
    slabs: int = 0
    resting: Resting | None = None  # with offload
    transfers: Transfers | None = None
    plan: Plan | None = None
    times: Times | None = None  # of a step, where the machine is known

    @property
    def rest(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return self.rest + self.slabs + self.full + self.sending + self.activations


@dataclass(frozen=True)
class Step:
    """A model's units and the trace of one step; the same for every strategy and number of ranks."""

    units: Sequence[Unit]
    trace: Trace
    optimizer: str
    on_gpu: bool
    accumulates_locally: bool = False  # micro-batches inside fs.accumulate

    @property
    def saved_bytes(self) -> int:
        """Activations when the last block's forward is over."""
        blocks = {i for i, u in enumerate(self.units) if i and any(any(m.children()) for m in u.modules)}
        ends = [
            m.end_bytes for m in self.trace.moments if m.call.phase == "forward" and m.call.unit in blocks
        ]
        return ends[-1] if ends else 0

    @property
    def activation_peak_bytes(self) -> int:
        return max((moment.peak_bytes for moment in self.trace.moments), default=0)

    @property
    def workspace_bytes(self) -> int:
        return WORKSPACE_BYTES if self.on_gpu else 0

    @cached_property
    def calls(self) -> list[Call]:
        return [moment.call for moment in self.trace.moments]

    @cached_property
    def path(self) -> list[int]:
        """The units as forward calls them. One of merged blocks is called once: it is full until all were."""
        blocks: dict[int, int] = {}  # of each merged unit, those called so far
        path = [0]
        for _, unit, _ in takewhile(lambda call: call.phase == "forward", self.calls):
            if unit:
                blocks[unit] = blocks.get(unit, -1) + 1
                if not (self.units[unit].merged and blocks[unit] % len(self.units[unit].modules)):
                    path.append(unit)
        return path


def need(step: Step, ranks: int, options: Options, budget: Budget | None = None) -> Need:
    """`ranks` share one copy of the model; with hybrid they are those of a node. `options` know the nodes.

    `budget`: with offload, for values at rest and for the buffers of a disk. Whether the host has enough is
    for the caller to see.
    """
    options = replace(options, on_gpu=step.on_gpu)
    if budget is not None and options.keep_node is None:
        options = replace(options, keep_node=0)  # as the engine has it with offload
    plan = plan_of(step.units, ranks, options, step.path)
    if budget is not None:
        lanes = tuple(bytes_of(x, options.replicated) for unit in plan.units for x in unit.lanes)
        offload = options.offload or Offload()
        homes = placed(lanes, budget)[0]
        if budget.host is not None and any("disk" in vars(home).values() for home in homes):
            buffers = most_disk_buffer_bytes(lanes, chunk_of(offload, trained_elements(lanes)))
            budget = replace(budget, host=budget.host - buffers)
            homes = placed(lanes, budget)[0]
        plan = replace(plan, resting=resting_of(offload, lanes, homes, budget))
    rest = _at_rest(step, plan)
    return max([rest, *_moments(step, plan, options, rest)], key=lambda one: one.peak)


def _at_rest(step: Step, plan: Plan) -> Need:
    """What one rank has on its device between passes, and in the optimizer's step."""
    kept_values, made_values = OPTIMIZERS[step.optimizer]
    resting = plan.resting
    held = plan.parameter_bytes, plan.gradient_bytes, kept_values * plan.state_bytes // STATES
    slabs, transfers = plan.slab_bytes, None
    # Gradients of all parameters at the same time, or of a chunk.
    stepped = min(plan.trained_bytes, 4 * plan.step_chunk) if slabs else plan.trained_bytes
    if resting is not None:
        compute, master, gradients, state = (resting.bytes_at("device", kind) for kind in KINDS)
        held = compute + master, gradients, kept_values * state // STATES
        lanes = list(zip(resting.lanes, resting.homes, strict=True))
        stepped = sum(lane.rest for lane, homes in lanes if lane.gradients and not homes.streams_steps)
        streamed = [_chunk_bytes(lane, resting) for lane, homes in lanes if homes.streams_steps]
        stepped += max(streamed, default=0)
        slabs = resting.slab_bytes
        units = zip(plan.units, plan.schedule.gathers, strict=True)
        gathers = [count for unit, count in units for _ in unit.lanes]
        moved = [replace(lane, state=kept_values * lane.state // STATES) for lane in resting.lanes]
        transfers = transfers_of(replace(resting, lanes=tuple(moved)), gathers)
    made_bytes = made_values * stepped if step.on_gpu else 0
    return Need(
        plan.strategy,
        plan.ranks,
        *held,
        0,
        0,
        made_bytes + step.trace.buffer_bytes + step.trace.returned_bytes + step.workspace_bytes,
        "the optimizer's step",
        plan.wire_bytes_per_step,
        slabs,
        resting,
        transfers,
        plan,
    )


def _chunk_bytes(lane: LaneBytes, resting: Resting) -> int:
    """Gradients of one chunk of a streamed step, as the optimizer has them."""
    trained = lane.rest if lane.gradients else 0
    return round(trained * min(1.0, resting.chunk / max(1, lane.num_elements)))


def _moments(step: Step, plan: Plan, options: Options, rest: Need) -> Iterator[Need]:
    lanes = [lane for unit in plan.units for lane in unit.lanes]
    own = _full_bytes(plan, options.replicated)
    full = [sum(own[unit] for unit in units) for units in plan.schedule.full_at(step.calls)]
    full = [sum(both) for both in zip(full, plan.schedule.share_bytes_at(step.calls), strict=True)]
    accumulation = 0
    if step.accumulates_locally and options.accumulates_locally:
        accumulation = sum(lane.layout.total * lane.dtypes.sum.itemsize for lane in lanes if lane.trainable)
    sending, gradients = _sending(step, plan), _gradients_at(step, plan, rest.gradients)
    turn = [call.phase for call in step.calls].index("backward")
    for position, moment in enumerate(step.trace.moments):
        phase, unit, _ = moment.call
        label = f"{phase} of {'the loss' if position == turn else step.units[unit].name or 'the root'}"
        here = replace(rest, full=full[position], moment=label)
        ends = sending[position], gradients[position], (moment.peak_bytes, moment.end_bytes)
        for sent, landed, live in zip(*ends, strict=True):
            live += step.workspace_bytes
            yield replace(here, gradients=landed, sending=sent + accumulation, activations=live)


def _gradients_at(step: Step, plan: Plan, at_rest: int) -> list[tuple[int, int]]:
    """By moment, the gradients at rest on the device: at its peak, and at its end.

    Those that rest as they were computed have no memory from their unit's forward to its backward.
    """
    passing = [0] * len(plan.units)
    if plan.resting is not None:
        homes = iter(zip(plan.resting.lanes, plan.resting.homes, strict=True))
        for unit, planned in enumerate(plan.units):
            lanes = [next(homes) for _ in planned.lanes]
            on_device = [lane for lane, home in lanes if home.gradients == "device" and lane.as_computed]
            passing[unit] = sum(lane.gradients for lane in on_device)
    here, found = set(range(len(passing))), []
    for phase, unit, done in step.calls:
        if phase == "forward":
            here.discard(unit)
        before = sum(passing[other] for other in here)
        if phase == "backward" and done:
            here.add(unit)
        after = sum(passing[other] for other in here)
        found.append((at_rest - sum(passing) + before, at_rest - sum(passing) + after))
    return found


def _full_bytes(plan: Plan, replicated: bool) -> list[int]:
    """By unit. Replicated parameters that rest in the compute dtype are computed with as they rest."""
    away = iter([False] * sum(len(unit.lanes) for unit in plan.units))
    if plan.resting is not None:
        away = iter([homes.master != "device" for homes in plan.resting.homes])
    return [
        sum(
            lane.full_bytes
            for lane, is_away in zip(unit.lanes, away, strict=False)
            if is_away or not replicated or lane.dtypes.rest != lane.dtypes.compute
        )
        for unit in plan.units
    ]


def _landing_bytes(plan: Plan) -> list[list[int]]:
    """By unit, the gradient shards that leave the device in backward, one number per lane."""
    if plan.resting is None:
        return [[] for _ in plan.units]
    lanes = zip(plan.resting.lanes, plan.resting.homes, strict=True)
    leaving = iter([lane.gradients if homes.gradients != "device" else 0 for lane, homes in lanes])
    return [[next(leaving) for _ in unit.lanes] for unit in plan.units]


def _sending(step: Step, plan: Plan) -> list[tuple[int, int]]:
    """By moment, the buffers of gradients: at its peak, and at its end, when its own are packed.

    Exchanges are throttled after their gradients are packed. What is received then takes the place of the
    gradients that were packed.
    """
    trained = [[lane for lane in unit.lanes if lane.trainable] for unit in plan.units]
    packed = [[lane.layout.total * lane.dtypes.packed.itemsize for lane in lanes] for lanes in trained]
    received = [[lane.wire_bytes if plan.ranks > 1 else 0 for lane in lanes] for lanes in trained]
    landing, leaving = _landing_bytes(plan), [0]  # with offload: gradient shards on their way to the host
    direct = [bool(weights) for weights in direct_weights(step.units)]
    summed = [[_summed_bytes(lane, plan) for lane in lanes] for lanes in trained]
    flying: list[tuple[int, int]] = []  # exchanges in flight: bytes packed, and received
    crossing: list[int] = []  # the same between nodes: both together
    sending = []
    for phase, unit, done in step.calls:
        if phase == "forward":
            sending.append((0, 0))
            continue
        others = sum(map(sum, flying)) + sum(crossing) + sum(leaving)
        own = sum(packed[unit]) if unit or done else 0
        early = own if direct[unit] else 0  # its buffer is open before the products that write into it
        sending.append((others + early, others + (own if done else early)))
        if done:
            leaving = [*leaving, *landing[unit]][-(HELD + 1) :]
        for sent, came, sums in zip(packed[unit], received[unit], summed[unit], strict=True) if done else ():
            flying = [*flying[max(0, len(flying) + 1 - in_flight_limit(sent)) :], (sent, came)]
            if sums:
                before = len(flying) + across_limit(sums // 2) - 2
                crossing = [*crossing[max(0, len(crossing) - before) :], sums]
    return sending


def _summed_bytes(lane: LanePlan, plan: Plan) -> int:
    """A node's sums of gradients on their way between nodes: sent and received; with replicas, and back."""
    if plan.nodes == 1:
        return 0
    back = lane.back_bytes if plan.strategy == "hybrid" else 0
    return (2 * lane.across_bytes + back) // plan.node_ranks


@contextmanager
def in_compute_dtype(model: nn.Module, compute: torch.dtype | None) -> Iterator[None]:
    """A meta model with its floating point parameters in the compute dtype, as full values have it."""
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, data in before:
        if compute is not None and data.is_floating_point():
            parameter.data = data.to(compute)
    try:
        yield
    finally:
        for parameter, data in before:
            parameter.grad = None
            parameter.data = data
