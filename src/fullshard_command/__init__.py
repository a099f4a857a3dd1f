"""Where the `fullshard` command begins. It is no part of the package `fullshard`, whose import brings torch,
which takes seconds: an interrupt in these must find somebody who answers it."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Import the command line and run it; its exit code."""
    before = signal.getsignal(signal.SIGINT)
    answers = before is signal.default_int_handler  # a shell's background jobs are told to ignore it
    if answers:
        signal.signal(signal.SIGINT, _leave)
    from fullshard.tools.cli import main as run

    if answers:
        signal.signal(signal.SIGINT, before)
    return run()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """At once: nothing was begun, and an exception could be taken for a failed import by what it passes."""
    os.write(2, b"fullshard: interrupted\n")
    os._exit(130)
