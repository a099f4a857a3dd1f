"""Waiting for collectives, and the errors that are raised when one cannot complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from fullshard.comm import monitor
from fullshard.comm.completions import on_cuda
from fullshard.comm.ending import never_destroy
from fullshard.comm.flight_recorder import MUTUAL, FlightRecorder
from fullshard.comm.host_summary import silent_hosts
from fullshard.comm.standing import late_texts, standings
from fullshard.comm.tags import CommObserver, OpTag
from fullshard.errors import RankMismatch, Stalled

_POLL = timedelta(seconds=1)
_SEEN_BY_OTHERS_S = 1.5  # longer than _POLL: those who wait for this rank come to the same verdict
_SEEN_BY_OTHER_HOSTS_S = 3.5  # a summary is written and read once per second each
_AFTER_STALL_S = 2.0  # for a save in the background, when training has stalled and a rank is stopped
_HEARING_S = 8.0  # for summaries of other hosts, after a connection has failed
_EXITING_S = 3.0  # for a process of this host that has closed its connections to be gone
_REMEDY = (
    "Every rank must make the same calls on a sharded model; look for one under `if rank == 0`. "
    "Decode and evaluate inside `with fs.inference(model):`, where numbers of passes may differ."
)
_PATIENCE = " For a rank that is slow for a good reason, raise FULLSHARD_STALL_TIMEOUT_S."


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


def _is_of_a_signal_handler(error: RuntimeError) -> bool:
    """Whether it was raised by other Python code that ran while a collective was waited for, such as torch's
    handler for lost workers of a DataLoader. What fails in a collective is raised by C++, into our frame."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = "" if place is None else str(place.tb_frame.f_globals.get("__name__"))
    return place is not None and not module.startswith(("fullshard.", "torch.distributed."))


class Watchdog:
    """Waits for operations while it watches the other ranks' flight recorders.

    `stalled` is the error after which nothing more is waited for: the ranks no longer agree on what is in
    flight, and memory that an operation may still write to stays as it is.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        host_waits: bool,
        stall_timeout_s: float,
        arrival_s: float = 0.0,
        training: Watchdog | None = None,
    ) -> None:
        self.recorder, self.host_waits = recorder, host_waits
        self._stall_timeout_s, self._arrival_s, self._training = stall_timeout_s, arrival_s, training
        self.observer: CommObserver | None = None
        self.stalled: Stalled | None = None
        self._completions = on_cuda()
        if recorder.ranks > 1:
            monitor.watch(recorder, None if host_waits else self._completions)

    def begin(self, channel: str, tag: OpTag) -> int:
        """Note an operation that is about to be issued; returns its running number."""
        number = self.recorder.begin(channel, tag.phase, tag.unit, tag.step)
        if self.observer is not None:
            self.observer.issued(channel, number, tag)
        return number

    def wait_for(self, work: Any, channel: str, number: int) -> None:
        """The operation is over when this returns; on a GPU, for the current stream."""
        if self.observer is None:
            self._wait_for(work, channel, number)
            return
        self.observer.waiting(channel, number)
        self._wait_for(work, channel, number)
        self.observer.waited(channel, number)

    def _wait_for(self, work: Any, channel: str, number: int) -> None:
        if not self.host_waits and channel != "control":
            work.wait()  # the current stream waits, not the host
            self.recorder.end(channel, number)
            self._completions.note(channel, number)
            return
        recorder = self.recorder
        begun = time.monotonic()
        if work.is_completed():
            try:
                work.wait()
            except RuntimeError as error:
                self._still_waiting(error, channel, number, begun)
                raise
            recorder.end(channel, number)
            return
        self.check_stalled()
        recorder.wait_begin(channel, number)
        try:
            while True:
                failed = work.is_completed()  # or done: then this returns, whatever the limit is
                try:
                    work.wait(_POLL)
                    break
                except RuntimeError as error:
                    self._still_waiting(error, channel, number, begun, failed)
        except BaseException:  # KeyboardInterrupt too: the operation stays in flight
            never_destroy(())
            raise
        finally:
            recorder.wait_end()
        recorder.end(channel, number)  # not in `finally`: peers must see a failed wait as unfinished

    @contextmanager
    def blocking(self, channel: str, tag: OpTag) -> Iterator[None]:
        """Around a call that blocks until other ranks take part, and that cannot be waited for in steps."""
        number = self.recorder.begin(channel, tag.phase, tag.unit, tag.step)
        self.recorder.wait_begin(channel, number)
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self._still_waiting(error, channel, number, begun, failed=True)
            raise
        finally:
            self.recorder.wait_end()
        self.recorder.end(channel, number)

    def check_stalled(self) -> None:
        """After a stall, every further operation raises its error at once."""
        if self.stalled is not None:
            raise Stalled(self.stalled.what, self.stalled.remedy) from self.stalled

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

    def _limit_s(self, channel: str, number: int) -> float:
        if self._arrival_s > self._stall_timeout_s and None in self.recorder.places():
            return self._arrival_s  # not all have begun to take part, as far as this host knows
        if self._training is not None and self._training.stalled is not None:
            stopped = (s.stopped for s in standings(self.recorder, channel, number).values())
            return _AFTER_STALL_S if any(stopped) else self._stall_timeout_s
        return self._stall_timeout_s

    def _still_waiting(
        self, error: RuntimeError, channel: str, number: int, begun: float, failed: bool = False
    ) -> None:
        if _is_of_a_signal_handler(error):
            raise error
        verdict, remedy = self.recorder.verdict(channel, number), _REMEDY
        timed_out = "imed out" in str(error) or "imeout" in str(error)
        if verdict is None and not timed_out:
            time.sleep(0.2)  # a rank that died with the connection is a zombie or gone by then
            verdict = self._after_failure(error, channel, number)
        waited = time.monotonic() - begun
        if verdict is None and (failed or waited > self._limit_s(channel, number)):
            late = late_texts(self.recorder, channel, standings(self.recorder, channel, number), {})
            verdict = f"nothing moved for {waited:.0f} s" + "".join(f"; late: {text}" for text in late)
            remedy = _REMEDY + _PATIENCE
        if verdict is None:
            return
        if verdict.endswith(MUTUAL):
            # Else they would only see that this process has exited.
            time.sleep(_SEEN_BY_OTHER_HOSTS_S if self.recorder.spans_hosts else _SEEN_BY_OTHERS_S)
        places = "; ".join(str(p) for p in self.recorder.places() if p is not None)
        self.stalled = Stalled(
            f"an operation that the other ranks will not complete: {verdict}. Places: {places}", remedy
        )
        self.recorder.stalled = True
        raise self.stalled from None

    def _after_failure(self, error: RuntimeError, channel: str, number: int) -> str:
        """Why a connection failed: gloo names an address. That a process, or another host, is gone is known
        after a while only."""
        failure = f"the connection failed ({str(error).splitlines()[0]})"
        deadline = time.monotonic() + (_HEARING_S if self.recorder.spans_hosts else _EXITING_S)
        while True:
            if verdict := self.recorder.verdict(channel, number):
                return verdict
            if silent := silent_hosts(self.recorder.remote.values()):
                return f"{failure}; {'; '.join(silent)}"
            if time.monotonic() >= deadline or self.recorder.store_unreachable:
                return "; ".join(filter(None, (failure, self.recorder.store_unreachable)))
            time.sleep(0.2)
