"""What a sharded model will hold and send: pure, frozen, printable.

print(fs.plan(model, strategy="zero3", ranks=8))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from fullshard.options import Options
from fullshard.plan.layout import Layout, align_elements, lay_out, with_regions
from fullshard.plan.schedule import kept_units
from fullshard.plan.units import Member, Unit, find_units, looks_up_only
from fullshard.precision import BLOCK, PRESETS, LaneDtypes, lane_dtypes, packed_bytes


@dataclass(frozen=True)
class LanePlan:
    """One lane: its layout, its dtypes, whether it trains."""

    layout: Layout
    dtypes: LaneDtypes
    trainable: bool

    @property
    def full_bytes(self) -> int:
        return self.layout.total * self.dtypes.compute.itemsize

    @property
    def gather_bytes(self) -> int:
        """One gather, all intervals together."""
        if self.dtypes.eight_bit_gather:
            return self.layout.ranks * packed_bytes(self.layout.interval)
        return self.full_bytes

    @property
    def wire_bytes(self) -> int:
        """One exchange of gradients."""
        if self.dtypes.eight_bit_wire:
            return self.layout.ranks * packed_bytes(self.layout.interval)
        return self.layout.total * self.dtypes.wire.itemsize

    def rest_bytes(self, whole: bool) -> int:
        return (self.layout.total if whole else self.layout.interval) * self.dtypes.rest.itemsize


@dataclass(frozen=True)
class UnitPlan:
    """A unit, how often a step gathers it, and whether it stays full from forward to backward."""

    name: str
    lanes: tuple[LanePlan, ...]
    gathers: int
    kept: bool

    @property
    def full_bytes(self) -> int:
        return sum(lane.full_bytes for lane in self.lanes)

    @property
    def num_elements(self) -> int:
        return sum(lane.layout.num_elements for lane in self.lanes)


@dataclass(frozen=True)
class Plan:
    """The whole model. All byte counts are for one rank."""

    strategy: str
    ranks: int
    units: tuple[UnitPlan, ...]

    @property
    def num_elements(self) -> int:
        return sum(unit.num_elements for unit in self.units)

    @property
    def parameter_bytes(self) -> int:
        """Parameters at rest."""
        return sum(lane.rest_bytes(self._whole) for unit in self.units for lane in unit.lanes)

    @property
    def gradient_bytes(self) -> int:
        """Gradients at rest; frozen lanes have none."""
        lanes = [lane for unit in self.units for lane in unit.lanes if lane.trainable]
        return sum(lane.rest_bytes(self._whole) for lane in lanes)

    @property
    def full_bytes_at_peak(self) -> int:
        """Full values held at once: the root and, with zero3, the two largest neighbours, or those that are
        kept and the one that backward gathers beside them."""
        root, rest = self.units[0].full_bytes, [unit.full_bytes for unit in self.units[1:]]
        if self.strategy not in ("zero3", "hybrid"):
            return root + sum(rest)
        pairs = [a + b for a, b in pairwise(rest)]
        kept = [unit.full_bytes for unit in self.units[1:] if unit.kept]
        again = [unit.full_bytes for unit in self.units[1:] if unit.gathers > 1]
        return root + max([*pairs, *rest, sum(kept) + sum(again[-1:]), 0])

    @property
    def wire_bytes_per_step(self) -> int:
        """Sent by one rank in one step of one micro-batch: gathers and gradients."""
        share = (self.ranks - 1) / self.ranks
        total = 0.0
        for unit in self.units:
            for lane in unit.lanes:
                total += share * lane.gather_bytes * unit.gathers
                if lane.trainable:
                    total += share * lane.wire_bytes
                    if self._whole:
                        total += share * lane.layout.total * lane.dtypes.rest.itemsize
        return round(total)

    @property
    def _whole(self) -> bool:
        return self.strategy == "replicate"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("unit", "lane", "elements", "at rest", "full", "padding")]
        rows += [_row(unit, lane, self._whole) for unit in self.units for lane in unit.lanes]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [_line(row, widths) for row in rows]
        return "\n".join(
            [
                f"{self.num_elements:,} parameters, {self.strategy!r}, {self.ranks} ranks; for one rank:",
                lines[0],
                "-" * len(lines[0]),
                *lines[1:],
                f"at rest: parameters {size(self.parameter_bytes)}, gradients {size(self.gradient_bytes)}, "
                f"Adam state {size(2 * self.gradient_bytes)}",
                f"at the peak, full values: {size(self.full_bytes_at_peak)}",
                f"sent per step: {size(self.wire_bytes_per_step)}",
            ]
        )


def _row(unit: UnitPlan, lane: LanePlan, whole: bool) -> tuple[str, ...]:
    kind = f"{_short(lane.dtypes.rest)}{'' if lane.trainable else ' frozen'}"
    elements, padding = lane.layout.num_elements, lane.layout.total - lane.layout.num_elements
    rest, full = size(lane.rest_bytes(whole)), size(lane.full_bytes)
    return unit.name or "(root)", kind, f"{elements:,}", rest, full, f"{padding:,}"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = zip(row, widths, strict=True)
    return "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(cells))


def size(num_bytes: float) -> str:
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or suffix == "GiB":
            return f"{num_bytes:.0f} {suffix}" if suffix == "B" else f"{num_bytes:.1f} {suffix}"
        num_bytes /= 1024
    raise AssertionError


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
    lanes = []
    for (dtype, trainable, fixed), members in groups.items():
        precision = PRESETS["fp32"] if fixed else own
        dtypes = lane_dtypes(dtype, trainable, precision, options.reduce == "scatter")
        shapes = [(m.name, m.shape, m.order) for m in members]
        align = BLOCK if dtypes.in_blocks else align_elements(dtypes.narrowest_bytes)
        layout = lay_out(shapes, ranks, align)
        if any(m.region is not None for m in members):
            layout = with_regions(layout, [m.region for m in members])
        lanes.append((LanePlan(layout, dtypes, trainable), members))
    return lanes


def make_plan(model: nn.Module, ranks: int, options: Options) -> Plan:
    return plan_of(find_units(model, options), ranks, options)


def plan_of(units: Iterable[Unit], ranks: int, options: Options) -> Plan:
    units = list(units)
    lanes = [tuple(lane for lane, _ in lanes_of(unit, ranks, options)) for unit in units]
    sizes = [sum(lane.full_bytes for lane in each) for each in lanes]
    once = {0} | {i for i, unit in enumerate(units) if looks_up_only(unit.modules)}
    kept: set[int] = set()
    if options.releases_after_forward:
        kept = kept_units(range(len(units)), sizes, *options.keeps, once)
    plans = []
    for index, (unit, each) in enumerate(zip(units, lanes, strict=True)):
        twice = options.releases_after_forward and index not in once and index not in kept
        gathers = 0 if options.replicated else 2 if twice else 1
        plans.append(UnitPlan(unit.name, each, gathers, index in kept))
    return Plan(options.strategy, ranks, tuple(plans))
