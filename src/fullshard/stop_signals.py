"""Signals with which schedulers and people ask a process to save and end: remembered until a loop looks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

# SIGUSR1 and SIGUSR2 come before a time limit, where a scheduler was asked for them.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
# One Ctrl-C may arrive twice, from the terminal and from the launcher.
AGAIN_S = 1.0


def exit_code(number: int) -> int:
    """Of a process that was asked to stop by a signal, as a shell shows it."""
    return 128 + number if number > 0 else 0


class Interrupts:
    """Distinguishes a second Ctrl-C from the first one arriving twice.

    Other signals are never a second one: a scheduler sends several on purpose (SIGUSR1, then SIGTERM at the
    limit), and SIGKILL where nothing is to be saved.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_second(self, number: int) -> bool:
        if number != signal.SIGINT:
            return False
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        return now_s - self._first_s > AGAIN_S


class StopSignals:
    """Remembers the first signal. Work in progress is finished; a second Ctrl-C ends the process."""

    def __init__(self) -> None:
        self.number = 0
        self._interrupts = Interrupts()
        self._before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
        reference = weakref.ref(self)  # hooks of fork are never removed

        def in_child() -> None:
            if (mine := reference()) is not None:
                mine._leave_child()

        os.register_at_fork(after_in_child=in_child)

    def listen(self, numbers: Sequence[signal.Signals] = SIGNALS) -> bool:
        """Handle these signals from now on; False in a thread, where Python does not allow it."""
        new = [number for number in numbers if number not in self._before]
        if new and threading.current_thread() is not threading.main_thread():
            return False
        self._before |= {number: signal.signal(number, self._on_signal) for number in new}
        return True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals are remembered; afterwards their handlers are restored."""
        self.listen()
        try:
            yield
        finally:
            self.stop_listening()

    def stop_listening(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        earlier = self._before.get(signal.Signals(number))
        if self._interrupts.is_second(number):
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
            os.kill(os.getpid(), number)
            return
        self.number = self.number or number
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def _leave_child(self) -> None:
        """In a forked process, such as a worker of a DataLoader: its parent ends it as before, and a warning
        that a scheduler sends to all processes of a job does not."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            left = signal.SIG_DFL if handler is None else handler
            signal.signal(number, signal.SIG_IGN if number in WARNINGS else left)


of_this_process = StopSignals()


def expect_warnings() -> None:
    """In a rank that is about to run its script: a warning is remembered until the script looks, and forked
    processes ignore it. Slurm sends it to all processes of a job, and the workers of a DataLoader are forked
    before the first step is over."""
    of_this_process.listen(WARNINGS)
