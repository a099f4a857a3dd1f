"""The entry point of the `fullshard` command. It is not part of the package `fullshard`, whose import loads
torch for seconds: an interrupt during that time must be handled."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Import the command line and run it; its exit code."""
    before = signal.getsignal(signal.SIGINT)
    handled = before is signal.default_int_handler  # a shell's background jobs ignore it
    if handled:
        signal.signal(signal.SIGINT, _leave)
    from fullshard.tools.cli import main as run

    if handled:
        signal.signal(signal.SIGINT, before)
    return run()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Immediately: nothing was begun, and code on the stack could take an exception for a failed import."""
    os.write(2, b"fullshard: interrupted\n")
    os._exit(130)
