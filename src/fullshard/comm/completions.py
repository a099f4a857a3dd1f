"""Whether a device comes to the operations that were queued on it. Nothing here waits for the device.

Where the host does not wait for collectives, an operation has ended for the recorder as soon as it is queued.
So an event is recorded behind it, at most one per millisecond, and the monitor's thread asks the oldest one
whether it has passed. As long as events pass, the device makes progress, however far the host is ahead of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

_EVERY_NS = 10**6
_MOST = 512  # events in flight: a host that is further ahead records no more of them
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_relaxed = threading.local()


class _Event(Protocol):
    def record(self) -> Any: ...
    def query(self) -> bool: ...


class Stuck(NamedTuple):
    """The oldest operation that the device has not come to, and for how long it has been that."""

    channel: str
    number: int
    seconds: float


class Completions:
    """`note` is called by the thread that queues operations, `oldest` by the monitor."""

    def __init__(
        self,
        new_event: Callable[[], _Event],
        may_record: Callable[[], bool] = lambda: True,
        before_query: Callable[[], None] = lambda: None,
    ) -> None:
        self._new_event, self._may_record, self._before_query = new_event, may_record, before_query
        self._in_flight: deque[tuple[_Event, str, int]] = deque()
        self._spare: deque[_Event] = deque(maxlen=_MOST)
        self._next_ns = 0
        self._oldest: _Event | None = None
        self._since = 0.0

    def note(self, channel: str, number: int) -> None:
        """The operation is queued on the current stream, or that stream waits for it."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_ns or len(self._in_flight) >= _MOST:
            return
        self._next_ns = now_ns + _EVERY_NS
        if self._may_record():
            event = self._spare.popleft() if self._spare else self._new_event()
            event.record()
            self._in_flight.append((event, channel, number))

    def oldest(self) -> Stuck | None:
        """None where the device has come to everything."""
        now = time.monotonic()
        while self._in_flight:
            event, channel, number = self._in_flight[0]
            self._before_query()
            if not event.query():
                if event is not self._oldest:
                    self._oldest, self._since = event, now
                return Stuck(channel, number, now - self._since)
            self._in_flight.popleft()
            self._oldest = None
            self._spare.append(event)
        return None


def on_cuda() -> Completions:
    """Not while a CUDA graph is captured: an event that is recorded then is a part of the graph."""
    capturing = torch.cuda.is_current_stream_capturing
    return Completions(torch.cuda.Event, lambda: not capturing(), _leave_captures_alone)


def _leave_captures_alone() -> None:
    """From now on queries by this thread do not end the capture of a graph by another one."""
    if not getattr(_relaxed, "done", False):
        _relaxed.done = True
        with contextlib.suppress(OSError, AttributeError):  # no driver of NVIDIA's
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(
                ctypes.byref(ctypes.c_int(_RELAXED))
            )
