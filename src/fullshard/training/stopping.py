"""When a run is to stop before its last step: a signal, the launcher, the time limit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from fullshard.stop_signals import StopSignals

TIME_IS_UP = -1


class StopRequest:
    """Checked once per step. Signals only set a flag: a step in progress is always finished."""

    def __init__(self, time_limit_s: float | None, note: Path | None) -> None:
        self._ends_s = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._note, self._signals = note, StopSignals()

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Inside, signals set the flag; afterwards their handlers are restored."""
        return self._signals.listening()

    def requested(self) -> int:
        """0, the number of a signal, or TIME_IS_UP."""
        if self._signals.number:
            return self._signals.number
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
