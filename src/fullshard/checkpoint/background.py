"""Saves that go on while training does: one at a time, and none that fails unheard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from fullshard.errors import CheckpointError, FullshardError

_log = logging.getLogger("fullshard")
_under_way: list[Saving] = []  # of any model: a load may want what another model is about to leave


class Saving:
    """A save, done or under way. `wait` returns when the checkpoint is there, or raises what went wrong."""

    def __init__(self, path: Path, run: Callable[[], None], background: bool) -> None:
        self.path = path
        self._error: FullshardError | None = None
        self._thread: threading.Thread | None = None
        if not background:
            run()
            return
        _under_way.append(self)
        # Not a daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, args=(run,), name="fullshard save", daemon=False)
        self._thread.start()

    def done(self) -> bool:
        """Whether nothing is left to do; `wait` says whether it went well."""
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
        except Exception as error:  # noqa: BLE001  raised in `wait`, where somebody hears it
            self._error = CheckpointError(
                f"{type(error).__name__} in a background save: {error}", "See its cause."
            )
            self._error.__cause__ = error
        if self._error is not None:
            _log.error("checkpoint %s was not saved: %s", self.path, self._error)


def finish_earlier() -> None:
    """Wait for the saves before this one; if one failed, raise its error, as all its ranks do."""
    while _under_way:
        _under_way.pop(0).wait()
