"""Ending a process while operations are in flight that will never complete.

gloo's destructor joins the threads of a group, and a thread returns from an operation only after the group's
own timeout, usually 30 minutes (torch 2.13; `abort` and `shutdown` do not change that). So a rank that failed
would print its error and stay, and no launcher would restart it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from typing import Any

from torch.distributed import distributed_c10d

_kept: dict[int, Any] = {}
_ends_at_once = False


def never_destroy(groups: Iterable[Any]) -> None:
    """From now on these groups, and all others that torch knows, are never destroyed, not even at exit.

    The process then ends after Python has: exit handlers run, output is flushed, and the exit status is what
    it would have been.
    """
    known = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None) or ()
    for group in (*groups, *known):
        if group is not None and id(group) not in _kept:
            _kept[id(group)] = group
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # also when modules are cleared at exit
    _end_before_destructors()


def _end_before_destructors() -> None:
    """Have exit() end the process before it comes to the destructors of C++."""
    global _ends_at_once
    if _ends_at_once:
        return
    try:
        libc = ctypes.CDLL(None)
        # The functions of on_exit get the exit status as their first argument, as _exit expects it. The last
        # that is registered runs first.
        libc.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        _ends_at_once = libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None) == 0
    except (OSError, AttributeError):  # not glibc: see end_now
        _ends_at_once = False


def end_now_if_needed() -> None:
    """The last exit handler: where the C library passes on no exit status, end the process here."""
    if _kept and not _ends_at_once:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)
