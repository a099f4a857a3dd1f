"""Waiting for collectives, and the errors that are raised when one cannot complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from fullshard.comm.flight_recorder import FlightRecorder
from fullshard.comm.tags import CommObserver
from fullshard.errors import RankMismatch, Stalled

_POLL = timedelta(seconds=1)
_IDLE_S = 5.0
_BUSY = 0.02  # of a processor; threads that only serve connections use less


class Operation:
    """A collective in flight. After `wait` its result may be used on the current stream."""

    __slots__ = ("_after", "_watchdog", "_work", "channel", "number")

    def __init__(
        self, watchdog: Watchdog, work: Any, channel: str, number: int, after: Callable[[], Any] | None
    ) -> None:
        self._watchdog, self._work, self._after = watchdog, work, after
        self.channel, self.number = channel, number

    def over(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._work is not None:
            self._watchdog.wait_for(self._work, self.channel, self.number)
            self._work = None
            if self._after is not None:
                self._after()
                self._after = None


class IdleWatch:
    """Finds ranks that have not begun an operation and compute nothing: they wait for something else.

    A rank may be late for a save because it is still busy. One that has used no processor time for seconds,
    together with all processes it started, waits in a barrier that is not ours, or sleeps.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._seen: dict[int, tuple[float, float]] = {}

    def idle(self, channel: str, number: int) -> str | None:
        now = time.monotonic()
        for place, used_s in self._recorder.not_begun(channel, number):
            since, used_then = self._seen.setdefault(place.rank, (now, used_s))
            if used_s - used_then > _BUSY * (now - since) + 0.05:
                self._seen[place.rank] = (now, used_s)
            elif now - since >= _IDLE_S:
                return f"{place}, and has computed nothing for {now - since:.0f} s"
        return None


class Watchdog:
    """Waits for operations while it watches the other ranks' flight recorders."""

    def __init__(self, recorder: FlightRecorder, host_waits: bool, stall_timeout_s: float) -> None:
        self.recorder, self.host_waits, self._stall_timeout_s = recorder, host_waits, stall_timeout_s
        self.observer: CommObserver | None = None

    def wait_for(self, work: Any, channel: str, number: int, watch: IdleWatch | None = None) -> None:
        """The operation is over when this returns; on a GPU, for the current stream."""
        if self.observer is None:
            self._wait_for(work, channel, number, watch)
            return
        self.observer.waiting(channel, number)
        self._wait_for(work, channel, number, watch)
        self.observer.waited(channel, number)

    def _wait_for(self, work: Any, channel: str, number: int, watch: IdleWatch | None) -> None:
        if not self.host_waits and channel != "control":
            work.wait()  # the current stream waits, not the host
            self.recorder.end(channel, number)
            return
        recorder = self.recorder
        begun = time.monotonic()
        if work.is_completed():
            try:
                work.wait()
            except RuntimeError as error:
                self._still_waiting(error, channel, number, begun, None)
                raise
            recorder.end(channel, number)
            return
        recorder.wait_begin(channel, number)
        try:
            while True:
                try:
                    work.wait(_POLL)
                    break
                except RuntimeError as error:
                    idle = watch.idle(channel, number) if watch is not None else None
                    self._still_waiting(error, channel, number, begun, idle)
        finally:
            recorder.wait_end()
        recorder.end(channel, number)  # not in `finally`: peers must see a failed wait as unfinished

    @property
    def profiled(self) -> bool:
        """Whether no operation may be left in flight, because torch's profiler may stop before it completes.

        gloo's thread reports the end of an operation to the profiler that ran when it began, even if that has
        stopped since; it then writes into memory that the profiler has freed.
        """
        return self.host_waits and bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]

    def check_agreement(self) -> None:
        """At the end of each pass: raise if ranks of this host were in different operations.

        Not after each operation: reading one peer's recorder costs as much as issuing a gather.
        """
        for channel in self.recorder.channels():
            differing = self.recorder.disagreement(channel)
            if differing:
                raise RankMismatch(
                    f"ranks are in different operations: {self.recorder.places()[self.recorder.rank]}; "
                    + "; ".join(map(str, differing)),
                    "Every rank must make the same calls on a sharded model in the same order.",
                )

    def _still_waiting(
        self, error: RuntimeError, channel: str, number: int, begun: float, idle: str | None
    ) -> None:
        verdict = self.recorder.verdict(channel, number) or idle
        if verdict is None and "imed out" not in str(error) and "imeout" not in str(error):
            verdict = f"the connection failed ({str(error).splitlines()[0]})"
            time.sleep(0.2)
            verdict = self.recorder.verdict(channel, number) or verdict
        waited = time.monotonic() - begun
        if verdict is None and waited > self._stall_timeout_s:
            verdict = f"nothing moved for {waited:.0f} s"
        if verdict is None:
            return
        places = "; ".join(str(p) for p in self.recorder.places() if p is not None)
        raise Stalled(
            f"an operation that the other ranks will not complete: {verdict}. Places: {places}",
            "Every rank must make the same calls on a sharded model; look for one under `if rank == 0`. "
            "Decode and evaluate inside `with fs.inference(model):`, where numbers of passes may differ.",
        ) from None
