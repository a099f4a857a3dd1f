"""This rank's one wire: it holds each message for its time and delivers plausible data, never zeros.

Zeros would make matrix products faster than they are (by a tenth, seen on an H200). What the other ranks
would send is made from this rank's own values, which have the right size and spread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch


@dataclass
class Message:
    """One collective on the wire, as the timeline shows it."""

    kind: str
    sent_bytes: float
    seconds: float
    label: Any = None  # what it was sent for, if that is traced
    start: Any = None  # a time, or on a device an event
    stop: Any = None


@dataclass
class Traffic:
    """What the wire has carried since it was last cleared."""

    messages: int = 0
    bytes_sent: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0  # by the host, on a CPU
    log: list[Message] | None = None  # filled only while a step is traced
    label: Any = None

    def add(self, message: Message) -> None:
        self.messages += 1
        self.bytes_sent += message.sent_bytes
        self.seconds += message.seconds
        if self.log is not None:
            message.label = self.label
            self.log.append(message)

    def clear(self) -> None:
        self.messages, self.bytes_sent, self.seconds, self.waited_s = 0, 0.0, 0.0, 0.0


@dataclass
class HostWire:
    """A wire between CPU ranks: data is delivered at once, its time passes in `wait`."""

    traffic: Traffic = field(default_factory=Traffic)
    free_at: float = 0.0

    def carry(self, message: Message, target: torch.Tensor, source: torch.Tensor, own: int | None) -> Any:
        deliver(target, source, own)
        start = max(time.perf_counter(), self.free_at)
        self.free_at = start + message.seconds
        message.start, message.stop = start, self.free_at
        self.traffic.add(message)
        return self.free_at

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
