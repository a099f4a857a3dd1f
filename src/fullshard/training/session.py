"""One rank's part of a run, from its first check to its last line."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fullshard import environment
from fullshard.checkpoint.commit import is_checkpoint, read_manifest
from fullshard.checkpoint.save import save
from fullshard.checkpoint.tools.export import DTYPES
from fullshard.comm import groups
from fullshard.comm.control import end_groups, raise_together_first
from fullshard.errors import CheckpointError, FullshardError
from fullshard.training import models
from fullshard.training.folder import RunFolder
from fullshard.training.loop import Job, Run, Watcher
from fullshard.training.preparing import Prepared, choose_device, prepare
from fullshard.training.reporter import Ending, Reporter
from fullshard.training.sampling import write_sample
from fullshard.training.settings import Settings, check_ranks, load
from fullshard.training.stopping import TIME_IS_UP, StopRequest

_ON_ALL_RANKS = "raised_on_all_ranks"  # an attribute of an error


@dataclass(frozen=True)
class RankArguments:
    """How a rank was started. `rows`: tokens that `fullshard train` made; None under a plain torchrun."""

    config: Path
    overrides: Sequence[str]
    quiet: bool
    rows: Mapping[str, str | None] | None = None
    note: Path | None = None  # a file that the launcher writes to stop the run

    def command(self, ranks: int) -> str:
        """The command that resumes the run."""
        words = ["fullshard", "train", str(self.config)]
        words += [] if self.rows is None else ["--ranks", str(ranks)]
        for text in self.overrides:
            words += ["--set", text]
        return shlex.join(words)


def run_rank(arguments: RankArguments) -> int:
    """Train as one rank of those that torchrun started; returns what stopped it, or 0.

    A problem on one rank before training is raised on all ranks.
    """
    share_cores()
    groups.start()
    with contextlib.ExitStack() as stack:
        stopped = _begin_and_train(arguments, stack)
        # A group ends, and its threads with it, when nothing holds it. The model does, and is part of cycles;
        # the first time frees the graph that holds it. A thread that still lets go of a tensor when Python
        # ends aborts the process.
        for _ in range(2):
            gc.collect()
        end_groups()
        return stopped


def _begin_and_train(arguments: RankArguments, stack: contextlib.ExitStack) -> int:
    with _raised_on_all_ranks():
        job, prepared = _together(lambda: _check_and_build(arguments, stack))
        run = Run(job)
        resumed = run.begin()
    stop = StopRequest(job.settings.training.time_limit_s, arguments.note)
    stack.enter_context(stop.listening())
    return _train(arguments, prepared, run, resumed, stop)


@contextlib.contextmanager
def _raised_on_all_ranks() -> Iterator[None]:
    """Marks errors that every rank raises, so that only rank 0 prints them."""
    try:
        yield
    except FullshardError as error:
        error.__dict__[_ON_ALL_RANKS] = True
        raise


def is_printed_by_rank_0(error: Exception) -> bool:
    """Whether this is another rank, and the error is raised on all."""
    return groups.own_rank() != 0 and _ON_ALL_RANKS in error.__dict__


def _together(work: Callable[[], tuple[Job, Prepared]]) -> tuple[Job, Prepared]:
    problem: FullshardError | None = None
    result = None
    try:
        result = work()
    except FullshardError as error:
        problem = error
    raise_together_first(problem, None)
    assert result is not None
    return result


def share_cores() -> None:
    """Divide the machine's cores between its ranks, unless fewer threads are set already."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // environment.launch().local_ranks)))


def _check_and_build(arguments: RankArguments, stack: contextlib.ExitStack) -> tuple[Job, Prepared]:
    settings = load(arguments.config, arguments.overrides)
    check_ranks(settings, groups.rank_count())
    device = choose_device(settings, environment.launch().local_ranks)
    prepared = prepare(settings, arguments.rows)
    subject = models.build(settings, prepared.tokenizer.size)
    folder = RunFolder(settings.output)
    if arguments.rows is None and groups.own_rank() == 0:
        stack.callback(os.close, folder.lock())
        folder.begin(prepared.fixed, settings.as_dict())
    train, validation = prepared.sequences(settings)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return Job(settings, subject, train, validation, folder, device), prepared


def _train(
    arguments: RankArguments, prepared: Prepared, run: Run, resumed: Path | None, stop: StopRequest
) -> int:
    job, settings = run.job, run.job.settings
    reporter = Reporter(job, run, arguments.quiet) if run.rank == 0 else None
    if reporter is not None:
        reporter.open(run, None if resumed is None else str(resumed))
    stopped, steps = 0, run.done
    if run.done < settings.training.steps:
        stopped = run.train(reporter or Watcher(), stop)
        run.save_last()
    held, peaks = run.gather_holdings() if run.done > steps else ([], [])
    sample, finished = "", run.done >= settings.training.steps
    # Not after a signal, whose sender may not wait long.
    if settings.sample.tokens and run.done > steps and stopped <= 0:
        sample = write_sample(run.model, job.subject, prepared.tokenizer, settings.sample, job.device)
    if finished:
        _save_model(job, run, prepared)
    if reporter is not None:
        ending = Ending(_status(run, stopped, settings), held, peaks, sample, finished)
        reporter.close(ending, "" if finished else f"To resume: {arguments.command(run.ranks)}")
    return 0 if finished else stopped


def _status(run: Run, stopped: int, settings: Settings) -> str:
    if run.done >= settings.training.steps:
        return f"all {run.done} steps are done"
    why = "the time limit" if stopped == TIME_IS_UP else signal.Signals(stopped).name
    return f"stopped by {why} after step {run.done} of {settings.training.steps}; checkpoint {run.saved}"


def _save_model(job: Job, run: Run, prepared: Prepared) -> None:
    """The model alone, for use, together with its tokenizer."""
    folder, dtype = job.folder.model, job.settings.checkpoints.model_dtype
    made = {"step": run.done, "dtype": dtype}
    is_new = _made_of(folder) != made  # a run that was resumed with more steps has another model now
    if is_new:
        save(folder, run.model, extra=made, dtype=DTYPES[dtype])
    # A run that was killed right after the save has a model without its tokenizer.
    if run.rank == 0 and (is_new or not (folder / "tokenizer_config.json").exists()):
        prepared.tokenizer.save(folder)


def _made_of(folder: Path) -> dict[str, object]:
    """The step and the dtype that a saved model is of; empty if there is none."""
    try:
        return dict(read_manifest(folder).extra) if is_checkpoint(folder) else {}
    except CheckpointError:
        return {}
