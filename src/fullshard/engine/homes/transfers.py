"""Copies between host memory and the compute device, beside computing.

    up       to the device, for an optimizer's step and for gradients that are added to
    gathers  to the device, for gathers: these do not queue behind a step that goes on beside them
    down     to the host
    update   the kernels of a step that goes on beside the next forward, in turn on several streams

A copy begins when the marks that it is given are reached, and whoever needs its result waits for a mark
behind it. Nothing here makes the host wait, except `Mark.synchronize`, `synchronize` and `settle`.

On ranks that compute on the host there are no streams: a copy is over when its call returns.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

HELD = 2  # device buffers whose values are on their way to the host
FREED_BEHIND = 2 * HELD  # units of a forward: they have computed for longer than these copies take
# A device takes about a thousand launches ahead per stream, and then the host waits: it could not issue the
# forward beside which a step is to go on. Of a chunk there are about eight.
UPDATE_STREAMS, CHUNKS_PER_STREAM = 3, 64


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


class Mark:
    """A point on a stream. `sleeping`: a thread that waits for it leaves its core to others."""

    __slots__ = ("_event", "_stream")

    def __init__(self, stream: torch.cuda.Stream | None, sleeping: bool = False) -> None:
        self._stream = stream
        event = torch.cuda.Event(blocking=True) if sleeping and stream is not None else None  # type: ignore[no-untyped-call]
        self._event: Any = None if stream is None else stream.record_event(event)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self._stream

    def is_on(self, stream: torch.cuda.Stream | None) -> bool:
        return self._stream is stream

    def wait(self) -> None:
        """What the current stream is given from now on begins behind this point."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        if self._event is not None:
            stream.wait_event(self._event)

    def over(self) -> bool:
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """The host waits."""
        if self._event is not None:
            self._event.synchronize()


class Transfers:
    """The streams of one compute device; without any, everything is in the order of the compute stream."""

    def __init__(self, device: torch.device, beside: bool = True) -> None:
        self.device = device
        streams = beside and has_streams(device)
        # Kernels of an update are short, and copies wait for them: they come before those of a forward.
        self._up, self._gathers, self._down, *updates = (
            torch.cuda.Stream(device, priority=priority) if streams else None  # type: ignore[no-untyped-call]
            for priority in (0, 0, 0, *[-1] * UPDATE_STREAMS)
        )
        self._updates = deque(updates)  # the first one is in use
        self._chunks = 0
        self.held: deque[tuple[torch.Tensor, Mark]] = deque()  # the oldest first
        self._units_since = 0  # one was held last
        self.pending: Mark | None = None  # behind a step that goes on beside what follows it
        self._read_elsewhere: dict[Any, Mark] = {}  # on streams of another model, by stream
        self.num_writes = 0  # how often this process may have written, by our own code, what rests
        self._fetching: list[weakref.WeakMethod[Callable[[], None]]] = []

    def now(self) -> Mark:
        """Behind what the compute stream was given so far."""
        return Mark(None if self._up is None else torch.cuda.current_stream(self.device))

    def up(self, *after: Mark | None) -> AbstractContextManager[Any]:
        """Copies to the device begin behind these marks."""
        return self._on(self._up, after)

    def gathers(self, *after: Mark | None) -> AbstractContextManager[Any]:
        """Copies to the device for a gather begin behind these marks."""
        return self._on(self._gathers, after)

    def down(self, *after: Mark | None) -> AbstractContextManager[Any]:
        """Copies to the host begin behind these marks."""
        return self._on(self._down, after)

    def mark_up(self, sleeping: bool = False) -> Mark:
        """Behind all copies to the device so far."""
        return Mark(self._up, sleeping)

    def mark_gathers(self) -> Mark:
        return Mark(self._gathers)

    def mark_down(self, sleeping: bool = False) -> Mark:
        return Mark(self._down, sleeping)

    def beside(self, read: Iterable[Mark] = (), after: Iterable[Mark] = ()) -> AbstractContextManager[Any]:
        """A step begins behind these marks and what the compute stream was given so far, and goes on beside
        it. What it writes to the host is read there until the first ones."""
        self._on(self._down, tuple(read))
        return self._on(self._updates[0], (self.now(), *after))

    def turn(self) -> None:
        """Before a chunk of a step: one that goes on beside may go on on another stream, behind this one."""
        stream = self._updates[0]
        if stream is None or torch.cuda.current_stream(self.device) != stream:
            return
        self._chunks += 1
        if self._chunks % CHUNKS_PER_STREAM == 0:
            self._updates.rotate()
            with self._on(self._updates[0], (Mark(stream),)):
                pass
            torch.cuda.set_stream(self._updates[0])  # type: ignore[arg-type]

    @staticmethod
    def _on(stream: torch.cuda.Stream | None, after: tuple[Mark | None, ...]) -> AbstractContextManager[Any]:
        if stream is None:
            return nullcontext()
        for mark in after:
            if mark is not None:
                mark.hold_up(stream)
        return torch.cuda.stream(stream)

    def hold(self, buffer: torch.Tensor, until: Mark) -> None:
        """Keep a device buffer until its copy is over. Computing waits where too many are on their way."""
        if self._down is None:
            return
        self.held.append((buffer, until))
        self._units_since = 0
        while self.held and (len(self.held) > HELD or self.held[0][1].over()):
            self._free()

    def _free(self) -> None:
        _, until = self.held.popleft()
        until.wait()

    def free_held(self) -> None:
        """At the forward of each unit. Without this the last buffers of a backward would stay until the next
        one, where no step waits for copies."""
        self._units_since += 1
        while self.held and self._units_since > FREED_BEHIND:
            self._free()

    def pending_elsewhere(self, models: Iterable[Transfers]) -> list[Mark]:
        """Behind steps on these models that go on by other streams than ours: nothing of ours is behind."""
        steps = [transfers.pending for transfers in models]
        return [step for step in steps if step is not None and not step.is_on(self._down)]

    def read_elsewhere(self, until: Mark) -> None:
        """An optimizer of several models copies what rests here, by the streams of another one."""
        if not until.is_on(self._up):
            self._read_elsewhere[until.stream] = until

    def call_in_backward(self, fetch: Callable[[], None]) -> None:
        """At the beginning of each backward, as long as the object of this method lives."""
        self._fetching.append(weakref.WeakMethod(fetch))

    def fetch_ahead(self) -> None:
        """Backward begins: what the next step needs may come meanwhile."""
        if self._fetching:
            self._fetching = [reference for reference in self._fetching if reference() is not None]
            for fetch in (reference() for reference in self._fetching):
                if fetch is not None:
                    fetch()

    def wait_for_copies(self) -> None:
        """The host waits for copies of steps: their memory on the device goes."""
        self.mark_up().synchronize()
        self.mark_down().synchronize()

    def synchronize(self) -> None:
        """The host waits for all copies: it is about to write what they read."""
        self.drain()
        self.num_writes += 1

    def drain(self) -> None:
        """The host waits for all copies and updates."""
        self.settle()  # an optimizer of several models steps on the streams of one of them
        for read in self._read_elsewhere.values():
            read.synchronize()
        self._read_elsewhere.clear()
        for stream in (self._up, self._gathers, *self._updates, self._down):
            if stream is not None:
                stream.synchronize()
        self.held.clear()

    def settle(self) -> None:
        """The host waits for a step that goes on, if there is one: it is about to read what that writes."""
        if self.pending is not None:
            self.pending.synchronize()
            self.pending = None
