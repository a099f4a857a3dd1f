"""Where each kind of value of each lane rests, under a budget: pure, and the same on all ranks.

Values fill the compute device first, then the host, then the disk, the most expensive to move first: the
shards that gathers send (needed in forward and in backward), then masters and gradients, then optimizer
state. A gradient is on the device of its parameter, because torch requires that. On disk are masters together
with their optimizer state, so that a step which fails can be rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fullshard.errors import OffloadError
from fullshard.plan.plan import LanePlan, size

Place = Literal["device", "host", "disk"]
KINDS = ("compute", "master", "gradients", "state")
STATES = 2  # values that an optimizer keeps per element, as Adam does
# What moves together, the last to leave the device first: with a master, and with one shard for both.
_CAST = ("compute",), ("master", "gradients"), ("state",)
_PLAIN = ("compute", "gradients"), ("master",), ("state",)


@dataclass(frozen=True)
class LaneBytes:
    """Bytes of one lane on one rank, by kind. What is not cast has one shard, which is its `compute`."""

    compute: int
    master: int
    gradients: int
    state: int
    stays: bool = False  # on the device, whatever the budget

    @property
    def total(self) -> int:
        return self.compute + self.master + self.gradients + self.state


@dataclass(frozen=True)
class LaneHomes:
    """Where the values of one lane rest, by kind."""

    compute: Place = "device"
    master: Place = "device"
    gradients: Place = "device"
    state: Place = "device"


@dataclass(frozen=True)
class Budget:
    """Bytes per rank; None: no limit."""

    device: int | None
    host: int | None
    has_disk: bool
    kinds: tuple[str, ...] = KINDS


def bytes_of(lane: LanePlan, replicated: bool) -> LaneBytes:
    num_elements = lane.layout.total if replicated else lane.layout.interval
    rest = num_elements * lane.dtypes.rest.itemsize
    trained, stays = rest if lane.trainable else 0, not lane.offload
    if lane.dtypes.compute == lane.dtypes.rest:
        return LaneBytes(rest, 0, trained, STATES * trained, stays)
    return LaneBytes(num_elements * lane.dtypes.compute.itemsize, rest, trained, STATES * trained, stays)


def choose(lanes: Sequence[LaneBytes], budget: Budget) -> list[LaneHomes]:
    """The home of every kind of every lane. Raises if they do not fit."""
    on_host: list[list[str]] = [[] for _ in lanes]
    room = budget.device
    if room is not None:
        room = max(0, room - sum(lane.total for lane in lanes if lane.stays))
    for step in range(3) if room is not None else ():
        for lane, moved in zip(lanes, on_host, strict=True):
            kinds = (_CAST if lane.master else _PLAIN)[step]
            needed = sum(getattr(lane, kind) for kind in kinds)
            if kinds[0] not in budget.kinds or lane.stays:
                continue
            if needed > room:
                moved.extend(kinds)
            else:
                room -= needed
    homes = [LaneHomes(*("host" if kind in moved else "device" for kind in KINDS)) for moved in on_host]
    homes = [_consistent(lane, home, budget.kinds) for lane, home in zip(lanes, homes, strict=True)]
    return _fitted(lanes, homes, budget)


def _consistent(lane: LaneBytes, homes: LaneHomes, kinds: tuple[str, ...]) -> LaneHomes:
    if not lane.master:
        homes = replace(homes, master=homes.compute)
    elif homes.master == "device":
        homes = replace(homes, compute="device")  # it is cast from the master; there is no other copy
    here = homes.master == "device" or "gradients" not in kinds
    return replace(homes, gradients="device" if here else "host")


def _fitted(lanes: Sequence[LaneBytes], homes: list[LaneHomes], budget: Budget) -> list[LaneHomes]:
    """What the host cannot hold goes to disk, the last lanes first."""
    if budget.host is None:
        return homes
    over = usage(lanes, homes)["host"] - budget.host
    for index in reversed(range(len(lanes))):
        if over <= 0 or not budget.has_disk:
            break
        one = lanes[index : index + 1]
        if one[0].stays:
            continue
        before = usage(one, homes[index : index + 1])["host"]
        homes[index] = replace(homes[index], master="disk", state="disk", gradients="host")
        if not lanes[index].master:
            homes[index] = replace(homes[index], compute="disk")
        over -= before - usage(one, homes[index : index + 1])["host"]
    if over > 0:
        raise OffloadError(
            f"values at rest need {size(over)} more host memory than the {size(budget.host)} of a rank",
            "Raise host= or device= of fs.Offload, give it a disk= folder, or use more ranks.",
        )
    return homes


def usage(lanes: Sequence[LaneBytes], homes: Sequence[LaneHomes]) -> dict[Place, int]:
    """Bytes per home on one rank."""
    totals: dict[Place, int] = {"device": 0, "host": 0, "disk": 0}
    for lane, home in zip(lanes, homes, strict=True):
        for kind in KINDS:
            if kind != "compute" or not (lane.master and home.master == "device"):
                totals[getattr(home, kind)] += getattr(lane, kind)
    return totals
