"""Background saves: one at a time; an error is raised in `wait`, or in the next save or load.

Where neither comes, the process ends with exit code 1: a launcher would take the run for complete.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fullshard.errors import CheckpointError, FullshardError
from fullshard.leaving import at_the_end

_log = logging.getLogger("fullshard")
_in_progress: list[Saving] = []  # of any model: a load may need what another model is still saving


class Saving:
    """A save, done or in progress. `wait` returns when the checkpoint is complete, or raises its error."""

    def __init__(self, path: Path, run: Callable[[], None], background: bool) -> None:
        self.path = path
        self._error: FullshardError | None = None
        self._thread: threading.Thread | None = None
        if not background:
            run()
            return
        _in_progress.append(self)
        # Not a daemon: the interpreter waits for the thread before it exits.
        self._thread = threading.Thread(target=self._run, args=(run,), name="fullshard save", daemon=False)
        self._thread.start()

    def done(self) -> bool:
        """Whether the save has ended; `wait` raises if it failed."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether its error has been raised nowhere yet."""
        return self._error is not None

    def wait(self) -> Path:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.path

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except FullshardError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  raised again in `wait`
            self._error = CheckpointError(
                f"{type(error).__name__} in a background save: {error}", "See its cause."
            )
            self._error.__cause__ = error
        if self._error is not None:
            _log.error("checkpoint %s was not saved: %s", self.path, self._error)


def _end_with_the_failure() -> None:
    """At exit, when all else is done: Python has no other way to change the exit code there."""
    if any(saving.failed for saving in _in_progress) and not hasattr(sys, "last_value"):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)


at_the_end(_end_with_the_failure)


def finish_earlier() -> None:
    """Wait for the saves in progress; if one failed, raise its error, as all of its ranks do."""
    while _in_progress:
        _in_progress.pop(0).wait()
