"""What an offloaded step moves between homes, and how long that takes at given rates; pure.

    forward, backward   compute shards up, once per gather; gradients down
    optimizer step      masters, gradients and state up; masters, state and compute shards down
    disk                what rests there goes through host memory, in addition

A rank has a host link of its own; the disk is shared by the ranks of a host.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.plan.homes import LaneBytes, LaneHomes, Resting


@dataclass(frozen=True)
class Rates:
    """Bytes per second, as measured on a machine with PCIe 5 (x16), page-locked memory and one NVMe disk."""

    link_one_way: float = 55e9
    link_each_way: float = 50e9  # while both ways are in use
    disk_read: float = 3.7e9
    disk_write: float = 1.8e9

    def with_link(self, bytes_s: float) -> Rates:
        """Another host link; while both ways are in use it is slower by as much as this one."""
        each_way = bytes_s * self.link_each_way / self.link_one_way
        return Rates(bytes_s, each_way, self.disk_read, self.disk_write)

    def with_disk(self, bytes_s: float) -> Rates:
        return Rates(self.link_one_way, self.link_each_way, bytes_s, bytes_s)

    def link_s(self, up: float, down: float) -> float:
        """Both ways at once for as long as there is something to move both ways."""
        both, rest = min(up, down), abs(up - down)
        return both / self.link_each_way + rest / self.link_one_way

    def disk_s(self, read: float, written: float) -> float:
        """One after the other: both at once share a disk's rate."""
        return read / self.disk_read + written / self.disk_write


@dataclass(frozen=True)
class Transfers:
    """Bytes of one rank and step of one micro-batch; up is to the compute device."""

    pass_up: int = 0
    pass_down: int = 0
    pass_read: int = 0  # from disk
    step_up: int = 0
    step_down: int = 0
    step_read: int = 0
    step_written: int = 0

    def __add__(self, other: Transfers) -> Transfers:
        return Transfers(*(a + b for a, b in zip(self._all, other._all, strict=True)))

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(vars(self).values())

    def pass_s(self, rates: Rates, node_ranks: int) -> float:
        """In forward and backward; hidden as far as computing takes as long."""
        disk_s = rates.disk_s(node_ranks * self.pass_read, 0)
        return max(rates.link_s(self.pass_up, self.pass_down), disk_s)

    def step_s(self, rates: Rates, node_ranks: int) -> float:
        """In the optimizer's step."""
        disk_s = rates.disk_s(node_ranks * self.step_read, node_ranks * self.step_written)
        return max(rates.link_s(self.step_up, self.step_down), disk_s)

    def seconds(self, rates: Rates, node_ranks: int) -> float:
        return self.pass_s(rates, node_ranks) + self.step_s(rates, node_ranks)


def waited_s(moving_s: float, resting: Resting, forward_s: float, backward_s: float) -> float:
    """Of the seconds that an optimizer's step moves values, those that computing does not hide.

    With overlap it goes on beside the next forward; and beside backward what slabs hold is stored, and as
    much is fetched for the step after it.
    """
    if not resting.overlap or resting.disk_bytes:
        return moving_s
    beside_backward = min(backward_s, moving_s * resting.share_ahead)
    return max(0.0, moving_s - forward_s - beside_backward)


def transfers_of(resting: Resting, gathers: list[int]) -> Transfers:
    """`gathers` by lane: how often a step gathers its unit."""
    lanes = zip(resting.lanes, resting.homes, gathers, strict=True)
    return sum((_of_lane(lane, homes, count) for lane, homes, count in lanes), Transfers())


def _of_lane(lane: LaneBytes, homes: LaneHomes, gathers: int) -> Transfers:
    cast = lane.master > 0
    master, at = (lane.master_at(homes.master), homes.master) if cast else (lane.compute, homes.compute)
    sent = 0
    if homes.compute != "device" and at != "device":
        # In 8-bit blocks they are packed once per pass, from the master.
        sent = lane.compute * gathers if lane.compute else master
    reads = sent if at == "disk" and not (cast and lane.compute) else 0
    if not (lane.gradients and homes.streams_steps):
        return Transfers(pass_up=sent, pass_read=reads)
    stepped = [master] * (at != "device") + [lane.state] * (homes.state != "device")
    from_disk = [master] * (at == "disk") + [lane.state] * (homes.state == "disk")
    gradients = lane.gradients if homes.gradients != "device" else 0
    written = lane.compute if cast and homes.compute != "device" else 0
    joined = written if at == "host" and lane.remainder else 0  # the compute shard is a part of the master
    return Transfers(
        pass_up=sent,
        pass_down=gradients,
        pass_read=reads,
        step_up=sum(stepped) + gradients + joined,
        step_down=sum(stepped) + written,
        step_read=sum(from_disk),
        step_written=sum(from_disk),
    )
