"""What one rank needs with a strategy: at rest, and at the worst moment of a step.

At rest it holds parameters, gradients and optimizer state, as `plan` cuts them. At a moment of a step it
holds besides: full values of the unit at work, of the next one, of those that are kept; buffers of gradients
on their way; activations and temporaries, as `tracing` has seen them; on a GPU, cuBLAS's workspaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from fullshard.options import Options
from fullshard.plan.plan import Plan, plan_of
from fullshard.plan.schedule import kept_units
from fullshard.plan.units import Unit, looks_up_only
from fullshard.tools.planning.tracing import Trace, direct_weights

# Values that an optimizer keeps for each one of a parameter, and those that its step makes on a GPU, where
# torch works on lists of tensors.
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
_LARGE_BYTES, _IN_FLIGHT = 128 * 2**20, 4  # of `reduction`: exchanges that are under way at a time


@dataclass(frozen=True)
class Need:
    """Bytes of one rank. The last four are those of the worst moment."""

    strategy: str
    ranks: int
    parameters: int
    gradients: int
    optimizer: int
    full: int
    sending: int
    activations: int
    moment: str
    sent_bytes: int  # between ranks, in one step

    @property
    def rest(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return self.rest + self.full + self.sending + self.activations


@dataclass(frozen=True)
class Step:
    """A model's units and what one step of it does; the same for every strategy and number of ranks."""

    units: Sequence[Unit]
    trace: Trace
    optimizer: str
    on_gpu: bool
    accumulates_locally: bool = False  # micro-batches inside fs.accumulate

    @property
    def saved_bytes(self) -> int:
        """Activations when the last block's forward is over."""
        blocks = {i for i, u in enumerate(self.units) if i and any(any(m.children()) for m in u.modules)}
        ends = [m.end_bytes for m in self.trace.moments if m.phase == "forward" and m.unit in blocks]
        return ends[-1] if ends else 0

    @property
    def activation_peak_bytes(self) -> int:
        return max((moment.peak_bytes for moment in self.trace.moments), default=0)

    @property
    def workspace_bytes(self) -> int:
        return WORKSPACE_BYTES if self.on_gpu else 0


def need(step: Step, ranks: int, options: Options, replicas: int = 1) -> Need:
    """`ranks` are those that share one copy: with hybrid, of one node, and `replicas` are its nodes."""
    options = replace(options, on_gpu=step.on_gpu)
    plan = plan_of(step.units, ranks, options)
    kept_values, made_values = OPTIMIZERS[step.optimizer]
    made_bytes = made_values * plan.gradient_bytes if step.on_gpu else 0
    rest = Need(
        options.strategy,
        ranks,
        plan.parameter_bytes,
        plan.gradient_bytes,
        kept_values * plan.gradient_bytes,
        0,
        0,
        made_bytes + step.trace.buffer_bytes + step.trace.returned_bytes + step.workspace_bytes,
        "the optimizer's step",
        plan.wire_bytes_per_step + round(2 * plan.gradient_bytes * (replicas - 1) / replicas),
    )
    return max([rest, *_moments(step, plan, options, rest)], key=lambda one: one.peak)


def _moments(step: Step, plan: Plan, options: Options, rest: Need) -> list[Need]:
    engine = _Engine(step, plan, options)
    full = engine.full()
    accumulation = 0
    if step.accumulates_locally and options.accumulates_locally:
        lanes = [lane for unit in plan.units for lane in unit.lanes if lane.trainable]
        accumulation = sum(lane.layout.total * lane.dtypes.sum.itemsize for lane in lanes)
    found = []
    turn = [moment.phase for moment in step.trace.moments].index("backward")
    for position, moment in enumerate(step.trace.moments):
        name = "the loss" if position == turn else step.units[moment.unit].name or "the root"
        label = f"{moment.phase} of {name}"
        at_peak, at_end = engine.sending(position)
        for sent, live in ((at_peak, moment.peak_bytes), (at_end, moment.end_bytes)):
            here = replace(rest, full=full[position], sending=sent + accumulation, moment=label)
            found.append(replace(here, activations=live + step.workspace_bytes))
    return found


class _Engine:
    """Which units are full, and which gradients travel, at each moment."""

    def __init__(self, step: Step, plan: Plan, options: Options) -> None:
        self._moments, self._options = step.trace.moments, options
        self._sizes = [unit.full_bytes for unit in plan.units]
        trained = [[lane for lane in unit.lanes if lane.trainable] for unit in plan.units]
        self._packed = [sum(n.layout.total * n.dtypes.packed.itemsize for n in lanes) for lanes in trained]
        received = [sum(lane.wire_bytes for lane in lanes) for lanes in trained]
        self._received = received if plan.ranks > 1 else [0] * len(received)
        self._direct = [bool(weights) for weights in direct_weights(step.units)]
        self._permanent = options.replicated and all(
            lane.dtypes.rest == lane.dtypes.compute for unit in plan.units for lane in unit.lanes
        )
        self._around = _around(step.units)
        self._kept = self._keep(step.units)

    def _keep(self, units: Sequence[Unit]) -> set[int]:
        if not self._options.releases_after_forward:
            return set(range(len(units)))
        order = [m.unit for m in self._moments if m.phase == "forward"] or [0]
        no_need = {0} | {i for i, unit in enumerate(units) if looks_up_only(unit.modules)}
        return kept_units(order, self._sizes, *self._options.keeps, no_need)

    def full(self) -> list[int]:
        """By moment, the bytes of full values."""
        if self._permanent:
            return [0] * len(self._moments)
        last_done = {m.unit: i for i, m in enumerate(self._moments) if m.done}
        ahead = self._ahead() if self._options.prefetch else [0] * len(self._moments)
        seen: set[int] = set()
        begun: set[int] = set()
        found = []
        for position, moment in enumerate(self._moments):
            here = {0, moment.unit, ahead[position], *self._around[moment.unit]}
            if moment.phase == "forward":
                seen.add(moment.unit)
                here |= self._kept & seen
            else:
                here |= {u for u in self._kept | begun if last_done.get(u, -1) >= position}
                begun.add(moment.unit)
            found.append(sum(self._sizes[unit] for unit in here))
        return found

    def _ahead(self) -> list[int]:
        """By moment, the unit that is gathered next; 0, which is full anyway, where there is none."""
        found, following = [0] * len(self._moments), {"forward": 0, "backward": 0}
        for position in range(len(self._moments) - 1, -1, -1):
            moment = self._moments[position]
            found[position] = following[moment.phase]
            full_already = moment.phase == "backward" and moment.unit in self._kept  # its walk leaves it out
            if moment.unit and not full_already:
                following[moment.phase] = moment.unit
        return found

    def sending(self, position: int) -> tuple[int, int]:
        """Buffers of gradients, at a moment's peak and at its end, when its own are packed."""
        moment = self._moments[position]
        if moment.phase == "forward":
            return 0, 0
        sending = 0
        done = [m.unit for m in self._moments[:position] if m.done and self._packed[m.unit]]
        for count, unit in enumerate(reversed(done)):
            if count == 0 or (count < _IN_FLIGHT and self._packed[unit] <= _LARGE_BYTES):
                sending += self._packed[unit] + self._received[unit]
            else:
                break
        own = self._packed[moment.unit] if moment.unit or moment.done else 0
        early = own if self._direct[moment.unit] else 0  # opened before the products that write into it
        # Room is made by bringing others home only after packing; what then arrives takes the place of the
        # gradients that were packed.
        return sending + early, sending + (own if moment.done else early)


def _around(units: Sequence[Unit]) -> list[set[int]]:
    """By unit, the units whose modules it lies in, without the root."""
    inside = [{id(m) for module in unit.modules for m in module.modules()} for unit in units]
    return [
        {o for o in range(1, len(units)) if o != i and id(unit.modules[0]) in inside[o]}
        for i, unit in enumerate(units)
    ]


@contextmanager
def in_compute_dtype(model: nn.Module, compute: torch.dtype | None) -> Iterator[None]:
    """A meta model as the engine's full values are: its floating point parameters cast."""
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
