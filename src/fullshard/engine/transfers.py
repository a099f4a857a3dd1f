"""Copies between host memory and the compute device, beside computing.

Each direction has a stream of its own. A copy begins when the marks that it is given are reached, and whoever
needs its result waits for a mark behind it. Nothing here makes the host wait, except `Mark.synchronize`.

On ranks that compute on the host there are no streams: a copy is over when its call returns.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

HELD = 2  # device buffers whose values are on their way to the host


class Mark:
    """A point on a stream."""

    __slots__ = ("_event", "_stream")

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._event: Any = None if stream is None else stream.record_event()

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
    """The two streams of one compute device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._up = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._held: deque[tuple[torch.Tensor, Mark]] = deque()

    def now(self) -> Mark:
        """Behind what the compute stream was given so far."""
        return Mark(None if self._up is None else torch.cuda.current_stream(self.device))

    def up(self, *after: Mark | None) -> AbstractContextManager[Any]:
        """Copies to the device begin behind these marks."""
        return self._on(self._up, after)

    def down(self, *after: Mark | None) -> AbstractContextManager[Any]:
        """Copies to the host begin behind these marks."""
        return self._on(self._down, after)

    def mark_up(self) -> Mark:
        """Behind all copies to the device so far."""
        return Mark(self._up)

    def mark_down(self) -> Mark:
        return Mark(self._down)

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
        self._held.append((buffer, until))
        while self._held and (len(self._held) > HELD or self._held[0][1].over()):
            self._held[0][1].wait()
            self._held.popleft()

    def synchronize(self) -> None:
        """The host waits for all copies."""
        if self._up is not None and self._down is not None:
            self._up.synchronize()
            self._down.synchronize()
            self._held.clear()
