"""Background saves: one at a time; an error is raised in `wait`, or in the next save or load."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from fullshard.errors import CheckpointError, FullshardError

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


def finish_earlier() -> None:
    """Wait for the saves in progress; if one failed, raise its error, as all of its ranks do."""
    while _in_progress:
        _in_progress.pop(0).wait()
