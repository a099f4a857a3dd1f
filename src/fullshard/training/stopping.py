"""When a run is to stop before its last step: a signal, the launcher, the time limit."""

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
    """Checked once per step. Signals only set a flag: a step in progress is always finished."""

    def __init__(self, time_limit_s: float | None, note: Path | None) -> None:
        self._ends_s = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._note, self._signal = note, 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals set the flag; afterwards their handlers are restored."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        before = [(number, signal.signal(number, self._on_signal)) for number in _SIGNALS]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal:  # the second one ends the process
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signal = number

    def requested(self) -> int:
        """0, the number of a signal, or TIME_IS_UP."""
        if self._signal:
            return self._signal
        if self._note is not None and self._note.exists():
            with contextlib.suppress(OSError, ValueError):
                return int(self._note.read_text())
        return TIME_IS_UP if self._ends_s is not None and time.monotonic() > self._ends_s else 0


def die_with(parent: int) -> None:
    """End this process when the launcher ends (on Linux; elsewhere nothing).

    Otherwise a launcher that was killed would leave ranks that still write into the run's folder.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
