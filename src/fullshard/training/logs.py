"""What rank 0 writes down on the way: metrics.jsonl and TensorBoard's files."""

from __future__ import annotations

import json
from typing import Any

from fullshard.training.folder import RunFolder
from fullshard.training.preparing import need_tensorboard

_CHARTS = {
    "loss": "loss/train",
    "learning_rate": "learning_rate",
    "gradient_norm": "gradient_norm",
    "tokens_per_s": "tokens_per_s",
}


class Logs:
    """Open files of a run that continues after `step`; later lines of earlier runs are dropped."""

    def __init__(self, folder: RunFolder, tensorboard: bool, step: int) -> None:
        folder.forget_after(step)
        self._lines = folder.metrics.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            # TensorBoard hides what an earlier file has from this step on.
            self._board = need_tensorboard()(str(folder.tensorboard), purge_step=step + 1 if step else None)

    def write(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        if self._board is None:
            return
        if line["kind"] == "validation":
            self._board.add_scalar("loss/validation", line["loss"], line["step"])
            return
        for name, chart in _CHARTS.items():
            if line.get(name) is not None:
                self._board.add_scalar(chart, line[name], line["step"])
        for rank, held in enumerate(line.get("memory") or ()):
            self._board.add_scalar(f"memory_bytes/rank_{rank}", held, line["step"])

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()
