"""What a sharded model will hold and send: pure, frozen, printable.

print(fs.plan(model, strategy="zero3", ranks=8))
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from fullshard.byte_sizes import size
from fullshard.errors import OptionError
from fullshard.offload import Offload
from fullshard.options import Options, require_one_rank
from fullshard.plan.homes import (
    KINDS,
    PLACES,
    STATES,
    Free,
    LaneBytes,
    LaneHomes,
    Resting,
    bytes_of,
    chunk_of,
    rest_under,
    slab_bytes,
    slab_sets,
    trained_elements,
)
from fullshard.plan.layout import Layout, align_elements, laid_out_elements, lay_out, with_regions
from fullshard.plan.ownership import Owners, owners_of
from fullshard.plan.schedule import Schedule, ScheduledUnit, make_schedule
from fullshard.plan.units import Member, Unit, find_units, looks_up_only
from fullshard.precision import BLOCK, PRESETS, LaneDtypes, lane_dtypes, packed_bytes

BLOCK_PADDING = 0.01  # of a unit's full bytes: what aligning parameters to blocks may add

_KIND_NAMES = {"compute": "compute", "master": "masters", "gradients": "gradients", "state": "Adam state"}

_Row = tuple[str, ...]


@dataclass(frozen=True)
class LanePlan:
    """One lane: its layout, its dtypes, whether it trains, and whether it may be offloaded."""

    layout: Layout
    dtypes: LaneDtypes
    trainable: bool
    offload: bool = True

    @property
    def full_bytes(self) -> int:
        return self.layout.total * self.dtypes.compute.itemsize

    @property
    def _block_bytes(self) -> int:
        """All intervals in 8-bit blocks."""
        return self.layout.ranks * packed_bytes(self.layout.interval)

    @property
    def gather_bytes(self) -> int:
        """One gather, all intervals together."""
        return self._block_bytes if self.dtypes.eight_bit_gather else self.full_bytes

    @property
    def wire_bytes(self) -> int:
        """One exchange of gradients."""
        if self.dtypes.eight_bit_wire:
            return self._block_bytes
        return self.layout.total * self.dtypes.wire.itemsize

    @property
    def across_bytes(self) -> int:
        """Gradients as they are sent between nodes: the sums of all ranks of a node together."""
        if self.dtypes.eight_bit_across:
            return packed_bytes(-(-self.layout.total // BLOCK) * BLOCK)
        return self.layout.total * self.dtypes.packed_across.itemsize

    @property
    def back_bytes(self) -> int:
        """With replicas, their sum over nodes on its way back."""
        if self.dtypes.eight_bit_across:
            return self.across_bytes
        return self.layout.total * self.dtypes.packed_back.itemsize

    @property
    def gather_across_bytes(self) -> int:
        """One gather as it is sent between nodes, by all ranks of a node together."""
        return self._block_bytes if self.dtypes.eight_bit_gather_across else self.gather_bytes

    def rest_bytes(self, replicated: bool) -> int:
        return (self.layout.total if replicated else self.layout.interval) * self.dtypes.rest.itemsize

    def share_bytes(self, nodes: int) -> int:
        """What a gather between nodes brings to a rank: what its node holds together, cut by its ranks."""
        if self.dtypes.eight_bit_gather:
            return nodes * packed_bytes(self.layout.interval)
        return nodes * self.layout.interval * self.dtypes.compute.itemsize

    @property
    def training_bytes(self) -> int:
        """At rest, sharded, with gradients and Adam's state."""
        return self.dtypes.training_bytes(self.layout.interval, self.trainable)


@dataclass(frozen=True)
class UnitPlan:
    """A unit: its name and its lanes."""

    name: str
    lanes: tuple[LanePlan, ...]

    @property
    def full_bytes(self) -> int:
        return sum(lane.full_bytes for lane in self.lanes)

    @property
    def num_elements(self) -> int:
        return sum(lane.layout.num_elements for lane in self.lanes)

    def scheduled(self, unit: Unit, inside: frozenset[int], options: Options) -> ScheduledUnit:
        """What the schedule depends on."""
        return ScheduledUnit(
            self.full_bytes,
            inside,
            not looks_up_only(unit.modules),
            unit.policy.stays_full,
            sum(lane.share_bytes(options.nodes) for lane in self.lanes) if options.two_level else 0,
            sum(lane.training_bytes for lane in self.lanes),
        )


@dataclass(frozen=True)
class Plan:
    """A model's units and the schedule of its training step. All byte counts are per rank.

    The schedule assumes that modules are called in the order in which they are defined. While a sharded model
    trains, the engine makes its own from the calls that it has seen.
    """

    strategy: str
    ranks: int  # that hold different shards
    units: tuple[UnitPlan, ...]
    schedule: Schedule
    resting: Resting | None = None  # with offload: where values rest
    nodes: int = 1  # whose sums of gradients are added up: of these ranks, or with hybrid of their replicas
    why_flat: str = ""  # ranks are on several nodes, but messages do not go over two levels
    choice: Any = None  # with plan=: the record of what was chosen
    optimizer_step: str = "auto"
    peers: int = 0  # hosts besides its own that hold a copy of a rank's state in memory

    def with_offload(self, offload: Offload, free: Free) -> Plan:
        """Where values rest with it. Raises OffloadError if its budget cannot be met."""
        lanes = [lane for unit in self.units for lane in unit.lanes]
        resting = rest_under(offload, lanes, self.full_bytes_at_peak, free, self.strategy)
        return replace(self, resting=resting)

    @property
    def num_elements(self) -> int:
        return sum(unit.num_elements for unit in self.units)

    @property
    def parameter_bytes(self) -> int:
        """Parameters at rest, wherever they do; not the copies that offload keeps in the compute dtype."""
        return sum(lane.rest_bytes(self._replicated) for unit in self.units for lane in unit.lanes)

    @property
    def gradient_bytes(self) -> int:
        """Gradients at rest; frozen lanes have none."""
        return sum(lane.gradients for lane in self._lane_bytes)

    @property
    def trained_bytes(self) -> int:
        """Of parameters at rest, those that an optimizer updates."""
        return sum(lane.rest for lane in self._lane_bytes if lane.gradients)

    @property
    def state_bytes(self) -> int:
        """Adam's state at rest."""
        return sum(lane.state for lane in self._lane_bytes)

    @property
    def owners(self) -> Owners | None:
        """How evenly owned steps are dealt, if an optimizer has all parameters that train."""
        lanes = [lane for unit in self.units for lane in unit.lanes if lane.trainable]
        tensors = [(p.name, p.shape, lane.dtypes.rest.itemsize) for lane in lanes for p in lane.layout.pieces]
        return None if self._replicated else owners_of(tensors, self.ranks)

    @property
    def saved_bytes(self) -> int:
        """This rank's part of a checkpoint, with Adam's state in its own dtype; replicas share it out."""
        lanes = [lane for unit in self.units for lane in unit.lanes]
        return sum(lane.rest_bytes(False) * (1 + STATES * lane.trainable) for lane in lanes)

    @property
    def peer_copy_bytes(self) -> int:
        """Host memory for `fs.save(..., peers=...)`: what is being copied, and two steps of this rank's own
        copy and of those that it holds for others; 0 without peers."""
        return (1 + 2 * (1 + self.peers)) * self.saved_bytes if self.peers else 0

    @property
    def slab_bytes(self) -> int:
        """What an optimizer's step in chunks takes besides, where it runs."""
        if self.resting is not None:
            return self.resting.slab_bytes
        lanes = self._lane_bytes
        return slab_bytes(lanes, [LaneHomes()] * len(lanes), self.step_chunk, self.slab_sets)

    @property
    def slab_room(self) -> int:
        """Sets of slabs that the requested memory has room for, if there are so many chunks."""
        return slab_sets(self.step_chunk) if self.resting is None else self.resting.slab_room

    @property
    def slab_sets(self) -> int:
        """Chunks of an optimizer's step that are under way at once."""
        return slab_sets(self.step_chunk) if self.resting is None else self.resting.slab_sets

    @property
    def step_chunk(self) -> int:
        """Elements that an optimizer's step in chunks works on at once."""
        if self.resting is not None:
            return self.resting.chunk
        return chunk_of(Offload(), trained_elements(self._lane_bytes))

    @property
    def _lane_bytes(self) -> list[LaneBytes]:
        return [bytes_of(lane, self._replicated) for unit in self.units for lane in unit.lanes]

    @property
    def full_bytes_at_peak(self) -> int:
        """Full values that are held at the same time, the next unit's included if it is prefetched."""
        return max(self.schedule.full_bytes_at(self.schedule.calls()))

    @property
    def wire_bytes_per_step(self) -> int:
        """Sent per step of one micro-batch: gathers and gradients, inside nodes and between them."""
        return self._sent(self.node_ranks) + self.across_bytes_per_step

    @property
    def across_bytes_per_step(self) -> int:
        """What of it is sent between nodes, where messages go over two levels; 0 where they do not."""
        if self.nodes == 1:
            return 0
        if self.strategy == "hybrid":  # gradients only: their sums, and these back from their owners
            lanes = [lane for unit in self.units for lane in unit.lanes if lane.trainable]
            return round(sum(lane.across_bytes + lane.back_bytes for lane in lanes) * self._across_share)
        return round(
            sum(
                crossings * lane.gather_across_bytes + self._reduced_bytes(lane, lane.across_bytes)
                for unit, crossings in zip(self.units, self.schedule.crossings, strict=True)
                for lane in unit.lanes
            )
            * self._across_share
        )

    @property
    def node_ranks(self) -> int:
        """Ranks that exchange messages of the first level, or all messages."""
        return self.ranks if self.strategy == "hybrid" else self.ranks // self.nodes

    @property
    def _across_share(self) -> float:
        """Of a full buffer, what one rank sends between nodes: its node's part of it, to the other nodes."""
        return (self.nodes - 1) / self.nodes / self.node_ranks

    def _sent(self, ranks: int) -> int:
        """Per step, in a group of so many ranks."""
        total = 0
        for unit, gathers in zip(self.units, self.schedule.gathers, strict=True):
            for lane in unit.lanes:
                total += gathers * lane.gather_bytes + self._reduced_bytes(lane, lane.wire_bytes)
        return round(total * (ranks - 1) / ranks)

    def _reduced_bytes(self, lane: LanePlan, sent: int) -> int:
        if not lane.trainable:
            return 0
        return sent + (lane.layout.total * lane.dtypes.rest.itemsize if self._replicated else 0)

    @property
    def _replicated(self) -> bool:
        return self.strategy == "replicate"

    def __str__(self) -> str:
        away = "" if self.resting is None else "home"
        rows: list[_Row] = [
            ("unit", "lane", "elements", "at rest", "full", "padding", "gathers per step", away)
        ]
        rows += [row for index in range(len(self.units)) for row in self._rows(index)]
        return "\n".join(
            [
                f"{self.num_elements:,} parameters, {self.strategy!r}, {self._ranks()}; per rank:",
                *_table(rows, range(2, 6)),
                *(self._at_rest() if self.resting is None else self._at_rest_by_home(self.resting)),
                f"at the peak, full values: {size(self.full_bytes_at_peak)}",
                f"sent per step: {size(self.wire_bytes_per_step)}{self._across()}",
                *([f"owned steps: {self.owners}"] if self.optimizer_step == "owned" and self.owners else []),
                *(["kept: full from forward to backward"] if self.schedule.releases else []),
                *self._node_copies(),
                *self._peer_copies(),
                *([] if self.choice is None else [self.choice.line]),
            ]
        )

    def _ranks(self) -> str:
        if self.strategy == "hybrid" and self.nodes > 1:
            return f"{self.ranks} ranks and {self.nodes} replicas"
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.ranks} ranks{nodes}"

    def _across(self) -> str:
        if self.why_flat:
            return f"; nodes are not used as a level of their own: {self.why_flat}"
        return f", of it between nodes: {size(self.across_bytes_per_step)}" if self.nodes > 1 else ""

    def _node_copies(self) -> list[str]:
        if not self.schedule.node_copies:
            return []
        held = size(self.schedule.node_copy_bytes)
        return [f"node copy: the node's share stays from forward to backward, {held} in all"]

    def _peer_copies(self) -> list[str]:
        if not self.peers:
            return []
        held = f"{size(self.peer_copy_bytes)} of host memory"
        return [f"copies in memory with peers={self.peers}: {held}, {size(self.saved_bytes)} sent per peer"]

    def _at_rest(self) -> list[str]:
        lines = [
            f"at rest: parameters {size(self.parameter_bytes)}, gradients {size(self.gradient_bytes)}, "
            f"Adam state {size(self.state_bytes)}"
        ]
        if self.slab_bytes:
            lines.append(f"optimizer step: slabs of {size(self.slab_bytes)} on the device")
        return lines

    def _at_rest_by_home(self, resting: Resting) -> list[str]:
        budget = resting.budget
        host = f"the {budget.node_ranks} ranks of a host" if budget.node_ranks > 1 else "a host"
        rows: list[_Row] = [("at rest", *(_KIND_NAMES[kind] for kind in KINDS), "together", host)]
        for place in PLACES:
            each = [resting.bytes_at(place, kind) for kind in KINDS]
            all_ranks = {"device": 0, "host": resting.host_bytes, "disk": resting.disk_bytes}[place]
            if any(each) or place != "disk":
                shown = size(all_ranks) if place != "device" else ""
                rows.append((place, *map(size, each), size(sum(each)), shown))
        lines = _table(rows, range(1, 7))
        if resting.bytes_at("disk"):
            lines.append("on disk each value has two slots, which the last column counts")
            lines.append(
                f"between disk and device: buffers of {size(resting.disk_buffer_bytes)} in host memory"
            )
        if resting.slab_bytes:
            lines.append(f"optimizer step: slabs of {size(resting.slab_bytes)} on the {resting.step}")
        if budget.host is not None:
            lines.append(f"budget of {host}: {size(budget.host * budget.node_ranks)}")
        return lines

    def _rows(self, index: int) -> list[_Row]:
        """One per lane; what concerns the unit is in the first."""
        unit, schedule = self.units[index], self.schedule
        gathers = f"{schedule.gathers[index]}"
        if schedule.releases and index in schedule.kept:
            gathers += ", kept"
        if index in schedule.node_copies:
            gathers += ", node copy"
        before = sum(len(earlier.lanes) for earlier in self.units[:index])
        rows: list[_Row] = []
        for number, lane in enumerate(unit.lanes, start=before):
            kind = f"{_short(lane.dtypes.rest)}{'' if lane.trainable else ' frozen'}"
            elements, padding = lane.layout.num_elements, lane.layout.total - lane.layout.num_elements
            rest, full = size(lane.rest_bytes(self._replicated)), size(lane.full_bytes)
            home = "" if self.resting is None else self.resting.describe(number)
            row = unit.name or "(root)", kind, f"{elements:,}", rest, full, f"{padding:,}", gathers, home
            rows.append(row)
            gathers = ""
        return rows


def _table(rows: Sequence[_Row], right: Container[int]) -> list[str]:
    """Lines of equal columns, a rule below the first. Columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in cells).rstrip())
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lanes_of(unit: Unit, ranks: int, options: Options) -> list[tuple[LanePlan, list[Member]]]:
    """A unit's members by dtype and trainability, each lane laid out."""
    own = unit.policy.precision or options.precision
    groups: dict[tuple[torch.dtype, bool, bool], list[Member]] = {}
    for member in unit.members:
        parameter = member.parameter
        fixed = own.compute is not None and member.keeps_dtype
        groups.setdefault((parameter.dtype, parameter.requires_grad, fixed), []).append(member)
    dtypes = [
        lane_dtypes(
            dtype,
            trainable,
            PRESETS["fp32"] if fixed else own,
            scattered=options.reduce == "scatter",
            crosses=options.nodes > 1,
            gathers_across=options.two_level,
            eight_bit_state=options.state == "8bit",
            one_backward=options.offload is not None and options.offload.one_backward,
            split_masters=options.offload is not None and options.offload.split_masters,
        )
        for dtype, trainable, fixed in groups
    ]
    if options.state == "8bit":
        _require_states_in_blocks(list(zip(dtypes, groups.values(), strict=True)))
    aligns = _aligns(list(zip(dtypes, groups.values(), strict=True)), ranks)
    lanes = []
    for (_, trainable, _), members, each, align in zip(groups, groups.values(), dtypes, aligns, strict=True):
        layout = lay_out([(m.name, m.shape, m.order) for m in members], ranks, align)
        if any(m.region is not None for m in members):
            layout = with_regions(layout, [m.region for m in members])
        lanes.append((LanePlan(layout, each, trainable, unit.policy.offload), members))
    return lanes


def _require_states_in_blocks(lanes: Sequence[tuple[LaneDtypes, list[Member]]]) -> None:
    """Of what trains: an optimizer keeps nothing for the rest."""
    for dtypes, members in lanes:
        first = members[0]
        if first.parameter.requires_grad and not dtypes.eight_bit_state:
            raise OptionError(
                f"state is '8bit', and parameter {first.name!r} is {_short(dtypes.rest)}: only states of "
                "float32 and bfloat16 parameters rest in 8-bit blocks",
                "Leave out state=; or convert the parameter, freeze it, or list it in ignore=[...].",
            )


def _aligns(lanes: Sequence[tuple[LaneDtypes, list[Member]]], ranks: int) -> list[int]:
    """Elements to which each lane of a unit aligns parameters and intervals: BLOCK where that pads little.

    Then no block of BLOCK elements of a parameter is on two ranks, and states that are kept per block do not
    depend on the number of ranks. One decision for all lanes of a unit: a lane of few small parameters may be
    padded by much more than the limit if it is a small part of the unit.
    """
    needed = [BLOCK if d.in_blocks else align_elements(d.narrowest_bytes) for d, _ in lanes]
    packed = blocked = 0
    for (dtypes, members), align in zip(lanes, needed, strict=True):
        sizes = [prod(m.shape) for m in members]
        packed += laid_out_elements(sizes, ranks, align) * dtypes.compute.itemsize
        blocked += laid_out_elements(sizes, ranks, BLOCK) * dtypes.compute.itemsize
    return [BLOCK] * len(lanes) if blocked - packed < BLOCK_PADDING * packed else needed


def planned_levels(options: Options, ranks: int, node_ranks: int, tp_size: int = 1) -> tuple[int, Options]:
    """Before ranks are started: how many will hold different shards, and options that know their nodes."""
    inner = max(1, node_ranks // tp_size)
    if inner >= ranks or (inner == 1 and options.strategy != "hybrid"):
        return ranks, options
    if ranks % inner:
        return ranks, replace(options, why_flat=f"{ranks} ranks on nodes of {inner}")
    options = replace(options, nodes=ranks // inner)
    return (inner if options.strategy == "hybrid" else ranks), options


def make_plan(model: nn.Module, ranks: int, options: Options) -> Plan:
    return plan_of(find_units(model, options), ranks, options)


def plan_of(units: Sequence[Unit], ranks: int, options: Options, path: Sequence[int] | None = None) -> Plan:
    """`path`: the order in which units are called, the root first; None: as their modules are defined."""
    require_one_rank(options, max(ranks, options.nodes))
    lanes = [tuple(lane for lane, _ in lanes_of(unit, ranks, options)) for unit in units]
    plans = tuple(UnitPlan(unit.name, each) for unit, each in zip(units, lanes, strict=True))
    scheduled = [
        plan.scheduled(unit, inside, options)
        for plan, unit, inside in zip(plans, units, nesting(units), strict=True)
    ]
    path = _path_by_definition(units) if path is None else path
    if not options.releases_after_forward:
        path = list(dict.fromkeys(path))  # the engine does not see another call of a unit that is still full
    schedule = make_schedule([path], scheduled, options)
    made = Plan(options.strategy, ranks, plans, schedule, None, options.nodes, options.why_flat)
    return replace(made, optimizer_step=options.optimizer_step)


class _HasModules(Protocol):
    @property
    def modules(self) -> tuple[nn.Module, ...]: ...


def nesting(units: Sequence[_HasModules]) -> list[frozenset[int]]:
    """By unit, the units within its modules. For the root that is none: it is around all of them."""
    index_of = {unit.modules[0]: index for index, unit in enumerate(units) if index}
    inside: list[frozenset[int]] = [frozenset()]
    for index, unit in enumerate(units[1:], start=1):
        within = {index_of.get(inner, 0) for module in unit.modules for inner in module.modules()}
        inside.append(frozenset(within - {0, index}))
    return inside


def _path_by_definition(units: Sequence[Unit]) -> list[int]:
    """Modules are taken to be called in the order of their definition, those of a tie one by one."""
    position = {module: at for at, module in enumerate(units[0].modules[0].modules())}
    calls = [
        (position[module], index)
        for index, unit in enumerate(units)
        for module in (unit.modules[:1] if unit.merged else unit.modules)
    ]
    return [index for _, index in sorted(calls)]
