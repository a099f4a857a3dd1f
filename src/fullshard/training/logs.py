"""What rank 0 writes down on the way: metrics.jsonl, TensorBoard's files, and what trackers are given."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fullshard.training.folder import RunFolder
from fullshard.training.preparing import need_tensorboard
from fullshard.training.settings import Settings
from fullshard.training.trackers import scalars, trackers


class Logs:
    """Open files of a run that continues after `step`; later lines of earlier runs are dropped."""

    def __init__(
        self, settings: Settings, folder: RunFolder, step: int, report: Callable[[str], None]
    ) -> None:
        folder.forget_after(step)
        self._lines = folder.metrics.open("a", encoding="utf-8")
        self._board: Any = None
        if settings.logging.tensorboard:
            # TensorBoard hides what an earlier file has from this step on.
            self._board = need_tensorboard()(str(folder.tensorboard), purge_step=step + 1 if step else None)
        is_done = step >= settings.training.steps  # a service has all of such a run already
        self._trackers = [] if is_done else trackers(settings, folder, report)

    def write(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        if self._board is not None:
            for chart, value in scalars(line).items():
                self._board.add_scalar(chart, value, line["step"])
        for tracker in self._trackers:
            tracker.write(line)

    def close(self, finished: bool) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()
        for tracker in self._trackers:
            tracker.close(finished)
