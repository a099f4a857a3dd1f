"""A client of the run's store for the monitor, on a thread of its own.

A call to a store may block for as long as the network likes, also where it takes a timeout, so neither the
script's thread nor the monitor ever makes one. That a call does not return is itself something to report.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from fullshard.errors import Stalled

_TIMEOUT = timedelta(seconds=2)
_AGAIN_S = 3.0  # after a failure
Job = Callable[[Any], None]


class StoreLink:
    """Runs jobs, each with the client as its argument; one batch at a time, the others are left out."""

    def __init__(self, connect: Callable[[], Any], address: str) -> None:
        self._connect, self.address = connect, address
        self._batches: queue.SimpleQueue[tuple[Sequence[Job], threading.Event]] = queue.SimpleQueue()
        self._under_way: threading.Event | None = None
        self._answered = time.monotonic()
        self._failed = False
        self._again = 0.0
        threading.Thread(target=self._run, name="fullshard store", daemon=True).start()

    def submit(self, jobs: Sequence[Job], wait_s: float, queue_s: float = 0.0) -> bool:
        """Run these, and wait so long for their end. False if they were left out, or still run.

        queue_s: how long a batch that is under way is waited for before.
        """
        if self._under_way is not None and not self._under_way.wait(queue_s):
            return False
        done = threading.Event()
        self._under_way = done
        self._batches.put((jobs, done))
        return done.wait(wait_s)

    @property
    def silent_s(self) -> float:
        """How long the store has not answered, if it does not; otherwise 0."""
        pending = self._under_way is not None and not self._under_way.is_set()
        return time.monotonic() - self._answered if self._failed or pending else 0.0

    def _run(self) -> None:
        store: Any = None
        while True:
            jobs, done = self._batches.get()
            try:
                if self._failed and time.monotonic() < self._again:
                    continue
                if store is None:
                    store = self._connect()
                for job in jobs:
                    job(store)
                self._answered, self._failed = time.monotonic(), False
            except Exception:  # noqa: BLE001  whatever a store raises: it is tried again
                store, self._failed, self._again = None, True, time.monotonic() + _AGAIN_S
            finally:
                jobs = ()
                done.set()


def _tcp_store() -> TCPStore | None:
    """That of the default process group, if other hosts reach it."""
    store = distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


@contextmanager
def reaching_the_store() -> Iterator[None]:
    """Around calls to the run's store: where it is gone, the error says where it was."""
    try:
        yield
    except dist.DistError as error:
        store = _tcp_store()
        where = "" if store is None else f" at {store.host}:{store.port}"
        reason = str(error).splitlines()[0]
        raise Stalled(
            f"the run's store{where} cannot be reached: {reason}. The process that holds it, rank 0 or its "
            "launcher, has ended, or its host is lost",
            "Look at the log of that process and host; start the run again from its newest checkpoint.",
        ) from error


def link_to_default_store() -> StoreLink | None:
    """To the store of the default process group, if that is one that other hosts reach: a TCPStore."""
    store = _tcp_store()
    if store is None:
        return None
    host, port = store.host, store.port

    def connect() -> Any:
        # torch's own attempt to connect to what is gone prints a warning with a stack of C++.
        socket.create_connection((host, port), timeout=_TIMEOUT.total_seconds()).close()
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)

    return StoreLink(connect, f"{host}:{port}")
