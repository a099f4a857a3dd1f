"""`fullshard train` with Weights & Biases and MLflow: what they are given, by whom, and when they fail.

Stand-ins of both libraries record calls: they take the arguments that the libraries take, and no others. The
long tests run the libraries themselves, where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import ranks
import training_runs as runs
from fullshard.errors import MissingExtra
from fullshard.training.settings import load
from fullshard.training.trackers import Background, need_trackers
from training_runs import STEPS

WANDB = """\
import json, os
def _note(**what):
    with open(os.path.join(os.path.dirname(__file__), "calls.jsonl"), "a") as file:
        file.write(json.dumps({"library": "wandb", "process": os.getpid(), **what}) + "\\n")
class Settings:
    def __init__(self, *, console): assert console == "off"
class Run:
    def log(self, data, step=None, commit=None): _note(call="log", data=data, step=step)
    def finish(self, exit_code=None, quiet=None): _note(call="finish", exit_code=exit_code)
def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
         allow_val_change=None, group=None, job_type=None, mode=None, force=None, reinit=None, resume=None,
         settings=None):
    if project == "no-such": raise ConnectionError("nobody is there")
    _note(call="init", id=id, resume=resume, mode=mode, project=project, name=name, dir=dir, config=config)
    return Run()
"""
MLFLOW = """\
import json, os
from types import SimpleNamespace as Namespace
def _note(**what):
    with open(os.path.join(os.path.dirname(__file__), "calls.jsonl"), "a") as file:
        file.write(json.dumps({"library": "mlflow", "process": os.getpid(), **what}) + "\\n")
class MlflowClient:
    def __init__(self, tracking_uri=None, registry_uri=None): self.uri = tracking_uri
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name, artifact_location=None, tags=None): return "7"
    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        _note(call="create_run", experiment=experiment_id, name=run_name, uri=self.uri)
        return Namespace(info=Namespace(run_id="run-1"))
    def update_run(self, run_id, status=None, name=None): _note(call="update_run", run=run_id, status=status)
    def log_param(self, run_id, key, value, synchronous=None): _note(call="param", key=key, value=value)
    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        if self.uri == "http://nobody": raise ConnectionError("nobody is there")
        assert len(metrics) <= 1000
        for metric in metrics: _note(call="metric", run=run_id, **vars(metric))
    def set_terminated(self, run_id, status=None, end_time=None):
        _note(call="set_terminated", run=run_id, status=status)
"""
ENTITIES = """\
class Metric:
    def __init__(self, key, value, timestamp, step):
        self.key, self.value, self.timestamp, self.step = key, value, timestamp, step
"""


def write_libraries(folder: Path) -> Path:
    (folder / "mlflow").mkdir(parents=True)
    (folder / "wandb.py").write_text(WANDB)
    (folder / "mlflow" / "__init__.py").write_text(MLFLOW)
    (folder / "mlflow" / "entities.py").write_text(ENTITIES)
    return folder


def calls(folder: Path, library: str, call: str | None = None) -> list[dict[str, Any]]:
    files = [folder / "calls.jsonl", folder / "mlflow" / "calls.jsonl"]
    lines = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    return [line for line in lines if line["library"] == library and call in (None, line["call"])]


def _train(folder: str, config: str, overrides: list[str], stop_after: int | None = None) -> int:
    """As one rank, with the libraries of a folder; one rank gets SIGTERM after a step."""
    from fullshard.training.loop import Run

    inner = Run._step

    def then_signal(self: Any, at: int) -> None:
        inner(self, at)
        if at + 1 == stop_after and self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    sys.path.insert(0, folder)
    Run._step = then_signal  # type: ignore[method-assign]
    try:
        return runs.train(config, overrides)
    finally:
        Run._step = inner  # type: ignore[method-assign]
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("wandb", "mlflow")]:
            del sys.modules[name]


def test_resumed_run_goes_on_in_both_services_and_rank_0_alone_logs(tmp_path: Path) -> None:
    runs.write_texts(tmp_path / "texts")
    libraries = write_libraries(tmp_path / "libraries")
    trackers = {"wandb": {"project": "p", "mode": "offline"}, "mlflow": {"tracking_uri": "http://host"}}
    config = str(runs.write_config(tmp_path, logging={"tensorboard": False, **trackers}))
    for stop_after, code in ((3, 143), (None, 0), (None, 0)):  # the last one has nothing left to do
        codes = ranks.run(_train, 2, str(libraries), config, [], stop_after, timeout_s=120)
        assert codes == [code, code]
    losses = {line["step"]: line["loss"] for line in runs.metrics(tmp_path / "run")}
    validation = {line["step"]: line["loss"] for line in runs.metrics(tmp_path / "run", "validation")}
    assert sorted(losses) == list(range(1, STEPS + 1))

    first, second = calls(libraries, "wandb", "init")
    assert first["id"] == second["id"]
    given = [first[name] for name in ("resume", "mode", "project", "name")]
    assert given == ["allow", "offline", "p", "run"]
    assert first["dir"] == str(tmp_path / "run")
    assert first["config"]["training"]["steps"] == STEPS
    logged = calls(libraries, "wandb", "log")
    assert {c["step"]: c["data"]["loss/train"] for c in logged if "loss/train" in c["data"]} == losses
    assert {c["step"]: c["data"]["loss/validation"] for c in logged if len(c["data"]) == 1} == validation
    charts = {name for call in logged for name in call["data"]}
    assert {"learning_rate", "gradient_norm", "tokens_per_s", "memory_bytes/rank_1"} <= charts
    assert len(calls(libraries, "wandb", "finish")) == 2

    (created,) = calls(libraries, "mlflow", "create_run")
    assert (created["experiment"], created["name"], created["uri"]) == ("7", "run", "http://host")
    assert [c["status"] for c in calls(libraries, "mlflow", "update_run")] == ["RUNNING"]
    assert [c["status"] for c in calls(libraries, "mlflow", "set_terminated")] == ["KILLED", "FINISHED"]
    metrics = [c for c in calls(libraries, "mlflow", "metric") if c["key"] == "loss/train"]
    assert {c["step"]: c["value"] for c in metrics} == losses
    parameters = {c["key"]: c["value"] for c in calls(libraries, "mlflow", "param")}
    assert parameters["training.steps"] == STEPS
    for library in ("wandb", "mlflow"):
        assert len({call["process"] for call in calls(libraries, library)}) == 1, "rank 0 alone"
    assert set(json.loads((tmp_path / "run" / "trackers.json").read_text())) == {"wandb", "mlflow"}


def test_service_that_fails_is_noted_once_and_the_run_is_complete(tmp_path: Path) -> None:
    runs.write_texts(tmp_path / "texts")
    libraries = write_libraries(tmp_path / "libraries")
    trackers = {"wandb": {"project": "no-such"}, "mlflow": {"tracking_uri": "http://nobody"}}
    config = str(runs.write_config(tmp_path, logging={"tensorboard": False, **trackers}))
    assert ranks.run(_train, 1, str(libraries), config, [], timeout_s=120) == [0]
    assert len(runs.losses(tmp_path / "run")) == STEPS
    notes = json.loads((tmp_path / "run" / "summary.json").read_text())["notes"]
    for name in ("Weights & Biases", "MLflow"):
        (note,) = [note for note in notes if note.startswith(name)]
        assert "ConnectionError: nobody is there" in note
    assert "nobody is there" in (tmp_path / "run" / "report.html").read_text()


class Silent:
    """A service that never answers."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def open(self) -> None:
        self.ended.wait(300)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        raise AssertionError

    def close(self, finished: bool) -> None:
        raise AssertionError


def test_service_that_never_answers_holds_nothing_up() -> None:
    silent, notes = Silent(), list[str]()
    tracker = Background("Silent", silent, notes.append, closing_s=0.2)
    for step in range(10):
        tracker.write({"kind": "train", "step": step, "loss": 1.0})
    assert notes == []
    tracker.close(True)
    silent.ended.set()
    assert len(notes) == 1
    assert "no answer" in notes[0]


@pytest.mark.parametrize("library", ["wandb", "mlflow"])
def test_missing_library_is_an_error_that_names_the_extra(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = runs.write_config(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    need_trackers(load(config))
    with pytest.raises(MissingExtra, match=rf"(?s){library} is not installed.*\[{library}\]"):
        need_trackers(load(config, [f"logging.{library}=true"]))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_itself_takes_a_stopped_and_resumed_run_offline(tmp_path: Path) -> None:
    runs.write_texts(tmp_path / "texts")
    logging = {"tensorboard": False, "wandb": {"mode": "offline"}}
    config = str(runs.write_config(tmp_path, logging=logging))
    for stop_after in (3, None):
        ranks.run(_train, 2, str(tmp_path), config, [], stop_after, timeout_s=300)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["notes"] == []
    known = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    folders = [path.name for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert all(name.endswith(known) for name in folders)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_itself_takes_a_stopped_and_resumed_run_in_files(tmp_path: Path) -> None:
    runs.write_texts(tmp_path / "texts")
    uri = (tmp_path / "mlruns").as_uri()
    config = str(runs.write_config(tmp_path, logging={"tensorboard": False, "mlflow": {"tracking_uri": uri}}))
    for stop_after in (3, None):
        ranks.run(_train, 2, str(tmp_path), config, [], stop_after, timeout_s=300)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["notes"] == []
    known = json.loads((tmp_path / "run" / "trackers.json").read_text())["mlflow"]
    (file,) = (tmp_path / "mlruns").glob(f"*/{known}/metrics/loss/train")
    rows = [line.split() for line in file.read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in runs.metrics(tmp_path / "run")}
    assert {int(step): float(value) for _, value, step in rows} == losses
