"""Weights & Biases and MLflow: a run's figures for services beside it, which never hold up or end a training.

Each tracker works on a thread of its own: a service that does not answer would otherwise keep all ranks
waiting for rank 0. Its first error is a note of the run; metrics.jsonl has every line in any case.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fullshard.environment import set_default_variables
from fullshard.extras import need, need_installed
from fullshard.training.folder import RunFolder
from fullshard.training.settings import MLflow, Settings, WandB

_CLOSING_S = 60.0  # how long the end of a run waits for a service
_MOST_LINES = 100_000  # that wait for a service; further ones are left out
_CHARTS = {
    "loss": "loss/train",
    "learning_rate": "learning_rate",
    "gradient_norm": "gradient_norm",
    "tokens_per_s": "tokens_per_s",
}
_IDS = "trackers.json"  # by tracker, the id under which a resumed run goes on


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl by the names of its charts."""
    if line["kind"] == "validation":
        return {"loss/validation": line["loss"]}
    named = {chart: line[name] for name, chart in _CHARTS.items() if line.get(name) is not None}
    return named | {f"memory_bytes/rank_{rank}": held for rank, held in enumerate(line.get("memory") or ())}


class Tracker(Protocol):
    """A run in a service. All methods are called on one thread, and may raise anything."""

    def open(self) -> None: ...
    def write(self, lines: Sequence[Mapping[str, Any]]) -> None: ...
    def close(self, finished: bool) -> None: ...


@dataclass(frozen=True)
class Identity:
    """What a service shows of a run, and the id that it had before, if it was begun before."""

    folder: RunFolder
    name: str
    config: Mapping[str, Any]
    _lock: threading.Lock = field(default_factory=threading.Lock)  # one file for several threads

    def read(self, tracker: str) -> str | None:
        known = (self.folder.read(_IDS) or {}).get(tracker)
        return known if isinstance(known, str) else None

    def keep(self, tracker: str, value: str) -> None:
        with self._lock:
            self.folder.write(_IDS, {**(self.folder.read(_IDS) or {}), tracker: value})


class WandBRun:
    """A run of Weights & Biases; its files are in the run's folder."""

    def __init__(self, options: WandB, identity: Identity) -> None:
        self._options, self._identity = options, identity
        self._run: Any = None

    def open(self) -> None:
        wandb, options = need("wandb", "wandb"), self._options
        known = self._identity.read("wandb") or uuid.uuid4().hex[:8]
        self._identity.keep("wandb", known)
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.name or self._identity.name,
            id=known,
            resume="allow",
            mode=options.mode,
            dir=str(self._identity.folder.path),
            config=dict(self._identity.config),
            allow_val_change=True,
            settings=wandb.Settings(console="off"),  # the terminal shows the run's own progress
        )

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            self._run.log(scalars(line), step=line["step"])

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0)


class MLflowRun:
    """A run of MLflow, on a server, in a database, or in files."""

    def __init__(self, options: MLflow, identity: Identity) -> None:
        self._options, self._identity = options, identity
        self._client: Any = None
        self._run_id = ""

    def open(self) -> None:
        mlflow, uri = need("mlflow", "mlflow"), self._options.tracking_uri
        if uri is not None and (uri.startswith("file:") or "://" not in uri):
            set_default_variables({"MLFLOW_ALLOW_FILE_STORE": "true"})  # newer versions insist on it
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self._identity.read("mlflow")
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._run_id = known
            return
        name = self._options.experiment
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self._client.create_run(number, run_name=self._options.name or self._identity.name)
        self._run_id = run.info.run_id
        self._identity.keep("mlflow", self._run_id)
        for key, value in _flat(self._identity.config).items():
            self._client.log_param(self._run_id, key, value)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        metric, now_ms = need("mlflow.entities", "mlflow").Metric, int(time.time() * 1000)
        metrics = [
            metric(name, value, now_ms, line["step"])
            for line in lines
            for name, value in scalars(line).items()
        ]
        for start in range(0, len(metrics), 1000):  # the most that one request may have
            self._client.log_batch(self._run_id, metrics=metrics[start : start + 1000])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run_id, status="FINISHED" if finished else "KILLED")


def _flat(config: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Settings by their dotted keys; what is not set is left out."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{key}{name}.")
        elif value is not None:
            found[f"{key}{name}"] = value
    return found


class Background:
    """A tracker on a thread of its own. Its first problem is reported once; it is given every later line."""

    def __init__(
        self, name: str, tracker: Tracker, report: Callable[[str], None], closing_s: float = _CLOSING_S
    ) -> None:
        self._name, self._tracker, self._report, self._closing_s = name, tracker, report, closing_s
        self._lines: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._problem: str | None = None
        self._reported = self._finished = False
        self._thread = threading.Thread(target=self._work, name=f"fullshard {name}", daemon=True)
        self._thread.start()

    def write(self, line: Mapping[str, Any]) -> None:
        if self._thread.is_alive() and self._lines.qsize() < _MOST_LINES:
            self._lines.put(line)
        self._report_once()

    def close(self, finished: bool) -> None:
        self._finished = finished
        self._lines.put(None)
        self._thread.join(self._closing_s)
        if self._thread.is_alive():
            self._problem = self._problem or f"no answer for {self._closing_s:.0f} s at the end of the run"
        self._report_once()

    def _report_once(self) -> None:
        """On the thread that trains, which owns the terminal and the report."""
        if self._problem is not None and not self._reported:
            self._reported = True
            self._report(f"{self._name} does not have all figures of this run: {self._problem}")

    def _work(self) -> None:
        if not self._try(self._tracker.open):
            return
        last = False
        while not last:
            lines = [self._lines.get()]
            while not self._lines.empty():
                lines.append(self._lines.get())
            last = lines[-1] is None
            written = [line for line in lines if line is not None]
            if written:
                self._try(lambda written=written: self._tracker.write(written))  # type: ignore[misc]
        self._try(lambda: self._tracker.close(self._finished))

    def _try(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:  # noqa: BLE001  whatever a service raises, the training goes on
            self._problem = self._problem or f"{type(error).__name__}: {error}"
            return False
        return True


def need_trackers(settings: Settings) -> None:
    """Raise where a library of a tracker is missing, without importing it: that takes seconds."""
    if settings.logging.wandb:
        need_installed("wandb", "wandb")
    if settings.logging.mlflow:
        need_installed("mlflow", "mlflow")


def trackers(settings: Settings, folder: RunFolder, report: Callable[[str], None]) -> list[Background]:
    """The services that the settings name, at work."""
    identity = Identity(folder, settings.output.name, settings.as_dict())
    wandb, mlflow = settings.logging.wandb, settings.logging.mlflow
    found: list[tuple[str, Tracker]] = []
    if wandb:
        found.append(("Weights & Biases", WandBRun(WandB() if wandb is True else wandb, identity)))
    if mlflow:
        found.append(("MLflow", MLflowRun(MLflow() if mlflow is True else mlflow, identity)))
    return [Background(name, tracker, report) for name, tracker in found]
