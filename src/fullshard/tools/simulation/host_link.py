"""The link between this device and its host: measured, and slower ones by calculation.

An offloaded step of a simulated rank copies its real bytes over this machine's own link. A slower link is not
imitated copy by copy: what the step would take over it is computed from the measured step, from the bytes
that the plan has, and from both links' rates. A faster one cannot be computed from that, and is refused.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from fullshard.errors import OptionError
from fullshard.plan.plan import Plan
from fullshard.planning.transfers import Rates, Transfers, transfers_of
from fullshard.tools.simulation.wire import event

_TRIES = 3
_BYTES = {"cuda": 2**28, "cpu": 2**25}


@dataclass(frozen=True)
class LinkFigures:
    """What a step moves over the host link, and how long the link takes for it."""

    moved: Transfers
    own_bytes_s: float  # of this machine, one way
    link_bytes_s: float  # the one that was requested, or this machine's
    pass_s: float  # in forward and backward
    step_s: float  # in the optimizer's step
    computed_step_s: float  # of everything, over that link

    @property
    def busy_s(self) -> float:
        return self.pass_s + self.step_s


def measured_rates(device: torch.device) -> Rates:
    """Of copies between page-locked memory and the device; on a CPU, of copies in memory."""
    size = _BYTES[device.type]
    pinned = device.type == "cuda"
    here = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    if not pinned:
        one_way = size / min(_host_copy_s(there[0], here[0]) for _ in range(_TRIES))
        return Rates(one_way, one_way / 2)
    one_way = size / min(_device_copies_s([(there[0], here[0])]) for _ in range(_TRIES))
    pairs = [(there[0], here[0]), (here[1], there[1])]
    each_way = size / min(_device_copies_s(pairs) for _ in range(_TRIES))
    return Rates(one_way, min(one_way, each_way))


def _host_copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    begun = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begun


def _device_copies_s(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """All at once, each on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in pairs]  # type: ignore[no-untyped-call, unused-ignore]
    begin, end = event(timed=True), event(timed=True)
    torch.cuda.synchronize()
    begin.record()
    for stream, (target, source) in zip(streams, pairs, strict=True):
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def refuse_faster(requested: float | None, own: Rates) -> None:
    if requested is not None and requested > own.link_one_way:
        raise OptionError(
            f"--host-link is {requested / 1e9:g} GB/s, and copies of this machine reach "
            f"{own.link_one_way / 1e9:.1f} GB/s",
            "Give a slower link: steps over this machine's do not show what a faster one would change.",
        )


def over_link(plan: Plan, measured_s: float, own: Rates, requested: float | None) -> LinkFigures | None:
    """Of a step that took `measured_s` here; None without offload.

    The optimizer's step waits for its link. What remains of the measured step is forward and backward, which
    the link may hold up if it is too slow to be hidden behind them.
    """
    if plan.resting is None:
        return None
    units = zip(plan.units, plan.schedule.gathers, strict=True)
    moved = transfers_of(plan.resting, [count for unit, count in units for _ in unit.lanes])
    link = own if requested is None else own.with_link(requested)
    # The disk is this machine's own, and part of the measured step.
    here_s = own.link_s(moved.step_up, moved.step_down)
    pass_s = link.link_s(moved.pass_up, moved.pass_down)
    step_s = link.link_s(moved.step_up, moved.step_down)
    computed = max(measured_s - here_s, pass_s) + step_s if requested is not None else measured_s
    return LinkFigures(moved, own.link_one_way, link.link_one_way, pass_s, step_s, max(measured_s, computed))
