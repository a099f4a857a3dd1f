"""`fullshard train CONFIG.yaml`: check everything, start the ranks, wait, and report an error once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fullshard import environment
from fullshard.errors import FullshardError, OptionError
from fullshard.stop_signals import SIGNALS, Interrupts, exit_code
from fullshard.text_files import replace_text
from fullshard.training import models
from fullshard.training.folder import RunFolder
from fullshard.training.preparing import choose_device, prepare
from fullshard.training.report import write_report
from fullshard.training.session import RankArguments, is_printed_by_rank_0, run_rank
from fullshard.training.settings import Settings, check_ranks, load


class RunFailed(FullshardError):
    """What ended a run on its ranks."""


def train(config_path: Path, overrides: list[str], ranks: int | None, quiet: bool) -> int:
    """Train what a config describes; 0 when it is done or its time limit is over, 128 + n after signal n.

    Starts its own ranks, as `torchrun --standalone` does, or is one rank if torchrun has started it. Whatever
    is wrong is raised as a FullshardError, once, and before ranks are started where that can be known.
    """
    if environment.launch().rendezvous:
        if ranks is not None:
            raise OptionError(
                f"--ranks {ranks} was given to one of the ranks that torchrun started",
                "Leave it out; torchrun's --nproc-per-node sets the number.",
            )
        try:
            return exit_code(run_rank(RankArguments(config_path, overrides, quiet)))
        except FullshardError as error:
            if is_printed_by_rank_0(error):
                return 2
            raise
    settings = load(config_path, overrides)
    count = _count(settings, ranks)
    check_ranks(settings, count)
    choose_device(settings, count)
    prepared = prepare(settings)
    models.build(settings, prepared.tokenizer.size)
    folder = RunFolder(settings.output)
    lock = folder.lock()
    try:
        folder.begin(prepared.fixed, settings.as_dict())
        with tempfile.TemporaryDirectory(prefix="fullshard-train-") as private:
            (Path(private) / "rows.json").write_text(json.dumps(prepared.rows()))
            return _Launch(Path(private), count, folder).run(_worker_arguments(config_path, overrides, quiet))
    finally:
        os.close(lock)


def _count(settings: Settings, ranks: int | None) -> int:
    if ranks is not None:
        if ranks < 1:
            raise OptionError(f"--ranks is {ranks}", "Give a number of at least 1.")
        return ranks
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return max(1, gpus if settings.device != "cpu" else 0)


def _worker_arguments(config: Path, overrides: list[str], quiet: bool) -> list[str]:
    arguments = [str(config)]
    for text in overrides:
        arguments += ["--set", text]
    return [*arguments, "--quiet"] if quiet else arguments


@dataclass
class _Launch:
    """Ranks under torchrun's agent, which runs in a thread, so that signals are handled here.

    The agent itself would pass a signal on and kill ranks that still run after 30 seconds; a large checkpoint
    takes longer. Instead ranks save and stop when a file appears. A second Ctrl-C ends them at once.
    """

    private: Path
    ranks: int
    folder: RunFolder
    _interrupts: Interrupts = field(default_factory=Interrupts)
    _killed_by: int = 0
    _problem: BaseException | None = None

    def run(self, arguments: list[str]) -> int:
        thread = threading.Thread(target=self._agent, args=(arguments,), name="torchrun", daemon=True)
        with self._listening():
            thread.start()
            while thread.is_alive():
                thread.join(0.2)
        outcome = self.private / "outcome.json"
        if self._problem is None and outcome.is_file():
            stopped = int(json.loads(outcome.read_text())["stopped"])
            return exit_code(stopped)
        if self._killed_by:
            self._leave_report("stopped at once, without a checkpoint")
            return exit_code(self._killed_by)
        raise self._failure()

    def _agent(self, arguments: list[str]) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the error of the ranks is raised below, once
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # what --standalone means
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(self.private / "torchrun")),
        )
        private = ["--private", str(self.private), "--launcher", str(os.getpid())]
        try:
            elastic_launch(config, sys.executable)("-m", "fullshard.training.worker", *arguments, *private)
        except BaseException as error:  # noqa: BLE001  raised in the main thread, or explained there
            self._problem = error

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # a caller with threads of its own keeps its signals
            return
        before: dict[signal.Signals, Callable[..., Any] | int | None] = {
            number: signal.signal(number, self._on_signal) for number in SIGNALS
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._interrupts.is_second(number):
            self._killed_by = number
            for file in self.private.glob("rank-*.pid"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
            return
        if (self.private / "stop").exists():
            return
        replace_text(self.private / "stop", str(number))
        name = signal.Signals(number).name
        sys.stderr.write(f"\nfullshard: {name}: saves after this step and stops; Ctrl-C again: at once\n")

    def _failure(self) -> RunFailed:
        """The one error that explains the others: ranks that wait for a failed one only report a stall."""
        errors = {int(f.stem.partition("-")[2]): json.loads(f.read_text()) for f in self._error_files()}
        chosen = min(errors, key=lambda r: (errors[r]["stalled"], "what" not in errors[r], r), default=None)
        silent = _ended_without_error(self._problem, set(errors))
        follows = chosen is None or errors[chosen]["stalled"] or "what" not in errors[chosen]
        if chosen is None or (silent and follows):
            what = silent or f"the ranks could not be started: {self._problem!r}"
            remedy = "It may have been out of memory; look at the system's log."
        elif "what" in errors[chosen]:
            what, remedy = errors[chosen]["what"], errors[chosen]["remedy"]
        else:
            sys.stderr.write(errors[chosen]["traceback"])
            what = f"rank {chosen} failed: {errors[chosen]['traceback'].strip().splitlines()[-1]}"
            remedy = "Its traceback is above."
        self._leave_report(f"failed: {what}")
        return RunFailed(what, remedy)

    def _error_files(self) -> list[Path]:
        return list(self.private.glob("error-*.json"))

    def _leave_report(self, status: str) -> None:
        """A report with what is known of a run that did not write its own."""
        with contextlib.suppress(FullshardError, OSError, KeyError):
            summary = self.folder.read("summary.json")
            if summary is not None and self.folder.read_metrics():
                self.folder.write("summary.json", summary | {"status": status})
                write_report(self.folder)


def _ended_without_error(problem: BaseException | None, known: set[int]) -> str:
    """How the first rank ended that left no error and whose end torchrun's agent knows; or empty."""
    failures: dict[int, Any] = getattr(problem, "failures", {})
    for rank, failure in sorted(failures.items()):
        code = failure.exitcode
        if rank in known or code == -signal.SIGTERM:  # the agent's own signal, after another rank's end
            continue
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} {ended} without an error message"
    return ""
