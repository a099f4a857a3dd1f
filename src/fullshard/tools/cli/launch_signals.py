"""Signals to `fullshard launch` are passed on to its ranks, which may take their time to save.

torchrun's agent passes signals on to the process group of each rank. That ends the workers of a DataLoader,
and so the training before it can save. The agent kills what still runs after 30 seconds, and at a second
signal, such as SIGTERM at the limit of which SIGUSR1 warned, it ends and leaves its ranks behind. So this
process handles signals instead: ranks alone get them, and the agent ends when they have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from fullshard.stop_signals import SIGNALS, Interrupts, exit_code

RANK_MODULE = "fullshard.tools.cli.launched"
_POLL_S = 0.05


class PassedOn:
    """What became of the ranks of this process after a signal."""

    def __init__(self, limit_s: float | None, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self._limit_s, self._signals = limit_s, signals
        self._number, self._killed = 0, False
        self._ranks: list[int] = []  # processes
        self._interrupts = Interrupts()
        self._codes: dict[int, int] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, a signal is passed on, and raises torchrun's SignalException once the ranks have ended."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = [(number, signal.signal(number, self._on_signal)) for number in self._signals]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def exit_code(self, number: int) -> int:
        """128 + n after signal n, unless a rank ended with an exit code of its own, as after an error."""
        if self._killed:
            return exit_code(signal.SIGINT)
        own = [code for code in self._codes.values() if code not in (0, exit_code(number))]
        return own[0] if own else exit_code(number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        self._killed = self._interrupts.is_second(number) or self._killed
        self._ranks = self._ranks or _own_ranks()
        _send(self._ranks, signal.SIGKILL if self._killed else number)
        if self._number:
            return  # to the handler below, which waits
        self._number = number
        name = signal.Signals(number).name
        if self._ranks:
            sys.stderr.write(f"fullshard: {name}: passed on to {len(self._ranks)} ranks; waits for them\n")
            sys.stderr.flush()
            self._wait()
        raise SignalException(f"got {name}", signal.Signals(number))

    def _wait(self) -> None:
        """For the ranks, or the limit. Their exit codes stay for the agent to read."""
        ends_s = None if self._limit_s is None else time.monotonic() + self._limit_s
        while len(self._codes) < len(self._ranks) and (ends_s is None or time.monotonic() < ends_s):
            for process in self._ranks:
                if process not in self._codes and (code := _code(process)) is not None:
                    self._codes[process] = code
            time.sleep(_POLL_S)


def _own_ranks() -> list[int]:
    """Processes of ranks that this process has started and that still run."""
    found = []
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(process) for process in listing.read_text().split()]
    return sorted(process for process in found if _is_rank(process))


def _is_rank(process: int) -> bool:
    try:
        return RANK_MODULE.encode() in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _send(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _code(process: int) -> int | None:
    """The exit code of a process that has ended, as a shell shows it."""
    try:
        ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return 0  # the agent has read it
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else exit_code(ended.si_status)
