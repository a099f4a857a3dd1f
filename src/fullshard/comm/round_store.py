"""The store of one round of an elastic run: no rank reads what an earlier round wrote.

A store that lasts for several rounds holds addresses of processes that are gone; gloo connects to them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

_TIMEOUT = timedelta(minutes=5)


def open_store() -> tuple[Any, int]:
    """A server on a port that the system chose; it ends with the object."""
    store = TCPStore("localhost", 0, None, True, _TIMEOUT, wait_for_workers=False)
    return store, int(store.port)
