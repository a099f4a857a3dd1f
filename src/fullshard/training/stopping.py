"""When a run is to stop before its last step: a signal, the launcher's word, the time limit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

TIME_IS_UP = -1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """Asked once a step. Signals only set a mark: a step that is under way is always finished."""

    def __init__(self, time_limit_s: float | None, note: Path | None) -> None:
        self._ends_s = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._note, self._signal = note, 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are marks in here, and what they were before afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only a main thread may ask for signals
            return
        before = [(number, signal.signal(number, self._mark)) for number in _SIGNALS]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _mark(self, number: int, _frame: FrameType | None) -> None:
        if self._signal:  # asked twice: now
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signal = number

    def asked(self) -> int:
        """0, the number of a signal, or TIME_IS_UP."""
        if self._signal:
            return self._signal
        if self._note is not None and self._note.exists():
            with contextlib.suppress(OSError, ValueError):
                return int(self._note.read_text())
        return TIME_IS_UP if self._ends_s is not None and time.monotonic() > self._ends_s else 0


def die_with(parent: int) -> None:
    """End when the launcher is gone, as ranks that nobody looks after should (Linux; elsewhere nothing).

    Otherwise a launcher that was killed would leave ranks which go on writing into the run's folder.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
