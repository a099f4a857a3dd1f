"""Rank 0's account of a run: metrics, progress, summary, report."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from fullshard.api import plan
from fullshard.link_speeds import recall_speeds
from fullshard.training import holdings
from fullshard.training.display import Display
from fullshard.training.logs import Logs
from fullshard.training.loop import Job, Run, Watcher
from fullshard.training.report import write_report
from fullshard.version import VERSION


@dataclass(frozen=True)
class Ending:
    """How a run ended, as all ranks know it."""

    status: str
    held: list[dict[str, int]]
    peaks: list[int]
    sample: str
    model_saved: bool


class Reporter(Watcher):
    """Shows every step and writes it down."""

    def __init__(self, job: Job, run: Run, quiet: bool) -> None:
        self._job, self._folder = job, job.folder
        settings = job.settings
        self.display = Display(settings.training.steps, quiet)
        self._logs = Logs(settings, job.folder, run.done, self._note)
        self._begun_s = time.time()
        self._summary = _describe(job, run)
        earlier = job.folder.read("summary.json") or {}
        # The summary of a run that was done already stays as it was: these ranks did nothing.
        kept = ("held", "peaks", "sample") if run.done < settings.training.steps else tuple(earlier)
        if run.done:
            self._summary |= {name: earlier[name] for name in kept if name in earlier}
        self._summary["seconds_before"] = earlier.get("seconds", 0.0) if run.done else 0.0
        self._write(f"running since {time.strftime('%Y-%m-%d %H:%M:%S')}")

    def open(self, run: Run, resumed: str | None) -> None:
        settings, subject = self._job.settings, self._job.subject
        sharding = settings.sharding
        where = "one GPU each" if self._job.device.type == "cuda" else "on the CPU"
        memory = "allocated on its GPU" if self._job.device.type == "cuda" else "resident in its process"
        precision: str = sharding.precision
        if sharding.state != "exact":
            precision += f", {sharding.state} optimizer state"
        if sharding.offload is not None:
            precision += f", offload {sharding.offload if isinstance(sharding.offload, str) else 'by budget'}"
        tokens = len(self._job.train) * settings.training.sequence_length
        lines = [
            f"{subject.name} of {subject.num_parameters:,} parameters, {tokens:,} tokens to train on.",
            f"Sharded with {plan(run.model).strategy} over {run.ranks} ranks, {where}, {precision}.",
            f"Memory is each rank's, {memory}.",
        ]
        lines += run.notes
        if run.done >= settings.training.steps:
            lines.append(f"All {run.done} steps were done already.")
        elif resumed is not None:
            lines.append(f"Resumes after step {run.done} of {settings.training.steps}, from {resumed}.")
        self.display.show("\n".join(lines))
        self.display.start(run.done)

    def step(self, line: dict[str, Any], shown: bool) -> None:
        self._logs.write(line)
        if shown:
            self.display.step(line)

    def evaluated(self, line: dict[str, Any]) -> None:
        self._logs.write(line)
        self.display.evaluated(line["step"], line["loss"])

    def close(self, ending: Ending, resume: str) -> None:
        """Write the summary and the report, and show the last lines."""
        self.display.stop()
        self._logs.close(ending.model_saved)
        if ending.held:
            self._summary |= {"held": ending.held, "peaks": ending.peaks}
        if ending.sample:
            self._summary["sample"] = ending.sample
        self._write(ending.status)
        report = write_report(self._folder)
        self._show_losses()
        if ending.held:
            self.display.held(ending.held, self._summary["whole"], ending.peaks)
        if ending.sample:
            self.display.sample(ending.sample)
        self.display.show(f"{ending.status[0].upper()}{ending.status[1:]}.")
        if ending.model_saved:
            self.display.show(f"Model: {self._folder.model}")
        if resume:
            self.display.show(resume)
        self.display.show(f"Report: {report}")

    def _note(self, text: str) -> None:
        """About how the run is done, for the terminal and the report."""
        self._summary["notes"] = [*self._summary["notes"], text]
        self.display.show(text)

    def _show_losses(self) -> None:
        lines = [line for line in self._folder.read_metrics() if line["kind"] == "train"]
        if lines:
            first, last = lines[0], lines[-1]
            self.display.show(
                f"Loss {first['loss']:.3f} at step {first['step']}, "
                f"{last['loss']:.3f} at step {last['step']}."
            )

    def _write(self, status: str) -> None:
        seconds = self._summary["seconds_before"] + time.time() - self._begun_s
        self._folder.write("summary.json", self._summary | {"status": status, "seconds": seconds})


def _describe(job: Job, run: Run) -> dict[str, Any]:
    """What is known of a run at its beginning."""
    planned, speeds = plan(run.model), recall_speeds()
    replicated = planned.strategy == "replicate"
    tensors = sum(1 for p in run.model.parameters() if p.requires_grad)
    return {
        "model": job.subject.name,
        "parameters": job.subject.num_parameters,
        "ranks": run.ranks,
        "device": job.device.type,
        "notes": run.notes,
        "steps": job.settings.training.steps,
        "strategy": planned.strategy,
        "units": [
            {
                "name": unit.name,
                "elements": unit.num_elements,
                "rest": sum(lane.rest_bytes(replicated) for lane in unit.lanes),
                "full": unit.full_bytes,
                "gathers": gathers,
            }
            for unit, gathers in zip(planned.units, planned.schedule.gathers, strict=True)
        ],
        "full_at_peak": planned.full_bytes_at_peak,
        "sent_per_step": planned.wire_bytes_per_step,
        "whole": holdings.of_one_process(planned, tensors).as_dict(),
        "links": None if speeds is None else asdict(speeds),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    versions = {"fullshard": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    for library in ("numpy", "transformers", "tokenizers"):
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        versions["GPU"] = torch.cuda.get_device_name()
    return versions
