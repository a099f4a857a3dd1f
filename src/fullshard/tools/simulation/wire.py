"""This rank's links: they hold each message for its time and deliver plausible data, never zeros.

A message takes its turn on each link that it uses, for the time of its bytes there, in the order in which
messages become ready; it is over when the last link is through with it and its latency has passed.

Zeros would make matrix products faster than they are (by a tenth, seen on an H200). What the other ranks
would send is made from this rank's own values, which have the right size and spread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from fullshard.planning.network import Load

LINKS = ("inside", "across")


@dataclass
class Message:
    """One collective, as the timeline shows it."""

    kind: str
    load: Load
    group: str  # the messages of a group pass one after the other, as those of a communicator of NCCL do
    label: Any = None  # what it was sent for, if that is traced
    times: Any = None  # for `Wire.intervals`


# By link, when a message held it: start and stop, in seconds of the wire's clock.
Intervals = dict[str, tuple[float, float]]


@dataclass
class Traffic:
    """What the links have carried since this was last cleared."""

    messages: int = 0
    inside_bytes: float = 0.0
    across_bytes: float = 0.0
    inside_s: float = 0.0
    across_s: float = 0.0
    latency_s: float = 0.0
    waited_s: float = 0.0  # by the host, on a CPU
    log: list[Message] | None = None  # filled only while a step is traced
    label: Any = None

    def add(self, message: Message) -> None:
        load = message.load
        self.messages += 1
        self.inside_bytes += load.inside_bytes
        self.across_bytes += load.across_bytes
        self.inside_s += load.inside_s
        self.across_s += load.across_s
        self.latency_s += load.latency_s
        if self.log is not None:
            message.label = self.label
            self.log.append(message)

    def clear(self) -> None:
        log, label = self.log, self.label
        self.__init__()  # type: ignore[misc]
        self.log, self.label = log, label


@dataclass
class HostWire:
    """Links between CPU ranks: data is delivered at once, its time passes in `wait`."""

    traffic: Traffic = field(default_factory=Traffic)
    _link_free: dict[str, float] = field(default_factory=dict)
    _group_free: dict[str, float] = field(default_factory=dict)

    def carry(self, message: Message, target: torch.Tensor, source: torch.Tensor, own: int | None) -> Any:
        deliver(target, source, own)
        load = message.load
        begun = stop = max(time.perf_counter(), self._group_free.get(message.group, 0.0))
        message.times = {}
        for link, seconds in zip(LINKS, (load.inside_s, load.across_s), strict=True):
            if seconds:
                start = max(begun, self._link_free.get(link, 0.0))
                self._link_free[link] = start + seconds
                message.times[link] = (start, start + seconds)
                stop = max(stop, start + seconds)
        self._group_free[message.group] = stop + load.latency_s
        self.traffic.add(message)
        return stop + load.latency_s

    def intervals(self, message: Message) -> Intervals:
        found: Intervals = message.times
        return found

    def over(self, ticket: float) -> bool:
        return time.perf_counter() >= ticket

    def wait(self, ticket: float, timeout: timedelta | None) -> None:
        begun = time.perf_counter()
        left = max(0.0, ticket - begun)
        limit = left if timeout is None else timeout.total_seconds()
        time.sleep(min(left, limit))
        self.traffic.waited_s += time.perf_counter() - begun if left else 0.0
        if limit < left:
            raise RuntimeError("Timed out waiting for the simulated wire")


def event(timed: bool) -> Any:
    """A CUDA event; torch's constructor is not typed."""
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call, unused-ignore]


def deliver(target: torch.Tensor, source: torch.Tensor, own: int | None) -> None:
    """Repeats `source` over `target`; the interval `own` of the target is the source itself."""
    flat, values = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
    if not values.numel() or (flat.data_ptr() == values.data_ptr() and flat.numel() == values.numel()):
        return
    rows = flat.view(-1, values.numel())
    for some in (rows,) if own is None else (rows[:own], rows[own + 1 :]):
        some.copy_(values.expand(some.shape))
