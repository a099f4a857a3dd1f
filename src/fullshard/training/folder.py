"""The folder of a run.

run.json         what must not change when the run is resumed
config.json      the complete config, as last used
metrics.jsonl    one line a step: loss, learning rate, gradient norm, tokens/s, memory of each rank
summary.json     how the run stands: plan, memory at rest, sample, link speeds if measured, versions
report.html      all of it, to look at
checkpoints/     step-000500, ...: fs.load and, for Hugging Face models, from_pretrained read them
model/           the trained model, when all steps are done
trackers.json    under which ids Weights & Biases and MLflow know the run
tensorboard/     for `tensorboard --logdir`
tokens/          the texts as tokens, unless data.cache names another place
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint.commit import latest, newest_first
from fullshard.errors import OptionError
from fullshard.text_files import replace_text
from fullshard.version import VERSION


@dataclass(frozen=True)
class RunFolder:
    """Where everything of a run lies."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06}"

    def refuse_strangers(self) -> None:
        """A folder with other things in it is left alone."""
        try:
            # Not hidden ones: a lock, or a file that another rank is about to put in its place.
            entries = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")}
        except FileNotFoundError:
            return
        except OSError as error:
            raise OptionError(
                f"'output': cannot use {str(self.path)!r}: {error.strerror or error}", "Name another folder."
            ) from error
        if "run.json" not in entries and entries - {"tokens"}:
            raise OptionError(
                f"'output': {str(self.path)!r} is not empty, and no folder of a run; nothing was changed",
                "Name another folder.",
            )

    def begin(self, fixed: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Take the folder for this run; a run that was begun with other values is an error."""
        self.refuse_strangers()
        known = self.read("run.json")
        # Where no step was made, as after an error at the start, there is nothing that could be mixed up.
        if known is not None and (self.newest() is not None or self.read_metrics()):
            self._compare(known.get("fixed", {}), fixed)
        else:
            self.write("run.json", {"fullshard": VERSION, "fixed": dict(fixed)})
        self.write("config.json", config)

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        missing = object()
        for key in [*now, *before]:
            was, is_now = before.get(key, missing), now.get(key, missing)
            if was != is_now:
                old_value = "not given" if was is missing else repr(was)
                new_value = "not given" if is_now is missing else repr(is_now)
                raise OptionError(
                    f"{str(self.path)!r} holds a run whose {key!r} is {old_value}, and now it is "
                    f"{new_value}; nothing was changed",
                    "Put it back to resume the run, or name another output to start a new one.",
                )

    def newest(self) -> Path | None:
        """The newest checkpoint."""
        return latest(self.checkpoints)

    def newest_first(self) -> list[Path]:
        """The checkpoints to resume from, if they are right."""
        folder = self.checkpoints
        return [path for path, _ in newest_first(folder)] if folder.is_dir() else []

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Complete or not at all."""
        self.replace(name, json.dumps(value, indent=1) + "\n")

    def replace(self, name: str, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.path / name, text)

    def read(self, name: str) -> dict[str, Any] | None:
        try:
            content = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise OptionError(
                f"{str(self.path / name)!r} cannot be read: {error}", "Name another output, or mend it."
            ) from None
        return content if isinstance(content, dict) else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every complete line; a crash may have left the last one incomplete."""
        metrics = []
        with contextlib.suppress(FileNotFoundError), self.metrics.open(encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    metrics.append(json.loads(line))
        return metrics

    def forget_after(self, step: int) -> None:
        """Leave out of the metrics what comes after a step: it is about to be done again."""
        kept = [json.dumps(line) for line in self.read_metrics() if line["step"] <= step]
        self.replace(self.metrics.name, "".join(f"{line}\n" for line in kept))

    def lock(self) -> int:
        """One run at a time. The lock ends with this process, however that ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OptionError(
                f"'output': cannot write to {str(self.path)!r}: {error.strerror or error}", "Name another."
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise OptionError(
                f"another process trains in {str(self.path)!r} just now",
                "Wait for it, or name another output.",
            ) from None
        return handle
